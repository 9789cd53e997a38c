"""How a round loop is put together from a scheduler's arguments, and what replicas must agree about first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.checks import whole
from hdet.controllers import Controller, EvidenceController, JointController
from hdet.engine.averaging import Averager
from hdet.engine.clock import Clock
from hdet.engine.rollback import Fallback
from hdet.engine.rounds import RoundLoop
from hdet.engine.values import Values
from hdet.knobs import Knob, LearningRate
from hdet.knobs.knob_set import KnobSet
from hdet.options import AnchorChoice, Groups
from hdet.policy.climb import Climb
from hdet.policy.panel import NO_PANEL, Panel
from hdet.policy.rollback import Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import Steering
from hdet.policy.timing import default_interval, has_time_to_climb, hold_start, keep_start
from hdet.replicas.find import find_replicas, refuse_shared_gradients
from hdet.replicas.group import Replicas
from hdet.replicas.parameters import check_parameters, refuse_copies, shape_digest, trained_parameters
from hdet.replicas.sharding import sharding
from hdet.schedulers._common import Common
from hdet.signals.base import Signal
from hdet.signals.gradient import GradientSignal, default_sample_every
from hdet.signals.held_out import HeldOutGradient
from hdet.signals.loss import LossSignal
from hdet.signals.probe import ProbeSignal
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights
from hdet.weights.columns import stride_of
from hdet.weights.host import host_if_large
from hdet.weights.snapshot import Snapshot

MIN_ROUNDS = 50
"""With fewer rounds there is no time for a cold start: the schedule begins, and warms up, as it is."""

FIRST_SCALES = {"gradient": 0.03, "loss": 0.2}
"""Where the learned scale starts, by signal: low enough that a schedule 30 times too high does no harm in its first
rounds, and no lower than the signal can climb from in a few of them."""

HOST_COPY_STEPS = 100
"""At least so many steps lie between two copies to the host, which would otherwise cost some hundredths of the time."""

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


def make_knobs(common: Common, knobs: Sequence[Knob | LearningRate]) -> KnobSet:
    """The knobs beside a learning rate, checked and bound to what they are written into."""
    others = [knob for knob in knobs if isinstance(knob, Knob)]
    if len(others) < len(knobs):
        raise ValueError("knobs must not contain LearningRate here: the scheduler explores the learning rate itself")
    model = common.model
    found = KnobSet(others, probe=common.probe, model=model)
    found.bind(common.optimizer, gradients=common.gradients)
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        buffers = {id(buffer) for buffer in model.buffers()}
        sent = [knob.name for knob in others if id(knob.read()) in buffers]
        if sent:
            raise ValueError(
                f"knobs must not be buffers that DistributedDataParallel overwrites with rank 0's, but {sent} are; "
                "construct it with forward_sync_buffers=False (broadcast_buffers=False in older versions)"
            )
    return found


def refuse_outer_step(common: Common) -> None:
    """Raise where replicas with a schedule share gradients, and something else than their mean is asked for."""
    if common.gradients == "shared":
        reason = 'with a schedule it needs replicas that train on gradients of their own; pass gradients="local"'
        common.averaging.refuse({"outer": reason, "optimizer_state": reason})


def agree(common: Common, knobs: KnobSet, facts: Mapping[str, Any], *, spread: float, wait: bool = True) -> Replicas:
    """The replicas; an error on all of them where ranks pass different arguments or hold different parameters."""
    apart = spread > 0 or common.gradients == "local" or any(knob.spread for knob in knobs)
    replicas = find_replicas(common.optimizer, common.process_group, spread=float(apart))
    parameters = trained_parameters(common.optimizer, common.model)
    check_parameters(parameters)
    sizes = f"{len(parameters)} tensors of {sum(p.numel() for p in parameters)} elements"
    groups = len(common.optimizer.param_groups)
    held = {"parameters": f"{sizes} in {groups} groups (shapes {shape_digest(parameters):08x})"}
    # Without a reason to wait a rank only states its facts; the others learn of it all the same.
    replicas.agree({**facts, **{f"knob {knob.name}": knob.facts() for knob in knobs}, **held}, wait=wait or apart)
    return replicas


def warn_if_alone(knobs: KnobSet, replicas: Replicas) -> None:
    """Knobs are learned by comparing replicas."""
    if len(knobs) and replicas.count == 1:
        warnings.warn(
            "knobs are explored by several replicas, and there is one: training continues with every knob as it is. "
            "Start several with torchrun, and initialise the process group first",
            stacklevel=3,
        )


def panel_beside_lr(common: Common, knobs: KnobSet) -> Panel:
    """The knobs as numbers, with a controller of their own, beside a learning rate that has another."""
    if not len(knobs):
        return NO_PANEL
    controller = JointController() if any(knob.adapt for knob in knobs) else None
    return knobs.panel(controller, balanced=common.adapt.assignment == "balanced")


def make_loop(
    common: Common,
    replicas: Replicas,
    knobs: KnobSet,
    panel: Panel,
    *,
    controller: Controller | None,
    spread: float,
    acting: tuple[float, float],
    step: int,
    groups: Groups,
    gated: bool = False,
    first_scale: float = 1.0,
    signal: SignalName = "loss",
    anchor: AnchorChoice | None = None,
    climb: Climb | None = None,
    rollback: bool = True,
    bounds: tuple[float, float] | None = None,
) -> RoundLoop:
    """A round loop from a scheduler's arguments.

    Whoever calls it has filled in the defaults of :class:`~hdet.Adapt` that depend on the signal. ``acting``: base
    values move at rounds that end after the first of these steps, and up to the second. ``step``: optimizer steps
    already taken. ``rollback``: what holds where ``Faults`` does not say. ``anchor``, ``bounds``: where they are not
    those of ``Adapt``.
    """
    optimizer, model, adapt, faults, averaging = (
        common.optimizer, common.model, common.adapt, common.faults, common.averaging,
    )  # fmt: skip
    interval, anchor, gradients = common.interval, anchor or adapt.anchor, common.gradients
    num_groups = len(optimizer.param_groups)
    together = groups == "together"
    knob_of_group = [0] * num_groups if together else list(range(num_groups))
    wanted = spread > 0 or gradients == "local" or any(panel.spreads)
    apart = wanted and replicas.count > 1
    _check_whole_gradients(common)
    share = common.copies.anchor_share
    if share is not None and share < 1 and (signal != "gradient" or spread > 0):
        raise ValueError(
            'anchor_share below 1 needs signal="gradient" without a spread, which estimates a sum from a share of the '
            "entries; to place replicas on the line through the anchor takes all of them. Leave it out; got "
            f"anchor_share={share}"
        )
    if apart:
        refuse_copies(optimizer, model)
    if apart and gradients == "local":
        refuse_shared_gradients(replicas, optimizer)
    spread = spread if apart else 0.0
    # Measuring from the last converge needs a copy for the gradient signal only: fan-out starts there anyway.
    anchored = signal == "gradient" or (anchor != "round" and spread > 0)
    kept = None
    if anchored:
        kept = Anchor(
            device=common.copies.anchor_device,
            dtype=common.copies.anchor_dtype,
            stride=stride_of(share, optimizer) if spread == 0 else 1,
        )
    signals: list[Signal] = []
    if signal == "gradient":
        assert kept is not None
        every = adapt.sample_every or default_sample_every(optimizer, interval)
        num_ranks = replicas.count * replicas.num_parts
        if knobs.probe is None or len(knobs):
            signals.append(GradientSignal(kept, knob_of_group, sample_every=every, num_ranks=num_ranks))
        else:
            assert model is not None
            signals.append(
                HeldOutGradient(
                    kept,
                    knob_of_group,
                    sample_every=every,
                    num_ranks=num_ranks,
                    probe=knobs.probe,
                    model=model,
                )
            )
    if knobs.probe is not None and (signal != "gradient" or len(knobs)):
        signals.append(ProbeSignal(knobs.probe, knobs.model))
    elif signal == "loss" or panel.controller is not None:
        signals.append(LossSignal())
    shows = spread > 0 or any(not each.compares for each in signals)
    steering = Steering(
        num_knobs=max(knob_of_group) + 1,
        num_replicas=replicas.count if apart else 1,
        spread=spread,
        controller=controller,
        scale_bounds=bounds or adapt.bounds,
        gated=gated and shows,
        seed=common.seed,
        round_index=step // interval,
        first_scale=first_scale if shows else 1.0,
        panel=panel,
    )
    undoes = (rollback if faults.rollback is None else faults.rollback) and (apart or shows)
    policy = RoundPolicy(
        steering,
        interval=interval,
        acting=acting,
        rollback=Rollback(faults.max_rollbacks, strict=faults.strict_rollbacks) if undoes else None,
        climb=climb,
        quarantine=faults.quarantine,
        anchored=kept is not None,
        anchor_rounds={"start": None, "round": 1}.get(anchor) if isinstance(anchor, str) else anchor,
        repairable=replicas.whole,
    )
    kept_on, keep_every = common.copies.snapshot_device, 1
    if kept_on is None and (kept_on := host_if_large(optimizer)) is not None:
        keep_every = math.ceil(HOST_COPY_STEPS / interval)
    averager = Averager(
        optimizer,
        Weights(optimizer, model, replicas),
        apart=apart,
        shared_gradients=gradients != "local",
        anchor=kept,
        on_line=kept is not None and spread > 0,
        outer=averaging.make_outer(),
        optimizer_state=averaging.optimizer_state,
        fallback=Fallback(Snapshot(kept_on), every=keep_every),
        undoes=undoes or climb is not None,
        overlap=averaging.overlap,
        node_size=averaging.node_size,
        node_rounds=averaging.node_rounds,
        step=step,
    )
    values = Values(
        optimizer,
        steering,
        knobs,
        averager.place,
        index=replicas.index if apart else 0,
        knob_of_group=knob_of_group,
        one_scale=together,
    )
    return RoundLoop(
        optimizer,
        averager,
        policy,
        signals,
        values,
        clock=Clock(averaging.slow_share),
        local=(lambda: _without_sync(model)) if gradients == "local" else None,
        skip_nonfinite=faults.skip_nonfinite,
    )


def _check_whole_gradients(common: Common) -> None:
    parameters = [p for group in common.optimizer.param_groups for p in group["params"]]
    if common.faults.skip_nonfinite and any(
        sharding(p) is not None or type(p).__name__ == "FlatParameter" for p in parameters
    ):
        raise ValueError(
            "skip_nonfinite needs every rank to see whole gradients, but parameters are sharded: one shard would skip "
            "a step that the others take; leave it out, rollback undoes such a round"
        )


def _without_sync(model: nn.Module | None) -> ExitStack:
    """Keeps DistributedDataParallel from averaging gradients until it is closed."""
    stack = ExitStack()
    for module in model.modules() if model is not None else ():  # it may be inside a compiled one
        if isinstance(module, DistributedDataParallel):
            stack.enter_context(module.no_sync())
    return stack
