"""AutoLR on real processes against the NumPy oracle (Eq. 11, 12, 16, 17), and against OneCycleAutoLR, step for step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import oracle
import oracle_anchor
from hdet import Adapt, AutoLR, Ensemble, Faults, OneCycleAutoLR, RoundRecord
from hdet.controllers import EvidenceController, LevelController
from hdet.ensemble.controllers import PaperController
from job import launch, told
from native import replicated
from oracle import Array
from oracle_anchor import AnchorScenario
from tiers import slow

FOUR = (0.05, 0.02, 0.08, 0.03)


def _level(name: str, kind: oracle.Kind, lrs: tuple[float, ...], **more: Any) -> AnchorScenario:
    settings: dict[str, Any] = {
        "signal": "gradient",
        "controller": "level",
        "level": True,
        "total_steps": 90,
        "hold_share": 0.2,
        **more,
    }
    return AnchorScenario(name, kind, lrs, **settings)


SCENARIOS = [
    AnchorScenario("sgd", "sgd", (0.2,)),
    AnchorScenario("momentum", "momentum", (0.05,), seed=1),
    AnchorScenario("adam", "adam", (0.05,), seed=2),
    AnchorScenario("adam, a scale for each of four groups", "adam", FOUR, together=False, seed=3),
    AnchorScenario("sgd, four groups, one scale", "sgd", FOUR, seed=4),
    AnchorScenario("anchor renewed every two rounds", "adam", (0.05,), anchor_rounds=2, seed=6),
    AnchorScenario("other constants", "sgd", (0.2,), gain=0.5, optimism=0.5, smoothing=0.8, up=0.4, down=0.3, seed=7),
    AnchorScenario("no memory, late start", "adam", (0.05,), smoothing=0.0, start_steps=8, hold_share=0.3, seed=8),
    AnchorScenario("bounds", "sgd", (0.2,), gain=2.0, scale_bounds=(0.8, 1.2), seed=9),
    AnchorScenario(
        "a fall that renews the anchor",
        "sgd",
        (0.15,),
        total_steps=41,
        gain=2.0,
        optimism=0.0,
        smoothing=0.0,
        pct_start=0.1,
        seed=24,
    ),
    AnchorScenario("a round a step", "sgd", (0.2,), interval=1, total_steps=14, seed=10),
    AnchorScenario("gradient, sgd", "sgd", (0.2,), signal="gradient", seed=11),
    AnchorScenario("gradient, momentum", "momentum", (0.05,), signal="gradient", seed=12),
    AnchorScenario("gradient, adam", "adam", (0.05,), signal="gradient", seed=13),
    AnchorScenario("gradient, four groups", "adam", FOUR, signal="gradient", together=False, seed=14),
    AnchorScenario("gradient, renewed", "adam", (0.05,), signal="gradient", anchor_rounds=3, seed=15),
    AnchorScenario("gradient, one sample a round", "sgd", (0.2,), signal="gradient", interval=1, seed=16),
    _level("level, sgd", "sgd", (1e-5,), seed=19, constant=True),
    _level("level, momentum", "momentum", (300.0,), seed=21, constant=True),
    _level("level, adam", "adam", (1e-6,), seed=22, constant=True, total_steps=240),
    _level("level of four groups", "adam", FOUR, seed=23, constant=True),
    _level("level, a scale for each", "adam", FOUR, seed=24, together=False, constant=True),
    _level("level, a round a step", "sgd", (0.2,), total_steps=150, seed=25, interval=1, constant=True),
    _level("level, a schedule near it", "adam", (0.08,), seed=26),
    _level("level, a schedule near it without a warm-up", "adam", (0.2,), seed=26, pct_start=0.05, div_factor=1.5),
    _level("level, a schedule far above", "adam", (30.0,), seed=27),
    _level("level, a schedule far below", "sgd", (1e-6,), seed=35, pct_start=0.05, div_factor=1.5),
    _level("level, without a bound on updates", "momentum", (0.01,), seed=29, constant=True, max_update=None),
    _level("level, losses", "sgd", (1e-4,), seed=30, constant=True, signal="loss", controller="evidence"),
    _level("level controller from where it is", "sgd", (0.005,), seed=31, constant=True, level=False),
    _level("level controller from far above", "momentum", (0.1,), seed=33, constant=True, level=False, total_steps=150),
    _level("level controller, its brake", "adam", (1.0,), seed=31, constant=True, level=False, total_steps=150),
]
# One process has the levels, whose signal is the gradient that replicas share; more take longer on few cores.
ALSO_WITH_TWO = ("level, sgd", "level, a scale for each", "level, losses", "level controller, its brake")
WITH_TWO = [s.name for s in SCENARIOS if not s.name.startswith("level") or s.name in ALSO_WITH_TWO]
WITH_EIGHT = ("momentum", "gradient, sgd", "gradient, adam")
WITH_FOUR = (
    "sgd",
    "momentum",
    "adam, a scale for each of four groups",
    "sgd, four groups, one scale",
    "gradient, sgd",
    "gradient, momentum",
    "gradient, adam",
    "level, adam",
    "level, losses",
)
# The loss compares replicas.
WITH_ONE = (
    "gradient, sgd",
    "gradient, momentum",
    "gradient, four groups",
    "gradient, renewed",
    "gradient, one sample a round",
    *(s.name for s in SCENARIOS if s.name.startswith("level") and s.signal == "gradient"),
)

# The paper's method through AutoLR: anchor at the last converge, its controller, a scale for each group.
TWINS = {
    "sgd": {"optimizer": "sgd", "max_lr": (0.3,)},
    "adam, four groups": {"optimizer": "adam", "max_lr": FOUR},
    "momentum, cycled": {"optimizer": "momentum", "max_lr": FOUR, "cycle_momentum": True},
}
TWIN_CASES = [*((2, name) for name in TWINS), (4, "adam, four groups")]


@dataclass
class Trace:
    """What one replica of a real run went through."""

    lrs: Array  # (S, G)
    losses: Array  # (S,)
    weights: Array  # (S, P)
    history: list[RoundRecord]


def make_optimizer(kind: str, parameters: list[nn.Parameter], num_groups: int) -> Optimizer:
    params: Any = parameters if num_groups == 1 else [{"params": [p]} for p in parameters]
    if kind == "adam":
        return torch.optim.Adam(params, betas=(oracle.FIXED_MOMENTUM, oracle.BETA2), eps=oracle.EPS)
    return torch.optim.SGD(params, momentum=oracle.FIXED_MOMENTUM if kind == "momentum" else 0.0)


class Training:
    """The oracle's problem in torch."""

    def __init__(self, kind: str, num_groups: int, seed: int) -> None:
        self.seed = seed
        model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.parameters = list(model.parameters())
        with torch.no_grad():
            for parameter, value in zip(self.parameters, oracle.initial_weights(seed), strict=True):
                parameter.copy_(torch.from_numpy(value))
        self.model = replicated(model) if dist.get_world_size() > 1 else model
        self.optimizer = make_optimizer(kind, self.parameters, num_groups)

    def run(self, scheduler: AutoLR | OneCycleAutoLR, num_steps: int) -> Trace:
        lrs, losses, weights = [], [], []
        for step in range(num_steps):
            x, y = (torch.from_numpy(part) for part in oracle.batch(self.seed, step, dist.get_rank()))
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            torch.autograd.backward(loss)
            lrs.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            scheduler.step(loss)
            losses.append(loss.item())
            weights.append(torch.cat([p.detach().reshape(-1) for p in self.parameters]).numpy())
        return Trace(np.array(lrs), np.array(losses), np.array(weights), scheduler.history)


