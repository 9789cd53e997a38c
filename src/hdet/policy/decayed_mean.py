"""Means of samples in which old ones fade, and how sure they are. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.checks import FloatArray, mapping_of, numbers_of


class DecayedMean:
    """Mean and standard error of each column of samples, of which the last counts 1, the one before ``fade``...

    Args:
        width: number of columns.
        fade: in (0, 1).
    """

    def __init__(self, width: int, fade: float) -> None:
        self.width = width
        self.fade = fade
        self.forget()

    def forget(self) -> None:
        self.sums = np.zeros((2, self.width))
        """Of the samples, and of their squares."""
        self.weights = np.zeros(2)
        """The sum of what they count, and of its square."""

    def add(self, sample: FloatArray) -> None:
        """One more; nothing where it is not finite."""
        if not np.isfinite(sample).all():
            return
        self.sums = self.fade * self.sums + np.stack([sample, sample**2])
        self.weights = np.array([self.fade, self.fade**2]) * self.weights + 1.0

    @property
    def num(self) -> float:
        """How many samples it is worth."""
        return float(self.weights[0] ** 2 / self.weights[1]) if self.weights[1] else 0.0

    @property
    def mean(self) -> FloatArray:
        """NaN before there are samples."""
        with np.errstate(invalid="ignore"):
            found: FloatArray = self.sums[0] / self.weights[0]
        return found

    @property
    def error(self) -> FloatArray:
        """Standard error of the mean; infinite where there are too few to tell."""
        if self.num < 1.5:
            return np.full(self.width, np.inf)
        variance = np.maximum(self.sums[1] / self.weights[0] - self.mean**2, 0.0)
        found: FloatArray = np.sqrt(variance / (self.num - 1))
        return found

    @property
    def z(self) -> FloatArray:
        """The mean in standard errors; 0 where nothing is known."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.nan_to_num(self.mean / self.error, nan=0.0, posinf=1e6, neginf=-1e6)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums.tolist(), "weights": self.weights.tolist()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError or KeyError where it cannot be used."""
        state = mapping_of(state, "a decayed mean")
        numbers_of(state["sums"], "sums", 2, self.width, low=-1e150, high=1e150)
        numbers_of(state["weights"], "weights", 2, low=0, high=1 / (1 - self.fade))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        self.sums = np.array(state["sums"], dtype=np.float64)
        self.weights = np.array(state["weights"], dtype=np.float64)


def certain(mean: FloatArray, error: FloatArray) -> FloatArray:
    """As much of a mean as is beyond its error: nothing below one standard error, almost all of it above five."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip(1 - (error / mean) ** 2, 0.0, 1.0)
    return np.where(np.isfinite(share), mean * share, 0.0)
