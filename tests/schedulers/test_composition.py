"""Beside other schedulers: what works, and what is refused with the line to write instead."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    SequentialLR,
    StepLR,
)

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs
from job import launch
from options import with_ensemble


def _optimizer(lr: float | Tensor = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=lr)


def _update(optimizer: torch.optim.Optimizer) -> float:
    loss = sum((p**2).sum() for group in optimizer.param_groups for p in group["params"])
    assert isinstance(loss, Tensor)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def _auto(optimizer: torch.optim.Optimizer, **settings: Any) -> AutoLR:
    return AutoLR(CosineAnnealingLR(optimizer, 40), **with_ensemble(**{"interval": 2, "level": False, **settings}))


@pytest.mark.parametrize("first", [False, True])
def test_inside_sequentiallr_autolr_is_refused_at_construction(first: bool) -> None:
    optimizer = _optimizer()
    warmup, auto = LinearLR(optimizer, 0.1, total_iters=5), _auto(optimizer)
    parts = [auto, warmup] if first else [warmup, auto]
    with pytest.raises(RuntimeError, match=r"as SequentialLR does .* AutoLR\(SequentialLR\(optimizer, \[warmup, cos"):
        SequentialLR(optimizer, parts, milestones=[5])


def test_around_sequentiallr_it_warms_up() -> None:
    optimizer = _optimizer()
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 40)]
    auto = AutoLR(SequentialLR(optimizer, parts, milestones=[5]), interval=2, adapt=Adapt(level=False))
    auto._run.policy.acting = (100, 100)  # the schedule alone
    for _ in range(5):
        auto.step(_update(optimizer))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("other", [lambda o: LinearLR(o, 0.1, total_iters=5), lambda o: ConstantLR(o, 0.1, 3)])
def test_inside_chainedscheduler_it_is_an_error_once_another_part_moves(first: bool, other: Any) -> None:
    optimizer = _optimizer()
    parts = [other(optimizer), _auto(optimizer)]
    chained = ChainedScheduler(parts[::-1] if first else parts, optimizer=optimizer)

    def train() -> None:
        for _ in range(5):
            _update(optimizer)
            chained.step()

    with pytest.raises(RuntimeError, match=r"must be left to AutoLR, .* AutoLR\(ChainedScheduler\(\[\.\.\.\]\)\)"):
        train()


@pytest.mark.parametrize("tensor", [False, True])
def test_a_scheduler_beside_it_is_an_error(tensor: bool) -> None:
    optimizer = _optimizer(torch.tensor(0.1) if tensor else 0.1)
    _train_beside(_auto(optimizer), optimizer)


def _train_beside(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    beside, name = StepLR(optimizer, step_size=3, gamma=0.1), type(scheduler).__name__

    def train() -> None:
        for _ in range(6):
            scheduler.step(_update(optimizer))
            beside.step()

    with pytest.raises(RuntimeError, match=rf"must be left to {name}, which set it to .* in param group 0, but found"):
        train()
    assert scheduler.last_epoch == 3


def _beside_the_papers() -> None:
    optimizer = _optimizer()
    spread = {"ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 4}
    _train_beside(OneCycleAutoLR(optimizer, 0.1, 40, cycle_momentum=False, **spread), optimizer)  # type: ignore[arg-type]


def test_a_scheduler_beside_the_papers_is_an_error() -> None:
    launch(_beside_the_papers, 2)


def test_a_learning_rate_set_by_hand_is_an_error() -> None:
    optimizer = _optimizer()
    auto = _auto(optimizer)
    auto.step(_update(optimizer))
    optimizer.param_groups[0]["lr"] *= 0.1
    with pytest.raises(RuntimeError, match=r"a line of the loop, has changed it\. .* a LambdaLR for what is changed"):
        auto.step(_update(optimizer))


@pytest.mark.parametrize("before", [False, True])
def test_the_wrapped_schedule_must_not_be_stepped_too(before: bool) -> None:
    optimizer = _optimizer()
    schedule = ExponentialLR(optimizer, 0.9)
    auto = AutoLR(schedule, interval=2)

    def train() -> None:
        for _ in range(2):
            loss = _update(optimizer)
            if before:
                schedule.step()
            auto.step(loss)
            schedule.step()

    with pytest.raises(RuntimeError, match=r"taken it from step \d to \d; delete schedule\.step\(\) from the loop"):
        train()


def test_loading_the_optimizer_is_no_foreign_change() -> None:
    optimizer = _optimizer()
    auto = _auto(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        auto.step(_update(optimizer))
    optimizer.load_state_dict(saved)
    auto.step(_update(optimizer))


def test_a_second_scheduler_of_ours_is_refused_while_the_first_is_at_work() -> None:
    optimizer = _optimizer()
    auto = _auto(optimizer)
    auto.step(_update(optimizer))
    with pytest.raises(ValueError, match=r"one scheduler of hdet, but it has AutoLR already, at step 1; pass knobs="):
        OneCycleAutoLR(optimizer, 0.1, 40)
    with pytest.raises(ValueError, match=r"must have one scheduler of hdet, but it has AutoLR already"):
        Explorer(nn.Linear(1, 1), optimizer, knobs=[knobs.LearningRate()], interval=2)
    auto.finish()
    other = _auto(optimizer)
    del other
    assert _auto(optimizer).last_epoch == 0


def test_a_round_that_breaks_is_undone_in_all_of_a_models_optimizers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    hidden, *others = model.parameters()
    optimizers = torch.optim.SGD([hidden], lr=0.1, momentum=0.9), torch.optim.AdamW(others)
    schedulers = [AutoLR(optimizer, total_steps=100) for optimizer in optimizers]
    seen: list[list[Tensor]] = []

    def train() -> None:
        for step in range(1, 61):
            seen.append([p.detach().clone() for p in model.parameters()])
            x = torch.randn(32, 8)
            loss = (model(x) - x[:, :1].sin()).square().mean() * (math.nan if step == 58 else 1.0)
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step(loss)
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="the round that ended at step 60 was undone"):
        train()
    assert [scheduler.history[-1].num_rollbacks for scheduler in schedulers] == [1, 1]
    for p, before in zip(model.parameters(), seen[52], strict=True):  # where the last healthy round began
        assert torch.equal(p, before)
