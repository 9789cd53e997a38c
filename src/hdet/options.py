"""Options of AutoLR, OneCycleAutoLR and Explorer that most runs leave alone, in three groups that check themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from hdet.checks import as_int, is_flag, number, require, require_one_of, shown
from hdet.controllers import Controller

AnchorChoice = Literal["start", "round"] | int
Groups = Literal["together", "each", "auto"]
Shape = Literal["free", "keep"]
OnFork = Literal["raise", "repair", "warn"]
Device = torch.device | str | None


class Options:
    """What the groups have in common."""

    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        return {name: str(value) for name, value in vars(self).items()}

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise where an option that ``reasons`` names differs from its default."""
        for each in fields(self):  # type: ignore[arg-type]
            name, value = each.name, getattr(self, each.name)
            if name in reasons and value is not each.default and value != each.default:
                raise ValueError(f"{name} must be left out: {reasons[name]}; got {name}={shown(value)}")


@dataclass(frozen=True)
class Adapt(Options):
    """How base values adapt; passed as ``adapt=``.

    Explorer refuses what it has no use for: it has no schedule to gate, and the groups of its learning rate are those
    of ``knobs.LearningRate``. OneCycleAutoLR has the paper's controller, and does not take this.

    Attributes:
        controller: what moves the base values; default a ``LevelController`` with the gradient signal, an
            ``EvidenceController`` where replicas compare losses, in Explorer a ``JointController``. A
            ``PaperController`` gives the paper's softmax.
        anchor: from where effects are measured: the ``"start"`` of the run, the last ``"round"``, or renewed every so
            many rounds. A copy of the weights.
        groups: one scale for all param groups (``"together"``), or one for ``"each"``; or, with the gradient signal,
            ``"auto"``: one level for all, from which a group parts as far as its slope differs from the others' beyond
            doubt.
        level: whether the run finds its first learning rate from the size of its updates (Eq. 16), while it warms up.
            Default at the start of a run, unless ``controller`` is given; a schedule's peak is then a hint, which is
            followed where it is within a factor of 8. With False learning rates start as they are given.
        shape: what becomes of the schedule's shape. ``"free"``: the scale moves until the final decay, and the learning
            rate goes its own way. ``"keep"``: one factor is found in the first fifth of the run (200 steps where its
            length is unknown); from there on the schedule is followed exactly, unless a round has to be undone.
            Default with the gradient signal ``"keep"`` where the schedule has steps or periods (StepLR, MultiStepLR,
            CyclicLR, CosineAnnealingWarmRestarts, and any around one of them), else ``"free"``; ``"free"`` where
            ``controller`` or ``level=False`` is given.
        bounds: the scale stays inside, relative to where it starts.
        act: False to only watch, in AutoLR: losses and gradients are read, and decided on, and ``history`` says what
            would have been done, but weights, gradients and learning rates stay those of the schedule, or of the
            optimizer where there is none, to the last bit. Decisions then do not see what they would have led to.

    Example:
        >>> from hdet import Adapt
        >>> Adapt(groups="each").facts()["groups"]
        'each'
    """

    controller: Controller | None = None
    anchor: AnchorChoice = "start"
    groups: Groups = "together"
    level: bool | None = None
    shape: Shape | None = None
    bounds: tuple[float, float] = (1e-12, 1e12)
    act: bool = True
    # For tests and benchmarks: steps before base values may move, and share of the run at its end in which they hold.
    _start_steps: int | None = field(default=None, repr=False)
    _hold_share: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        methods = [callable(getattr(self.controller, name, None)) for name in ("init", "update")]
        if self.controller is not None and (not all(methods) or isinstance(self.controller, type)):
            raise TypeError(f"controller must have the methods init and update, but got {shown(self.controller)}")
        anchored = self.anchor in ("start", "round") if isinstance(self.anchor, str) else as_int(self.anchor) >= 1
        require(anchored, "anchor", '"start", "round" or a number of rounds >= 1', self.anchor)
        require_one_of("groups", self.groups, "together", "each", "auto")
        require(self.level is None or is_flag(self.level), "level", "None, True or False", self.level)
        if self.shape is not None:
            require_one_of("shape", self.shape, "free", "keep")
        pair = self.bounds
        fine = isinstance(pair, (tuple, list)) and len(pair) == 2 and 0 < number(pair[0]) <= 1 <= number(pair[1])
        require(fine, "bounds", "a pair (low, high) with 0 < low <= 1 <= high < inf", pair)
        require(is_flag(self.act), "act", "True or False", self.act)

    def facts(self) -> dict[str, str]:
        return super().facts() | {"controller": type(self.controller).__name__}


