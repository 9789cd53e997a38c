"""The probe: a loss on held-out data, the same for every replica, that leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hdet.signals.loss import Loss

Probe = Callable[[], Loss]


def evaluate(probe: Probe, model: nn.Module | None) -> float:
    """The probe's loss in evaluation mode, without gradients and with the random state as it was; waits for the device.

    NaN where the loss is not finite.
    """
    with untouched(model), torch.no_grad():
        loss = float(probe())
    return loss if math.isfinite(loss) else math.nan


@contextmanager
def untouched(model: nn.Module | None) -> Iterator[None]:
    """Evaluation mode for the length of a block; then every module's mode and all random states as before."""
    modules = list(model.modules()) if model is not None else []
    modes = [module.training for module in modules]
    devices = (
        sorted({t.device.index for t in model.parameters() if t.device.type == "cuda"}) if model is not None else []
    )
    if model is not None:
        model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training  # not train(): a user's frozen submodule keeps its own mode
