"""``hdet compare``: AutoLR, the paper's controller, fixed learning rates and other methods at equal budget.

Every run sees the same number of rows; a method with replicas or workers gives each an N-th part of the batch. Random
search is the exception, and says so.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast, get_args

from hdet.checks import printable
from hdet_lab import baselines
from hdet_lab.command_line import parse
from hdet_lab.experiment import Experiment, LabOptions, final_loss, make_console, show
from hdet_lab.recipes import BaselineMethod, CompareMethod, SweepMethod, starts
from hdet_lab.reports import compare as compare_report
from hdet_lab.runs.progress import RunBar
from hdet_lab.runs.settings import task_first
from hdet_lab.stacked.population import log_uniform, train_populations
from hdet_lab.stacked.sweep import sweep

DEFAULT_METHODS: tuple[CompareMethod, ...] = tuple(m for m in get_args(CompareMethod) if m not in ("local", "spread"))


@dataclass(frozen=True)
class CompareOptions(LabOptions):
    """Compare AutoLR with fixed learning rates, the paper's controller and other methods, from many starts."""

    methods: tuple[CompareMethod, ...] = DEFAULT_METHODS
    """Which to run; local and spread (averaging without a controller) only when named."""
    starts: tuple[float, ...] = ()
    """Learning rates to start from; default eight over four decades, by optimizer."""
    population_interval: int | None = None
    """Steps between two exchanges of a population; default a twentieth of the run."""
    workers: int = 1
    """Processes for the methods that train one model at a time."""

    def grid(self) -> tuple[float, ...]:
        return self.starts or starts(self.optimizer)

    def check(self) -> None:
        super().check()
        methods_rule = "one or more different methods"
        self.require("methods", methods_rule, bool(self.methods) and len(set(self.methods)) == len(self.methods))
        starts_ok = all(0 < start < math.inf for start in self.starts) and len(set(self.starts)) == len(self.starts)
        self.require("starts", "different finite numbers > 0", starts_ok)
        if len(self.grid()) < 2 and {"population", "random-search"} & set(self.methods):
            self.require("starts", "two or more, a range to draw from, for population and random-search", ok=False)
        at_least_one = self.population_interval is None or self.population_interval >= 1
        self.require("population_interval", "an integer >= 1", at_least_one)
        self.require("workers", "an integer >= 1", self.workers >= 1)


@dataclass
class Record:
    """One result of a method.

    Attributes:
        method: its name.
        start: the learning rate it was given; None for a method without.
        seed: of the run.
        validation: figures at the end, ``loss`` first.
        final_train_loss: over the last 2% of the run.
        compute: rows it has seen, in runs.
        details: what else the method has to say.
    """

    method: str
    start: float | None
    seed: int
    validation: dict[str, float]
    final_train_loss: float
    compute: int = 1
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.validation["loss"]


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(CompareOptions, "compare", task_first(arguments))
    experiment = Experiment("compare", options)
    console = make_console()
    experiment.facts["config"] |= {"starts": options.grid(), "population_interval": _population_interval(experiment)}
    experiment.facts["packages"] = baselines.package_versions()
    records: list[Record] = []
    skipped: list[str] = []
    seconds: dict[str, float] = {}
    for method in options.methods:
        reason = baselines.missing_package(method) if baselines.is_baseline(method) else None
        if reason is not None:
            skipped.append(reason)
            console.print(reason, soft_wrap=True, markup=False)
            continue
        started = time.perf_counter()
        name, total = str(method), experiment.num_steps
        if baselines.is_baseline(method):  # one model after the other
            name, total = f"{method}, runs", len(_baseline_runs(experiment, method))
        with RunBar(console, name, total) as bar:
            records += run_method(experiment, method, bar.advance)
        seconds[method] = time.perf_counter() - started
        gc.collect()  # an engine refers to itself, and its memory on the device must not wait
        # After each method: what took minutes is not lost with what comes after it.
        experiment.write_results({"time_s": seconds, "skipped": skipped, "runs": [asdict(r) for r in records]})
    experiment.write_results({"time_s": seconds, "skipped": skipped, "runs": [asdict(r) for r in records]})
    if not records:
        return 0
    tables = [compare_report.run_table(records, options.grid()), compare_report.summary_table(records, seconds)]
    for table in tables:
        show(console, table)
    chart = compare_report.chart(records, options.grid())
    path = experiment.write_report(f"{options.task}, {options.optimizer}: comparison", tables, [chart])
    console.print(printable(f"wrote {path}"), soft_wrap=True, markup=False)
    return 0


