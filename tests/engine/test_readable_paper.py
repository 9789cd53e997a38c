"""OneCycleAutoLR on real processes against the reference that is written to be read, step by step."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Adapt, AutoLR, Ensemble, Faults, OneCycleAutoLR
from hdet.ensemble.controllers import PaperController
from hdet.ensemble.reference import Replica, Schedule, geometric, one_cycle, shuffled, train
from hdet.policy.spread import permutation
from job import launch
from native import batch, net, replicated

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    kind: str
    max_lr: tuple[float, ...]  # one for all, or one for each of four tensors
    total_steps: int = 22
    interval: int = 4
    warmup_steps: int = 0
    temperature: float = 0.05
    decay: Literal["schedule", "floor", "printed"] = "schedule"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    absolute: bool = False
    seed: int = 0


FOUR = (0.05, 0.02, 0.08, 0.03)
CASES = {
    "sgd": Case("sgd", (0.2,), total_steps=24),
    "momentum": Case("momentum", FOUR, interval=5, seed=1),
    "adam, a warm-up": Case("adam", FOUR, warmup_steps=9, seed=2),
    "adamw": Case("adamw", FOUR, temperature=0.5, seed=3),
    "a converge after every step": Case("momentum", (0.05,), total_steps=9, interval=1, seed=4),
    "floor": Case("sgd", FOUR, decay="floor", final_div_factor=10.0, seed=5),
    "printed": Case("adam", (0.05,), decay="printed", div_factor=9.0, final_div_factor=0.5, warmup_steps=8, seed=6),
    "an absolute velocity": Case("adam", FOUR, absolute=True, div_factor=4.0, final_div_factor=1.0, seed=7),
}
ASCENDS = Case("sgd", (0.2,), absolute=True, total_steps=40, interval=2)
WHO = {
    1: ("sgd", "momentum", "adamw"),
    2: tuple(CASES),
    4: ("momentum", "adamw", "floor"),
    8: ("momentum", "adam, a warm-up"),
}


def make_optimizer(kind: str, model: nn.Module, num_groups: int) -> Optimizer:
    parameters = list(model.parameters())
    params: Any = parameters if num_groups == 1 else [{"params": [p]} for p in parameters]
    match kind:
        case "adam":
            return Adam(params, lr=1.0)
        case "adamw":
            return AdamW(params, lr=1.0, weight_decay=0.1)
    return SGD(params, lr=1.0, momentum=0.9 if kind == "momentum" else 0.0)


def flat(model: nn.Module) -> Array:
    flattened: Array = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return flattened


def make_scheduler(case: Case, optimizer: Optimizer) -> OneCycleAutoLR | AutoLR:
    if not case.absolute:
        return OneCycleAutoLR(
            optimizer,
            list(case.max_lr),
            case.total_steps,
            cycle_momentum=False,
            div_factor=case.div_factor,
            final_div_factor=case.final_div_factor,
            ensemble_lr_spread_ratio=0.4,
            model_sync_interval=case.interval,
            auto_lr_warmup_steps=case.warmup_steps,
            enable_auto_lr=True,
            loss_scale=case.temperature,
            decay=case.decay,
            ensemble=Ensemble(seed=case.seed),
        )
    return AutoLR(
        OneCycleLR(
            optimizer,
            list(case.max_lr),
            case.total_steps,
            cycle_momentum=False,
            div_factor=case.div_factor,
            final_div_factor=case.final_div_factor,
        ),
        interval=case.interval,
        adapt=Adapt(
            anchor="round",
            controller=PaperController(case.temperature, velocity="absolute"),
            _start_steps=case.warmup_steps,
            _hold_share=0.0,
            groups="each",
        ),
        faults=Faults(max_rollbacks=0),
        ensemble=Ensemble(spread=0.4, seed=case.seed),
    )


def by_library(names: tuple[str, ...]) -> dict[str, tuple[Array, Array]]:
    """On one of N processes: learning rates and weights of this replica, after each step."""
    warnings.filterwarnings("ignore", message="ensemble_lr_spread_ratio=.* has no effect with one replica")
    found = {}
    for name in names:
        case, model = CASES[name], net()
        wrapped = replicated(model)
        optimizer = make_optimizer(case.kind, model, len(case.max_lr))
        scheduler = make_scheduler(case, optimizer)
        lrs, weights = [], []
        for step in range(case.total_steps):
            x, y = batch(step, dist.get_rank(), 8)
            loss = nn.functional.mse_loss(wrapped(x), y)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            lrs.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step(loss)
            weights.append(flat(model))
        found[name] = np.array(lrs), np.array(weights)
    return found


def schedule(case: Case, max_lr: float) -> Schedule:
    factors = {"div_factor": case.div_factor, "final_div_factor": case.final_div_factor}
    at = one_cycle(max_lr, case.total_steps, **factors)
    if case.decay == "schedule":
        return at
    begins = max(float(case.warmup_steps), 0.3 * case.total_steps - 1)
    ratio = case.div_factor / case.final_div_factor
    if case.decay == "floor":
        ratio = at(begins) / (max_lr / case.div_factor / case.final_div_factor)
    return geometric(at, begins, case.total_steps, ratio)


def by_reference(case: Case, num_replicas: int) -> tuple[Array, Array]:
    """Of all replicas."""
    models = [net() for _ in range(num_replicas)]

    def loss(r: int, step: int) -> Tensor:
        x, y = batch(step, r, 8)
        return nn.functional.mse_loss(models[r](x), y)

    replicas = [
        Replica(model, make_optimizer(case.kind, model, len(case.max_lr)), functools.partial(loss, r))
        for r, model in enumerate(models)
    ]
    lrs, weights = [], []
    for used in train(
        replicas,
        [schedule(case, max_lr) for max_lr in case.max_lr],
        case.total_steps,
        interval=case.interval,
        spread=0.4,
        warmup_steps=case.warmup_steps,
        temperature=case.temperature,
        absolute=case.absolute,
        permutation=lambda n, index, k: permutation(n, seed=case.seed, round_index=index, knob=k).tolist(),
    ):
        lrs.append(used.T.numpy())
        weights.append([flat(model) for model in models])
    return np.array(lrs), np.array(weights)


@functools.cache
def run(num_replicas: int) -> list[dict[str, tuple[Array, Array]]]:
    return launch(by_library, num_replicas, WHO[num_replicas], timeout_s=150)


@pytest.mark.parametrize(
    ("num_replicas", "name"),
    [pytest.param(n, name, marks=[pytest.mark.slow] if n > 4 else []) for n, names in WHO.items() for name in names],
)
def test_every_step_is_that_of_the_reference(num_replicas: int, name: str) -> None:
    lrs, weights = by_reference(CASES[name], num_replicas)
    for r, found in enumerate(run(num_replicas)):
        assert_allclose(found[name][0], lrs[:, r], rtol=1e-10, err_msg="learning rates")
        assert_allclose(found[name][1], weights[:, r], rtol=1e-9, atol=1e-12, err_msg="weights")
    learned = lrs[-1].mean(axis=0) / [schedule(CASES[name], max_lr)(len(lrs) - 1) for max_lr in CASES[name].max_lr]
    assert (abs(learned - 1) > 1e-3).all() == (num_replicas > 1)


def ascend() -> tuple[float, str]:
    """The replica with the higher learning rate always does worse, and one-cycle falls towards zero."""
    model = net()
    optimizer = make_optimizer(ASCENDS.kind, model, 1)
    scheduler = make_scheduler(ASCENDS, optimizer)
    used = 0.0
    try:
        for _ in range(ASCENDS.total_steps):
            used = float(optimizer.param_groups[0]["lr"])
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            scheduler.step(100 * used)
    except RuntimeError as error:
        return used, str(error)
    return used, ""


def test_training_that_would_ascend_ends_in_an_error_on_every_rank() -> None:
    for used, error in launch(ascend, 2, timeout_s=150):
        assert used > 0
        assert 'learning rates must stay above 0, but Eq. 7 with velocity="absolute" moves that of number 0' in error
        assert "training would ascend" in error


def test_one_cycle_is_torchs() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    real = OneCycleLR(optimizer, 0.3, 50, cycle_momentum=False)
    at = one_cycle(0.3, 50)
    for step in range(50):
        assert real.get_last_lr()[0] == pytest.approx(at(step), rel=1e-12)
        optimizer.step()
        if step < 49:
            real.step()


def test_every_round_and_param_group_has_a_permutation_of_its_own() -> None:
    """Which one comes of a seed is a convention: the reference has one of its own."""
    before = torch.get_rng_state()
    drawn = [tuple(shuffled(8, round_index, group)) for round_index in range(1, 20) for group in range(3)]
    assert len(set(drawn)) > 50
    assert all(sorted(each) == list(range(8)) for each in drawn)
    assert torch.equal(torch.get_rng_state(), before)
