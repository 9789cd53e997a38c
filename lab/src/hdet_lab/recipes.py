"""The names that the lab's commands take, and what they stand for: methods, schedules, optimizers, learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hdet.checks import FloatArray
from hdet.schedule import constant_then_linear
from hdet_lab.stacked.optim import SGD, Adam, Lion, Muon, StackedOptimizer, outer_matrices
from hdet_lab.tasks.base import Task, param_groups

TrainMethod = Literal["fixed", "paper", "gradient", "loss"]
"""On real processes: the schedule alone, the paper's controller, AutoLR with either signal."""
SweepMethod = Literal[TrainMethod, "local", "spread", "anchored"]
"""On the stacked engine, which also averages without a controller."""
BaselineMethod = Literal["prodigy", "d-adaptation", "mechanic", "dog", "schedule-free"]
"""Optimizers from other packages that set their own step size."""
CompareMethod = Literal[TrainMethod, "local", "spread", "population", "random-search", BaselineMethod]

ScheduleName = Literal["one-cycle", "cosine", "wsd", "constant", "none"]
"""``none``: the shape that AutoLR gives a run by itself."""
TorchOptimizerName = Literal["adam", "adamw", "sgd"]
OptimizerName = Literal[TorchOptimizerName, "lion", "muon"]

ADAM_BETAS = (0.9, 0.95)
ADAMW_DECAY = 0.1
SGD_MOMENTUM = 0.9
MUON_LR, MUON_ADAM_LR = 0.02, 3e-4
"""Of Muon's author, for hidden matrices and for everything else."""
PEAK_SHARE = 0.1
"""Share of a one-cycle run before its peak."""

# -- learning rates -------------------------------------------------------------------------------------------------

# Four decades around the learning rates that people use, with the best one well inside.
_STARTS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_SGD_STARTS = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
_LOW_HIGH = {
    "adam": (1e-3, 1e-1),
    "adamw": (1e-3, 1e-1),
    "muon": (1e-3, 1e-1),
    "lion": (1e-4, 1e-2),
    "sgd": (1e-1, 3.0),
}
_LOW_HIGH_OF_TASK = {
    ("quadratic", "adam"): (3e-2, 10.0),
    ("quadratic", "sgd"): (1e-2, 10.0),
    # BatchNorm takes much more: at 0.1 Adam is within a tenth of its best.
    ("fashion", "adam"): (1e-2, 10.0),
    ("fashion", "adamw"): (1e-2, 10.0),
}


def starts(optimizer: str) -> tuple[float, ...]:
    """Learning rates to start a comparison from."""
    return _SGD_STARTS if optimizer == "sgd" else _STARTS


def low_and_high(task: str, optimizer: str) -> tuple[float, float]:
    """Two learning rates: plain training is fine at the first, and damaged or broken at the second."""
    return _LOW_HIGH_OF_TASK.get((task, optimizer), _LOW_HIGH[optimizer])


# -- schedules ------------------------------------------------------------------------------------------------------


def make_schedule(name: str, optimizer: Optimizer, lr: float, num_steps: int) -> LRScheduler:
    """A schedule by its name, with its peak at ``lr``, the optimizer's learning rate."""
    if name == "one-cycle":
        return OneCycleLR(optimizer, lr, num_steps, pct_start=PEAK_SHARE, cycle_momentum=False)
    warm = max(1, num_steps // 20)
    shapes: dict[str, Callable[[int], float]] = {
        "cosine": lambda t: min((t + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * t / num_steps)),
        "wsd": lambda t: min((t + 1) / warm, 1.0, max((num_steps - t) / (0.2 * num_steps), 0.0)),
        "constant": lambda t: 1.0,
        "none": lambda t: constant_then_linear(t, num_steps),
    }
    if name not in shapes:
        raise ValueError(f"schedule must be one of one-cycle, {', '.join(shapes)}, but got {name!r}")
    shape = shapes[name]
    return LambdaLR(optimizer, lambda t: shape(min(t, num_steps - 1)))  # torch asks for the step after the last too


def schedule_table(name: str, num_steps: int) -> FloatArray:
    """A schedule's learning rate in each step, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(name, optimizer, 1.0, num_steps)
    table = []
    for _ in range(num_steps):
        table.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return np.array(table)


# -- optimizers -----------------------------------------------------------------------------------------------------


def make_optimizer(name: str) -> StackedOptimizer:
    """The stacked optimizer called ``name``, one of :data:`OptimizerName`.

    Or ``torch-adamw``, ``torch.optim.AdamW`` at its defaults.
    """
    makers: dict[str, Callable[[], StackedOptimizer]] = {
        "adam": lambda: Adam(ADAM_BETAS),
        "adamw": lambda: Adam(ADAM_BETAS, weight_decay=ADAMW_DECAY, decoupled=True),
        "sgd": lambda: SGD(momentum=SGD_MOMENTUM),
        "lion": Lion,
        "muon": lambda: Muon(betas=ADAM_BETAS),
        "torch-adamw": lambda: Adam(weight_decay=0.01, decoupled=True),
    }
    if name not in makers:
        raise ValueError(f"optimizer must be one of {', '.join(makers)}, but got {name!r}")
    return makers[name]()


def author_muon(model: nn.Module) -> Muon:
    """Muon at the settings of its author, for this model's hidden matrices."""
    outer = outer_matrices(model)
    return Muon(betas=ADAM_BETAS, eps=1e-10, adam_share=MUON_ADAM_LR / MUON_LR, not_hidden=outer)


def make_torch_optimizer(name: TorchOptimizerName, lr: float, task: Task, model: nn.Module) -> Optimizer:
    """Its counterpart of ``torch.optim``, on the task's param groups."""
    groups = param_groups(task, model)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=SGD_MOMENTUM)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=ADAM_BETAS, weight_decay=ADAMW_DECAY)
    return torch.optim.Adam(groups, lr=lr, betas=ADAM_BETAS)
