"""Many runs side by side on the stacked engine, steered by the code that steers real processes.

A run is a task, a starting learning rate, a seed and a method; runs with the same number of replicas train as one
batched computation. Every number comes out of the same :class:`~hdet.policy.steering.Steering`, controllers and guard
as in :class:`~hdet.engine.rounds.RoundLoop`; only averaging and placing weights are the stacked engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet.checks import FloatArray
from hdet.controllers import Controller, PaperController
from hdet.engine.rollback import CUT, Budget
from hdet.lab.recipes import SweepMethod as Method
from hdet.lab.recipes import make_optimizer, schedule_table
from hdet.lab.stacked.engine import StackedModels
from hdet.lab.stacked.inputs import row_table, warm_noise
from hdet.lab.stacked.optim import StackedOptimizer
from hdet.lab.tasks.base import Task
from hdet.policy.guard import Guard, GuardState
from hdet.policy.steering import Steering
from hdet.schedulers._build import FIRST_SCALES, make_evidence_controller
from hdet.signals.gradient import mean_and_error

Checkpoints = Mapping[int, Mapping[str, Tensor]]

MAX_ROLLBACKS = 20
"""AutoLR's default."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        lr: peak of the schedule.
        seed: of weights, data order and permutations.
        method: ``fixed`` schedule, plain data parallel; ``local``: the same, but replicas train apart, each on its own
            gradients, and are averaged every ``interval`` steps; ``spread``: fan-out and converge without a
            controller; ``anchored``: the same, placed by Eq. 11; the ``paper``'s controller; AutoLR with the ``loss``
            or ``gradient`` signal.
        num_replicas: N; 1 for ``fixed`` and ``gradient``, where more would change nothing but BatchNorm's statistics.
        interval: T.
        spread: alpha.
        start, hold: shares of the run before and after which the scale holds still.
        first_scale, gated, rollback: as in AutoLR.
        controller: arguments of the controller.
        warm_noise: nu of Eq. 10, per tensor: start from the checkpoint of the seed, each replica with its own noise.
            None for freshly built weights.
        label: free text, to tell variants apart.
    """

    lr: float
    seed: int = 0
    method: Method = "fixed"
    num_replicas: int = 1
    interval: int = 20
    spread: float = 0.1
    start: float = 0.02
    hold: float = 0.05
    first_scale: float | None = None
    gated: bool = True
    rollback: bool = True
    controller: dict[str, float] = field(default_factory=dict)
    warm_noise: float | None = None
    label: str = ""

    @property
    def shared(self) -> bool:
        """Whether replicas train on their mean gradient."""
        return self.method != "local"

    @property
    def is_auto(self) -> bool:
        return self.method == "loss" or self.method == "gradient"

    def make_first_scale(self) -> float:
        if self.method == "loss" or self.method == "gradient":
            return FIRST_SCALES[self.method] if self.first_scale is None else self.first_scale
        return 1.0

    def make_controller(self) -> Controller | None:
        if self.method == "paper":
            return PaperController(**self.controller)
        if self.method == "loss" or self.method == "gradient":
            return make_evidence_controller(self.method, **self.controller)
        return None


@dataclass
class Result:
    """What came of a run.

    Attributes:
        run: its configuration.
        validation: figures at the final mean weights, ``loss`` first.
        train_loss: mean loss over replicas, round by round.
        base_lr: centre of the learning rate, round by round.
        z: the controller's evidence, round by round, of the first knob.
        num_rollbacks: how often it was set back.
    """

    run: Run
    validation: dict[str, float] = field(default_factory=dict)
    train_loss: list[float] = field(default_factory=list)
    base_lr: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    num_rollbacks: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Steered:
    """One run's numbers: steering, guard and record."""

    def __init__(self, run: Run, num_steps: int) -> None:
        self.run = run
        self.steering = Steering(
            num_knobs=1,
            num_replicas=run.num_replicas,
            spread=run.spread if run.method in ("spread", "anchored", "paper", "loss") else 0.0,
            controller=run.make_controller(),
            scale_bounds=(1e-6, 1e6),
            gated=run.gated and run.is_auto,
            seed=run.seed,
            first_scale=run.make_first_scale(),
        )
        self.guard, self.guard_state = Guard(), GuardState()
        self.budget = Budget(MAX_ROLLBACKS)
        self.acting = (run.start * num_steps, (1 - run.hold) * num_steps)
        self.result = Result(run)
        self.wants_new_anchor = False

    @property
    def anchored(self) -> bool:
        return self.run.method in ("loss", "anchored")

    def end_round(self, step: int, losses: FloatArray, samples: FloatArray, base: float) -> bool:
        """Take in a round; returns whether it has to be undone."""
        finite = losses[np.isfinite(losses)]
        mean = float(finite.mean()) if len(finite) else math.nan
        broken = self.wants_new_anchor = False
        info: dict[str, Any] = {}
        held = self.budget.spent
        if self.run.is_auto and self.run.rollback:
            self.guard_state, healthy = self.guard.update(self.guard_state, mean)
            broken = not healthy
        if broken:
            self.steering.cut(CUT)
            self.budget.take()
            self.result.num_rollbacks += 1
        else:
            self.budget.recover()
        if not broken and not held and self.acting[0] < step <= self.acting[1]:
            slopes = mean_and_error(samples) if self.run.method == "gradient" else None
            info = self.steering.decide(losses, slopes)
            self.wants_new_anchor = self.run.is_auto and self.steering.wants_new_anchor()
        self.result.train_loss.append(mean)
        self.result.base_lr.append(base * self.run.lr * float(self.steering.scales[0]))
        self.result.z.append(info.get("z", (math.nan,))[0])
        self.steering.next_round()
        return broken


