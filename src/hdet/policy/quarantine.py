"""Quarantine: which replica's loss has exploded, by median and median absolute deviation. Pure numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hdet.checks import FloatArray, number, shown

NUM_RECENT = 16
MIN_ROUNDS = 4
NORMAL = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""


class QuarantineState(NamedTuple):
    """How far apart healthy replicas' losses were in recent rounds, as robust standard deviations."""

    recent: tuple[float, ...] = ()


class Quarantine:
    """Finds replicas whose loss is far above the others'.

    What is usual is the larger of this round's deviation and the median of recent ones. Two replicas are equally far
    from their median, so among them only recent rounds tell; so none is judged before four rounds are known.

    Args:
        threshold: robust standard deviations above the median.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def update(self, state: QuarantineState, losses: FloatArray) -> tuple[QuarantineState, NDArray[np.bool_]]:
        """The next state, and which replicas are out; losses that are not finite are not judged."""
        finite = np.isfinite(losses)
        out = np.zeros(len(losses), dtype=bool)
        if finite.sum() < 2:
            return state, out
        excess = np.where(finite, losses - np.median(losses[finite]), 0.0)
        deviation = NORMAL * float(np.median(np.abs(excess[finite])))
        if not math.isfinite(deviation):
            return state, out  # beyond what numbers can hold
        if len(state.recent) >= MIN_ROUNDS and (recent := float(np.median(state.recent))) > 0:
            usual = recent if finite.sum() == 2 else max(recent, deviation)
            out = excess > self.threshold * usual
            # An explosion must not pass for usual, but noise that has grown for good must in the end.
            deviation = min(deviation, 2 * recent)
        return QuarantineState((*state.recent, deviation)[-NUM_RECENT:]), out


def pack_quarantine(state: QuarantineState) -> list[float]:
    """A state as plain types."""
    return list(state.recent)


def unpack_quarantine(packed: Any) -> QuarantineState:
    """The inverse of :func:`pack_quarantine`."""
    if not isinstance(packed, (list, tuple)) or not all(number(v) >= 0 for v in packed):
        raise ValueError(f"quarantine must be finite numbers >= 0, but got {shown(packed)}")
    return QuarantineState(tuple(map(float, packed))[-NUM_RECENT:])
