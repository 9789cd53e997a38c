"""``hdet ablate``: the paper's six configurations, and AutoLR in the place of its controller, under one protocol.

All configurations of all seeds train side by side: the same data order, batch, schedule and number of replicas.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor, nn

from hdet.checks import printable
from hdet_lab.command_line import UsageError, parse
from hdet_lab.experiment import (
    Experiment,
    LabOptions,
    final_loss,
    make_console,
    show,
)
from hdet_lab.recipes import SweepMethod, low_and_high
from hdet_lab.reports.drawing import draw, line
from hdet_lab.reports.page import Table, number
from hdet_lab.runs.progress import RunBar
from hdet_lab.runs.settings import check_rows, task_first
from hdet_lab.stacked.run import Result, Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks.base import Task

RISE, NUM_ROUNDS = 0.2, 3


class Configuration(NamedTuple):
    """A row of the ablation: at which learning rate, by which method, from a warm noisy start or not."""

    name: str
    high: bool
    method: SweepMethod
    warm: bool


CONFIGURATIONS = (
    Configuration("Baseline-Low", False, "fixed", False),
    Configuration("Baseline-High", True, "fixed", False),
    Configuration("Warm-Init", True, "fixed", True),
    Configuration("HDET without auto-LR", True, "spread", True),
    Configuration("HDET without warm init", True, "paper", False),
    Configuration("HDET", True, "paper", True),
    Configuration("anchored spread without auto-LR", True, "anchored", True),
    Configuration("AutoLR loss without warm init", True, "loss", False),
    Configuration("AutoLR loss", True, "loss", True),
    Configuration("AutoLR gradient without warm init", True, "gradient", False),
    Configuration("AutoLR gradient", True, "gradient", True),
)


@dataclass(frozen=True)
class AblateOptions(LabOptions):
    """Train the paper's six configurations, and AutoLR in the place of its controller, side by side on one device."""

    low_lr: float | None = None
    """Learning rate of Baseline-Low, and of the checkpoint for warm starts; default by task and optimizer."""
    high_lr: float | None = None
    """Learning rate of all others, too high for plain training; default by task and optimizer."""
    warm_steps: int | None = None
    """Steps at the low learning rate, held constant, that make the checkpoint; default a tenth of the run."""
    noise: float = 0.01
    """Nu of Eq. 10, size of the noise of a warm start relative to each tensor."""
    momentum: float = 0.9
    """Beta of the paper's controller."""
    rate: float = 0.5
    """Lambda of the paper's controller."""
    temperature: float = 0.002
    """Sigma of the paper's controller."""

    def lrs(self) -> tuple[float, float]:
        low, high = low_and_high(self.task, self.optimizer)
        return self.low_lr or low, self.high_lr or high

    def check(self) -> None:
        super().check()
        for name in ("low_lr", "high_lr"):
            value = getattr(self, name)
            self.require(name, "a finite number > 0", value is None or 0 < value < math.inf)
        low, high = self.lrs()
        if low >= high:
            raise UsageError(f"--low-lr must be below --high-lr, but got {low:g} and {high:g}")
        self.require("warm_steps", "an integer >= 1", self.warm_steps is None or self.warm_steps >= 1)
        self.require("noise", "a finite number >= 0", 0 <= self.noise < math.inf)
        self.require("momentum", "in [0, 1)", 0 <= self.momentum < 1)
        self.require("rate", "a finite number >= 0", 0 <= self.rate < math.inf)
        self.require("temperature", "a finite number > 0", 0 < self.temperature < math.inf)

    def check_run(self, task: Task, num_steps: int, num_replicas: int, *, seed: int = 0) -> None:
        super().check_run(task, num_steps, num_replicas, seed=seed)
        check_rows(task, "--warm-steps", self.warm_steps or 1)


class Divergence(NamedTuple):
    """Index of the first round of a divergence, and whether the loss came back below the limit in the end."""

    round_index: int
    recovered: bool


