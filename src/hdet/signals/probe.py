"""The probe: a loss on held-out data, the same for every replica, that leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from hdet.checks import FloatArray
from hdet.replicas.group import Replicas
from hdet.signals.base import Reading, Signal
from hdet.signals.loss import Loss

Probe = Callable[[], Loss]


class ProbeSignal(Signal):
    """Compares replicas by their losses on held-out data. What it does to the learning rate is read by ``held_out``.

    Args:
        probe: returns the loss.
        model: put into evaluation mode meanwhile.
    """

    name = "probe"

    def __init__(self, probe: Probe, model: nn.Module | None) -> None:
        self.probe = probe
        self.model = model
        self._own: float | None = None
        self._losses: FloatArray | None = None

    def measure(self, training_at_base: AbstractContextManager[None]) -> None:
        with training_at_base:
            self._own = evaluate(self.probe, self.model)

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        if self._own is not None:  # all ranks measure in the same rounds
            self._losses = replicas.gather([self._own])[:, :, 0].mean(axis=1)

    def drain(self) -> Reading:
        found = Reading(losses=self._losses, held_out=True) if self._losses is not None else Reading()
        self.forget()
        return found

    def forget(self) -> None:
        self._own = self._losses = None


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
