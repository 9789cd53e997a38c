"""A sweep on the stacked engine against AutoLR and OneCycleAutoLR on real processes, step for step."""

from __future__ import annotations

import functools
import warnings
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hdet import Adapt, AutoLR, Ensemble, OneCycleAutoLR
from hdet.launch import launch
from hdet_lab.recipes import schedule_table
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import TextTask, batch_of
from hdet_lab.tasks.base import param_groups

STEPS, INTERVAL = 40, 4


class DoubleText(TextTask):
    """In float64, so that rounding does not hide a difference."""

    def build(self, seed: int = 0) -> nn.Module:
        return super().build(seed).double()


def make_task() -> DoubleText:
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 11, 600)).cumsum(0) % 11
    return DoubleText(
        "tiny", text, 11, total_steps=STEPS, batch_rows=8, num_validation=12, context=6, num_layers=1, width=8,
        num_heads=2,
    )  # fmt: skip


LOSS = Run(lr=0.02, method="loss", spread=0.1, interval=INTERVAL, start=0.03, hold=0.05, level=False)
GRADIENT = Run(lr=0.02, method="gradient", interval=INTERVAL, start=0.03, hold=0.05, level=False)
PAPER = Run(
    lr=0.02, method="paper", spread=0.3, interval=INTERVAL, start=0.0, hold=0.0, controller={"temperature": 0.01}
)
RUNS: dict[int, dict[str, tuple[str, Run]]] = {
    1: {
        "gradient": ("adam", GRADIENT),
        "gradient, level, a good hint": ("adam", replace(GRADIENT, level=True)),
        "gradient, level, too low": ("adam", replace(GRADIENT, lr=1e-4, level=True, seed=1)),
        "gradient, level, sgd": ("sgd", replace(GRADIENT, lr=0.1, level=True, seed=2)),
        "gradient, level, no schedule": ("adam", replace(GRADIENT, lr=1e-3, level=True, schedule="none")),
        "gradient, level, no schedule, sgd": ("sgd", replace(GRADIENT, lr=100.0, level=True, schedule="none")),
        "gradient, adamw": ("adamw", replace(GRADIENT, hold=0.2)),
        "gradient, breaks": ("sgd", replace(GRADIENT, lr=3.0)),
    },
    2: {
        "loss": ("adam", LOSS),
        "loss, sgd, other constants": (
            "sgd",
            replace(LOSS, lr=0.1, seed=3, controller={"smoothing": 0.8, "gain": 0.3}),
        ),
        "loss, level": ("adam", replace(LOSS, lr=1e-3, level=True, seed=1)),
        "paper": ("adam", PAPER),
    },
    4: {
        "loss": ("adam", LOSS),
        "loss, too high": ("adam", replace(LOSS, lr=0.1, seed=2)),
        "paper": ("sgd", replace(PAPER, lr=0.1)),
    },
}
RUNS = {n: {k: (o, replace(r, num_replicas=n)) for k, (o, r) in runs.items()} for n, runs in RUNS.items()}


def make_optimizer(name: str, groups: Any, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(0.9, 0.95))
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def make_scheduler(run: Run, optimizer: torch.optim.Optimizer, model: nn.Module) -> AutoLR | OneCycleAutoLR:
    schedule: dict[str, Any] = {"total_steps": STEPS, "pct_start": 0.1, "cycle_momentum": False}
    if run.method == "paper":
        return OneCycleAutoLR(
            optimizer,
            run.lr,
            **schedule,
            ensemble_lr_spread_ratio=run.spread,
            model_sync_interval=run.interval,
            auto_lr_warmup_steps=int((run.start or 0.02) * STEPS),
            enable_auto_lr=True,
            loss_scale=run.controller["temperature"],
            model=model,
            ensemble=Ensemble(seed=run.seed),
        )
    none = run.schedule == "none"
    return AutoLR(
        optimizer if none else OneCycleLR(optimizer, run.lr, **schedule),
        total_steps=STEPS,
        model=model,
        interval=run.interval,
        adapt=Adapt(
            controller=run.make_controller(),
            _start_steps=int((run.start or 0.0) * STEPS),
            _hold_share=run.hold,
            level=run.level,
        ),
        ensemble=None if run.method == "gradient" else Ensemble(spread=run.spread, seed=run.seed),
    )


