"""``hdet bench``: the benchmark. A suite of tasks in two halves, AutoLR and its rivals, and the pages made of them.

With ``--task`` a few methods are compared on a task of the user's own, and the last line says what to use.

What is finished is skipped, so that the same command goes on after a break. Pages are made from the files alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from hdet.checks import printable
from hdet.launch import end_with_parent, server
from hdet_lab.bench.runner import FAILED, Runner
from hdet_lab.bench.suite import (
    AROUND_TORCH,
    BY_NAME,
    CHOSEN,
    DEFAULT_ENTRIES,
    METHODS,
    OWN_METHODS,
    Entry,
    MethodName,
    jobs,
    own_entry,
)
from hdet_lab.command_line import Options, UsageError, parse
from hdet_lab.runs.progress import RunBar
from hdet_lab.targets import is_target, module_target

POLL_S = 1.0
MIN_STEPS = 60
"""Fewer leave successive halving nothing for its last run."""


@dataclass(frozen=True)
class BenchOptions(Options):
    """Run the benchmark, or what is missing of it, and make the pages."""

    task: str = ""
    """Your own task, MODULE:CLASS or FILE.py:CLASS: methods are compared on it, and the last line says what to use."""
    tasks: tuple[str, ...] = ()
    """Entries of the suite, by name, or your own classes, MODULE:CLASS; default all of the halves named."""
    methods: tuple[MethodName, ...] = METHODS  # type: ignore[assignment]
    """What to run on each; with --task, a few of them are the default."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of weights and data order; each method runs once for each."""
    half: Literal["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "extra", "all"] = "all"
    """A: tasks on which defaults may be chosen; B to J: those that are only reported; extra: none of them."""
    steps: int | None = None
    """Optimizer steps of a run; default each entry's own."""
    out: Path = Path("runs/bench")
    """Folder of the files, one for each method on each task; what it has is not run again."""
    data: Path = Path("data")
    """Folder that holds the tasks' data; a task without data is skipped."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    workers: int = 1
    """Processes that share the work and the device."""
    pages: bool = False
    """Make the records and pages from the files in --out instead of running; nothing is trained."""
    records: Path = Path("lab/benchmarks/results/bench")
    """With --pages: folder of the records, one for each task."""
    docs: Path = Path("docs")
    """With --pages: folder of results.md and figures/."""

    def check(self) -> None:
        """UsageError for what cannot be run."""
        self.require("seeds", "one or more different integers >= 0",
                     bool(self.seeds) and min(self.seeds) >= 0 and len(set(self.seeds)) == len(self.seeds))  # fmt: skip
        self.require("steps", f"an integer >= {MIN_STEPS}", self.steps is None or self.steps >= MIN_STEPS)
        self.require("workers", "an integer >= 1", self.workers >= 1)
        self.require("methods", "one or more", bool(self.methods))
        self.require("device", "cpu or cuda", self.device in ("cpu", "cuda"))
        if self.task:
            self.require("task", "given without --tasks and --pages", not self.tasks and not self.pages)
            self.require("task", "MODULE:CLASS, or FILE.py:CLASS of a file that exists", is_target(self.own_task))
        for name in self.tasks:
            if name not in BY_NAME and not is_target(name):
                raise UsageError(f"--tasks must be among {', '.join(BY_NAME)}, or MODULE:CLASS, but got {name!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda needs a GPU that torch can use, but there is none; use --device cpu")

    @property
    def own_task(self) -> str:
        """``--task`` as MODULE:CLASS."""
        return module_target(self.task)

    def chosen_methods(self) -> tuple[str, ...]:
        """What is run."""
        return OWN_METHODS if self.task and self.methods == METHODS else self.methods

    def entries(self) -> list[Entry]:
        """What is chosen."""
        if self.task:
            return [own_entry(self.own_task)]
        chosen = [BY_NAME.get(name) or own_entry(name) for name in self.tasks or DEFAULT_ENTRIES]
        return [entry for entry in chosen if self.half in ("all", entry.half)]


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(BenchOptions, "bench", arguments)
    options.check()
    console = Console() if sys.stdout.isatty() else Console(width=240)
    if options.pages:
        from hdet_lab.bench.pages import make_pages
        from hdet_lab.bench.records import gather

        if options.out.is_dir():
            gather(options.out, options.records)
        for path in make_pages(options.records, options.docs):
            console.print(printable(f"wrote {path}"), soft_wrap=True, markup=False)
        return 0
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    is_worker = "HDET_BENCH_WORKER" in os.environ
    if not is_worker:
        for path in options.out.rglob("*.failed"):
            path.unlink()  # tried again
    if options.workers > 1 and not is_worker:
        return _share(options, arguments, console)
    runner = _runner(options, console)
    with RunBar(console, "bench", max(1, len(jobs(runner.entries, runner.methods))), quiet=is_worker) as bar:
        problems = runner.run(bar.advance)
    return _end(console, problems, options, quiet=is_worker)


def _runner(options: BenchOptions, console: Console) -> Runner:
    return Runner(
        options.out,
        options.entries(),
        options.chosen_methods(),
        options.seeds,
        options.steps,
        options.device,
        options.data,
        lambda line: console.print(line, soft_wrap=True, markup=False),
        CHOSEN if options.task or options.half in AROUND_TORCH else {},
    )


def _share(options: BenchOptions, arguments: Sequence[str], console: Console) -> int:
    """Several processes with the same command, which share the folder; this one shows how far they are."""
    runner = _runner(options, console)
    todo = jobs(runner.entries, runner.methods)
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    workers = [server().Process(target=_work, args=(arguments, threads)) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    try:
        with RunBar(console, "bench", len(todo)) as bar:
            while any(worker.is_alive() for worker in workers):
                bar.advance(sum(runner.path(job).exists() for job in todo))
                time.sleep(POLL_S)
    finally:
        for worker in workers:
            worker.terminate()
    problems = [path.read_text().strip().splitlines()[-1] for path in sorted(options.out.rglob("*.failed"))]
    left = [job.name for job in todo if not runner.is_done(job) and not runner.has_failed(job)]
    if left:
        problems.append(f"not run: {', '.join(left)}; a default needs the grids of half A")
    return _end(console, problems, options)


def _work(arguments: Sequence[str], num_threads: int) -> None:
    end_with_parent()
    os.environ["HDET_BENCH_WORKER"] = "1"
    torch.set_num_threads(num_threads)
    sys.exit(main(arguments))


def _last_lines(options: BenchOptions) -> list[str]:
    if not options.task:
        return ["hdet bench --pages makes the pages from the files"]
    from hdet_lab.bench.advice import advise
    from hdet_lab.bench.records import of_files

    record = of_files(options.out / options.entries()[0].name)
    return ["No advice: nothing was run."] if record is None else advise(record)


def _end(console: Console, problems: Sequence[str], options: BenchOptions, *, quiet: bool = False) -> int:
    if not quiet:
        for problem in problems:
            console.print(problem, soft_wrap=True, markup=False)
        for line in _last_lines(options):
            console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
    is_skipped = bool(options.task and problems)  # of one task nothing else can be expected
    return 1 if is_skipped or any(f" {FAILED}: " in problem for problem in problems) else 0
