"""The base of the schedulers: the one ``step()``, what a user calls, and the hooks on the optimizer."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.beside import register
from hdet.checks import as_int, shown
from hdet.found import Found
from hdet.history import RoundRecord
from hdet.notices import tell
from hdet.run import Run
from hdet.schedule import LRS, MOMENTA, Schedule, write_lr
from hdet.signals.held_out import HeldOutGradient
from hdet.signals.loss import Loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_VERSION = 1

MAX_LEFT_OUT = 3
"""Calls in a row that come after several optimizer steps each, before it is said."""
MAX_EMPTY = 3
"""Calls without an optimizer step since the one before, among the last :data:`WINDOW`, before it is said."""

FAR = 30.0
"""A param group that joins in mid-run and is further than this from the first one is said: it may not be meant."""

WINDOW = 8
"""A GradScaler skips a step now and then, hundreds apart; a loop over micro-batches every second one at least."""


class Scheduler:
    """What all schedulers offer: one ``step``, losses in, converges, history, and the hooks on the optimizer.

    A subclass has a schedule and a run before it calls :meth:`_attach`.
    """

    _run: Run
    _schedule: Schedule
    _last_lr: list[float | Tensor]
    _advice = ""
    """For an error: what to do instead of writing learning rates."""
    optimizer: Optimizer
    last_epoch: int
    _knows_caller = False
    _checks: LoopChecks

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, loss: Loss | None = None) -> None:
        """Advance the schedule by one optimizer step; end the round when it is due.

        It is taken as a whole or not at all: whatever interrupts it, Ctrl-C or an error, leaves scheduler, schedule and
        learning rates where they were before. A round that was to end then ends with the next call. Sinks hear of a
        round after the step was taken, once.

        Args:
            loss: this rank's loss of the step, as a number or a one-element float tensor on any device. It is not read
                before the round ends. Optional where :meth:`observe` is used, or where nothing is learned from losses.
        """
        run, schedule = self._run, self._schedule
        if not self._knows_caller:
            self._refuse_repeats()
        self._checks.stepped(loss)
        with run.lock:
            step = schedule.step + 1
            if step > schedule.last_step or not self._left_alone():
                self._look_closer(step)  # raises before anything has changed
            if loss is not None:
                run.losses.observe(loss)
                for signal in run.observers:
                    signal.observe(loss, 1.0)
            last = step == schedule.total_steps
            due = last or run.is_due(step)
            before = Before(self, ends_round=due)
            try:
                left = schedule.total_steps - step
                ended = due and run.end_round(step, schedule.lrs, last=last, left=left)
                moved = schedule.advance(run.lrs)
                if ended:
                    self._after_round()
                run.upcoming = step + 1
                if run.policy.level is not None and run.policy.follow(step):
                    run.lrs.update()
                if moved:
                    self._write_lrs(schedule.lrs)
                elif ended:
                    self._refresh()
            except BaseException:
                before.put_back()
                raise
            if run.history.untold:
                with run.replicas.telling_others(step):
                    run.history.deliver()

    def _after_round(self) -> None:
        """A round has ended, and the schedule has advanced."""

    def _look_closer(self, step: int) -> None:
        """Take up param groups that have joined; raise where something else has moved schedule or learning rate."""
        self._take_up_new_groups()
        self._schedule.check_untouched()
        self._refuse_foreign_lr(wait=self._run.policy.is_due(step))

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer: schedule x learned scale x multiplier."""
        self._write_lrs(self._schedule.lrs)

    def _take_up_new_groups(self) -> None:
        """Take up param groups that have joined: each follows the first one's schedule from the learning rate it has.

        One that was given none has the optimizer's default, which says nothing in mid-run: it is like the first. Until
        the first level is found, learning rates compare with those that the others were given.
        """
        run, optimizer = self._run, self.optimizer
        groups, known = optimizer.param_groups, len(run.lrs.knob_of_group)
        if len(groups) == known:
            return
        if len(groups) < known:
            raise RuntimeError(
                f"param groups must not be removed from the optimizer, but of {known} there are {len(groups)}; freeze "
                "their parameters instead, or make a new optimizer and a new scheduler"
            )
        before = [dict(group) for group in groups]
        put_back = run.remember_groups()
        try:
            self._add_groups(groups[known:])
        except BaseException:
            put_back()
            for group, values in zip(groups, before, strict=True):
                group.clear()
                group.update(values)
            raise
        if self._in_charge():
            self._refresh()

    def _add_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        run, optimizer, first_group = self._run, self.optimizer, self.optimizer.param_groups[0]
        run.add_groups()
        first, level = self._schedule.first_lr, run.policy.level
        for group, factor in zip(groups, run.lrs.factors[-len(groups) :], strict=True):
            lr = group["lr"]
            factor = factor if level is None or level.done else level.given
            given = lr is not optimizer.defaults.get("lr") and first * factor > 0
            if isinstance(lr, Tensor):
                group["lr"] = lr.clone()  # it may be the default itself, or another group's
            share = float(lr) / (first * factor) if given else 1.0
            if not 1 / FAR <= share <= FAR:
                tell(
                    f"a param group joins at a learning rate of {float(lr):.3g}, {share:.2g} times the first group's, "
                    'and keeps that ratio. A ratio that is meant is written as such: "lr": '
                    'optimizer.param_groups[0]["lr"] / 10. Without "lr", it has the first group\'s'
                )
            run.follow(share)
            # What schedules keep there: one that is made after the group is added again, for a resume, looks for it.
            kept = {key: share * float(first_group[key]) for key in LRS if key in first_group}
            kept |= {key: first_group[key] for key in MOMENTA if key in first_group}
            group.update({key: value for key, value in kept.items() if key not in group})

    # -- losses and weights -------------------------------------------------------------------------------------

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add a loss to the round's mean without taking a step: micro-batches, or loops that call ``step()`` bare.

        Args:
            loss: as in :meth:`step`.
            weight: what the loss counts, e.g. the number of tokens it is a mean over.
        """
        self._take_up_new_groups()
        self._run.observe(loss, weight)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What copy.copy, copy.deepcopy and pickle ask for."""
        raise TypeError(
            f"{type(self).__name__} must not be copied or pickled: it acts on its optimizer and model through hooks, "
            "which a copy would not have; make a new one, and give it the state: new.load_state_dict(old.state_dict())"
        )

    def converge(self) -> None:
        """Average the weights now. A collective: every replica must call it, after the same number of steps."""
        self._take_up_new_groups()
        self._run.converge(self.last_epoch)

    def converged(self) -> AbstractContextManager[None]:
        """A block with the mean weights in place, for evaluating or saving; afterwards each replica has its own back.

        Entering is a collective. Needs a second copy of the weights while the block lasts.
        """
        self._take_up_new_groups()
        return self._run.converged(self.last_epoch)

    def finish(self) -> None:
        """End the training here: average the weights, and leave every knob at its base value. A collective.

        Not needed where the run ends at ``total_steps``.
        """
        self._take_up_new_groups()
        self._run.finish(self.last_epoch)

    def undo_also(self, module: nn.Module) -> None:
        """Undo what a broken round has done to ``module``, too: an average of the weights (EMA), a target network.

        Its parameters and buffers are copied with the weights, and restored with them.
        """
        self._run.weights.also.append(module)
        if self._run.undo is not None:
            self._run.undo.add()

    def add_sink(self, sink: Callable[[RoundRecord, Sequence[str]], object]) -> None:
        """Call ``sink`` with the record of each round that ends from now on, and the names of the param groups.

        At the end of a round, on every replica; never inside the steps between.
        """
        self._take_up_new_groups()
        optimizer = self.optimizer  # not self, which would keep itself alive
        self._run.history.sinks.append(
            lambda record: sink(record, [str(g.get("name", f"group{k}")) for k, g in enumerate(optimizer.param_groups)])
        )

    @property
    def history(self) -> list[RoundRecord]:
        """One record per finished round, the newest last; the last 1000 are kept."""
        return self._run.history.records

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the learning rate (logarithmic) and the loss (on a twin of the axes) over steps.

        Needs matplotlib.

        Args:
            ax: axes of matplotlib to draw into; default those of a new figure.

        Returns:
            The axes of the learning rate.
        """
        from hdet.plot import curves_of, draw, require_rounds

        require_rounds(self, "plot")
        return draw(curves_of(self), ax)

    def _repr_html_(self) -> str:
        """The curves, for a notebook."""
        from hdet.plot import curves_of, sketch

        return sketch(curves_of(self))

    @property
    def finished(self) -> bool:
        """Whether training has ended: at ``total_steps``, or by :meth:`finish`."""
        return self._run.finished

    @property
    def weights_apart(self) -> bool:
        """Whether the weights on this rank are one replica's own, not the mean of all."""
        return not self._run.replication.is_mean(self.last_epoch)

    # -- what it has found --------------------------------------------------------------------------------------

    def _found(self) -> Found:
        """The learning rates since the search for the first level, and what held-out data have shown."""
        self._take_up_new_groups()
        groups, run, total = self.optimizer.param_groups, self._run, self._schedule.total_steps
        learns_decay = any(isinstance(each, HeldOutGradient) and each.decay is not None for each in run.signals)
        curve = run.history.curve
        begun = sum(step < run.policy.searched for step in curve.steps)
        return Found(
            tuple(str(group.get("name", f"group{k}")) for k, group in enumerate(groups)),
            tuple(curve.steps[begun:]),
            tuple(map(tuple, curve.values[begun:])),
            None if math.isinf(total) else int(total),
            tuple(float(group["weight_decay"]) for group in groups) if learns_decay else (),
        )

    def __repr__(self) -> str:
        """What it is doing, in one line."""
        name = type(self).__name__
        if getattr(self, "_run", None) is None:
            return f"{name}(not yet constructed)"
        return f"{name}({', '.join(self._summary())})"

    def _summary(self) -> Iterator[str]:
        """From its schedule to the last thing that happened to the run."""
        run, schedule, total = self._run, getattr(self, "schedule", None), self._schedule.total_steps
        if schedule is not None and getattr(self, "_lr_given", True):
            yield type(schedule).__name__
        yield f"step {self.last_epoch}" + (f" of {total}" if total < math.inf else "")
        yield f"round {run.steering.round_index}"
        records = run.history.records
        phase = records[-1].phase if records else ""
        if phase := "finished" if run.finished else phase:
            yield phase
        if not run.active:
            yield "one replica, nothing to learn from"
        scales = run.steering.scales[: run.steering.num_lrs]
        yield "scale " + " ".join(f"{scale:.3g}" for scale in scales)
        lrs = dict.fromkeys(f"{float(group['lr']):.3g}" for group in self.optimizer.param_groups)
        yield "lr " + " ".join(lrs)
        if records and "z" in records[-1].control:
            yield "z " + " ".join(f"{z:.2g}" for z in records[-1].control["z"])
        for knob, record in records[-1].knobs.items() if records else ():
            yield f"{knob} {record.base:.3g}"
        if event := next((record.events[-1] for record in reversed(records) if record.events), ""):
            yield f"last event: {event}"

    # -- hooks on the optimizer ---------------------------------------------------------------------------------

    def _attach(self, optimizer: Optimizer, run: Run) -> None:
        """Hear of the optimizer's steps and loads, for as long as this lives; they do not keep it alive."""
        self._run = run
        self._checks = LoopChecks(type(self).__name__, optimizer)
        this = weakref.ref(self)
        register(optimizer, this)
        in_charge = False

        def look(_: Optimizer, state: Any) -> None:
            # Inside SequentialLR it may be another scheduler's turn; then its learning rates stand.
            nonlocal in_charge
            if (scheduler := this()) is not None:
                scheduler._take_up_new_groups()  # with what they were given, which the load replaces
                in_charge = scheduler._in_charge()

        def restore_own_lr(_: Optimizer) -> None:
            # torch has restored param_groups from one rank's checkpoint, that rank's learning rate included.
            if (scheduler := this()) is not None:
                if in_charge:
                    scheduler._refresh()
                scheduler._take_up_new_groups()
                scheduler._run.replication.write_knobs()

        def before_step(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if (scheduler := this()) is None:
                return None
            scheduler._checks.num_updates += 1
            # With a closure, gradients are there only after its first call; Lightning always passes one. The first
            # argument may be the optimizer itself.
            at = next((i for i, a in enumerate(args) if callable(a) and not isinstance(a, Optimizer)), None)
            closure = kwargs.get("closure") if at is None else args[at]
            if closure is None:
                scheduler._before_optimizer_step()
                return None
            called = False

            def closure_then_sample() -> Any:
                nonlocal called
                loss = closure()
                if not called:
                    called = True
                    scheduler._before_optimizer_step()
                return loss

            if at is None:
                return args, {**kwargs, "closure": closure_then_sample}
            return (*args[:at], closure_then_sample, *args[at + 1 :]), kwargs

        def after_step(*_: Any) -> None:
            if (scheduler := this()) is not None:
                scheduler._take_up_new_groups()
                scheduler._run.after_optimizer_step()

        optimizer.register_load_state_dict_pre_hook(look)
        optimizer.register_load_state_dict_post_hook(restore_own_lr)
        # A compiled step must not trace these: what they count would be compiled again in every step.
        if run.active or run.anchor is not None or run.undo is not None or run.skip_nonfinite:
            self._checks.counts_updates = True
            optimizer.register_step_pre_hook(torch.compiler.disable(before_step))  # type: ignore[no-untyped-call]
        if run.counts_updates:
            optimizer.register_step_post_hook(torch.compiler.disable(after_step))  # type: ignore[no-untyped-call]

    def _before_optimizer_step(self) -> None:
        self._take_up_new_groups()
        self._run.before_optimizer_step()

    # -- checks of the loop -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in plain types and tensors, the same on every rank: save it on one, load it on all."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. A state that cannot be used raises ValueError and changes nothing."""
        raise NotImplementedError

    def _warn_if_apart(self) -> None:
        if self.weights_apart:
            warnings.warn(
                f"state_dict() at step {self.last_epoch}, where replicas are apart: weights saved now are this "
                "replica's alone. Save inside `with scheduler.converged():`, or call scheduler.converge() first",
                stacklevel=3,
            )

    def _refuse_repeats(self) -> None:
        """Raise where Accelerate's wrapper calls ``step`` once for each process: rounds count optimizer steps."""
        if self._knows_caller:
            return
        self._knows_caller = True
        caller = sys._getframe(2)
        # Only there: a frame whose locals are looked at holds on to copies of them.
        if caller.f_globals.get("__name__") != "accelerate.scheduler":
            return
        run, wrapper = self._run, caller.f_locals["self"]
        alone = not run.active or run.replicas.count * run.replicas.num_parts == 1
        if not alone and wrapper.step_with_optimizer and not wrapper.split_batches:
            raise RuntimeError(
                f"{type(self).__name__} must be stepped once for each optimizer step, but after accelerator.prepare() "
                "it is stepped once for each process; step hdet.integrations.accelerate.HDETScheduler(accelerator, "
                "scheduler) instead, or pass step_scheduler_with_optimizer=False or split_batches=True to Accelerator"
            )

    def _in_charge(self) -> bool:
        """Whether the optimizer's learning rates are the ones this scheduler wrote."""
        groups = self.optimizer.param_groups
        lrs = zip(groups, self._last_lr, strict=False)
        return self.last_epoch >= 0 and all(float(g["lr"]) == float(lr) for g, lr in lrs)

    def _left_alone(self) -> bool:
        """Whether schedule, param groups and learning rates are those of the last step; else that takes a closer look.

        By identity, which is all that a step has time for: a tensor never is what :meth:`_write_lrs` kept.
        """
        groups, last, counter = self.optimizer.param_groups, self._last_lr, self._schedule.counter
        if len(groups) != len(last) or (counter is not None and counter.last_epoch != self._schedule.counted):
            return False
        for k, group in enumerate(groups):  # noqa: SIM110 - in every step: a generator takes twice as long
            if group["lr"] is not last[k]:
                return False
        return True

    def _write_lrs(self, scheduled: Sequence[float | Tensor]) -> None:
        """Write the learning rates into the optimizer, from what the schedule gives the param groups that it knows."""
        lrs = self._run.lrs
        factors, last = lrs.factors, []
        if lrs.joined:
            scheduled = lrs.of_all(scheduled)
        for k, group in enumerate(self.optimizer.param_groups):
            lr = scheduled[k] * factors[k]
            if type(group["lr"]) is float:
                group["lr"] = lr
            else:
                lr = write_lr(group, lr)
            last.append(lr)
        self._last_lr = last

    def _refuse_foreign_lr(self, *, wait: bool) -> None:
        """Raise where somebody else has changed a learning rate. Without ``wait``, none is fetched from a device."""
        for k, (group, mine) in enumerate(zip(self.optimizer.param_groups, self._last_lr, strict=False)):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu" and not wait:
                continue
            if float(lr) != float(mine):
                name = type(self).__name__
                raise RuntimeError(
                    f"the learning rate must be left to {name}, which set it to {float(mine):g} in param group {k}, "
                    f"but found {float(lr):g}: another scheduler, or a line of the loop, has changed it. {self._advice}"
                )


class Before:
    """A scheduler before a step, to go back to where that is interrupted.

    Shallow copies of what a step replaces: in every step there is no time for more.

    Args:
        scheduler: that is going to take a step.
        ends_round: whether a round may end with it.
    """

    def __init__(self, scheduler: Scheduler, *, ends_round: bool) -> None:
        run, schedule = scheduler._run, scheduler._schedule
        self._scheduler = scheduler
        self._groups = groups = scheduler.optimizer.param_groups
        self._in_groups = [group.copy() for group in groups]
        self._objects: list[Any] = [scheduler, schedule, *schedule.inside]
        self._in_objects = [each.__dict__.copy() for each in self._objects]
        self._upcoming, self._warmup = run.upcoming, run.steering.warmup
        self._round = run.remember() if ends_round else None

    def put_back(self) -> None:
        run, optimizer = self._scheduler._run, self._scheduler.optimizer
        optimizer.param_groups = self._groups  # a schedule is shown those that it knows
        for group, values in zip(self._groups, self._in_groups, strict=True):
            group.update(values)
        for each, values in zip(self._objects, self._in_objects, strict=True):
            inside = each.__dict__
            inside.update(values)
            for name in [name for name in inside if name not in values]:
                del inside[name]
        if self._round is not None:
            run.put_back(self._round)
        run.upcoming, run.steering.warmup = self._upcoming, self._warmup
        run.lrs.update()
        for group, lr in zip(self._groups, self._scheduler._last_lr, strict=False):
            if isinstance(group["lr"], Tensor):  # written in place
                write_lr(group, lr)


class LoopChecks:
    """Notices mistakes that a training loop makes without an error, and says what to write instead.

    Args:
        name: of the scheduler.
        optimizer: whose steps are counted.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        inner = (name for name, value in vars(optimizer).items() if isinstance(value, Optimizer))
        self._wrapper, self._inner = type(optimizer).__name__, next(inner, "")
        """What was given to the scheduler; where it wraps an optimizer, as SAM does, the attribute that holds it."""
        self._ever = False
        """Whether the optimizer has taken a step."""
        self.num_updates = 0
        """Optimizer steps since the last call."""
        self.counts_updates = False
        """Whether anybody counts them."""
        self._recent = 0
        """A bit for each of the last calls, the newest lowest: whether it came without an optimizer step."""
        self._told_empty = False
        self._past_end = False
        self._num_left_out = 0
        self._counted: list[int] = []

    def stepped(self, loss: Any) -> None:
        """A call of ``step(loss)``. Raises on the third consecutive integer, which looks like an epoch."""
        if type(loss) is int or self._counted:
            self._refuse_epochs(loss)
        num_updates, self.num_updates = self.num_updates, 0
        self._ever |= num_updates > 0
        if self.counts_updates and not self._told_empty:
            self._recent = (self._recent << 1 | (num_updates == 0)) % 2**WINDOW
            if num_updates == 0 and self._recent.bit_count() == MAX_EMPTY:
                self._tell_of_micro_batches()
        self._num_left_out = self._num_left_out + 1 if num_updates > 1 else 0
        if self._num_left_out == MAX_LEFT_OUT:
            warnings.warn(
                f"{self.name}.step() must be called after every optimizer step, but {num_updates} optimizer steps lie "
                f"between two calls, {MAX_LEFT_OUT} times in a row: what it learns from, and its schedule, count "
                "optimizer steps. Write optimizer.step(); scheduler.step(loss) in the loop over batches, not over "
                "epochs, and give total_steps and the schedule's lengths in optimizer steps",
                stacklevel=3,
            )

    def _tell_of_micro_batches(self) -> None:
        self._told_empty = True
        if self._inner and not self._ever:
            tell(
                f"{self.name} was given {self._wrapper}, whose step() was not called in the first {MAX_EMPTY} steps: "
                f"where another of its methods changes the weights, {self.name} can measure nothing. Give it the "
                f"optimizer that takes the steps: {self.name}(optimizer.{self._inner}, ...)"
            )
            return
        tell(
            f"{self.name}.step() must be called once for each optimizer step, but {MAX_EMPTY} calls came without "
            "optimizer.step() since the call before: with gradient accumulation its schedule and its rounds run ahead. "
            "Call scheduler.observe(loss) for each micro-batch, and scheduler.step() after optimizer.step(). If a "
            "GradScaler has skipped those steps, as it does at the start of a run, there is nothing to do"
        )

    def past_end(self, step: int, total_steps: float) -> None:
        """A step after the last one, at a learning rate of 0. Warns once."""
        if not self._past_end:
            self._past_end = True
            warnings.warn(
                f"{self.name} has reached the end of the run, total_steps={total_steps:.0f}, where the learning rate "
                f"is 0, but step {step} was taken: from here on nothing is learned. Pass total_steps=, the number of "
                f"optimizer steps of the whole loop, {step} or more: epochs * len(loader), divided by the "
                "micro-batches of a step",
                stacklevel=4,
            )

    def _refuse_epochs(self, loss: Any) -> None:
        if type(loss) is not int or (self._counted and loss != self._counted[-1] + 1):
            self._counted = []
        if type(loss) is int:
            self._counted.append(loss)
        if len(self._counted) == 3:
            counted, self._counted = self._counted, []
            raise ValueError(
                f"{self.name}.step() takes the loss of the step, but got {counted} in three calls, which look like "
                "numbers of steps or epochs: write scheduler.step(loss) after every optimizer.step(). A loss that "
                "counts is float(loss)"
            )


# -- saved states -----------------------------------------------------------------------------------------------------

_KEYS = {"AutoLR": "schedule_lrs", "OneCycleAutoLR": "step_count", "Explorer": "step"}
"""What only a state of each class has."""


def check_version(state: Mapping[str, Any], kind: str) -> None:
    """Refuse a state that this version, or a scheduler of this kind, did not write."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict must be a dict that {kind} has written, but got {type(state).__name__}")
    version = state.get("version")
    if version is None and not any(key in state for key in _KEYS.values()):  # hdet did not write it
        whose = "a schedule of torch; load it into the schedule" if "_last_lr" in state else "something else"
        raise ValueError(
            f"state_dict must be one of {kind}, but it was written by {whose}; it has {shown(list(state)[:8])}"
        )
    if as_int(version) != STATE_VERSION:
        raise ValueError(
            f"state_dict must have version {STATE_VERSION}, but got version {shown(version)}; "
            "load it with the version of hdet that wrote it"
        )
    others = [name for name, key in _KEYS.items() if key in state and name != kind]
    if others and _KEYS[kind] not in state:
        raise ValueError(f"state_dict must be one of {kind}, but it was written by {others[0]}; load it into one")


def cannot_load(error: Exception) -> ValueError:
    """The error for a state that cannot be used, whichever error it led to here or in torch."""
    return ValueError(f"state_dict cannot be loaded: {type(error).__name__}: {str(error)[:1000]}")