def sweep(
    task: Task,
    runs: Sequence[Run],
    *,
    optimizer: str = "adam",
    schedule: str = "one-cycle",
    num_steps: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = False,  # noqa: A002
    checkpoints: Checkpoints | None = None,
    progress: Callable[[int], None] = lambda _: None,
    on_end: Callable[[Run, nn.Module], None] = lambda *_: None,
) -> list[Result]:
    """Train all runs, those with the same number of replicas and interval side by side; results in their order.

    Runs with ``warm_noise`` start from the state dict that ``checkpoints`` has for their seed. ``progress`` hears the
    step at the end of each round; ``on_end`` sees every run's model at its final mean weights, and must copy what it
    keeps.
    """
    cold = [run.seed for run in runs if run.warm_noise is not None and run.seed not in (checkpoints or {})]
    if cold:
        raise ValueError(
            f"a run with warm_noise must have a checkpoint of its seed, but there is none of seed {cold[0]}"
        )

    def kind(run: Run) -> tuple[int, int, bool]:
        return run.num_replicas, run.interval, run.shared

    found: dict[int, Result] = {}
    for this in dict.fromkeys(map(kind, runs)):
        chosen = [i for i, run in enumerate(runs) if kind(run) == this]
        results = _stacked_sweep(
            task,
            [runs[i] for i in chosen],
            make_optimizer(optimizer),
            schedule_table(schedule, num_steps or task.total_steps),
            device=device,
            dtype=dtype,
            compile=compile,
            checkpoints=checkpoints or {},
            progress=progress,
            on_end=on_end,
        )
        found.update(zip(chosen, results, strict=True))
    return [found[i] for i in range(len(runs))]


def _stacked_sweep(
    task: Task,
    runs: Sequence[Run],
    optimizer: StackedOptimizer,
    table: FloatArray,
    *,
    device: str,
    dtype: torch.dtype,
    compile: bool,  # noqa: A002
    checkpoints: Checkpoints,
    progress: Callable[[int], None],
    on_end: Callable[[Run, nn.Module], None],
) -> list[Result]:
    num_steps, num_replicas, interval = len(table), runs[0].num_replicas, runs[0].interval
    task.to(device)
    models = [task.build(run.seed) for run in runs]
    for run, model in zip(runs, models, strict=True):
        if run.warm_noise is not None:
            model.load_state_dict(checkpoints[run.seed])
    groups = task.groups(models[0])
    engine = StackedModels(
        models,
        task.loss,
        groups,
        num_replicas=num_replicas,
        optimizer=optimizer,
        shared=runs[0].shared,
        device=device,
        dtype=dtype,
        noise=warm_noise(models, groups, runs, num_replicas),
        compile=compile,
        graph=device.startswith("cuda"),
    )
    rows = row_table(task, [run.seed for run in runs], num_steps, num_replicas).to(device)
    steered = [_Steered(run, num_steps) for run in runs]
    total = torch.zeros(len(runs), num_replicas, dtype=torch.float64, device=device)
    slopes = torch.zeros(interval, len(runs), dtype=torch.float64, device=device)
    for step in range(num_steps):
        if step:
            for s in steered:
                s.steering.rise(np.array([math.log(table[step] / table[step - 1])]))
        lrs = np.stack([table[step] * s.run.lr * s.steering.scales[0] * s.steering.multipliers[0] for s in steered])
        lrs_on_device = torch.from_numpy(lrs).to(device, dtype, non_blocking=True)
        found = engine.step(task.gather(rows[step]), lrs_on_device.unsqueeze(-1).expand(-1, -1, len(groups)))
        total += found.losses
        slopes[step % interval] = found.slopes.sum(-1)
        num_taken = step % interval + 1
        last = step + 1 == num_steps
        if last or num_taken == interval:
            _end_round(engine, steered, step + 1, total / num_taken, slopes[:num_taken], float(table[step]), last=last)
            total.zero_()
            progress(step + 1)
    for index, s in enumerate(steered):
        model = engine.mean_model(index)
        s.result.validation = task.evaluate(model)
        on_end(s.run, model)
    return [s.result for s in steered]


def _end_round(
    engine: StackedModels,
    steered: Sequence[_Steered],
    step: int,
    losses: Tensor,
    slopes: Tensor,
    base: float,
    *,
    last: bool,
) -> None:
    broken = torch.tensor(
        [
            s.end_round(step, row, samples[:, None], base)
            for s, row, samples in zip(steered, losses.cpu().numpy(), slopes.cpu().numpy().T, strict=True)
        ]
    )
    # Plain data parallel never averages weights, so replicas that start apart stay apart.
    engine.converge(torch.tensor([s.run.method != "fixed" for s in steered]))
    if broken.any():
        engine.restore(broken)
    engine.snapshot(~broken)
    renewed = torch.tensor([s.wants_new_anchor for s in steered])
    if renewed.any():
        engine.set_anchor(renewed)
    if not last and any(s.anchored for s in steered):
        # Multiplier 1 leaves the replicas of a run without an anchor at their mean.
        rho = [s.steering.multipliers.T if s.anchored else np.ones((engine.num_replicas, 1)) for s in steered]
        multipliers = torch.from_numpy(np.stack(rho))
        engine.place(multipliers.to(engine.weights.device).expand(-1, -1, len(engine.group_names)))
