"""Buffers of the stacked engine, BatchNorm statistics above all: one tensor (R, N, ...) for each of a model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Buffers = dict[str, Tensor]


def stack_buffers(models: Sequence[nn.Module], like: nn.Module, num_replicas: int) -> Buffers:
    """Copies of the models' buffers, one for each replica, with the device and dtypes of those of ``like``."""
    named = [dict(model.named_buffers()) for model in models]
    return {
        name: torch.stack([buffers[name] for buffers in named])
        .to(buffer)
        .unsqueeze(1)
        .repeat(1, num_replicas, *[1] * buffer.dim())
        for name, buffer in like.named_buffers()
    }


def mean_buffers(buffers: Mapping[str, Tensor]) -> Buffers:
    """(R, ...): each run's mean over replicas; of counts and flags the maximum, as real processes have it."""
    return {
        name: buffer.mean(1) if buffer.is_floating_point() or buffer.is_complex() else buffer.amax(1)
        for name, buffer in buffers.items()
    }


def copy_buffers(values: Mapping[str, Tensor], model: nn.Module, run: int) -> None:
    """Put one run's buffers into ``model``."""
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name][run])
