"""EASGD, ``outer="elastic"``, and GRAWA: against slow versions on real processes; resumed, and broken."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from hdet import AutoLR, Averaging, Ensemble, Explorer, Faults, OneCycleAutoLR, knobs
from hdet.ensemble.outer import Elastic
from hdet.replicas.group import Replicas, find_replicas
from job import launch
from tiers import slow

LR, T, STEPS = 0.05, 4, 7 * 4 + 2


def _targets(step: int, num_replicas: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(num_replicas, 3))


def _reference(num_replicas: int, pull: float, broken: int | None = None) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """Replicas on quadratics of their own, and a centre; ``broken``: the step in which the last one is lost."""
    theta, centre, trace = np.zeros((num_replicas, 3)), np.zeros(3), []
    for step in range(1, STEPS + 1):
        theta = theta - LR * (theta - _targets(step, num_replicas))
        if step == broken:
            theta[-1] = math.nan
        if step % T == 0 or step == STEPS:
            fine = np.isfinite(theta).all(axis=1)
            mean = theta[fine].mean(axis=0)
            theta = theta - pull / num_replicas * (theta - centre)
            centre = centre + pull * (mean - centre)
            if step == STEPS or not fine.all():
                theta = np.tile(centre, (num_replicas, 1))
        trace.append(theta.tolist())
    return centre, trace


class Run:
    """SGD with momentum on one rank's quadratic."""

    def __init__(self, outer: Any = "elastic", *, momentum: float = 0.0, start: float = 0.0, **more: Any) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.weights = nn.Parameter(torch.full((3,), start, dtype=torch.float64))
        self.model = nn.ParameterList([self.weights])
        self.seen = torch.zeros((), dtype=torch.float64)
        self.model.register_buffer("seen", self.seen)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=momentum)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one that is alone
            self.scheduler = Explorer(
                self.model, self.optimizer, interval=T, gradients="local", total_steps=STEPS,
                averaging=Averaging(outer=outer), **more,
            )  # fmt: skip
        self.step = 0
        self.trace: list[list[float]] = []

    def advance(self, last: int, broken: int | None = None) -> Run:
        while self.step < last:
            self.step += 1
            target = torch.from_numpy(_targets(self.step, self.count)[self.rank])
            self.weights.grad = self.weights.detach() - target
            self.seen.add_(1.0)
            self.optimizer.step()
            if self.step == broken and self.rank == self.count - 1:
                self.weights.data.fill_(math.nan)
            self.scheduler.step(1.0)
            self.trace.append(self.weights.tolist())
        return self

    @property
    def averaged(self) -> list[str]:
        return [record.averaged for record in self.scheduler.history]

    def states(self) -> list[Any]:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])

    def load(self, states: list[Any], step: int) -> Run:
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        self.step = step
        return self


def _trained(pull: float, broken: int | None = None) -> tuple[list[list[float]], list[str], float]:
    run = Run(Elastic(pull=pull)).advance(STEPS, broken)
    return run.trace, run.averaged, float(run.seen)


@pytest.mark.parametrize(
    ("num_replicas", "pull"),
    [(2, 0.9), (2, 1.0), *(slow(4, pull) for pull in (0.9, 0.3))],
)
def test_it_is_the_slow_version(num_replicas: int, pull: float) -> None:
    _, expected = _reference(num_replicas, pull)
    found = launch(_trained, num_replicas, pull)
    for rank, (trace, averaged, seen) in enumerate(found):
        np.testing.assert_allclose(trace, [rows[rank] for rows in expected], rtol=1e-12, atol=1e-14)
        assert averaged == ["pull"] * 7 + ["all"]
        assert seen == STEPS  # buffers are averaged in every round
    assert all(trace[-1] == found[0][0][-1] for trace, _, _ in found)


def _weighted(zero_grad: bool) -> list[list[float]]:
    run = Run("grawa")
    if zero_grad:
        run.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    return run.advance(STEPS).trace


