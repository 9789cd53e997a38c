"""What AutoLR does where it is not told: interval, controller, where the scale starts, and when it may move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from hdet.checks import whole
from hdet.controllers import EvidenceController
from hdet.policy.climb import Climb
from hdet.policy.timing import default_interval, has_time_to_climb, hold_start, keep_start
from hdet.schedulers._common import Common

MIN_ROUNDS = 50
"""With fewer rounds there is no time for a cold start: the schedule begins, and warms up, as it is."""

FIRST_SCALES = {"gradient": 0.03, "loss": 0.2}
"""Where the learned scale starts, by signal: low enough that a schedule 30 times too high does no harm in its first
rounds, and no lower than the signal can climb from in a few of them."""

SignalName = Literal["loss", "gradient"]


def make_evidence_controller(signal: SignalName, **settings: Any) -> EvidenceController:
    """The controller that goes with a signal, unless told otherwise.

    Losses of replicas have far larger standard errors than the first-order signal, so the same slope is fewer of them:
    optimism, which is counted in standard errors, has to be smaller.
    """
    of_loss = {"optimism": 0.75, "fall": None, "brake": None, "down": 1.0}
    return EvidenceController(**(of_loss if signal == "loss" else {}) | settings)


def interval_for(signal: SignalName, total_steps: Any) -> int:
    """T where none is given."""
    total = None if total_steps is None else whole(total_steps)
    if signal == "gradient":
        return default_interval(total)
    return 100 if total is None else max(1, min(1000, total // 100))


def starts_cold(total_steps: int | None, interval: int) -> bool:
    """Whether a run has rounds enough to climb, by evidence alone, from a cold start through a gated warm-up."""
    return total_steps is None or total_steps >= MIN_ROUNDS * interval


def auto_settings(
    common: Common,
    signal: SignalName,
    *,
    step: int,
    shape: Sequence[float] = (),
    lr_given: bool = True,
    has_steps: bool = False,
) -> dict[str, Any]:
    """The arguments of :func:`make_loop` that make AutoLR out of a schedule.

    Args:
        common: what all schedulers take.
        signal: what it learns from.
        step: optimizer steps already taken.
        shape: of the schedule, as :func:`~hdet.policy.timing.hold_start` takes it.
        lr_given: whether learning rate and schedule mean anything.
        has_steps: whether the schedule has steps or periods.
    """
    adapt, total = common.adapt, common.total_steps
    if adapt.groups == "auto" and signal != "gradient":
        raise ValueError('groups="auto" needs the gradient signal: pass signal="gradient", or groups="each"')
    climb = Climb(total, step=step) if _climbs(common, signal, step=step, lr_given=lr_given) else None
    # A run that is continued has found its learning rate, be it by hand.
    cold = step <= 0 and starts_cold(total, common.interval)
    first_scale = FIRST_SCALES[signal] if cold else 1.0
    start = 0 if climb is not None and adapt.start_steps is None else common.start_steps
    given = (adapt.controller, adapt.hold_share, adapt.gated, adapt.first_scale)
    told = adapt.climb is False or any(each is not None for each in given)  # a start far off needs time to move
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
        "controller": make_evidence_controller(signal) if adapt.controller is None else adapt.controller,
        "acting": (start, hold),
        "groups": adapt.groups,
        "gated": climb is not None or (cold if adapt.gated is None else adapt.gated),
        "first_scale": first_scale if adapt.first_scale is None else adapt.first_scale,
        "climb": climb,
        "signal": signal,
    }


def _climbs(common: Common, signal: SignalName, *, step: int, lr_given: bool) -> bool:
    adapt = common.adapt
    if adapt.climb and signal != "gradient":
        raise ValueError('climb=True needs the gradient signal: pass signal="gradient", or leave climb out')
    if adapt.climb is not None or signal != "gradient":
        return bool(adapt.climb)
    told = any(given is not None for given in (adapt.controller, adapt.gated, adapt.first_scale))
    told = told or adapt.bounds[0] > FIRST_SCALES[signal]  # no room below
    return step <= 0 and not told and has_time_to_climb(common.total_steps, lr_given=lr_given)