def find_divergence(losses: Sequence[float]) -> Divergence | None:
    """When a run diverged, by its training loss round by round; None where it did not.

    At the first round that is not finite, or that begins three in a row above the best so far by more than 20% of it
    and more than 20% of the progress from the first round to it. The best is the lowest mean of three rounds, so that
    one lucky round does not make the next ones a divergence.
    """
    best = math.inf
    for index, loss in enumerate(losses):
        limit = best + RISE * max(abs(best), losses[0] - best) if math.isfinite(best) else math.inf
        following = losses[index : index + NUM_ROUNDS]
        if not math.isfinite(loss):
            return Divergence(index, recovered=False)
        if len(following) == NUM_ROUNDS and all(not value <= limit for value in following):
            return Divergence(index, recovered=losses[-1] <= limit)
        recent = losses[max(0, index - NUM_ROUNDS + 1) : index + 1]
        best = min(best, sum(recent) / len(recent))
    return None


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(AblateOptions, "ablate", task_first(arguments))
    experiment = Experiment("ablate", options)
    console = make_console()
    low, high = options.lrs()
    warm_steps = options.warm_steps or max(1, experiment.num_steps // 10)
    experiment.facts["config"] |= {"low_lr": low, "high_lr": high, "warm_steps": warm_steps}
    how = (
        f"Warm starts: one checkpoint for each seed, the same for all its configurations, made by {warm_steps} steps "
        f"at a constant learning rate of {low:g} on the first batches of the run. They come on top of the run, which "
        f"sees the same batches again. Every replica adds noise of its own, {options.noise:g} of the size of each "
        "tensor (Eq. 10); plain runs never average it away."
    )
    console.print(how)
    started = time.perf_counter()
    checkpoints = make_checkpoints(experiment, low, warm_steps, console)
    gc.collect()  # an engine refers to itself, and its memory on the device must not wait
    runs = make_runs(experiment, low, high)
    with RunBar(console, f"{len(runs)} runs", experiment.num_steps) as bar:
        results = sweep(
            experiment.task, runs, checkpoints=checkpoints, progress=bar.advance, **experiment.sweep_options()
        )
    experiment.facts["time_s"] = time.perf_counter() - started
    rows = [summarise(experiment, result) for result in results]
    experiment.write_results({"warm_start": how, "divergence_rule": find_divergence.__doc__, "runs": rows})
    tables = [_seed_table(rows), _mean_table(rows)]
    for table in tables:
        show(console, table)
    path = experiment.write_report(f"{options.task}: ablation", tables, [_chart(experiment, results)])
    console.print(printable(f"wrote {path}"), soft_wrap=True, markup=False)
    return 0


def make_runs(experiment: Experiment, low: float, high: float) -> list[Run]:
    """Every configuration with every seed, all on the same number of replicas."""
    options = experiment.options
    assert isinstance(options, AblateOptions)
    paper = {"momentum": options.momentum, "rate": options.rate, "temperature": options.temperature}
    return [
        experiment.make_run(
            high if c.high else low,
            seed,
            c.method,
            num_replicas=options.replicas,
            controller=paper if c.method == "paper" else {},
            warm_noise=options.noise if c.warm else None,
            label=c.name,
        )
        for c in CONFIGURATIONS
        for seed in options.seeds
    ]


def make_checkpoints(
    experiment: Experiment, lr: float, num_steps: int, console: Console
) -> dict[int, dict[str, Tensor]]:
    """Weights and buffers of each seed after some steps at ``lr``, on the host."""
    found: dict[int, dict[str, Tensor]] = {}

    def keep(run: Run, model: nn.Module) -> None:
        found[run.seed] = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    replicas = experiment.options.replicas
    runs = [experiment.make_run(lr, s, "fixed", num_replicas=replicas) for s in experiment.options.seeds]
    shared = {**experiment.sweep_options(), "num_steps": num_steps, "schedule": "constant"}
    with RunBar(console, "checkpoints", num_steps) as bar:
        sweep(experiment.task, runs, progress=bar.advance, on_end=keep, **shared)
    return found


def summarise(experiment: Experiment, result: Result) -> dict[str, Any]:
    """One run as the results have it."""
    divergence = find_divergence(result.train_loss)
    return {
        "configuration": result.run.label,
        "lr": result.run.lr,
        "seed": result.run.seed,
        "final_train_loss": final_loss(result.train_loss, result.lengths),
        "diverged_at_step": None if divergence is None else result.steps[divergence.round_index - 1],
        "recovered": divergence is not None and divergence.recovered,
        **result.as_dict(),
    }


def _seed_table(rows: Sequence[dict[str, Any]]) -> Table:
    figures = list(dict.fromkeys(name for row in rows for name in row["validation"]))
    heads = ["configuration", "LR", "seed", "train loss", *(f"validation {name}" for name in figures)]
    table = Table("Every run", [*heads, "LR at half", "rollbacks", "diverged at step"])
    for row in rows:
        table.rows.append(
            [
                row["configuration"],
                f"{row['lr']:g}",
                str(row["seed"]),
                number(row["final_train_loss"]),
                *(number(row["validation"].get(name)) for name in figures),
                # At the end it is near zero for all.
                f"{row['base_lr'][len(row['base_lr']) // 2]:.2g}",
                str(row["num_rollbacks"]),
                _diverged(row),
            ]
        )
    return table


def _diverged(row: dict[str, Any]) -> str:
    step = row["diverged_at_step"]
    return "-" if step is None else f"{step}, came back" if row["recovered"] else str(step)


def _mean_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Over seeds; a run without a finite loss leaves its configuration without a mean."""
    table = Table("By configuration, mean over seeds", ["configuration", "LR", "train loss", "validation", "diverged"])
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        train = sum(row["final_train_loss"] for row in mine) / len(mine)
        validation = sum(row["validation"]["loss"] for row in mine) / len(mine)
        num_diverged = sum(row["diverged_at_step"] is not None for row in mine)
        row = [name, f"{mine[0]['lr']:g}", number(train), number(validation), f"{num_diverged} of {len(mine)}"]
        table.rows.append(row)
    return table


def _chart(experiment: Experiment, results: Sequence[Result]) -> Any:
    names = list(dict.fromkeys(result.run.label for result in results))
    firsts = [result.train_loss[0] for result in results if math.isfinite(result.train_loss[0])]
    seen = [loss for result in results for loss in result.train_loss if math.isfinite(loss)]

    def fill(axes: Any) -> None:
        for result in results:
            label = result.run.label if result.run.seed == experiment.options.seeds[0] else None
            line(axes, result.steps, result.train_loss, names.index(result.run.label), label=label)
        # A run that explodes leaves through the top instead of pressing all others into one line.
        if firsts and max(seen) > (top := 1.5 * max(firsts)) > min(seen):
            axes.set_ylim(min(seen) - 0.1 * (top - min(seen)), top)
        axes.set_ylabel("loss")

    return draw("loss", "Training loss", "Mean over replicas, round by round, one line a seed.", fill)
