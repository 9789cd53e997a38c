"""The first-order signal on held-out data: <gradient of the probe's loss, theta - A>, now and then.

Where a model overfits, the training loss asks for the learning rate that fits fastest. A probe in every step would
double the cost of a run; one in twenty steps is too rare to steer by alone. So the training signal is read as ever, and
corrected by the *gap*: how far held-out slopes have been above those of the training loss, in the mean of the last
probes and as far as that mean is certain. Where the two agree it is the training signal, read once a probe: a learning
rate that rose between probes would be far too high by the time they say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import FloatArray, flag_of, shown, whole_of
from hdet.history import HeldOut, KnobRecord
from hdet.policy.decayed_mean import DecayedMean, certain
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import sharding
from hdet.signals.base import Reading
from hdet.signals.decay import DecayLearner
from hdet.signals.gradient import MAX_SAMPLES, GradientSignal, mean_and_error, unpack_samples
from hdet.signals.loss import Loss, require_scalar
from hdet.weights.anchor import Anchor

Probe = Callable[[], Loss]
"""Returns a loss on held-out data."""

PROBE_EVERY = 20
"""Steps between two probes. One on a batch like those of training takes about as long as a step: 5% of the time."""

FADE = 0.85
"""Of one probe to the next: a mean is over about the last twelve."""

MIN_PROBES = 3
"""So many since the anchor was set, before they say anything; the first ones of a run do not hold it up."""


class HeldOutGradient(GradientSignal):
    """The gradient signal, corrected by what held-out data show.

    Args:
        anchor, knob_of_group, sample_every, num_ranks, total_slope: as in :class:`GradientSignal`.
        probe: returns the loss on held-out data, as a tensor with its graph.
        model: put into evaluation mode meanwhile.
        probe_every: steps between probes.
        decay: learns the weight decay from the same probes; None where it is given.
    """

    name = "held_out"

    def __init__(
        self,
        anchor: Anchor,
        knob_of_group: list[int],
        *,
        sample_every: int,
        num_ranks: int,
        probe: Probe,
        model: nn.Module,
        probe_every: int = PROBE_EVERY,
        decay: DecayLearner | None = None,
        total_slope: bool = False,
    ) -> None:
        super().__init__(anchor, knob_of_group, sample_every=sample_every, num_ranks=num_ranks, total_slope=total_slope)
        self.probe = probe
        self.model = model
        self.probe_every = probe_every
        self.decay = decay
        self._acting = False
        self.num_steps = 0
        """Optimizer steps."""
        self._start_over()

    @property
    def width(self) -> int:
        """Numbers of a probe: a slope for each knob, that of the weight decay, and the loss."""
        return self.num_columns + 2

    def _start_over(self) -> None:
        self.probes: FloatArray = np.empty((0, self.width))
        self._probe_rows: list[Tensor] = []
        self.gap = DecayedMean(self.num_columns, FADE)
        self.slope = DecayedMean(1, FADE)
        self.level = DecayedMean(1, FADE)
        """Of the held-out loss itself, wherever the anchor is."""
        self._num_renewed = self.anchor.num_renewed
        self.moved = False
        """Whether the anchor has moved since the run began: a model may have overfitted by now."""

    def add_group(self, knob: int) -> None:
        super().add_group(knob)
        if self.probes.shape[1] != self.width:
            self._start_over()

    def before_step(self, optimizer: Optimizer) -> None:
        super().before_step(optimizer)
        self.num_steps += 1
        if self.num_steps % self.probe_every == 0 and len(self._probe_rows) + len(self.probes) < MAX_SAMPLES:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            loss, gradients = probe_gradients(self.probe, self.model, parameters)
            with torch.no_grad():
                self._probe_rows.append(self._probe_row(optimizer, loss, gradients))
        if self.decay is not None:
            self.decay.add_step(optimizer)

    def _probe_row(self, optimizer: Optimizer, loss: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
        slopes = self._dots(optimizer, gradients)
        by_decay = (
            torch.zeros(())
            if self.decay is None
            else self.decay.sample(optimizer, gradients, self.dot_products.shares(optimizer))
        )
        return torch.cat(
            [slopes, torch.stack([each.to(slopes) for each in (by_decay, loss.reshape(()) / self.num_ranks)])]
        )

    def measure(self, training_at_base: AbstractContextManager[None]) -> None:
        self._acting = True

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        super().share(replicas, losses)
        table = torch.full((MAX_SAMPLES, self.width), math.nan, dtype=torch.float64, device=replicas.device)
        if self._probe_rows:
            table[: len(self._probe_rows)] = torch.stack([r.to(replicas.device) for r in self._probe_rows]).double()
        self._probe_rows = []
        found = replicas.sum_(table).cpu().numpy()
        self.probes = np.concatenate([self.probes, found[np.isfinite(found).any(axis=1)]])

    def drain(self) -> Reading:
        """The training slopes of the round and the gap; their errors are those of the training slopes alone.

        Optimism is counted in standard errors: it should not grow because probes are few.
        """
        self._follow_anchor()
        early = self.gap.num < MIN_PROBES and not self.moved
        if not len(self.probes) and not early:  # nothing is decided without one
            silent = np.full(self.num_columns, math.nan)
            self._acting = False
            return self._reading(silent, silent)._replace(probed=self._probed(), learned=self._learned())
        mean, error = mean_and_error(self.samples)
        for row in self.probes:
            self.level.add(row[-1:])
            slopes = row[: self.num_columns]
            known = np.isfinite(slopes - mean)  # a knob may have no gradient
            if known.any():
                self.gap.add(np.where(known, slopes - mean, 0.0))
                self.slope.add(slopes[:1] if self.total_slope else slopes[known].sum(keepdims=True))
        if self.decay is not None:
            self.decay.learn(self.probes[:, -2], acting=self._acting)
        probed = self._probed()
        self.forget()
        unknown = 0.0 if early else math.nan
        gap = certain(self.gap.mean, self.gap.error) if self.gap.num >= MIN_PROBES else unknown
        self._acting = False
        return self._reading(mean + gap, error)._replace(probed=probed, learned=self._learned())

    def _learned(self) -> dict[str, KnobRecord]:
        return {} if self.decay is None else {"weight_decay": self.decay.record()}

    def _follow_anchor(self) -> None:
        """Where the anchor has moved, slopes are measured from elsewhere."""
        if self._num_renewed != self.anchor.num_renewed:
            self.moved = self.moved or self._num_renewed > 0
            self.gap.forget()
            self.slope.forget()
            self._num_renewed = self.anchor.num_renewed

    def _probed(self) -> HeldOut:
        losses = self.probes[:, -1]
        slope, error, z = math.nan, math.nan, 0.0
        if self.slope.num >= MIN_PROBES:
            slope, error, z = (float(each[0]) for each in (self.slope.mean, self.slope.error, self.slope.z))
        mean = mean_error = math.nan
        if self.level.num >= MIN_PROBES:
            mean, mean_error = float(self.level.mean[0]), float(self.level.error[0])
        return HeldOut(float(losses.mean()) if len(losses) else math.nan, slope, error, z, mean, mean_error)

    def forget(self) -> None:
        super().forget()
        self.probes = np.empty((0, self.width))
        self._probe_rows = []

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "num_steps": self.num_steps,
            "moved": self.moved,
            "probes": self.probes.tolist(),
            "gap": self.gap.state_dict(),
            "slope": self.slope.state_dict(),
            "level": self.level.state_dict(),
            "decay": [] if self.decay is None else [self.decay.state_dict()],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        whole_of(state["num_steps"], "num_steps")
        flag_of(state["moved"], "moved")
        unpack_samples(state["probes"], self.width)
        for found in ("gap", "slope", "level"):
            getattr(self, found).check_state(state[found])
        for saved in self._decay_of(state):
            if self.decay is not None:
                self.decay.check_state(saved)

    @staticmethod
    def _decay_of(state: Mapping[str, Any]) -> list[Any]:
        """Of a run that learned its weight decay, the state of that."""
        found = state["decay"]
        if not isinstance(found, list) or len(found) > 1 or not all(isinstance(each, Mapping) for each in found):
            raise ValueError(f"decay must be a list of at most one state, but got {shown(found)}")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._start_over()
        self.moved = bool(state["moved"])
        self.num_steps, self.probes = int(state["num_steps"]), unpack_samples(state["probes"], self.width)
        self.gap.load_state_dict(state["gap"])
        self.slope.load_state_dict(state["slope"])
        self.level.load_state_dict(state["level"])
        for saved in self._decay_of(state):
            if self.decay is not None:
                self.decay.load_state_dict(saved)


def probe_gradients(probe: Probe, model: nn.Module, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """The probe's loss and its gradients; the model's own gradients, modes and random states stay as they are.

    Sharded parameters get theirs from backward(), averaged over ranks as in training; the others' hooks see nothing.
    """
    with untouched(model), _alone(model), torch.enable_grad():
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and not module.dropout:
                module.training = True  # cuDNN's has no backward in evaluation mode, and does the same in both
        loss = probe()
        if isinstance(loss, Tensor):
            require_scalar(loss, "the loss that probe returns")
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise TypeError(
                "probe must return a loss with a gradient where the learning rate is learned from it, but got "
                f"{'a tensor without one' if isinstance(loss, Tensor) else type(loss).__name__}; return the tensor "
                "itself, without .item(), .detach() or torch.no_grad()"
            )
        if any(sharding(p) is not None for p in parameters):
            return loss.detach(), _by_backward(loss, model, parameters)
        known = [p for p in parameters if p.requires_grad]
        found = iter(torch.autograd.grad(loss, known, allow_unused=True))
        return loss.detach(), [next(found) if p.requires_grad else None for p in parameters]


def _by_backward(loss: Tensor, model: nn.Module, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    everything = {id(p): p for p in (*model.parameters(), *parameters)}.values()
    before = [p.grad for p in everything]
    for p in everything:
        p.grad = None
    try:
        torch.autograd.backward(loss)
        return [p.grad for p in parameters]
    finally:
        for p, gradient in zip(everything, before, strict=True):
            p.grad = gradient


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Without DistributedDataParallel's reduction, and with what it remembers of its last forward as it was."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    synced = [module.require_forward_param_sync for module in wrapped]
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        try:
            yield
        finally:
            for module, before in zip(wrapped, synced, strict=True):
                module.require_forward_param_sync = before


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
