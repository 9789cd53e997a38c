"""The base of the schedulers: what a user calls, and how it reaches the round loop."""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, _update_param_group_val

from hdet.checks import numbers_of, shown, whole
from hdet.engine.rounds import RoundLoop
from hdet.history import RoundRecord
from hdet.schedulers._common import MAX_LR
from hdet.schedulers._habits import Habits
from hdet.schedulers._torch_state import LRS, MOMENTA
from hdet.signals.loss import Loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_VERSION = 1

_KEYS = {"AutoLR": "schedule_lrs", "OneCycleAutoLR": "step_count", "Explorer": "step"}
"""What only a state of each class has."""

_schedulers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[RoundScheduler]] = weakref.WeakKeyDictionary()


class RoundScheduler:
    """What all schedulers offer: losses in, converges, history, and the hooks on the optimizer."""

    _loop: RoundLoop | None
    _last_lr: list[float | Tensor]
    optimizer: Optimizer
    last_epoch: int
    _knows_caller = False
    _habits: Habits

    def __repr__(self) -> str:
        """What it is doing, in one line."""
        name, loop = type(self).__name__, getattr(self, "_loop", None)
        if loop is None:
            return f"{name}(not yet constructed)"
        return f"{name}({', '.join(self._said(loop))})"

    def _said(self, loop: RoundLoop) -> Iterator[str]:
        schedule, total = getattr(self, "schedule", None), getattr(self, "total_steps", None)
        if schedule is not None:
            yield type(schedule).__name__
        yield f"step {self.last_epoch}" + (f" of {total}" if total is not None and total < float("inf") else "")
        yield f"round {loop.steering.round_index}"
        records = loop.history
        phase = "climb" if loop.policy.climbing else records[-1].phase if records else ""
        if phase := "finished" if loop.finished else phase:
            yield phase
        if not loop.active:
            yield "one replica, nothing to learn from"
        scales = loop.steering.scales[: loop.steering.num_lrs]
        yield "scale " + " ".join(f"{scale:.3g}" for scale in scales)
        lrs = dict.fromkeys(f"{float(group['lr']):.3g}" for group in self.optimizer.param_groups)
        yield "lr " + " ".join(lrs)
        if records and "z" in records[-1].control:
            yield "z " + " ".join(f"{z:.2g}" for z in records[-1].control["z"])
        for knob, record in records[-1].knobs.items() if records else ():
            yield f"{knob} {record.base:.3g}"
        if event := next((record.events[-1] for record in reversed(records) if record.events), ""):
            yield f"last event: {event}"

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add a loss to the round's mean without taking a step: micro-batches, or loops that call ``step()`` bare.

        Args:
            loss: as in :meth:`step`.
            weight: what the loss counts, e.g. the number of tokens it is a mean over.
        """
        self._rounds.observe(loss, weight)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} must not be copied by copy.copy(): two would act on one optimizer; use "
            "copy.deepcopy((model, optimizer, scheduler)), or make a new one and load the state_dict()"
        )

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy acts on its own optimizer, which has none of the original's hooks."""
        vars(self).update(state)
        self._attach(self.optimizer, self._rounds)

    def converge(self) -> None:
        """Average the weights now. A collective: every replica must call it, after the same number of steps."""
        self._rounds.converge(self.last_epoch)

    def converged(self) -> AbstractContextManager[None]:
        """A block with the mean weights in place, for evaluating or saving; afterwards each replica has its own back.

        Entering is a collective. Needs a second copy of the weights while the block lasts.
        """
        return self._rounds.converged(self.last_epoch)

    def finish(self) -> None:
        """End the training here: average the weights, and leave every knob at its base value. A collective.

        Not needed where the run ends at ``total_steps``.
        """
        self._rounds.finish(self.last_epoch)

    def add_sink(self, sink: Callable[[RoundRecord, Sequence[str]], object]) -> None:
        """Call ``sink`` with the record of each round that ends from now on, and the names of the param groups.

        At the end of a round, on every replica; never inside the steps between.
        """
        optimizer = self.optimizer  # not self, which would keep itself alive
        self._rounds.sinks.append(
            lambda record: sink(record, [str(g.get("name", f"group{k}")) for k, g in enumerate(optimizer.param_groups)])
        )

    @property
    def history(self) -> list[RoundRecord]:
        """One record per finished round, the newest last; the last 1000 are kept."""
        return self._rounds.history

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page about the rounds in :attr:`history`, and return its path. Only rank 0 writes.

        Needs ``pip install 'hdet[report]'``.
        """
        from hdet.reports.views import write_page  # its packages are optional

        return write_page(self, path)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the learning rate (logarithmic) and the loss (on a twin of the axes) over steps.

        Needs ``pip install 'hdet[report]'``.

        Args:
            ax: axes of matplotlib to draw into; default those of a new figure.

        Returns:
            The axes of the learning rate.
        """
        from hdet.reports.views import draw_plot

        return draw_plot(self, ax)

    def _repr_html_(self) -> str:
        """The curves, for a notebook."""
        from hdet.reports.views import as_html

        return as_html(self)

    @property
    def finished(self) -> bool:
        """Whether training has ended: at ``total_steps``, or by :meth:`finish`."""
        return self._rounds.finished

    @property
    def weights_apart(self) -> bool:
        """Whether the weights on this rank are one replica's own, not the mean of all."""
        return self._rounds.weights_apart(self.last_epoch)

    @property
    def _rounds(self) -> RoundLoop:
        assert self._loop is not None
        if len(self.optimizer.param_groups) != len(self._loop.values.knob_of_group):
            self._add_groups(self._loop)
        return self._loop

    def _add_groups(self, loop: RoundLoop) -> None:
        """Take up param groups that have joined: each follows the first one's schedule from the learning rate it has.

        One that was given none has the optimizer's default, which says nothing in mid-run: it is like the first.
        """
        groups, known = self.optimizer.param_groups, len(loop.values.knob_of_group)
        if len(groups) < known:
            raise RuntimeError(
                f"param groups must not be removed from the optimizer, but of {known} there are {len(groups)}; freeze "
                "their parameters instead, or make a new optimizer and a new scheduler"
            )
        loop.add_groups()
        first = self._first_lr()
        for group, factor in zip(groups[known:], loop.values.factors[known:], strict=True):
            lr = group["lr"]
            if loop.policy.climbing:
                factor = 1.0  # the learning rate is nowhere yet: what is given compares with the schedule's own
            given = lr is not self.optimizer.defaults.get("lr") and first * factor > 0
            if isinstance(lr, Tensor):
                group["lr"] = lr.clone()  # it may be the default itself, or another group's
            share = float(lr) / (first * factor) if given else 1.0
            loop.follow(share)
            # What schedules keep there: one that is made after the group is added again, for a resume, looks for it.
            kept = {key: share * float(groups[0][key]) for key in LRS if key in groups[0]}
            kept |= {key: groups[0][key] for key in MOMENTA if key in groups[0]}
            group.update({key: value for key, value in kept.items() if key not in group})
        if self._in_charge():
            self._refresh()

    def _first_lr(self) -> float:
        """What the schedule alone gives the first param group now."""
        raise NotImplementedError

    def _scheduled_groups(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """The optimizer with the param groups that the schedule knows: torch's have no place for more."""
        groups = self.optimizer.param_groups
        if self._loop is not None:
            values = self._loop.values
            num_known = len(values.knob_of_group) - len(values.joined)
            if num_known < len(groups):
                return _with_groups(self.optimizer, groups[:num_known])
        return nullcontext(groups)

    def _warn_if_apart(self) -> None:
        if self.weights_apart:
            warnings.warn(
                f"state_dict() at step {self.last_epoch}, where replicas are apart: weights saved now are this "
                "replica's alone. Save inside `with scheduler.converged():`, or call scheduler.converge() first",
                stacklevel=3,
            )

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer."""
        raise NotImplementedError

    def _refuse_repeats(self) -> None:
        """Raise where Accelerate's wrapper calls ``step`` once for each process: rounds count optimizer steps."""
        if self._knows_caller:
            return
        self._knows_caller = True
        caller = sys._getframe(2)
        # Only there: a frame whose locals are looked at holds on to copies of them.
        if caller.f_globals.get("__name__") != "accelerate.scheduler":
            return
        loop, wrapper = self._rounds, caller.f_locals["self"]
        alone = not loop.active or loop.replicas.count * loop.replicas.num_parts == 1
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
        """Whether param groups and learning rates are those of the last step; False where that takes a closer look.

        By identity, which is all that a step has time for: a tensor never is what :meth:`_write_lrs` kept.
        """
        groups, last = self.optimizer.param_groups, self._last_lr
        if len(groups) != len(last):
            return False
        for k, group in enumerate(groups):  # noqa: SIM110 - in every step: a generator takes twice as long
            if group["lr"] is not last[k]:
                return False
        return True

    def _write_lrs(self, scheduled: Sequence[float | Tensor]) -> None:
        """Write the learning rates into the optimizer, from what the schedule gives the param groups that it knows."""
        assert self._loop is not None
        values = self._loop.values
        factors, last = values.factors, []
        if values.joined:
            scheduled = values.of_all(scheduled)
        for k, group in enumerate(self.optimizer.param_groups):
            lr = scheduled[k] * factors[k]
            if type(group["lr"]) is float:
                group["lr"] = lr
            else:
                lr = write_lr(group, lr)
            last.append(lr)
        self._last_lr = last

    def _refuse_foreign_lr(self, *, wait: bool, advice: str) -> None:
        """Raise where somebody else has changed a learning rate. Without ``wait``, none is fetched from a device."""
        for k, (group, mine) in enumerate(zip(self.optimizer.param_groups, self._last_lr, strict=False)):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu" and not wait:
                continue
            if float(lr) != float(mine):
                name = type(self).__name__
                raise RuntimeError(
                    f"the learning rate must be left to {name}, which set it to {float(mine):g} in param group {k}, "
                    f"but found {float(lr):g}: another scheduler, or a line of the loop, has changed it. {advice}"
                )

    def _attach(self, optimizer: Optimizer, loop: RoundLoop) -> None:
        self._loop = loop
        self._habits = Habits(type(self).__name__)
        this = weakref.ref(self)
        _schedulers[optimizer] = this

        in_charge = False

        def look(_: Optimizer, state: Any) -> None:
            # Inside SequentialLR it may be another scheduler's turn; then its learning rates stand.
            nonlocal in_charge
            if (scheduler := this()) is not None:
                assert scheduler._rounds  # param groups that have joined are taken up with what they were given
                in_charge = scheduler._in_charge()

        def restore_own_lr(_: Optimizer) -> None:
            # torch has restored param_groups from one rank's checkpoint, that rank's learning rate included.
            if (scheduler := this()) is not None:
                if in_charge:
                    scheduler._refresh()
                scheduler._rounds.values.write_knobs()

        def before_step(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if (scheduler := this()) is None:
                return None
            scheduler._habits.num_updates += 1
            # With a closure, gradients are there only after its first call; Lightning always passes one. The first
            # argument may be the optimizer itself.
            at = next((i for i, a in enumerate(args) if callable(a) and not isinstance(a, Optimizer)), None)
            closure = kwargs.get("closure") if at is None else args[at]
            if closure is None:
                scheduler._rounds.before_optimizer_step()
                return None
            called = False

            def closure_then_sample() -> Any:
                nonlocal called
                loss = closure()
                if not called:
                    called = True
                    scheduler._rounds.before_optimizer_step()
                return loss

            if at is None:
                return args, {**kwargs, "closure": closure_then_sample}
            return (*args[:at], closure_then_sample, *args[at + 1 :]), kwargs

        def after_step(*_: Any) -> None:
            if (scheduler := this()) is not None:
                scheduler._rounds.after_optimizer_step()

        optimizer.register_load_state_dict_pre_hook(look)
        optimizer.register_load_state_dict_post_hook(restore_own_lr)
        averager = loop.averager
        watches = averager.anchor is not None or averager.fallback is not None or loop.skip_nonfinite
        # A compiled step must not trace these: what they count would be compiled again in every step.
        if watches or loop.apart:
            optimizer.register_step_pre_hook(torch.compiler.disable(before_step))  # type: ignore[no-untyped-call]
        if loop.counts_updates:
            optimizer.register_step_post_hook(torch.compiler.disable(after_step))  # type: ignore[no-untyped-call]


@contextmanager
def _with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    before = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        yield groups
    finally:
        optimizer.param_groups = before


def refuse_second(optimizer: Optimizer) -> None:
    """Raise where this optimizer has a scheduler of ours already: both would converge, and write learning rates."""
    if _working_on(optimizer) is not None:
        gc.collect()  # it may be garbage already
    if (other := _working_on(optimizer)) is not None:
        name = type(other).__name__
        raise ValueError(
            f"optimizer must have one scheduler of hdet, but it has {name} already, at step {other.last_epoch}; pass "
            f"knobs= to that one to explore more, call its finish() to end it, or drop it first (`del`) to replace it"
        )


def _working_on(optimizer: Optimizer) -> Any:
    other: Any = _schedulers.get(optimizer, lambda: None)()
    if other is None or other._loop.finished or other.last_epoch == other.total_steps:
        return None
    return other


def follow_momentum(schedule: LRScheduler, groups: Sequence[dict[str, Any]], num_known: int) -> None:
    """Give param groups that joined later the momentum of the first, where the schedule moves it."""
    if isinstance(schedule, (OneCycleLR, CyclicLR)) and schedule.cycle_momentum:
        for group in groups[num_known:]:
            if schedule.use_beta1:
                group["betas"] = (groups[0]["betas"][0], *group["betas"][1:])
            else:
                group["momentum"] = groups[0]["momentum"]


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
    if whole(version) != STATE_VERSION:
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


def lrs_of(saved: Any, name: str, num_groups: int, low: float = 0) -> list[float]:
    """The learning rates of a saved state, one for each param group."""
    found = numbers_of(saved, name, num_groups, low=low)
    if (found > MAX_LR).any():
        raise ValueError(f"{name} must be at most {MAX_LR:g}, but got {shown(saved)}")
    lrs: list[float] = found.tolist()
    return lrs


def write_lr(group: dict[str, Any], value: float | Tensor) -> float | Tensor:
    """Set a group's learning rate; one that is a tensor keeps its identity, for compiled and captured steps.

    Returns what is there now, a copy of a tensor.
    """
    _update_param_group_val(group, "lr", value)
    return group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
