"""What the records say: how far each method is above the best of the grid, task by task and over each half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hdet_lab.bench.records import Condition, Record
from hdet_lab.bench.statistics import (
    best_condition,
    equivalent_runs,
    excess,
    expected_best,
    geometric_interval,
    geometric_mean,
    lower_median,
    mean,
    profile,
    runs_interval,
    steps_to_target,
    t_interval,
)
from hdet_lab.bench.suite import ADAM_DEFAULT, BY_NAME, CALIBRATIONS, NOTHING_SET, SWEEP_SIZES

SHARES = (0.01, 0.02, 0.05, 0.1)
"""Above the best of the grid, within which tasks are counted."""
AIM_MEAN, AIM_NEAR, AIM_SHARE, AIM_WORST, AIM_WORTH = 0.01, 0.02, 0.8, 0.05, 8
"""The aims: geometric mean, how near on which share of the tasks, the worst task, runs of random search."""
MANY = 10.0
SLACK = 0.01
"""Share above the end of the best fixed run's curve at which a target lies."""
FACTORS = (1.0, 1.5, 4.0)
LABELS = {
    "autolr": "AutoLR",
    "adam": "Adam at one default",
    "adamw": "AdamW at one default",
    "nadamw": "NAdamW at one default",
    "prodigy": "Prodigy",
    "d-adaptation": "D-Adaptation",
    "mechanic": "Mechanic",
    "dog": "DoG",
    "schedule-free": "Schedule-Free at its default",
    "finder": "learning-rate finder, one-cycle",
    "halving": "successive halving",
    "greedy": "GreedyLR",
    "plateau": "ReduceLROnPlateau",
    "adalrs": "AdaLRS",
    "schedule-free-plus": "Schedule-Free+",
    "muon": "Muon at its author's default",
    "autolr-adamw": "AutoLR around that AdamW",
    "autolr-muon": "AutoLR around that Muon",
    "step-law": "Step Law",
    "grid-elsewhere": "the grid, chosen on the other seeds",
    **{f"search-{size}": f"random search of {size}" for size in SWEEP_SIZES},
}
COMPUTE = {
    "autolr-adamw": "1",
    "autolr-muon": "1",
    **{f"search-{size}": str(size) for size in SWEEP_SIZES},
}


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

    @property
    def overfits(self) -> str:
        """Why a model memorises the task's data; empty where it does not."""
        entry = BY_NAME.get(self.record.name)
        return "" if entry is None else entry.overfits

    def searched(self, seed: int) -> list[float]:
        """Losses of one seed that a random search draws from: the grid as it is after it has grown."""
        grid = self.record.methods["grid"]
        return [run["loss"] for run in grid if run["seed"] == seed and not run.get("refined")]

    def share(self, method: str) -> float:
        """By which the method is above the best of the grid: the geometric mean over seeds."""
        return geometric_mean(self.excess[method])

    def search(self, method: str) -> tuple[list[list[float]], list[float]]:
        """What a random search draws from, seed by seed, and the method's losses."""
        losses = [best * (1 + share) for best, share in zip(self.best, self.excess[method], strict=True)]
        return [self.searched(seed) for seed in self.seeds], losses

    def is_near(self) -> bool:
        """Whether AutoLR is as near to the best of the grid as it should be."""
        return self.share("autolr") <= AIM_NEAR

    def worth(self, method: str) -> float:
        """The fewest runs of a random search that are expected to reach the method's mean over seeds.

        Infinite where all runs of the grid do not.
        """
        return equivalent_runs(*self.search(method)) or math.inf


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
        if method == "autolr":
            shares = [excess([losses.get(seed, math.inf) for seed in seeds], best) for losses in conditions.values()]
            found.excess[method] = [mean(column) for column in zip(*shares, strict=True)]
        elif method in LABELS:
            by_seed = {run["seed"]: run["loss"] for run in record.methods[method]}
            found.excess[method] = excess([by_seed.get(seed, math.inf) for seed in seeds], best)
    fixed = record.losses("grid").get(ADAM_DEFAULT, {})
    if record.optimizer in ("adam", "torch-adamw") and fixed.keys() >= set(seeds):
        found.excess["adam"] = excess([fixed[seed] for seed in seeds], best)
    if len(seeds) > 1:
        found.excess["grid-elsewhere"] = excess(_chosen_elsewhere(record.losses("grid"), seeds), best)
    for size in SWEEP_SIZES:
        searched = [expected_best(found.searched(seed), size) for seed in seeds]
        found.excess[f"search-{size}"] = excess(searched, best)
    return found


def _chosen_elsewhere(grid: Mapping[Condition, Mapping[int, float]], seeds: Sequence[int]) -> list[float]:
    """Each seed's loss under the condition that has the lowest mean over the other seeds: what a grid really gives."""
    conditions = {key: losses for key, losses in grid.items() if losses.keys() >= set(seeds)}
    found = []
    for seed in seeds:
        others = {key: [losses[each] for each in seeds if each != seed] for key, losses in conditions.items()}
        found.append(conditions[best_condition(others)][seed])
    return found


@dataclass(frozen=True)
class Line:
    """One method over several tasks.

    Attributes:
        method, num_tasks: what, and on how many.
        mean, low, high: geometric mean of the ratios to the best of the grid, less 1, and its bootstrap interval.
        near: number of tasks within each of :data:`SHARES`.
        worst, worst_task: the highest share.
        rest: geometric mean of the other tasks.
    """

    method: str
    num_tasks: int
    mean: float
    low: float
    high: float
    near: tuple[int, ...]
    worst: float
    worst_task: str
    rest: float


