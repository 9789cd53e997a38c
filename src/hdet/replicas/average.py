"""Converge: the replicas' weights become their mean (Eq. 3), in buckets, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.group import Replicas
from hdet.replicas.sharding import doubled, memory_view

BUCKET_BYTES = 24 * 2**20
"""Size of one bucket. Two are in use at a time, and they are all a converge allocates."""

_Kind = tuple[torch.device, torch.dtype]
Buffers = dict[torch.device, list[Tensor]]
"""Buckets, as bytes, kept from one converge for the next: fresh memory costs the host more than the copying does."""


class _Bucket(NamedTuple):
    buffer: Tensor
    pieces: list[Tensor]
    views: list[Tensor]
    work: dist.Work


@torch.no_grad()
def mean_(
    tensors: Iterable[Tensor],
    replicas: Replicas,
    healthy: Sequence[bool],
    buffers: Buffers | None = None,
    *,
    share: float = 1.0,
    receives: bool = True,
) -> Tensor:
    """Replace each tensor by its mean over the healthy replicas, in place and bit-identically on all of them.

    Floating-point and complex tensors are summed in float32 (float64 for float64), whatever their own precision;
    integer and boolean tensors become the maximum. Tensors may be strided, empty or expanded. A replica that is not
    healthy contributes nothing and receives the mean. ``share`` is what this replica's floating-point values count,
    1 on average over the healthy ones. With ``receives=False`` this replica gives, and keeps what it has.

    Returns:
        The Euclidean distance between this replica's floating-point values and the mean it received, as a 0-d tensor
        that is not synchronised.
    """
    contributes = healthy[replicas.index]
    num_healthy = sum(healthy)
    squares: list[Tensor] = []
    in_flight: list[_Bucket] = []
    spare: Buffers = {} if buffers is None else buffers

    def finish(bucket: _Bucket) -> None:
        bucket.work.wait()
        for piece, total in zip(bucket.pieces, bucket.views, strict=True) if receives else ():
            if not piece.is_floating_point():
                piece.copy_(total)
                continue
            # In place, while the piece is in cache: first the displacement, for the distance, then the mean.
            piece.sub_(total, alpha=1 / num_healthy)
            squares.append(_square_norm(piece, total.dtype))
            torch.div(total, num_healthy, out=piece)
        spare[bucket.buffer.device].append(bucket.buffer)

    views_of_all = [memory_view(t) for t in tensors if t.numel()]
    # One size for all buckets of a device, so that each can serve any of them.
    num_bytes = sum(t.numel() * _kind(t)[1].itemsize for t in views_of_all)
    for pieces in buckets(views_of_all):
        if len(in_flight) == 2:
            finish(in_flight.pop(0))
        device, dtype = _kind(pieces[0])
        size = sum(piece.numel() for piece in pieces)
        free = spare.setdefault(device, [])
        if free and free[-1].nbytes < size * dtype.itemsize:
            free.clear()  # kept from a smaller model
        if not free:
            free.append(torch.empty(min(BUCKET_BYTES, num_bytes), dtype=torch.uint8, device=device))
        buffer = free.pop()
        flat = buffer[: size * dtype.itemsize].view(dtype)
        views = _views(flat, pieces)
        is_integer = dtype == torch.int64
        if contributes:
            _pack(pieces, views, flat)
        else:
            flat.fill_(torch.iinfo(dtype).min if is_integer else -0.0)  # the only number that changes no other's sign
        if share != 1 and not is_integer:
            flat.mul_(share)
        in_flight.append(_Bucket(buffer, pieces, views, _all_reduce(flat, replicas)))
    for bucket in in_flight:
        finish(bucket)
    if not squares:
        return torch.zeros(())
    return torch.stack([doubled(s) for s in squares]).sum().sqrt()


def _views(flat: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    return [v.view(p.shape) for v, p in zip(torch.split(flat, [p.numel() for p in pieces]), pieces, strict=True)]


def _pack(pieces: Sequence[Tensor], views: Sequence[Tensor], flat: Tensor) -> None:
    if all(p.dtype == flat.dtype and p.is_contiguous() for p in pieces):
        torch.cat([p.view(-1) for p in pieces], out=flat)  # on the host twice as fast as copying
    else:
        torch._foreach_copy_(list(views), list(pieces))


def _all_reduce(flat: Tensor, replicas: Replicas) -> dist.Work:
    op = dist.ReduceOp.MAX if flat.dtype == torch.int64 else dist.ReduceOp.SUM
    work: dist.Work = dist.all_reduce(flat, op, group=replicas.group, async_op=True)
    return work


def _square_norm(piece: Tensor, dtype: torch.dtype) -> Tensor:
    if piece.dtype == dtype and piece.is_contiguous():
        flat = piece.view(-1)
        return torch.dot(flat, flat)  # the fastest on the host
    norm: Tensor = torch.linalg.vector_norm(piece, dtype=dtype)
    return norm.square_()


def _kind(piece: Tensor) -> _Kind:
    if not piece.is_floating_point():
        return piece.device, torch.int64
    return piece.device, torch.float64 if piece.dtype == torch.float64 else torch.float32


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Pack the tensors into buckets. A function of shapes and dtypes alone, so that all replicas pack alike."""
    for kind in dict.fromkeys(_kind(t) for t in tensors):
        capacity = BUCKET_BYTES // kind[1].itemsize
        bucket: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if _kind(tensor) != kind:
                continue
            for piece in pieces_of(tensor, capacity):
                if size + piece.numel() > capacity:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(piece)
                size += piece.numel()
        yield bucket


def pieces_of(tensor: Tensor, capacity: int) -> Iterator[Tensor]:
    """Views of at most ``capacity`` elements: halves along the longest dimension, so strides do not matter."""
    if tensor.numel() <= capacity:
        yield tensor
        return
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    half = tensor.shape[dim] // 2
    yield from pieces_of(tensor.narrow(dim, 0, half), capacity)
    yield from pieces_of(tensor.narrow(dim, half, tensor.shape[dim] - half), capacity)
