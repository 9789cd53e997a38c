"""What the records say: how far each method is above the best of the grid, task by task and over each half."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdet_lab.bench.records import Record
from hdet_lab.bench.statistics import (
    equivalent_runs,
    excess,
    expected_best,
    mean,
    profile,
    steps_to_target,
    t_interval,
)
from hdet_lab.bench.suite import CALIBRATIONS, NOTHING_SET, SWEEP_SIZES

CLOSE = 0.01
"""Share above the best of the grid that counts as reaching it."""
SLACK = 0.01
"""Share above the end of the best fixed run's curve at which a target lies."""
FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)
LABELS = {
    "autolr": "AutoLR",
    "autolr-held-out": "AutoLR with `probe=` and learned weight decay, 10% of the training rows held back",
    "adamw": "AdamW at one default",
    "nadamw": "NAdamW at one default",
    "prodigy": "Prodigy",
    "d-adaptation": "D-Adaptation",
    "mechanic": "Mechanic",
    "dog": "DoG",
    "schedule-free": "Schedule-Free at its default",
    "schedule-free-grid": "Schedule-Free, best of its grid",
    "schedule-free-autolr": "Schedule-Free with AutoLR",
    "finder": "learning-rate finder, one-cycle",
    "halving": "successive halving",
    "population": "population-based training",
    **{f"search-{size}": f"random search of {size}" for size in SWEEP_SIZES},
}
COMPUTE = {"autolr-held-out": "1", "population": "4", **{f"search-{size}": str(size) for size in SWEEP_SIZES}}


@dataclass(frozen=True)
class TaskSummary:
    """One entry.

    Attributes:
        record: of reference.
        seeds: that all methods have.
        best: the best condition's loss of each seed.
        excess: method to the share above it, seed by seed; of a method with several conditions their mean.
    """

    record: Record
    seeds: list[int]
    best: list[float]
    excess: dict[str, list[float]] = field(default_factory=dict)

    def first_grid(self, seed: int) -> list[float]:
        """Losses of one seed that a random search draws from: the grid before it grew."""
        runs = self.record.methods["grid"]
        return [run["loss"] for run in runs if run["seed"] == seed and run["in_first_grid"]]

    def worth(self) -> int | None:
        """The fewest runs of a random search that are expected to reach AutoLR's mean over seeds."""
        losses = [best * (1 + share) for best, share in zip(self.best, self.excess["autolr"], strict=True)]
        return equivalent_runs([self.first_grid(seed) for seed in self.seeds], losses)


def summarize(record: Record) -> TaskSummary | None:
    """None where there is no grid to compare with."""
    if not record.methods.get("grid"):
        return None
    chosen = record.losses("grid")[record.best()]
    compared = [runs for method, runs in record.methods.items() if method not in CALIBRATIONS.values()]
    seeds = sorted(set.intersection(*({run["seed"] for run in runs} for runs in compared)))
    best = [chosen[seed] for seed in seeds]
    found = TaskSummary(record, seeds, best)
    for method in record.methods:
        conditions = record.losses(method)
        if method in ("autolr", "autolr-held-out", "schedule-free-autolr"):
            shares = [excess([losses.get(seed, math.inf) for seed in seeds], best) for losses in conditions.values()]
            found.excess[method] = [mean(column) for column in zip(*shares, strict=True)]
        elif method == "schedule-free-grid":
            losses = conditions[record.best(method)]
            found.excess[method] = excess([losses[seed] for seed in seeds], best)
        elif method in LABELS:
            by_seed = {run["seed"]: run["loss"] for run in record.methods[method]}
            found.excess[method] = excess([by_seed.get(seed, math.inf) for seed in seeds], best)
    for size in SWEEP_SIZES:
        searched = [expected_best(found.first_grid(seed), size) for seed in seeds]
        found.excess[f"search-{size}"] = excess(searched, best)
    return found


@dataclass(frozen=True)
class Line:
    """One method over several tasks: mean over tasks, interval over seeds; median and worst task."""

    method: str
    num_tasks: int
    mean: float
    half_width: float
    median: float
    worst: float
    worst_task: str


