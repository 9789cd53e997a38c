"""Low-rank adaptation (LoRA): a frozen model, and a small trainable product beside each of its matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class LoRA(nn.Module):
    """``base`` with W + (alpha / rank) up @ down for each W of ``targets``; only ``down`` and ``up`` are parameters.

    ``down`` starts uniform within 1/sqrt(inputs), ``up`` with zeros, so the model starts as ``base``.

    Args:
        base: the model; it is frozen, and belongs to this one from now on.
        targets: names of its matrices.
        rank: of the products.
        alpha: their scale, times the rank.
        generator: of the initial values.
    """

    def __init__(
        self,
        base: nn.Module,
        targets: Sequence[str],
        *,
        rank: int = 8,
        alpha: float = 16.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be at least 1, but got {rank=}")
        # In a tuple, so that its weights are neither parameters, which would be trained, nor buffers, which would be
        # copied for each replica and averaged.
        self._base = (base.requires_grad_(False),)
        self.targets = tuple(targets)
        self.scale = alpha / rank
        matrices = dict(base.named_parameters())
        shapes = [matrices[name].shape for name in self.targets]
        self.down = nn.ParameterList(torch.empty(rank, inputs) for _, inputs in shapes)
        self.up = nn.ParameterList(torch.zeros(outputs, rank) for outputs, _ in shapes)
        with torch.no_grad():
            for matrix in self.down:
                bound = 1 / math.sqrt(matrix.shape[1])
                matrix.uniform_(-bound, bound, generator=generator)

    def forward(self, *inputs: Tensor) -> Tensor:
        matrices = dict(self._base[0].named_parameters())
        changed = {
            name: matrices[name] + self.scale * (up @ down)
            for name, down, up in zip(self.targets, self.down, self.up, strict=True)
        }
        out: Tensor = functional_call(self._base[0], changed, inputs)
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The frozen weights go where the others go: to a device, to a type."""
        self._base[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
