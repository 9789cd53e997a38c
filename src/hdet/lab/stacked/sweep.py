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
from hdet.policy.rollback import BrokenError, Rollback
from hdet.policy.round import Observed, RoundPolicy, Verdict
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
        first_scale, gated, rollback, quarantine: as in AutoLR.
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
    quarantine: float | None = None
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
        base_lr: centre of the first param group's learning rate, round by round.
        z: the controller's evidence, round by round, of the first knob.
        num_rollbacks: how often it was set back.
        error: why it could not go on, where a run on real processes would have ended; its ``validation`` is then NaN.
    """

    run: Run
    validation: dict[str, float] = field(default_factory=dict)
    train_loss: list[float] = field(default_factory=list)
    base_lr: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    num_rollbacks: int = 0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Steered:
    """One run's numbers: policy and record.

    Args:
        run: its configuration.
        num_steps: of the whole run.
        num_groups: param groups. The paper has a learning rate for each, AutoLR one for all.
    """

    def __init__(self, run: Run, num_steps: int, num_groups: int = 1) -> None:
        self.run = run
        self.knob_of_group = list(range(num_groups)) if run.method in ("spread", "paper") else [0] * num_groups
        self.steering = Steering(
            num_knobs=max(self.knob_of_group) + 1,
            num_replicas=run.num_replicas,
            spread=run.spread if run.method in ("spread", "anchored", "paper", "loss") else 0.0,
            controller=run.make_controller(),
            scale_bounds=(1e-6, 1e6),
            gated=run.gated and run.is_auto,
            seed=run.seed,
            first_scale=run.make_first_scale(),
        )
        self.policy = RoundPolicy(
            self.steering,
            interval=run.interval,
            acting=(run.start * num_steps, (1 - run.hold) * num_steps),
            rollback=Rollback(MAX_ROLLBACKS) if run.is_auto and run.rollback else None,
            quarantine=run.quarantine,
            anchored=run.is_auto,
        )
        self.result = Result(run)

    @property
    def anchored(self) -> bool:
        return self.run.method in ("loss", "anchored")

    def lrs(self, scheduled: float) -> FloatArray:
        """The learning rate of each replica (row) and param group (column)."""
        base = scheduled * self.run.lr * self.steering.scales
        lrs: FloatArray = (base[:, None] * self.steering.multipliers)[self.knob_of_group].T
        return lrs

    def end_round(
        self, step: int, losses: FloatArray, finite: BoolArray, samples: FloatArray, scheduled: float, *, last: bool
    ) -> Verdict | None:
        """Take in a round. None where the run cannot go on."""
        verdict = None
        if not self.result.error:
            slopes = mean_and_error(samples) if self.run.method == "gradient" else None
            try:
                verdict = self.policy.end_round(Observed(step, losses, finite, slopes=slopes, last=last))
            except BrokenError as error:
                self.result.error = str(error)
        seen = losses[np.isfinite(losses)]
        self.result.train_loss.append(float(seen.mean()) if len(seen) else math.nan)
        self.result.base_lr.append(scheduled * self.run.lr * float(self.steering.scales[0]))
        self.result.z.append(verdict.looked.lrs.get("z", (math.nan,))[0] if verdict is not None else math.nan)
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
    steered = [_Steered(run, num_steps, len(groups)) for run in runs]
    total = torch.zeros(len(runs), num_replicas, dtype=torch.float64, device=device)
    slopes = torch.zeros(interval, len(runs), dtype=torch.float64, device=device)
    num_taken = 0
    for step in range(num_steps):
        if step:
            for s in steered:
                s.steering.rise(np.full(len(s.steering.scales), math.log(table[step] / table[step - 1])))
        lrs = torch.from_numpy(np.stack([s.lrs(table[step]) for s in steered]))
        found = engine.step(task.gather(rows[step]), lrs.to(device, dtype, non_blocking=True))
        total += found.losses
        slopes[num_taken] = found.slopes.sum(-1)
        num_taken += 1
        last = step + 1 == num_steps
        if steered[0].policy.is_due(step + 1, last=last):
            _end_round(engine, steered, step + 1, total / num_taken, slopes[:num_taken], float(table[step]), last=last)
            total.zero_()
            num_taken = 0
            progress(step + 1)
    for index, s in enumerate(steered):
        model = engine.mean_model(index)
        s.result.validation = task.evaluate(model)
        if s.result.error:
            s.result.validation = dict.fromkeys(s.result.validation, math.nan)
        on_end(s.run, model)
    return [s.result for s in steered]


def _end_round(
    engine: StackedModels,
    steered: Sequence[_Steered],
    step: int,
    losses: Tensor,
    slopes: Tensor,
    scheduled: float,
    *,
    last: bool,
) -> None:
    finite = engine.weights.isfinite().all(-1).cpu().numpy()
    found = zip(steered, losses.cpu().numpy(), finite, slopes.cpu().numpy().T, strict=True)
    verdicts = [s.end_round(step, row, fine, samples[:, None], scheduled, last=last) for s, row, fine, samples in found]
    broken = torch.tensor([v is not None and v.go_back for v in verdicts])
    healthy = [np.ones(engine.num_replicas, dtype=bool) if v is None or v.go_back else v.healthy for v in verdicts]
    if not np.all(healthy):
        engine.repair(torch.from_numpy(np.stack(healthy)))
    # Plain data parallel never averages weights, so replicas that start apart stay apart.
    engine.converge(torch.tensor([s.run.method != "fixed" for s in steered]))
    if broken.any():
        engine.restore(broken)
    engine.snapshot(~broken)
    renewed = torch.tensor([v is not None and v.new_anchor for v in verdicts])
    if renewed.any():
        engine.set_anchor(renewed)
    if not last and any(s.anchored for s in steered):
        # Multiplier 1 leaves the replicas of a run without an anchor at their mean.
        ones = np.ones((engine.num_replicas, len(engine.group_names)))
        rho = [s.steering.multipliers[s.knob_of_group].T if s.anchored else ones for s in steered]
        engine.place(torch.from_numpy(np.stack(rho)).to(engine.weights.device))
