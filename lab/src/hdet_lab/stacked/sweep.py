"""Many runs side by side on the stacked engine, steered by the code that steers real processes.

A run is a task, a starting learning rate, a seed and a method; runs with the same number of replicas train as one
batched computation. Every decision is that of the :class:`~hdet.policy.round.RoundPolicy` which decides for
:class:`~hdet.run.Run` too; only averaging and placing weights are the stacked engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hdet.checks import FloatArray
from hdet_lab.recipes import make_optimizer, schedule_table
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.inputs import renew_statistics, row_table, warm_noise
from hdet_lab.stacked.optim import StackedOptimizer
from hdet_lab.stacked.rivals import Rule
from hdet_lab.stacked.run import Result, Run
from hdet_lab.stacked.steered import Steered
from hdet_lab.tasks.base import Task

Checkpoints = Mapping[int, Mapping[str, Tensor]]


def sweep(
    task: Task,
    runs: Sequence[Run],
    *,
    optimizer: str | StackedOptimizer | Rule = "adam",
    schedule: str = "one-cycle",
    num_steps: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = False,  # noqa: A002
    checkpoints: Checkpoints | None = None,
    progress: Callable[[int], None] = lambda _: None,
    watch: Callable[[int, StackedModels, Sequence[Run]], None] = lambda *_: None,
    on_end: Callable[[Run, nn.Module], None] = lambda *_: None,
) -> list[Result]:
    """Train all runs, those with the same number of replicas and interval side by side; results in their order.

    Runs with ``warm_noise`` start from the state dict that ``checkpoints`` has for their seed. ``progress`` hears the
    step at the end of each round; ``watch`` sees the step and the models after each step, with their runs; ``on_end``
    sees every run's model at its final mean weights, and must copy what it keeps.
    """
    cold = [run.seed for run in runs if run.warm_noise is not None and run.seed not in (checkpoints or {})]
    if cold:
        raise ValueError(
            f"a run with warm_noise must have a checkpoint of its seed, but there is none of seed {cold[0]}"
        )

    def kind(run: Run) -> tuple[int, int, bool]:
        return run.num_replicas, run.interval, run.shared

    length = num_steps or task.total_steps
    tables = {name: schedule_table(name, length) for name in {run.schedule or schedule for run in runs}}

    found: dict[int, Result] = {}
    for this in dict.fromkeys(map(kind, runs)):
        chosen = [i for i, run in enumerate(runs) if kind(run) == this]
        results = _stacked_sweep(
            task,
            [runs[i] for i in chosen],
            make_optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
            [runs[i].schedule or schedule for i in chosen],
            tables,
            device=device,
            dtype=dtype,
            compile=compile,
            checkpoints=checkpoints or {},
            progress=progress,
            watch=watch,
            on_end=on_end,
        )
        found.update(zip(chosen, results, strict=True))
    return [found[i] for i in range(len(runs))]


def _stacked_sweep(
    task: Task,
    runs: Sequence[Run],
    optimizer: StackedOptimizer | Rule,
    schedules: Sequence[str],
    tables: Mapping[str, FloatArray],
    *,
    device: str,
    dtype: torch.dtype,
    compile: bool,  # noqa: A002
    checkpoints: Checkpoints,
    progress: Callable[[int], None],
    watch: Callable[[int, StackedModels, Sequence[Run]], None],
    on_end: Callable[[Run, nn.Module], None],
) -> list[Result]:
    num_steps, num_replicas = len(tables[schedules[0]]), runs[0].num_replicas
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
    steered = [
        Steered(run, tables[name], len(groups), lr_given=name != "none", num_parameters=sum(engine.sizes))
        for run, name in zip(runs, schedules, strict=True)
    ]
    seen: list[Tensor] = []
    for step in range(num_steps):
        if step:
            for s in steered:
                s.policy.follow(step)
        lrs = torch.from_numpy(np.stack([s.lrs(s.table[step]) for s in steered]))
        found = engine.step(task.gather(rows[step]), lrs.to(device, dtype, non_blocking=True))
        slopes = found.slopes.sum(-1, keepdim=True)
        seen.append(torch.cat([found.losses.double(), slopes.double(), found.sizes.double()], dim=1))
        last = step + 1 == num_steps
        due = [s.policy.is_due(step + 1, last=last) for s in steered]
        if not any(due):
            watch(step + 1, engine, runs)
            continue
        for rows_of_step in torch.stack(seen).cpu().numpy():
            for s, row in zip(steered, rows_of_step, strict=True):
                s.take(row[:-4], float(row[-4]), row[-3:])
        seen = []
        _end_round(engine, steered, due, step + 1, last=last)
        watch(step + 1, engine, runs)
        progress(step + 1)
    for index, s in enumerate(steered):
        model = engine.mean_model(index)
        if isinstance(optimizer, Rule):
            renew_statistics(task, model, s.run.seed, num_steps)
        s.result.validation = task.evaluate(model)
        if s.result.error:
            s.result.validation = dict.fromkeys(s.result.validation, math.nan)
        on_end(s.run, model)
    return [s.result for s in steered]


def _end_round(
    engine: StackedModels, steered: Sequence[Steered], due: Sequence[bool], step: int, *, last: bool
) -> None:
    """End the round of those runs whose round is due."""
    finite = engine.weights.isfinite().all(-1).cpu().numpy()
    found = zip(steered, finite, due, strict=True)
    verdicts = [s.end_round(step, fine, float(s.table[step - 1]), last=last) if now else None for s, fine, now in found]
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
    placed = torch.tensor([s.anchored and now for s, now in zip(steered, due, strict=True)])
    if not last and placed.any():
        rho = np.stack([s.steering.multipliers[s.knob_of_group].T for s in steered])
        engine.place(torch.from_numpy(rho).to(engine.weights.device), placed)
