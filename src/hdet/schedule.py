"""Where the learning rates would be without hdet: the schedule that a scheduler multiplies by what it has learned.

There are three kinds: any schedule of torch's, wrapped (:class:`Wrapped`, of AutoLR), OneCycleLR itself (of
OneCycleAutoLR) and none, learning rates that stay as they are (of Explorer); the latter two are in ``hdet.ensemble``.
A cooldown and a ceiling belong to the schedule, and so does all that is known of torch's own: what they are going to
do, read off their formulas, and whether a saved state of theirs can be used.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from hdet.checks import LARGEST, flag_of, is_flag, number, numbers_of, shown, whole_of
from hdet.run import LearningRates

DECAY_SHARE = 0.3
"""Of a run without a schedule: the steps at its end in which the learning rate falls, along a line, to zero."""
MAX_LR = 1e30
"""Above all learning rates, and far enough below infinity to be multiplied by any scale."""


class Schedule(Protocol):
    """What a scheduler asks of its schedule.

    Attributes:
        step: optimizer steps taken.
        total_steps: of the run; infinite where that is unknown.
        last_step: the last step that can be taken without a closer look.
        lrs: what the schedule alone gives the param groups that it knows.
        first_lr: to the first of them, for groups that join.
        counter, counted: what counts the steps of a schedule inside it, and how far it was; None where there is none.
        inside: torch's schedules that it steps, whose attributes a step replaces.
    """

    @property
    def inside(self) -> Sequence[Any]: ...

    @property
    def step(self) -> int: ...

    @property
    def total_steps(self) -> float: ...

    @property
    def last_step(self) -> float: ...

    @property
    def lrs(self) -> Sequence[float | Tensor]: ...

    @property
    def first_lr(self) -> float: ...

    @property
    def counter(self) -> Any: ...

    @property
    def counted(self) -> int: ...

    def check_untouched(self) -> None:
        """Raise where something else has stepped it."""

    def advance(self, lrs: LearningRates) -> bool:
        """One step. Returns whether learning rates have to be written."""


class Wrapped:
    """A schedule of torch's, stepped among learning rates of its own, watched, saved and put back.

    Args:
        schedule: any that AutoLR takes.
        total_steps: length of the run; None where it is unknown.
        max_lr: what no learning rate ever exceeds.

    Attributes:
        counter, counted: what has the number of its steps, and that number when it was last stepped here.
        base_lrs, uncooled: where it starts from, and what it gave last, before a cooldown.
        cooling: the cooldown that has begun; None before.
        ceiling: the highest learning rate of each param group; empty without one.
    """

    def __init__(self, schedule: LRScheduler, *, total_steps: int | None, max_lr: Any = None) -> None:
        self.schedule = schedule
        self.optimizer = schedule.optimizer
        self.ceiling = ceiling_of(max_lr, len(self.optimizer.param_groups))
        self.cooling: Cooldown | None = None
        self.planned_steps: float = math.inf if total_steps is None else total_steps
        parts = parts_of(schedule)
        self.inside = all_of(schedule)
        self.counter = _counter_of(schedule)
        self.step = self.counted = self._count()
        self.base_lrs = [float(lr) for lr in parts[0].base_lrs]
        # Values on the host from here on: reading a learning rate that is a tensor would wait for the device.
        for part in parts:
            part.base_lrs = [float(lr) for lr in part.base_lrs]
        self.uncooled = [float(group["lr"]) for group in self.optimizer.param_groups[: len(self.base_lrs)]]
        self._cooled()

    def _count(self) -> int:
        return int(self.counter.last_epoch)

    def _cooled(self) -> None:
        """Bring the length and the learning rates in line with the cooldown."""
        self.total_steps = self.planned_steps if self.cooling is None else self.cooling.end
        self.last_step = self.total_steps
        if isinstance(self.schedule, OneCycleLR):  # raises beyond its own end
            self.last_step = min(self.last_step, self.schedule.total_steps)
        self.lrs = self.uncooled if self.cooling is None else [lr * self.left for lr in self.uncooled]

    @property
    def first_lr(self) -> float:
        return self.lrs[0]

    @property
    def left(self) -> float:
        """What a cooldown has left of the schedule."""
        return 1.0 if self.cooling is None else self.cooling.left(self.step)

    def cool(self, steps: int, *, ended: bool, share: float = 1.0) -> None:
        """Begin a cooldown of so many steps, or begin it anew; ``ended``: whether training has, ``share``: of here."""
        if ended or self.step == self.total_steps:
            raise RuntimeError(
                f"cooldown() must be called before training ends, but it has ended at step {self.step}; load a "
                "state that was saved before"
            )
        if isinstance(self.schedule, OneCycleLR) and self.step + steps > self.schedule.total_steps:
            left = self.schedule.total_steps - self.step
            raise ValueError(f"steps must be at most {left}, where the OneCycleLR ends, but got steps={steps}")
        self.cooling = Cooldown(self.step, int(steps), share * self.left)
        self._cooled()

    def hold_below_ceiling(self, lrs: LearningRates) -> None:
        """Bring scales down to where no replica's learning rate exceeds the ceiling, at the schedule's values now."""
        if not self.ceiling:
            return
        steering = lrs.steering
        highest = [math.inf] * steering.num_lrs
        for k, (lr, knob) in enumerate(zip(lrs.of_all(self.uncooled), lrs.knob_of_group, strict=True)):
            if lr > 0:
                most = self.ceiling[k] if k < len(self.ceiling) else self.ceiling[0]
                highest[knob] = min(highest[knob], most / (float(lr) * (1 + steering.spread)))
        if steering.limit(highest):
            lrs.update()

    def shares_of_joined(self) -> list[float]:
        """Of each param group that was added after the schedule was made, its share of the first one's."""
        first = self.uncooled[0]
        joined = self.optimizer.param_groups[len(self.base_lrs) :]
        return [float(group["lr"]) / first if first > 0 else 1.0 for group in joined]

    def check_untouched(self) -> None:
        found = self._count()
        if found != self.counted:
            name = type(self.schedule).__name__
            raise RuntimeError(
                f"AutoLR steps the {name} it wraps, but something else has taken it from step {self.counted} to "
                f"{found}; delete schedule.step() from the loop, and load the state of AutoLR, not that of the {name}"
            )

    def advance(self, lrs: LearningRates) -> bool:
        """One step of the schedule among its own values: many compute the next learning rate from the group's last."""
        old, own, new = self.uncooled, [], []
        groups = known = self.optimizer.param_groups
        if lrs.joined:
            self.optimizer.param_groups = known = groups[: len(old)]
        for k, group in enumerate(known):
            own.append(group["lr"])
            group["lr"] = old[k]
        try:
            self.schedule.step()
        finally:
            for k, group in enumerate(known):
                lr = group["lr"]
                new.append(lr if type(lr) is float else float(lr))
                group["lr"] = own[k]
            if lrs.joined:
                self.optimizer.param_groups = groups
        if lrs.joined:
            for part in parts_of(self.schedule):
                follow_momentum(part, groups, len(new))
        self.uncooled = self.lrs = new
        self.step += 1
        self.counted = self.counter.last_epoch
        if self.cooling is not None:
            self._cooled()
        if self.ceiling:
            self.hold_below_ceiling(lrs)
        return True

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": copied(self.schedule.state_dict()),
            "schedule_lrs": list(self.uncooled),
            "cooldown": [] if self.cooling is None else list(self.cooling),
        }

    def adopted(self, plain: Mapping[str, Any], *, step_only: bool) -> tuple[int, dict[str, Any]]:
        """How far a run without hdet is, and what :meth:`state_dict` would have given there.

        ``step_only``: whether nothing else of its state counts.
        """
        schedule = plain_state(self.schedule, plain, step_only=step_only)
        lrs = [_as_float(lr) for lr in schedule["_last_lr"]]
        return step_of(schedule), {"schedule": schedule, "schedule_lrs": lrs, "cooldown": []}

    def load(self, state: Mapping[str, Any], values: LearningRates, *, step: int) -> None:
        """Continue from the ``state`` of an AutoLR at ``step``; what fails has to be :meth:`put_back`."""
        lrs, groups = state["schedule_lrs"], len(self.optimizer.param_groups)
        known = values.num_scheduled(state["rounds"])
        if isinstance(lrs, (list, tuple)) and len(lrs) != known:
            found = len(lrs) + groups - known
            raise ValueError(f"the optimizer has {groups} param groups, but got a state with {found}")
        lrs = lrs_of(lrs, "schedule_lrs", known, low=-MAX_LR)  # a schedule may pass 0
        leave_out_joined(all_of(self.schedule), known)
        load_torch_state(self.schedule, copied(state["schedule"]), known)
        if is_torchs(self.schedule):  # a user's own may count, and keep its learning rates, as it likes
            check_lrs(self.schedule, lrs)
            steps = self._count()
            if steps != step:
                raise ValueError(f"the schedule is at step {steps}, but last_epoch is {step}")
        self.uncooled, self.step, self.counted = lrs, step, self._count()
        self.cooling = Cooldown.of(state["cooldown"])
        self._cooled()

    def remember(self) -> tuple[Any, ...]:
        """Everything that :meth:`load` changes."""
        insides = [(each, dict(vars(each))) for each in all_of(self.schedule)]
        return copied(self.schedule.state_dict()), insides, dict(vars(self))

    def put_back(self, before: tuple[Any, ...]) -> None:
        """As it was at :meth:`remember`."""
        state, insides, own = before
        vars(self).update(own)
        self.schedule.load_state_dict(state)
        for each, values in insides:
            vars(each).clear()
            vars(each).update(values)


