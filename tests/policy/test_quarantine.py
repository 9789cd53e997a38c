"""Quarantine: finds what has exploded, and leaves healthy noise alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.checks import FloatArray
from hdet.policy.quarantine import MIN_ROUNDS, Quarantine, QuarantineState, pack_quarantine, unpack_quarantine

THRESHOLD = 20.0


def _walk(rounds: list[FloatArray], threshold: float = THRESHOLD) -> list[list[int]]:
    state, found = QuarantineState(), []
    for losses in rounds:
        state, out = Quarantine(threshold).update(state, losses)
        found.append(np.flatnonzero(out).tolist())
    return found


def _noise(num_replicas: int, num_rounds: int, seed: int = 0, kind: str = "normal") -> list[FloatArray]:
    rng = np.random.default_rng(seed)
    size = (num_rounds, num_replicas)
    return list(2.0 + 0.01 * (rng.standard_normal(size) if kind == "normal" else rng.standard_t(3, size)))


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_an_explosion_is_found_at_once_and_alone(num_replicas: int) -> None:
    rounds = _noise(num_replicas, 20)
    rounds[10] = rounds[10] + np.where(np.arange(num_replicas) == 1, 1.0, 0.0)
    assert _walk(rounds) == [[1] if index == 10 else [] for index in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize(("kind", "limit"), [("normal", 0), ("student", 4)])
def test_healthy_noise_is_left_alone(num_replicas: int, kind: str, limit: int) -> None:
    alarms = sum(bool(found) for found in _walk(_noise(num_replicas, 2000, kind=kind)))
    assert alarms <= limit


def test_a_loss_far_below_the_others_is_no_explosion() -> None:
    rounds = _noise(4, 10)
    rounds[8] = rounds[8] - np.array([0.0, 5.0, 0.0, 0.0])
    assert not any(_walk(rounds))


def test_nobody_is_judged_before_it_is_known_what_is_usual() -> None:
    rounds = _noise(4, 10)
    for index in range(MIN_ROUNDS):
        rounds[index] = rounds[index] + np.array([0.0, 1.0, 0.0, 0.0])
    assert not any(_walk(rounds)[:MIN_ROUNDS])


def test_equal_losses_say_nothing_and_nan_is_not_judged() -> None:
    assert not any(_walk([np.full(4, 2.0)] * 8 + [np.array([2.0, 2.0, 9.0, 2.0])]))
    rounds = _noise(3, 10)
    rounds[9] = np.array([math.nan, 2.0, math.inf])
    assert _walk(rounds)[9] == []


def test_noise_that_has_grown_for_good_becomes_usual() -> None:
    rounds = [*_noise(2, 20), *[2 + 40 * (r - 2) for r in _noise(2, 200, seed=1)]]
    found = _walk(rounds)
    assert any(found[20:40])
    assert not any(found[-100:])


@given(st.lists(st.lists(st.floats(allow_nan=True), min_size=4, max_size=4), max_size=12))
@settings(deadline=None, max_examples=60, database=None)
def test_any_losses_leave_a_finite_state_and_half_of_the_replicas(rounds: list[list[float]]) -> None:
    state = QuarantineState()
    for losses in rounds:
        with np.errstate(all="ignore"):
            state, out = Quarantine(THRESHOLD).update(state, np.array(losses))
        assert out.sum() <= 2
        assert unpack_quarantine(pack_quarantine(state)) == state


@pytest.mark.parametrize("packed", [[-1.0], [math.nan], "123", {"recent": []}])
def test_a_state_that_cannot_be_is_refused(packed: object) -> None:
    with pytest.raises(ValueError, match=r"quarantine must be finite numbers >= 0|could not convert"):
        unpack_quarantine(packed)
