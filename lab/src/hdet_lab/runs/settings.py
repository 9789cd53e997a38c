"""The settings of a run: what they may be, and the parts that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tyro.conf import Positional, arg

from hdet import Adapt, AutoLR, Ensemble, Faults, OneCycleAutoLR, knobs
from hdet.checks import LARGEST, as_int, number, shown
from hdet.ensemble.controllers import PaperController
from hdet.policy.timing import default_interval
from hdet.signals.held_out import Probe
from hdet_lab.command_line import Options, UsageError
from hdet_lab.recipes import (
    PEAK_SHARE,
    ScheduleName,
    TorchOptimizerName,
    TrainMethod,
    make_schedule,
)
from hdet_lab.targets import is_target
from hdet_lab.tasks import TASKS, load_task, stdlib_gpt
from hdet_lab.tasks.base import Task

KnobName = Literal["weight_decay", "momentum", "beta2", "eps"]
KNOBS: dict[KnobName, tuple[Callable[[], knobs.Knob], tuple[str, ...]]] = {
    "weight_decay": (knobs.WeightDecay, ("adamw",)),
    "momentum": (knobs.Momentum, ("adam", "adamw", "sgd")),
    "beta2": (knobs.Beta2, ("adam", "adamw")),
    "eps": (knobs.Epsilon, ("adam", "adamw")),
}
"""Name to the knob's class, and the optimizers for which it is above 0."""
MAX_STEPS = 100_000_000  # schedules are tables
SMALL = "small-gpt"
TASK_NAMES = (*TASKS, SMALL)


