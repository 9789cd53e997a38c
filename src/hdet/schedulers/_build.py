"""How a round loop is put together from a scheduler's arguments, and what replicas must agree about first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import shown
from hdet.controllers import Controller, EvidenceController
from hdet.engine.averaging import Averager
from hdet.engine.clock import Clock
from hdet.engine.rollback import Fallback
from hdet.engine.rounds import RoundLoop
from hdet.engine.values import Values
from hdet.knobs import Knob, LearningRate
from hdet.knobs.knob_set import Board
from hdet.operations import PLAIN, Operations
from hdet.policy.rollback import Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import NO_PANEL, Panel, Steering
from hdet.replicas.find import refuse_shared_gradients
from hdet.replicas.group import Replicas
from hdet.replicas.parameters import check_parameters, refuse_copies, shape_digest, trained_parameters
from hdet.replicas.sharding import sharding
from hdet.signals.base import Signal
from hdet.signals.gradient import GradientSignal, default_sample_every
from hdet.signals.loss import LossSignal
from hdet.signals.probe import Probe, ProbeSignal
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights
from hdet.weights.outer import OuterStep, StatePolicy
from hdet.weights.snapshot import Snapshot

MIN_ROUNDS = 50
"""With fewer rounds there is no time for a cold start: the schedule begins, and warms up, as it is."""

HOLD_SHARE = 0.05
"""Share of a run, at its end, in which the learned scale holds still."""

FIRST_SCALES = {"gradient": 0.03, "loss": 0.2}
"""Where the learned scale starts, by signal: low enough that a schedule 30 times too high does no harm in its first
rounds, and no lower than the signal can climb from in a few of them."""

AnchorChoice = Literal["start", "round"] | int
Gradients = Literal["shared", "local"]
Device = torch.device | str | None


def make_evidence_controller(signal: Literal["loss", "gradient"], **settings: float) -> EvidenceController:
    """The controller that goes with a signal, unless told otherwise.

    Losses of replicas have far larger standard errors than the first-order signal, so the same slope is fewer of them:
    optimism, which is counted in standard errors, has to be smaller.
    """
    return EvidenceController(**({"optimism": 0.75} if signal == "loss" else {}) | settings)


def starts_cold(total_steps: int | None, interval: int) -> bool:
    """Whether a run has rounds enough to climb, by evidence alone, from a cold start through a gated warm-up."""
    return total_steps is None or total_steps >= MIN_ROUNDS * interval


def auto_settings(signal: Literal["loss", "gradient"], total_steps: int | None, interval: int) -> dict[str, Any]:
    """The arguments of :func:`make_loop` that make AutoLR out of a schedule, unless told otherwise."""
    cold = starts_cold(total_steps, interval)
    end = math.inf if total_steps is None else (1 - HOLD_SHARE) * total_steps
    return {
        "controller": make_evidence_controller(signal),
        "acting": ((total_steps or 0) // 50, end),
        "together": True,
        "gated": cold,
        "first_scale": FIRST_SCALES[signal] if cold else 1.0,
        "signal": signal,
        "anchor": "start",
        "rollback": True,
    }


def agree(
    replicas: Replicas, arguments: Mapping[str, Any], optimizer: Optimizer, model: nn.Module | None, *, wait: bool
) -> None:
    """Find out at construction when ranks pass different arguments or hold different parameters."""
    parameters = trained_parameters(optimizer, model)
    check_parameters(parameters)
    sizes = f"{len(parameters)} tensors of {sum(p.numel() for p in parameters)} elements"
    groups = len(optimizer.param_groups)
    facts = {**arguments, "parameters": f"{sizes} in {groups} groups (shapes {shape_digest(parameters):08x})"}
    replicas.agree(facts, wait=wait)


def make_loop(
    optimizer: Optimizer,
    model: nn.Module | None,
    replicas: Replicas,
    *,
    controller: Controller | None,
    spread: float,
    interval: int,
    acting: tuple[float, float],
    scale_bounds: tuple[float, float],
    seed: int,
    step: int,
    together: bool = False,
    gated: bool = False,
    first_scale: float = 1.0,
    signal: Literal["loss", "gradient"] = "loss",
    anchor: AnchorChoice = "round",
    anchor_device: Device = None,
    anchor_dtype: torch.dtype | None = None,
    sample_every: int | None = None,
    rollback: bool = False,
    max_rollbacks: int = 20,
    snapshot_device: Device = None,
    board: Board | None = None,
    panel: Panel = NO_PANEL,
    gradients: Gradients = "shared",
    outer: OuterStep | None = None,
    optimizer_state: StatePolicy = "keep",
    operations: Operations = PLAIN,
) -> RoundLoop:
    """A round loop from a scheduler's arguments."""
    num_groups = len(optimizer.param_groups)
    knob_of_group = [0] * num_groups if together else list(range(num_groups))
    wanted = spread > 0 or gradients == "local" or any(panel.spreads)
    apart = wanted and replicas.count > 1
    _check_operations(operations, optimizer, outer, optimizer_state)
    if apart:
        refuse_copies(optimizer, model)
    if apart and gradients == "local":
        refuse_shared_gradients(replicas, optimizer)
    spread = spread if apart else 0.0
    # Measuring from the last converge needs a copy for the gradient signal only: fan-out starts there anyway.
    anchored = signal == "gradient" or (anchor != "round" and spread > 0)
    kept = Anchor(device=anchor_device, dtype=anchor_dtype) if anchored else None
    signals: list[Signal] = []
    if signal == "gradient":
        assert kept is not None
        every = sample_every or default_sample_every(optimizer, interval)
        num_ranks = replicas.count * replicas.num_parts
        signals.append(GradientSignal(kept, knob_of_group, sample_every=every, num_ranks=num_ranks))
    if board is not None and board.probe is not None:
        signals.append(ProbeSignal(board.probe, board.model))
    elif signal == "loss" or panel.controller is not None:
        signals.append(LossSignal())
    shows = spread > 0 or any(not each.compares for each in signals)
    steering = Steering(
        num_knobs=max(knob_of_group) + 1,
        num_replicas=replicas.count if apart else 1,
        spread=spread,
        controller=controller,
        scale_bounds=scale_bounds,
        gated=gated and shows,
        seed=seed,
        round_index=step // interval,
        first_scale=first_scale if shows else 1.0,
        panel=panel,
    )
    undoes = rollback and (apart or shows)
    policy = RoundPolicy(
        steering,
        interval=interval,
        acting=acting,
        rollback=Rollback(max_rollbacks, strict=operations.strict_rollbacks) if undoes else None,
        quarantine=operations.quarantine,
        anchored=kept is not None,
        anchor_rounds={"start": None, "round": 1}.get(anchor) if isinstance(anchor, str) else anchor,
        repairable=replicas.whole,
    )
    averager = Averager(
        optimizer,
        Weights(optimizer, model, replicas),
        apart=apart,
        shared_gradients=gradients != "local",
        anchor=kept,
        on_line=kept is not None and spread > 0,
        outer=outer,
        optimizer_state=optimizer_state,
        fallback=Fallback(Snapshot(snapshot_device)) if undoes else None,
        overlap=operations.overlap,
        node_size=operations.node_size,
        node_rounds=operations.node_rounds,
        step=step,
    )
    values = Values(
        optimizer,
        steering,
        board or Board(),
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
        clock=Clock(operations.slow_share),
        local=(lambda: _without_sync(model)) if gradients == "local" else None,
        skip_nonfinite=operations.skip_nonfinite,
    )


