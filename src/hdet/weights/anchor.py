"""The anchor: a copy of the weights from which the effect of a learning rate is measured (Eq. 11)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hdet.replicas.average import expanded_dims
from hdet.replicas.sharding import as_saved, local_tensor
from hdet.weights.columns import Columns, columns_of

CHUNK_ELEMENTS = 2**24
"""How much is worked on at a time: bounds the temporary memory of a pass over all weights to about 64 MB."""


class Anchor:
    """A copy A of the weights, or of a share of their entries.

    Args:
        device: where the copy lives; default beside the weights. On the CPU it costs a transfer each time it is used.
        dtype: of the copy; default that of the weights. A rounded copy is as good an anchor: it need not be a point the
            run has visited.
        stride: keep one entry in so many; 1 for all, which :meth:`place_` needs.
    """

    def __init__(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, stride: int = 1
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.stride = stride
        self.copies: list[Tensor] = []
        self.columns: list[Columns | None] = []
        """What each copy holds; None for all of its parameter."""
        self.num_renewed = 0
        """How often it has moved."""
        self.differ_from: int | None = None
        """From which copy on replicas' may differ; None where they are the same."""

    @torch.no_grad()
    def renew(self, parameters: Iterable[Tensor]) -> None:
        """Move the anchor to where the parameters are."""
        self.num_renewed += 1
        parameters = list(parameters)
        self.columns = self.columns_of(parameters)
        found = self.kept(map(local_tensor, parameters), self.columns)
        if [c.shape for c in self.copies] != [p.shape for p in found]:
            self.copies = [self._copy(p) for p in found]
            return
        for copy, p in zip(self.copies, found, strict=True):
            copy.copy_(p, non_blocking=True)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Anchor parameters that join later where they are now."""
        parameters = list(parameters)
        columns = self.columns_of(parameters)
        found = self.kept(map(local_tensor, parameters), columns)
        self.copies += [self._copy(p) for p in found]
        self.columns += columns

    def columns_of(self, parameters: Iterable[Tensor]) -> list[Columns | None]:
        """What an anchor holds of these parameters."""
        return [columns_of(p, self.stride) for p in parameters]

    @staticmethod
    def kept(tensors: Iterable[Tensor], columns: Sequence[Columns | None]) -> list[Tensor]:
        """That of each tensor."""
        return [t if c is None else c.of(t) for t, c in zip(tensors, columns, strict=True)]

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
        """Yield (index, theta - A) of each parameter: temporary tensors, a bounded number of bytes at a time.

        Of each, what the anchor holds of it: see :attr:`columns`.
        """
        found = self.kept(map(local_tensor, parameters), self.columns)
        for chunk in _chunks([p.numel() for p in found]):
            here = [found[i] for i in chunk]
            anchors = [
                self.copies[i].to(device=found[i].device, dtype=found[i].dtype, non_blocking=True) for i in chunk
            ]
            yield from zip(chunk, torch._foreach_sub(here, anchors), strict=True)

    def saved(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The copies in the form to be saved; before there are any, those that a first step would make."""
        columns = self.columns_of(parameters)
        copies = self.copies or self.kept(map(local_tensor, parameters), columns)
        found = zip(copies, parameters, columns, strict=True)
        return [as_saved(copy, p, None if c is None else c.shape) for copy, p, c in found]

    def _copy(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else None
        return tensor.to(device=self.device, dtype=dtype, copy=True)


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
