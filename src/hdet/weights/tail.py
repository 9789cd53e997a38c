"""The tail of a round: the mean of this replica's weights over its second half, to be probed in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hdet.weights.averaged import Weights

SAMPLES = 20
"""At most, of a whole round; the tail has half of them."""


class Tail:
    """Adds up weights along the way. One copy of them in the second half of a round, and another while it is looked at.

    Args:
        weights: of this replica.
        interval: steps of a round.
    """

    def __init__(self, weights: Weights, interval: int) -> None:
        self.weights = weights
        self.interval = interval
        self.every = max(1, interval // SAMPLES)
        self.steps = 0
        self._count = 0
        self._sums: dict[int, Tensor] = {}

    def before_step(self) -> None:
        """The weights are those after :attr:`steps` steps of the round."""
        if self.steps % self.every == 0 and 2 * self.steps > self.interval:
            self._add()
        self.steps += 1

    @torch.no_grad()
    def _add(self) -> None:
        for key, tensor in self._floating().items():
            if key in self._sums:
                self._sums[key] += tensor
            else:
                self._sums[key] = tensor.clone()
        self._count += 1

    def _floating(self) -> dict[int, Tensor]:
        return {key: t for key, t in self.weights.local().items() if t.is_floating_point()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The mean of the tail, the present weights included, in the place of the weights for the length of a block."""
        self._add()
        with self.weights.set_aside():
            with torch.no_grad():
                for key, tensor in self._floating().items():
                    tensor.copy_(self._sums[key] / self._count)
            yield

    def restart(self, steps: int = 0) -> None:
        """A round begins, or goes on after ``steps`` with another model than it has seen so far."""
        self.steps, self._count, self._sums = steps, 0, {}