@pytest.mark.parametrize("zero_grad", [False, True])
def test_grawa_weights_by_the_inverse_norm_of_the_last_gradient(zero_grad: bool) -> None:
    theta = np.zeros((3, 3))
    expected = []
    for step in range(1, STEPS + 1):
        gradients = theta - _targets(step, 3)
        theta = theta - LR * gradients
        if step % T == 0 or step == STEPS:
            weights = 1 / np.linalg.norm(gradients, axis=1)
            theta = np.tile(weights @ theta / weights.sum(), (3, 1))
        expected.append(theta)
    for rank, trace in enumerate(launch(_weighted, 3, zero_grad)):
        np.testing.assert_allclose(trace, [rows[rank] for rows in expected], rtol=1e-12, atol=1e-14)


def test_alone_it_is_plain_training() -> None:
    trace, averaged, _ = launch(_trained, 1, 0.9)[0]
    theta = np.zeros(3)
    for step in range(1, STEPS + 1):
        theta = theta - LR * (theta - _targets(step, 1)[0])
    np.testing.assert_allclose(trace[-1], theta, rtol=1e-12)
    assert averaged == []


@pytest.mark.parametrize("broken", [T, 2 * T + 1, STEPS])
def test_a_broken_replica_is_left_out_and_all_meet(broken: int) -> None:
    _, expected = _reference(3, 0.9, broken)
    met = -(-broken // T) - 1
    for rank, (trace, averaged, _) in enumerate(launch(_trained, 3, 0.9, broken)):
        fine = [k for k in range(STEPS) if np.isfinite(expected[k][rank]).all()]
        np.testing.assert_allclose([trace[k] for k in fine], [expected[k][rank] for k in fine], rtol=1e-12, atol=1e-14)
        assert averaged[met] == "all"
        assert averaged.count("all") == (2 if broken < STEPS else 1)


def _looked_at() -> tuple[list[float], list[float], list[list[float]], list[list[float]]]:
    """Evaluated at the end of a round and in the middle of one."""
    run, seen = Run(), []
    for step in (2 * T, 2 * T + 3):
        run.advance(step)
        own = run.weights.tolist()
        with run.scheduler.converged():
            seen.append(run.weights.tolist())
            with run.scheduler.converged():
                assert run.weights.tolist() == seen[-1]
        assert run.weights.tolist() == own
    run.advance(STEPS)
    return seen[0], seen[1], run.trace, Run().advance(STEPS).trace


def test_the_centre_is_what_is_evaluated_and_looking_changes_nothing() -> None:
    found = launch(_looked_at, 2)
    assert found[0][:2] == found[1][:2]
    assert all(looked == undisturbed for _, _, looked, undisturbed in found)
    for which, steps in ((0, 2 * T), (1, 2 * T + 3)):
        theta, centre = np.zeros((2, 3)), np.zeros(3)
        for step in range(1, steps + 1):
            theta = theta - LR * (theta - _targets(step, 2))
            if step % T == 0:
                theta, centre = theta - 0.45 * (theta - centre), centre + 0.9 * (theta.mean(axis=0) - centre)
        now = centre + 0.9 * (theta.mean(axis=0) - centre)
        np.testing.assert_allclose(found[0][which], now, rtol=1e-12)


def _resumed(saved_at: int, each: bool) -> tuple[list[float], list[float], list[list[float]]]:
    whole = Run(momentum=0.9).advance(saved_at)
    if each:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are one replica's weights: all are saved
            states = whole.states()
    else:
        with whole.scheduler.converged():
            states = whole.states()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, states)
        states = everyone[0]
    whole.advance(STEPS)
    resumed = Run(momentum=0.9, start=5.0).load(states, saved_at)
    begun = [resumed.weights.tolist()]
    resumed.advance(STEPS)
    return whole.trace[-1], resumed.trace[-1], begun + resumed.trace


@pytest.mark.parametrize("saved_at", [2 * T, 2 * T + 1, 3 * T + 3])
def test_every_ranks_own_checkpoint_continues_exactly(saved_at: int) -> None:
    """Replicas are apart at any time: the uninterrupted run needs the weights of each."""
    for whole, resumed, _ in launch(_resumed, 2, saved_at, True):
        assert resumed == whole