def run_method(experiment: Experiment, method: CompareMethod, progress: Callable[[int], None]) -> Iterator[Record]:
    """All records of one method: every seed, and every start where it has one."""
    options = experiment.options
    assert isinstance(options, CompareOptions)
    if baselines.is_baseline(method):
        yield from _run_baseline(experiment, method, options.workers, progress)
    elif method == "population":
        yield from _run_population(experiment, options, progress)
    elif method == "random-search":
        yield from _run_random_search(experiment, options, progress)
    else:
        swept = cast(SweepMethod, method)
        runs = [experiment.make_run(lr, seed, swept) for seed in options.seeds for lr in options.grid()]
        for result in sweep(experiment.task, runs, progress=progress, **experiment.sweep_options()):
            train_loss = final_loss(result.train_loss, result.lengths)
            run = result.run
            yield Record(method, run.lr, run.seed, result.validation, train_loss, details=result.as_dict())


def _run_population(
    experiment: Experiment, options: CompareOptions, progress: Callable[[int], None]
) -> Iterator[Record]:
    grid = options.grid()
    populations = train_populations(
        experiment.task,
        options.seeds,
        num_workers=options.replicas,
        lr_range=(min(grid), max(grid)),
        interval=_population_interval(experiment),
        progress=progress,
        **experiment.sweep_options(),
    )
    for p in populations:
        yield Record("population", None, p.seed, p.validation, p.train_loss[-1][p.best], details=p.as_dict())


def _run_random_search(
    experiment: Experiment, options: CompareOptions, progress: Callable[[int], None]
) -> Iterator[Record]:
    grid, num = options.grid(), options.replicas
    runs = [
        experiment.make_run(float(lr), seed, "fixed")
        for seed in options.seeds
        for lr in log_uniform(min(grid), max(grid), num, seed=seed)
    ]
    results = sweep(experiment.task, runs, progress=progress, **experiment.sweep_options())
    for index, seed in enumerate(options.seeds):
        mine = results[index * num : (index + 1) * num]
        best = min(mine, key=lambda result: finite_or_inf(result.validation["loss"]))
        tried = {
            "lrs": [result.run.lr for result in mine],
            "validation": [result.validation for result in mine],
            "best_lr": best.run.lr,
        }
        train_loss = final_loss(best.train_loss, best.lengths)
        yield Record("random-search", None, seed, best.validation, train_loss, compute=num, details=tried)


def _run_baseline(
    experiment: Experiment, method: BaselineMethod, num_workers: int, progress: Callable[[int], None]
) -> Iterator[Record]:
    outcomes = baselines.train_all(_baseline_runs(experiment, method), task=experiment.task, num_workers=num_workers)
    for index, outcome in enumerate(outcomes):
        run = outcome.run
        progress(index + 1)
        train_loss = final_loss(outcome.train_loss, [1] * len(outcome.train_loss))
        yield Record(method, run.lr, run.seed, outcome.validation, train_loss)


def _baseline_runs(experiment: Experiment, method: BaselineMethod) -> list[baselines.BaselineRun]:
    options = experiment.options
    assert isinstance(options, CompareOptions)
    lrs: Sequence[float | None] = options.grid() if method == "schedule-free" else [None]
    return [
        baselines.BaselineRun(
            options.task,
            method,
            lr,
            seed,
            experiment.num_steps,
            schedule=options.schedule,
            optimizer=options.optimizer,
            device=options.device,
            data=options.data,
            task_options=options.task_options(),
        )
        for seed in options.seeds
        for lr in lrs
    ]


def finite_or_inf(loss: float) -> float:
    """What a loss counts as where losses are compared: a broken run is the worst."""
    return loss if math.isfinite(loss) else math.inf


def _population_interval(experiment: Experiment) -> int:
    options = experiment.options
    assert isinstance(options, CompareOptions)
    return options.population_interval or max(1, experiment.num_steps // 20)
