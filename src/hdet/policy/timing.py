"""What a run's length and its schedule's shape decide: rounds, and when to hold still."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN_INTERVAL, MAX_INTERVAL = 20, 50
LATE_SHARE, LONGEST_FALL = 0.2, 0.45
KEEP_SHARE, KEEP_STEPS = 0.2, 200
"""Of the run: when a scale that leaves the schedule's shape alone is found; and in a run of unknown length."""


def default_interval(total_steps: int | None) -> int:
    """T where none is given: a hundredth of the run, but steps enough to tell an error, and not more than 50."""
    return UNKNOWN_INTERVAL if total_steps is None else min(max(total_steps // 100, 4), MAX_INTERVAL)


def keep_start(total_steps: int | None) -> float:
    """The step from which the scale holds still where the schedule's shape is to be kept."""
    return KEEP_STEPS if total_steps is None else KEEP_SHARE * total_steps


def hold_start(total_steps: int, shape: Sequence[float] = ()) -> float:
    """The step from which the scale holds still.

    That is the start of the schedule's final decay, if it has a late one; a schedule that falls for most of the run
    leaves the scale free until the last fifth.

    Args:
        total_steps: of the run.
        shape: the schedule's values in steps that divide the run evenly, the first and the last included; empty where
            it is unknown.
    """
    last = at = len(shape) - 1
    while at > 0 and shape[at - 1] > shape[at] * (1 + 1e-9):
        at -= 1
    begun = at / last if last > 0 else 0.0
    return total_steps * (begun if 1 - LONGEST_FALL < begun < 1 else 1 - LATE_SHARE)
