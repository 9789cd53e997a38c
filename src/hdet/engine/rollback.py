"""Rollback: a round that breaks the model is undone; where that happens too often, the scale holds still."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.policy.guard import Guard, GuardState, pack_guard, unpack_guard
from hdet.weights.averaged import Weights
from hdet.weights.snapshot import Snapshot

CUT = 0.5
"""What the scales are multiplied by when a round is undone."""


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
        """Whether less than one rollback is left. The scale then holds still: it must not climb and break again."""
        return self.debt > RECOVERY * max(self.max_rollbacks - 1, 0)


class Rollback:
    """The guard that calls a round broken, and the copies to go back to.

    Args:
        snapshot: where the copies live.
        max_rollbacks: how many, before the scale holds still; and in a row, before it is an error.
        strict: raise where the scale would have to hold still.
    """

    def __init__(self, snapshot: Snapshot, max_rollbacks: int, *, strict: bool = False) -> None:
        self.snapshot = snapshot
        self.budget = Budget(max_rollbacks)
        self.strict = strict
        self._warned = False
        self.guard, self.guard_state = Guard(), GuardState()
        self.num_rollbacks = 0
        self._loaded: dict[int, Tensor] | None = None

    def is_broken(self, losses: FloatArray, *, weights_fine: bool, losses_given: bool, step: int) -> bool:
        """Whether the round that ends has to be undone. Raises where undoing rounds does not help."""
        finite = losses[np.isfinite(losses)]
        max_rollbacks = self.budget.max_rollbacks
        if weights_fine and not losses_given:  # only the weights can tell
            self.guard_state, fine = self.guard_state._replace(num_strikes=0), True
        else:
            loss = float(finite.mean()) if weights_fine and len(finite) else math.nan
            self.guard_state, fine = self.guard.update(self.guard_state, loss)
        if fine:
            self.budget.recover()
        elif self.guard_state.num_strikes > max_rollbacks or (self.strict and self.budget.spent):
            in_a_row = " in a row" if self.guard_state.num_strikes > max_rollbacks else ""
            raise BrokenError(
                f"training broke again at step {step} after {max_rollbacks} rollbacks{in_a_row}; lower the learning "
                "rate, look for bad data, or raise max_rollbacks"
            )
        return not fine

    def before_first_step(self, weights: Weights, optimizer: Optimizer) -> None:
        """Keep what training starts from; after a resume, the centre that was loaded."""
        if not self.snapshot.taken:
            self.snapshot.take(self._loaded or weights.local(), optimizer)
            self._loaded = None

    def add(self, weights: Weights) -> None:
        """Parameters that join in mid-run go back to where they are now."""
        tensors = weights.local()
        self.snapshot.add(tensors)
        if self._loaded is not None:
            self._loaded |= {key: t.clone() for key, t in tensors.items() if key not in self._loaded}

    def keep(self, tensors: Mapping[int, Tensor], optimizer: Optimizer) -> None:
        self.snapshot.take(tensors, optimizer)

    def go_back(self, tensors: Mapping[int, Tensor], optimizer: Optimizer) -> None:
        self.snapshot.restore(tensors, optimizer)
        self.num_rollbacks += 1
        self.budget.take()
        if self.budget.spent and not self.strict and not self._warned:
            self._warned = True
            warnings.warn(
                f"max_rollbacks={self.budget.max_rollbacks} are spent: rounds break more often than every {RECOVERY} "
                "rounds. The learned scale holds still until healthy rounds have made up for it "
                "(RoundRecord.held), and broken rounds are still undone; lower the learning rate, or look for bad "
                "data. This is said once",
                stacklevel=6,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "guard": pack_guard(self.guard_state),
            "num_rollbacks": self.num_rollbacks,
            "rollback_debt": self.budget.debt,
        }

    def load_state_dict(self, state: Mapping[str, Any], centre: Mapping[int, Tensor] | None) -> None:
        """Continue from ``state``; ``centre``: the weights to go back to, where they are not those at hand."""
        self.guard_state, self.num_rollbacks = unpack_guard(state["guard"]), int(state["num_rollbacks"])
        self.budget.debt = min(int(state.get("rollback_debt", 0)), RECOVERY * self.budget.max_rollbacks)
        self.snapshot.forget()
        self._loaded = None if centre is None else {key: t.clone() for key, t in centre.items()}