class RunOptions(Options):
    """Checks that all commands that train have in common."""

    task: str
    schedule: ScheduleName
    steps: int | None
    interval: int | None
    spread: float
    device: str

    def check(self) -> None:
        """Raise UsageError for values that no run can have, before anything is loaded."""
        if self.task not in TASK_NAMES and not is_target(self.task):
            raise UsageError(f"TASK must be one of {', '.join(TASK_NAMES)}, or MODULE:CLASS, but got {self.task!r}")
        self.require("spread", "in (0, 1)", 0 < self.spread < 1)
        for name in ("steps", "interval"):
            self.require(name, "an integer >= 1", getattr(self, name) is None or getattr(self, name) >= 1)
        self.require("steps", "at most 100,000,000", (self.steps or 1) <= MAX_STEPS)
        self.require("device", "cpu or cuda", self.device in ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda needs a GPU that torch can use, but there is none; use --device cpu")

    def check_run(self, task: Task, num_steps: int, num_replicas: int, *, seed: int = 0) -> None:
        """Raise UsageError for what does not fit the task."""
        check_rows(task, "--steps", num_steps, seed=seed)
        if self.schedule == "one-cycle" and PEAK_SHARE * num_steps <= 1:
            raise UsageError(
                f"--steps must be more than {1 / PEAK_SHARE:.0f} for the schedule one-cycle to have a peak, "
                f"but got {num_steps}; use more, or another --schedule"
            )
        if task.batch_rows % num_replicas:
            raise UsageError(
                f"--replicas must divide the {task.batch_rows} rows of a batch of {task.name}, but got {num_replicas}"
            )


def check_rows(task: Task, option: str, num_steps: int, *, seed: int = 0) -> None:
    """Raise UsageError where the task has no data for so many steps."""
    try:
        task.rows(num_steps - 1, seed=seed)
    except ValueError as error:
        raise UsageError(f"{option} must not go beyond the data of {task.name}, but got {num_steps}: {error}") from None


@dataclass(frozen=True)
class Settings(RunOptions):
    """One run."""

    task: Annotated[str, Positional, arg(metavar="TASK")]
    """What to train: stdlib-gpt, small-gpt, one with data of its own, or your own class, MODULE:CLASS."""
    method: TrainMethod = "gradient"
    """The fixed schedule, the paper's controller, or AutoLR with the gradient or the loss signal."""
    lr: float = 1e-3
    """Peak of the schedule; for all methods but fixed a starting point."""
    schedule: ScheduleName = "one-cycle"
    """Shape of the learning rate over the run."""
    optimizer: TorchOptimizerName = "adam"
    """Adam (.9, .95), AdamW with weight decay .1, SGD with momentum .9."""
    replicas: int | None = None
    """Processes to start, each a replica; default 1. Under torchrun: leave it out."""
    steps: int | None = None
    """Optimizer steps; default the task's."""
    interval: int | None = None
    """Steps of a round; default a hundredth of the run, at most 1000."""
    spread: float = 0.1
    """How far replicas' learning rates reach from the base, with paper and loss."""
    knobs: tuple[KnobName, ...] = ()
    """Settings of the optimizer that replicas explore beside the learning rate."""
    seed: int = 0
    """Seed of weights, data order and permutations."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    data: Path = Path("data")
    """Folder that holds the tasks' data."""
    checkpoint_s: float = 60.0
    """Seconds between checkpoints; they are written at ends of rounds."""
    freeze_file: Path | None = None
    """Once this file exists, the learned scale holds still, and training goes on."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        own = {field.name for field in fields(Settings)}
        values = {key: value for key, value in asdict(self).items() if key in own}
        frozen = None if self.freeze_file is None else str(self.freeze_file)
        return {**values, "data": str(self.data), "knobs": list(self.knobs), "freeze_file": frozen}

    def check(self) -> None:
        super().check()
        self.require("lr", "a finite number > 0", 0 < self.lr < math.inf)
        self.require("seed", "an integer from 0 to 2^53", 0 <= self.seed <= LARGEST)
        self.require("checkpoint_s", "a number >= 0", self.checkpoint_s >= 0)
        self.require("replicas", "an integer >= 1", self.replicas is None or self.replicas >= 1)
        self._check_knobs()
        if self.freeze_file is not None and self.method == "fixed":
            raise UsageError("--freeze-file needs a method that learns, but got --method fixed; leave it out")

    def resolve(self, task: Task, num_replicas: int) -> Settings:
        """The settings with every default filled in, checked against the task."""
        steps = self.steps or task.total_steps
        self.check_run(task, steps, num_replicas, seed=self.seed)
        compared = f"--method {self.method}" if self.method in ("paper", "loss") else ""
        if self.knobs:
            compared = compared or f"--knobs {' '.join(self.knobs)}"
        if compared and num_replicas < 2:
            raise UsageError(
                f"{compared} compares replicas and needs at least 2 processes, but got {num_replicas}; "
                "add --replicas 4, or start with torchrun"
            )
        if self.needs_probe:
            try:
                task.rows(steps, seed=self.seed)
            except ValueError as error:
                raise UsageError(
                    f"--knobs weight_decay is judged by the batch after the run's last, but {task.name} has none after "
                    f"--steps {steps}: {error}; use fewer"
                ) from None
        return replace(self, replicas=num_replicas, steps=steps, interval=self.interval or default_interval(steps))

    @property
    def needs_probe(self) -> bool:
        """Whether a knob is explored that the training loss cannot judge."""
        return "weight_decay" in self.knobs

    def _check_knobs(self) -> None:
        self.require("knobs", "different names", len(set(self.knobs)) == len(self.knobs))
        if self.knobs and self.method == "fixed":
            raise UsageError(
                f"--knobs {' '.join(self.knobs)} needs a method that learns, but got --method fixed; "
                "use gradient, loss or paper"
            )
        for name in self.knobs:
            optimizers = KNOBS[name][1]
            if self.optimizer not in optimizers:
                raise UsageError(
                    f"--knobs {name} needs --optimizer {' or '.join(optimizers)}, but got --optimizer {self.optimizer}"
                )


def from_dict(values: Mapping[str, Any]) -> Settings:
    """The inverse of :meth:`Settings.as_dict`; UsageError where the values do not fit."""
    hints = get_type_hints(Settings)
    kinds = {field.name: hints[field.name] for field in fields(Settings)}
    values = {"knobs": [], "freeze_file": None, **values}  # older runs have none
    for name in (*kinds, *values):
        if name not in values:
            raise UsageError(f"the settings of a run must have {name}, but it is missing; start a new run")
        if name not in kinds:
            raise UsageError(f"the settings of a run must be among {', '.join(kinds)}, but got {shown(name)}")
        if not _fits(values[name], kinds[name]):
            rule = kinds[name].__name__ if isinstance(kinds[name], type) else str(kinds[name]).replace("typing.", "")
            raise UsageError(
                f"{name} among the settings of a run must be of type {rule}, but got {shown(values[name])}; "
                "start a new run"
            )
    freeze_file = None if values["freeze_file"] is None else Path(values["freeze_file"])
    typed = {"data": Path(values["data"]), "knobs": tuple(values["knobs"]), "freeze_file": freeze_file}
    return Settings(**{**values, **typed})


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON can stand for one of the type ``kind``."""
    if kind is int:
        return bool(as_int(value) == value)
    if kind is float:
        return not math.isnan(number(value))
    if kind in (str, Path):
        return isinstance(value, str) and "\0" not in value
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(entry, get_args(kind)[0]) for entry in value)
    return value is None or any(_fits(value, option) for option in get_args(kind) if option is not type(None))