def test_one_checkpoint_continues_from_the_centre() -> None:
    found = launch(_resumed, 2, 2 * T + 1, False)
    assert found[0][2][0] == found[1][2][0]
    assert found[0][1] == found[1][1] != found[0][0]


def _noisy() -> tuple[list[float], list[float]]:
    warnings.simplefilter("ignore")  # that these are one replica's weights
    run = Run(start=float(dist.get_rank())).advance(T)  # a warm noisy start
    return run.trace[-1], run.scheduler.state_dict()["rounds"]["outer"]["centre"][0].tolist()


def test_replicas_that_start_apart_have_one_centre() -> None:
    found = launch(_noisy, 2)
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def _finished() -> list[float]:
    run = Run().advance(2 * T + 2)
    run.scheduler.finish()
    return run.weights.tolist()


def test_finish_leaves_all_at_the_centre() -> None:
    found = launch(_finished, 2)
    assert found[0] == found[1]


def _refused() -> list[str]:
    said = []
    weights = nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([weights])

    def attempt(make: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(ValueError, match="elastic") as caught:
            make(optimizer)
        said.append(str(caught.value))

    elastic: dict[str, Any] = {"averaging": Averaging(outer="elastic"), "interval": T}
    apart = Ensemble(spread=0.1, gradients="local", averaging=Averaging(outer="elastic"))
    paper = Ensemble(gradients="local", averaging=Averaging(outer="elastic"))
    attempt(lambda o: Explorer(model, o, knobs=[knobs.LearningRate()], **elastic))
    attempt(lambda o: Explorer(model, o, knobs=[knobs.LearningRate()], gradients="local", **elastic))
    attempt(lambda o: Explorer(model, o, gradients="local", faults=Faults(max_rollbacks=20), **elastic))
    attempt(lambda o: AutoLR(ConstantLR(o), total_steps=400, interval=T, model=model, ensemble=apart))
    attempt(lambda o: OneCycleAutoLR(o, max_lr=0.1, total_steps=50, ensemble_lr_spread_ratio=0.1,
                                     model_sync_interval=T, model=model, ensemble=paper))  # fmt: skip
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("hdet.plan.find_replicas", _as_shards)
    attempt(lambda o: Explorer(model, o, gradients="local", **elastic))
    monkeypatch.undo()
    return said


def _as_shards(*args: Any, **kwargs: Any) -> Replicas:
    found = find_replicas(*args, **kwargs)
    found.holds_all_parameters = False
    return found


def test_what_needs_one_place_is_refused() -> None:
    shared, spread, rollback, loss, cycle, sharded = launch(_refused, 2)[0]
    assert "pass gradients=\"local\"; got gradients='shared'" in shared
    assert "leave out what spreads, the knobs or the spread" in spread
    assert "got spread=0.1, knobs=[]" in spread
    assert "cannot undo a round: there is no one place to go back to; leave max_rollbacks out" in rollback
    assert "leave out what spreads" in loss
    assert "leave out what spreads" in cycle
    assert "needs every replica to hold all parameters, but they are sharded: use outer=" in sharded
    with pytest.raises(ValueError, match=r"pull of the outer step must be in \(0, 1\], but got pull=0"):
        Elastic(pull=0)


def _auto() -> list[list[float]]:
    weights = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model = nn.ParameterList([weights])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = AutoLR(
        ConstantLR(optimizer, 1.0), interval=T, total_steps=STEPS, model=model,
        ensemble=Ensemble(gradients="local", averaging=Averaging(outer="elastic")),
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        target = torch.from_numpy(_targets(step, 2)[dist.get_rank()])
        weights.grad = weights.detach() - target
        optimizer.step()
        scheduler.step((weights.detach() - target).square().sum())
    return [weights.tolist(), [record.scales[0] for record in scheduler.history]]


def test_the_gradient_signal_goes_with_it() -> None:
    found = launch(_auto, 2)
    assert found[0] == found[1]
