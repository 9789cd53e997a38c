"""Explorer: any scalar hyperparameter, in a loop that keeps its own learning-rate schedule or has none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hdet.checks import whole_of
from hdet.controllers import JointController
from hdet.engine.saving import load_rounds, save_rounds
from hdet.knobs import Knob, LearningRate
from hdet.options import Adapt, Averaging, Copies, Faults
from hdet.schedulers._agreement import agree, make_knobs
from hdet.schedulers._base import RoundScheduler, write_lr
from hdet.schedulers._build import make_loop
from hdet.schedulers._common import Common, Gradients
from hdet.schedulers._hooks import refuse_second
from hdet.schedulers._horizon import check_long, last_decision, long_averaging, long_panel
from hdet.schedulers._saved import STATE_VERSION, cannot_load, check_version, lrs_of
from hdet.signals.loss import Loss
from hdet.signals.probe import Probe

LR_OPTIMISM = 0.75
"""Optimism of the learning rate under the loss signal; other knobs have none."""

_UNUSED = {
    "spread": "Explorer spreads knobs; use knobs.LearningRate(spread=...) among them",
    "groups": "Explorer has it in knobs.LearningRate(groups=...)",
    "level": "Explorer starts every knob from the value it has",
    "hold_share": "Explorer adapts to the end; call finish() where it should stop",
    "shape": "Explorer has no schedule whose shape could be kept",
    "sample_every": "Explorer compares losses, and samples no gradients",
}
"""Of Adapt, with the reason."""


class Explorer(RoundScheduler):
    r"""Replicas train with different values of some knobs; what worked moves the shared values.

    Every ``interval`` steps the replicas' weights are averaged, the differences of their losses are attributed to
    their knobs by least squares, each base value moves as far as the evidence goes, and each replica gets new values.

    Call ``step(loss)`` after ``optimizer.step()``, and :meth:`finish` at the end: it averages the weights and leaves
    every knob at its base value. With ``total_steps`` the last step does that by itself.

    Args:
        model: the model that is trained, wrapped in DistributedDataParallel if it is.
        optimizer: its optimizer.
        knobs: of :mod:`hdet.knobs`. Without a ``LearningRate`` among them the learning rate is left alone, so any
            scheduler of torch's may drive it; AutoLR and OneCycleAutoLR take knobs themselves. With none at all and
            local gradients this is local SGD, or DiLoCo.
        interval: T, optimizer steps of a round.
        gradients: ``"shared"``: averaged in every step, as DistributedDataParallel does. ``"local"``: not at all inside
            a round, which cuts communication by a factor of T; replicas then see the effect of every knob.
        probe: a function that returns the loss on held-out data, the same on every replica. It is called at the end of
            a round in evaluation mode, and is what knobs learn from instead of the training loss.
        total_steps: length of the run, where it is known.
        adapt: how base values adapt: controller, assignment, anchor, bounds and start.
        copies: where copies of the weights live.
        faults: what is done about broken rounds and replicas.
        averaging: how replicas are averaged, and what becomes of their optimizers' state.
        process_group: the ranks that train this model; default all of them.
        seed: of the assignments.

    Example:
        >>> import torch
        >>> from hdet import Explorer, knobs
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> held_out = torch.randn(8, 3)
        >>> def probe():
        ...     return model(held_out).square().mean()
        >>> explorer = Explorer(model, optimizer, knobs=[knobs.WeightDecay()], interval=10, probe=probe)
        >>> loss = model(torch.randn(4, 3)).square().mean()
        >>> loss.backward()
        >>> optimizer.step(); explorer.step(loss)
        >>> explorer.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        knobs: Sequence[Knob | LearningRate] = (),
        interval: int,
        gradients: Gradients = "shared",
        probe: Probe | None = None,
        total_steps: int | None = None,
        adapt: Adapt = Adapt(),
        copies: Copies = Copies(),
        faults: Faults = Faults(),
        averaging: Averaging = Averaging(),
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, but got {type(model).__name__}")
        is_long = isinstance(adapt, Adapt) and adapt.horizon == "long"
        if is_long and isinstance(averaging, Averaging):
            averaging = long_averaging(averaging)
        common = Common(
            optimizer=optimizer, model=model, interval=interval, total_steps=total_steps, knobs=knobs,
            gradients=gradients, probe=probe, adapt=adapt, copies=copies, faults=faults, averaging=averaging,
            process_group=process_group, seed=seed,
        )  # fmt: skip
        adapt.refuse(_UNUSED)
        if is_long:
            check_long(common)
        refuse_second(optimizer)
        rates = [knob for knob in knobs if isinstance(knob, LearningRate)]
        if len(rates) > 1:
            raise ValueError(f"knobs must contain LearningRate once at most, but got {len(rates)}")
        others = make_knobs(common, [knob for knob in knobs if isinstance(knob, Knob)])
        rate = rates[0] if rates else LearningRate(spread=0.0, adapt=False)
        if gradients == "shared" and averaging.make_outer().kind == "nesterov" and not knobs:
            raise ValueError('outer="nesterov" needs replicas that differ; use gradients="local", or pass knobs')
        if not knobs and gradients == "shared":
            raise ValueError('knobs must not be empty with gradients="shared": there would be nothing to explore')
        replicas = agree(common, others, {"learning_rate": vars(rate), **common.facts()}, spread=rate.spread)
        if replicas.count == 1:
            warnings.warn(
                "Explorer compares replicas, and there is one: training continues with every knob as it is. Start "
                "several with torchrun, and initialise the process group first",
                stacklevel=2,
            )
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.last_epoch = 0
        self._explores_lr = bool(rates)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        num_lrs = 1 if rate.groups == "together" else len(optimizer.param_groups)
        joint = adapt.controller
        if joint is None:
            joint = JointController(optimism=[LR_OPTIMISM] * num_lrs + [0.0] * len(others))
        adapts = rate.adapt or any(knob.adapt for knob in others)
        panel = others.panel(
            joint if adapts else None, moves_lrs=rate.adapt, balanced=adapt.assignment == "balanced"
        )  # fmt: skip
        acting: tuple[float, float] = (common.start_steps, math.inf)
        if is_long:
            panel, acting = long_panel(others, num_lrs), (0, last_decision(common))
        loop = make_loop(
            common, replicas, others, panel, controller=None, spread=rate.spread, acting=acting,
            step=0, groups=rate.groups, bounds=None if rates else (1.0, 1.0), rollback=not is_long,
        )  # fmt: skip
        self._last_lr = list(self._base_lrs)
        self._attach(optimizer, loop)
        self._refresh()

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, loss: Loss | None = None) -> None:
        """Count one optimizer step; end the round when it is due.

        Args:
            loss: this replica's loss of the step, as a number or a one-element float tensor on any device. It is not
                read before the round ends. Optional with a probe, or where :meth:`observe` is used.
        """
        loop = self._rounds
        self._habits.stepped(loss)
        with loop.lock:
            if loop.finished:
                raise RuntimeError(f"training was finished at step {self.last_epoch}; make a new Explorer to go on")
            step = self.last_epoch + 1
            if loss is not None:
                loop.observe(loss)
            last = step == self.total_steps
            if last or loop.needs_end_step(step):
                self._check_lrs()
                if loop.end_step(step, self._schedule(), last=last):
                    self._refresh()
            self.last_epoch = step

    @contextmanager
    def converged(self) -> Iterator[None]:
        try:
            with super().converged():
                self._refresh()
                yield
        finally:
            self._refresh()

    def finish(self) -> None:
        super().finish()
        self._refresh()

    def _schedule(self) -> list[float]:
        """What the learning rates would be without exploration."""
        return self._base_lrs if self._explores_lr else [float(group["lr"]) for group in self.optimizer.param_groups]

    def _check_lrs(self) -> None:
        found = [float(group["lr"]) for group in self.optimizer.param_groups]
        if self._explores_lr and any(not math.isclose(a, float(b), rel_tol=1e-6) for a, b in zip(found, self._last_lr)):  # noqa: B905
            raise RuntimeError(
                f"learning rates must be left to the Explorer that explores them, but {self._last_lr} became {found}; "
                "with a schedule, use AutoLR(schedule, knobs=[...]) instead of a LearningRate knob"
            )

    def _refresh(self) -> None:
        if self._explores_lr:
            loop = self._rounds
            factors = loop.values.base_factors if loop.values.at_base else loop.values.factors
            lrs = loop.values.of_all(self._base_lrs)
            for group, lr, factor in zip(self.optimizer.param_groups, lrs, factors, strict=True):
                write_lr(group, float(lr * factor))
            self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _first_lr(self) -> float:
        return self._base_lrs[0]

    def _in_charge(self) -> bool:
        return self._rounds.active

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types and tensors, the same on every rank: save it on one, load it on all.

        Save it, the model and the optimizer inside :meth:`converged`, where the weights are the mean and every knob is
        at its base value.
        """
        self._warn_if_apart()
        with self._rounds.lock:
            return {
                "version": STATE_VERSION,
                "step": self.last_epoch,
                "base_lrs": list(self._base_lrs),
                "rounds": save_rounds(self._rounds),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write every knob. Load model and optimizer first.

        A state that cannot be used raises ValueError and changes nothing.
        """
        check_version(state_dict, "Explorer")
        with self._rounds.lock:
            try:
                step = whole_of(state_dict["step"], "step")
                rounds = self._rounds
                lrs = lrs_of(state_dict["base_lrs"], "base_lrs", rounds.values.num_scheduled(state_dict["rounds"]))
                load_rounds(rounds, state_dict["rounds"], step=step)
            except Exception as error:
                raise cannot_load(error) from error
            self.last_epoch, self._base_lrs = step, lrs
            self._refresh()
