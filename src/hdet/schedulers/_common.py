"""What all three schedulers take: checked once, agreed on by the ranks, read by the builder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hdet.checks import require, require_one_of, shown, whole
from hdet.knobs import Knob, LearningRate
from hdet.options import Adapt, Averaging, Copies, Faults
from hdet.signals.probe import Probe

Gradients = Literal["shared", "local"]

MAX_LR = 1e30
"""Above all learning rates, and far enough below infinity to be multiplied by any scale."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Arguments of AutoLR, OneCycleAutoLR and Explorer alike; see there."""

    optimizer: Optimizer
    model: nn.Module | None
    interval: int
    total_steps: int | None
    knobs: Sequence[Knob | LearningRate]
    gradients: Gradients
    probe: Probe | None
    adapt: Adapt
    copies: Copies
    faults: Faults
    averaging: Averaging
    process_group: dist.ProcessGroup | None
    seed: int
    weight_decay: Any = None

    def __post_init__(self) -> None:
        _require_type("optimizer", self.optimizer, Optimizer, "a torch.optim.Optimizer")
        if self.model is not None:
            _require_type("model", self.model, nn.Module, "an nn.Module")
        if not isinstance(self.knobs, Sequence) or isinstance(self.knobs, (str, bytes)):
            raise TypeError(f"knobs must be a list of hdet.knobs, but got {shown(self.knobs)}")
        for knob in self.knobs:
            if not isinstance(knob, (Knob, LearningRate)):
                raise TypeError(f"knobs must be made of hdet.knobs, but got {type(knob).__name__}")
        if self.process_group is not None and dist.is_available():
            _require_type("process_group", self.process_group, dist.ProcessGroup, "a torch.distributed.ProcessGroup")
        require(whole(self.interval) >= 1, "interval", "an integer >= 1", self.interval)
        require_total_steps(self.total_steps)
        require(whole(self.seed) >= 0, "seed", "an integer >= 0", self.seed)
        require_one_of("gradients", self.gradients, "shared", "local")
        if self.probe is not None and not callable(self.probe):
            raise TypeError(f"probe must be a function that returns a loss, but got {type(self.probe).__name__}")
        if self.model is None and (self.probe is not None or self.gradients == "local"):
            which = "probe=" if self.probe is not None else 'gradients="local"'
            raise ValueError(f"{which} needs model=, the one that is trained, wrapped as it is")
        for name, kind in (("adapt", Adapt), ("copies", Copies), ("faults", Faults), ("averaging", Averaging)):
            _require_type(name, getattr(self, name), kind, f"an hdet.{kind.__name__}")

    @property
    def start_steps(self) -> int:
        """Steps before base values may move."""
        given = self.adapt.start_steps
        return (self.total_steps or 0) // 50 if given is None else given

    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        own = {name: str(getattr(self, name)) for name in ("interval", "total_steps", "gradients", "seed")}
        groups = (self.adapt, self.copies, self.faults, self.averaging)
        facts = own | {"probe": str(self.probe is not None), "weight_decay": str(self.weight_decay)}
        return facts | {name: fact for group in groups for name, fact in group.facts().items()}


def require_total_steps(value: Any, name: str = "total_steps") -> None:
    """ValueError unless it is None or a number of steps."""
    require(value is None or whole(value) >= 1, name, "an integer >= 1", value)


def _require_type(name: str, value: Any, kind: type, said: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {said}, but got {type(value).__name__}")