def over_tasks(tasks: Sequence[TaskSummary], method: str) -> Line | None:
    """None where no task has the method."""
    mine = [task for task in tasks if method in task.excess]
    if not mine:
        return None
    num_seeds = min(len(task.seeds) for task in mine)
    by_seed = [mean([task.excess[method][place] for task in mine]) for place in range(num_seeds)]
    center, half_width = t_interval(by_seed)
    by_task = {task.record.name: mean(task.excess[method]) for task in mine}
    worst = max(by_task, key=lambda name: by_task[name])
    median = statistics.median(by_task.values())
    return Line(method, len(mine), center, half_width, median, by_task[worst], worst)


def duel(tasks: Sequence[TaskSummary], rival: str) -> tuple[int, int, int]:
    """On how many tasks AutoLR is ahead, level and behind: level where the interval of the difference has zero."""
    ahead = level = behind = 0
    for task in tasks:
        if rival in task.excess and "autolr" in task.excess:
            pairs = list(zip(task.excess["autolr"], task.excess[rival], strict=True))
            if not all(math.isfinite(value) for pair in pairs for value in pair):
                mine, theirs = (mean(task.excess[name]) for name in ("autolr", rival))
                ahead, level, behind = ahead + (mine < theirs), level + (mine == theirs), behind + (mine > theirs)
                continue
            center, half_width = t_interval([mine - theirs for mine, theirs in pairs])
            level += abs(center) <= half_width
            ahead += center < -half_width
            behind += center > half_width
    return ahead, level, behind


def profiles(tasks: Sequence[TaskSummary]) -> dict[str, list[float]]:
    """Performance profiles by steps to the target, of methods that have curves on all the tasks.

    A method's time on a task is the median over its runs.
    """
    times: dict[str, list[float]] = {}
    for task in tasks:
        runs = task.record.methods
        fixed = [run["curve"] for run in runs["grid"] if run.get("curve")]
        if not fixed:
            continue
        target = (1 + SLACK) * mean([curve[-1][1] for curve in fixed])
        of_task = {method: [run["curve"] for run in runs[method] if run.get("curve")] for method in runs}
        of_task["grid"] = fixed
        for method, curves in of_task.items():
            if curves:
                reached = sorted(steps_to_target([p for p in c if p[1] is not None], target) for c in curves)
                times.setdefault(method, []).append(reached[len(reached) // 2])
    num = max(map(len, times.values()), default=0)
    return profile({method: row for method, row in times.items() if len(row) == num}, FACTORS) if num else {}


def verdict(tasks: Sequence[TaskSummary]) -> tuple[str, list[str]]:
    """``met``, ``not met`` or ``not measured``, and each part of the target in words."""
    mine = [task for task in tasks if "autolr" in task.excess]
    if not mine:
        return "not measured", []
    said, ahead, complete = [], [], True
    for rival in [*(name for name in NOTHING_SET if not name.endswith("autolr")), "search-4"]:
        common = [task for task in mine if rival in task.excess]
        line, other = over_tasks(common, "autolr"), over_tasks(common, rival)
        if line is None or other is None:
            said.append(f"not compared with {LABELS[rival]}, which was not measured")
            complete = False
            continue
        complete = complete and len(common) == len(mine)
        ahead.append(line.mean < other.mean)
        where = "" if len(common) == len(mine) else f" on {len(common)} tasks"
        word = "ahead of" if ahead[-1] else "**behind**"
        said.append(f"{word} {LABELS[rival]}{where} ({percent(line.mean)} against {percent(other.mean)})")
    above = {task.record.name: mean(task.excess["autolr"]) for task in mine}
    far = {name: share for name, share in above.items() if not share <= CLOSE}
    within = f"within 1% of the best of the grid on {len(mine) - len(far)} of {len(mine)} tasks"
    beyond = ", ".join(f"{name} {percent(share)}" for name, share in far.items())
    said.append(within + (f" (not on {beyond})" if far else ""))
    if far or not all(ahead):
        return "not met", said
    return "met" if complete else "not measured", said


def percent(share: float) -> str:
    """With a sign; ``broke`` where it is not finite."""
    return f"{100 * share:+.2f}%" if math.isfinite(share) else "broke"
