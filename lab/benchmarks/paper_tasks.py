"""The tasks that the paper's claims are tested on, small enough for two cores or in full, and what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet_lab.tasks import load_task
from hdet_lab.tasks.base import Task
from hdet_lab.tasks.quadratic import QuadraticTask

SMALL: dict[str, dict[str, Any]] = {
    "shakespeare-gpt": {"context": 24, "batch_rows": 16, "width": 24, "num_layers": 2, "num_heads": 2,
                        "num_validation": 128},
    "feed": {"batch_rows": 128, "history": 8, "width": 8, "field_width": 4, "num_layers": 1, "num_test_days": 1},
    "fashion": {"batch_rows": 32, "widths": (4, 8, 8)},
    "quadratic": {},
}  # fmt: skip
STEPS = {"shakespeare-gpt": 240, "feed": 100, "fashion": 100, "quadratic": 300, "two-groups": 300}
FULL_STEPS = {"shakespeare-gpt": 600, "feed": 160, "fashion": 600, "quadratic": 1000}
LRS = {
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
    "sgd": (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0),
}


class TwoGroups(QuadraticTask):
    """The quadratic with its flat and its steep half as two param groups, each in need of its own learning rate."""

    def build(self, seed: int = 0) -> nn.Module:
        start = super().build(seed).theta.detach()  # type: ignore[operator]
        flat, steep = torch.tensor_split(start, 2)
        return _TwoParts(flat, steep)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        return {"flat": ["flat"], "steep": ["steep"]}


class _TwoParts(nn.Module):
    def __init__(self, flat: Tensor, steep: Tensor) -> None:
        super().__init__()
        self.flat, self.steep = nn.Parameter(flat.clone()), nn.Parameter(steep.clone())

    def forward(self) -> Tensor:
        return torch.cat([self.flat, self.steep])


class Later:
    """A task from a later step on: the second stage of a run does not see the batches of the first again."""

    def __init__(self, task: Task, first_step: int) -> None:
        self._task, self._first_step = task, first_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return self._task.rows(step + self._first_step, seed=seed)


def make_task(name: str, data: Path, *, full: bool) -> Task:
    """By name, small unless ``full``."""
    if name == "two-groups":
        return TwoGroups()
    return load_task(name, data, **({} if full else SMALL.get(name, {})))


def steps_of(name: str, *, full: bool) -> int:
    """How long a run of it is."""
    return (FULL_STEPS if full else STEPS).get(name, STEPS.get(name, 300))
