"""Arguments, resolved once: a :class:`Plan` has checked them, finds the replicas, and makes the run.

What does not go together is said here, in ``Plan.__post_init__`` and :meth:`Plan._check`; what concerns replicas that
differ, in ``hdet.ensemble``, which a plan knows as its ``members``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.beside import is_muon
from hdet.checks import as_int, number, require
from hdet.controllers import Controller, EvidenceController, LevelController
from hdet.controllers.groups import GroupController
from hdet.options import Adapt, AnchorChoice, Copies, Faults, Groups
from hdet.policy.level import Level
from hdet.policy.rollback import Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import NO_PANEL, Steering
from hdet.policy.timing import default_interval, hold_start, keep_start
from hdet.replicas.group import Replicas, find_replicas
from hdet.replicas.sharding import is_flat, sharding
from hdet.replication import Equal
from hdet.run import LearningRates, Run
from hdet.schedule import DECAY_SHARE
from hdet.signals.base import Signal
from hdet.signals.decay import DecayLearner
from hdet.signals.gradient import GradientSignal, default_sample_every
from hdet.signals.held_out import HeldOutGradient, Probe
from hdet.signals.update_size import UpdateSize
from hdet.weights.anchor import Anchor, stride_of
from hdet.weights.averaged import Weights, check_parameters, shape_digest, trained_parameters
from hdet.weights.snapshot import Best, Snapshot, Undo, host_if_large

Gradients = Literal["shared", "local"]
SignalName = Literal["loss", "gradient"]
WeightDecayChoice = Literal["learn"] | tuple[float, float]

MAX_ROLLBACKS = 20
HOST_COPY_STEPS = 100
"""At least so many steps lie between two copies to the host, which would otherwise cost some hundredths of the time."""


class Members:
    """What a plan knows of its replicas: they hold the same weights. Also the base of those that differ.

    Attributes:
        spread: alpha of the learning rates' fan-out.
        gradients: whether replicas share them.
        seed: of the permutations.
        wants_to_differ: whether replicas are to differ, if there are several.
        undoes: whether a broken round can be undone.
        panel: the knobs beside the learning rates, as numbers.
        slow_share: of a round, above which a converge is slow.
    """

    spread: float = 0.0
    gradients: Gradients = "shared"
    seed = 0
    wants_to_differ = False
    undoes = True
    panel = NO_PANEL
    slow_share = 0.1

    def bind(self, plan: Plan) -> None:
        """Read what replicas differ in; to be called before anything else."""

    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        return {}

    def check(self, plan: Plan, replicas: Replicas, signal: SignalName) -> None:
        """Raise where what was asked for cannot be had together."""

    def signals(self, plan: Plan, weights: Weights, signal: SignalName) -> list[Signal]:
        """What compares replicas."""
        return []

    def replication(
        self, plan: Plan, weights: Weights, steering: Steering, *, anchor: Anchor | None, on_line: bool, step: int
    ) -> Equal:
        """What becomes of their weights; ``on_line``: rounds start on the line through the anchor (Eq. 11)."""
        return Equal(plan.optimizer, weights)


class HasMembers(Protocol):
    """What ``ensemble=`` of a scheduler takes: an ``hdet.ensemble.Ensemble``."""

    def members(self) -> Members:
        """What a plan needs to know of it, for one run."""


REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Rprop: "Rprop uses it in its first step alone: no schedule acts on it",
    torch.optim.LBFGS: "LBFGS takes several, of lengths that it finds by itself; train with it alone, with "
    "line_search_fn='strong_wolfe'",
    torch.optim.ASGD: "ASGD uses the one of the step before, and a decay of its own; use SGD, and "
    "torch.optim.swa_utils.AveragedModel for the average",
}
"""Optimizers whose steps no schedule can set, and why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What AutoLR, OneCycleAutoLR and Explorer are given alike; see there.

    Attributes:
        members: what the arguments say about the replicas.
    """

    optimizer: Optimizer
    model: nn.Module | None
    interval: int
    total_steps: int | None
    probe: Probe | None
    adapt: Adapt
    copies: Copies
    faults: Faults
    process_group: dist.ProcessGroup | None
    weight_decay: WeightDecayChoice | None = None
    members: Members = field(default_factory=Members)

    def __post_init__(self) -> None:
        _require_type("optimizer", self.optimizer, Optimizer, "a torch.optim.Optimizer")
        if not hasattr(self.optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizer must have the hooks of a torch.optim.Optimizer, but {type(self.optimizer).__name__} is a "
                "wrapper without them; pass the optimizer inside it, which is what was given to prepare() of Accelerate"
            )
        for refused, why in REFUSED.items():
            if isinstance(self.optimizer, refused):
                raise ValueError(f"optimizer must take one step of its learning rate in each call, but {why}")
        if self.model is not None:
            _require_type("model", self.model, nn.Module, "an nn.Module")
        if self.process_group is not None and dist.is_available():
            _require_type("process_group", self.process_group, dist.ProcessGroup, "a torch.distributed.ProcessGroup")
        require(as_int(self.interval) >= 1, "interval", "an integer >= 1", self.interval)
        require_total_steps(self.total_steps)
        if self.probe is not None and not callable(self.probe):
            raise TypeError(f"probe must be a function that returns a loss, but got {type(self.probe).__name__}")
        if self.model is None and (self.probe is not None or self.members.gradients == "local"):
            which = "probe=" if self.probe is not None else 'gradients="local"'
            raise ValueError(f"{which} needs model=, the one that is trained, wrapped as it is")
        for name, kind in (("adapt", Adapt), ("copies", Copies), ("faults", Faults)):
            _require_type(name, getattr(self, name), kind, f"an hdet.{kind.__name__}")
        if not self.adapt.act and (self.weight_decay is not None or type(self.members) is not Members):
            which = "weight_decay=" if self.weight_decay is not None else "ensemble="
            raise ValueError(f"{which} must be left out with act=False, which changes nothing of the training")

    @property
    def start_steps(self) -> int:
        """Steps before base values may move."""
        given = self.adapt._start_steps
        return (self.total_steps or 0) // 50 if given is None else given

    # -- the replicas -------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        own = {name: str(getattr(self, name)) for name in ("interval", "total_steps", "weight_decay")}
        facts = own | {"probe": str(self.probe is not None)} | self.members.facts()
        return facts | {
            n: fact for group in (self.adapt, self.copies, self.faults) for n, fact in group.facts().items()
        }

    def find_replicas(
        self, facts: Mapping[str, Any], *, wait: bool = True, overwritten: Collection[str] = ()
    ) -> Replicas:
        """The replicas; an error on all of them where ranks pass different arguments or hold different parameters.

        And where a number in their param groups differs, unless it is one of those ``overwritten``, by a schedule.
        Without ``wait``, a rank only states its facts; the others learn of it all the same.
        """
        groups = self.optimizer.param_groups
        if self.probe is not None and any(is_flat(p) for group in groups for p in group["params"]):
            raise ValueError(
                "probe= needs each rank's part of the gradient of a loss of its own, which FullyShardedDataParallel "
                "(FSDP1) gives for training steps alone; use fully_shard, or DDP"
            )
        differ = self.members.wants_to_differ
        replicas = find_replicas(self.optimizer, self.process_group, spread=float(differ))
        parameters = trained_parameters(self.optimizer, self.model)
        check_parameters(parameters)
        sizes = f"{len(parameters)} tensors of {sum(p.numel() for p in parameters)} elements"
        held = {"parameters": f"{sizes} in {len(groups)} groups (shapes {shape_digest(parameters):08x})"}
        by_group = []
        for group in groups:
            # Of a run that goes on with replicas that differ, each rank may have loaded a learning rate of its own; its
            # base is the same.
            own = {"lr"} if differ and "initial_lr" in group else set()
            of_group = {key: value for key, value in _settings(group).items() if key not in own.union(overwritten)}
            shapes = f"{len(group['params'])} tensors (shapes {shape_digest(group['params']):08x})"
            by_group.append({**of_group, "parameters": shapes})
        replicas.agree({**facts, **held}, by_group=by_group, wait=wait or differ)
        return replicas

    # -- the run ------------------------------------------------------------------------------------------------

    def make_run(
        self,
        replicas: Replicas,
        *,
        controller: Controller | None,
        acting: tuple[float, float],
        step: int,
        groups: Groups,
        signal: SignalName = "loss",
        anchor: AnchorChoice | None = None,
        level: Level | None = None,
        rollback: bool = True,
        bounds: tuple[float, float] | None = None,
    ) -> Run:
        """The round loop.

        Whoever calls it has filled in the defaults of :class:`~hdet.Adapt` that depend on the signal.

        Args:
            replicas: who trains.
            controller: what moves the learning rates; None to hold them.
            acting: base values move at rounds that end after the first of these steps, and up to the second.
            step: optimizer steps already taken.
            groups: which param groups share a scale.
            signal: what the learning rates learn from.
            anchor: where it is not that of ``adapt``.
            bounds: likewise.
            level: finds the first learning rate.
            rollback: whether broken rounds are undone where ``faults`` do not say.
        """
        optimizer, adapt, faults, members = self.optimizer, self.adapt, self.faults, self.members
        anchor = anchor or adapt.anchor
        together = groups == "together"
        knob_of_group = [0 if together else k for k in range(len(optimizer.param_groups))]
        differs = members.wants_to_differ and replicas.count > 1
        self._check(signal)
        members.check(self, replicas, signal)
        spread = members.spread if differs else 0.0
        # Measuring from the last converge needs a copy for the gradient signal only: fan-out starts there anyway.
        kept = None
        if signal == "gradient" or (anchor != "round" and spread > 0):
            stride = stride_of(self.copies.anchor_share, optimizer) if spread == 0 else 1
            kept = Anchor(device=self.copies.anchor_device, dtype=self.copies.anchor_dtype, stride=stride)
        weights = Weights(optimizer, self.model, replicas)
        signals = self._make_signals(weights, signal, kept, knob_of_group, total_slope=groups == "auto")
        shows = spread > 0 or any(not each.compares for each in signals)
        if level is not None and level.hint and not shows:
            level = None  # the schedule as it is
        if level is not None:
            signals.append(UpdateSize.of(weights))
        steering = Steering(
            num_knobs=max(knob_of_group) + 1,
            num_replicas=replicas.count if differs else 1,
            spread=spread,
            controller=GroupController(controller) if groups == "auto" and controller is not None else controller,
            scale_bounds=bounds or adapt.bounds,
            seed=members.seed,
            round_index=step // self.interval,
            panel=members.panel,
        )
        max_rollbacks = MAX_ROLLBACKS * rollback if faults.max_rollbacks is None else faults.max_rollbacks
        undoes = max_rollbacks > 0 and members.undoes and (differs or shows)
        policy = RoundPolicy(
            steering,
            interval=self.interval,
            acting=acting,
            rollback=Rollback(max_rollbacks, interval=self.interval) if undoes else None,
            level=level,
            quarantine=faults.quarantine,
            anchored=kept is not None,
            anchor_rounds={"start": None, "round": 1}.get(anchor) if isinstance(anchor, str) else anchor,
            repairable=replicas.holds_all_parameters,
            acts=adapt.act,
        )
        if self.copies.best and self.probe is None and level is not None and not level.hint:
            captured = any(group.get("capturable") for group in optimizer.param_groups)  # a graph holds on to the state
            is_whole = kept is not None and kept.stride == 1 and kept.dtype is None and anchor == "start"
            policy.has_first = is_whole and not captured
        on_line = kept is not None and spread > 0
        replication = members.replication(self, weights, steering, anchor=kept, on_line=on_line, step=step)
        lrs = LearningRates(
            optimizer, steering, index=replication.index, knob_of_group=knob_of_group, one_scale=together,
            acts=adapt.act,
        )  # fmt: skip
        replication.write_knobs()
        return Run(
            optimizer,
            replication,
            policy,
            signals,
            lrs,
            anchor=kept,
            undo=self._make_undo(weights) if undoes and adapt.act else None,
            slow_share=members.slow_share,
            step=step,
            skip_nonfinite=faults.skip_nonfinite and adapt.act,
            freeze_file=faults.freeze_file,
            on_fork=faults.on_fork if adapt.act else "warn",
            best=Best(weights) if self.copies.best else None,
        )

    def _make_signals(
        self,
        weights: Weights,
        signal: SignalName,
        anchor: Anchor | None,
        knob_of_group: list[int],
        *,
        total_slope: bool,
    ) -> list[Signal]:
        """What rounds will show: for the learning rate, and for what replicas differ in."""
        if signal != "gradient":
            return self.members.signals(self, weights, signal)
        assert anchor is not None
        every = default_sample_every(self.optimizer, self.interval)
        num_ranks = weights.replicas.count * weights.replicas.num_parts
        if self.probe is None or len(self.members.panel):
            gradient = GradientSignal(
                anchor, knob_of_group, sample_every=every, num_ranks=num_ranks, total_slope=total_slope
            )
            return [gradient, *self.members.signals(self, weights, signal)]
        assert self.model is not None  # nothing but the learning rate to ask held-out data about
        return [
            HeldOutGradient(
                anchor,
                knob_of_group,
                sample_every=every,
                num_ranks=num_ranks,
                probe=self.probe,
                model=self.model,
                decay=self._make_decay(anchor),
                total_slope=total_slope,
            )
        ]

    def _make_decay(self, anchor: Anchor) -> DecayLearner | None:
        """What learns the weight decay; None where it stays as it is."""
        given = self.weight_decay
        if given is None:
            return None
        return DecayLearner(
            self.optimizer,
            bounds=None if given == "learn" else (float(given[0]), float(given[1])),
            stride=anchor.stride,
            every=min(default_sample_every(self.optimizer, self.interval), 8),
        )

    def _make_undo(self, weights: Weights) -> Undo:
        kept_on, every = self.copies.snapshot_device, 1
        if kept_on is None and (kept_on := host_if_large(self.optimizer)) is not None:
            every = math.ceil(HOST_COPY_STEPS / self.interval)
        return Undo(weights, self.optimizer, Snapshot(kept_on), every=every)

    def _check(self, signal: SignalName) -> None:
        """Raise where what was asked for cannot be had together."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.faults.skip_nonfinite and any(
            sharding(p) is not None or type(p).__name__ == "FlatParameter" for p in parameters
        ):
            raise ValueError(
                "skip_nonfinite needs every rank to see whole gradients, but parameters are sharded: one shard would "
                "skip a step that the others take; leave it out, rollback undoes such a round"
            )
        share = self.copies.anchor_share
        if share is not None and share < 1 and (signal != "gradient" or self.members.spread > 0):
            raise ValueError(
                "anchor_share below 1 needs the gradient signal without a spread, which estimates a sum from a share "
                "of the entries; to place replicas on the line through the anchor takes all of them. Leave it out; "
                f"got anchor_share={share}"
            )
        if self.copies.best and self.members.wants_to_differ:
            raise ValueError(
                "best=True needs replicas that hold the same weights; leave out the ensemble, or best=True"
            )
        self._check_weight_decay(signal)

    def _check_weight_decay(self, signal: SignalName) -> None:
        given: Any = self.weight_decay
        if given is None:
            return
        pair = isinstance(given, (tuple, list)) and len(given) == 2 and 0 < number(given[0]) < number(given[1])
        rule = 'None, "learn" or a pair (low, high) with 0 < low < high'
        require(given == "learn" or pair, "weight_decay", rule, given)
        need = ""
        if self.probe is None:
            need = "probe=, a loss on held-out data: the training loss always asks for less"
        elif signal != "gradient":
            need = "the gradient signal; where replicas compare losses, explore knobs.WeightDecay()"
        elif len(self.members.panel):
            need = "knobs= to be left out, which replicas explore; knobs.WeightDecay is one of them"
        elif self.members.gradients == "local":
            need = 'gradients="shared": replicas that train on their own have different derivatives'
        if need:
            raise ValueError(f"weight_decay={given!r} needs {need}")


