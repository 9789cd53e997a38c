"""Where a replica's weights are, as a small state machine. No tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Where(Enum):
    """Of the weights at hand."""

    OWN = "each replica has its own: where a round has started from, or led to"
    MEAN = "all were left at the mean"


class Place:
    """Where the weights are, when they last were the mean of all replicas, and what may be done there.

    A round ends with :meth:`end_round`. :meth:`meet` is a mean in the middle of a round; within :meth:`set_aside` it
    lasts for a block.

    Args:
        step: optimizer steps taken; all replicas start from the same weights.
    """

    def __init__(self, step: int) -> None:
        self.mean_step = step
        self.where = Where.OWN
        self.is_set_aside = False
        self.finished = False

    @property
    def has_own(self) -> bool:
        """Whether the weights at hand are this replica's own."""
        return self.where is Where.OWN and not self.is_set_aside

    @property
    def left_at_mean(self) -> bool:
        """Whether a run that continues from here finds the weights at the mean, rather than in their own places."""
        return self.where is Where.MEAN and not self.is_set_aside

    def is_mean(self, step: int, *, placed: bool) -> bool:
        """Whether the weights after ``step`` are the mean; ``placed``: rounds start away from it, along the line."""
        return step == self.mean_step and (self.where is Where.MEAN or not placed)

    def refuse_inside(self, call: str) -> None:
        """Raise in a block of ``converged()``, whose weights are not those that train."""
        if self.is_set_aside:
            raise RuntimeError(f"{call} must not be called inside `with converged():`; leave the block first")

    def end_round(self, step: int, *, shared: bool, last: bool) -> None:
        """A round has ended, from one place for all where ``shared``; ``last``: the weights stay there."""
        self.refuse_inside("step()")
        if shared:
            self.mean_step = step
        self.where = Where.MEAN if last else Where.OWN

    def meet(self, step: int) -> None:
        """All are at their mean, in the middle of a round, and stay there."""
        self.mean_step, self.where = step, Where.MEAN

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block with other weights in place of these."""
        assert not self.is_set_aside
        before = self.mean_step, self.where
        self.is_set_aside = True
        try:
            yield
        finally:
            self.is_set_aside = False
            self.mean_step, self.where = before

    def resume(self, step: int, *, at_mean: bool) -> None:
        """Continue from a saved state: one model for all."""
        self.mean_step, self.where = step, Where.MEAN if at_mean else Where.OWN
        self.finished = False
