"""Real processes against the NumPy oracle, step for step."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import oracle
from hdet import Ensemble, OneCycleAutoLR, RoundRecord
from job import launch
from native import replicated
from oracle import Array, Scenario
from tiers import slow

FOUR = (0.3, 0.1, 0.5, 0.2)
FOUR_SMALL = (0.05, 0.02, 0.08, 0.03)

SCENARIOS = [
    Scenario("sgd", "sgd", (0.3,), total_steps=24, cycle_momentum=False),
    Scenario("sgd, four groups", "sgd", FOUR, cycle_momentum=False, seed=1),
    Scenario("momentum", "momentum", (0.1,), cycle_momentum=False, temperature=0.5, seed=2),
    Scenario("momentum, four groups, cycled", "momentum", FOUR_SMALL, total_steps=26, interval=5, seed=3),
    Scenario("adam", "adam", (0.05,), cycle_momentum=False, seed=4),
    Scenario("adam, four groups, cycled", "adam", FOUR_SMALL, total_steps=25, interval=5, seed=5),
    Scenario("adamw", "adamw", (0.05,), weight_decay=0.2, total_steps=21, seed=6),
    Scenario("adamw, four groups", "adamw", FOUR_SMALL, weight_decay=0.1, cycle_momentum=False, seed=7),
    Scenario(
        "losses that are not finite",
        "adam",
        FOUR_SMALL,
        smoothing=0.5,
        false_losses={
            (5, 1): math.nan,  # one replica in round 1
            (9, 0): math.inf,  # another in round 2
            **{(13, r): math.nan for r in range(8)},  # all of them in round 3
        },
        seed=18,
    ),
    Scenario("three linear phases", "momentum", (0.1,), three_phase=True, anneal="linear", total_steps=30, seed=8),
    Scenario("warm-up ends inside a round", "adam", FOUR_SMALL, warmup=10, seed=9),
    Scenario("warm-up ends with a round", "adam", (0.05,), warmup=8, seed=10),
    Scenario("floor decay from the peak", "sgd", FOUR, decay="floor", cycle_momentum=False, seed=11),
    Scenario("floor decay from the warm-up", "adam", (0.05,), decay="floor", warmup=9, final_div_factor=10.0, seed=12),
    Scenario(
        "printed decay", "momentum", (0.1,), decay="printed", div_factor=9.0, final_div_factor=0.5, warmup=6, seed=13
    ),
    Scenario("no auto-LR", "adamw", FOUR_SMALL, auto_lr=False, weight_decay=0.1, seed=14),
    Scenario("no spread", "adam", FOUR_SMALL, spread=0.0, seed=15),
    Scenario("a converge after every step", "momentum", (0.1,), total_steps=9, interval=1, seed=16),
]
# Two replicas train all of them. More take longer on few cores, and may differ in the order of learning rates and in
# means: every optimizer, groups, replicas that are left out.
WITH_EIGHT = ("sgd, four groups", "momentum, four groups, cycled", "adamw", "losses that are not finite")
WITH_FOUR = (
    "sgd, four groups",
    "momentum",
    "momentum, four groups, cycled",
    "adam, four groups, cycled",
    "adamw, four groups",
    "losses that are not finite",
    "a converge after every step",
)


@dataclass
class Trace:
    """What one replica of a real run went through."""

    lrs: Array  # (S, K)
    momenta: Array  # (S, K)
    losses: Array  # (S,)
    weights: Array  # (S, P)
    history: list[RoundRecord]
    num_warnings: int


def make_optimizer(scenario: Scenario, parameters: list[nn.Parameter]) -> Optimizer:
    num_groups = len(scenario.max_lr)
    params: Any = parameters if num_groups == 1 else [{"params": [p]} for p in parameters]
    match scenario.optimizer:
        case "sgd":
            return torch.optim.SGD(params, lr=1.0)
        case "momentum":
            return torch.optim.SGD(params, lr=1.0, momentum=oracle.FIXED_MOMENTUM)
        case "adam":
            return torch.optim.Adam(params, lr=1.0, betas=(oracle.FIXED_MOMENTUM, oracle.BETA2), eps=oracle.EPS)
        case "adamw":
            return torch.optim.AdamW(
                params,
                lr=1.0,
                betas=(oracle.FIXED_MOMENTUM, oracle.BETA2),
                eps=oracle.EPS,
                weight_decay=scenario.weight_decay,
            )


def train(scenario: Scenario) -> Trace:
    replica, num_replicas = dist.get_rank(), dist.get_world_size()
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, value in zip(parameters, oracle.initial_weights(scenario.seed), strict=True):
            parameter.copy_(torch.from_numpy(value))
    if num_replicas > 1:
        model = replicated(model)
    optimizer = make_optimizer(scenario, parameters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = OneCycleAutoLR(
            optimizer,
            list(scenario.max_lr),
            scenario.total_steps,
            pct_start=scenario.pct_start,
            anneal_strategy=scenario.anneal,
            three_phase=scenario.three_phase,
            cycle_momentum=scenario.cycle_momentum,
            base_momentum=oracle.BASE_MOMENTUM,
            max_momentum=oracle.MAX_MOMENTUM,
            div_factor=scenario.div_factor,
            final_div_factor=scenario.final_div_factor,
            ensemble_lr_spread_ratio=scenario.spread,
            model_sync_interval=scenario.interval,
            auto_lr_warmup_steps=scenario.warmup,
            enable_auto_lr=scenario.auto_lr,
            loss_scale=scenario.temperature,
            lr_of_lr=scenario.rate,
            momentum_of_lr=scenario.smoothing,
            decay=scenario.decay,
            ensemble=Ensemble(seed=scenario.seed),
        )
        lrs, momenta, losses, weights = [], [], [], []
        for step in range(scenario.total_steps):
            x, y = (torch.from_numpy(part) for part in oracle.batch(scenario.seed, step, replica))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            torch.autograd.backward(loss)
            lrs.append([float(group["lr"]) for group in optimizer.param_groups])
            momenta.append(
                [float(g["betas"][0] if "betas" in g else g["momentum"]) for g in optimizer.param_groups],
            )
            optimizer.step()
            scheduler.step(scenario.false_losses.get((step, replica), loss))
            losses.append(loss.item())
            weights.append(torch.cat([p.detach().reshape(-1) for p in parameters]).numpy())
    return Trace(np.array(lrs), np.array(momenta), np.array(losses), np.array(weights), scheduler.history, len(caught))


def train_all(scenarios: list[Scenario]) -> dict[str, Trace]:
    return {scenario.name: train(scenario) for scenario in scenarios}


Run = list[dict[str, Trace]]  # by replica, then by name


@functools.cache
def attempt(num_replicas: int) -> Run | Exception:
    # One launch trains every scenario: starting processes costs more than training does. A failure is kept as well,
    # so that it is not repeated for every test.
    try:
        return launch(train_all, num_replicas, scenarios_for(num_replicas), timeout_s=150)
    except (RuntimeError, TimeoutError) as error:
        return error


def run(num_replicas: int) -> Run:
    result = attempt(num_replicas)
    if isinstance(result, Exception):
        raise result
    return result


def scenarios_for(num_replicas: int) -> list[Scenario]:
    if num_replicas == 1:
        return [s for s in SCENARIOS if s.decay == "schedule"]
    names = {4: WITH_FOUR, 8: WITH_EIGHT}.get(num_replicas)
    return [s for s in SCENARIOS if names is None or s.name in names]


def cases(*counts: int) -> pytest.MarkDecorator:
    """Two replicas show what there is to show; that four and eight do the same is seldom news."""
    found = [slow(n, s.name, when=n > 2) for n in counts for s in scenarios_for(n)]
    return pytest.mark.parametrize(("num_replicas", "name"), found)


@functools.cache
def expected(name: str, num_replicas: int) -> oracle.Trajectory:
    return oracle.simulate(named(name), num_replicas)


def named(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)


def close(actual: Any, desired: Any, what: str) -> None:
    assert_allclose(actual, desired, rtol=1e-9, atol=1e-12, err_msg=what)


@cases(2, 4, 8)
def test_every_step_and_round_matches_the_oracle(num_replicas: int, name: str) -> None:
    scenario = named(name)
    real, want = [traces[name] for traces in run(num_replicas)], expected(name, num_replicas)
    close(np.stack([t.lrs for t in real], axis=1), want.lrs, "learning rates")
    for trace in real:
        if scenario.optimizer != "sgd":
            close(trace.momenta, want.momenta, "momentum")
        assert trace.num_warnings == 0
    close(np.stack([t.losses for t in real], axis=1), want.losses, "losses")
    close(np.stack([t.weights for t in real], axis=1), want.weights, "weights")
    assert len(want.rounds) >= 5
    for trace in real:
        check_history(trace.history, want.rounds if scenario.spread > 0 else [])
    first, *others = [trace.weights for trace in real]
    for step in range(scenario.total_steps):
        ends = (step + 1) % scenario.interval == 0 or step + 1 == scenario.total_steps
        for other in others:  # bit-identical after a converge, and only then
            same = np.array_equal(first[step], other[step])
            assert same == (ends or scenario.spread == 0), f"step {step}"


def check_history(history: list[RoundRecord], want: list[oracle.Round]) -> None:
    assert [record.step for record in history] == [r.step for r in want]
    for index, (record, r) in enumerate(zip(history, want, strict=True)):
        assert record.index == index
        assert record.unhealthy == ()
        close(record.losses, r.losses, "losses")
        close(record.values, r.values, "learning rates by group and replica")
        close(record.base_values, r.base_values, "base values")
        close(record.scales, r.scales, "scales")
        close(record.distance, r.distance, "distance")
        assert set(record.control) == set(r.control)
        for key in r.control:
            close(record.control[key], r.control[key], key)


@pytest.mark.parametrize("name", [s.name for s in scenarios_for(1)])
def test_one_replica_matches_the_oracle_and_has_no_rounds(name: str) -> None:
    trace, want = run(1)[0][name], expected(name, 1)
    close(trace.lrs, want.lrs[:, 0], "learning rates")
    close(trace.weights, want.weights[:, 0], "weights")
    assert trace.history == []
    assert trace.num_warnings == (1 if named(name).spread > 0 else 0)


# -- the oracle itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if s.decay == "schedule" and s.cycle_momentum], ids=lambda s: s.name
)
def test_the_oracles_schedule_is_torchs(scenario: Scenario) -> None:
    optimizer = make_optimizer(scenario, [nn.Parameter(torch.zeros(1)) for _ in range(4)])
    scheduler = OneCycleLR(
        optimizer,
        list(scenario.max_lr),
        scenario.total_steps,
        anneal_strategy=scenario.anneal,
        three_phase=scenario.three_phase,
    )
    for step in range(scenario.total_steps):
        for group, max_lr in zip(optimizer.param_groups, scenario.max_lr, strict=True):
            momentum = group["betas"][0] if "betas" in group else group["momentum"]
            close((group["lr"], momentum), oracle.schedule(scenario, max_lr, step), f"step {step}")
        optimizer.step()
        scheduler.step()


def test_the_oracles_gradient_is_the_slope_of_its_loss() -> None:
    weights, (x, y) = oracle.initial_weights(3), oracle.batch(3, 0, 0)
    _, gradient = oracle.loss_and_gradient(weights, x, y)
    for tensor, slope in zip(weights, gradient, strict=True):
        for index in np.ndindex(tensor.shape):
            value, losses = tensor[index], []
            for shift in (1e-6, -1e-6):
                tensor[index] = value + shift
                losses.append(oracle.loss_and_gradient(weights, x, y)[0])
            tensor[index] = value
            assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope[index], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("num_replicas", [2, *(slow(n) for n in (4, 8))])
def test_the_scenarios_exercise_what_their_names_say(num_replicas: int) -> None:
    for scenario in SCENARIOS:
        want = expected(scenario.name, num_replicas)
        moved = max(float(np.abs(np.log(r.scales)).max()) for r in want.rounds)
        assert (moved > 0.01) == (scenario.auto_lr and scenario.spread > 0), scenario.name
        assert np.abs(want.weights).max() < 100, scenario.name  # finite, and no chaos that magnifies rounding
    broken = expected("losses that are not finite", num_replicas).rounds
    assert broken[1].control["weights"][1] == 0
    assert broken[2].control["weights"][0] == 0
    assert_array_equal(broken[3].control["velocity"], broken[2].control["velocity"])
    assert_array_equal(broken[3].scales, broken[2].scales)
    assert broken[4].control["weights"].min() > 0
