"""A long horizon on real processes, against a slow run of all replicas in one process."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor

from hdet import Averaging, Explorer, knobs
from hdet.ensemble.controllers.valley import lowest
from hdet.ensemble.generations import PATIENCE
from hdet.policy.spread import assign
from job import launch
from tiers import slow

INTERVAL, TOTAL_STEPS, LR, MOMENTUM, DECAY = 8, 50, 0.05, 0.8, 0.02
LOW, HIGH, WINDOW = 1e-6, 10.0, 4.0
LAST = 40  # the last whole round before the end moves nothing


def _rows(seed: int, count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=g, dtype=torch.float64)
    return x, x[:, :1] + 0.5 * torch.randn(count, 1, generator=g, dtype=torch.float64)


def _batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    return _rows(1000 + (3 * step + replica) % 11, 20)


def _first() -> Tensor:
    return torch.linspace(-1, 1, 5, dtype=torch.float64)[None]


HELD_OUT = _rows(1, 200)


class _Run:
    def __init__(self, **options: Any) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.copy_(_first())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        self.explorer = Explorer(
            self.model, self.optimizer, knobs=[knobs.WeightDecay()], interval=INTERVAL, total_steps=TOTAL_STEPS,
            gradients="local", probe=lambda: self.loss(*HELD_OUT), horizon="long", **options,
        )  # fmt: skip

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = (self.model(x) - y).square().mean()
        return found

    def advance(self, until: int, broken: int | None = None) -> None:
        while self.explorer.last_epoch < until:
            step = self.explorer.last_epoch + 1
            loss = self.loss(*_batch(step, self.rank))
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            if step == broken and self.rank == 1:
                with torch.no_grad():
                    self.model.weight.fill_(math.nan)
            self.explorer.step(loss)

    def saved(self) -> Any:
        with self.explorer.converged():
            return copy.deepcopy(self.states())

    def states(self) -> Any:
        whole: list[Any] = [self.model, self.optimizer, self.explorer]
        return [each.state_dict() for each in whole]

    def load(self, saved: Any) -> None:
        whole: list[Any] = [self.model, self.optimizer, self.explorer]
        for each, state in zip(whole, saved, strict=True):
            each.load_state_dict(state)

    def found(self) -> dict[str, Any]:
        records = [record.knobs["weight_decay"] for record in self.explorer.history]
        return {
            "weights": self.model.weight[0].tolist(),
            "bases": [record.base for record in records],
            "values": [list(record.values) for record in records],
            "probes": [list(record.probes) for record in self.explorer.history],
            "decay": self.optimizer.param_groups[0]["weight_decay"],
        }


def _whole() -> dict[str, Any]:
    run = _Run()
    run.advance(TOTAL_STEPS)
    return run.found()


def _oracle(count: int) -> dict[str, Any]:
    """Every replica in turn, with numbers only."""
    low, high = math.log(LOW), math.log(HIGH)
    base, width = math.log(DECAY), 1.0
    theta = [_first()[0].numpy().copy() for _ in range(count)]
    speed = [np.zeros(5) for _ in range(count)]
    found: dict[str, Any] = {"bases": [], "values": [], "probes": [], "patience": []}
    (hx, hy), step, index = (each.numpy() for each in HELD_OUT), 0, 0
    while step < TOTAL_STEPS:
        half = WINDOW * width if count > 1 else 0.0
        middle = min(max(base, low + half), high - half) if half else base
        places = assign(count, 1, seed=0, round_index=index, balanced=False)[0]
        at = np.array([middle + half * place for place in places])
        tails: list[list[Any]] = [[] for _ in range(count)]
        late: list[list[float]] = [[] for _ in range(count)]
        for in_round in range(1, min(INTERVAL, TOTAL_STEPS - step) + 1):
            step += 1
            for r in range(count):
                x, y = (each.numpy() for each in _batch(step, r))
                off = x @ theta[r] - y[:, 0]
                gradient = 2 / len(x) * x.T @ off + math.exp(at[r]) * theta[r]
                speed[r] = gradient if step == 1 else MOMENTUM * speed[r] + gradient
                theta[r] = theta[r] - LR * speed[r]
                if 2 * in_round > INTERVAL:
                    tails[r].append(theta[r])
                    late[r].append(float(np.mean(off**2)))
        shares = np.ones(count)
        found["values"].append(np.exp(at).tolist())
        acts = count > 1 and step <= LAST
        if acts:
            losses = np.array([np.mean((hx @ np.mean(tail, axis=0) - hy[:, 0]) ** 2) for tail in tails])
            found["probes"].append(losses.tolist())
            shares = np.exp((losses.min() - losses) / (0.02 * losses.min()))
            shares *= count / shares.sum()
            best, progress = int(losses.argmin()), step / LAST
            gap = max(losses[best] - np.mean(late[best]), 0.0)
            patience = min(gap / losses[best] / progress, PATIENCE) * (1 - progress)
            found["patience"].append(patience)
            move, inside = lowest(at - base, losses, patience)
            base = min(max(base + move, low), high)
            width = 0.0 if step == LAST else width * (0.6 if inside else 1.0)
        found["bases"].append(math.exp(base))
        theta = [np.mean([s * t for s, t in zip(shares, theta, strict=True)], axis=0)] * count
        speed = [np.mean([s * v for s, v in zip(shares, speed, strict=True)], axis=0)] * count
        index += 1
    return {**found, "weights": theta[0].tolist()}


@pytest.mark.parametrize("count", [2, slow(4)])
def test_weights_and_base_values_are_those_of_the_oracle(count: int) -> None:
    oracle, results = _oracle(count), launch(_whole, count)
    for found in results:
        assert_allclose(found["bases"], oracle["bases"], rtol=1e-9)
        assert_allclose(found["values"], oracle["values"], rtol=1e-9)
        assert_allclose([row for row in found["probes"] if row], oracle["probes"], rtol=1e-9)
        assert_allclose(found["weights"], oracle["weights"], rtol=1e-9)
        assert found["decay"] == pytest.approx(oracle["bases"][-1])
    assert len(set(oracle["bases"])) > 2
    assert any(0 < patience < PATIENCE / 2 for patience in oracle["patience"])


@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
def test_alone_the_knob_stays_where_it_is() -> None:
    found, oracle = _whole(), _oracle(1)
    assert found["decay"] == DECAY
    assert_allclose(found["weights"], oracle["weights"], rtol=1e-9)


Pair = tuple[dict[str, Any], dict[str, Any]]


def _resumed(step: int) -> Pair:
    whole = _Run()
    whole.advance(step)
    saved = [whole.saved()]
    whole.advance(TOTAL_STEPS)
    dist.broadcast_object_list(saved, src=0)
    again = _Run()
    again.load(saved[0])
    again.advance(TOTAL_STEPS)
    return whole.found(), again.found()


def _each_resumed(steps: list[int]) -> dict[int, Pair]:
    """Each rank from its own checkpoint, of several steps of one run."""
    whole = _Run()
    saved = {}
    for step in steps:
        whole.advance(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are one replica's weights: all are saved
            saved[step] = copy.deepcopy(whole.states())
    whole.advance(TOTAL_STEPS)
    found = {}
    for step, states in saved.items():
        again = _Run()
        again.load(states)
        again.advance(TOTAL_STEPS)
        found[step] = whole.found(), again.found()
    return found


BETWEEN, WITHIN, IN_ROUND = 3 * INTERVAL, 2 * INTERVAL + 3, [3, 4, 6, 7]


def _all_resumed() -> tuple[dict[int, Pair], dict[int, Pair]]:
    of_one = {step: _resumed(step) for step in (BETWEEN, WITHIN)}
    return of_one, _each_resumed([2 * INTERVAL + in_round for in_round in IN_ROUND])


@pytest.fixture(scope="module")
def resumed() -> list[tuple[dict[int, Pair], dict[int, Pair]]]:
    """By replica, from the checkpoint of one and from each one's own, then by the step of it."""
    return launch(_all_resumed, 4)