def train(s: AnchorScenario) -> Trace:
    training = Training(s.optimizer, len(s.max_lr), s.seed)
    schedule: LRScheduler | Optimizer = training.optimizer
    if s.constant:
        for group, lr in zip(training.optimizer.param_groups, s.max_lr, strict=True):
            group["lr"] = lr
    else:
        schedule = OneCycleLR(
            training.optimizer,
            list(s.max_lr),
            s.total_steps,
            pct_start=s.pct_start,
            cycle_momentum=s.cycle_momentum,
            div_factor=s.div_factor,
        )
    controller: EvidenceController | LevelController = LevelController(pace=s.pace, max_update=s.max_update)
    if s.controller == "evidence":
        controller = EvidenceController(
            gain=s.gain, optimism=s.optimism, smoothing=s.smoothing, up=s.up, sprint=s.sprint, down=s.down
        )
    scheduler = AutoLR(
        schedule,
        interval=s.interval,
        total_steps=s.total_steps,
        adapt=Adapt(
            level=s.level,
            controller=controller,
            anchor="start" if s.anchor_rounds is None else s.anchor_rounds,
            groups="together" if s.together else "each",
            _start_steps=s.start_steps,
            _hold_share=s.hold_share,
            bounds=s.scale_bounds,
        ),
        # The loss of one step may jump, and of a run that starts too high, and the oracle has no guard.
        faults=Faults(max_rollbacks=20 * (s.interval > 1 and s.controller == "evidence" and not s.level)),
        ensemble=Ensemble(spread=s.spread, seed=s.seed) if s.signal == "loss" else None,
    )
    return training.run(scheduler, s.total_steps)


