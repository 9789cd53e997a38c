"""Saved states of schedules: torch takes whatever it is given, and stumbles over it some steps later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from hdet.checks import flag_of, is_flag, number, shown, whole_of

LRS = {"initial_lr", "max_lr", "min_lr"}
MOMENTA = {"base_momentum", "max_momentum"}
_PHASE = {"start_lr": LRS, "end_lr": LRS, "start_momentum": MOMENTA, "end_momentum": MOMENTA}


def check_one_cycle_state(schedule: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where the attributes of a OneCycleLR, just loaded, could not be trained with to the end."""
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
    if not -1 <= whole_of(schedule.last_epoch, "last_epoch", -1) <= total_steps:
        raise ValueError(f"last_epoch must be in [-1, {total_steps}], but got {schedule.last_epoch}")
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


def load_schedule(schedule: LRScheduler, parts: Iterable[LRScheduler], saved: Any, num_groups: int) -> None:
    """Load ``saved`` into a schedule, and raise where it is another one's or its learning rates cannot be computed.

    ``num_groups``: how many of the optimizer's param groups, the first ones, it is the schedule of.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"schedule must be a dict, but got {shown(saved)}")
    parts = list(parts)
    _check_like(saved, schedule.state_dict(), "schedule")
    if all(type(part).__module__ == LRScheduler.__module__ for part in parts):
        _refuse_negative(saved, schedule.state_dict(), "schedule")
    _refuse_attributes(schedule, saved)
    schedule.load_state_dict(dict(saved))
    for part in parts:
        if isinstance(part, OneCycleLR):
            check_one_cycle_state(part, part.optimizer.param_groups[:num_groups])


def check_lrs(schedule: LRScheduler, lrs: Sequence[float]) -> None:
    """Raise where ``lrs`` are not what the schedule, just loaded, has given last."""
    last = getattr(schedule, "_last_lr", None)
    # A step of the user's own need not keep it.
    if type(schedule).step not in (LRScheduler.step, SequentialLR.step, ChainedScheduler.step) or last is None:
        return
    if not all(math.isclose(_number(a), b, rel_tol=1e-6) for a, b in zip(last, lrs, strict=True)):
        raise ValueError(f"schedule_lrs must be what the schedule gave last, {shown(last)}, but got {shown(lrs)}")


def _refuse_attributes(schedule: LRScheduler, saved: Mapping[str, Any]) -> None:
    # torch would write them over methods.
    foreign = [
        key for key in saved if not isinstance(key, str) or (hasattr(schedule, key) and not _is_state(schedule, key))
    ]
    if foreign:
        raise ValueError(f"schedule must hold the state of {type(schedule).__name__}, but got {shown(foreign)}")
    inner = getattr(schedule, "_schedulers", ())
    for part, state in zip(inner, saved["_schedulers"] if inner else (), strict=True):
        _refuse_attributes(part, state)


def _is_state(schedule: LRScheduler, key: str) -> bool:
    flags = ("_get_lr_called_within_step", "_is_initial")  # torch has them in the class, too
    return key in schedule.state_dict() or key in flags


def _check_like(saved: Any, live: Any, name: str) -> None:
    """Raise where a saved value is of another kind than the one it replaces. What is missing stays as it is."""
    if isinstance(live, Mapping) and all(isinstance(key, str) for key in live):
        if not isinstance(saved, Mapping):
            raise ValueError(f"{name} must be a dict, but got {shown(saved)}")
        for key in live:
            if key in saved:
                _check_like(saved[key], live[key], key)
    elif isinstance(live, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or (len(saved) != len(live) and name != "_schedule_phases"):
            raise ValueError(f"{name} must be a list of {len(live)}, but got {shown(saved)}")
        for one, other in zip(saved, live, strict=False):
            _check_like(one, other, name)
    elif is_flag(live) or isinstance(live, (str, Mapping)):
        if not isinstance(saved, Mapping if isinstance(live, Mapping) else type(live)):
            raise ValueError(f"{name} must be of type {type(live).__name__}, but got {shown(saved)}")
    elif not math.isnan(_number(live)) and math.isnan(_number(saved)):
        raise ValueError(f"{name} must be a finite number, but got {shown(saved)}")
    elif isinstance(live, int) and float(_number(saved)) % 1:
        raise ValueError(f"{name} must be a whole number, but got {shown(saved)}")


def _refuse_negative(saved: Any, live: Any, name: str) -> None:
    """No schedule of torch's has a number below 0, but for what counts from -1; nor a 0 that it divides by."""
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(live, Mapping):
        pairs = ((saved[key], live[key], key) for key in live if key in saved)
    elif isinstance(live, (list, tuple)):
        pairs = ((one, other, name) for one, other in zip(saved, live, strict=False))
    for one, other, key in pairs:
        _refuse_negative(one, other, key)
    counts = name in ("last_epoch", "_step_count", "T_cur")
    divides = isinstance(live, float) or name in ("T_max", "T_0", "T_i", "step_size")
    if divides and not counts and name != "_last_lr" and _number(saved) == 0 < _number(live):
        raise ValueError(f"{name} must be above 0, as the schedule's is, but got {shown(saved)}")
    if _number(saved) < (-1 if counts else 0):
        raise ValueError(f"{name} must not be negative, but got {shown(saved)}")


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and value.is_floating_point():
        value = value.item()
    return number(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)
