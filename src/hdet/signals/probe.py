"""The probe: a loss on held-out data, the same for every replica, that leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import FloatArray, mapping_of, numbers_of, whole_of
from hdet.replicas.group import Replicas
from hdet.signals.base import Reading, Signal
from hdet.signals.loss import Loss, LossMeter, require_scalar
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
        self._trained: FloatArray | None = None
        self._late = LossMeter()

    def before_step(self, optimizer: Optimizer) -> None:
        if self.tail is not None:
            self.tail.before_step()

    def observe(self, loss: Loss, weight: Loss) -> None:
        if self.tail is not None and self.tail.begun:
            self._late.observe(loss, weight)

    def measure(self, training_at_base: AbstractContextManager[None]) -> None:
        with training_at_base, nullcontext() if self.tail is None else self.tail.in_place():
            self._own = evaluate(self.probe, self.model)

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        if self._own is None:  # all ranks measure in the same rounds
            return
        total, weight = self._late.drain()
        rows = replicas.gather([self._own, total, weight])
        self._losses = rows[:, :, 0].mean(axis=1)
        if self.tail is not None:
            weights = rows[:, :, 2].sum(axis=1)
            self._trained = rows[:, :, 1].sum(axis=1) / np.where(weights > 0, weights, np.nan)

    def look(self, training_at_base: AbstractContextManager[None], replicas: Replicas) -> FloatArray | None:
        if self.tail is None:
            return None
        with training_at_base:
            found: FloatArray = replicas.gather([evaluate(self.probe, self.model)])[:, :, 0].mean(axis=1)
        return found

    def drain(self) -> Reading:
        found = Reading()
        if self._losses is not None:
            found = Reading(losses=self._losses, trained=self._trained, held_out=True)
        self.forget()
        return found

    def forget(self) -> None:
        self._own = self._losses = self._trained = None
        self._late.reset()
        if self.tail is not None:
            self.tail.restart()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tail is None else {"steps": self.tail.steps}

    def own_state(self) -> dict[str, Any]:
        own = {} if self.tail is None else self.tail.own_state()
        return own and {**own, "losses": list(self._late.drain())}

    def check_state(self, state: Mapping[str, Any]) -> None:
        whole_of(state.get("steps", 0), "steps of the tail")
        own = mapping_of(state.get("own", {}), "own state of the tail")
        if own and self.tail is not None:
            self.tail.check_own(own)
            numbers_of(own["losses"], "losses of the tail", 2, finite=False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.tail is None:
            return
        own = state.get("own") or {"count": 0, "sums": (), "losses": (0.0, 0.0)}
        self.tail.restart(int(state.get("steps", 0)), own["count"], own["sums"])
        self._late.reset(*map(float, own["losses"]))


def evaluate(probe: Probe, model: nn.Module | None) -> float:
    """The probe's loss in evaluation mode, without gradients and with the random state as it was; waits for the device.

    NaN where the loss is not finite.
    """
    with untouched(model), torch.no_grad():
        found = probe()
        if isinstance(found, Tensor):
            require_scalar(found, "the loss that probe returns")
        loss = float(found)
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