def _check_operations(
    operations: Operations, optimizer: Optimizer, outer: OuterStep | None, optimizer_state: StatePolicy
) -> None:
    late = "overlap" if operations.overlap else "node_rounds" if operations.node_rounds > 1 else None
    if late and outer is not None and outer.kind != "mean":
        raise ValueError(f'{late} needs outer="mean", which can be taken late and in parts, but got {outer!r}')
    if late and optimizer_state == "average":
        raise ValueError(
            f'{late} saves communication, but optimizer_state="average" needs that of the optimizer\'s state at once, '
            'in every round; use "keep" or "reset"'
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if operations.skip_nonfinite and any(
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


def make_board(
    knobs: Sequence[Knob], probe: Probe | None, model: nn.Module | None, optimizer: Optimizer, gradients: Gradients
) -> Board:
    """The knobs beside a learning rate, checked and bound to what they are written into."""
    for knob in knobs:
        if isinstance(knob, LearningRate):
            raise ValueError(
                "knobs must not contain LearningRate here: the scheduler explores the learning rate itself"
            )
        if not isinstance(knob, Knob):
            raise TypeError(f"knobs must be made of hdet.knobs, but got {type(knob).__name__}")
    if not isinstance(gradients, str) or gradients not in ("shared", "local"):
        raise ValueError(f'gradients must be one of "shared", "local", but got gradients={shown(gradients)}')
    if probe is not None and not callable(probe):
        raise TypeError(f"probe must be a function that returns a loss, but got {type(probe).__name__}")
    if model is None and (probe is not None or gradients == "local"):
        which = "probe=" if probe is not None else 'gradients="local"'
        raise ValueError(f"{which} needs model=, the one that is trained, wrapped as it is")
    board = Board(knobs, probe=probe, model=model)
    board.bind(optimizer, gradients=gradients)
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        buffers = {id(buffer) for buffer in model.buffers()}
        sent = [knob.name for knob in knobs if id(knob._get()) in buffers]
        if sent:
            raise ValueError(
                f"knobs must not be buffers that DistributedDataParallel overwrites with rank 0's, but {sent} are; "
                "construct it with forward_sync_buffers=False (broadcast_buffers=False in older versions)"
            )
    return board


def warn_if_alone(board: Board, replicas: Replicas) -> None:
    """Knobs are learned by comparing replicas."""
    if len(board) and replicas.count == 1:
        warnings.warn(
            "knobs are explored by several replicas, and there is one: training continues with every knob as it is. "
            "Start several with torchrun, and initialise the process group first",
            stacklevel=3,
        )


def common_facts(board: Board, gradients: Gradients, operations: Operations) -> dict[str, str]:
    """What replicas must agree about, whatever the scheduler."""
    if not isinstance(operations, Operations):
        raise TypeError(f"operations must be an hdet.Operations, but got {type(operations).__name__}")
    facts = {"gradients": gradients, "probe": str(board.probe is not None), "operations": str(operations)}
    return facts | {f"knob {k.name}": k.facts() for k in board}
