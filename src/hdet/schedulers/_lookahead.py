"""Schedules as AutoLR takes them, and what they are going to do: read off their formulas, nothing is stepped."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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

from hdet.checks import number, shown
from hdet.policy.timing import constant_then_linear
from hdet.schedulers._base import RoundScheduler, write_lr
from hdet.schedulers._torch_state import all_of

NUM_POINTS = 400
STEPWISE = (StepLR, MultiStepLR, CyclicLR, CosineAnnealingWarmRestarts)


def shape_of(schedule: LRScheduler, total_steps: int) -> list[float]:
    """The first param group's learning rate at points that divide the run evenly; empty where there is no formula."""
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
    if not isinstance(schedule, LRScheduler):
        raise TypeError(f"schedule must be an LRScheduler or an Optimizer, but got {type(schedule).__name__}")
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            "schedule must not be ReduceLROnPlateau, which moves the learning rate by the loss itself; "
            "wrap the schedule you would use without it, e.g. a constant LambdaLR"
        )
    if isinstance(schedule, RoundScheduler):
        raise TypeError(
            f"schedule must not be a scheduler of hdet, but got {type(schedule).__name__}; wrap a plain one"
        )


def check_lrs_given(optimizer: Optimizer) -> None:
    """ValueError where learning rates do not say how param groups compare."""
    for k, group in enumerate(optimizer.param_groups):
        if not number(float(group["lr"])) > 0:
            raise ValueError(
                "the optimizer's learning rates must be > 0, since they say how those of param groups compare, but "
                f"that of param group {k} is {float(group['lr']):g}"
            )


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
