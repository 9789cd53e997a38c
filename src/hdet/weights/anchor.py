"""The anchor: a copy of the weights from which the effect of a learning rate is measured (Eq. 11)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hdet.replicas.average import expanded_dims
from hdet.replicas.sharding import local_tensor

CHUNK_ELEMENTS = 2**24
"""How much is worked on at a time: bounds the temporary memory of a pass over all weights to about 64 MB."""


class Anchor:
    """A copy A of the weights.

    Args:
        device: where the copy lives; default beside the weights. On the CPU it costs a transfer each time it is used.
        dtype: of the copy; default that of the weights. A rounded copy is as good an anchor: it need not be a point the
            run has visited.
    """

    def __init__(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self.copies: list[Tensor] = []
        self.differ_from: int | None = None
        """From which copy on replicas' may differ; None where they are the same."""

    @torch.no_grad()
    def renew(self, parameters: Iterable[Tensor]) -> None:
        """Move the anchor to where the parameters are."""
        found = [local_tensor(p) for p in parameters]
        if [c.shape for c in self.copies] != [p.shape for p in found]:
            self.copies = [p.to(device=self.device, dtype=self._dtype(p), copy=True) for p in found]
            return
        for copy, p in zip(self.copies, found, strict=True):
            copy.copy_(p, non_blocking=True)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Anchor parameters that join later where they are now."""
        more = Anchor(device=self.device, dtype=self.dtype)
        more.renew(parameters)
        self.copies += more.copies

    @torch.no_grad()
    def place_(self, parameters: Sequence[Tensor], multipliers: Sequence[float]) -> None:
        """Eq. 11: each parameter, at the mean, moves to A + rho (mean - A)."""
        for copy, parameter, rho in zip(self.copies, parameters, multipliers, strict=True):
            p = local_tensor(parameter)
            if p.is_floating_point() or p.is_complex():
                a = copy.to(device=p.device, dtype=p.dtype, non_blocking=True)
                placed = torch.lerp(a, p, rho)
                for dim in expanded_dims(p):  # their elements share memory: write it once
                    p, placed = p.narrow(dim, 0, 1), placed.narrow(dim, 0, 1)
                p.copy_(placed)

    def displacements(self, parameters: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, theta - A) of each parameter: temporary tensors, a bounded number of bytes at a time."""
        found = [local_tensor(p) for p in parameters]
        for chunk in _chunks([p.numel() for p in found]):
            here = [found[i] for i in chunk]
            anchors = [
                self.copies[i].to(device=found[i].device, dtype=found[i].dtype, non_blocking=True) for i in chunk
            ]
            yield from zip(chunk, torch._foreach_sub(here, anchors), strict=True)

    def _dtype(self, parameter: Tensor) -> torch.dtype | None:
        return self.dtype if self.dtype is not None and parameter.is_floating_point() else None


def _chunks(sizes: Sequence[int]) -> Iterator[list[int]]:
    chunk: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if chunk and total + size > CHUNK_ELEMENTS:
            yield chunk
            chunk, total = [], 0
        chunk.append(index)
        total += size
    if chunk:
        yield chunk