def train(optimizer_name: str, run: Run) -> dict[str, Any]:
    """The same run, the way a user would write it."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended")
    warnings.filterwarnings("ignore", "[0-9]+ rounds of this run")
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    task = make_task()
    model = task.build(run.seed)
    optimizer = make_optimizer(optimizer_name, param_groups(task, model), run.lr)
    scheduler = make_scheduler(run, optimizer, model)
    forward: nn.Module = DistributedDataParallel(model) if count > 1 else model
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(forward, batch_of(task, step, seed=run.seed, replica=rank, num_replicas=count))
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)
    history = scheduler.history
    return {
        "steps": [record.step for record in history],
        "base_lr": [record.base_values[0] for record in history],
        "train_loss": [float(np.mean([v for v in record.losses if np.isfinite(v)] or [np.nan])) for record in history],
        "z": [record.control["z"][0] if "z" in record.control else np.nan for record in history],
        "num_rollbacks": history[-1].num_rollbacks,
        "validation": task.evaluate(model)["loss"],
    }


def train_all(runs: dict[str, tuple[str, Run]]) -> dict[str, Any]:
    return {name: train(optimizer, run) for name, (optimizer, run) in runs.items()}


@functools.cache
def real(num_replicas: int) -> dict[str, Any]:
    if num_replicas == 1:
        with warnings.catch_warnings():
            return train_all(RUNS[1])
    results: list[dict[str, Any]] = launch(train_all, num_replicas, RUNS[num_replicas], timeout_s=150)
    return results[0]


@functools.cache
def swept(num_replicas: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for optimizer in ("adam", "sgd", "adamw"):
        chosen = {name: run for name, (kind, run) in RUNS[num_replicas].items() if kind == optimizer}
        if chosen:
            results = sweep(make_task(), list(chosen.values()), optimizer=optimizer, dtype=torch.float64)
            found.update(zip(chosen, results, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "name"), [(n, name) for n, runs in RUNS.items() for name in runs])
def test_a_swept_run_is_the_one_on_real_processes(num_replicas: int, name: str) -> None:
    mine, theirs = swept(num_replicas)[name], real(num_replicas)[name]
    assert mine.steps == theirs["steps"]
    assert len(mine.steps) == STEPS // INTERVAL + (3 if mine.run.level else 0)
    assert mine.num_rollbacks == theirs["num_rollbacks"]
    assert mine.num_rollbacks > 0 or name != "gradient, breaks"
    tolerance = 1e-6 if mine.num_rollbacks else 1e-8
    assert_allclose(mine.base_lr, theirs["base_lr"], rtol=tolerance)
    assert_allclose(mine.z, theirs["z"], rtol=1e-5, atol=1e-6)
    assert_allclose(mine.train_loss, theirs["train_loss"], rtol=tolerance)
    assert mine.validation["loss"] == pytest.approx(theirs["validation"], rel=tolerance)
    table = schedule_table(mine.run.schedule or "one-cycle", STEPS)[np.array(mine.steps) - 1]
    assert np.abs(np.log(np.array(mine.base_lr) / (table * mine.run.lr))).max() > 0.01


def test_a_fixed_run_is_the_schedule() -> None:
    [result] = sweep(make_task(), [Run(lr=0.02, interval=INTERVAL)], dtype=torch.float64)
    table = schedule_table("one-cycle", STEPS)
    assert_allclose(result.base_lr, 0.02 * table[INTERVAL - 1 :: INTERVAL])
    assert result.num_rollbacks == 0
    assert np.isnan(result.z).all()
    task = make_task()
    model = task.build(0)
    optimizer = make_optimizer("adam", param_groups(task, model), 0.02)
    schedule = OneCycleLR(optimizer, 0.02, STEPS, pct_start=0.1, cycle_momentum=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, batch_of(task, step)))
        optimizer.step()
        schedule.step()
    assert result.validation["loss"] == pytest.approx(task.evaluate(model)["loss"], rel=1e-8)


def test_runs_side_by_side_are_the_runs_alone_in_their_order() -> None:
    runs = [
        replace(LOSS, num_replicas=2),
        Run(lr=0.01, interval=INTERVAL),
        replace(GRADIENT, lr=0.001),
        replace(PAPER, num_replicas=2),
        replace(LOSS, num_replicas=4, interval=5),
    ]
    together = sweep(make_task(), runs, dtype=torch.float64, num_steps=20)
    for run, result in zip(runs, together, strict=True):
        [alone] = sweep(make_task(), [run], dtype=torch.float64, num_steps=20)
        assert result.run == run
        assert_allclose(result.base_lr, alone.base_lr, rtol=1e-9)
        assert_allclose(result.train_loss, alone.train_loss, rtol=1e-9)
        assert result.validation["loss"] == pytest.approx(alone.validation["loss"], rel=1e-9)
    assert set(together[0].as_dict()) == {"run", *asdict(together[0]).keys()}


@pytest.mark.parametrize("name", ["one-cycle", "cosine", "wsd", "constant"])
def test_schedules_have_their_peak_at_1_and_stay_positive(name: str) -> None:
    table = schedule_table(name, 200)
    assert table.max() == pytest.approx(1.0, abs=0.01)
    assert (table > 0).all()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    AutoLR(LambdaLR(optimizer, lambda step: float(table[step])))  # what a user would wrap
    with pytest.raises(
        ValueError, match="schedule must be one of one-cycle, cosine, wsd, constant, none, but got 'square'"
    ):
        schedule_table("square", 10)
