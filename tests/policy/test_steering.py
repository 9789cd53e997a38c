"""Steering: multipliers, scales, the level they start from and the state, without tensors or processes."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from hdet.checks import FloatArray
from hdet.controllers import Controller, Decision, Evidence, EvidenceController, LevelController
from hdet.controllers.base import pack_state
from hdet.ensemble.controllers import PaperController
from hdet.policy.spread import fan_out
from hdet.policy.steering import KnobEvidence, Panel, Steering

BOUNDS = (1e-6, 1e6)


class _NoState(NamedTuple):
    pass


class _Scripted:
    """Decides what it is told; keeps what it was shown."""

    def __init__(self, factors: list[float]) -> None:
        self.factors = np.array(factors)
        self.seen: list[Evidence] = []

    def init(self, num_knobs: int) -> _NoState:
        return _NoState()

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen.append(evidence)
        return state, Decision(self.factors, {"told": tuple(self.factors.tolist())})


def steer(controller: Controller | None = None, **options: Any) -> Steering:
    options = {"num_knobs": 2, "num_replicas": 4, "spread": 0.1, "scale_bounds": BOUNDS, "seed": 3, **options}
    return Steering(controller=controller, **options)


def test_multipliers_are_the_fan_out_of_the_round() -> None:
    steering = steer()
    for index in range(4):
        expected = fan_out(4, 0.1, seed=3, round_index=index, num_knobs=2)
        assert_array_equal(steering.multipliers, expected)
        assert steering.round_index == index
        steering.next_round()
    assert_array_equal(steer(round_index=5).multipliers, fan_out(4, 0.1, seed=3, round_index=5, num_knobs=2))


def test_the_controller_sees_the_round_and_moves_the_scales() -> None:
    controller = _Scripted([1.5, 0.5])
    steering = steer(controller)
    losses, slopes = np.array([1.0, 2.0, 3.0, math.nan]), (np.zeros(2), np.ones(2))
    steering.set_level(2.0)
    assert steering.decide(losses, slopes, elapsed=0.5, start=(3.0, 0.1))[0] == {"told": (1.5, 0.5)}
    [evidence] = controller.seen
    assert (evidence.level, evidence.elapsed, evidence.start, evidence.in_warmup) == (2.0, 0.5, (3.0, 0.1), False)
    assert_array_equal(evidence.scales, [2.0, 2.0])
    assert_array_equal(evidence.losses, losses)
    assert_array_equal(evidence.multipliers, steering.multipliers)
    assert evidence.slopes is slopes
    steering.decide(losses)
    assert controller.seen[1].slopes is None
    assert_allclose(steering.scales, [4.5, 0.5])


def test_without_a_controller_nothing_is_decided() -> None:
    steering = steer()
    assert steering.decide(np.ones(4)) == ({}, ())
    assert steering.scales.tolist() == [1.0, 1.0]
    assert steering.state_dict()["controller"] == {}


def test_one_replica_stands_at_the_base_values() -> None:
    for steering in (steer(num_replicas=1), with_panel(_Counting([1.0] * 5), num_replicas=1)):
        for _ in range(2):
            assert_array_equal(steering.multipliers, np.ones((len(steering.scales), 1)))
            assert_array_equal(steering.positions(0), steering.positions())
            steering.next_round()


def test_scales_stay_inside_their_bounds() -> None:
    steering = steer(_Scripted([3.0, 0.3]), scale_bounds=(0.2, 5.0))
    for _ in range(3):
        steering.decide(np.ones(4))
    assert steering.scales.tolist() == [5.0, 0.2]
    steering.cut(0.5)
    assert steering.scales.tolist() == [2.5, 0.2]
    steering.multiply(0.01)
    assert steering.scales.tolist() == [0.2, 0.2]


# -- where they start from ------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=6))
def test_scales_start_from_the_level_wherever_that_goes(levels: list[float]) -> None:
    """A level that is found in steps moves scales and their bounds along; what a controller has moved stays."""
    steering = steer(_Scripted([2.0, 0.5]), scale_bounds=(0.1, 10.0))
    steering.decide(np.ones(4))
    for level in levels:
        steering.set_level(level)
        assert_allclose(steering.scales, [2 * level, 0.5 * level])
        assert_allclose([steering.low, steering.high], [[0.1 * level] * 2, [10 * level] * 2])
    for _ in range(9):
        steering.decide(np.ones(4))
    assert_allclose(steering.scales, [10 * level, 0.1 * level])


def test_a_users_ceiling_stays_where_it_is_while_the_level_moves() -> None:
    steering = steer(scale_bounds=(0.1, 10.0))
    steering.set_level(1e-6)
    assert not steering.limit([3.0, math.inf])
    for level, expected in ((0.2, [0.2, 0.2]), (5.0, [3.0, 5.0]), (2.0, [2.0, 2.0])):
        steering.set_level(level)
        steering.limit([3.0, math.inf])
        assert_allclose(steering.scales, expected)


def test_a_warm_up_lets_a_share_of_the_learning_rates_through() -> None:
    steering = steer()
    steering.set_level(4.0)
    assert steering.effective.tolist() == [4.0, 4.0]
    steering.warmup = 0.25
    assert steering.effective.tolist() == [1.0, 1.0]
    steering.warmup = 0.0
    assert steering.effective.tolist() == [0.0, 0.0]
    assert steering.scales.tolist() == [4.0, 4.0]


def test_a_deep_fall_asks_for_a_new_anchor_once() -> None:
    steering = steer(_Counting([0.5, 1.0]))
    asked, rounds = [], []
    for _ in range(6):
        steering.decide(np.ones(4))
        asked.append(steering.wants_new_anchor())
        rounds.append(steering.state.total.tolist())
    assert asked == [False, False, True] * 2
    assert rounds == [[1.0] * 2, [2.0] * 2, [0.0] * 2] * 2  # the evidence goes with the anchor


def test_after_a_rollback_slopes_are_forgotten_and_what_the_run_has_gained_is_not() -> None:
    steering = steer(LevelController())
    advance(steering, 12)
    before = steering.state
    assert before.weight.all()
    steering.cut(0.5)
    assert not steering.state.weight.any()
    assert steering.state.filled.tolist() == [12.0, 12.0]
    assert_array_equal(steering.state.trail, before.trail)


# -- a panel --------------------------------------------------------------------------------------------------------


class _Summing(NamedTuple):
    total: FloatArray


class _Counting(_Scripted):
    """Its state is how often each knob was seen."""

    def init(self, num_knobs: int) -> Any:
        return _Summing(np.zeros(num_knobs))

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen.append(evidence)
        z = tuple(self.factors.tolist())
        return _Summing(state.total + 1), Decision(self.factors, {"z": z, "other": z})


def with_panel(controller: Controller, num_replicas: int = 4, **options: Any) -> Steering:
    """Two learning rates beside three knobs, of which the controller may move the first two."""
    panel = Panel(
        ("a", "b", "c"), (0.1, 0.5, 0.0), ((-1.0, 1.0), (-0.2, 0.2), (-1, 1)), (True, True, False), controller
    )
    return steer(_Counting([1.0, 0.5]), num_replicas=num_replicas, panel=dataclasses.replace(panel, **options))


def test_a_panel_moves_what_it_may_inside_its_bounds() -> None:
    controller = _Counting([7.0, 7.0, 2.0, 3.0, 7.0])
    steering = with_panel(controller)
    control, knobs = steering.decide(np.ones(4), progress=0.5)
    assert control["z"] == (1.0, 0.5)
    assert repr(knobs) == repr((KnobEvidence(z=2.0), KnobEvidence(z=3.0), KnobEvidence()))
    assert_allclose(steering.scales, [1.0, 0.5, 2.0, math.exp(0.2), 1.0])
    assert (len(controller.seen[0].multipliers), controller.seen[0].progress) == (5, 0.5)
    assert_allclose(steering.positions(), [math.log(2), 0.2, 0.0])
    before = steering.positions()
    steering.next_round()
    places = np.array([steering.positions(r) for r in range(4)])
    assert_allclose(np.abs(places[:, 0] - before[0]), [0.1] * 4)
    assert set(places[:, 1].round(9)) == {-0.2, 0.2}  # 0.5 to either side, cut off at the bounds
    assert_allclose(places[:, 2], 0.0)
    steering.set_bounds([(-1.0, 0.3), (-0.2, 0.1), (-1.0, 1.0)])
    assert_allclose(steering.positions(), [0.3, 0.1, 0.0])
    steering.warmup = 0.5
    assert_allclose(steering.effective, [0.5, 0.25, *steering.scales[2:]])


def test_a_panel_may_move_the_learning_rates_itself() -> None:
    steering = with_panel(_Counting([2.0, 3.0, 1.0, 1.0, 1.0]), moves_lrs=True)
    assert steering.decide(np.ones(4))[0] == {"z": (2.0, 3.0)}
    assert_allclose(steering.scales[:2], [2.0, 3.0])


def test_a_learning_rate_that_joins_leaves_the_others_evidence_alone() -> None:
    steering = with_panel(_Counting([1.0] * 5))
    steering.decide(np.ones(4))
    steering.decide(np.ones(4))
    before = steering.multipliers
    assert steering.add_lr() == 2
    assert_allclose(steering.scales[:3], [1.0, 0.25, 0.5])  # in the middle of the others
    assert_array_equal(steering.multipliers, np.insert(before, 2, 1.0, axis=0))
    assert steering.is_lr.tolist() == [True] * 3 + [False] * 3
    assert steering.state.total.tolist() == [2.0, 2.0, 0.0]
    assert steering.panel_state.total.tolist() == [2.0, 2.0, 0.0, 2.0, 2.0, 2.0]
    assert_allclose(steering.fallen, [0.0, math.log(4), 0.0, 0.0, 0.0, 0.0])
    assert_allclose([steering.low[:3], steering.high[:3]], [[1e-6] * 3, [1e6] * 3])
    steering.cut(0.5)
    assert_allclose(steering.scales, [0.5, 0.125, 0.25, 1.0, 1.0, 1.0])  # learning rates alone
    assert not steering.state.total.any()
    assert not steering.panel_state.total.any()


# -- the state ------------------------------------------------------------------------------------------------------


def advance(steering: Steering, num_rounds: int) -> list[FloatArray]:
    """Rounds whose losses are a function of the round's number."""
    rows = []
    for _ in range(num_rounds):
        rng = np.random.default_rng(steering.round_index)
        steering.set_level(1.5 ** min(steering.round_index, 4))
        steering.warmup = min((steering.round_index + 1) / 5, 1.0)
        steering.decide(2 - 0.3 * steering.multipliers[0] + 0.05 * rng.normal(size=steering.num_replicas))
        steering.next_round()
        rows.append(np.concatenate([steering.scales, steering.effective, steering.multipliers.ravel()]))
    return rows