def test_a_run_that_is_resumed_between_generations_is_the_uninterrupted_one(resumed: list[Any]) -> None:
    for whole, again in (of_one[BETWEEN] for of_one, _ in resumed):
        assert_allclose(again["weights"], whole["weights"], rtol=1e-12)
        assert_allclose(again["bases"], whole["bases"][3:], rtol=1e-12)


def test_in_the_middle_of_a_generation_it_goes_on_from_the_mean_with_the_same_window(resumed: list[Any]) -> None:
    for whole, again in (of_one[WITHIN] for of_one, _ in resumed):
        assert_allclose(again["values"][0], whole["values"][2], rtol=1e-12)
        assert len(again["bases"]) == len(whole["bases"]) - 2
        assert np.isfinite(again["weights"]).all()


@pytest.mark.parametrize("in_round", IN_ROUND)
def test_every_ranks_own_checkpoint_continues_a_generation_exactly(resumed: list[Any], in_round: int) -> None:
    for whole, again in (of_each[2 * INTERVAL + in_round] for _, of_each in resumed):
        assert again["weights"] == whole["weights"]
        assert again["bases"] == whole["bases"][2:]
        assert again["probes"] == whole["probes"][2:]


def _looked_at(step: int) -> tuple[float, float, float]:
    run = _Run()
    run.advance(step)
    own = run.model.weight.detach().clone()
    with run.explorer.converged():
        together = run.loss(*HELD_OUT).item()
    assert torch.equal(run.model.weight, own)
    alone = run.loss(*HELD_OUT).item()
    dist.all_reduce(own)
    with torch.no_grad():
        run.model.weight.copy_(own / dist.get_world_size())
    return together, alone, run.loss(*HELD_OUT).item()


