"""When validation losses turn: the model overfits, and the final decay should begin. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.checks import numbers_of, whole_of

SURE = 2.0
"""Standard errors by which the last evaluations are above the best ones."""
WINDOW_SHARE, MIN_WINDOW = 4, 2
"""The last quarter of the evaluations is compared with the best of as many in a row; of two at least."""
SMALLEST_NOISE = 0.005
"""Of the best mean: no evaluation is taken to be more exact."""
LARGEST = 1e100
"""Losses above count as not finite: sums of them would not be."""
MAX_KEPT = 512
"""Evaluations; of a longer run every second one is forgotten."""
DECAY_SHARE = 0.3
"""Of the steps so far: the length of a decay that begins early."""
BEST_SHARE, BEST_RATE = 0.6, 0.25
"""The same of one from the best weights so far; and the share of the learning rate that it starts from."""


class Evaluations:
    """Validation losses of a run, and whether they have turned.

    Attributes:
        steps, losses: of each evaluation so far.
        turned_at: the step at which they had turned; None before.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.turned_at: int | None = None

    @property
    def best_step(self) -> int | None:
        """That of the lowest loss."""
        return self.steps[self.losses.index(min(self.losses))] if self.losses else None

    def add(self, step: int, loss: float) -> bool:
        """Take one in; True once, when they turn. One that is not finite tells nothing."""
        if not abs(loss) <= LARGEST:
            return False
        self.steps.append(step)
        self.losses.append(loss)
        if len(self.steps) > MAX_KEPT:
            self.steps, self.losses = self.steps[1::2], self.losses[1::2]
        if self.turned_at is None and have_turned(self.losses):
            self.turned_at = step
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "losses": list(self.losses), "turned_at": self.turned_at}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Evaluations:
        """A new one out of a state; ValueError or KeyError where it cannot be."""
        found = cls()
        if not state:  # of a version that had none
            return found
        found.steps = [whole_of(step, "steps") for step in state["steps"]]
        found.losses = numbers_of(state["losses"], "losses", len(found.steps), low=-LARGEST, high=LARGEST).tolist()
        if state["turned_at"] is not None:
            found.turned_at = whole_of(state["turned_at"], "turned_at")
        if len(found.steps) > MAX_KEPT:
            raise ValueError(f"evaluations must be at most {MAX_KEPT}, but got {len(found.steps)}")
        return found


def have_turned(losses: Sequence[float]) -> bool:
    """Whether the last quarter is above the best stretch of the same length, beyond the noise of evaluations.

    Losses that were never below the first one have not turned: they are of a metric that should rise, or too few.
    """
    num = len(losses)
    window = max(num // WINDOW_SHARE, MIN_WINDOW)
    if num < 2 * window + 1:
        return False
    earlier, late = losses[:-window], losses[-window:]
    lowest = min(earlier)
    if lowest >= losses[0] or min(late) <= lowest:
        return False
    best = min(math.fsum(earlier[i : i + window]) for i in range(len(earlier) - window + 1)) / window
    # Of three in a row, what a trend does not explain.
    tail = losses[num // 4 :]
    bends = [(a - b) - (b - c) for a, b, c in zip(tail, tail[1:], tail[2:], strict=False)]
    noise = math.hypot(*bends) / math.sqrt(6 * len(bends))
    error = max(noise, SMALLEST_NOISE * abs(best)) * math.sqrt(2 / window)
    return math.fsum(late) / window - best > SURE * error
