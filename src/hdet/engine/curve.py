"""The learning rates of a run as they were: a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.checks import mapping_of, numbers_of

MAX_POINTS = 512


class Curve:
    """Learning rates of each param group, at the ends of rounds. When it is full, every other point goes."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[list[float]] = []

    def add(self, step: int, values: Sequence[float]) -> None:
        for row in self.values:  # param groups may have joined
            row += [math.nan] * (len(values) - len(row))
        self.steps.append(step)
        self.values.append(list(values))
        if len(self.steps) > MAX_POINTS:
            # The first and the last stay.
            self.steps, self.values = self.steps[::2], self.values[::2]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "values": [list(row) for row in self.values]}

    @staticmethod
    def check_state(state: Any) -> tuple[list[int], list[list[float]]]:
        """Steps and values of a saved state; ValueError or KeyError where it cannot be used."""
        state = mapping_of(state, "curve")
        steps = numbers_of(state["steps"], "steps of the curve", None, low=0)
        if len(steps) > MAX_POINTS + 1 or (steps[1:] <= steps[:-1]).any():
            raise ValueError(f"steps of the curve must be at most {MAX_POINTS + 1} that rise, but got {len(steps)}")
        if not len(steps):
            return [], []
        width = len(state["values"][0]) if state["values"] else 0
        values = numbers_of(state["values"], "values of the curve", len(steps), width, finite=False)
        return [int(step) for step in steps], values.tolist()

    def load(self, saved: tuple[list[int], list[list[float]]]) -> None:
        """Continue from what :meth:`check_state` has found."""
        self.steps, self.values = list(saved[0]), [list(row) for row in saved[1]]
