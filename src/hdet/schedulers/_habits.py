"""Mistakes that a training loop makes without an error: noticed as it goes, and said with what to write instead."""

from __future__ import annotations

import warnings
from typing import Any

MAX_LEFT_OUT = 3
"""Calls in a row that come after several optimizer steps each, before it is a habit."""


class Habits:
    """Watches how a loop calls ``step``.

    Args:
        name: of the scheduler.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_updates = 0
        """Optimizer steps since the last call."""
        self._num_left_out = 0
        self._counted: list[int] = []

    def stepped(self, loss: Any) -> None:
        """A call of ``step(loss)``. Raises where the loss is the number of an epoch, before anything has changed."""
        if type(loss) is int or self._counted:
            self._refuse_epochs(loss)
        num_updates, self.num_updates = self.num_updates, 0
        self._num_left_out = self._num_left_out + 1 if num_updates > 1 else 0
        if self._num_left_out == MAX_LEFT_OUT:
            warnings.warn(
                f"{self.name}.step() must be called after every optimizer step, but {num_updates} optimizer steps lie "
                f"between two calls, {MAX_LEFT_OUT} times in a row: what it learns from, and its schedule, count "
                "optimizer steps. Write optimizer.step(); scheduler.step(loss) in the loop over batches, not over "
                "epochs, and give total_steps and the schedule's lengths in optimizer steps",
                stacklevel=3,
            )

    def _refuse_epochs(self, loss: Any) -> None:
        if type(loss) is not int or (self._counted and loss != self._counted[-1] + 1):
            self._counted = []
        if type(loss) is int:
            self._counted.append(loss)
        if len(self._counted) == 3:
            counted, self._counted = self._counted, []
            raise ValueError(
                f"{self.name}.step() takes the loss of the step, but got {counted} in three calls, which look like "
                "numbers of steps or epochs: write scheduler.step(loss) after every optimizer.step(). A loss that "
                "counts is float(loss)"
            )
