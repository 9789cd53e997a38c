"""Mistakes that a training loop makes without an error: noticed as it goes, and said with what to write instead."""

from __future__ import annotations

import warnings
from typing import Any

from hdet.notices import tell

MAX_LEFT_OUT = 3
"""Calls in a row that come after several optimizer steps each, before it is a habit."""


MAX_EMPTY = 3
"""Calls without an optimizer step since the one before, among the last :data:`WINDOW`, before it is a habit."""

WINDOW = 8
"""A GradScaler skips a step now and then, hundreds apart; a loop over micro-batches every second one at least."""


class Habits:
    """Watches how a loop calls ``step``.

    Args:
        name: of the scheduler.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_updates = 0
        """Optimizer steps since the last call."""
        self.counts_updates = False
        """Whether anybody counts them."""
        self._recent = 0
        """A bit for each of the last calls, the newest lowest: whether it came without an optimizer step."""
        self._told_empty = False
        self._past_end = False
        self._num_left_out = 0
        self._counted: list[int] = []

    def stepped(self, loss: Any) -> None:
        """A call of ``step(loss)``. Raises where the loss is the number of an epoch, before anything has changed."""
        if type(loss) is int or self._counted:
            self._refuse_epochs(loss)
        num_updates, self.num_updates = self.num_updates, 0
        if self.counts_updates and not self._told_empty:
            self._recent = (self._recent << 1 | (num_updates == 0)) % 2**WINDOW
            if num_updates == 0 and self._recent.bit_count() == MAX_EMPTY:
                self._tell_of_micro_batches()
        self._num_left_out = self._num_left_out + 1 if num_updates > 1 else 0
        if self._num_left_out == MAX_LEFT_OUT:
            warnings.warn(
                f"{self.name}.step() must be called after every optimizer step, but {num_updates} optimizer steps lie "
                f"between two calls, {MAX_LEFT_OUT} times in a row: what it learns from, and its schedule, count "
                "optimizer steps. Write optimizer.step(); scheduler.step(loss) in the loop over batches, not over "
                "epochs, and give total_steps and the schedule's lengths in optimizer steps",
                stacklevel=3,
            )

    def _tell_of_micro_batches(self) -> None:
        self._told_empty = True
        tell(
            f"{self.name}.step() must be called once for each optimizer step, but {MAX_EMPTY} calls came without "
            "optimizer.step() since the call before: with gradient accumulation its schedule and its rounds run ahead. "
            "Call scheduler.observe(loss) for each micro-batch, and scheduler.step() after optimizer.step(). If a "
            "GradScaler has skipped those steps, as it does at the start of a run, there is nothing to do"
        )

    def past_end(self, step: int, total_steps: float) -> None:
        """A step after the last one, at a learning rate of 0. Warns once."""
        if not self._past_end:
            self._past_end = True
            warnings.warn(
                f"{self.name} has reached the end of the run, total_steps={total_steps:.0f}, where the learning rate "
                f"is 0, but step {step} was taken: from here on nothing is learned. Pass total_steps=, the number of "
                f"optimizer steps of the whole loop, {step} or more: epochs * len(loader), divided by the "
                "micro-batches of a step",
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
