"""Runs the suite: one JSON file for each method on each task, what is finished is skipped, processes share the work.

Several processes may work on the same folder: each claims a job with a file of its own before it starts. Where a file
lacks seeds, they are added to it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hdet_lab.bench.methods import run_method
from hdet_lab.bench.statistics import choose_default
from hdet_lab.bench.suite import CALIBRATIONS, ENTRIES, Entry, Job, jobs
from hdet_lab.bench.train import Bench
from hdet_lab.command_line import UsageError
from hdet_lab.runs import provenance
from hdet_lab.runs.folder import plain
from hdet_lab.runs.settings import open_task
from hdet_lab.targets import is_target
from hdet_lab.tasks import TASKS
from hdet_lab.tasks.base import Task

FAILED = "failed"


@dataclass
class Runner:
    """The suite on one device.

    Attributes:
        out: folder of the files.
        entries, methods: what to run.
        seeds: of every method.
        steps: of a run; None for each entry's own.
        device, data: as in other commands.
        tell: hears what happens, line by line.
        defaults: of methods at one default, where it is not chosen from the files of half A.
    """

    out: Path
    entries: Sequence[Entry]
    methods: Sequence[str]
    seeds: Sequence[int]
    steps: int | None = None
    device: str = "cpu"
    data: Path = Path("data")
    tell: Callable[[str], None] = lambda _: None
    defaults: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    _open: dict[str, tuple[Task, dict[str, Any]]] = field(default_factory=dict)

    def run(self, progress: Callable[[int, str], None] = lambda *_: None) -> list[str]:
        """Everything that is not finished; returns what was skipped or failed, and why."""
        problems: list[str] = []
        left = [job for job in jobs(self.entries, self.methods) if not self.is_done(job)]
        total = len(left)
        while left:
            # The first that need not wait: a default may have been chosen in the meantime.
            job = next((job for job in left if self._is_ready(job)), None)
            if job is not None:
                left.remove(job)
                problem = self._run_claimed(job)
                problems += [problem] if problem else []
                progress(total - len(left), job.name)
            elif self._others_calibrate(left):
                time.sleep(0.5)
            else:
                return problems + [f"{job.name} is skipped: no default was chosen on half A" for job in left]
        return problems

    def _is_ready(self, job: Job) -> bool:
        if job.method not in CALIBRATIONS or job.method in self.defaults:
            return True
        return self.is_calibrated(CALIBRATIONS[job.method])

    # -- files --------------------------------------------------------------------------------------------------

    def path(self, job: Job) -> Path:
        """Where the job's records are."""
        return self.out / f"{job.name}.json"

    def config(self, job: Job) -> dict[str, Any]:
        """What the job's records depend on, as far as it is chosen here."""
        entry = job.entry
        chosen = {"entry": entry.name, "half": entry.half, "task": entry.task_name, "optimizer": entry.optimizer}
        return chosen | {"method": job.method, "steps": self._steps(entry), "seeds": list(self.seeds)}

    def is_done(self, job: Job) -> bool:
        """Whether the records of the job are there, with the same settings and all seeds."""
        return not self._seeds_left(job, self._earlier(job))

    def _earlier(self, job: Job) -> dict[str, Any] | None:
        """The job's records, of some seeds or all; None where there are none with the same settings."""
        path = self.path(job)
        if not path.exists():
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        return record if record["config"] | {"seeds": list(self.seeds)} == self.config(job) else None

    def _seeds_left(self, job: Job, earlier: dict[str, Any] | None) -> list[int]:
        return [seed for seed in self.seeds if earlier is None or seed not in earlier["config"]["seeds"]]

    def has_failed(self, job: Job) -> bool:
        """Whether a process has tried in vain."""
        return self.path(job).with_suffix(".failed").exists() or self._missing(job).exists()

    def _missing(self, job: Job) -> Path:
        return self.out / job.entry.name / "task.failed"

    def _steps(self, entry: Entry) -> int:
        return self.steps or entry.steps

    def _run_claimed(self, job: Job) -> str | None:
        """Run the job, unless another process does; what went wrong, if anything did."""
        path = self.path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = path.with_suffix(".claim")
        if self.is_done(job) or self.has_failed(job) or not take_claim(claim):
            return None
        try:
            if self.is_done(job) or self.has_failed(job):  # another process was faster
                return None
            record = self._run(job)
            write(path, record)
            self.tell(f"{job.name}: {len(record['runs'])} runs in {record['seconds']:.0f} s")
        except Exception as error:
            if isinstance(error, UsageError):  # of the whole task
                problem, where = f"{job.entry.name} is skipped: {error}", self._missing(job)
            else:
                problem, where = f"{job.name} {FAILED}: {error}", path.with_suffix(".failed")
            where.write_text(f"{traceback.format_exc()}\n{problem}\n")
            self.tell(problem)
            return problem
        finally:
            claim.unlink(missing_ok=True)
            gc.collect()
        return None

    def _run(self, job: Job) -> dict[str, Any]:
        task, facts = self._task(job.entry)
        earlier = self._earlier(job) or {
            "config": {"seeds": []},
            "defaults": {},
            "facts": [],
            "runs": [],
            "seconds": 0.0,
        }
        defaults = earlier["defaults"]
        if job.method in CALIBRATIONS and not defaults:
            known = self.defaults.get(job.method)
            defaults = {job.method: self.default(CALIBRATIONS[job.method]) if known is None else known}
        seeds = self._seeds_left(job, earlier)
        bench = Bench(job.entry, task, seeds, self._steps(job.entry), self.device, defaults, earlier["runs"])
        begun = time.perf_counter()
        runs = earlier["runs"] + run_method(bench, job.method)
        return {
            "config": self.config(job) | {"seeds": sorted({*earlier["config"]["seeds"], *self.seeds})},
            "defaults": defaults,
            "facts": earlier["facts"] + [facts] * (facts not in earlier["facts"]),
            "runs": runs,
            "seconds": round(earlier["seconds"] + time.perf_counter() - begun, 1),
        }

    def _task(self, entry: Entry) -> tuple[Task, dict[str, Any]]:
        name = entry.task_name
        if name not in self._open:
            if name not in TASKS and not is_target(name):
                raise UsageError(f"there is no task {name}")
            with alone(self.out / "opening.claim"):  # some tasks fetch or make data, which two must not do at once
                task = open_task(name, self.data)
            model = task.build(0)
            facts = provenance.describe(task) | {
                "matmul_precision": torch.get_float32_matmul_precision(),
                "batch_rows": task.batch_rows,
                "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
            self._open[name] = task, facts
        return self._open[name]

    # -- defaults chosen on half A ------------------------------------------------------------------------------

    def _calibration_jobs(self, method: str) -> list[Job]:
        mine = jobs(self.entries, [method])
        return mine or [job for job in jobs(ENTRIES, [method]) if self.path(job).exists()]

    def is_calibrated(self, method: str) -> bool:
        """Whether every task of half A has its grid, or will have none."""
        found = self._calibration_jobs(method)
        ended = [self.path(job).exists() or self.has_failed(job) for job in found]
        return all(ended) and any(self.path(job).exists() for job in found)

    def _others_calibrate(self, waiting: Sequence[Job]) -> bool:
        needed = {job for waits in waiting for job in self._calibration_jobs(CALIBRATIONS[waits.method])}
        return any(self.path(job).with_suffix(".claim").exists() for job in needed)

    def default(self, method: str) -> tuple[str, float]:
        """Schedule and learning rate: the lowest mean share above the best of each task of half A."""
        tables = []
        for job in self._calibration_jobs(method):
            if self.path(job).exists():
                losses: dict[tuple[str, float], list[float]] = {}
                for run in json.loads(self.path(job).read_text())["runs"]:
                    loss = math.inf if run["loss"] is None else run["loss"]
                    losses.setdefault((run["schedule"], run["lr"]), []).append(loss)
                tables.append({condition: sum(values) / len(values) for condition, values in losses.items()})
        return choose_default(tables)


def take_claim(path: Path) -> bool:
    """Make the claim file, which has this process's number; False where one that lives has made it."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        try:
            os.kill(int(path.read_text()), 0)
        except (ValueError, FileNotFoundError):
            return False  # just made, or just gone
        except ProcessLookupError:
            path.unlink(missing_ok=True)
            return take_claim(path)
        return False
    with os.fdopen(handle, "w") as file:
        file.write(str(os.getpid()))
    return True


@contextlib.contextmanager
def alone(claim: Path) -> Iterator[None]:
    """Wait until no other process is inside."""
    while not take_claim(claim):
        time.sleep(0.05)
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all; numbers that are not finite become null."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(plain(record), allow_nan=False) + "\n")
    aside.replace(path)
