"""Before a round loop is made: the knobs are bound, and the replicas found and agreed on what they train."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hdet.controllers import JointController
from hdet.knobs import Knob, LearningRate
from hdet.knobs.knob_set import KnobSet
from hdet.policy.panel import NO_PANEL, Panel
from hdet.replicas.find import find_replicas
from hdet.replicas.group import Replicas
from hdet.replicas.parameters import check_parameters, shape_digest, trained_parameters
from hdet.replicas.sharding import is_flat
from hdet.schedulers._common import Common


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


def refuse_with_schedule(common: Common) -> None:
    """Raise where replicas with a schedule share gradients, and something else than their mean is asked for.

    And where a long horizon is: beside a learning rate that moves there is none.
    """
    common.adapt.refuse({"horizon": "a learning rate that is learned moves in every round; Explorer has it"})
    if common.gradients == "shared":
        reason = 'with a schedule it needs replicas that train on gradients of their own; pass gradients="local"'
        common.averaging.refuse({"outer": reason, "optimizer_state": reason})


def agree(
    common: Common,
    knobs: KnobSet,
    facts: Mapping[str, Any],
    *,
    spread: float,
    wait: bool = True,
    overwritten: Collection[str] = (),
) -> Replicas:
    """The replicas; an error on all of them where ranks pass different arguments or hold different parameters.

    And where a number in their param groups differs, unless it is one of those ``overwritten``, by a schedule.
    """
    if common.probe is not None and any(is_flat(p) for group in common.optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "probe= needs each rank's part of the gradient of a loss of its own, which FullyShardedDataParallel "
            "(FSDP1) gives for training steps alone; use fully_shard, or DDP"
        )
    apart = spread > 0 or common.gradients == "local" or any(knob.spread for knob in knobs)
    replicas = find_replicas(common.optimizer, common.process_group, spread=float(apart))
    parameters = trained_parameters(common.optimizer, common.model)
    check_parameters(parameters)
    sizes = f"{len(parameters)} tensors of {sum(p.numel() for p in parameters)} elements"
    groups = len(common.optimizer.param_groups)
    held = {"parameters": f"{sizes} in {groups} groups (shapes {shape_digest(parameters):08x})"}
    # Without a reason to wait a rank only states its facts; the others learn of it all the same.
    by_group = []
    for group in common.optimizer.param_groups:
        # Of a run that goes on apart, each rank may have loaded a learning rate of its own; its base is the same.
        own = {"lr"} if apart and "initial_lr" in group else set()
        of_group = {key: value for key, value in _settings(group).items() if key not in own.union(overwritten)}
        shapes = f"{len(group['params'])} tensors (shapes {shape_digest(group['params']):08x})"
        by_group.append({**of_group, "parameters": shapes})
    stated = {**facts, **{f"knob {knob.name}": knob.facts() for knob in knobs}, **held}
    replicas.agree(stated, by_group=by_group, wait=wait or apart)
    return replicas


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """The numbers, flags and words in a param group; of betas and the like each entry by itself."""
    found = {}
    for key, value in group.items():
        entries = {f"{key}[{i}]": each for i, each in enumerate(value)} if isinstance(value, tuple) else {key: value}
        for name, entry in entries.items():
            if isinstance(entry, Tensor) and entry.numel() == 1 and not entry.is_meta:
                entry = entry.item()
            if entry is None or isinstance(entry, (Number, str)):
                found[name] = str(entry)
    return found


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