def _counter_of(schedule: Any) -> Any:
    """What has the number of a schedule's steps: ChainedScheduler counts through its parts."""
    return schedule if hasattr(schedule, "last_epoch") else _counter_of(schedule._schedulers[-1])


def _as_float(lr: Any) -> Any:
    return float(lr) if isinstance(lr, Tensor) and lr.numel() == 1 else lr


class Cooldown(NamedTuple):
    """From a step, within so many steps, along a line to zero, from a share of the schedule."""

    begun: int
    steps: int
    share: float

    @property
    def end(self) -> int:
        return self.begun + self.steps

    def left(self, step: int) -> float:
        """What is left of the schedule at a step."""
        return self.share * max(1 - (step - self.begun) / self.steps, 0.0)

    @classmethod
    def of(cls, saved: Any) -> Cooldown | None:
        """Of a saved state; None where there was none. ValueError where it cannot be used."""
        found = numbers_of(saved, "cooldown", None, low=0, high=LARGEST)
        if not len(found):
            return None
        if len(found) != 3 or (found[:2] % 1).any() or found[1] < 1 or found[2] > 1:
            raise ValueError(
                f"cooldown must be a step, a number of steps and a share in [0, 1], but got {shown(saved)}"
            )
        return cls(int(found[0]), int(found[1]), float(found[2]))


