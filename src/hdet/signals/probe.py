"""The probe: a loss on held-out data, the same for every replica, that leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.checks import FloatArray, whole_of
from hdet.replicas.group import Replicas
from hdet.signals.base import Reading, Signal
from hdet.signals.loss import Loss
from hdet.weights.tail import Tail

Probe = Callable[[], Loss]


class ProbeSignal(Signal):
    """Compares replicas by their losses on held-out data. What it does to the learning rate is read by ``held_out``.

    Args:
        probe: returns the loss.
        model: put into evaluation mode meanwhile.
        tail: of the round, which is probed in the place of the weights at its end; None for those.
    """

    name = "probe"

    def __init__(self, probe: Probe, model: nn.Module | None, tail: Tail | None = None) -> None:
        self.probe = probe
        self.model = model
        self.tail = tail
        self._own: float | None = None
        self._losses: FloatArray | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        if self.tail is not None:
            self.tail.before_step()

    def measure(self, training_at_base: AbstractContextManager[None]) -> None:
        with training_at_base, nullcontext() if self.tail is None else self.tail.in_place():
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
        if self.tail is not None:
            self.tail.restart()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tail is None else {"steps": self.tail.steps}

    def check_state(self, state: Mapping[str, Any]) -> None:
        whole_of(state.get("steps", 0), "steps of the tail")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.tail is not None:
            self.tail.restart(int(state.get("steps", 0)))


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
