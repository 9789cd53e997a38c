"""All of torch's schedules, and some of a user's, by name: what AutoLR may be put around."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

Build = Callable[[Optimizer], LRScheduler]


class InverseRoot:
    """A callable with a state of its own: a negative number, a list that grows, one that reaches 0, one that changes
    its type."""

    def __init__(self, exponent: float = -0.5) -> None:
        self.exponent = exponent
        self.seen: list[int] = []
        self.left = 3.0
        self.kind: Any = None

    def __call__(self, step: int) -> float:
        self.seen.append(step)
        self.left = max(self.left - 1.0, 0.0)
        self.kind = "late" if step > 3 else step
        return float((step + 1) ** self.exponent) * (1 + self.left) * (1 + 0.01 * len(self.seen))


class Wandering(LRScheduler):
    """A user's own schedule, with attributes that no schedule of torch's has."""

    late = False

    def __init__(self, optimizer: Optimizer, drift: float = -0.1) -> None:
        self.drift = drift
        self.notes: dict[Any, Any] = {}
        self.phase: Any = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.notes[self.last_epoch] = [self.last_epoch]
        self.phase = None if self.last_epoch % 3 == 2 else self.last_epoch * self.drift
        if self.last_epoch > 4:
            self.late = True
        bonus = len(self.notes) * (2.0 if self.late else 1.0)
        return [base * math.exp(self.drift * self.last_epoch) * bonus for base in self.base_lrs]


class Drifting(LRScheduler):
    """A user's own schedule, from the group's last value."""

    def get_lr(self) -> list[Any]:
        factor = 1.0 if self.last_epoch == 0 else 1.02 if self.last_epoch < 5 else 0.97
        return [group["lr"] * factor for group in self.optimizer.param_groups]


class OddCount(StepLR):
    """A subclass of torch's that counts in its own way."""

    def step(self, epoch: int | None = None) -> None:
        super().step()
        self.last_epoch += 1


def lambda_of_state(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, [InverseRoot() for _ in optimizer.param_groups])


LEAVES: dict[str, Build] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR below 0": lambda o: LambdaLR(o, lambda step: 1 - step / 5),
    "LambdaLR object": lambda_of_state,
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.95 if step % 2 else 1.02),
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 5, 5], gamma=0.3),
    "ConstantLR": lambda o: ConstantLR(o, 0.25, total_iters=3),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 9, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 2, T_mult=2, eta_min=1e-4),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2, step_size_down=3, mode="triangular2"),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.2, 40, three_phase=True),
    "LambdaLR of each group": lambda o: LambdaLR(o, [lambda step: 0.9**step, lambda step: 0.5**step]),
    "Wandering": Wandering,
    "Drifting": Drifting,
}
NESTED: dict[str, Build] = {
    "SequentialLR": lambda o: SequentialLR(o, [LEAVES["LinearLR"](o), LEAVES["CosineAnnealingLR"](o)], [4]),
    "SequentialLR nested": lambda o: SequentialLR(
        o,
        [SequentialLR(o, [LEAVES["ConstantLR"](o), LEAVES["ExponentialLR"](o)], [3]), LEAVES["LambdaLR object"](o)],
        [6],
    ),
    "ChainedScheduler": lambda o: ChainedScheduler([LEAVES["ConstantLR"](o), LEAVES["ExponentialLR"](o)], o),
    "ChainedScheduler nested": lambda o: ChainedScheduler([LEAVES["MultiplicativeLR"](o), NESTED["SequentialLR"](o)]),
}
SCHEDULES = {**LEAVES, **NESTED}


def make_optimizer(seed: int = 0, lr: Any = 0.1) -> torch.optim.SGD:
    """Two groups, of which the second has a learning rate of its own."""
    torch.manual_seed(seed)
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.randn(3))]},
        {"params": [nn.Parameter(torch.randn(2))], "lr": lr / 2},
    ]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def take_step(optimizer: Optimizer, scheduler: Any, *, loss: bool = False) -> list[float]:
    """A step of training; the learning rates it leaves."""
    optimizer.zero_grad()
    value = torch.stack([p.square().sum() for group in optimizer.param_groups for p in group["params"]]).sum()
    torch.autograd.backward(value)
    optimizer.step()
    scheduler.step(*([value.detach()] if loss else []))
    return [float(group["lr"]) for group in optimizer.param_groups]