@dataclass(frozen=True)
class Copies(Options):
    """Where copies of the weights live; passed as ``copies=``. Devices may differ from rank to rank.

    Attributes:
        anchor_device, anchor_dtype: where, and how precisely, the anchor is kept; default like the weights.
        anchor_share: of the entries of each tensor of 4096 or more that the anchor holds, in (0, 1]; the gradient
            signal, which needs it for a dot product only, estimates it from them. Default 1, and 1/16 in models of more
            than ten million parameters. With another signal it is 1. A checkpoint continues with the share it was saved
            with; one with whole anchors with any.
        snapshot_device: where the copies of weights and optimizer state are kept that a rollback returns to, after
            every round; default beside the weights, and for models of more than ten million parameters on an
            accelerator in the host's memory, every hundred steps or so. Name that, e.g. ``"cuda"``, to keep them there.
        best: keep the weights and buffers of the lowest loss that :meth:`AutoLR.evaluated` was given, in the host's
            memory and in checkpoints: as many bytes as the weights, of each rank its own shards. A final decay that
            begins early starts from them, and :meth:`AutoLR.restore_best` brings them back. A small model that
            memorises its data at once starts again from its first weights (:meth:`AutoLR.evaluated`).

    Example:
        >>> import torch
        >>> from hdet import Copies
        >>> Copies(anchor_device="cpu", anchor_dtype=torch.bfloat16).facts()
        {'anchor_dtype': 'torch.bfloat16', 'anchor_share': 'None', 'best': 'False'}
    """

    anchor_device: Device = None
    anchor_dtype: torch.dtype | None = None
    anchor_share: float | None = None
    snapshot_device: Device = None
    best: bool = False

    def __post_init__(self) -> None:
        require(is_flag(self.best), "best", "True or False", self.best)
        dtype = self.anchor_dtype
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise ValueError(
                f"anchor_dtype must be a floating-point torch.dtype of 16 bits or more, but got {shown(dtype)}"
            )
        fine = self.anchor_share is None or 0 < number(self.anchor_share) <= 1
        require(fine, "anchor_share", "None or in (0, 1]", self.anchor_share)
        for name in ("anchor_device", "snapshot_device"):
            device = getattr(self, name)
            require(device is None or _is_device(device), name, "a device of this machine", device)

    def facts(self) -> dict[str, str]:
        return {
            "anchor_dtype": str(self.anchor_dtype),
            "anchor_share": str(self.anchor_share),
            "best": str(self.best),
        }


@dataclass(frozen=True)
class Faults(Options):
    """What is done about faults; passed as ``faults=``.

    Attributes:
        max_rollbacks: how many broken rounds are undone; default 20, and none in OneCycleAutoLR. Ten healthy rounds
            give one back. With none left, base values hold still until one is, with a warning. As many in a row are an
            error. With 0 no round is looked at, which saves two copies of the weights and of the optimizer's state.
        quarantine: leave a replica out of a round's mean and controller, and restart it from the others' mean, when
            its loss is above the replicas' median by more than this many robust standard deviations (1.4826 times the
            median absolute deviation, of this round and of recent ones); None for never. 20 does not fire on healthy
            noise.
        skip_nonfinite: take the gradient out of a step when any of it is not finite, on the device and without
            waiting for it. One pass over the gradients in every step; where several ranks share gradients, which have
            to drop them together, also an all-reduce of one number in every step.
        on_fork: what is done where ranks that should hold equal weights do not, which is found at the end of a round
            by a checksum of their bits. ``"warn"``: a warning, once, with the ranks that differ and the first parameter
            in which they do; also for ranks that are meant to differ, as experts of their own do. ``"raise"``: an error
            on every rank with the same text; nothing has changed. ``"repair"``: the warning, and those ranks receive
            weights and optimizer state of one that most agree with; where as many agree as do not, of the lowest. The
            default is a warning: a loop that works must not end by what is noticed about it. On a cluster, where a
            fork is a device that computes or remembers wrongly, pass ``"raise"``: its gradients have gone into all
            ranks' weights, and a repair would go on with it.
        freeze_file: a path that is looked for when a round ends: once it exists on any rank, the scale holds still from
            there on, as by :meth:`AutoLR.freeze`. ``touch`` it to stop AutoLR, but not the training.

    Example:
        >>> from hdet import Faults
        >>> Faults(quarantine=20, freeze_file="freeze").on_fork
        'warn'
    """

    max_rollbacks: int | None = None
    quarantine: float | None = None
    skip_nonfinite: bool = False
    freeze_file: str | os.PathLike[str] | None = None
    on_fork: OnFork = "warn"

    def __post_init__(self) -> None:
        fine = self.max_rollbacks is None or as_int(self.max_rollbacks) >= 0
        require(fine, "max_rollbacks", "an integer >= 0", self.max_rollbacks)
        fine = self.quarantine is None or number(self.quarantine) > 1
        require(fine, "quarantine", "None or a finite number > 1", self.quarantine)
        require(is_flag(self.skip_nonfinite), "skip_nonfinite", "True or False", self.skip_nonfinite)
        fine = self.freeze_file is None or isinstance(self.freeze_file, (str, os.PathLike))
        require(fine, "freeze_file", "None or a path", self.freeze_file)
        require_one_of("on_fork", self.on_fork, "raise", "repair", "warn")

    def facts(self) -> dict[str, str]:
        return {name: fact for name, fact in super().facts().items() if name != "freeze_file"}


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, (str, torch.device)) and torch.empty(1, device=value).item() is not None
    except Exception:  # torch raises several types for one that is not there
        return False
