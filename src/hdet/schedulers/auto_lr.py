"""AutoLR: a learning rate that is found during the run, alone or times a schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet.checks import require, require_one_of, whole, whole_of
from hdet.engine.saving import load_rounds, save_rounds
from hdet.engine.state import adopted
from hdet.found import Found
from hdet.knobs import Knob
from hdet.notices import tell
from hdet.options import Adapt, Averaging, Copies, Faults
from hdet.schedulers._agreement import agree, make_knobs, panel_beside_lr, refuse_with_schedule, warn_if_alone
from hdet.schedulers._auto_settings import SignalName, auto_settings, finds_level, interval_for
from hdet.schedulers._base import RoundScheduler
from hdet.schedulers._build import make_loop
from hdet.schedulers._ceiling import Ceiling
from hdet.schedulers._common import Common, Gradients, require_total_steps
from hdet.schedulers._cooldown import Cooldown, check_cooldown
from hdet.schedulers._found import found_by
from hdet.schedulers._hooks import refuse_second
from hdet.schedulers._learned_decay import WeightDecayChoice
from hdet.schedulers._lookahead import (
    as_ratios,
    check_lrs_given,
    check_schedule,
    constant_schedule,
    has_steps,
    length_of,
    shape_of,
)
from hdet.schedulers._saved import STATE_VERSION, cannot_load, check_version
from hdet.schedulers._torch_state import facts_about, is_plain
from hdet.schedulers._wrapped import Wrapped
from hdet.signals.loss import Loss
from hdet.signals.probe import Probe

_ADVICE = (
    "AutoLR wraps all of a run's schedules: AutoLR(ChainedScheduler([...])), AutoLR(SequentialLR(...)), and a LambdaLR "
    "for what is changed by hand; call step() of AutoLR alone"
)


class AutoLR(RoundScheduler, LRScheduler):
    r"""A learning rate that is found during the run: ``AutoLR(optimizer, total_steps=N)``, then ``step(loss)``.

    The first learning rate follows from the size of the first updates (Eq. 16), and rises along a warm-up of 6% of the
    run. After each round it rises where the slope of the loss over its logarithm supports that or progress has earned
    it, and falls where the loss stands still or rises (Eq. 17), until it decays to zero over the last 30%.

    ``AutoLR(schedule)`` keeps the shape of any schedule and multiplies it by the learned scale; its peak is followed
    where it is within a factor of 8 of the first level. ``AutoLR(optimizer)`` is a run of unknown length, which
    :meth:`cooldown` ends. A round that breaks the model is undone and the scale halved.

    Call ``step(loss)`` after every ``optimizer.step()``. Without losses the learning rate stays at its first level.
    AutoLR alone steps the schedule and writes learning rates: it goes around SequentialLR and ChainedScheduler, never
    inside, and a learning rate that something else has changed is an error. A param group that is added in mid-run
    starts with the learning rate it is given, or the first group's, and follows the first group in proportion.

    Args:
        schedule: the optimizer, whose learning rates then only say how those of param groups compare: constant, with a
            linear decay over the last 30% of ``total_steps``, or until :meth:`cooldown` where they are not given. Or
            any LRScheduler but ReduceLROnPlateau, already constructed. AutoLR steps it.
        model: for buffers, and parameters that another optimizer trains.
        signal: ``"gradient"``, the first-order signal: one replica suffices, and replicas stay equal. ``"loss"``: the
            replicas fan out and their losses are compared. ``"auto"`` takes ``"gradient"``.
        interval: T, optimizer steps of a round; default a hundredth of ``total_steps``, between 4 and 50 (with the loss
            signal between 1 and 1000); 20 without (100).
        total_steps: length of the run, where the schedule does not tell. Without it the scale holds still from
            :meth:`cooldown` on only, and the last round has to be ended by :meth:`converge` unless that is called.
        max_lr: what no learning rate ever exceeds: a number, or one for each param group; groups
            that join later have the first one's. Beside the bounds of the scale.
        knobs: of :mod:`hdet.knobs`, to explore beside the learning rate; replicas then differ with either signal.
        gradients: as in Explorer.
        probe: a function that returns the loss on a batch of held-out data, of its own at each call. With the gradient
            signal its gradient, in every twentieth step, says where the learning rate that fits fastest is too high for
            data that the model has not seen; with ``signal="loss"`` or ``knobs`` replicas are compared by it.
        weight_decay: ``"learn"`` to find it on the way, from the same probes; a pair for bounds of its own. Default
            from 1e-4 to 10, with a first value of at least 0.1; with SGD from 1e-6 to 1, and at least 0.001. Param
            groups keep their ratios.
        adapt: how the scale adapts: level, controller, spread, anchor, and when it may move.
        copies: where copies of the weights live.
        faults: what is done about broken rounds and replicas.
        averaging: how replicas are averaged.
        process_group: the ranks that train this model; default all of them.
        seed: of the private permutations.

    Example:
        >>> import torch
        >>> from hdet import AutoLR
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([weights])
        >>> scheduler = AutoLR(optimizer, total_steps=100)
        >>> loss = (weights ** 2).sum()
        >>> loss.backward()
        >>> optimizer.step(); scheduler.step(loss)
    """

    def __init__(
        self,
        schedule: LRScheduler | Optimizer,
        *,
        model: nn.Module | None = None,
        signal: Literal["auto", "gradient", "loss"] = "auto",
        interval: int | None = None,
        total_steps: int | None = None,
        max_lr: float | Sequence[float] | None = None,
        knobs: Sequence[Knob] = (),
        gradients: Gradients = "shared",
        probe: Probe | None = None,
        weight_decay: WeightDecayChoice | None = None,
        adapt: Adapt = Adapt(),
        copies: Copies = Copies(),
        faults: Faults = Faults(),
        averaging: Averaging = Averaging(),
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        require_one_of("signal", signal, "auto", "gradient", "loss")
        lr_given = not isinstance(schedule, Optimizer)
        with ExitStack() as undone:  # where something is refused, the optimizer is left as it was
            first_lr = None
            if isinstance(schedule, Optimizer):
                require_total_steps(total_steps)
                refuse_second(schedule)
                check_lrs_given(schedule)
                if isinstance(adapt, Adapt) and finds_level(adapt, step=0, lr_given=False):
                    first_lr = float(schedule.param_groups[0]["lr"])
                    undone.enter_context(as_ratios(schedule))
                schedule = constant_schedule(schedule, total_steps)
            kind: SignalName = "loss" if signal == "loss" else "gradient"
            check_schedule(schedule)
            optimizer = schedule.optimizer
            total_steps = length_of(schedule) if total_steps is None else total_steps
            interval = interval_for(kind, total_steps) if interval is None else interval
            common = Common(
                optimizer=optimizer, model=model, interval=interval, total_steps=total_steps, knobs=knobs,
                gradients=gradients, probe=probe, adapt=adapt, copies=copies, faults=faults, averaging=averaging,
                process_group=process_group, seed=seed, weight_decay=weight_decay,
            )  # fmt: skip
            refuse_with_schedule(common)
            refuse_second(optimizer)
            spread = adapt.spread if kind == "loss" else 0.0
            beside = make_knobs(common, knobs)
            self._ceiling = Ceiling(max_lr, len(optimizer.param_groups))
            facts = {"schedule": type(schedule).__name__, "signal": signal, "max_lr": str(max_lr), **common.facts()}
            facts |= facts_about(schedule)
            replicas = agree(common, beside, facts, spread=spread)
            warn_if_alone(beside, replicas)
            if kind == "loss" and replicas.count == 1:
                warnings.warn(
                    'signal="loss" compares replicas, and there is one: training continues with the schedule as it is. '
                    'Use signal="gradient", or start several with torchrun',
                    stacklevel=2,
                )

            self.schedule = schedule
            self._lr_given = lr_given
            self._first_scale = 1.0 if first_lr is None else first_lr
            self.optimizer = optimizer
            self.total_steps = math.inf if total_steps is None else total_steps
            self._wrapped = wrapped = Wrapped(schedule)
            self._step = wrapped.step
            self.base_lrs = list(wrapped.base_lrs)
            self._cooling: Cooldown | None = None
            self._planned_steps = self.total_steps
            loop = make_loop(
                common, replicas, beside, panel_beside_lr(common, beside), spread=spread, step=self._step,
                **auto_settings(
                    common, kind, step=self._step, lr_given=lr_given, has_steps=has_steps(schedule),
                    first_lr=wrapped.base_lrs[0] if first_lr is None else first_lr,
                    shape=() if total_steps is None else shape_of(schedule, whole(total_steps)),
                ),
            )  # fmt: skip
            for share in wrapped.shares_of_joined():
                loop.follow(share)
            self._planned_hold = loop.policy.acting[1]
            self._attach(optimizer, loop)
            self._refresh()

    # -- training -----------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """Optimizer steps taken, under the name that torch's schedulers have for it."""
        return self._step

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        # SequentialLR does this when it is constructed, to start its parts over when it is their turn.
        raise RuntimeError(
            f"AutoLR counts its own steps, but was set from step {self._step} to {value}, as SequentialLR does with "
            "what is inside it. Put AutoLR around it, AutoLR(SequentialLR(optimizer, [warmup, cosine], "
            "milestones=[...])), and call step(loss) of AutoLR"
        )

    def step(self, loss: Loss | None = None) -> None:
        """Advance the schedule by one optimizer step; end the round when it is due.

        Args:
            loss: this rank's loss of the step, as a number or a one-element float tensor on any device. It is not read
                before the round ends. Optional with the gradient signal, or where :meth:`observe` is used.
        """
        loop, wrapped = self._loop, self._wrapped
        assert loop is not None
        if not self._knows_caller:
            self._refuse_repeats()
        self._habits.stepped(loss)
        with loop.lock:
            step = self._step + 1
            last = step == self.total_steps
            if step > self.total_steps and (self._cooling is not None or not self._lr_given):
                self._habits.past_end(step, self.total_steps)
            if wrapped.counter.last_epoch != wrapped.step or not self._left_alone():
                self._look_closer(step)
            if isinstance(self.schedule, OneCycleLR) and step > self.schedule.total_steps:
                self.schedule.step()  # raises, before anything has changed
            if loss is not None:
                loop.tally.observe(loss)
            if last or loop.needs_end_step(step):
                loop.end_step(step, self._scheduled(), last=last)
            wrapped.advance(loop.values)
            self._step = step
            loop.upcoming = step + 1
            if loop.policy.level is not None and loop.policy.follow(step):
                loop.values.update()
            if self._ceiling.lrs:
                self._ceiling.hold(loop.values, wrapped.lrs)
            self._write_lrs(self._scheduled())

    @property
    def _step_count(self) -> int:
        """What Accelerate compares with ``total_steps`` before it takes a step: those taken, and torch's first one."""
        return self.last_epoch + 1

    @_step_count.setter
    def _step_count(self, value: int) -> None:
        """Accelerate counts micro-batches here, too; the steps of AutoLR are the optimizer's."""

    def _look_closer(self, step: int) -> None:
        """Take up param groups that have joined; raise where something else has moved schedule or learning rate."""
        loop = self._rounds
        self._wrapped.refuse_other_steps()
        self._refuse_foreign_lr(wait=loop.policy.is_due(step), advice=_ADVICE)

    def cooldown(self, steps: int) -> None:
        """Anneal the learning rates to zero within ``steps`` steps, along a line, from wherever they are; then it ends.

        For a run of unknown length. The scale holds still from here on, and training ends at step
        ``last_epoch + steps``. Called again on the way, it goes on from there. Every rank must call it.
        """
        require(whole(steps) >= 1, "steps", "an integer >= 1", steps)
        loop = self._rounds
        with loop.lock:
            ended = loop.finished or self._step == self.total_steps
            check_cooldown(steps, self.schedule, step=self._step, ended=ended)
            self._cool(Cooldown(self._step, int(steps), self._cooled()))
            self._refresh()

    def _cool(self, cooling: Cooldown | None) -> None:
        """None for no cooldown, or one that is taken back."""
        self._cooling = cooling
        self.total_steps, hold = self._planned_steps, self._planned_hold
        if cooling is not None:
            self.total_steps, hold = cooling.end, min(hold, cooling.begun)
        self._rounds.policy.hold_from(hold)

    def _cooled(self) -> float:
        """What a cooldown has left of the schedule."""
        return 1.0 if self._cooling is None else self._cooling.left(self._step)

    def _scheduled(self) -> list[float]:
        """What the schedule gives the param groups that it knows, cooled down."""
        lrs = self._wrapped.lrs
        if self._cooling is None:
            return lrs
        left = self._cooled()
        return [lr * left for lr in lrs]

    def found(self) -> Found:
        """The learning rates as they were so far, to print, to save, and to train with again."""
        return found_by(self._rounds, self.total_steps)

    def get_lr(self) -> list[float | Tensor]:
        """This replica's learning rate of each param group: schedule x learned scale x multiplier."""
        return self._rounds.values.scaled(self._scheduled())

    def _first_lr(self) -> float:
        return self._scheduled()[0]

    def _refresh(self) -> None:
        if self._ceiling.lrs:
            self._ceiling.hold(self._rounds.values, self._wrapped.lrs)
        self._write_lrs(self._scheduled())

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types and the anchor's tensors, the same on every rank: save it on one, load it on all.

        With ``signal="loss"`` replicas are apart all the time: save it, and the model, inside :meth:`converged`.
        """
        self._warn_if_apart()
        with self._rounds.lock:
            return {
                "version": STATE_VERSION,
                "last_epoch": self.last_epoch,
                **self._wrapped.state_dict(),
                "cooldown": [] if self._cooling is None else list(self._cooling),
                "rounds": save_rounds(self._rounds),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write the learning rates into the optimizer.

        Load the model first: with ``signal="loss"`` the replicas take their places around its weights here. A state
        that cannot be used raises ValueError and changes nothing.

        A state that the wrapped schedule itself has written, in a run without hdet, is continued as it is: at its step,
        at a scale of 1. Where AutoLR was given the optimizer alone, only the step is taken, from a state of any
        schedule or from ``{"last_epoch": step}``, and training goes on at the learning rate that was given.
        """
        with self._rounds.lock:
            if is_plain(state_dict):
                self._load(self._adopted(state_dict))
                tell(f"a run without hdet is continued from step {self._step}, at its learning rate")
                return
            check_version(state_dict, "AutoLR")
            self._load(state_dict)

    def _adopted(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """What this scheduler would have saved in a run that was trained without it."""
        loop = self._rounds
        try:
            step, schedule = self._wrapped.adopted(plain, step_only=not self._lr_given)
        except Exception as error:
            raise cannot_load(error) from error
        return {
            "version": STATE_VERSION,
            "last_epoch": step,
            **schedule,
            "cooldown": [],
            "rounds": adopted(save_rounds(loop), round_index=step // loop.policy.interval, scale=self._first_scale),
        }

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        rounds, wrapped = self._rounds, self._wrapped
        before = wrapped.remember()
        try:
            last_epoch = whole_of(state_dict["last_epoch"], "last_epoch")
            wrapped.load(state_dict, rounds.values, step=last_epoch)
            cooling = Cooldown.of(state_dict["cooldown"])
            load_rounds(rounds, state_dict["rounds"], step=last_epoch)
        except Exception as error:
            wrapped.put_back(before)
            raise cannot_load(error) from error
        self._step = last_epoch
        self._cool(cooling)
        self._refresh()
