"""Rollback: a round that breaks the model is undone, a limited number of times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet.guard import Guard, GuardState, pack_guard, unpack_guard
from hdet.snapshot import Snapshot
from hdet.spread import FloatArray
from hdet.weights import Weights

CUT = 0.5
"""What the scales are multiplied by when a round is undone."""


class Rollback:
    """The guard that calls a round broken, and the copies to go back to.

    Args:
        snapshot: where the copies live.
        max_rollbacks: how often, before it is an error.
    """

    def __init__(self, snapshot: Snapshot, max_rollbacks: int) -> None:
        self.snapshot = snapshot
        self.max_rollbacks = max_rollbacks
        self.guard, self.guard_state = Guard(), GuardState()
        self.num_rollbacks = 0
        self._loaded: dict[int, Tensor] | None = None

    def is_broken(self, losses: FloatArray, *, weights_fine: bool, losses_given: bool, step: int) -> bool:
        """Whether the round that ends has to be undone. Raises where it has been too often."""
        finite = losses[np.isfinite(losses)]
        if not weights_fine:
            fine = False
        elif not losses_given:
            fine = True  # only the weights can tell
        else:
            loss = float(finite.mean()) if len(finite) else math.nan
            self.guard_state, fine = self.guard.update(self.guard_state, loss)
        if not fine and self.num_rollbacks >= self.max_rollbacks:
            raise RuntimeError(
                f"training broke again at step {step} after {self.max_rollbacks} rollbacks; lower the learning rate, "
                "look for bad data, or raise max_rollbacks"
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

    def state_dict(self) -> dict[str, Any]:
        return {"guard": pack_guard(self.guard_state), "num_rollbacks": self.num_rollbacks}

    def load_state_dict(self, state: Mapping[str, Any], centre: Mapping[int, Tensor] | None) -> None:
        """Continue from ``state``; ``centre``: the weights to go back to, where they are not those at hand."""
        guard_state, num_rollbacks = unpack_guard(state["guard"]), int(state["num_rollbacks"])
        self.guard_state, self.num_rollbacks = guard_state, num_rollbacks
        self.snapshot.forget()
        self._loaded = None if centre is None else {key: t.clone() for key, t in centre.items()}
