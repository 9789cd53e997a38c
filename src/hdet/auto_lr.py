"""AutoLR: a learning rate that is found during the run, alone or times a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hdet.beside import refuse_second
from hdet.checks import as_int, require, require_one_of, whole_of
from hdet.found import Found
from hdet.notices import tell
from hdet.options import Adapt, Copies, Faults
from hdet.plan import (
    HasMembers,
    Members,
    Plan,
    SignalName,
    WeightDecayChoice,
    auto_settings,
    finds_level,
    interval_for,
    require_total_steps,
)
from hdet.policy.evaluations import BEST_RATE, LARGEST
from hdet.run import adopted
from hdet.schedule import (
    Wrapped,
    as_ratios,
    check_lrs_given,
    check_schedule,
    constant_schedule,
    facts_about,
    has_steps,
    is_plain,
    length_of,
    shape_of,
)
from hdet.scheduler import STATE_VERSION, Scheduler, cannot_load, check_version
from hdet.signals.held_out import Probe
from hdet.signals.loss import Loss

LION = (
    "with Lion, AutoLR ended between 0% and 12% above the best learning rate of a grid, 6% in the mean of eight; "
    "compare it with a learning rate of your own, a third to a tenth of AdamW's"
)


def _unchanged(step: int) -> float:
    return 1.0


class AutoLR(Scheduler, LRScheduler):
    r"""A learning rate that is found during the run: ``AutoLR(optimizer, total_steps=N)``, then ``step(loss)``.

    The first learning rate follows from the size of the first updates (Eq. 16), and rises along a warm-up of 6% of the
    run. After each round it rises where the slope of the loss over its logarithm supports that or progress has earned
    it, and falls where the loss stands still or rises, or noise costs much of the gain (Eq. 17), until it decays to
    zero over the last 30%.

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
        interval: T, optimizer steps of a round; default a hundredth of ``total_steps``, between 4 and 50; 20 without.
            Where replicas compare losses between 1 and 1000, and 100.
        total_steps: length of the run, where the schedule does not tell. Without it the scale holds still from
            :meth:`cooldown` on only, and the last round has to be ended by :meth:`converge` unless that is called.
        max_lr: what no learning rate ever exceeds: a number, or one for each param group; groups
            that join later have the first one's. Beside the bounds of the scale.
        probe: a function that returns the loss on a batch of held-out data, of its own at each call. With the gradient
            signal its gradient, in every twentieth step, says where the learning rate that fits fastest is too high for
            data that the model has not seen; replicas that differ are compared by it. Learn the weight decay with it.
        weight_decay: ``"learn"`` to find it on the way, from the same probes; a pair for bounds of its own. Default
            from 1e-4 to 10, with a first value of at least 0.1; with SGD from 1e-6 to 1, and at least 0.001. Param
            groups keep their ratios.
        adapt: how the scale adapts: level, controller, anchor, when it may move, and whether it only watches.
        copies: where copies of the weights live.
        faults: what is done about broken rounds and replicas.
        process_group: the ranks that train this model; default all of them.
        ensemble: an :class:`hdet.ensemble.Ensemble`, for replicas that differ in their learning rates, in knobs or in
            their gradients. Default: they hold the same weights.

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

    _advice = (
        "AutoLR wraps all of a run's schedules: AutoLR(ChainedScheduler([...])), AutoLR(SequentialLR(...)), and a "
        "LambdaLR for what is changed by hand; call step() of AutoLR alone"
    )

    def __init__(
        self,
        schedule: LRScheduler | Optimizer,
        *,
        model: nn.Module | None = None,
        interval: int | None = None,
        total_steps: int | None = None,
        max_lr: float | Sequence[float] | None = None,
        probe: Probe | None = None,
        weight_decay: WeightDecayChoice | None = None,
        adapt: Adapt = Adapt(),
        copies: Copies = Copies(),
        faults: Faults = Faults(),
        process_group: dist.ProcessGroup | None = None,
        ensemble: HasMembers | None = None,
    ) -> None:
        if ensemble is not None and not hasattr(ensemble, "members"):
            raise TypeError(f"ensemble must be an hdet.ensemble.Ensemble, but got {type(ensemble).__name__}")
        if isinstance(schedule, Optimizer) and isinstance(adapt, Adapt) and not adapt.act:
            require_total_steps(total_steps)
            schedule = LambdaLR(schedule, _unchanged)
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
            if isinstance(schedule, Scheduler):
                raise TypeError(
                    f"schedule must not be a scheduler of hdet, but got {type(schedule).__name__}; wrap a plain one"
                )
            check_schedule(schedule)
            optimizer = schedule.optimizer
            members = Members() if ensemble is None else ensemble.members()
            signal: SignalName = "loss" if members.spread > 0 else "gradient"
            total_steps = length_of(schedule) if total_steps is None else total_steps
            plan = Plan(
                optimizer=optimizer, model=model,
                interval=interval_for(signal, total_steps) if interval is None else interval, total_steps=total_steps,
                probe=probe, adapt=adapt, copies=copies, faults=faults, process_group=process_group,
                weight_decay=weight_decay, members=members,
            )  # fmt: skip
            refuse_second(optimizer)
            if "lion" in type(optimizer).__name__.lower():
                tell(LION)
            members.bind(plan)
            facts = {"schedule": type(schedule).__name__, "max_lr": str(max_lr), **facts_about(schedule)}
            replicas = plan.find_replicas(facts | plan.facts())
            wrapped = Wrapped(schedule, total_steps=total_steps, max_lr=max_lr)
            self.schedule = schedule
            self.optimizer = optimizer
            self.base_lrs = list(wrapped.base_lrs)
            self._schedule: Wrapped = wrapped
            self._lr_given = lr_given
            self._first_scale = 1.0 if first_lr is None else first_lr
            run = plan.make_run(
                replicas, step=wrapped.step,
                **auto_settings(
                    plan, signal, step=wrapped.step, lr_given=lr_given, has_steps=has_steps(schedule),
                    first_lr=wrapped.base_lrs[0] if first_lr is None else first_lr,
                    shape=shape_of(schedule, None if total_steps is None else as_int(total_steps)),
                ),
            )  # fmt: skip
            for share in wrapped.shares_of_joined():
                run.follow(share)
            self._planned_hold = run.policy.acting[1]
            self._attach(optimizer, run)
            self._refresh()

    # -- training -----------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """Optimizer steps taken, under the name that torch's schedulers have for it."""
        return self._schedule.step

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        # SequentialLR does this when it is constructed, to start its parts over when it is their turn.
        raise RuntimeError(
            f"AutoLR counts its own steps, but was set from step {self.last_epoch} to {value}, as SequentialLR does "
            "with what is inside it. Put AutoLR around it, AutoLR(SequentialLR(optimizer, [warmup, cosine], "
            "milestones=[...])), and call step(loss) of AutoLR"
        )

    @property
    def total_steps(self) -> float:
        """Length of the run; infinite while it is unknown."""
        return self._schedule.total_steps

    def _look_closer(self, step: int) -> None:
        schedule = self._schedule
        shortened = self._run.policy.evaluations.turned_at is not None  # and it was said when training may end
        if step > schedule.total_steps and (schedule.cooling is not None or not self._lr_given) and not shortened:
            self._checks.past_end(step, schedule.total_steps)
        super()._look_closer(step)
        if isinstance(self.schedule, OneCycleLR) and step > self.schedule.total_steps:
            self.schedule.step()  # raises

    @property
    def _step_count(self) -> int:
        """What Accelerate compares with ``total_steps`` before it takes a step: those taken, and torch's first one."""
        return self.last_epoch + 1

    @_step_count.setter
    def _step_count(self, value: int) -> None:
        """Accelerate counts micro-batches here, too; the steps of AutoLR are the optimizer's."""

    def cooldown(self, steps: int) -> None:
        """Anneal the learning rates to zero within ``steps`` steps, along a line, from wherever they are; then it ends.

        For a run of unknown length. The scale holds still from here on, and training ends at step
        ``last_epoch + steps``. Called again on the way, it goes on from there. Every rank must call it.
        """
        require(as_int(steps) >= 1, "steps", "an integer >= 1", steps)
        self._take_up_new_groups()
        with self._run.lock:
            self._schedule.cool(steps, ended=self._run.finished)
            self._hold()
            self._refresh()

    def freeze(self) -> None:
        """Hold the scale from the end of this round on: the learning rate follows its schedule alone.

        On all ranks, whichever calls it, and in states that are saved from then on. A warm-up is completed. Broken
        rounds are still undone, and their scale halved, unless ``faults`` say otherwise.
        """
        self._run.asked_to_freeze = True

    def evaluated(self, loss: Loss, *, mode: Literal["min", "max"] | None = None) -> None:
        """A validation loss, whenever there is one: the final decay begins early where they have turned.

        They have turned when the last quarter of them, two at least, is above the best stretch as long, and the
        training loss is not: by more than twice its standard error, or three times, unless they are more than a quarter
        above the training loss too. Of few, more than 11% of the run apart, one that is a tenth above the lowest, and
        more than twice the training loss, is enough. The learning rates then decay to zero within 0.3 times the steps
        so far, and a line in the log says when training may end.

        Before that, where the last of them is more than a quarter above the training loss, the learning rate is divided
        by as much as it is above that, by at most 0.2 in its logarithm a round, and does not rise: the model memorises
        its data. Before the second evaluation, early in the run or in one of unknown length, validation counts as
        standing still and the rate is halved at most; later validation counts as following the training loss as far as
        it did. Values of another kind than the training loss do nothing here.

        With ``Copies(best=True)`` the learning rate stays as it is before, and the decay starts from the best weights
        so far, at a quarter of it, and takes 0.6 times the steps so far; also where validation turns in the final decay
        itself, of which the last eighth counts. Those are the weights at hand when this is called, and every rank must
        pass the same loss. And where a small model memorises its data at once, training starts again from its first
        weights: validation is more than a quarter above the training loss in evaluations in a row, before 0.3 of the
        run. Then the rate is that of a model of 3M parameters, does not rise, and the state of the optimizer is new.

        Args:
            loss: that of training on validation data, or another metric; a number, or a tensor with one element. On any
                rank, or on several: their mean counts. It is taken in when the round ends.
            mode: ``"min"`` or ``"max"``, which way is better. Default: lower; but values that never were below the
                first one could be of a metric that should rise, and do nothing.
        """
        if mode is not None:
            require_one_of("mode", mode, "min", "max")
        with self._run.lock:
            loss = -loss if mode == "max" else loss
            self._run.evaluation.observe(loss)
            self._run.mode_given = self._run.mode_given or mode is not None
            if self._run.best is not None and abs(float(loss)) <= LARGEST:
                self._run.best.offer(self.last_epoch, float(loss))

    def restore_best(self) -> int:
        """Write the weights and buffers of the lowest validation loss into the model; returns their step.

        Needs ``Copies(best=True)``. The optimizer's state stays as it is. Every rank must call it.
        """
        with self._run.lock:
            best = self._run.best
            if best is None or best.step < 0:
                why = "needs copies=Copies(best=True)" if best is None else "needs a call of evaluated(loss) first"
                raise RuntimeError(f"restore_best() {why}: no weights were kept")
            self._run.restore_best(best)
            return best.step

    def _after_round(self) -> None:
        """Begin the final decay where validation losses have turned."""
        if self._run.decay_steps and (self._schedule.cooling is None or self._run.best is not None):
            share = 1.0 if self._run.best is None else BEST_RATE
            self._schedule.cool(self._run.decay_steps, ended=False, share=share)
            self._hold()

    def _hold(self) -> None:
        """The scale holds still from the start of a cooldown on, if one has begun."""
        cooling = self._schedule.cooling
        hold = self._planned_hold if cooling is None else min(self._planned_hold, cooling.begun)
        self._run.policy.hold_from(hold)

    def found(self) -> Found:
        """The learning rates as they were so far, to print, to save, and to train with again."""
        return self._found()

    def get_lr(self) -> list[float | Tensor]:
        """This replica's learning rate of each param group: schedule x learned scale x multiplier."""
        self._take_up_new_groups()
        return self._run.lrs.scaled(self._schedule.lrs)

    def _refresh(self) -> None:
        self._schedule.hold_below_ceiling(self._run.lrs)
        super()._refresh()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types and the anchor's tensors, the same on every rank: save it on one, load it on all.

        Where replicas differ, save it, and the model, inside :meth:`converged`.
        """
        self._take_up_new_groups()
        self._warn_if_apart()
        with self._run.lock:
            return {
                "version": STATE_VERSION,
                "last_epoch": self.last_epoch,
                **self._schedule.state_dict(),
                "rounds": self._run.state_dict(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, and write the learning rates into the optimizer.

        Load the model first: replicas that differ take their places around its weights here. A state
        that cannot be used raises ValueError and changes nothing.

        A state that the wrapped schedule itself has written, in a run without hdet, is continued as it is: at its step,
        at a scale of 1. Where AutoLR was given the optimizer alone, only the step is taken, from a state of any
        schedule or from ``{"last_epoch": step}``, and training goes on at the learning rate that was given.
        """
        self._take_up_new_groups()
        with self._run.lock:
            if is_plain(state_dict):
                self._load(self._adopted(state_dict))
                tell(f"a run without hdet is continued from step {self.last_epoch}, at its learning rate")
                return
            check_version(state_dict, "AutoLR")
            self._load(state_dict)

    def _adopted(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """What this scheduler would have saved in a run that was trained without it."""
        run = self._run
        try:
            step, schedule = self._schedule.adopted(plain, step_only=not self._lr_given)
        except Exception as error:
            raise cannot_load(error) from error
        return {
            "version": STATE_VERSION,
            "last_epoch": step,
            **schedule,
            "rounds": adopted(run.state_dict(), round_index=step // run.policy.interval, scale=self._first_scale),
        }

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        run, schedule = self._run, self._schedule
        before = schedule.remember()
        try:
            last_epoch = whole_of(state_dict["last_epoch"], "last_epoch")
            schedule.load(state_dict, run.lrs, step=last_epoch)
            run.load_state_dict(state_dict["rounds"], step=last_epoch)
        except Exception as error:
            schedule.put_back(before)
            raise cannot_load(error) from error
        self._hold()
        self._refresh()
