"""OneCycleAutoLR: the paper's method in the shape of torch's OneCycleLR."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.controllers import PaperController
from hdet.engine.saving import load_rounds, save_rounds
from hdet.knobs import Knob, Momentum
from hdet.options import Adapt, Averaging, Copies, Faults
from hdet.schedulers._agreement import agree, make_knobs, panel_beside_lr, refuse_with_schedule, warn_if_alone
from hdet.schedulers._base import RoundScheduler
from hdet.schedulers._build import make_loop
from hdet.schedulers._common import Common, Gradients
from hdet.schedulers._decay import Decay, DecayKind
from hdet.schedulers._hooks import refuse_second
from hdet.schedulers._joined import follow_momentum
from hdet.schedulers._one_cycle_checks import (
    AGREED,
    check_last_epoch,
    check_one_cycle,
    check_warmup,
    refuse_unused,
    total_steps_of,
)
from hdet.schedulers._one_cycle_state import from_torch, is_torchs_own, load_schedule, remember, save_schedule
from hdet.schedulers._saved import STATE_VERSION, cannot_load, check_version
from hdet.schedulers._torch_state import LRS, MOMENTA, check_one_cycle_state
from hdet.signals.loss import Loss
from hdet.signals.probe import Probe

_TORCHS = tuple(inspect.signature(OneCycleLR).parameters)
"""Arguments of OneCycleLR."""


class OneCycleAutoLR(RoundScheduler, OneCycleLR):
    r"""Torch's OneCycleLR, with replicas that disagree about the learning rate on purpose.

    Each replica trains with its own multiple of the schedule's learning rate (Eq. 1 and 2), every
    ``model_sync_interval`` steps and at the last step the weights are averaged (Eq. 3), and with ``enable_auto_lr`` the
    shared learning rate of every param group moves towards what worked (Eq. 4 to 8). With
    ``ensemble_lr_spread_ratio=0`` and auto-LR off this *is* OneCycleLR, to the last bit. With one process it warns once
    and trains as OneCycleLR.

    Call ``step(loss)`` after ``optimizer.step()``. All ranks must construct, step and converge together.

    Args:
        optimizer: as in OneCycleLR, and so are all arguments up to ``last_epoch``.
        last_epoch: continues the schedule from there; what the controller learned comes back only through
            :meth:`load_state_dict`.
        ensemble_lr_spread_ratio: alpha in [0, 1): replicas use learning rates from (1 - alpha) to (1 + alpha) times
            the base.
        model_sync_interval: T >= 1, optimizer steps between converges.
        auto_lr_warmup_steps: steps before the controller may act; it acts at converges after that.
        enable_auto_lr: whether the controller acts at all.
        loss_scale: sigma > 0, temperature of the softmax over replicas.
        lr_of_lr: lambda >= 0, how far the base moves with the velocity.
        momentum_of_lr: beta in [0, 1), smoothing of the velocity.
        rank, world_size: accepted for compatibility and ignored; the process group decides.
        model: average its buffers too (BatchNorm statistics): floats become the mean, integers the maximum.
        process_group: the ranks that hold replicas; default all of them.
        decay: how the base falls while auto-LR is on. ``"schedule"``: as OneCycleLR does. ``"floor"``: geometrically,
            from the peak or from ``auto_lr_warmup_steps``, whichever is later, to the schedule's ``min_lr`` at the end.
            ``"printed"``: the same towards ``final_div_factor / div_factor`` of the start, as Eq. 8 is printed; refused
            where that would grow the learning rate.
        knobs: of :mod:`hdet.knobs`, to explore beside the learning rate. Their base values move after
            ``auto_lr_warmup_steps``, with or without ``enable_auto_lr``.
        gradients, probe: as in :class:`~hdet.Explorer`.
        adapt: ``bounds`` of the scale and ``assignment`` of the knobs; the rest is not for the paper's controller.
        copies: where copies of the weights live.
        faults: what is done about broken rounds and replicas.
        averaging: how replicas are averaged.
        seed: of the private permutations. The global random state is never touched.

    Example:
        >>> import torch
        >>> from hdet import OneCycleAutoLR
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([weights], lr=0.1)
        >>> scheduler = OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=10, model_sync_interval=5)
        >>> loss = (weights ** 2).sum()
        >>> loss.backward()
        >>> optimizer.step(); scheduler.step(loss)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        auto_lr_warmup_steps: int = 100_000,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        rank: int = 0,
        world_size: int = 1,
        *,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        decay: DecayKind = "schedule",
        knobs: Sequence[Knob] = (),
        gradients: Gradients = "shared",
        probe: Probe | None = None,
        adapt: Adapt = Adapt(),
        copies: Copies = Copies(),
        faults: Faults = Faults(),
        averaging: Averaging = Averaging(),
        seed: int = 0,
    ) -> None:
        given = dict(locals())
        check_one_cycle(given)
        common = Common(
            optimizer=optimizer, model=model, interval=model_sync_interval,
            total_steps=max(0, total_steps_of(given)) or None, knobs=knobs, gradients=gradients, probe=probe,
            adapt=adapt, copies=copies, faults=faults, averaging=averaging, process_group=process_group, seed=seed,
        )  # fmt: skip
        check_warmup(given, knobs_adapt=any(knob.adapt for knob in knobs))
        check_last_epoch(last_epoch, optimizer, cycle_momentum)
        refuse_unused(adapt)
        refuse_with_schedule(common)
        refuse_second(optimizer)
        if cycle_momentum and any(type(knob) is Momentum for knob in knobs):
            raise ValueError("knobs must not contain Momentum while the schedule moves it; pass cycle_momentum=False")
        beside = make_knobs(common, knobs)
        spread = ensemble_lr_spread_ratio
        torchs = {name: given[name] for name in _TORCHS}
        facts = {**common.facts(), **torchs, **{name: given[name] for name in AGREED}}
        del facts["optimizer"], facts["interval"]
        overwritten = {"lr"} if last_epoch >= 0 else {"lr", *LRS, *MOMENTA}
        overwritten |= {"momentum", "betas[0]"} if cycle_momentum else set()
        replicas = agree(common, beside, facts, spread=spread, wait=False, overwritten=overwritten)
        warn_if_alone(beside, replicas)
        if spread > 0 and replicas.count == 1:
            warnings.warn(
                f"ensemble_lr_spread_ratio={spread} has no effect with one replica: training "
                "continues as OneCycleLR. Start several with torchrun, and initialise the process group first",
                stacklevel=2,
            )

        self._loop = None
        self._schedule_lrs: list[float | Tensor] | None = None
        self._decay = Decay()
        before = [dict(group) for group in optimizer.param_groups]
        try:
            super().__init__(**torchs)
        except Exception:
            # torch checks some arguments after it has begun to write others into the groups.
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group.clear()
                group.update(values)
            raise
        loop = make_loop(
            common, replicas, beside, panel_beside_lr(common, beside), spread=spread, step=self.last_epoch,
            controller=PaperController(loss_scale, lr_of_lr, momentum_of_lr) if enable_auto_lr else None,
            acting=(auto_lr_warmup_steps, math.inf), groups="each", rollback=False, anchor="round",
        )  # fmt: skip
        # One replica with a spread trains as OneCycleLR, whatever was asked of the auto-LR it cannot have.
        kind = "schedule" if replicas.count == 1 and spread > 0 else decay
        self._decay = Decay(kind, auto_lr_warmup_steps, div_factor / final_div_factor)
        self._attach(optimizer, loop)
        self._refresh()

    # -- the schedule -------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float | Tensor]:
        """This replica's learning rate of each param group: schedule x learned scale x multiplier. A pure read."""
        if not self._get_lr_called_within_step:  # as torch does
            message = "To get the last learning rate computed by the scheduler, please use `get_last_lr()`."
            warnings.warn(message, UserWarning, stacklevel=2)
        lrs = self._torch_lrs(self.last_epoch) if self._schedule_lrs is None else self._schedule_lrs
        return list(lrs) if self._loop is None else self._loop.values.scaled(lrs)

    def _update_lr(self, epoch: int | None = None) -> None:
        """Take the schedule to a step, the next one by default, and write the learning rates.

        Every way that torch has of moving a schedule comes through here.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self._loop is None:
            self._schedule_lrs = self._own_lrs()
            super()._update_lr(self.last_epoch)
            return
        decay = self._decay
        if self._loop.values.joined or decay.kind != "schedule":
            with self._scheduled_groups() as groups:
                lrs = self._own_lrs()
                if decay.kind != "schedule" and self.last_epoch > decay.begins(self):
                    lrs = decay.lrs(self, groups, self._torch_lrs(decay.begins(self)))
            follow_momentum(self, self.optimizer.param_groups, len(groups))
        else:
            lrs = self._own_lrs()
        self._schedule_lrs = lrs
        self._write_lrs(lrs)

    def _first_lr(self) -> float:
        return float(self._schedule_lrs[0]) if self._schedule_lrs else 0.0

    def _own_lrs(self) -> list[float | Tensor]:
        """What OneCycleLR gives now; it writes the momentum too, where it cycles that."""
        before, self._get_lr_called_within_step = self._get_lr_called_within_step, True
        try:
            return OneCycleLR.get_lr(self)
        finally:
            self._get_lr_called_within_step = before

    def _torch_lrs(self, step: float) -> list[float | Tensor]:
        """OneCycleLR's learning rates at ``step``, with the momentum left alone."""
        kept = self.cycle_momentum, self.last_epoch
        self.__dict__.update(cycle_momentum=False, last_epoch=step)
        try:
            with self._scheduled_groups():
                return self._own_lrs()
        finally:
            self.cycle_momentum, self.last_epoch = kept

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer."""
        self._update_lr(self.last_epoch)

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, loss: Loss | None = None) -> None:
        """Advance by one optimizer step; end the round when it is due.

        Args:
            loss: this replica's loss of the step, as a number or a one-element float tensor on any device. It is not
                read before the round ends. Optional where :meth:`observe` is used, or auto-LR is off.
        """
        loop = self._loop
        if loop is None:
            super().step()
            return
        if not self._knows_caller:
            self._refuse_repeats()
        self._habits.stepped(loss)
        with loop.lock:
            if not self._is_initial:
                step, total_steps = self.last_epoch + 1, self.total_steps
                if not self._left_alone():
                    self._look_closer(step)
                if loss is not None:
                    loop.tally.observe(loss)
                due = step == total_steps or (step < total_steps and loop.needs_end_step(step))  # beyond, torch raises
                if due and self._schedule_lrs is not None:  # inside SequentialLR a first step only starts the schedule
                    loop.end_step(step, self._schedule_lrs, last=step == total_steps)
            OneCycleLR.step(self)

    def _look_closer(self, step: int) -> None:
        """Take up param groups that have joined; raise where somebody else has written a learning rate."""
        loop = self._rounds
        if loop.active and self._schedule_lrs is not None:  # else it is OneCycleLR, which overwrites all
            advice = "OneCycleAutoLR has its own schedule; AutoLR(schedule) goes around any others"
            self._refuse_foreign_lr(wait=loop.policy.is_due(step), advice=advice)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types, the same on every rank: save it on one, load it on all.

        To be saved together with the model right after a converge, after :meth:`converge`, or inside
        :meth:`converged`; in between, the model on this rank is one of several different replicas, and this warns.
        """
        self._warn_if_apart()
        with self._rounds.lock:
            return {
                "version": STATE_VERSION,
                **save_schedule(self),
                "rounds": save_rounds(self._rounds),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write the learning rates into the optimizer.

        The schedule comes from the state, as in torch; HDET's own arguments stay those of the constructor. A state of
        torch's OneCycleLR is accepted too. Another number of replicas gets a new spread around the same base values.
        A state that cannot be used raises ValueError and changes nothing.
        """
        of_torch = is_torchs_own(state_dict)
        if of_torch:
            state_dict = from_torch(self, state_dict)
        check_version(state_dict, "OneCycleAutoLR")
        with self._rounds.lock:
            self._load(state_dict, of_torch=of_torch)

    def _load(self, state_dict: Mapping[str, Any], *, of_torch: bool) -> None:
        rounds, before = self._rounds, remember(self)
        try:
            load_schedule(self, state_dict)
            groups = self.optimizer.param_groups
            self._check_schedule(groups if of_torch else groups[: rounds.values.num_scheduled(state_dict["rounds"])])
            if not of_torch:
                load_rounds(rounds, state_dict["rounds"], step=self.last_epoch)
        except Exception as error:
            self.__dict__.update(before)
            raise cannot_load(error) from error
        self._schedule_lrs = None
        if self.last_epoch >= 0:  # inside SequentialLR, before its turn, a schedule is at -1
            self._refresh()

    def _check_schedule(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise where a loaded schedule does not fit these param groups or cannot be computed."""
        check_one_cycle_state(self, groups)
        if self._decay.kind != "schedule" and (begins := self._decay.begins(self)) >= self.total_steps:
            raise ValueError(f"decay sets in at step {begins}, but the state ends at {self.total_steps}")
        if self.last_epoch >= 0:
            self._torch_lrs(self.last_epoch)
