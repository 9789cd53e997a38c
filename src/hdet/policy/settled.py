"""Where a setting that wanders has been, for the rest of the run: a mean in which later values count more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.checks import LARGEST, FloatArray, mapping_of, numbers_of, whole_of

POWER = 2
"""The t-th of the values counts about t^2 times: their middle is three quarters of the way."""


class Settled:
    """The mean of all values that were added; nobody needs to know how many there will be."""

    def __init__(self) -> None:
        self.num = 0
        self.mean: FloatArray = np.zeros(0)

    def add(self, values: FloatArray) -> None:
        """One more. Where there are more of them than before, it begins again."""
        if len(values) != len(self.mean):
            self.num, self.mean = 0, np.zeros(len(values))
        self.num += 1
        self.mean = self.mean + (POWER + 1) / (self.num + POWER) * (values - self.mean)

    def take(self) -> FloatArray | None:
        """The mean, once; None before there are values, and afterwards."""
        found = self.mean if self.num else None
        self.num, self.mean = 0, np.zeros(0)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num, "mean": self.mean.tolist()}

    @staticmethod
    def check_state(state: Any) -> tuple[int, FloatArray]:
        """ValueError or KeyError where it cannot be used."""
        state = mapping_of(state, "settled")
        return whole_of(state["num"], "num"), numbers_of(state["mean"], "mean", None, low=-LARGEST, high=LARGEST)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        self.num, self.mean = self.check_state(state)
