"""AutoLR against the reference that is written to be read, step by step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hdet import AutoLR, reference
from hdet.controllers import LevelController
from hdet.controllers.base import Evidence
from hdet.policy.rollback import Rollback
from tiers import slow

Array = np.ndarray[Any, Any]
Make = Callable[[nn.Module, Optimizer, int], Any]
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "momentum": lambda groups: SGD(groups, momentum=0.9),
}


def by_default(model: nn.Module, optimizer: Optimizer, total_steps: int) -> AutoLR:
    return AutoLR(optimizer, model=model, total_steps=total_steps)


def readable(model: nn.Module, optimizer: Optimizer, total_steps: int) -> reference.AutoLR:
    return reference.AutoLR(optimizer, total_steps)


class Run(NamedTuple):
    lrs: Array
    weights: Array
    scheduler: Any


def train(
    make: Make, kind: str, *, seed: int, total_steps: int, noise: float = 0.3, change: Change = lambda _, x, y: (x, y)
) -> Run:
    """A regression; ``change``: what becomes of the batch of a step."""
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=draw, dtype=torch.float64))
    groups = [{"params": [*model[0].parameters()], "lr": 0.7}, {"params": [*model[2].parameters()], "lr": 2.1}]
    optimizer = OPTIMIZERS[kind](groups)
    scheduler = make(model, optimizer, total_steps)
    lrs, weights = [], []
    for step in range(total_steps):
        x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
        y = torch.sin(2 * x.sum(1, keepdim=True)) + noise * torch.randn(8, 1, generator=draw, dtype=torch.float64)
        x, y = change(step, x, y)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        lrs.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step(loss)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())
    return Run(np.array(lrs), np.array(weights), scheduler)


def compared(make: Make, kind: str, **settings: Any) -> tuple[Run, Run]:
    """Train with both, and hold them equal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*undone")
        real = train(make, kind, **settings)
    want = train(readable, kind, **settings)
    assert_allclose(real.lrs, want.lrs, rtol=1e-10, err_msg="learning rates")
    assert_allclose(real.weights, want.weights, rtol=1e-8, atol=1e-9, err_msg="weights")
    return real, want


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("seed", "total_steps"), [(0, 6), (1, 20), (2, 97), slow(3, 160)])
def test_every_step_is_that_of_the_reference(kind: str, seed: int, total_steps: int) -> None:
    compared(by_default, kind, seed=seed, total_steps=total_steps)


@pytest.mark.parametrize("kind", ["adamw", slow("sgd")])
def test_by_default_too(kind: str) -> None:
    """T = 5, and a round of a single step after the search."""
    compared(by_default, kind, seed=4, total_steps=500)


HARD: dict[str, tuple[str, int, float, Change]] = {
    "batches of outliers": ("adamw", 120, 0.3, lambda step, x, y: (x, y + 1000 * (step in (60, 97)))),
    "weights that are not finite": ("momentum", 60, 0.3, lambda step, x, y: (x * (math.nan if step == 30 else 1), y)),
    "data that change": ("adamw", 160, 0.3, lambda step, x, y: (x, y + 6 * (step >= 80))),
    "a loss that rises": ("sgd", 300, 3.0, lambda step, x, y: (x, y * (1 + step / 20))),
    "a slope that costs": ("momentum", 160, 0.02, lambda step, x, y: (x, y + 3 * math.sin(step / 30))),
    "far from the target": ("sgd", 120, 0.3, lambda step, x, y: (x, y + 300)),
    "gradients far above a sign": ("adamw", 120, 0.3, lambda step, x, y: (x, y + 300)),
}
ROLLBACKS = {"weights that are not finite": 1, "data that change": 3}


@pytest.mark.parametrize("name", HARD)
def test_in_hard_cases_too(name: str) -> None:
    kind, total_steps, noise, change = HARD[name]
    seed = 3 if "slope" in name else 8
    real, want = compared(by_default, kind, seed=seed, total_steps=total_steps, noise=noise, change=change)
    assert real.scheduler.history[-1].num_rollbacks == ROLLBACKS.get(name, 0)
    anchor_moved = not np.allclose(want.scheduler.anchor, want.weights[0])
    assert anchor_moved == (name in ("a loss that rises", "data that change"))


