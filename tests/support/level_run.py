"""A small run that finds its learning rate: a regression with noise, all of it a function of step and rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet import AutoLR
from hdet.policy.level import Level
from job import Training
from native import gathered, held
from options import with_ensemble

TOTAL_STEPS = 400
LOW = 1e-8
"""Far below any learning rate that trains."""


def net(*, norm: bool = False) -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()


def make_optimizer(kind: str, parameters: Any, lr: float = LOW) -> Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if kind == "momentum" else 0.0)


class Run(Training):
    """A model in training.

    Args:
        kind: of optimizer.
        norm: with a BatchNorm.
        named: whether AutoLR is told of the model.
        model: instead of :func:`net`; ``forward`` is what is called.
        optimizer: instead of a new one.
        place: which part of the batch this process has, of how many.
        options: of AutoLR, by their own names.
    """

    scheduler: AutoLR

    def __init__(
        self,
        kind: str = "sgd",
        *,
        lr: float = LOW,
        norm: bool = False,
        named: bool = False,
        model: nn.Module | None = None,
        forward: Any = None,
        optimizer: Optimizer | None = None,
        schedule: Any = None,
        place: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> None:
        self.model = net(norm=norm) if model is None else model
        self.forward = self.model if forward is None else forward
        self.optimizer = make_optimizer(kind, self.model.parameters(), lr) if optimizer is None else optimizer
        self.place = place
        if schedule is None:
            options = {"total_steps": TOTAL_STEPS, **options}
        self.scheduler = AutoLR(
            self.optimizer if schedule is None else schedule(self.optimizer),
            model=self.model if named else None,
            **with_ensemble(**options),
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.scheduler.last_epoch)
        x = torch.randn(24, 3, generator=g, dtype=torch.float64)
        y = torch.sin(x.sum(1, keepdim=True)) + 2 + 0.1 * torch.randn(24, 1, generator=g, dtype=torch.float64)
        index, count = self.place
        return x[index::count], y[index::count]

    def loss(self) -> Tensor:
        x, y = self.batch()
        return nn.functional.mse_loss(self.forward(x), y)

    @property
    def searching(self) -> bool:
        return self.scheduler._run.policy.searching

    @property
    def level(self) -> Level:
        level = self.scheduler._run.policy.level
        assert level is not None
        return level

    def advance(self, until: int) -> list[tuple[list[float], list[float]]]:
        """Learning rates and weights after each step."""
        lrs, parts = [], []
        while self.scheduler.last_epoch < until:
            self.step()
            lrs.append(self.lrs())
            parts.append(held(self.model))
        return list(zip(lrs, gathered(self.model, parts), strict=True))

    def everything(self) -> tuple[Any, Any]:
        """Weights, buffers and optimizer state, as they are now."""
        return copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()["state"])

    def saved(self) -> dict[str, Any]:
        """Through a file."""
        file = io.BytesIO()
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def load(self, saved: Any, *, scheduler_first: bool = False) -> None:
        super().load(tuple(saved.values()), scheduler_first=scheduler_first)


def same(first: Any, second: Any) -> bool:
    """Whether nested values are equal to the last bit."""
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