# -- what AutoLR does where it is not told --------------------------------------------------------------------------


def make_controller(signal: SignalName, **settings: Any) -> LevelController | EvidenceController:
    """The controller that goes with a signal, unless told otherwise.

    Losses of replicas have far larger standard errors than the first-order signal, and say nothing of elasticity.
    """
    return LevelController(**settings) if signal == "gradient" else EvidenceController(**settings)


def interval_for(signal: SignalName, total_steps: Any) -> int:
    """T where none is given."""
    total = None if total_steps is None else as_int(total_steps)
    if signal == "gradient":
        return default_interval(total)
    return 100 if total is None else max(1, min(1000, total // 100))


def auto_settings(
    plan: Plan,
    signal: SignalName,
    *,
    step: int,
    shape: Sequence[float] = (),
    lr_given: bool = True,
    first_lr: float = 1.0,
    has_steps: bool = False,
) -> dict[str, Any]:
    """The arguments of :meth:`Plan.make_run` that make AutoLR out of a schedule.

    Args:
        plan: what all schedulers take.
        signal: what it learns from.
        step: optimizer steps already taken.
        shape: of the schedule, as :func:`~hdet.policy.timing.hold_start` takes it.
        lr_given: whether learning rate and schedule mean anything.
        first_lr: of the first param group, as it was given.
        has_steps: whether the schedule has steps or periods.
    """
    adapt, total = plan.adapt, plan.total_steps
    if adapt.groups == "auto" and signal != "gradient":
        raise ValueError('groups="auto" needs the gradient signal: leave out the spread, or pass groups="each"')
    level = _level(plan, step=step, shape=shape, lr_given=lr_given, first_lr=first_lr)
    start = 0 if level is not None and adapt._start_steps is None else plan.start_steps
    told = adapt.level is False or adapt.controller is not None or adapt._hold_share is not None
    kept = signal == "gradient" and not told and has_steps
    if adapt.shape == "keep" or (adapt.shape is None and kept):
        hold = keep_start(total)
    elif total is None:
        hold = math.inf
    elif adapt._hold_share is None and signal == "gradient":
        hold = hold_start(total, shape) if lr_given else (1 - DECAY_SHARE) * total
    else:
        hold = (1 - (0.05 if adapt._hold_share is None else adapt._hold_share)) * total
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


def _level(plan: Plan, *, step: int, shape: Sequence[float], lr_given: bool, first_lr: float) -> Level | None:
    if not finds_level(plan.adapt, step=step, lr_given=lr_given):
        return None
    watched, spectral = plan.probe is not None, is_muon(plan.optimizer)
    if not lr_given:
        return Level(plan.total_steps, given=first_lr, watched=watched, spectral=spectral)
    peak = max(shape) if len(shape) else first_lr
    if not peak > 0:  # nothing to compare with
        return None
    warms_up = len(shape) > 0 and shape[0] < peak / 2
    return Level(plan.total_steps, peak=peak, hint=True, warms_up=warms_up, watched=watched, spectral=spectral)


# -- checks ---------------------------------------------------------------------------------------------------------


def require_total_steps(value: Any, name: str = "total_steps") -> None:
    """ValueError unless it is None or a number of steps."""
    require(value is None or as_int(value) >= 1, name, "an integer >= 1", value)


def _require_type(name: str, value: Any, kind: type, said: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {said}, but got {type(value).__name__}")


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
