"""The anchor: a copy of the weights, or of a share of them, from which an effect is measured (Eq. 11).

The share is a few entries of every row of a parameter: the same on every rank, every mesh and in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import shown
from hdet.replicas.sharding import (
    LARGE_MODEL,
    Sharding,
    as_saved,
    expanded_dims,
    local_tensor,
    num_parameters,
    own_part,
    sharding,
)

SMALL_TENSOR = 4096
"""Entries of a tensor below which all are kept: biases and norms have few, and each of them matters."""

LARGE_MODEL_STRIDE = 16


def stride_of(share: float | None, optimizer: Optimizer) -> int:
    """Entries of a row from one that is kept to the next, for this ``share``; None for what the model's size asks for.

    The size is that of the whole model: what a checkpoint holds must not depend on the number of shards.
    """
    if share is not None:
        return round(min(1 / share, 1e9))  # 1 / share may be infinite
    return LARGE_MODEL_STRIDE if num_parameters(optimizer, whole=True) > LARGE_MODEL else 1


class Columns(NamedTuple):
    """Of a tensor as a matrix, whose rows are those of its first dimension: in row i the columns i mod s, + s, + 2 s...

    From row to row they move on by one, so that all columns have their share. Each row has as many of them, and knows
    which by its own index: so any part of the rows, be it a shard's or a sparse gradient's, has its part of them.

    Attributes:
        num_rows, width: of the whole matrix; a vector is one row.
        stride: s.
        row: the index of the first row that this rank has.
    """

    num_rows: int
    width: int
    stride: int
    row: int = 0

    @property
    def shape(self) -> torch.Size:
        """Of what is kept of the whole tensor."""
        return torch.Size([self.num_rows, self.width // self.stride])

    @property
    def weight(self) -> float:
        """What a sum over the kept entries has to be multiplied with to estimate that over all."""
        return self.width / self.shape[1]

    def pieces(self, tensor: Tensor) -> list[Tensor]:
        """What is kept of this rank's part of a tensor, found without an index: diagonals of blocks of s rows.

        Each is a view (blocks, rows, columns), where the tensor is a matrix in memory.
        """
        matrix = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, self.width)
        size, (down, right), s = len(matrix), matrix.stride(), self.stride
        shift = self.row % s
        head = min(size, -self.row % s)  # rows of a block that has begun on another rank
        blocks, tail = divmod(size - head, s)
        return [
            matrix.as_strided(
                (number, rows, self.shape[1]),
                (s * down, down + right, s * right),
                matrix.storage_offset() + start * down + column * right,
            )
            for number, rows, start, column in ((1, head, 0, shift), (blocks, s, head, 0), (1, tail, size - tail, 0))
            if number * rows
        ]

    def of(self, tensor: Tensor) -> Tensor:
        """The same as one matrix."""
        flat = [piece.reshape(-1, self.shape[1]) for piece in self.pieces(tensor)]
        return torch.cat(flat) if len(flat) > 1 else flat[0] if flat else tensor.new_empty((0, self.shape[1]))

    def of_rows(self, values: Tensor, rows: Tensor) -> Tensor:
        """What is kept of the ``values`` of some of this rank's ``rows``."""
        kept = self.stride * torch.arange(self.shape[1], device=rows.device)
        return values.reshape(len(rows), self.width).gather(1, ((rows + self.row) % self.stride).unsqueeze(1) + kept)


