"""Saved states of schedules, checked: torch loads anything, and fails some steps later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hdet.checks import flag_of, is_flag, number, shown, whole_of

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


def load_schedule(schedule: LRScheduler, saved: Any, num_groups: int) -> None:
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
