"""Optimizers that set their own step size, one model a run: Prodigy, D-Adaptation, Mechanic, DoG, Schedule-Free.

Prodigy, D-Adaptation and Mechanic follow the schedule with a peak of 1. DoG has none, and is evaluated at its own
average of the iterates. Schedule-Free has none, a warm-up of a tenth of the run, and has to be told a learning rate.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hdet.launch import preload, server
from hdet_lab.recipes import ADAM_BETAS, SGD_MOMENTUM, BaselineMethod, schedule_table
from hdet_lab.runs.settings import open_task
from hdet_lab.tasks.base import Task, batch_of

PACKAGES: dict[BaselineMethod, tuple[str, str]] = {
    "prodigy": ("prodigyopt", "prodigyopt"),
    "d-adaptation": ("dadaptation", "dadaptation"),
    "mechanic": ("mechanic_pytorch", "mechanic-pytorch"),
    "dog": ("dog", "dog-optimizer"),
    "schedule-free": ("schedulefree", "schedulefree"),
}
"""The module that has the method, and the package that pip installs."""
SCHEDULED = ("prodigy", "d-adaptation", "mechanic")
NUM_STATISTICS_STEPS = 50


@dataclass(frozen=True)
class BaselineRun:
    """One run.

    Attributes:
        task, data, task_options: what to open where no task is passed.
        method: one of :data:`PACKAGES`.
        lr: of Schedule-Free; None for the others.
        seed: of weights and data order.
        num_steps, schedule, device: as in a sweep.
        optimizer: what Mechanic tunes: ``sgd`` with momentum, or Adam.
    """

    task: str
    method: BaselineMethod
    lr: float | None
    seed: int
    num_steps: int
    schedule: str = "one-cycle"
    optimizer: str = "adam"
    device: str = "cpu"
    data: Path = Path("data")
    task_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """A run, its training loss step by step, and the validation figures at its end."""

    run: BaselineRun
    train_loss: list[float]
    validation: dict[str, float]


def is_baseline(method: str) -> TypeGuard[BaselineMethod]:
    """Whether the method is one of :data:`PACKAGES`."""
    return method in PACKAGES


def missing_package(method: BaselineMethod) -> str | None:
    """What to install, where the method's package is missing."""
    module, package = PACKAGES[method]
    try:
        importlib.import_module(module)
    except ImportError:
        return f"{method} is skipped: it needs {package}; install it with: pip install {package}"
    return None


def package_versions() -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for _, package in PACKAGES.values():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def train_all(runs: Sequence[BaselineRun], *, task: Task | None = None, num_workers: int = 1) -> Iterator[Outcome]:
    """Train all, one after the other in this process on ``task``, or several processes at a time; in order."""
    if num_workers == 1:
        yield from (train(run, task) for run in runs)
        return
    preload(__name__)
    with server().Pool(min(num_workers, len(runs))) as pool:
        yield from pool.imap(_train_alone, runs)


def _train_alone(run: BaselineRun) -> Outcome:
    torch.set_num_threads(1)
    if run.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    return train(run)


def train(run: BaselineRun, task: Task | None = None) -> Outcome:
    """One run; deterministic on the host."""
    task = (task or open_task(run.task, run.data, run.task_options)).to(run.device)
    model = task.build(run.seed).to(run.device)
    optimizer, final = _optimizer_of(run, task, model)
    table = schedule_table(run.schedule, run.num_steps)
    losses: list[Tensor] = []
    for step in range(run.num_steps):
        if run.method in SCHEDULED:
            for group in optimizer.param_groups:
                group["lr"] = float(table[step])
        loss = task.loss(model, batch_of(task, step, seed=run.seed))
        losses.append(loss.detach())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        try:
            optimizer.step()
            final.step()
        except AssertionError:  # DoG stops where its sum of gradients is NaN
            losses.append(torch.full_like(loss, math.nan))
            break
    # A run that stopped has no model worth evaluating.
    validation = task.evaluate(final.model()) if len(losses) == run.num_steps else {"loss": math.nan}
    return Outcome(run, torch.stack(losses).double().tolist(), validation)


class _Final:
    """Where the weights to be evaluated come from: here the trained ones."""

    def __init__(self, model: nn.Module, prepare: Callable[[], None] = lambda: None) -> None:
        self._model, self._prepare = model, prepare

    def step(self) -> None:
        """After each optimizer step."""

    def model(self) -> nn.Module:
        self._prepare()
        return self._model


class _Averaged(_Final):
    """DoG's average of the iterates."""

    def __init__(self, model: nn.Module, averager: Any) -> None:
        super().__init__(model)
        self._averager = averager

    def step(self) -> None:
        self._averager.step()

    def model(self) -> nn.Module:
        averaged: nn.Module = self._averager.averaged_model
        return averaged


def _optimizer_of(run: BaselineRun, task: Task, model: nn.Module) -> tuple[Any, _Final]:
    package: Any = importlib.import_module(PACKAGES[run.method][0])
    parameters = list(model.parameters())
    has_statistics = any(buffer.is_floating_point() for buffer in model.buffers())
    if run.method == "prodigy":
        return package.Prodigy(parameters, lr=1.0, safeguard_warmup=True), _Final(model)
    if run.method == "d-adaptation":
        return package.DAdaptAdam(parameters, lr=1.0), _Final(model)
    if run.method == "mechanic":
        if run.optimizer == "sgd":
            return package.mechanize(torch.optim.SGD)(parameters, lr=1.0, momentum=SGD_MOMENTUM), _Final(model)
        return package.mechanize(torch.optim.Adam)(parameters, lr=1.0, betas=ADAM_BETAS), _Final(model)
    if run.method == "dog":
        # Its authors' advice for models with BatchNorm.
        first = 1e-4 if has_statistics else 1e-6
        return package.DoG(parameters, reps_rel=first), _Averaged(model, package.PolynomialDecayAverager(model))
    optimizer = package.AdamWScheduleFree(parameters, lr=run.lr, warmup_steps=run.num_steps // 10)
    optimizer.train()

    @torch.no_grad()
    def prepare() -> None:
        optimizer.eval()
        # BatchNorm's statistics are of the weights that were trained; those to be evaluated are others.
        for step in range(min(NUM_STATISTICS_STEPS, run.num_steps) if has_statistics else 0):
            task.loss(model, batch_of(task, step, seed=run.seed))

    return optimizer, _Final(model, prepare)
