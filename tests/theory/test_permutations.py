"""docs/theory.md, "Several knobs": what one vector of losses tells about two of them."""

from __future__ import annotations

import numpy as np
import pytest

from hdet.checks import FloatArray
from hdet.controllers.base import Evidence
from hdet.ensemble.controllers import PaperController
from hdet.policy.spread import assign, multipliers

NUM_REPLICAS, SPREAD, NUM_ROUNDS = 4, 0.1, 600
EFFECTS = np.array([1.0, -3.0])  # the first knob should come down, the second, which does more, go up


def _moves(how: str) -> FloatArray:
    """(rounds, knobs): what the paper's controller makes of one round each, at a temperature that is linear."""
    controller = PaperController(temperature=10.0, rate=1.0, momentum=0.0)
    found = []
    for index in range(1, NUM_ROUNDS + 1):
        if how == "fixed":
            places = np.tile(multipliers(NUM_REPLICAS, 1.0) - 1, (2, 1))
        else:
            places = assign(NUM_REPLICAS, 2, seed=0, round_index=index, balanced=how == "balanced")
        rho = 1 + SPREAD * places
        _, decision = controller.update(controller.init(2), Evidence(EFFECTS @ (rho - 1), rho))
        found.append(np.log(decision.factors))
    return np.array(found)


def test_with_fixed_multipliers_all_knobs_move_alike_whatever_each_of_them_does() -> None:
    moves = _moves("fixed")
    np.testing.assert_array_equal(moves[:, 0], moves[:, 1])
    assert (moves > 0).all()  # the first in the wrong direction, always


def test_permutations_tell_them_apart_on_average_and_balance_in_every_round() -> None:
    permuted, balanced = _moves("permuted"), _moves("balanced")
    for moves in (permuted, balanced):
        assert moves[:, 0].mean() < 0 < moves[:, 1].mean()
    wrong = (permuted[:, 0] > 0).mean()
    assert 0.1 < wrong < 0.5
    assert (balanced[:, 0] < 0).all()
    assert (balanced[:, 1] > 0).all()
    # In units of its mean, what another knob's effect adds to each round's noise.
    assert permuted[:, 0].std() / -permuted[:, 0].mean() == pytest.approx(3 / np.sqrt(NUM_REPLICAS - 1), rel=0.15)
    assert balanced[:, 0].std() < 0.05 * -balanced[:, 0].mean()
