"""The valley controller: where the loss over a wide window is lowest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.controllers import Evidence
from hdet.controllers.base import pack_state, unpack_state
from hdet.ensemble.controllers import ValleyController
from hdet.ensemble.controllers.valley import ValleyState, lowest

PLACES = np.linspace(-1.5, 1.5, 4)


@given(st.floats(-0.9, 0.9), st.floats(0.1, 10), st.permutations(range(5)))
def test_of_a_parabola_inside_the_window_it_is_the_lowest_point(best: float, bend: float, order: list[int]) -> None:
    places = np.linspace(-1, 1, 5)[order]
    found, inside = lowest(places, 3 + bend * (places - best) ** 2)
    assert found == pytest.approx(best, abs=0.26 if abs(best) > 0.74 else 1e-9)
    assert inside == (abs(best) <= 0.75 - 1e-12) or math.isclose(abs(best), 0.75)


@pytest.mark.parametrize(
    ("losses", "patience", "found", "inside"),
    [
        ([1.0, 2.0, 3.0, 4.0], 0.0, -1.5, False),
        ([4.0, 3.0, 2.0, 1.0], 0.0, 1.5, False),
        ([2.0, 1.0, math.nan, 4.0], 0.0, -0.5, True),  # nothing is known of one neighbour
        ([1.0, math.inf, math.nan, 4.0], 0.0, -1.5, False),
        ([math.nan, 1.0, math.nan, math.nan], 0.0, 0.0, False),
        ([math.nan] * 4, 0.0, 0.0, False),
        ([1.0, 1.04, 1.2, 1.5], 0.05, -1.0, True),
        ([1.0, 1.06, 1.2, 1.5], 0.05, -1.5, False),
        ([-1.0, -0.96, -0.8, -0.5], 0.05, -1.0, True),
    ],
)
def test_ends_of_the_window_missing_losses_and_patience(
    losses: list[float], patience: float, found: float, inside: bool
) -> None:
    place, is_inside = lowest(PLACES, np.array(losses), patience)
    assert place == pytest.approx(found)
    assert is_inside == inside


def test_of_two_replicas_the_better_one_counts_and_the_window_narrows() -> None:
    assert lowest(np.array([0.7, -0.7]), np.array([2.0, 1.0])) == (-0.7, True)


def test_the_window_narrows_where_the_best_place_is_inside_and_closes_at_the_end() -> None:
    controller = ValleyController(patience=[0.0, 0.1], narrow=0.5)
    state = controller.init(2)
    places = np.stack([np.ones(4), 1 + PLACES])
    state, decision = controller.update(state, Evidence(np.array([2.0, 1.0, 1.5, 3.0]), places, progress=0.2))
    assert controller.widths(state).tolist() == [1.0, 0.5]
    assert decision.factors[0] == 1
    assert decision.factors[1] == pytest.approx(math.exp(-0.5 + 0.5 / 3))
    state, _ = controller.update(state, Evidence(np.array([2.0, 1.0, 1.5, 3.0]), places, progress=1.0))
    assert controller.widths(state).tolist() == [0.0, 0.0]


def test_without_training_losses_half_of_the_patience_fades() -> None:
    controller, losses = ValleyController(patience=0.2), np.array([1.0, 1.04, 1.2, 1.5])
    ends = []
    for progress in (0.5, 0.8):
        _, decision = controller.update(controller.init(1), Evidence(losses, 1 + PLACES[None], progress=progress))
        ends.append(math.log(decision.factors[0]))
    assert ends == [pytest.approx(-1.0), pytest.approx(-1.5)]
    _, decision = ValleyController().update(controller.init(1), Evidence(losses, 1 + PLACES[None]))
    assert math.log(decision.factors[0]) == pytest.approx(-1.5)  # none by default


@pytest.mark.parametrize(
    ("trained", "progress", "patience", "found"),
    [
        ([0.98, 1.0, 1.1, 1.2], 0.2, 0.2, -1.0),  # a gap of 0.02 grows by four times that
        ([0.98, 1.0, 1.1, 1.2], 0.5, 0.2, -1.5),  # and here by one
        ([1.10, 1.0, 1.1, 1.2], 0.2, 0.2, -1.5),  # nothing is learned by heart, and nothing will be
        ([0.50, 1.0, 1.1, 1.2], 0.2, 0.2, -1.0),  # 0.16 at most, in which two of them are
        ([0.50, 1.0, 1.1, 1.2], 0.2, 0.0, -1.5),
        ([math.nan, 0.5, 0.5, 0.5], 0.2, 0.2, -1.0),  # not known: half of 0.16
    ],
)
def test_patience_is_what_the_gap_would_still_grow(
    trained: list[float], progress: float, patience: float, found: float
) -> None:
    controller, losses = ValleyController(patience=patience), np.array([1.0, 1.04, 1.2, 1.5])
    evidence = Evidence(losses, 1 + PLACES[None], progress=progress, trained=np.array(trained))
    _, decision = controller.update(controller.init(1), evidence)
    assert math.log(decision.factors[0]) == pytest.approx(found)


def test_its_state_is_saved_and_checked() -> None:
    controller = ValleyController()
    state = unpack_state(pack_state(ValleyState(np.array([0.36]))), controller.init(1))
    assert state.width.tolist() == [0.36]
    controller.check_state(state)
    with pytest.raises(ValueError, match=r"width must be in \[0, 1\], but got \[1.5\]"):
        controller.check_state(ValleyState(np.array([1.5])))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"patience must be finite and >= 0, but got patience=-1"):
        ValleyController(patience=-1)
    with pytest.raises(ValueError, match=r"narrow must be in \(0, 1\], but got narrow=0"):
        ValleyController(narrow=0)
    with pytest.raises(ValueError, match="patience must be one number or one for each of 3 knobs, but got 2"):
        ValleyController(patience=[0.1, 0.2]).init(3)
