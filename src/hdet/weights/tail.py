"""The tail of a round: the mean of this replica's weights over its second half, to be probed in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hdet.checks import whole_of
from hdet.weights.averaged import Weights
from hdet.weights.saved import tensors_of

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

    @property
    def begun(self) -> bool:
        """Whether the last step was one of the second half."""
        return 2 * self.steps > self.interval

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

    def restart(self, steps: int = 0, count: int = 0, sums: Sequence[Tensor] = ()) -> None:
        """A round begins, or goes on after ``steps``, of which so many are added up in ``sums``."""
        self.steps, self._count = steps, count
        homes = self._floating() if sums else {}
        self._sums = {key: torch.empty_like(t).copy_(s) for (key, t), s in zip(homes.items(), sums, strict=True)}

    def own_state(self) -> dict[str, Any]:
        """What was added up so far."""
        return {"count": self._count, "sums": [self._sums[key] for key in self._floating()]} if self._count else {}

    def check_own(self, state: Mapping[str, Any]) -> None:
        whole_of(state["count"], "count of the tail", 1)
        tensors_of(state["sums"], list(self._floating().values()), "sums of the tail", finite=False)