def columns_of(parameter: Tensor, stride: int) -> Columns | None:
    """What is kept of a parameter; None for all of it.

    That is so where it is small, and where it is sharded in another way than by its rows.
    """
    found = sharding(parameter)
    shape = parameter.shape if found is None else found.shape
    if stride == 1 or shape.numel() < SMALL_TENSOR:
        return None
    row = 0
    cuts = [] if found is None else [p for p in found.placements if not p.is_replicate()]
    if found is not None and cuts:
        from torch.distributed.tensor import Shard  # loaded already: a parameter lies on a mesh

        # The type itself: a strided shard of rows, which says that it equals a plain one, has other rows.
        if len(shape) == 1 or any(type(p) is not Shard or p.dim != 0 for p in cuts):
            return None
        row = _first_row(found)
    num_rows = shape[0] if len(shape) > 1 else 1
    width = shape.numel() // num_rows
    most = min(stride, width // 2)
    if most < 2:
        return None
    # The last columns of a row may be in no rank's share: as few as a slightly smaller stride can leave.
    return Columns(num_rows, width, min(range(most, 3 * most // 4, -1), key=lambda s: width % s), row)


def _first_row(found: Sharding) -> int:
    """The index of the first row that this rank has of a parameter whose rows are cut along some mesh dimensions.

    Each dimension cuts what those before it have left into chunks of equal size, of which the last ones may be empty.
    """
    coordinate = found.mesh.get_coordinate()
    if coordinate is None:
        return 0  # not on the mesh: it has no rows
    first, num_rows = 0, found.shape[0]
    for size, place, placement in zip(found.mesh.shape, coordinate, found.placements, strict=True):
        if not placement.is_replicate():
            chunk = -(-num_rows // size)
            start = min(num_rows, chunk * place)
            first, num_rows = first + start, min(chunk, num_rows - start)
    return first


def tensors_of(
    saved: Any,
    parameters: Sequence[Tensor],
    name: str,
    shapes: str = "the parameters' shapes",
    columns: Sequence[Columns | None] | None = None,
    *,
    finite: bool = True,
) -> list[Tensor]:
    """This rank's part of ``saved``, a tensor for each parameter or none at all; ValueError where they do not fit.

    ``columns``: what was saved of each parameter; default all of it. ``finite``: whether all of them must be.
    """
    if not isinstance(saved, (list, tuple)) or not all(isinstance(t, Tensor) for t in saved):
        raise ValueError(f"{name} must be a list of tensors, but got {shown(saved)}")
    columns = [None] * len(parameters) if columns is None else columns
    homes = [local_tensor(p) if c is None else c.of(local_tensor(p)) for p, c in zip(parameters, columns, strict=True)]
    parts = [
        own_part(t, p, None if c is None else c.shape).detach()
        for t, p, c in zip(saved, parameters, columns, strict=False)
    ]
    if saved and (len(saved) != len(homes) or [t.shape for t in parts] != [home.shape for home in homes]):
        raise ValueError(f"{name} must have {shapes}; it is of another model")
    for part, home in zip(parts, homes, strict=False):
        kinds = [(t.is_floating_point(), t.is_complex(), t.layout) for t in (part, home)]
        if kinds[0] != kinds[1] or part.is_meta:
            raise ValueError(
                f"{name} must hold values of the parameters' kind, but got {part.dtype}, {part.layout} on "
                f"{part.device} for {home.dtype}, {home.layout}"
            )
        if finite and not bool(torch.isfinite(part).all()):
            raise ValueError(f"{name} must be finite, but got {shown(part)}")
    return parts


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

    def displacements(
        self, parameters: Sequence[Tensor], only: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, theta - A) of each parameter: temporary tensors, a bounded number of bytes at a time.

        Of each, what the anchor holds of it: see :attr:`columns`. ``only``: of the parameters of these indices.
        """
        indices = range(len(parameters)) if only is None else only
        found = self.kept([local_tensor(parameters[i]) for i in indices], [self.columns[i] for i in indices])
        for chunk in _chunks([p.numel() for p in found]):
            here = [found[k] for k in chunk]
            anchors = [self.beside(p, indices[k]) for p, k in zip(here, chunk, strict=True)]
            yield from zip([indices[k] for k in chunk], torch._foreach_sub(here, anchors), strict=True)

    def beside(self, tensor: Tensor, index: int) -> Tensor:
        """The copy of this index, of a tensor's kind and on its device."""
        return self.copies[index].to(device=tensor.device, dtype=tensor.dtype, non_blocking=True)

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