def ceiling_of(given: Any, num_groups: int) -> list[float]:
    """``max_lr`` of each param group; one that joins later has the first one's."""
    if given is None:
        return []
    found = list(given) if isinstance(given, (list, tuple)) else [given] * num_groups
    if len(found) != num_groups or not all(0 < number(lr) <= MAX_LR for lr in found):
        raise ValueError(
            f"max_lr must be a finite number > 0, or one for each of {num_groups} param groups, but got "
            f"max_lr={shown(given)}"
        )
    return [float(lr) for lr in found]


# -- what a schedule is going to do -----------------------------------------------------------------------------------


NUM_POINTS = 400
STEPWISE = (StepLR, MultiStepLR, CyclicLR, CosineAnnealingWarmRestarts)


def shape_of(schedule: LRScheduler, total_steps: int | None) -> list[float]:
    """The first param group's learning rate at points that divide the run evenly; empty where there is no formula.

    Of a run of unknown length that of the first cycle, where the schedule has cycles that begin at their lowest.
    """
    if total_steps is None:
        if type(schedule) is not CyclicLR:
            return []
        total_steps = math.ceil(schedule.total_size) + 1
    num = min(NUM_POINTS, max(total_steps - 1, 1))
    try:
        found = [_at(schedule, round(i * (total_steps - 1) / num)) for i in range(num + 1)]
    except Exception:  # a user's own schedule may be anything, and a state of theirs unready for this
        return []
    return found if all(math.isfinite(value) for value in found) else []


