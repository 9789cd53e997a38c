"""What replicas that differ are compared by: the losses they train on, or a probe, the same for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import FloatArray, mapping_of, numbers_of, whole_of
from hdet.replicas.group import Replicas
from hdet.signals.base import Reading, Signal
from hdet.signals.held_out import Probe, untouched
from hdet.signals.loss import Loss, LossMeter, require_scalar

if TYPE_CHECKING:
    from hdet.ensemble.generations import Tail


class LossSignal(Signal):
    """Compares replicas by the losses they train on (L_r of Eq. 4), which every mode collects."""

    name = "loss"
    needs_losses = True

    def __init__(self) -> None:
        self._losses: FloatArray | None = None

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        self._losses = losses

    def drain(self) -> Reading:
        found = Reading(losses=self._losses)
        self.forget()
        return found

    def forget(self) -> None:
        self._losses = None


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
