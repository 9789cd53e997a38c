"""Optimizer steps that are none of training: those that move nothing, and those that are captured to be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hdet.engine.averaging import Averager
from hdet.signals.base import Signal


def is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether a step moves nothing: torch.distributed.checkpoint takes one to have optimizer state to read into."""
    lrs = [group["lr"] for group in optimizer.param_groups]
    # One on an accelerator is not worth waiting for: checkpoint's are on the host.
    return all(not (isinstance(lr, Tensor) and lr.device.type != "cpu") and float(lr) == 0 for lr in lrs)


def refuse_capture(signals: Sequence[Signal], averager: Averager) -> None:
    """Raise where what this does before a step would be part of a CUDA graph, and be repeated with every replay."""
    for signal in signals:
        signal.refuse_capture()
    if not averager.has_begun:
        raise RuntimeError(
            "optimizer.step() must be called once, after the scheduler was constructed, before it is captured in a "
            "CUDA graph: the first step sets the anchor"
        )