def _at(schedule: Any, step: int) -> float:
    kind = type(schedule)
    if kind is SequentialLR:
        part = bisect.bisect_right(schedule._milestones, step)
        return _at(schedule._schedulers[part], step - (schedule._milestones[part - 1] if part else 0))
    if kind is ChainedScheduler:
        base = float(schedule._schedulers[0].base_lrs[0])
        return base * math.prod(_at(part, step) / base for part in schedule._schedulers)
    then = copy.copy(schedule)
    then.last_epoch, then._get_lr_called_within_step = step, True
    if kind is CyclicLR or kind is OneCycleLR:
        then.cycle_momentum = False  # it would write into the optimizer
    if kind in (CyclicLR, OneCycleLR, LambdaLR):
        return float(then.get_lr()[0])
    return float(then._get_closed_form_lr()[0])


def check_schedule(schedule: Any) -> None:
    """TypeError where it is none that can be wrapped."""
    if not isinstance(schedule, LRScheduler):
        raise TypeError(f"schedule must be an LRScheduler or an Optimizer, but got {type(schedule).__name__}")
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            "schedule must not be ReduceLROnPlateau, which moves the learning rate by the loss itself; "
            "wrap the schedule you would use without it, e.g. a constant LambdaLR"
        )


def check_lrs_given(optimizer: Optimizer) -> None:
    """ValueError where learning rates do not say how param groups compare."""
    for k, group in enumerate(optimizer.param_groups):
        if not number(float(group["lr"])) > 0:
            raise ValueError(
                "the optimizer's learning rates must be > 0, since they say how those of param groups compare, but "
                f"that of param group {k} is {float(group['lr']):g}"
            )


def constant_then_linear(step: int, total_steps: int | None = None) -> float:
    """The shape of a run without a schedule, as a share of its peak."""
    if total_steps is None:
        return 1.0
    return min(1.0, max(total_steps - step, 0) / (DECAY_SHARE * total_steps))


