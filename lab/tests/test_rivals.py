"""Rules that set their own step size against slow references, and against their authors' packages where installed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.rivals import DAdaptAdam, DoG, Mechanic, NAdamW, Prodigy, RangeTest, Rule, ScheduleFree
from hdet_lab.tasks.base import batch_of
from hdet_lab.tasks.quadratic import QuadraticTask

STEPS = 40
TASK = QuadraticTask(dimension=7, noise=0.3, batch_rows=4, num_rows=64)
LRS = [0.3 + 0.7 * math.cos(step / 20) ** 2 for step in range(STEPS)]
Stepper = Callable[[Tensor, Tensor, float], Tensor]


def gradient_at(theta: Tensor, step: int) -> Tensor:
    draws = batch_of(TASK, step, seed=0)[0].double().mean(0)
    gradient: Tensor = TASK.eigenvalues.double() * (theta - TASK.optimum.double()) + draws
    return gradient


def train_stacked(rule: Rule) -> tuple[Tensor, Tensor]:
    """Weights and final weights of seed 0, which trains beside another seed."""
    engine = StackedModels(
        [TASK.build(0), TASK.build(1)], TASK.loss, {"weights": ["theta"]}, num_replicas=1, optimizer=rule,
        dtype=torch.float64,
    )  # fmt: skip
    for step in range(STEPS):
        rows = torch.stack([TASK.rows(step, seed=seed) for seed in (0, 1)]).unsqueeze(1)
        engine.step(TASK.gather(rows), torch.full((2, 1, 1), LRS[step], dtype=torch.float64))
    return engine.weights[0, 0], engine.final()[0]


def train_slowly(stepper: Stepper) -> Tensor:
    theta: Tensor = TASK.build(0).state_dict()["theta"].double()
    for step in range(STEPS):
        theta = stepper(theta, gradient_at(theta, step), LRS[step])
    return theta


def slow_nadamw() -> Stepper:
    first, second, count, powers = [0.0] * 7, [0.0] * 7, 0, (0.9, 0.999)

    def step(theta: Tensor, gradient: Tensor, lr: float) -> Tensor:
        nonlocal count
        count += 1
        moved = theta.clone()
        for i, g in enumerate(gradient.tolist()):
            first[i] = powers[0] * first[i] + (1 - powers[0]) * g
            second[i] = powers[1] * second[i] + (1 - powers[1]) * g * g
            ahead = powers[0] * first[i] / (1 - powers[0] ** (count + 1))
            ahead += (1 - powers[0]) * g / (1 - powers[0] ** count)
            size = math.sqrt(second[i] / (1 - powers[1] ** count)) + 1e-8
            moved[i] -= lr * (ahead / size + 0.1 * float(theta[i]))
        return moved

    return step


def slow_dog() -> Stepper:
    seen: list[tuple[Tensor, Tensor]] = []

    def step(theta: Tensor, gradient: Tensor, lr: float) -> Tensor:
        seen.append((theta, gradient))
        start = seen[0][0]
        distance = max(1e-4 * (1 + float(start.norm())), *(float((x - start).norm()) for x, _ in seen))
        total = sum(float((g**2).sum()) for _, g in seen) + 1e-8
        return theta - lr * distance / math.sqrt(total) * gradient

    return step


def slow_mechanic() -> Stepper:
    """Keeps every update, and adds them all up in each step; one tuner at a time."""
    base, updates = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64)), [torch.zeros(7, dtype=torch.float64)]
    adam = torch.optim.Adam([base], lr=1.0)
    tuners = [{"beta": 1 - 0.1**k, "s": 0.0, "v": 0.0, "r": 0.0, "m": 1e-6} for k in range(1, 7)]
    start: list[Tensor] = []

    def step(theta: Tensor, gradient: Tensor, lr: float) -> Tensor:
        start[:] = start or [theta]
        moved = torch.stack(updates).sum(0)
        adam.param_groups[0]["lr"] = lr
        before, base.grad = base.detach().clone(), gradient
        adam.step()
        update = base.detach() - before
        after, scale = theta + update, sum(t["s"] for t in tuners)
        pull = 0.01 * scale * after * gradient.norm() / (after.norm() + 1e-8)
        h = float(moved @ (gradient + pull))
        for t in tuners:
            t["m"] = max(t["beta"] * t["m"], abs(h))
            t["v"] = t["beta"] ** 2 * t["v"] + h * h
            t["r"] = max(t["beta"] * t["r"] - t["s"] * h, 0.0)
            t["s"] = (1e-8 * t["m"] / 6 + t["r"]) / (math.sqrt(t["v"]) + 1e-8)
        updates.append(update)
        return start[0] + (moved + update) * sum(t["s"] for t in tuners)

    return step


@pytest.mark.parametrize(
    ("rule", "slow"),
    [(NAdamW(weight_decay=0.1), slow_nadamw), (DoG(first=1e-4), slow_dog), (Mechanic(), slow_mechanic)],
)
def test_rule_follows_its_paper(rule: Rule, slow: Callable[[], Stepper]) -> None:
    torch.testing.assert_close(train_stacked(rule)[0], train_slowly(slow()), rtol=1e-5, atol=1e-9)


def test_dog_is_evaluated_at_its_polynomial_average() -> None:
    passed: list[Tensor] = []
    step = slow_dog()
    train_slowly(lambda *given: passed.append(step(*given)) or passed[-1])  # type: ignore[func-returns-value]
    # The closed form of the recursion: iterate i of n weighs as the product of what the later ones leave of it.
    weights = [9 / (8 + t) * math.prod(1 - 9 / (8 + u) for u in range(t + 1, STEPS + 1)) for t in range(1, STEPS + 1)]
    expected = sum(w * x for w, x in zip(weights, passed, strict=True))
    torch.testing.assert_close(train_stacked(DoG(first=1e-4))[1], expected, rtol=1e-6, atol=1e-9)


def test_schedule_free_is_evaluated_at_the_average_of_its_base() -> None:
    """At a constant learning rate the average weighs all base iterates alike."""
    rule = ScheduleFree()
    theta = TASK.build(0).state_dict()["theta"].double().view(1, 1, -1)
    state, bases = rule.init(theta, []), []
    for step in range(STEPS):
        gradient = gradient_at(theta.flatten(), step).view(1, 1, -1)
        theta = theta - rule.move(state, gradient, theta, torch.full((1, 1, 1), 0.05, dtype=torch.float64))
        bases.append(state["base"].clone())
    mean = torch.stack(bases).mean(0)
    torch.testing.assert_close(rule.final(state, theta), mean)
    torch.testing.assert_close(theta, 0.9 * mean + 0.1 * bases[-1])


def test_range_test_grows_by_the_same_factor_in_each_step() -> None:
    rule = RangeTest(1e-4, 1.0, 5, (0.0, 0.0))  # the sign of the gradient, so moves are learning rates
    theta = torch.zeros(1, 1, 1, dtype=torch.float64)
    state, one = rule.init(theta, []), torch.ones(1, 1, 1, dtype=torch.float64)
    moves = [rule.move(state, one, theta, one).item() for _ in range(5)]
    assert moves == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0], rel=1e-6)


def package_optimizers() -> Iterator[Any]:
    def make(module: str, build: Callable[[Any, Any], Any], rule: Rule) -> Any:
        return pytest.param(module, build, rule, id=module)

    yield make("prodigyopt", lambda m, p: m.Prodigy(p, lr=1.0, safeguard_warmup=True), Prodigy())
    yield make("dadaptation", lambda m, p: m.DAdaptAdam(p, lr=1.0), DAdaptAdam())
    yield make("mechanic_pytorch", lambda m, p: m.mechanize(torch.optim.Adam, store_delta=True)(p, lr=1.0), Mechanic())
    yield make("dog", lambda m, p: m.DoG(p, reps_rel=1e-4), DoG(first=1e-4))
    yield make("schedulefree", lambda m, p: m.AdamWScheduleFree(p, warmup_steps=5), ScheduleFree(5))


@pytest.mark.parametrize(("module", "build", "rule"), list(package_optimizers()))
def test_rule_is_that_of_its_authors(module: str, build: Callable[[Any, Any], Any], rule: Rule) -> None:
    package = pytest.importorskip(module)
    parameter = torch.nn.Parameter(TASK.build(0).state_dict()["theta"].double())
    optimizer = build(importlib.import_module(package.__name__), [parameter])
    if module == "schedulefree":
        optimizer.train()
    for step in range(STEPS):
        parameter.grad = gradient_at(parameter.detach(), step)
        optimizer.param_groups[0]["lr"] = LRS[step]
        optimizer.step()
    weights, final = train_stacked(rule)
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-4, atol=1e-6)
    if module == "schedulefree":
        optimizer.eval()
        torch.testing.assert_close(final, parameter.detach(), rtol=1e-4, atol=1e-6)