def over_tasks(tasks: Sequence[TaskSummary], method: str) -> Line | None:
    """None where no task has the method."""
    mine = [task for task in tasks if method in task.excess]
    if not mine:
        return None
    by_task = {task.record.name: task.share(method) for task in mine}
    worst = max(by_task, key=lambda name: by_task[name])
    return Line(
        method,
        len(mine),
        geometric_mean(list(by_task.values())),
        *geometric_interval([task.excess[method] for task in mine]),
        tuple(sum(share <= limit for share in by_task.values()) for limit in SHARES),
        by_task[worst],
        worst,
        geometric_mean([share for name, share in by_task.items() if name != worst] or [by_task[worst]]),
    )


def worth(tasks: Sequence[TaskSummary], method: str) -> tuple[float, float, float]:
    """Median over tasks of the runs of a random search that one run of a method is worth, and its interval."""
    mine = [task for task in tasks if method in task.excess]
    median = float(lower_median([task.worth(method) for task in mine]))
    return median, *runs_interval([task.search(method) for task in mine])


def duel(tasks: Sequence[TaskSummary], rival: str) -> tuple[int, int, int]:
    """On how many tasks AutoLR is ahead, level and behind, paired over seeds.

    Level: the t-interval of the difference of the logarithms has zero.
    """
    found = [compare(task, "autolr", rival) for task in tasks if {rival, "autolr"} <= task.excess.keys()]
    return found.count(-1), found.count(0), found.count(1)


def compare(task: TaskSummary, method: str, rival: str) -> int:
    """-1 where the method is ahead of the rival on the task, 0 where they are level, 1 where it is behind."""
    pairs = list(zip(task.excess[method], task.excess[rival], strict=True))
    if not all(math.isfinite(share) for pair in pairs for share in pair):
        mine, theirs = task.share(method), task.share(rival)
        return (mine > theirs) - (mine < theirs)
    center, half_width = t_interval([math.log1p(mine) - math.log1p(theirs) for mine, theirs in pairs])
    return 0 if abs(center) <= half_width else 1 if center > 0 else -1


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
    """``met``, ``not met`` or ``not measured``, and each aim in words. Tasks that overfit count where it says so."""
    mine = [task for task in tasks if "autolr" in task.excess]
    main, line = outside(mine), over_tasks(outside(mine), "autolr")
    if line is None:
        return "not measured", []
    far = ", ".join(f"{task.record.name} {percent(task.share('autolr'))}" for task in main if not task.is_near())
    near, num = sum(task.is_near() for task in main), len(main)
    every = f"; {sum(task.is_near() for task in mine)} of {len(mine)} with those that overfit"
    beyond = [task for task in mine if task.overfits and not task.share("autolr") <= AIM_WORST]
    said = [
        (
            line.mean <= AIM_MEAN,
            f"geometric mean at most {percent(AIM_MEAN, 1)}: {percent(line.mean)} {interval(line.low, line.high)}",
        ),
        (
            near >= AIM_SHARE * num,
            f"within {AIM_NEAR:.0%} of the best of the grid on {AIM_SHARE:.0%} of the tasks: {near} of {num}"
            f"{f' (not on {far})' if far else ''}{every if len(mine) > num else ''}",
        ),
        (
            line.worst <= AIM_WORST,
            f"no task above {percent(AIM_WORST, 0)}: the worst is {line.worst_task}, {percent(line.worst)}"
            f"{f'; {len(beyond)} of those that overfit are' if beyond else ''}",
        ),
    ]
    missing: list[str] = []
    better: list[str] = []
    pairs: list[str] = []
    for rival in (name for name in NOTHING_SET if not name.endswith("autolr")):
        common = [task for task in main if rival in task.excess]
        if not common:
            missing.append(LABELS[rival])
            continue
        ours, other = (geometric_mean([task.share(name) for task in common]) for name in ("autolr", rival))
        ahead, _, behind = duel(common, rival)
        better += [f"{LABELS[rival]} ({percent(other)})"] * (not ours < other)
        pairs += [f"{LABELS[rival]} (ahead on {ahead}, behind on {behind})"] * (not ahead > behind)
    median, fewest, most = worth(main, "autolr")
    unmeasured = f"; not measured: {', '.join(missing)}" if missing else ""
    said += [
        (not better, f"ahead of every rival with one run in geometric mean{_but(better)}{unmeasured}"),
        (not pairs, f"ahead of each of them on more tasks than behind, paired over seeds{_but(pairs)}"),
        (
            median >= AIM_WORTH,
            f"worth at least {AIM_WORTH} runs of random search in the median: {runs(median)} "
            f"{interval(fewest, most, runs)}",
        ),
    ]
    lines = [f"{'met' if met else '**not met**'}: {text}" for met, text in said]
    if not all(met for met, _ in said):
        return "not met", lines
    return ("not measured" if missing else "met"), lines


def _but(names: Sequence[str]) -> str:
    return f": all but {', '.join(names)}" if names else ""


def outside(tasks: Sequence[TaskSummary]) -> list[TaskSummary]:
    """Those that a model does not memorise."""
    return [task for task in tasks if not task.overfits]


def percent(share: float, digits: int = 2) -> str:
    """With a sign; as a factor where it is above ten times; ``broke`` where it is not finite."""
    if not math.isfinite(share):
        return "broke"
    return f"{100 * share:+.{digits}f}%" if share < MANY else f"x {1 + share:.2g}"


def runs(num: float) -> str:
    """A number of runs of a search; ``all`` where all of the grid would not do."""
    return f"{num:.0f}" if math.isfinite(num) else "all"


def interval(low: float, high: float, shown: Callable[[float], str] = percent) -> str:
    """In brackets."""
    return f"[{shown(low)}, {shown(high)}]"
