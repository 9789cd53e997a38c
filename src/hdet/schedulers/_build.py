"""How a round loop is put together from a scheduler's arguments."""

from __future__ import annotations

import math
from contextlib import ExitStack

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.controllers import Controller
from hdet.controllers.groups import GroupController
from hdet.engine.averaging import Averager
from hdet.engine.clock import Clock
from hdet.engine.rollback import Fallback
from hdet.engine.rounds import RoundLoop
from hdet.engine.values import Values
from hdet.knobs.knob_set import KnobSet
from hdet.options import AnchorChoice, Groups
from hdet.policy.level import Level
from hdet.policy.panel import Panel
from hdet.policy.rollback import Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import Steering
from hdet.replicas.find import refuse_shared_gradients
from hdet.replicas.group import Replicas
from hdet.replicas.parameters import refuse_copies
from hdet.replicas.sharding import sharding
from hdet.schedulers._auto_settings import SignalName
from hdet.schedulers._common import Common
from hdet.schedulers._elastic import check_elastic
from hdet.schedulers._learned_decay import check_decay, make_decay
from hdet.signals.base import Signal
from hdet.signals.gradient import GradientSignal, default_sample_every
from hdet.signals.held_out import HeldOutGradient
from hdet.signals.loss import LossSignal
from hdet.signals.probe import ProbeSignal
from hdet.signals.update_size import UpdateSize
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights
from hdet.weights.columns import stride_of
from hdet.weights.host import host_if_large
from hdet.weights.snapshot import Snapshot
from hdet.weights.tail import Tail

HOST_COPY_STEPS = 100
"""At least so many steps lie between two copies to the host, which would otherwise cost some hundredths of the time."""


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
    signal: SignalName = "loss",
    anchor: AnchorChoice | None = None,
    level: Level | None = None,
    rollback: bool = True,
    bounds: tuple[float, float] | None = None,
) -> RoundLoop:
    """A round loop from a scheduler's arguments.

    Whoever calls it has filled in the defaults of :class:`~hdet.Adapt` that depend on the signal. ``acting``: base
    values move at rounds that end after the first of these steps, and up to the second. ``step``: optimizer steps
    already taken. ``rollback``: what holds where ``Faults`` does not say. ``anchor``, ``bounds``: where they are not
    those of ``Adapt``.
    """
    optimizer, adapt, faults, averaging = common.optimizer, common.adapt, common.faults, common.averaging
    interval, anchor, gradients = common.interval, anchor or adapt.anchor, common.gradients
    num_groups = len(optimizer.param_groups)
    together = groups == "together"
    knob_of_group = [0] * num_groups if together else list(range(num_groups))
    wanted = spread > 0 or gradients == "local" or any(panel.spreads)
    apart = wanted and replicas.count > 1
    _check(common, replicas, apart=apart, signal=signal, spread=spread)
    elastic = averaging.make_outer().kind == "elastic"
    if elastic:
        check_elastic(common, replicas, spread=spread, compares=any(panel.spreads))
        rollback = False
    check_decay(common, signal)
    spread = spread if apart else 0.0
    # Measuring from the last converge needs a copy for the gradient signal only: fan-out starts there anyway.
    kept = None
    if signal == "gradient" or (anchor != "round" and spread > 0):
        kept = Anchor(
            device=common.copies.anchor_device,
            dtype=common.copies.anchor_dtype,
            stride=stride_of(common.copies.anchor_share, optimizer) if spread == 0 else 1,
        )
    weights = Weights(optimizer, common.model, replicas)
    signals = _make_signals(
        common, weights, knobs, panel, signal=signal, anchor=kept, knob_of_group=knob_of_group, whole=groups == "auto"
    )
    shows = spread > 0 or any(not each.compares for each in signals)
    if level is not None and level.hint and not shows:
        level = None  # the schedule as it is
    if level is not None:
        num_ranks = replicas.count * replicas.num_parts
        signals.append(UpdateSize(num_ranks=num_ranks, stride=stride_of(None, optimizer)))
    steering = Steering(
        num_knobs=max(knob_of_group) + 1,
        num_replicas=replicas.count if apart else 1,
        spread=spread,
        controller=GroupController(controller) if groups == "auto" and controller is not None else controller,
        scale_bounds=bounds or adapt.bounds,
        seed=common.seed,
        round_index=step // interval,
        panel=panel,
    )
    undoes = (rollback if faults.rollback is None else faults.rollback) and (apart or shows)
    policy = RoundPolicy(
        steering,
        interval=interval,
        acting=acting,
        rollback=Rollback(faults.max_rollbacks, strict=faults.strict_rollbacks, interval=interval) if undoes else None,
        level=level,
        quarantine=faults.quarantine,
        anchored=kept is not None,
        anchor_rounds={"start": None, "round": 1}.get(anchor) if isinstance(anchor, str) else anchor,
        repairable=replicas.whole,
    )
    averager = Averager(
        optimizer,
        weights,
        apart=apart,
        shared_gradients=gradients != "local",
        anchor=kept,
        on_line=kept is not None and spread > 0,
        outer=averaging.make_outer(),
        optimizer_state=averaging.optimizer_state,
        fallback=_make_fallback(common),
        undoes=undoes,
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
        clock=Clock(averaging.slow_share if replicas.count > 1 else math.inf),  # nobody to wait for
        local=(lambda: _without_sync(common.model)) if gradients == "local" else None,
        skip_nonfinite=faults.skip_nonfinite,
    )


