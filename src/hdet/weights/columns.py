"""A share of a parameter's entries, a few of every row: the same on every rank, every mesh and in every run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.sharding import Sharding, sharding
from hdet.weights.size import LARGE_MODEL, num_parameters

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

    def of(self, tensor: Tensor) -> Tensor:
        """What is kept of this rank's part of a tensor, found without an index: diagonals of blocks of s rows."""
        matrix = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, self.width)
        size, (down, right), s = len(matrix), matrix.stride(), self.stride
        shift = self.row % s
        head = min(size, -self.row % s)  # rows of a block that has begun on another rank
        blocks, tail = divmod(size - head, s)
        pieces = [
            matrix.as_strided(
                (number, rows, self.shape[1]),
                (s * down, down + right, s * right),
                matrix.storage_offset() + start * down + column * right,
            )
            for number, rows, start, column in ((1, head, 0, shift), (blocks, s, head, 0), (1, tail, size - tail, 0))
            if number * rows
        ]
        flat = [piece.reshape(-1, self.shape[1]) for piece in pieces]
        return torch.cat(flat) if len(flat) > 1 else flat[0] if flat else matrix[:, : self.shape[1]]

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
