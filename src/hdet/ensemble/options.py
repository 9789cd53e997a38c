"""How replicas differ, and how they are averaged: :class:`Ensemble`, which AutoLR and OneCycleAutoLR take."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import as_int, number, require, require_one_of, shown
from hdet.ensemble.averaging import Apart, StatePolicy
from hdet.ensemble.controllers import JointController
from hdet.ensemble.knobs import Knob, LearningRate
from hdet.ensemble.knobs.knob_set import KnobSet
from hdet.ensemble.outer import OuterName, OuterStep, outer_step
from hdet.ensemble.signals import LossSignal, ProbeSignal
from hdet.options import Options
from hdet.plan import Gradients, Members, Plan, SignalName
from hdet.policy.steering import NO_PANEL, Panel, Steering
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import mesh_groups
from hdet.signals.base import Signal
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights, identity_of

Assignment = Literal["balanced", "permutation"]


@dataclass(frozen=True)
class Averaging(Options):
    """How replicas are averaged; passed as ``averaging=``.

    Attributes:
        outer: what becomes of the mean at a converge: ``"mean"``, ``"fittest"``, ``"grawa"``, ``"nesterov"``,
            ``"elastic"`` or a step of :mod:`hdet.ensemble.outer`. ``"elastic"`` leaves replicas apart: it needs
            ``gradients="local"`` and equal learning rates, and undoes no rounds.
        optimizer_state: what becomes of the optimizers' state at a converge. ``"keep"``: each replica keeps its own,
            and a checkpoint holds that of the rank that writes it: a resumed run is the uninterrupted one only if every
            rank saves and loads its own optimizer. ``"average"`` costs as much communication as the weights for each
            moment, and one rank's checkpoint is enough. ``"reset"`` clears it.
        slow_share: warn once when three converges in a row take more than this share of their rounds, and a second.

    Example:
        >>> from hdet import Averaging
        >>> Averaging(outer="nesterov").facts()["outer"]
        'Nesterov(lr=0.7, momentum=0.9)'
    """

    outer: OuterStep | OuterName = "mean"
    optimizer_state: StatePolicy = "keep"
    slow_share: float = 0.1

    def __post_init__(self) -> None:
        self.make_outer()
        require_one_of("optimizer_state", self.optimizer_state, "average", "keep", "reset")
        require(number(self.slow_share) > 0, "slow_share", "a finite number > 0", self.slow_share)

    def make_outer(self) -> OuterStep:
        """The outer step of one run."""
        return outer_step(self.outer)

    def facts(self) -> dict[str, str]:
        return super().facts() | {"outer": repr(self.make_outer())}


@dataclass(frozen=True)
class Ensemble:
    """How replicas differ; passed to AutoLR and OneCycleAutoLR as ``ensemble=``.

    Attributes:
        spread: alpha in [0, 1) of the learning rates' fan-out (Eq. 1). Above 0, AutoLR compares the replicas' losses
            instead of reading the slope along its own path. OneCycleAutoLR has it as ``ensemble_lr_spread_ratio``.
        knobs: of :mod:`hdet.ensemble.knobs`, to explore beside the learning rate.
        gradients: ``"shared"``: averaged in every step, as DistributedDataParallel does. ``"local"``: not at all inside
            a round, which cuts communication by a factor of T; replicas then see the effect of every knob.
        averaging: how replicas are averaged.
        assignment: how replicas share out the values of several knobs: ``"balanced"``, as orthogonal as their number
            allows, or ``"permutation"``, the paper's independent permutations.
        seed: of the private permutations. The global random state is never touched.

    Example:
        >>> from hdet.ensemble import Ensemble
        >>> Ensemble(spread=0.1)
        Ensemble(spread=0.1)
    """

    spread: float = 0.0
    knobs: Sequence[Knob] = ()
    gradients: Gradients = "shared"
    averaging: Averaging = Averaging()
    assignment: Assignment = "balanced"
    seed: int = 0

    def __repr__(self) -> str:
        """What is not the default."""
        default = {name: field.default for name, field in self.__dataclass_fields__.items()}
        given = {name: value for name, value in vars(self).items() if value != default[name]}
        return f"Ensemble({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __post_init__(self) -> None:
        require(0 <= number(self.spread) < 1, "spread", "in [0, 1)", self.spread)
        check_knobs(self.knobs)
        if any(isinstance(knob, LearningRate) for knob in self.knobs):
            raise ValueError(
                "knobs must not contain LearningRate here: the scheduler explores the learning rate itself"
            )
        require_one_of("gradients", self.gradients, "shared", "local")
        if not isinstance(self.averaging, Averaging):
            raise TypeError(f"averaging must be an hdet.Averaging, but got {type(self.averaging).__name__}")
        require_one_of("assignment", self.assignment, "balanced", "permutation")
        require(as_int(self.seed) >= 0, "seed", "an integer >= 0", self.seed)

    def members(self, *, spread: float | None = None, alone: str = "") -> Differing:
        """Replicas that differ beside a schedule, for one run; see :class:`Differing` for the arguments."""
        if self.gradients == "shared":
            reason = 'with a schedule it needs replicas that train on gradients of their own; pass gradients="local"'
            self.averaging.refuse({"outer": reason, "optimizer_state": reason})
        return Differing(self, spread=spread, alone=alone)


def check_knobs(knobs: object) -> None:
    """TypeError unless it is a list of knobs."""
    if not isinstance(knobs, Sequence) or isinstance(knobs, (str, bytes)):
        raise TypeError(f"knobs must be a list of hdet.ensemble.knobs, but got {shown(knobs)}")
    for knob in knobs:
        if not isinstance(knob, (Knob, LearningRate)):
            raise TypeError(f"knobs must be made of hdet.ensemble.knobs, but got {type(knob).__name__}")


class Differing(Members):
    """Replicas that differ, as a plan knows them.

    Args:
        ensemble: how.
        spread: of the learning rates, where it is not that of the ensemble.
        alone: said where there is one replica and learning rates should differ.
    """

    def __init__(self, ensemble: Ensemble, *, spread: float | None = None, alone: str = "") -> None:
        self.ensemble = ensemble
        self.spread = ensemble.spread if spread is None else spread
        self.gradients: Gradients = ensemble.gradients
        self.seed = ensemble.seed
        self.knobs = KnobSet(ensemble.knobs)
        self.outer = ensemble.averaging.make_outer()
        self.wants_to_differ = self.spread > 0 or self.gradients == "local" or any(knob.spread for knob in self.knobs)
        self.undoes = not self.outer.leaves_apart
        self.panel = NO_PANEL
        self.slow_share = ensemble.averaging.slow_share
        self.alone = alone or (
            f"spread={self.spread:g} compares the losses of replicas, and there is one: training continues with the "
            "schedule as it is. Leave the spread out, or start several with torchrun"
        )

    def bind(self, plan: Plan) -> None:
        """Read where each knob starts. Raises where nothing could be learned about it."""
        self.knobs.bind(plan.optimizer, gradients=self.gradients, has_probe=plan.probe is not None)
        model = plan.model
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            buffers = {id(buffer) for buffer in model.buffers()}
            sent = [knob.name for knob in self.knobs if id(knob.read()) in buffers]
            if sent:
                raise ValueError(
                    f"knobs must not be buffers that DistributedDataParallel overwrites with rank 0's, but {sent} are; "
                    "construct it with forward_sync_buffers=False (broadcast_buffers=False in older versions)"
                )
        self.panel = self._panel()

    def _panel(self) -> Panel:
        """The knobs as numbers, with a controller of their own, beside a learning rate that has another."""
        if not len(self.knobs):
            return NO_PANEL
        controller = JointController() if any(knob.adapt for knob in self.knobs) else None
        return self.knobs.panel(controller, balanced=self.ensemble.assignment == "balanced")

    def facts(self) -> dict[str, str]:
        own = {name: str(getattr(self, name)) for name in ("spread", "gradients", "seed")}
        knobs = {f"knob {knob.name}": knob.facts() for knob in self.knobs}
        return {**own, "assignment": self.ensemble.assignment, **self.ensemble.averaging.facts(), **knobs}

    def check(self, plan: Plan, replicas: Replicas, signal: SignalName) -> None:
        if replicas.count == 1:
            self._warn_alone()
        elif self.wants_to_differ:
            _refuse_copies(plan.optimizer, plan.model)
            if self.gradients == "local":
                _refuse_shared_gradients(replicas, plan.optimizer)
        if self.outer.leaves_apart:
            self._check_leaving_apart(plan, replicas)

    def _warn_alone(self) -> None:
        """At the line that constructs the scheduler, which calls :meth:`Plan.make_run`, which calls :meth:`check`."""
        if len(self.knobs):
            warnings.warn(
                "knobs are explored by several replicas, and there is one: training continues with every knob as it "
                "is. Start several with torchrun, and initialise the process group first",
                stacklevel=5,
            )
        if self.spread > 0:
            warnings.warn(self.alone, stacklevel=5)

    def _check_leaving_apart(self, plan: Plan, replicas: Replicas) -> None:
        """Raise where something needs all replicas at one place after every converge."""
        if self.gradients != "local":
            raise ValueError(
                'outer="elastic" needs replicas that train on gradients of their own: pass gradients="local"; '
                f"got gradients={self.gradients!r}"
            )
        if self.spread > 0 or any(self.panel.spreads):
            raise ValueError(
                'outer="elastic" leaves replicas apart, where their losses cannot be compared and rounds cannot start '
                'on the line through an anchor: leave out what spreads, the knobs or the spread, or use outer="mean"; '
                f"got spread={self.spread!r}, knobs={[type(knob).__name__ for knob in self.knobs]}"
            )
        if plan.faults.max_rollbacks:
            raise ValueError(
                'outer="elastic" cannot undo a round: there is no one place to go back to; leave max_rollbacks out, or '
                f'use outer="mean"; got max_rollbacks={plan.faults.max_rollbacks!r}'
            )
        if replicas.parts or not replicas.holds_all_parameters:
            raise ValueError(
                'outer="elastic" needs every replica to hold all parameters, but they are sharded: use outer="mean" or '
                '"nesterov"'
            )

    def signals(self, plan: Plan, weights: Weights, signal: SignalName) -> list[Signal]:
        if plan.probe is not None:
            return [ProbeSignal(plan.probe, plan.model)]
        return [LossSignal()] if signal == "loss" or self.panel.controller is not None else []

    def replication(
        self, plan: Plan, weights: Weights, steering: Steering, *, anchor: Anchor | None, on_line: bool, step: int
    ) -> Apart:
        return Apart(
            plan.optimizer,
            weights,
            steering,
            self.knobs,
            differs=self.wants_to_differ and weights.replicas.count > 1,
            shared_gradients=self.gradients != "local",
            anchor=anchor,
            on_line=on_line,
            outer=self.outer,
            optimizer_state=self.ensemble.averaging.optimizer_state,
            step=step,
        )


def _refuse_copies(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Raise where an optimizer trains copies or shards of the model's parameters instead of the parameters."""
    own = {identity_of(p) for p in model.parameters()} if model is not None else set()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if own and trained and not any(identity_of(p) in own for p in trained):
        raise ValueError(
            f"the optimizer must train parameters of the model that is averaged, but none of its {len(trained)} "
            "tensors is one: they are copies or shards that a wrapper made (mixed precision, ZeRO), and a mean of "
            "those need not be a model. Let the optimizer train the model itself, or pass the model that it trains"
        )


def _refuse_shared_gradients(replicas: Replicas, optimizer: Optimizer) -> None:
    """With local gradients: raise where parameters lie on a mesh over which their gradients are averaged all the same.

    ``set_requires_all_reduce(False)`` of FSDP2 is no way out: it postpones the reduction, and there are no gradients
    until it has been made up for.
    """
    if replicas.group is None:
        return
    ranks = set(dist.get_process_group_ranks(replicas.group))
    for group in optimizer.param_groups:
        for p in group["params"]:
            for _, name, part in mesh_groups(p):
                if ranks.issuperset(dist.get_process_group_ranks(part)):
                    raise ValueError(
                        'gradients="local" needs replicas that do not share a mesh, but gradients are averaged over '
                        f"mesh dimension {name!r} in every step; shard each replica by itself, fully_shard(model, "
                        'mesh=mesh["shard"]), and pass process_group=mesh.get_group("replicate")'
                    )