def _check(common: Common, replicas: Replicas, *, apart: bool, signal: SignalName, spread: float) -> None:
    """Raise where what was asked for cannot be had together."""
    _check_whole_gradients(common)
    share = common.copies.anchor_share
    if share is not None and share < 1 and (signal != "gradient" or spread > 0):
        raise ValueError(
            'anchor_share below 1 needs signal="gradient" without a spread, which estimates a sum from a share of the '
            "entries; to place replicas on the line through the anchor takes all of them. Leave it out; got "
            f"anchor_share={share}"
        )
    if apart:
        refuse_copies(common.optimizer, common.model)
    if apart and common.gradients == "local":
        refuse_shared_gradients(replicas, common.optimizer)


def _make_signals(
    common: Common,
    weights: Weights,
    knobs: KnobSet,
    panel: Panel,
    *,
    signal: SignalName,
    anchor: Anchor | None,
    knob_of_group: list[int],
    whole: bool,
) -> list[Signal]:
    """What rounds will show: for the learning rate, and for the knobs beside it."""
    signals: list[Signal] = []
    if signal == "gradient":
        assert anchor is not None
        every = common.adapt.sample_every or default_sample_every(common.optimizer, common.interval)
        num_ranks = weights.replicas.count * weights.replicas.num_parts
        if knobs.probe is None or len(knobs):
            signals.append(GradientSignal(anchor, knob_of_group, sample_every=every, num_ranks=num_ranks, whole=whole))
        else:  # nothing but the learning rate to ask held-out data about
            assert knobs.model is not None
            return [
                HeldOutGradient(
                    anchor,
                    knob_of_group,
                    sample_every=every,
                    num_ranks=num_ranks,
                    probe=knobs.probe,
                    model=knobs.model,
                    decay=make_decay(common, anchor),
                    whole=whole,
                )
            ]
    if knobs.probe is not None:
        tail = Tail(weights, common.interval) if common.adapt.horizon == "long" else None
        signals.append(ProbeSignal(knobs.probe, knobs.model, tail))
    elif signal == "loss" or panel.controller is not None:
        signals.append(LossSignal())
    return signals


def _make_fallback(common: Common) -> Fallback:
    """What a round that has to be undone goes back to."""
    kept_on, every = common.copies.snapshot_device, 1
    if kept_on is None and (kept_on := host_if_large(common.optimizer)) is not None:
        every = math.ceil(HOST_COPY_STEPS / common.interval)
    return Fallback(Snapshot(kept_on), every=every)


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