def train_twins(optimizer: str, max_lr: tuple[float, ...], cycle_momentum: bool = False) -> tuple[Trace, Trace]:
    one = Training(optimizer, len(max_lr), seed=0)
    steps, interval, spread, warmup = 23, 4, 0.4, 5
    paper = OneCycleAutoLR(
        one.optimizer,
        list(max_lr),
        steps,
        cycle_momentum=cycle_momentum,
        ensemble_lr_spread_ratio=spread,
        model_sync_interval=interval,
        auto_lr_warmup_steps=warmup,
        enable_auto_lr=True,
        loss_scale=0.05,
        ensemble=Ensemble(seed=3),
    )
    first = one.run(paper, steps)
    other = Training(optimizer, len(max_lr), seed=0)
    auto = AutoLR(
        OneCycleLR(other.optimizer, list(max_lr), steps, cycle_momentum=cycle_momentum),
        adapt=Adapt(
            anchor="round",
            controller=PaperController(temperature=0.05),
            _start_steps=warmup,
            _hold_share=0.0,
            groups="each",
            bounds=(1e-4, 1e4),
        ),
        faults=Faults(max_rollbacks=0),
        interval=interval,
        ensemble=Ensemble(spread=spread, seed=3),
    )
    return first, other.run(auto, steps)


def train_all(scenarios: list[AnchorScenario]) -> dict[str, Any]:
    warnings.simplefilter("error")
    out: dict[str, Any] = {s.name: train(s) for s in scenarios}
    twins = [name for count, name in TWIN_CASES if count == dist.get_world_size()]
    out["twins"] = {name: train_twins(**TWINS[name]) for name in twins}  # type: ignore[arg-type]
    return out


Run = list[dict[str, Any]]  # by replica, then by name


@functools.cache
def attempt(num_replicas: int) -> Run | Exception:
    try:
        return launch(train_all, num_replicas, scenarios_for(num_replicas), timeout_s=150)
    except (RuntimeError, TimeoutError) as error:
        return error


def run(num_replicas: int) -> Run:
    result = attempt(num_replicas)
    if isinstance(result, Exception):
        raise result
    return result


def scenarios_for(num_replicas: int) -> list[AnchorScenario]:
    names = {1: WITH_ONE, 2: WITH_TWO, 4: WITH_FOUR, 8: WITH_EIGHT}[num_replicas]
    return [s for s in SCENARIOS if s.name in names]


def named(name: str) -> AnchorScenario:
    return next(s for s in SCENARIOS if s.name == name)


@functools.cache
def expected(name: str, num_replicas: int) -> oracle_anchor.AnchorTrajectory:
    return oracle_anchor.simulate(named(name), num_replicas)


def cases(named_cases: Iterable[tuple[int, str]]) -> pytest.MarkDecorator:
    """Two processes show what there is to show; that four and eight do the same is seldom news."""
    return pytest.mark.parametrize(("num_replicas", "name"), [slow(n, name, when=n > 2) for n, name in named_cases])


def close(actual: Any, desired: Any, what: str) -> None:
    assert_allclose(actual, desired, rtol=1e-8, atol=1e-11, err_msg=what)


@cases((n, s.name) for n in (1, 2, 4, 8) for s in scenarios_for(n))
def test_every_step_and_round_matches_the_oracle(num_replicas: int, name: str) -> None:
    real, want = [traces[name] for traces in run(num_replicas)], expected(name, num_replicas)
    close(np.stack([t.losses for t in real], axis=1), want.losses, "losses")
    close(np.stack([t.lrs for t in real], axis=1), want.lrs, "learning rates")
    close(np.stack([t.weights for t in real], axis=1), want.weights, "weights")
    assert len(want.rounds) >= 5
    for trace in real:
        check_history(trace.history, want.rounds, named(name).signal)
    if named(name).signal == "gradient":
        for other in real[1:]:
            assert np.array_equal(real[0].weights, other.weights)
            assert np.array_equal(real[0].lrs, other.lrs)


