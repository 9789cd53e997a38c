"""What AutoLR does where it is not told: interval, controller, how it starts, and when the scale may move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from hdet.checks import whole
from hdet.controllers import EvidenceController, LevelController
from hdet.options import Adapt
from hdet.policy.level import Level
from hdet.policy.timing import default_interval, hold_start, keep_start
from hdet.schedulers._common import Common

SignalName = Literal["loss", "gradient"]


def make_controller(signal: SignalName, **settings: Any) -> LevelController | EvidenceController:
    """The controller that goes with a signal, unless told otherwise.

    Losses of replicas have far larger standard errors than the first-order signal, and say nothing of elasticity.
    """
    return LevelController(**settings) if signal == "gradient" else EvidenceController(**settings)


def interval_for(signal: SignalName, total_steps: Any) -> int:
    """T where none is given."""
    total = None if total_steps is None else whole(total_steps)
    if signal == "gradient":
        return default_interval(total)
    return 100 if total is None else max(1, min(1000, total // 100))


def auto_settings(
    common: Common,
    signal: SignalName,
    *,
    step: int,
    shape: Sequence[float] = (),
    lr_given: bool = True,
    first_lr: float = 1.0,
    has_steps: bool = False,
) -> dict[str, Any]:
    """The arguments of :func:`make_loop` that make AutoLR out of a schedule.

    Args:
        common: what all schedulers take.
        signal: what it learns from.
        step: optimizer steps already taken.
        shape: of the schedule, as :func:`~hdet.policy.timing.hold_start` takes it.
        lr_given: whether learning rate and schedule mean anything.
        first_lr: of the first param group, as it was given.
        has_steps: whether the schedule has steps or periods.
    """
    adapt, total = common.adapt, common.total_steps
    if adapt.groups == "auto" and signal != "gradient":
        raise ValueError('groups="auto" needs the gradient signal: pass signal="gradient", or groups="each"')
    level = _level(common, step=step, shape=shape, lr_given=lr_given, first_lr=first_lr)
    start = 0 if level is not None and adapt.start_steps is None else common.start_steps
    told = adapt.level is False or adapt.controller is not None or adapt.hold_share is not None
    kept = signal == "gradient" and not told and has_steps
    if adapt.shape == "keep" or (adapt.shape is None and kept):
        hold = keep_start(total)
    elif total is None:
        hold = math.inf
    elif adapt.hold_share is None and signal == "gradient":
        hold = hold_start(total, shape)
    else:
        hold = (1 - (0.05 if adapt.hold_share is None else adapt.hold_share)) * total
    return {
        "controller": make_controller(signal) if adapt.controller is None else adapt.controller,
        "acting": (start, hold),
        "groups": adapt.groups,
        "level": level,
        "signal": signal,
    }


def finds_level(adapt: Adapt, *, step: int, lr_given: bool) -> bool:
    """Whether a run begins by measuring its updates: one that is continued has found its learning rate."""
    wanted = adapt.controller is None or not lr_given if adapt.level is None else adapt.level
    return wanted and step <= 0


def _level(common: Common, *, step: int, shape: Sequence[float], lr_given: bool, first_lr: float) -> Level | None:
    if not finds_level(common.adapt, step=step, lr_given=lr_given):
        return None
    if not lr_given:
        return Level(common.total_steps, given=first_lr)
    peak = max(shape) if len(shape) else first_lr
    if not peak > 0:  # nothing to compare with
        return None
    return Level(common.total_steps, peak=peak, hint=True, warms_up=len(shape) > 0 and shape[0] < peak / 2)
