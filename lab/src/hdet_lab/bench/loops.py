"""Rivals that act on the loss of each step, in a plain loop around ``torch.optim.AdamW`` at its own defaults.

GreedyLR is as in transformers; AdaLRS is written from its abstract and summaries, its full text was not at hand;
Schedule-Free+ is as in the repository of its authors.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet_lab.bench.train import Bench, Watch
from hdet_lab.recipes import schedule_table
from hdet_lab.stacked.inputs import renew_statistics
from hdet_lab.tasks.base import Task, evaluation_mode, param_groups

LR = 1e-3
"""torch's default for AdamW, from which those start that have no default of their own."""
NUM_REPORTS = 50
"""Of ReduceLROnPlateau, which counts epochs: so many means of the training loss a run."""


class Driver(Protocol):
    """Sets learning rates, and may set weights back, by the loss of each step."""

    def step(self, loss: float) -> None: ...


class GreedyLR:
    """Up after ``patience`` steps that each improve on the best, down after as many that do not (arXiv 2512.14527).

    ``transformers.GreedyLR`` with its defaults, but for the loss, which is smoothed, and the lowest learning rate, as
    in its example without Trainer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        min_lr: float = 1e-5,
        max_lr: float = 1.0,
        eps: float = 1e-8,
        window: int = 50,
        reset: int = 500,
    ) -> None:
        self.optimizer, self.factor, self.patience, self.threshold = optimizer, factor, patience, threshold
        self.min_lr, self.max_lr, self.eps, self.reset = min_lr, max_lr, eps, reset
        self._first = [group["lr"] for group in optimizer.param_groups]
        self._losses: deque[float] = deque(maxlen=window)
        self._best, self._good, self._bad, self._left = math.inf, 0, 0, reset

    def step(self, loss: float) -> None:
        self._losses.append(loss)
        smooth = sum(self._losses) / len(self._losses)
        if smooth < self._best - self.threshold:
            self._best, self._bad, self._good = smooth, 0, self._good + 1
        else:
            self._bad, self._good = self._bad + 1, 0
        if self._good > self.patience:
            self._set(lambda lr: min(lr / self.factor, self.max_lr))
            self._good, self._left = 0, self.reset
        elif self._bad > self.patience:
            self._set(lambda lr: max(lr * self.factor, self.min_lr))
            self._bad = 0
            if all(group["lr"] <= self.min_lr for group in self.optimizer.param_groups):
                self._left -= 1
                if self._left <= 0:
                    self._begin_again()

    def _set(self, change: Callable[[float], float]) -> None:
        for group in self.optimizer.param_groups:
            new = change(group["lr"])
            group["lr"] = new if abs(new - group["lr"]) > self.eps else group["lr"]

    def _begin_again(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._first, strict=True):
            group["lr"] = lr
        self._losses.clear()
        self._best, self._good, self._bad, self._left = math.inf, 0, 0, self.reset


class Plateau:
    """``torch.optim.lr_scheduler.ReduceLROnPlateau`` at its defaults, told the mean loss of each fiftieth of a run."""

    def __init__(self, optimizer: Optimizer, num_steps: int) -> None:
        self._inner = ReduceLROnPlateau(optimizer)
        self._every = max(1, num_steps // NUM_REPORTS)
        self._losses: list[float] = []

    def step(self, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) == self._every:
            self._inner.step(sum(self._losses) / self._every)
            self._losses = []


class AdaLRS:
    """Searches the learning rate by the slope of the loss, within the run (Dong et al., arXiv 2506.13274).

    The base schedule is a cosine with a warm-up. After it, in the first half of the run: the slope of the loss over
    a window is measured, the learning rate is tried ``up`` times as high for another window, and stays there if the
    loss then falls as fast, within the error of the slopes; otherwise weights and optimizer go back to before the trial
    and the learning rate is divided by ``down``. Both factors shrink towards 1 by ``shrink`` with each trial.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        num_steps: int,
        *,
        up: float = 3.0,
        down: float = 2.0,
        shrink: float = 0.8,
        share: float = 0.5,
    ) -> None:
        self.optimizer, self.model = optimizer, model
        self.up, self.down, self.shrink = up, down, shrink
        self.table = schedule_table("cosine", num_steps)
        self.window = max(num_steps // 25, 8)
        self.begin, self.end = max(1, num_steps // 20), int(share * num_steps)
        self.lr, self._step = float(optimizer.param_groups[0]["lr"]), 0
        self._losses: list[float] = []
        self._before: tuple[float, float] | None = None
        self._kept: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._write()

    def step(self, loss: float) -> None:
        self._step += 1
        if self.begin < self._step <= self.end:
            self._losses.append(loss)
            if len(self._losses) == self.window:
                self._end_window()
                self._losses = []
        elif self._before is not None:  # a trial that the search's end has cut off is not judged
            self._before = self._kept = None
        self._write()

    def _end_window(self) -> None:
        slope, error = slope_and_error(self._losses)
        if self._before is None:
            if self._step + self.window <= self.end:
                self._before = slope, error
                self._kept = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
                self.lr *= self.up
            return
        was, its_error = self._before
        if not slope <= was + 2 * math.hypot(error, its_error):  # NaN counts as slower
            assert self._kept is not None
            self.model.load_state_dict(self._kept[0])
            self.optimizer.load_state_dict(self._kept[1])
            self.lr /= self.up * self.down
        self.up, self.down = (1 + (factor - 1) * self.shrink for factor in (self.up, self.down))
        self._before = self._kept = None

    def _write(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * float(self.table[min(self._step, len(self.table) - 1)])


def slope_and_error(losses: Iterable[float]) -> tuple[float, float]:
    """Of the least-squares line through losses of successive steps."""
    y = np.asarray(list(losses), dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    return slope, math.sqrt(float(rest @ rest) / (len(y) - 2) / float(x @ x))


class ScheduleFreePlus(Optimizer):
    """Schedule-Free AdamC with Polyak's step size (Defazio, arXiv 2605.19095), at the defaults of its authors' code.

    Args:
        params: as in every optimizer.
        num_warm: steps over which the learning rate rises to ``lr``, and in which the average is the iterate itself.
        lr: multiplies Polyak's step size.
        betas, eps: Adam's.
        momentum: beta of the point at which gradients are taken.
    """

    def __init__(
        self,
        params: Any,
        *,
        num_warm: int = 0,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.num_warm, self.momentum = num_warm, momentum
        self._count, self._largest, self._total = 0, eps, 0.0

    @torch.no_grad()
    def step(self, loss: float) -> None:  # type: ignore[override]
        """One step, from the gradient and the loss at the point where the parameters are."""
        every = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in every:
            if not self.state[p]:
                zeros = {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}
                self.state[p] = {"z": p.detach().clone(), "x": p.detach().clone(), **zeros}
        size = sum(float(p.grad.abs().sum()) for _, p in every)
        ahead = sum(float((p.grad * (self.state[p]["z"] - self.state[p]["x"])).sum()) for _, p in every)
        polyak = max(0.0, loss + self.momentum * ahead) / (size * math.sqrt(math.pi / 2)) if size else 0.0
        self._count += 1
        warm = min(1.0, self._count / self.num_warm) if self.num_warm else 1.0
        rate = max(self.param_groups[0]["lr"] * warm, self.param_groups[0]["eps"]) * polyak
        self._largest = max(self._largest, rate)
        share = 1.0
        if self._count > self.num_warm:
            self._total += self._largest**2
            share = self._largest**2 / self._total
        for group, p in every:
            state, (beta1, beta2) = self.state[p], group["betas"]
            state["first"].lerp_(p.grad, 1 - beta1)
            state["second"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            root = (state["second"] / (1 - beta2**self._count)).sqrt_().add_(group["eps"])
            state["z"].addcdiv_(state["first"] / (1 - beta1**self._count), root, value=-rate)
            state["x"].lerp_(state["z"], share)
            p.copy_(self.momentum * state["x"] + (1 - self.momentum) * state["z"])

    @torch.no_grad()
    def to_average(self) -> None:
        """Put the averages, which are to be evaluated, into the parameters."""
        self._write("x", keep="y")

    @torch.no_grad()
    def to_training(self) -> None:
        """Put the points at which gradients are taken back."""
        self._write("y", keep="")

    def _write(self, name: str, *, keep: str) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if self.state[p]):
            if keep:
                self.state[p][keep] = p.detach().clone()
            p.copy_(self.state[p][name])


def run_loop(bench: Bench, method: str) -> list[dict[str, Any]]:
    """Records of all seeds, one run after the other."""
    bench.task.to(bench.device)
    return [_train(bench, method, seed) for seed in bench.seeds]


def _train(bench: Bench, method: str, seed: int) -> dict[str, Any]:
    task, steps = bench.task, bench.steps
    model = task.build(seed).to(bench.device)
    groups = param_groups(task, model)
    plus = ScheduleFreePlus(groups, num_warm=steps // 10) if method == "schedule-free-plus" else None
    optimizer: Optimizer = torch.optim.AdamW(groups, lr=LR) if plus is None else plus
    drivers: dict[str, Callable[[], Driver]] = {
        "greedy": lambda: GreedyLR(optimizer),
        "plateau": lambda: Plateau(optimizer, steps),
        "adalrs": lambda: AdaLRS(optimizer, model, steps),
    }
    driver = drivers[method]() if plus is None else None
    watch, curve, lrs = Watch(bench, steps, 0), [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.gather(task.rows(step, seed=seed)))
        torch.autograd.backward(loss)
        value = float(loss.detach())
        if plus is not None:
            plus.step(value)
        else:
            optimizer.step()
        if watch.is_due(step + 1):
            lrs.append((step + 1, optimizer.param_groups[0]["lr"]))
            curve.append((step + 1, _watched(task, model, watch, plus)))
        if driver is not None:
            driver.step(value)
    if plus is not None:
        plus.to_average()
        renew_statistics(task, model, seed, steps)
    found = task.evaluate(model)
    return {"lr": LR, "schedule": method, "seed": seed, "loss": found["loss"], "curve": curve, "lrs": lrs}


@torch.no_grad()
def _watched(task: Task, model: nn.Module, watch: Watch, plus: ScheduleFreePlus | None) -> float:
    if plus is not None:
        plus.to_average()
    with evaluation_mode(model):
        losses = [(float(task.loss(model, batch)), len(batch[0])) for batch in watch.batches()]
    if plus is not None:
        plus.to_training()
    return sum(loss * num for loss, num in losses) / sum(num for _, num in losses)