def check_history(history: list[RoundRecord], want: list[oracle_anchor.AnchorRound], signal: str) -> None:
    assert [record.step for record in history] == [r.step for r in want]
    for index, (record, r) in enumerate(zip(history, want, strict=True)):
        assert record.index == index
        assert record.num_rollbacks == 0
        close(record.losses, r.losses, "losses")
        close(record.base_values, r.base_values, "base values")
        close(record.scales, r.scales, "scales")
        if signal == "loss":
            close(record.distance, r.distance, "distance")
        else:
            assert record.distance == 0
        for key in ("slope", "standard_error", "z", "elasticity", "progress", "cost_over_gain"):
            value = r.cost if key == "cost_over_gain" else getattr(r, key)
            assert (key in record.control) == (value is not None)
            if value is not None:
                close(record.control[key], value, key)


@cases(
    [
        *((2, name) for name in ("sgd", "momentum", "adam", "sgd, four groups, one scale", "other constants")),
        *((4, name) for name in ("sgd", "momentum", "sgd, four groups, one scale")),
    ]
)
def test_replicas_stay_on_the_anchor_line(num_replicas: int, name: str) -> None:
    """theta_r = A + rho_r (mean - A) after every step but the last, which leaves all of them at the mean."""
    s = named(name)
    weights = np.stack([traces[name].weights for traces in run(num_replicas)], axis=1)
    anchor = oracle.flat(oracle.initial_weights(s.seed))
    mean = weights.mean(axis=1)
    for step in range(s.total_steps - 1):
        rho = oracle_anchor.fan_out(s, 1, num_replicas, (step + 1) // s.interval)[0]
        line = anchor + rho[:, None] * (mean[step] - anchor)
        assert_allclose(weights[step], line, rtol=1e-10, atol=1e-12)
        assert not np.array_equal(weights[step, 0], weights[step, -1])
    assert all(np.array_equal(weights[-1, 0], weights[-1, r]) for r in range(num_replicas))


@cases(TWIN_CASES)
def test_from_the_last_round_with_the_papers_controller_it_is_onecycleautolr(num_replicas: int, name: str) -> None:
    for result in run(num_replicas):
        paper, auto = result["twins"][name]
        assert np.array_equal(paper.lrs, auto.lrs)
        assert np.array_equal(paper.weights, auto.weights)
        assert np.array_equal(paper.losses, auto.losses)
        assert told(paper.history) == told(auto.history)
        scales = paper.history[-1].scales
        assert scales != (1.0,) * len(scales)


@pytest.mark.parametrize("num_replicas", [2, slow(4)])
def test_the_scenarios_exercise_what_their_names_say(num_replicas: int) -> None:
    for s in SCENARIOS:
        want = expected(s.name, next(n for n in (num_replicas, 2, 1) if s in scenarios_for(n)))
        assert np.abs(want.weights).max() < 100, s.name  # no chaos that magnifies rounding
        scales = np.stack([r.scales for r in want.rounds])
        assert np.abs(np.log(scales)).max() > 0.05, s.name
        acting = [r for r in want.rounds if r.z is not None]
        assert 3 <= len(acting) < len(want.rounds), s.name  # the scale holds still at the end
        assert np.array_equal(want.rounds[-1].scales, acting[-1].scales), s.name
        searched = [r.step for r in want.rounds if r.searching]
        assert searched == ([1, 2, 3, 4] if s.level else []), s.name
        factors = scales[1:] / scales[:-1]
        if s.controller == "level":
            assert factors[-len(acting) :].max() > 1.004 or factors[-len(acting) :].min() < 0.995, s.name
    assert any(r.new_anchor for r in expected("a fall that renews the anchor", num_replicas).rounds[:-3])
    bounded = np.stack([r.scales for r in expected("bounds", num_replicas).rounds])
    assert bounded.min() == 0.8 or bounded.max() == 1.2
    near = expected("level, a schedule near it", 1).rounds
    risen = [float(r.scales[0]) for r in near if r.step > 4 and r.in_warmup]
    assert risen == sorted(risen)  # approached from the level, which is below its peak, and then followed
    assert 0.5 < risen[0] < risen[-1] == 1.0