@pytest.mark.parametrize(
    ("slope", "update"), [(-0.3, 0.003), (-0.03, 0.001), (-0.03, 0.02), (0.012, 0.02), (0.06, 0.02)]
)
def test_caution_of_large_models_ends_alike(slope: float, update: float) -> None:
    """The gain is 0.3: slopes that ask for more (one is certain), are cheap and are not; small and large updates."""
    draw, interval = np.random.default_rng(0), 10
    want = readable(nn.Module(), SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1000)
    controller, moved = LevelController(), []
    want.start, want.noise, state = 2.0, 0.01, controller.init(1)
    uncautious = controller.init(1)
    for step in range(interval, 700, interval):
        loss, before = 2 - 0.3 * math.log(step) + 0.005 * draw.normal(), want.scale
        want.num_steps, want.losses = step, [loss] * interval
        want.samples = (slope + 0.01 * draw.normal(size=interval)).tolist()
        want.adapt(loss, update, 1 / 3, in_warmup=False)
        seen = Evidence(
            np.array([loss]), np.ones((1, 1)),
            (np.array([np.mean(want.samples)]), np.array([np.std(want.samples, ddof=1) / math.sqrt(interval)])),
            elapsed=min(math.log(step / max(step - interval, 1)), 0.7), start=(2.0, 0.01 * math.sqrt(0.25 + 0.1)),
            update=update, ease=1 / 3, progress=step / 700, scales=np.array([before]),
        )  # fmt: skip
        state, decision = controller.update(state, seen)
        assert float(decision.factors[0]) == pytest.approx(want.scale / before, rel=1e-9)
        uncautious, without = controller.update(uncautious, seen._replace(ease=1.0))
        moved.append(decision.factors[0] / without.factors[0])
    assert (np.max(moved) > 1.001) == (slope < 0.05)  # caution that ends


def test_of_many_rounds_several_count_as_one() -> None:
    """No run of a test is that long."""
    draw = np.random.default_rng(0)
    controller = LevelController()
    state, rounds = controller.init(1), []
    for index in range(300):
        slope, loss = float(draw.normal()), float(3 - 0.3 * math.log(1 + index) + 0.05 * draw.normal())
        rounds.append((slope, 1.0, loss))
        evidence = Evidence(np.array([loss]), np.ones((1, 1)), (np.array([slope]), np.ones(1)), scales=np.ones(1))
        state, decision = controller.update(state, evidence)
        progress, cost, *_ = reference.look_back(rounds)
        if index >= 7:
            assert decision.info["progress"][0] == pytest.approx(progress, rel=1e-9)
            assert decision.info["cost_over_gain"][0] == pytest.approx(cost, rel=1e-9, abs=1e-12)


def test_the_guard_calls_the_same_rounds_broken() -> None:
    """Losses that fall, jump, come back to where they began, and stay there."""
    draw, outcomes = np.random.default_rng(0), set()
    for _ in range(300):
        interval = int(draw.choice([4, 8, 20]))
        noise = float(draw.choice([0.003, 0.02, 0.2]))
        real, want = Rollback(20, interval=interval), reference.Guard(interval)
        real.expect(3.0, noise)
        want.expect(3.0, noise)
        level, share = 3.0, float(draw.choice([0.0, 0.1, 0.5]))
        for _ in range(40):
            level = float(
                draw.choice([0.9 * level, 3.0, 1.5, math.nan], p=[0.9 - 0.5 * share, 0.5 * share, 0.05, 0.05])
            )
            loss = level + noise * float(draw.normal())
            level = 2.0 if math.isnan(level) else level
            broken = want.is_broken(loss)
            assert real.is_broken(np.array([loss]), weights_fine=True, losses_given=True, step=1) == broken
            assert real.doubtful == (want.num_lost > 0)
            outcomes.add((broken, want.num_lost > 0, math.isnan(want.noise)))
    assert {(True, True, False), (True, False, False), (False, False, True), (False, False, False)} <= outcomes
