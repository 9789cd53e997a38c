"""Where a round that is undone goes back to: the last healthy weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.weights.averaged import Weights
from hdet.weights.snapshot import Snapshot


class Fallback:
    """The copies to go back to.

    Args:
        snapshot: where they live.
        every: keep every so many rounds only: a copy of a large model to the host takes time.
    """

    def __init__(self, snapshot: Snapshot, *, every: int = 1) -> None:
        self.snapshot = snapshot
        self.every = every
        self._num_rounds = 0
        self._loaded: dict[int, Tensor] | None = None
        self._told_of_steps = False

    def before_first_step(self, weights: Weights, optimizer: Optimizer) -> None:
        """Keep what training starts from; after a resume, the centre that was loaded."""
        if not self.snapshot.taken:
            self.snapshot.take(self._loaded or weights.kept(), optimizer)
            self._loaded = None
        self.snapshot.settle()

    def before_step(self) -> None:
        """Copies that are on their way are waited for. One that is replayed from a CUDA graph is not told of."""
        self._told_of_steps = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        self.snapshot.settle()

    def keep(self, weights: Weights, optimizer: Optimizer) -> None:
        """Go back to the present from now on. Its copy may be made beside steps that this is told of."""
        self._num_rounds += 1
        if self._num_rounds % self.every:
            return
        self.snapshot.take(weights.kept(), optimizer, beside=self._told_of_steps)
        self._told_of_steps = False

    def restore(self, weights: Weights, optimizer: Optimizer) -> None:
        """Go back."""
        self.snapshot.restore(weights.kept(), optimizer)

    def add(self, weights: Weights) -> None:
        """Parameters that join in mid-run go back to where they are now."""
        tensors = weights.kept()
        self.snapshot.add(tensors)
        if self._loaded is not None:
            self._loaded |= {key: t.clone() for key, t in tensors.items() if key not in self._loaded}

    def restart(self, centre: Mapping[int, Tensor] | None) -> None:
        """After a resume; ``centre``: the weights to go back to, where they are not those at hand."""
        self.snapshot.forget()
        self._loaded = None if centre is None else {key: t.clone() for key, t in centre.items()}