def task_first(arguments: Sequence[str]) -> list[str]:
    """``--task TASK`` as the argument TASK, which is how all commands know it."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--task" and equals:
            return [value, *arguments[:index], *arguments[index + 1 :]]
        if argument == "--task" and index + 1 < len(arguments):
            return [arguments[index + 1], *arguments[:index], *arguments[index + 2 :]]
    return list(arguments)


def folder_name(task: str) -> str:
    """The task's name as a part of a folder's."""
    return task.replace(":", "-")


def open_task(name: str, data: Path, options: Mapping[str, Any] | None = None) -> Task:
    """The task called ``name``, with ``options`` of its own; UsageError where they are wrong, or its data not there."""
    options = options or {}
    try:
        if name == SMALL:
            # A minute or two of training on two cores.
            sizes: dict[str, Any] = {"context": 64, "num_layers": 2, "width": 64, "num_heads": 4, "num_validation": 256}
            sizes |= {"max_bytes": 1_000_000, "batch_rows": 32, "total_steps": 300}
            task = stdlib_gpt(**{**sizes, **options})
            task.name = SMALL
            return task
        return load_task(name, data, **options)
    except FileNotFoundError as error:
        raise UsageError(f"{error} (the folder of all data is --data {data})") from None
    except (TypeError, ValueError) as error:
        if options:
            given = " ".join(f"{key}={value}" for key, value in options.items())
            raise UsageError(f"--task-option must be an option of {name}, but got {given}: {error}") from None
        if isinstance(error, TypeError):
            raise
        raise UsageError(str(error)) from None


def make_scheduler(
    settings: Settings, optimizer: Optimizer, model: nn.Module, probe: Probe | None = None
) -> AutoLR | OneCycleAutoLR | LRScheduler:
    """The schedule, or the scheduler around it that the method asks for."""
    steps, interval = settings.steps, settings.interval
    assert steps is not None
    assert interval is not None
    differs: dict[str, Any] = {"knobs": [KNOBS[name][0]() for name in settings.knobs], "seed": settings.seed}
    if settings.method == "paper" and settings.schedule == "one-cycle":
        return OneCycleAutoLR(
            optimizer,
            settings.lr,
            steps,
            pct_start=PEAK_SHARE,
            cycle_momentum=False,
            ensemble_lr_spread_ratio=settings.spread,
            model_sync_interval=interval,
            auto_lr_warmup_steps=steps // 50,
            enable_auto_lr=True,
            model=model,
            probe=probe,
            faults=Faults(freeze_file=settings.freeze_file),
            ensemble=Ensemble(**differs),
        )
    plain = make_schedule(settings.schedule, optimizer, settings.lr, steps)
    if settings.method == "fixed":
        return plain
    common: dict[str, Any] = {"interval": interval, "total_steps": steps, "model": model, "probe": probe}
    common["faults"] = Faults(freeze_file=settings.freeze_file)
    if settings.method == "paper":
        # What OneCycleAutoLR does, around another schedule.
        adapt = Adapt(controller=PaperController(), anchor="round", groups="each", _hold_share=0.0)
        apart = Ensemble(spread=settings.spread, **differs)
        common["faults"] = replace(common["faults"], max_rollbacks=0)
        return AutoLR(plain, ensemble=apart, adapt=adapt, **common)
    chosen = optimizer if settings.schedule == "none" and settings.method == "gradient" else plain
    if settings.method == "loss" or settings.knobs:
        common["ensemble"] = Ensemble(spread=settings.spread if settings.method == "loss" else 0.0, **differs)
    return AutoLR(chosen, **common)