def constant_schedule(optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
    """The shape of a run without a schedule."""
    return LambdaLR(optimizer, partial(constant_then_linear, total_steps=total_steps))


@contextmanager
def as_ratios(optimizer: Optimizer) -> Iterator[None]:
    """Learning rates become those of param groups relative to the first one's, and come back where the block fails."""
    groups = optimizer.param_groups
    before = [(float(group["lr"]), group.get("initial_lr")) for group in groups]
    first = before[0][0] if before and before[0][0] > 0 else 1.0
    try:
        for group, (lr, _) in zip(groups, before, strict=True):
            write_lr(group, lr / first)
            group.pop("initial_lr", None)
        yield
    except BaseException:
        for group, (lr, initial) in zip(groups, before, strict=True):
            write_lr(group, lr)
            group.pop("initial_lr", None)
            if initial is not None:
                group["initial_lr"] = initial
        raise


def has_steps(schedule: LRScheduler) -> bool:
    """Whether a schedule, or one inside it, has steps or periods, which mean something at their place in the run."""
    return any(isinstance(each, STEPWISE) for each in all_of(schedule))


def length_of(schedule: LRScheduler) -> int | None:
    """Steps until the schedule ends, where it has an end."""
    if isinstance(schedule, OneCycleLR):
        return schedule.total_steps
    if isinstance(schedule, CosineAnnealingLR):
        return _steps_of(schedule, "T_max")
    if isinstance(schedule, PolynomialLR):
        return _steps_of(schedule, "total_iters")
    if isinstance(schedule, SequentialLR):
        last = length_of(schedule._schedulers[-1])
        return None if last is None else schedule._milestones[-1] + last
    return None


def _steps_of(schedule: Any, name: str) -> int:
    steps = number(value := getattr(schedule, name))
    if math.isnan(steps):
        raise ValueError(
            f"{name} of {type(schedule).__name__} must be a finite number of steps where total_steps is not given, but "
            f"got {name}={shown(value)}; pass total_steps=, the length of the run"
        )
    return int(steps)


# -- param groups -----------------------------------------------------------------------------------------------------


@contextmanager
def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The optimizer with these param groups alone, for the length of a block."""
    before = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        yield groups
    finally:
        optimizer.param_groups = before


def follow_momentum(schedule: LRScheduler, groups: Sequence[dict[str, Any]], num_known: int) -> None:
    """Give param groups that joined later the momentum of the first, where the schedule moves it."""
    if isinstance(schedule, (OneCycleLR, CyclicLR)) and schedule.cycle_momentum:
        for group in groups[num_known:]:
            if schedule.use_beta1:
                group["betas"] = (groups[0]["betas"][0], *group["betas"][1:])
            else:
                group["momentum"] = groups[0]["momentum"]


def write_lr(group: dict[str, Any], value: float | Tensor) -> float | Tensor:
    """Set a group's learning rate; one that is a tensor keeps its identity, for compiled and captured steps.

    Returns what is there now, a copy of a tensor.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        group["lr"] = value
        return value
    lr.fill_(value.squeeze() if isinstance(value, Tensor) else value)  # a number may have been given as [0.1]
    return lr.clone()


# -- saved states of torch's schedules: torch loads anything, and fails some steps later ------------------------------


LRS = {"initial_lr", "max_lr", "min_lr"}
MOMENTA = {"base_momentum", "max_momentum"}
_PHASE = {"start_lr": LRS, "end_lr": LRS, "start_momentum": MOMENTA, "end_momentum": MOMENTA}

# What torch's own schedules keep. Anything else in a state is a user's, and theirs alone to judge: the attributes of a
# callable, of a subclass, or something hung onto a schedule.
_COUNTS = {"last_epoch", "_step_count"}
_DIVISORS = {"base_lrs", "max_lrs", "gamma", "factor", "start_factor", "T_max", "T_0", "T_i", "step_size"}
_DIVISORS |= {"total_size", "step_ratio"}
_NUMBERS = {"T_cur", "T_mult", "eta_min", "end_factor", "total_iters", "power", "base_momentums", "max_momentums"}
_OTHERS = {"_last_lr", "_milestones", "milestones", "mode", "scale_mode", "cycle_momentum"}
_FLAGS = {"_get_lr_called_within_step", "_is_initial"}  # torch has them in the class, too
_FIELDS = _COUNTS | _DIVISORS | _NUMBERS | _OTHERS | _FLAGS


def check_one_cycle_state(schedule: Any, groups: Sequence[Mapping[str, Any]], *, first: int = -1) -> None:
    """Raise where the attributes of a OneCycleLR, just loaded, could not be trained with to the end.

    ``first``: what it may count from. Each SequentialLR sets back by one what waits inside it.
    """
    total_steps = whole_of(schedule.total_steps, "total_steps", 1)
    if not isinstance(schedule.base_lrs, (list, tuple)):
        raise ValueError(f"base_lrs must be a list, but got {shown(schedule.base_lrs)}")
    if len(schedule.base_lrs) != len(groups):
        raise ValueError(f"the optimizer has {len(groups)} param groups, but got a state with {len(schedule.base_lrs)}")
    if not all(_number(lr) >= 0 for lr in schedule.base_lrs):
        raise ValueError(f"base_lrs must be finite numbers >= 0, but got {shown(schedule.base_lrs)}")
    if not isinstance(schedule._anneal_func_type, str) or schedule._anneal_func_type not in ("cos", "linear"):
        raise ValueError(f'the annealing must be "cos" or "linear", but got {shown(schedule._anneal_func_type)}')
    if flag_of(schedule.cycle_momentum, "cycle_momentum") and not all(set(group) >= MOMENTA for group in groups):
        raise ValueError("cycle_momentum must be off where the optimizer was set up without it, but the state has it")
    if not whole_of(schedule.last_epoch, "last_epoch", first) <= total_steps:
        raise ValueError(f"last_epoch must be in [{first}, {total_steps}], but got {schedule.last_epoch}")
    whole_of(schedule._step_count, "step_count")
    phases: Any = schedule._schedule_phases
    if not isinstance(phases, list) or len(phases) < 2 or not all(_is_phase(phase) for phase in phases):
        raise ValueError(f"phases must be two or more dicts of OneCycleLR's, but got {shown(phases)}")
    ends = [phase["end_step"] for phase in phases]
    if ends[-1] != total_steps - 1 or ends[0] < -1 or ends[0] == 0 or ends[-2] == ends[-1]:
        raise ValueError(f"phases must end at the last of {total_steps} steps, but they end at {shown(ends)}")


def _is_phase(phase: Any) -> bool:
    if not isinstance(phase, dict) or set(phase) != {"end_step", *_PHASE}:
        return False
    names = all(isinstance(phase[key], str) and phase[key] in names for key, names in _PHASE.items())
    return names and not math.isnan(number(phase["end_step"]))


_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")


def leave_out_joined(schedules: Iterable[LRScheduler], num_groups: int) -> None:
    """Let schedules that were made after a param group was added again know as many as those of the state did."""
    for schedule in schedules:
        values = {name: vars(schedule)[name] for name in _BY_GROUP if name in vars(schedule)}
        vars(schedule).update({name: value[:num_groups] for name, value in values.items()})


def load_torch_state(schedule: LRScheduler, saved: Any, num_groups: int) -> None:
    """Load ``saved`` into a schedule, and raise where it is another one's or its learning rates cannot be computed.

    ``num_groups``: how many of the optimizer's param groups, the first ones, it is the schedule of.
    """
    _check(schedule, saved, 0)
    schedule.load_state_dict(saved)
    first = -len(list(all_of(schedule)))
    for part in parts_of(schedule):
        if type(part) is OneCycleLR:
            check_one_cycle_state(part, part.optimizer.param_groups[:num_groups], first=first)


def is_plain(state: Any) -> bool:
    """Whether a state is that of a schedule of torch's, without hdet."""
    return isinstance(state, Mapping) and "version" not in state and bool({"last_epoch", "_schedulers"} & set(state))


def step_of(saved: Mapping[str, Any]) -> int:
    """How far the run of a plain state is; ValueError where it does not say."""
    while "last_epoch" not in saved:  # ChainedScheduler counts through its parts
        parts = saved.get("_schedulers")
        if not isinstance(parts, (list, tuple)) or not parts or not isinstance(parts[-1], Mapping):
            raise ValueError(f"state_dict must say how far the run is, but it has no last_epoch: {shown(list(saved))}")
        saved = parts[-1]
    return whole_of(saved["last_epoch"], "last_epoch")


def plain_state(schedule: LRScheduler, saved: Mapping[str, Any], *, step_only: bool) -> dict[str, Any]:
    """The state of ``schedule`` in a run that was trained without hdet; ValueError where it is another one's.

    ``step_only``: whether nothing counts but how far the run is.
    """
    step = step_of(saved)
    if not step_only:
        live = schedule.state_dict()
        foreign = [str(key) for key in saved if key not in live and not str(key).startswith("_") and key != "verbose"]
        if foreign and is_torchs(schedule):
            raise ValueError(
                f"state_dict must be one of AutoLR, or of the {type(schedule).__name__} it wraps, but it has "
                f"{foreign}; wrap the schedule that wrote it"
            )
    state = {"last_epoch": step} if step_only else dict(copied(dict(saved)))
    if "_last_lr" not in state and type(schedule) is LambdaLR:
        lrs = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        state = {**schedule.state_dict(), **state, "_last_lr": lrs, "_step_count": step + 1}
    if "_last_lr" not in state:
        raise ValueError(
            f"state_dict must be what the {type(schedule).__name__}'s own state_dict() gave, but it has no _last_lr: "
            f"{shown(list(saved))}"
        )
    return state


def check_lrs(schedule: LRScheduler, lrs: Sequence[float]) -> None:
    """Raise where ``lrs`` are not what the schedule, just loaded, has given last."""
    last = schedule._last_lr
    if not all(math.isclose(_number(a), b, rel_tol=1e-6) for a, b in zip(last, lrs, strict=True)):
        raise ValueError(f"schedule_lrs must be what the schedule gave last, {shown(last)}, but got {shown(lrs)}")


def all_of(schedule: LRScheduler) -> list[LRScheduler]:
    """A schedule and all that are inside it."""
    return [schedule, *(each for inner in getattr(schedule, "_schedulers", ()) for each in all_of(inner))]


def parts_of(schedule: LRScheduler) -> list[LRScheduler]:
    """The schedules that compute learning rates: SequentialLR and ChainedScheduler only pass them on."""
    return [each for each in all_of(schedule) if not hasattr(each, "_schedulers")]


def is_torchs(schedule: LRScheduler) -> bool:
    """Whether a schedule, and all that are inside it, are torch's own, without a subclass of a user's."""
    return all(type(each).__module__ == LRScheduler.__module__ for each in all_of(schedule))


def facts_about(schedule: LRScheduler) -> dict[str, str]:
    """The numbers of torch's own schedules, on which all ranks must agree; a user's own may hold what differs."""
    facts: dict[str, str] = {}
    for k, each in enumerate(all_of(schedule)):
        name = type(each).__name__ if k == 0 else f"{type(each).__name__} {k}"
        if type(each).__module__ == LRScheduler.__module__:
            kept = {key: value for key, value in vars(each).items() if key in _FIELDS - _FLAGS - {"_last_lr"}}
            facts |= {f"{name}.{key}": str(_plain(value)) for key, value in kept.items()}
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """New dicts and lists with the same entries: a user's schedule may hold a model, or a lock."""
    memo = {} if memo is None else memo
    if type(value) not in (dict, list):
        return value
    if id(value) not in memo:
        memo[id(value)] = found = type(value)()
        if isinstance(value, dict):
            found.update((key, copied(entry, memo)) for key, entry in list(value.items()))
        else:
            found.extend(copied(entry, memo) for entry in list(value))
    return memo[id(value)]


def _check(schedule: LRScheduler, saved: Any, depth: int) -> None:
    if type(schedule).__module__ != LRScheduler.__module__:
        return
    if not isinstance(saved, Mapping):
        raise ValueError(f"schedule must be a dict, but got {shown(saved)}")
    live = schedule.state_dict()
    # torch would write them over methods.
    foreign = [
        key for key in saved if not isinstance(key, str) or (hasattr(schedule, key) and key not in {*live, *_FLAGS})
    ]
    if foreign:
        raise ValueError(f"schedule must hold the state of {type(schedule).__name__}, but got {shown(foreign)}")
    for key in _FIELDS & set(live) & set(saved):  # what is missing stays as it is
        _check_like(saved[key], live[key], key, depth)
    inner = getattr(schedule, "_schedulers", [])
    states = saved["_schedulers"] if inner else []
    if not isinstance(states, (list, tuple)) or len(states) != len(inner):
        raise ValueError(f"_schedulers must be a list of {len(inner)}, but got {shown(states)}")
    for part, state in zip(inner, states, strict=True):
        _check(part, state, depth + 1)


def _check_like(saved: Any, live: Any, name: str, depth: int) -> None:
    """Raise where a saved value is of another kind than the one it replaces, or cannot be computed with."""
    if isinstance(live, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(live):
            raise ValueError(f"{name} must be a list of {len(live)}, but got {shown(saved)}")
        for one, other in zip(saved, live, strict=True):
            _check_like(one, other, name, depth)
    elif is_flag(live) or isinstance(live, (str, Mapping)):
        if not isinstance(saved, Mapping if isinstance(live, Mapping) else type(live)):
            raise ValueError(f"{name} must be of type {type(live).__name__}, but got {shown(saved)}")
    elif not math.isnan(_number(live)):
        _check_number(_number(saved), _number(live), saved, name, depth)


def _check_number(value: float, live: float, saved: Any, name: str, depth: int) -> None:
    if math.isnan(value):
        raise ValueError(f"{name} must be a finite number, but got {shown(saved)}")
    if name in _COUNTS and value % 1:
        raise ValueError(f"{name} must be a whole number, but got {shown(saved)}")
    if name in _DIVISORS and value == 0 < live:
        raise ValueError(f"{name} must be above 0, as the schedule's is, but got {shown(saved)}")
    # Each SequentialLR around a schedule takes back a step of it, so that it waits for its turn one lower.
    low = -1 - depth if name == "last_epoch" else -1 if name in ("_step_count", "T_cur") else min(live, 0)
    if name != "_last_lr" and value < low:
        raise ValueError(f"{name} must not be negative, but got {shown(saved)}")


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and value.is_floating_point():
        value = value.item()
    return number(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)


def lrs_of(saved: Any, name: str, num_groups: int, low: float = 0) -> list[float]:
    """The learning rates of a saved state, one for each param group."""
    found = numbers_of(saved, name, num_groups, low=low)
    if (found > MAX_LR).any():
        raise ValueError(f"{name} must be at most {MAX_LR:g}, but got {shown(saved)}")
    lrs: list[float] = found.tolist()
    return lrs
