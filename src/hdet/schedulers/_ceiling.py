"""``max_lr``: a ceiling in the user's units, which the learned scales stay under."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.checks import number, shown
from hdet.engine.values import Values
from hdet.schedulers._common import MAX_LR


class Ceiling:
    """The highest learning rate of each param group.

    Args:
        given: a number, or one for each of them; None for no ceiling.
        num_groups: param groups; one that joins later has the first one's.
    """

    def __init__(self, given: Any, num_groups: int) -> None:
        found = list(given) if isinstance(given, (list, tuple)) else [given] * num_groups
        if given is not None and (len(found) != num_groups or not all(0 < number(lr) <= MAX_LR for lr in found)):
            raise ValueError(
                f"max_lr must be a finite number > 0, or one for each of {num_groups} param groups, but got "
                f"max_lr={shown(given)}"
            )
        self.lrs = [] if given is None else [float(lr) for lr in found]

    def hold(self, values: Values, scheduled: Sequence[float]) -> None:
        """Bring scales down to where no replica's learning rate exceeds it, at the schedule's values now."""
        steering = values.steering
        highest = [math.inf] * steering.num_lrs
        for k, (lr, knob) in enumerate(zip(values.of_all(scheduled), values.knob_of_group, strict=True)):
            if lr > 0:
                most = self.lrs[k] if k < len(self.lrs) else self.lrs[0]
                highest[knob] = min(highest[knob], most / (float(lr) * (1 + steering.spread)))
        if steering.limit(highest):
            values.update()
