"""When a round has to be undone, and how often that may happen before the base values hold still."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.checks import FloatArray, whole_of
from hdet.policy.guard import LOST_STEPS, Guard, GuardState, pack_guard, unpack_guard

CUT = 0.5
"""What the learning rates are multiplied by when a round is undone."""

RECOVERY = 10
"""Healthy rounds that make up for one rollback."""


class BrokenError(RuntimeError):
    """Training breaks, and undoing rounds does not help."""


class Budget:
    """How many rollbacks a run has left: each takes one, and every ``RECOVERY`` healthy rounds give one back.

    Args:
        max_rollbacks: the budget at the start, and never more.
    """

    def __init__(self, max_rollbacks: int) -> None:
        self.max_rollbacks = max_rollbacks
        self.debt = 0
        """What has been taken and not given back, in healthy rounds."""

    def take(self) -> None:
        self.debt = min(self.debt + RECOVERY, RECOVERY * self.max_rollbacks)

    def recover(self) -> None:
        self.debt = max(self.debt - 1, 0)

    @property
    def spent(self) -> bool:
        """Whether less than one rollback is left. The scale then holds still: it must not rise and break again."""
        return self.debt > RECOVERY * max(self.max_rollbacks - 1, 0)


class Rollback:
    """Calls rounds broken, and counts those that were undone.

    Args:
        max_rollbacks: how many, before the scale holds still; and in a row, before it is an error.
        strict: raise where the scale would have to hold still.
        interval: optimizer steps of a round.
    """

    def __init__(self, max_rollbacks: int, *, strict: bool = False, interval: int = LOST_STEPS) -> None:
        self.budget = Budget(max_rollbacks)
        self.strict = strict
        self.guard, self.guard_state = Guard(interval=interval), GuardState()
        self.num_rollbacks = 0
        self.cause = ""
        """Of the last broken round."""
        self._warned = False

    def is_broken(self, losses: FloatArray, *, weights_fine: bool, losses_given: bool, step: int) -> bool:
        """Whether the round that ends has to be undone. Raises where undoing rounds does not help."""
        finite = losses[np.isfinite(losses)]
        max_rollbacks = self.budget.max_rollbacks
        if weights_fine and not losses_given:  # only the weights can tell
            self.guard_state, fine = self.guard_state._replace(num_strikes=0), True
        else:
            loss = float(finite.mean()) if weights_fine and len(finite) else math.nan
            usual = self.guard_state.recent[-1:]
            self.guard_state, fine = self.guard.update(self.guard_state, loss)
            self.cause = "loss or weights were not finite"
            if not fine and math.isfinite(loss):
                self.cause = f"the loss jumped to {loss:.4g} from {usual[0]:.4g}"
        if fine:
            self.budget.recover()
        elif self.guard_state.num_strikes > max_rollbacks or (self.strict and self.budget.spent):
            in_a_row = " in a row" if self.guard_state.num_strikes > max_rollbacks else ""
            raise BrokenError(
                f"training broke again at step {step} after {max_rollbacks} rollbacks{in_a_row}; lower the learning "
                "rate, look for bad data, or raise max_rollbacks"
            )
        return not fine

    @property
    def doubtful(self) -> bool:
        """Whether the last round may have been broken, so that its end is no place to go back to."""
        return self.guard_state.lost > 0

    def expect(self, first: float, noise: float) -> None:
        """What the loss is before training, and how far batches are apart."""
        self.guard_state = GuardState(first, noise=noise)

    def take(self, step: int, *, is_cut: bool) -> tuple[str, tuple[str, ...]]:
        """Count a round that is undone; returns what was done, and what the user should be told now.

        That is the first one, and the first time the budget is spent. ``is_cut``: whether learning rates were lowered.
        """
        self.num_rollbacks += 1
        self.budget.take()
        done = (
            f"the round that ended at step {step} was undone, because {self.cause}: weights and optimizer state are "
            "those of the last healthy round" + (f", and learning rates are multiplied by {CUT:g}" if is_cut else "")
        )
        messages = (f"{done}. Later ones are in scheduler.history",) if self.num_rollbacks == 1 else ()
        if not self.budget.spent or self.strict or self._warned:
            return done, messages
        self._warned = True
        return done, (
            *messages,
            f"max_rollbacks={self.budget.max_rollbacks} are spent: rounds break more often than every {RECOVERY} "
            "rounds. The learned scale holds still until healthy rounds have made up for it "
            "(RoundRecord.held), and broken rounds are still undone; lower the learning rate, or look for bad "
            "data. This warning is not repeated",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "guard": pack_guard(self.guard_state),
            "num_rollbacks": self.num_rollbacks,
            "rollback_debt": self.budget.debt,
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> tuple[GuardState, int, int]:
        """Guard, rollbacks and debt of a saved state; ValueError or KeyError where it cannot be used."""
        debt = whole_of(state.get("rollback_debt", 0), "rollback_debt")
        return unpack_guard(state["guard"]), whole_of(state["num_rollbacks"], "num_rollbacks"), debt

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.guard_state, self.num_rollbacks, debt = self.check_state(state)
        self.budget.debt = min(debt, RECOVERY * self.budget.max_rollbacks)


NO_ROLLBACK = Rollback(0).state_dict()
"""The state of a run that undoes nothing."""
