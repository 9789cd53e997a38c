"""Many runs side by side on the stacked engine, steered by the code that steers real processes.

A run is a task, a starting learning rate, a seed and a method; runs with the same number of replicas train as one
batched computation. Every decision is that of the :class:`~hdet.policy.round.RoundPolicy` which decides for
:class:`~hdet.engine.rounds.RoundLoop` too; only averaging and placing weights are the stacked engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet.checks import BoolArray, FloatArray
from hdet.controllers import Controller, PaperController
from hdet.lab.recipes import SweepMethod as Method
from hdet.lab.recipes import make_optimizer, schedule_table
from hdet.lab.stacked.engine import StackedModels
from hdet.lab.stacked.inputs import row_table, warm_noise
from hdet.lab.stacked.optim import StackedOptimizer
from hdet.lab.tasks.base import Task
from hdet.options import Adapt
from hdet.policy.climb import Climb
from hdet.policy.rollback import BrokenError, Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import Steering
from hdet.policy.timing import has_time_to_climb, hold_start
from hdet.policy.verdict import Observed, Verdict
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
        start, hold: shares of the run before and after which the scale holds still; None for AutoLR's own.
        climb, first_scale, gated, rollback, quarantine: as in AutoLR.
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
    start: float | None = None
    hold: float | None = None
    climb: bool | None = None
    first_scale: float | None = None
    gated: bool = True
    rollback: bool = True
    quarantine: float | None = None
    controller: dict[str, Any] = field(default_factory=dict)
    warm_noise: float | None = None
    label: str = ""

    @property
    def shared(self) -> bool:
        """Whether replicas train on their mean gradient."""
        return self.method != "local"

    @property
    def is_auto(self) -> bool:
        return self.method == "loss" or self.method == "gradient"

    def make_climb(self, num_steps: int, *, lr_given: bool) -> Climb | None:
        climbs = self.climb
        if climbs is None:
            told = self.first_scale is not None or not self.gated
            climbs = self.method == "gradient" and not told and has_time_to_climb(num_steps, lr_given=lr_given)
        return Climb(num_steps) if climbs else None

    def acting(self, table: FloatArray, *, climbs: bool) -> tuple[float, float]:
        """Between which steps the scale moves."""
        num_steps = len(table)
        start = num_steps * ((0.0 if climbs else 0.02) if self.start is None else self.start)
        if self.method != "gradient" or self.hold is not None:
            return start, (1 - (0.05 if self.hold is None else self.hold)) * num_steps
        return start, hold_start(num_steps, table.tolist())

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
        steps: taken at the end of each round; in a climb each is a round.
        train_loss: mean loss over replicas, round by round.
        base_lr: centre of the first param group's learning rate, round by round.
        z: the controller's evidence, round by round, of the first knob.
        num_rollbacks: how often it was set back.
        climb_steps, climb_ending: how long its climb took, and how it ended.
        error: why it could not go on, where a run on real processes would have ended; its ``validation`` is then NaN.
    """

    run: Run
    validation: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    base_lr: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    num_rollbacks: int = 0
    climb_steps: int = 0
    climb_ending: str = ""
    error: str = ""

    @property
    def lengths(self) -> list[int]:
        """Steps of each round."""
        return [end - begin for begin, end in zip([0, *self.steps], self.steps, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Steered:
    """One run's numbers: policy and record.

    Args:
        run: its configuration.
        table: the schedule's value in each step, for a peak of 1.
        num_groups: param groups. The paper has a learning rate for each, AutoLR one for all.
        lr_given: whether learning rate and schedule mean anything to AutoLR.
    """

    def __init__(self, run: Run, table: FloatArray, num_groups: int = 1, *, lr_given: bool = True) -> None:
        self.run = run
        climb = run.make_climb(len(table), lr_given=lr_given)
        self.knob_of_group = list(range(num_groups)) if run.method in ("spread", "paper") else [0] * num_groups
        self.steering = Steering(
            num_knobs=max(self.knob_of_group) + 1,
            num_replicas=run.num_replicas,
            spread=run.spread if run.method in ("spread", "anchored", "paper", "loss") else 0.0,
            controller=run.make_controller(),
            scale_bounds=Adapt().bounds,
            gated=run.gated and run.is_auto,
            seed=run.seed,
            first_scale=run.make_first_scale(),
        )
        self.policy = RoundPolicy(
            self.steering,
            interval=run.interval,
            acting=run.acting(table, climbs=climb is not None),
            rollback=Rollback(MAX_ROLLBACKS) if run.is_auto and run.rollback else None,
            climb=climb,
            quarantine=run.quarantine,
            anchored=run.is_auto,
        )
        self.result = Result(run)
        self._losses: list[FloatArray] = []
        self._slopes: list[float] = []

    def take(self, losses: FloatArray, slope: float) -> None:
        """What one step has shown: the loss of each replica, and <g, theta - A>."""
        self._losses.append(losses)
        self._slopes.append(slope)

    @property
    def anchored(self) -> bool:
        return self.run.method in ("loss", "anchored")

    def lrs(self, scheduled: float) -> FloatArray:
        """The learning rate of each replica (row) and param group (column)."""
        base = scheduled * self.run.lr * self.steering.scales
        lrs: FloatArray = (base[:, None] * self.steering.multipliers)[self.knob_of_group].T
        return lrs

    def end_round(self, step: int, finite: BoolArray, scheduled: float, *, last: bool) -> Verdict | None:
        """End the round with what :meth:`take` has taken. None where the run cannot go on."""
        verdict = None
        losses, samples = np.mean(self._losses, axis=0), np.array(self._slopes)[:, None]
        self._losses, self._slopes = [], []
        if not self.result.error:
            slopes = mean_and_error(samples) if self.run.method == "gradient" else None
            rate = scheduled * self.run.lr * float(self.steering.scales[0])
            seen = Observed(step, losses, finite, rate, losses_given=True, slopes=slopes, last=last)
            try:
                verdict = self.policy.end_round(seen)
            except BrokenError as error:
                self.result.error = str(error)
        seen = losses[np.isfinite(losses)]
        self.result.steps.append(step)
        self.result.train_loss.append(float(seen.mean()) if len(seen) else math.nan)
        self.result.base_lr.append(scheduled * self.run.lr * float(self.steering.scales[0]))
        self.result.z.append(verdict.looked.lrs.get("z", (math.nan,))[0] if verdict is not None else math.nan)
        if verdict is not None and verdict.phase == "climb" and not self.policy.climbing:
            assert self.policy.climb is not None
            self.result.climb_steps, self.result.climb_ending = step, self.policy.climb.ending or ""
        self.result.num_rollbacks = verdict.num_rollbacks if verdict is not None else self.result.num_rollbacks
        return verdict


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

    table = schedule_table(schedule, num_steps or task.total_steps)

    found: dict[int, Result] = {}
    for this in dict.fromkeys(map(kind, runs)):
        chosen = [i for i, run in enumerate(runs) if kind(run) == this]
        results = _stacked_sweep(
            task,
            [runs[i] for i in chosen],
            make_optimizer(optimizer),
            table,
            lr_given=schedule != "none",
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
    lr_given: bool,
    device: str,
    dtype: torch.dtype,
    compile: bool,  # noqa: A002
    checkpoints: Checkpoints,
    progress: Callable[[int], None],
    on_end: Callable[[Run, nn.Module], None],
) -> list[Result]:
    num_steps, num_replicas = len(table), runs[0].num_replicas
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
    steered = [_Steered(run, table, len(groups), lr_given=lr_given) for run in runs]
    seen: list[Tensor] = []
    for step in range(num_steps):
        if step:
            for s in steered:
                s.steering.rise(np.full(len(s.steering.scales), math.log(table[step] / table[step - 1])))
        lrs = torch.from_numpy(np.stack([s.lrs(table[step]) for s in steered]))
        found = engine.step(task.gather(rows[step]), lrs.to(device, dtype, non_blocking=True))
        seen.append(torch.cat([found.losses.double(), found.slopes.sum(-1, keepdim=True).double()], dim=1))
        last = step + 1 == num_steps
        due = [s.policy.is_due(step + 1, last=last) for s in steered]
        if not any(due):
            continue
        for rows_of_step in torch.stack(seen).cpu().numpy():
            for s, row in zip(steered, rows_of_step, strict=True):
                s.take(row[:-1], float(row[-1]))
        seen = []
        _end_round(engine, steered, due, step + 1, float(table[step]), last=last)
        progress(step + 1)
    for index, s in enumerate(steered):
        model = engine.mean_model(index)
        s.result.validation = task.evaluate(model)
        if s.result.error:
            s.result.validation = dict.fromkeys(s.result.validation, math.nan)
        on_end(s.run, model)
    return [s.result for s in steered]


def _end_round(
    engine: StackedModels, steered: Sequence[_Steered], due: Sequence[bool], step: int, scheduled: float, *, last: bool
) -> None:
    """End the round of those runs whose round is due."""
    finite = engine.weights.isfinite().all(-1).cpu().numpy()
    found = zip(steered, finite, due, strict=True)
    verdicts = [s.end_round(step, fine, scheduled, last=last) if now else None for s, fine, now in found]
    broken = torch.tensor([v is not None and v.go_back for v in verdicts])
    healthy = [np.ones(engine.num_replicas, dtype=bool) if v is None or v.go_back else v.healthy for v in verdicts]
    if not np.all(healthy):
        engine.repair(torch.from_numpy(np.stack(healthy)))
    # Plain data parallel never averages weights, so replicas that start apart stay apart.
    engine.converge(torch.tensor([now and s.run.method != "fixed" for s, now in zip(steered, due, strict=True)]))
    if broken.any():
        engine.restore(broken)
    kept = torch.tensor([v is not None and v.keep and not v.go_back for v in verdicts])
    if kept.any():
        engine.snapshot(kept)
    renewed = torch.tensor([v is not None and v.new_anchor for v in verdicts])
    if renewed.any():
        engine.set_anchor(renewed)
    if not last and any(s.anchored for s in steered):
        # Multiplier 1 leaves the replicas of a run without an anchor at their mean.
        ones = np.ones((engine.num_replicas, len(engine.group_names)))
        rho = [
            s.steering.multipliers[s.knob_of_group].T if s.anchored and now else ones
            for s, now in zip(steered, due, strict=True)
        ]
        engine.place(torch.from_numpy(np.stack(rho)).to(engine.weights.device))
