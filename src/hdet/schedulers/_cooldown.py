"""A cooldown: how far the learning rates of a run of unknown length have been annealed, and when it may begin."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet.checks import LARGEST, numbers_of, shown


class Cooldown(NamedTuple):
    """From a step, within so many steps, along a line to zero, from a share of the schedule."""

    begun: int
    steps: int
    share: float

    @property
    def end(self) -> int:
        return self.begun + self.steps

    def left(self, step: int) -> float:
        """What is left of the schedule at a step."""
        return self.share * max(1 - (step - self.begun) / self.steps, 0.0)

    @classmethod
    def of(cls, saved: Any) -> Cooldown | None:
        """Of a saved state; None where there was none. ValueError where it cannot be used."""
        found = numbers_of(saved, "cooldown", None, low=0, high=LARGEST)
        if not len(found):
            return None
        if len(found) != 3 or (found[:2] % 1).any() or found[1] < 1 or found[2] > 1:
            raise ValueError(
                f"cooldown must be a step, a number of steps and a share in [0, 1], but got {shown(saved)}"
            )
        return cls(int(found[0]), int(found[1]), float(found[2]))


def check_cooldown(steps: int, schedule: LRScheduler, *, step: int, ended: bool) -> None:
    """Raise where no cooldown of so many steps can begin at ``step``. ``ended``: whether training has."""
    if ended:
        raise RuntimeError(
            f"cooldown() must be called before training ends, but it has ended at step {step}; load a "
            "state that was saved before"
        )
    if isinstance(schedule, OneCycleLR) and step + steps > schedule.total_steps:
        left = schedule.total_steps - step
        raise ValueError(f"steps must be at most {left}, where the OneCycleLR ends, but got steps={steps}")
