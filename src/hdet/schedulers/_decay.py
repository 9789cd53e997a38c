"""Eq. 8: how the base learning rate falls, geometrically, while the paper's controller acts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

DecayKind = Literal["schedule", "floor", "printed"]


class Decay(NamedTuple):
    """A decay of OneCycleAutoLR.

    Attributes:
        kind: ``"schedule"`` for OneCycleLR's own; see OneCycleAutoLR.
        warmup_steps: before which it does not set in.
        printed_ratio: what the learning rate is divided by over the run, as Eq. 8 is printed.
    """

    kind: DecayKind = "schedule"
    warmup_steps: int = 0
    printed_ratio: float = 1.0

    def begins(self, schedule: OneCycleLR) -> float:
        """The step from which the base falls geometrically: the end of the warm-up, but not before the peak."""
        peak: float = schedule._schedule_phases[0]["end_step"]
        return max(float(self.warmup_steps), peak, 0.0)

    def lrs(
        self, schedule: OneCycleLR, groups: Sequence[dict[str, Any]], starts: Sequence[float | Tensor]
    ) -> list[float | Tensor]:
        """A constant gamma a round, applied smoothly, so that it holds for any T and any last round.

        ``starts``: what the ``schedule`` gives these param ``groups`` where the decay begins.
        """
        begun = self.begins(schedule)
        progress = (schedule.last_epoch - begun) / (schedule.total_steps - begun)
        lrs = []
        for group, start in zip(groups, starts, strict=True):
            ratio = start / group["min_lr"] if self.kind == "floor" else self.printed_ratio
            lrs.append(start * math.exp(-math.log(ratio) * progress))
        return lrs