def test_in_mid_generation_the_mean_is_by_held_out_losses() -> None:
    found = launch(_looked_at, 4, INTERVAL + 5)
    together = {each[0] for each in found}
    assert len(together) == 1
    best, plain = min(each[1] for each in found), found[0][2]
    assert together.pop() < plain
    assert plain > 1.02 * best  # replicas do differ


def _on_fewer(saved: Any) -> tuple[list[float], dict[str, Any]]:
    run = _Run()
    run.load(saved)
    own = [run.optimizer.param_groups[0]["weight_decay"]]
    run.advance(TOTAL_STEPS)
    return own, run.found()


def _save_at(step: int) -> tuple[Any, float]:
    run = _Run()
    run.advance(step)
    return run.saved(), run.found()["bases"][-1]


def test_on_another_number_of_replicas_base_and_window_stay() -> None:
    saved, base = launch(_save_at, 4, 2 * INTERVAL)[0]
    width = saved[2]["rounds"]["panel"]["controller"]["width"][1]
    results = launch(_on_fewer, 2, saved)
    low, high = sorted(own[0] for own, _ in results)
    assert high / low == pytest.approx(math.exp(2 * WINDOW * width))
    assert low <= base * (1 + 1e-9)
    assert base <= high * (1 + 1e-9)
    assert len({str(found["weights"]) for _, found in results}) == 1


def _broken() -> dict[str, Any]:
    run = _Run()
    run.advance(TOTAL_STEPS, broken=11)
    return run.found()


def test_a_replica_that_is_not_finite_is_left_out_of_the_search_and_comes_back() -> None:
    results = launch(_broken, 4)
    for found in results:
        assert math.isnan(found["probes"][1][1])
        assert np.isfinite(found["probes"][2]).all()
        assert np.isfinite(found["weights"]).all()
        assert np.isfinite(found["bases"]).all()
        assert found["weights"] == results[0]["weights"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradients": "shared"}, 'needs gradients="local"'),
        ({"probe": None}, "needs probe=, a loss on held-out data"),
        ({"total_steps": None}, "needs total_steps, at least twice the interval"),
        ({"total_steps": 15}, "needs total_steps, at least twice the interval"),
        ({"knobs": [knobs.Epsilon(), knobs.WeightDecay()]}, "needs exactly one knob, and no LearningRate"),
        ({"knobs": [knobs.LearningRate()]}, "needs exactly one knob, and no LearningRate"),
        ({"knobs": [knobs.Epsilon(adapt=False)]}, "needs adapt=True of that knob"),
        ({"averaging": Averaging(outer="nesterov")}, 'outer must be left out with horizon="long"'),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], text: str) -> None:
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {
        "knobs": [knobs.Epsilon()], "interval": INTERVAL, "total_steps": TOTAL_STEPS, "gradients": "local",
        "probe": lambda: 0.0, "horizon": "long", **options,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        Explorer(model, optimizer, **given)