@pytest.mark.parametrize(
    "controller",
    [LevelController(), EvidenceController(), PaperController(0.1), None],
    ids=["level", "evidence", "paper", "-"],
)
@pytest.mark.parametrize("saved_at", [0, 1, 3, 6])
def test_a_restored_steering_continues_bit_for_bit(controller: Controller | None, saved_at: int) -> None:
    whole = steer(controller)
    advance(whole, saved_at)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = steer(controller, seed=99)
    advance(resumed, 2)  # the state must replace what is there
    resumed.load_state_dict(state)
    assert resumed.state_dict() == whole.state_dict()
    for mine, theirs in zip(advance(resumed, 6), advance(whole, 6), strict=True):
        assert_array_equal(mine, theirs)


def test_another_number_of_replicas_keeps_the_scales() -> None:
    whole = steer(EvidenceController())
    advance(whole, 3)
    fewer = steer(EvidenceController(), num_replicas=2)
    fewer.load_state_dict(whole.state_dict())
    assert_array_equal(fewer.scales, whole.scales)
    assert_array_equal(fewer.multipliers, fan_out(2, 0.1, seed=3, round_index=3, num_knobs=2))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "three scales": ({"scales": [1.0] * 3}, "scales must be 2 finite numbers, one for each knob, but got"),
    "nan scale": ({"scales": [1.0, math.nan]}, "scales must be 2 finite numbers"),
    "negative scale": ({"scales": [1.0, -1.0]}, "scales must be positive, but got"),
    "zero scale": ({"scales": [1.0, 0.0]}, "scales must be positive, but got"),
    "level": ({"first_level": 0.0}, r"first_level must be a finite number > 0 and warmup in \[0, 1\], but got 0.0"),
    "warm-up": ({"warmup": 1.5}, r"warmup in \[0, 1\], but got .* and 1.5"),
    "fallen": ({"fallen": [-1.0, 0.0]}, "fallen must be 2 finite numbers"),
    "seed": ({"seed": -1}, "seed must be an integer >= 0, but got -1"),
    "round": ({"round": 1.5}, "round must be an integer >= 0, but got 1.5"),
    "knobs": ({"panel": {"names": ["a"], "controller": {}}}, r"must be those of the state, \['a'\], but got \[\]"),
    "knobs' names": ({"panel": {"names": "", "controller": {}}}, "must be those of the state, '', but got"),
    "controller": ({"controller": {"velocity": [0.0, 0.0]}}, "made with another controller"),
    "controller's numbers": (
        {"controller": pack_state(EvidenceController().init(2)) | {"slope": [math.nan, 0.0]}},
        "controller state 'slope' must be finite numbers of shape",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name: str) -> None:
    change, text = BROKEN[name]
    other = steer(EvidenceController())
    advance(other, 4)
    steering = steer(EvidenceController())
    advance(steering, 2)
    before = repr(steering.state_dict())
    with pytest.raises(ValueError, match=text):
        steering.load_state_dict({**other.state_dict(), **change})
    assert repr(steering.state_dict()) == before
    assert_array_equal(steering.multipliers, fan_out(4, 0.1, seed=3, round_index=2, num_knobs=2))
