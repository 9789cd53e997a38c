"""Eq. 3 with fewer bytes: replicas send how far they have come since their last mean, in 16 or 8 bits a value.

Weights in 16 bits would lose what one round changes in them; displacements keep it. Each replica adds up one part of
all displacements in 32 bits, and sends that part's mean to the others, coded once more. All decode the same bytes, so
all have the same mean to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.average import Buffers, buckets, mean_
from hdet.replicas.group import Replicas

Transport = Literal["full", "bfloat16", "int8"]
BLOCK = 256
"""Values that share a scale in ``"int8"``."""


def encode(values: Tensor, transport: Transport) -> Tensor:
    """(rows, bytes) of (rows, values) in float32; the number of values in a row is a multiple of :data:`BLOCK`.

    ``"int8"``: to the nearest of 255 levels between plus and minus the largest value of a block; levels, then scales.
    """
    if transport == "bfloat16":
        return values.bfloat16().view(torch.uint8)
    blocks = values.view(len(values), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    levels = (blocks / scales).round().to(torch.int8).flatten(1)
    return torch.cat([levels.view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)


def decode(coded: Tensor, transport: Transport) -> Tensor:
    """The opposite of :func:`encode`, in float32."""
    if transport == "bfloat16":
        return coded.view(torch.bfloat16).float()
    num_values = coded.shape[1] * BLOCK // (BLOCK + 4)
    levels, scales = coded[:, :num_values].contiguous(), coded[:, num_values:].contiguous()
    blocks = levels.view(torch.int8).float().view(len(coded), -1, BLOCK)
    return (blocks * scales.view(torch.float32).unsqueeze(2)).flatten(1)


@torch.no_grad()
def coded_mean_(
    tensors: Mapping[int, Tensor],
    bases: Mapping[int, Tensor],
    replicas: Replicas,
    transport: Transport,
    buffers: Buffers | None = None,
    *,
    share: float = 1.0,
) -> Tensor:
    """As :func:`~hdet.replicas.average.mean_` with all replicas healthy, through coded displacements from ``bases``.

    Args:
        tensors: this replica's, by key; views that name every element of memory once.
        bases: the same on all replicas, for each key of a floating-point tensor.
        replicas: who takes part.
        transport: how values are coded; not ``"full"``.
        buffers: kept from one mean for the next, for integers.
        share: what this replica counts, 1 on average.
    """
    floating = {key: t for key, t in tensors.items() if t.is_floating_point() and t.numel()}
    mean_([t for t in tensors.values() if not t.is_floating_point()], replicas, [True] * replicas.count, buffers)
    pieces_of_all = zip(buckets(list(floating.values())), buckets([bases[key] for key in floating]), strict=True)
    squares = torch.zeros((), dtype=torch.float64)
    for pieces, starts in pieces_of_all:
        moved = [piece.float() - start.float() for piece, start in zip(pieces, starts, strict=True)]
        flat = torch.cat([each.flatten() for each in moved]).mul_(share)
        mean = _exchange(flat, replicas, transport)
        parts = torch.split(mean, [each.numel() for each in moved])
        for piece, start, own, part in zip(pieces, starts, moved, parts, strict=True):
            step = part.view(own.shape)
            squares += (own - step).square().sum(dtype=torch.float64).cpu()
            piece.copy_(start + step.to(start.dtype))
    return squares.sqrt()


def _exchange(flat: Tensor, replicas: Replicas, transport: Transport) -> Tensor:
    """The mean of ``flat`` over replicas: each adds up one part, and gives it to all."""
    count = replicas.count
    part = math.ceil(len(flat) / count / BLOCK) * BLOCK
    rows = torch.nn.functional.pad(flat, (0, count * part - len(flat))).view(count, part)
    sent = encode(rows, transport)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=replicas.group)
    mine = encode(decode(received, transport).mean(0, keepdim=True), transport)
    gathered = torch.empty_like(sent)
    dist.all_to_all_single(gathered, mine.repeat(count, 1), group=replicas.group)
    return decode(gathered, transport).flatten()[: len(flat)]
