"""Steering: multipliers, scales, the gate of Eq. 13 and the state, without tensors or processes."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from hdet.checks import FloatArray
from hdet.controllers import Controller, Decision, Evidence, EvidenceController, PaperController
from hdet.controllers.base import pack_state
from hdet.policy.spread import fan_out
from hdet.policy.steering import Steering

BOUNDS = (1e-6, 1e6)


class _NoState(NamedTuple):
    pass


class _Scripted:
    """Decides what it is told; keeps what it was shown."""

    def __init__(self, factors: list[float], openness: list[float] | None = None) -> None:
        self.factors, self.openness = np.array(factors), None if openness is None else np.array(openness)
        self.seen: list[Evidence] = []

    def init(self, num_knobs: int) -> _NoState:
        return _NoState()

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen.append(evidence)
        return state, Decision(self.factors, {"told": tuple(self.factors.tolist())}, self.openness)


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
    assert steering.decide(losses, slopes).lrs == {"told": (1.5, 0.5)}
    [evidence] = controller.seen
    assert_array_equal(evidence.losses, losses)
    assert_array_equal(evidence.multipliers, steering.multipliers)
    assert evidence.slopes is slopes
    steering.decide(losses)
    assert controller.seen[1].slopes is None
    assert_allclose(steering.scales, [2.25, 0.25])


def test_without_a_controller_nothing_is_decided() -> None:
    steering = steer()
    assert steering.decide(np.ones(4)) == ({}, ())
    assert steering.scales.tolist() == [1.0, 1.0]
    assert steering.state_dict()["controller"] == {}


def test_scales_stay_inside_their_bounds() -> None:
    steering = steer(_Scripted([3.0, 0.3]), scale_bounds=(0.2, 5.0), gated=True)
    for _ in range(3):
        steering.decide(np.ones(4))
    assert steering.scales.tolist() == [5.0, 0.2]
    steering.cut(0.5)
    assert steering.scales.tolist() == [2.5, 0.2]
    steering.rise(np.array([10.0, 0.0]))
    assert steering.scales.tolist() == [0.2, 0.2]


# -- the gate -------------------------------------------------------------------------------------------------------


@given(
    openness=st.floats(0, 1),
    rises=st.lists(st.floats(0, 2), min_size=1, max_size=8),
)
def test_the_gate_lets_through_its_share_of_a_rise(openness: float, rises: list[float]) -> None:
    """Eq. 13: schedule x scale rises by exp(g * openness)."""
    steering = steer(_Scripted([1.0, 1.0], [openness, 1.0]), gated=True)
    steering.decide(np.ones(4))
    for g in rises:
        steering.rise(np.array([g, g]))
    effective = np.log(steering.scales) + sum(rises)
    assert_allclose(effective, [openness * sum(rises), sum(rises)], atol=1e-9)


def test_before_any_evidence_the_gate_is_closed() -> None:
    steering = steer(_Scripted([1.0, 1.0], [1.0, 1.0]), gated=True)
    steering.rise(np.array([0.5, 0.1]))
    assert_allclose(np.log(steering.scales), [-0.5, -0.1])


def test_an_ungated_rise_passes() -> None:
    steering = steer(_Scripted([1.0, 1.0], [0.0, 0.0]))
    steering.rise(np.array([0.5, 0.1]))
    assert steering.scales.tolist() == [1.0, 1.0]


def test_each_knobs_gate_is_gone_after_its_first_fall() -> None:
    steering = steer(gated=True)
    steering.rise(np.array([0.5, 0.5]))
    steering.rise(np.array([0.0, -0.1]))  # a plateau is no fall
    assert steering.rising.tolist() == [True, False]
    assert_allclose(np.log(steering.scales), [-0.5, -0.5])  # a fall is never held back
    steering.rise(np.array([0.5, 0.5]))
    assert_allclose(np.log(steering.scales), [-1.0, -0.5])
    steering.rise(np.array([-0.5, 0.5]))
    steering.rise(np.array([0.5, 0.5]))
    assert steering.rising.tolist() == [False, False]
    assert_allclose(np.log(steering.scales), [-1.0, -0.5])


def test_a_controller_without_an_opinion_opens_the_gate() -> None:
    controller = _Scripted([1.0, 1.0], [0.25, 0.75])
    steering = steer(controller, gated=True)
    steering.decide(np.ones(4))
    controller.openness = None
    steering.decide(np.ones(4))
    assert steering.openness.tolist() == [1.0, 1.0]


# -- the state ------------------------------------------------------------------------------------------------------


def advance(steering: Steering, num_rounds: int) -> list[FloatArray]:
    """Rounds whose losses are a function of the round's number."""
    rows = []
    for _ in range(num_rounds):
        rng = np.random.default_rng(steering.round_index)
        steering.rise(np.array([0.1, 0.1 if steering.round_index < 4 else -0.1]))
        steering.decide(2 - 0.3 * steering.multipliers[0] + 0.05 * rng.normal(size=steering.num_replicas))
        steering.next_round()
        rows.append(np.concatenate([steering.scales, steering.openness, steering.multipliers.ravel()]))
    return rows


@pytest.mark.parametrize(
    "controller", [EvidenceController(), PaperController(0.1), None], ids=["evidence", "paper", "-"]
)
@pytest.mark.parametrize("saved_at", [0, 1, 3, 6])
def test_a_restored_steering_continues_bit_for_bit(controller: Controller | None, saved_at: int) -> None:
    whole = steer(controller, gated=True)
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
    "openness": ({"openness": [math.inf, 0.0]}, "openness must be 2 finite numbers"),
    "rising": ({"rising": [True]}, "rising must be 2 times True or False, but got"),
    "seed": ({"seed": -1}, "seed must be an integer >= 0, but got -1"),
    "round": ({"round": 1.5}, "round must be an integer >= 0, but got 1.5"),
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
