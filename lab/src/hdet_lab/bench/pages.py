"""The pages of results, made from the records alone: the same records make the same pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from hdet_lab.bench import methods
from hdet_lab.bench.figures import lr_figure
from hdet_lab.bench.records import Record, load
from hdet_lab.bench.statistics import t_interval
from hdet_lab.bench.suite import DEFAULT_ENTRIES, NOTHING_SET
from hdet_lab.bench.summary import (
    COMPUTE,
    FACTORS,
    LABELS,
    TaskSummary,
    duel,
    over_tasks,
    percent,
    profiles,
    summarize,
    verdict,
)

PAGE = "results.md"
WHY = "why.md"
"""Beside the records: what somebody who has read them says about them, for the head of the page."""
HALVES = {
    "B": "Half B: only reported",
    "A": "Half A: defaults may be chosen on it",
    "extra": "Neither: stdlib-gpt, on which AutoLR's settings were looked at before, and other optimizers",
}

_TARGET = """\
The target: ahead of every rival with nothing set on the mean over half B, within 1% of the best of the grid on each of
its tasks, and ahead of random search with four times the compute. Defaults were chosen on half A; half B is reported
whatever it says. The paper's configurations and earlier comparisons: [results_paper.md](results_paper.md). Every run is
in the records, `lab/benchmarks/results/bench/*.json`, and in the root of the repository this lists those of AutoLR on a
task:

```python
import json, pathlib

for run in json.loads(pathlib.Path("lab/benchmarks/results/bench/feed.json").read_text())["methods"]["autolr"]:
    print(run["seed"], run["schedule"], run["lr"], run["loss"])
```"""
_READING = """\
Figures are shares by which the validation loss at the end is above that of the best fixed learning rate of the same
seed. The best is one condition of schedule and learning rate for all seeds, the one with the lowest mean over seeds; it
was chosen by the same validation loss, which flatters it and random search. ± is half the width of the 95% t-interval
over seeds. A random search draws from the grid before it grew, and its expectation is exact. `hdet bench` makes the
records, `hdet bench --pages` this page."""
_STEPS = """\
The share of tasks on which a method reaches the target within a factor of the fastest method's steps. The target is 1%
above where the best fixed learning rate ends; steps are those of the median run, and those of a search inside the run
count."""


def make_pages(records: Path, docs: Path) -> list[Path]:
    """Write the pages and their figures; returns their paths."""
    written = []
    for path, text in render(load(records), said_of(records)).items():
        target = docs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def said_of(records: Path) -> str:
    """What was written beside the records, or nothing."""
    why = records / WHY
    return why.read_text(encoding="utf-8").strip() if why.exists() else ""


def render(records: Sequence[Record], why: str = "") -> dict[str, str]:
    """Path below docs/ to content; ``why`` stands below the verdict."""
    tasks = [task for task in map(summarize, records) if task is not None]
    pages = {PAGE: _results(tasks, records, why)}
    for task in tasks:
        if "autolr" in task.excess:
            pages[_figure(task)] = lr_figure(task)
    return pages


def _figure(task: TaskSummary) -> str:
    return f"figures/bench-{task.record.name}.svg"


def _results(tasks: Sequence[TaskSummary], records: Sequence[Record], why: str) -> str:
    of_half = {half: [task for task in tasks if task.record.half == half] for half in HALVES}
    lines = ["# Does it work", "", *_first_lines(of_half["B"]), "", *([why, ""] if why else []), *_how(tasks), ""]
    for half, title in HALVES.items():
        if of_half[half]:
            lines += [f"## {title}", "", *_half(of_half[half]), ""]
    both = of_half["B"] + of_half["A"]
    lines += ["## Ahead, level, behind", "", *_duels(of_half["B"], of_half["A"]), ""]
    lines += ["## Steps to a target", "", *_profile(both), "", "## Task by task", "", *_tasks(tasks), ""]
    lines += ["## How each method was run", "", _methods(), *_defaults(records), ""]
    lines += ["## Figures", "", *_figures(tasks), "", "## Machines and data", "", *_facts(records), ""]
    return "\n".join(lines).rstrip() + "\n"


def _first_lines(tasks: Sequence[TaskSummary]) -> list[str]:
    word, said = verdict(tasks)
    if not said:
        return [f"**The target is {word}**: there are no records of half B."]
    first = f"**The target is {word}.** With nothing set, on the mean over the {len(tasks)} tasks of half B, AutoLR is:"
    return [first, "", *(f"- {part}" for part in said)]


def _how(tasks: Sequence[TaskSummary]) -> list[str]:
    missing = [name for name in DEFAULT_ENTRIES if name not in {task.record.name for task in tasks}]
    text = [_TARGET, "", _READING]
    return text + (["", f"Not measured: {', '.join(missing)}."] if missing else [])


def _half(tasks: Sequence[TaskSummary]) -> list[str]:
    found = [line for method in LABELS if (line := over_tasks(tasks, method)) is not None]
    rows = []
    for line in sorted(found, key=lambda line: line.mean):
        compute = COMPUTE.get(line.method, "1" if line.method in NOTHING_SET else "grid")
        nothing = "yes" if line.method in NOTHING_SET else "no"
        worst = f"{percent(line.worst)} ({line.worst_task})"
        label = f"**{LABELS[line.method]}**" if line.method == "autolr" else LABELS[line.method]
        center = _interval(line.mean, line.half_width)
        rows.append([label, nothing, compute, str(line.num_tasks), center, percent(line.median), worst])
    heads = ["method", "nothing set", "runs of compute", "tasks", "mean excess", "median task", "worst task"]
    return table(heads, rows)


def _interval(center: float, half_width: float) -> str:
    return percent(center) + (f" ± {100 * half_width:.2f}" if math.isfinite(half_width) else "")


def _duels(*halves: Sequence[TaskSummary]) -> list[str]:
    rows = []
    for method in LABELS:
        if method != "autolr" and any(method in task.excess for half in halves for task in half):
            rows.append([LABELS[method], *(" / ".join(map(str, duel(half, method))) for half in halves)])
    said = "AutoLR against each method, tasks on which it is ahead / level / behind. Level: the interval of the "
    said += "difference over seeds has zero."
    return [said, "", *table(["method", "half B", "half A"], rows)]


def _profile(tasks: Sequence[TaskSummary]) -> list[str]:
    rows = [
        [LABELS.get(method, "best of the grid"), *(f"{share:.0%}" for share in shares)]
        for method, shares in profiles(tasks).items()
        if method in LABELS or method == "grid"
    ]
    return [_STEPS, "", *table(["method", *(f"{factor:g} x" for factor in FACTORS)], rows)]


def _tasks(tasks: Sequence[TaskSummary]) -> list[str]:
    rows = []
    for task in tasks:
        record, (shape, lr) = task.record, task.record.best()
        loss, half_width = t_interval(task.best)
        mine = task.excess.get("autolr")
        worth = None if mine is None else task.worth()
        rows.append([
            record.name, record.half, str(record.steps), str(len(task.seeds)),
            f"{loss:.4g}" + (f" ± {half_width:.2g}" if math.isfinite(half_width) else ""), f"{shape}, {lr:g}",
            "" if mine is None else _interval(*t_interval(mine)), "more than all" if worth is None else str(worth),
        ])  # fmt: skip
    heads = ["task", "half", "steps", "seeds", "best of the grid", "its condition", "AutoLR", "worth"]
    said = "Worth: the fewest runs of a random search that are expected to reach AutoLR's mean over seeds."
    return [said, "", *table(heads, rows)]


def _methods() -> str:
    """The list in the docstring of the methods, which is where they are kept up to date."""
    return (methods.__doc__ or "").partition("\n\n")[2].strip().replace("``", "`")


def _defaults(records: Sequence[Record]) -> list[str]:
    """What was chosen on half A, as the records of its use have it."""
    chosen = dict.fromkeys(pair for record in records for pair in record.defaults.items())
    return [f"- Chosen on half A for {LABELS[method]}: {shape}, {lr:g}." for method, (shape, lr) in chosen]


def _figures(tasks: Sequence[TaskSummary]) -> list[str]:
    lines = ["Learning rates of AutoLR with all seeds, against the best fixed one (dashed)."]
    for task in tasks:
        if "autolr" in task.excess:
            lines += ["", f"![learning rates on {task.record.name}]({_figure(task)})"]
    return lines


def _facts(records: Sequence[Record]) -> list[str]:
    rows = []
    for record in records:
        for fact in record.facts:
            device = ", ".join(fact["hardware"]["gpus"]) or fact["hardware"]["cpu"]
            commit = fact["git_commit"] or "unknown"
            commit = commit[:10] + (", with changes" if commit.endswith("+") else "")
            of = ", ".join(LABELS.get(method, method) for method in fact.get("methods", ["others"]))
            rows.append([record.name, of, device, f"torch {fact['torch']}", commit, fact["data_sha256"][:12],
                         f"{fact['num_parameters']:,}", str(fact["batch_rows"])])  # fmt: skip
    heads = ["task", "methods", "device", "version", "commit", "data (SHA-256)", "parameters", "batch"]
    return table(heads, rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
