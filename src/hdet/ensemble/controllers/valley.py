"""The valley controller: the lowest point of the held-out loss over a wide window of a knob, which then narrows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence


class ValleyState(NamedTuple):
    """Share of its spread that each knob still explores."""

    width: FloatArray


class ValleyController:
    r"""For long rounds, whose replicas stand evenly over a wide window of a knob and have time to show what it does.

    The base value goes to the lowest point of the parabola through the best replica and its two neighbours, and the
    window narrows; where the best is at an end of the window, the base goes there and the window stays as wide. After
    the last round that may move anything, the window is closed: all replicas train at the base value.

    What regularises pays off late, by what the model would memorise until then. The sign of that is the gap
    by which the best replica's held-out loss is above its training loss. If it grows as the run does, it will grow by
    (1 - progress) / progress of itself; among replicas whose losses are above the lowest by less than that, the one
    with the highest value counts as the best. Without training losses it is half of ``patience`` times what is left.

    Args:
        patience: share of the loss, >= 0, of each knob or of all, above which it never goes, times what is left of the
            run: 0 where a higher value regularises no more.
        narrow: what becomes of the window when its best place is inside, in (0, 1].
    """

    def __init__(self, *, patience: float | Sequence[float] = 0.0, narrow: float = 0.6) -> None:
        row = patience if isinstance(patience, (list, tuple, np.ndarray)) else [patience]
        if not all(number(value) >= 0 for value in row):
            raise ValueError(f"patience must be finite and >= 0, but got patience={shown(patience)}")
        require(0 < number(narrow) <= 1, "narrow", "in (0, 1]", narrow)
        self.patience, self.narrow = np.asarray(patience, dtype=np.float64), narrow

    def init(self, num_knobs: int) -> ValleyState:
        if self.patience.ndim and self.patience.shape != (num_knobs,):
            raise ValueError(
                f"patience must be one number or one for each of {num_knobs} knobs, but got {self.patience.size}"
            )
        return ValleyState(np.ones(num_knobs))

    def check_state(self, state: ValleyState) -> None:
        if ((state.width < 0) | (state.width > 1)).any():
            raise ValueError(f"width must be in [0, 1], but got {state.width.tolist()}")

    def widths(self, state: ValleyState) -> FloatArray:
        """What each knob's spread is multiplied by."""
        return state.width

    def update(self, state: ValleyState, evidence: Evidence) -> tuple[ValleyState, Decision]:
        progress = 0.0 if evidence.progress is None else evidence.progress
        moves, width = np.zeros(len(evidence.multipliers)), state.width.copy()
        patience = np.broadcast_to(self.patience, moves.shape) * max(1 - progress, 0.0)
        grown = growth_of_the_gap(evidence)
        patience = 0.5 * patience if grown is None else np.minimum(patience, grown)
        for k, places in enumerate(evidence.multipliers - 1.0):
            moves[k], inside = lowest(places, evidence.losses, float(patience[k]))
            width[k] *= self.narrow if inside else 1.0
        if progress >= 1:
            width[:] = 0.0
        return ValleyState(width), Decision(np.exp(moves), {})


def growth_of_the_gap(evidence: Evidence) -> float | None:
    """By what share of the loss the gap of the best replica would still grow; None where it is not known."""
    losses, trained, progress = evidence.losses, evidence.trained, evidence.progress
    if trained is None or not progress or not np.isfinite(losses).any():
        return None
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    gap, size = float(losses[best] - trained[best]), abs(float(losses[best]))
    if math.isnan(gap) or size == 0:
        return None
    return max(gap, 0.0) / size * max(1 - progress, 0.0) / progress


def lowest(places: FloatArray, losses: FloatArray, patience: float = 0.0) -> tuple[float, bool]:
    """Where the loss is lowest, and whether that is inside the window; of two replicas, the window narrows anyway."""
    finite = np.isfinite(losses)
    if finite.sum() < 2 or np.ptp(places[finite]) == 0:
        return 0.0, False
    order = np.argsort(places, kind="stable")
    x, y = places[order], np.where(finite, losses, np.inf)[order]
    least = y.min()
    best = int(np.flatnonzero(y <= least + patience * abs(least))[-1])
    if best in (0, len(x) - 1):
        return float(x[best]), len(x) == 2
    left, here, right = y[best - 1 : best + 2]
    bend = left - 2 * here + right
    if not (np.isfinite(bend) and bend > 0):
        return float(x[best]), True
    shift = float(np.clip((left - right) / (2 * bend), -0.5, 0.5))
    return float(x[best] + shift * (x[best + 1] - x[best])), True
