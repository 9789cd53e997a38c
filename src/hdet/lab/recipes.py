"""Schedules and optimizers by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hdet.checks import FloatArray
from hdet.lab.stacked.optim import SGD, Adam, Lion, Muon, StackedOptimizer

# Four decades around the learning rates that people use, with the best one well inside.
STARTS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SGD_STARTS = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)


def schedule_table(name: str, num_steps: int) -> FloatArray:
    """A schedule's learning rate in each step, for a peak of 1: ``one-cycle``, ``cosine``, ``wsd`` or ``constant``."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule: LRScheduler
    if name == "one-cycle":
        schedule = OneCycleLR(optimizer, 1.0, num_steps, pct_start=0.1, cycle_momentum=False)
    else:
        warm = max(1, num_steps // 20)
        shapes: dict[str, Callable[[int], float]] = {
            "cosine": lambda t: min((t + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * t / num_steps)),
            "wsd": lambda t: min((t + 1) / warm, 1.0, max((num_steps - t) / (0.2 * num_steps), 0.0)),
            "constant": lambda t: 1.0,
        }
        if name not in shapes:
            raise ValueError(f"schedule must be one of one-cycle, {', '.join(shapes)}, but got {name!r}")
        schedule = LambdaLR(optimizer, shapes[name])
    table = []
    for _ in range(num_steps):
        table.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return np.array(table)


def make_optimizer(name: str) -> StackedOptimizer:
    """``adam`` (.9, .95), ``adamw`` with weight decay .1, ``sgd`` with momentum .9, ``lion``, ``muon`` with Adam."""
    makers: dict[str, Callable[[], StackedOptimizer]] = {
        "adam": lambda: Adam((0.9, 0.95)),
        "adamw": lambda: Adam((0.9, 0.95), weight_decay=0.1, decoupled=True),
        "sgd": lambda: SGD(momentum=0.9),
        "lion": Lion,
        "muon": Muon,
    }
    if name not in makers:
        raise ValueError(f"optimizer must be one of {', '.join(makers)}, but got {name!r}")
    return makers[name]()
