"""The page of results, made from the records alone: the same records make the same page."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hdet_lab.bench import methods
from hdet_lab.bench.figures import lr_figure, near_figure
from hdet_lab.bench.records import Record, load
from hdet_lab.bench.statistics import geometric_mean, t_interval
from hdet_lab.bench.suite import AROUND_TORCH, BY_NAME, DEFAULT_ENTRIES, MAX_PASSES, METHODS, NOTHING_SET
from hdet_lab.bench.summary import (
    AIM_NEAR,
    COMPUTE,
    FACTORS,
    LABELS,
    SHARES,
    SLACK,
    TaskSummary,
    duel,
    interval,
    outside,
    over_tasks,
    percent,
    profiles,
    runs,
    summarize,
    verdict,
    worth,
)
from hdet_lab.bench.versions import MARK, OF_AUTOLR, SENTENCE, equivalent, is_current

PAGE = "results.md"
MIN_SHOWN = 0.4
"""Share of tasks on which a method reaches the target; one that reaches it on fewer has no line there."""
WHY = "why.md"
"""Beside the records: what somebody who has read them says about them, for the head of the page."""
NEAR_FIGURE = "figures/bench-near.svg"
SHOWN = tuple(method for method in LABELS if method not in ("search-2", "search-4", "search-16"))
DRAWN = ("autolr", "adam", "nadamw", "schedule-free", "prodigy", "mechanic", "search-4", "search-8")

_LABEL = """\
The aims are meant for tasks that were never looked at (halves D to J), of which there are no records. AutoLR's
settings were looked at on every task here; defaults of rivals were chosen on half A alone. So the figures describe
these tasks, and judge nothing about others."""
_JUDGED = """\
Half {half} has judged the version of its day, which was run on it once: {once}. Rules were changed since, the last one
with a look at all halves. Defaults of rivals were chosen on half A."""
_JUDGES = """\
AutoLR was run once on half {half}, which no rule had seen; none was changed since."""
_ONCE = {"C": "+19.77%", "D": "+2.64%", "E": "+8.76%", "F": "+25.22%", "G": "+13.51%", "H": "+1.16%", "I": "+5.85%",
         "J": "+7.91%"}  # fmt: skip
_READING = """\
A figure is the ratio of the final validation loss to that of the best learning rate and schedule of a grid, of the same
seed, less 1; means are geometric, (9) over so many tasks. The best has the lowest mean over seeds of that same loss,
which flatters it and random search: chosen on the other seeds, the grid is no longer at zero. In brackets: 95%
bootstrap intervals over tasks and seeds. Random search draws from the grid after it has grown to where its best is
inside. Worth: the fewest runs of it that are expected to reach the method's loss, the median over tasks ("all": more
than the grid has). Pairs: tasks on which AutoLR is ahead/level/behind, paired over seeds; level: the 95% interval of
the difference has zero."""
_STEPS = """\
Share of tasks of {halves} on which a method's median run comes within {slack:.0%} of where the best fixed run
ends, in so many times the steps of the fastest method; methods that do on {least:.0%} at least."""
_RECORDS = """\
Every run is in `lab/benchmarks/results/bench/`, made by `hdet bench`; this page by `hdet bench --pages`. Your own task:
`hdet bench --task mine.py:Task` ([lab](lab.md#a-task-of-your-own))."""


def make_pages(records: Path, docs: Path) -> list[Path]:
    """Write the page and its figures; returns their paths."""
    written = []
    for path, text in render(load(records), said_of(records), equivalent(records)).items():
        target = docs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def said_of(records: Path) -> str:
    """What was written beside the records, or nothing."""
    why = records / WHY
    return why.read_text(encoding="utf-8").strip() if why.exists() else ""


def render(records: Sequence[Record], why: str = "", current: Collection[str] = ()) -> dict[str, str]:
    """Path below docs/ to content.

    Args:
        records: of the suite.
        why: stands below the verdict.
        current: hashes of code whose runs of AutoLR are not marked.
    """
    tasks = [task for task in map(summarize, records) if task is not None]
    pages = {PAGE: _results(tasks, records, why, current)}
    main = outside(_judged(tasks))
    shares = {
        LABELS[method]: [task.share(method) for task in main if method in task.excess]
        for method in DRAWN
        if main and any(method in task.excess for task in main)
    }
    if shares:
        title = f"Share of the {len(main)} tasks within a distance of the best of the grid"
        pages[NEAR_FIGURE] = near_figure(shares, title)
    for task in tasks:
        if "autolr" in task.excess:
            pages[_figure(task)] = lr_figure(task)
    return pages


def marked(label: str, method: str, tasks: Iterable[TaskSummary], current: Collection[str]) -> str:
    """The label, with a mark where some runs are of an earlier version of AutoLR."""
    records = [task.record for task in tasks if method in task.excess]
    fine = all(record.name not in current and is_current(method, record.facts, current) for record in records)
    return label if fine or method not in OF_AUTOLR else f"{label}{MARK}"


def footnote(lines: Sequence[str]) -> list[str]:
    """What the mark means, below a table that has one."""
    return ["", SENTENCE] if any(MARK in line for line in lines) else []


def _figure(task: TaskSummary) -> str:
    return f"figures/bench-{task.record.name}.svg"


def _results(tasks: Sequence[TaskSummary], records: Sequence[Record], why: str, current: Collection[str]) -> str:
    halves = {half: [task for task in tasks if task.record.half == half] for half in "IHGFEDCBA"}
    judged_tasks = _judged(tasks)
    judged = judged_tasks[0].record.half if judged_tasks else "B"
    before = [half for half, part in halves.items() if part and "B" < half < judged][:1]
    others = {f"half {half}": outside(halves[half]) for half in before}
    lines = ["# Does it work", "", *_first_lines(judged_tasks), "", *([why, ""] if why else [])]
    if main := outside(judged_tasks):
        lines += [f"## {len(main)} tasks of half {judged}", "", *_half(main, others, current), "", _READING, "",
                  f"![share of tasks near the best of the grid]({NEAR_FIGURE})", ""]  # fmt: skip
    shown = {method for task in judged_tasks for method in task.excess}
    if memorised := [task for task in tasks if task.overfits]:
        lines += ["## Tasks that overfit", "", *_overfitting(memorised, shown, current), ""]
    lines += [
        "## Steps to a target",
        "",
        *(
            _profile([task for task in judged_tasks if "adam" in task.excess], f"half {judged} around AdamW")
            if judged in AROUND_TORCH
            else _profile(halves["B"] + halves["A"], "both halves")
        ),
        "",
        "## Task by task",
        "",
        *_tasks(tasks, current),
        "",
    ]
    lines += [
        "## How each method was run",
        "",
        _methods(shown),
        *_defaults(records),
        "",
    ]
    lines += ["## Records, machines and versions", "", _RECORDS, "", *_facts(records), ""]
    return "\n".join(lines).rstrip() + "\n"


def _judged(tasks: Sequence[TaskSummary]) -> list[TaskSummary]:
    """The last half there is, of B to J."""
    last = max((task.record.half for task in tasks if task.record.half in "BCDEFGHIJ"), default="B")
    return [task for task in tasks if task.record.half == last]


def _first_lines(tasks: Sequence[TaskSummary]) -> list[str]:
    word, said = verdict(tasks)
    if not said:
        return [f"**The target is {word}**: there are no records of half B."]
    num = len(outside(tasks))
    half = tasks[0].record.half
    first = f"**The target is {word}.** With nothing set, on the {num} tasks of half {half} that do not overfit:"
    line = over_tasks(outside(tasks), "autolr")
    text = _LABEL if half not in _ONCE else _JUDGES if line and percent(line.mean) == _ONCE[half] else _JUDGED
    judged = text.format(half=half, once=_ONCE.get(half))
    return [first, "", *(f"- {part}" for part in said), "", judged]


def _label(method: str, tasks: Sequence[TaskSummary], current: Collection[str]) -> str:
    label = marked(LABELS[method], method, tasks, current)
    return f"**{label}**" if method == "autolr" else label


def _compute(method: str) -> str:
    return COMPUTE.get(method, "1" if method in NOTHING_SET else "grid")


Others = Mapping[str, Sequence[TaskSummary]]
"""Head of a column to the tasks whose mean it has."""


def _half(tasks: Sequence[TaskSummary], others: Others, current: Collection[str]) -> list[str]:
    found = [line for method in SHOWN if (line := over_tasks(tasks, method)) is not None]
    rows = []
    for line in sorted(found, key=lambda line: line.mean):
        method = line.method
        median, fewest, most = worth(tasks, method)
        label = _label(method, tasks, current)
        fewer = "" if line.num_tasks == len(tasks) else f" ({line.num_tasks})"
        rows.append([
            label + fewer, _compute(method), f"{percent(line.mean)} {interval(line.low, line.high)}",
            percent(line.rest), "/".join(map(str, line.near)), f"{percent(line.worst)} ({line.worst_task})",
            f"{runs(median)} {interval(fewest, most, runs)}" if _compute(method) == "1" else "",
            "" if method == "autolr" else "/".join(map(str, duel(tasks, method))),
            *_means(method, others, current),
        ])  # fmt: skip
    near = ", ".join(f"{share:.0%}".rstrip("%") for share in SHARES)
    heads = ["method", "runs", "mean", "without worst", f"tasks within {near}%", "worst task",
             "worth", "pairs", *others]  # fmt: skip
    lines = table(heads, rows)
    return lines + footnote(lines)


def _means(method: str, others: Others, current: Collection[str]) -> list[str]:
    shares = [[task.share(method) for task in tasks if method in task.excess] for tasks in others.values()]
    means = [percent(geometric_mean(part)) if part else "" for part in shares]
    return [mean and marked(mean, method, tasks, current) for mean, tasks in zip(means, others.values(), strict=True)]


def _overfitting(tasks: Sequence[TaskSummary], shown: Collection[str], current: Collection[str]) -> list[str]:
    said = f"More than {MAX_PASSES} passes over the training rows, and more parameters than rows. "
    said += "They are in no mean above; the rule was written down after results were known."
    rows = []
    for method in (method for method in SHOWN if method in shown):
        if all(method in task.excess for task in tasks):
            shares = [task.share(method) for task in tasks]
            rows.append((geometric_mean(shares), [_label(method, tasks, current),
                         *(percent(share, 1) for share in shares), percent(geometric_mean(shares), 1)]))  # fmt: skip
    heads = ["method", *(task.record.name for task in tasks), "geometric mean"]
    lines = table(heads, [row for _, row in sorted(rows, key=lambda pair: pair[0])])
    return [said, "", *lines, *footnote(lines)]


def _profile(tasks: Sequence[TaskSummary], halves: str) -> list[str]:
    chosen = ("grid", *NOTHING_SET)
    found = {
        method: shares for method, shares in profiles(tasks).items() if method in chosen and shares[-1] > MIN_SHOWN
    }
    rows = [
        [LABELS.get(method, "best of the grid"), *(f"{share:.0%}" for share in shares)]
        for method, shares in sorted(found.items(), key=lambda pair: -pair[1][-1])
    ]
    return [
        _STEPS.format(slack=SLACK, halves=halves, least=MIN_SHOWN),
        "",
        *table(["method", *(f"{factor:g} x" for factor in FACTORS)], rows),
    ]


def _tasks(tasks: Sequence[TaskSummary], current: Collection[str]) -> list[str]:
    """A table of the half that judges, a line for each of the others, in which figures within 2% are left out."""
    judging = {task.record.name for task in _judged(tasks)}
    rows, others = [], dict[str, tuple[list[str], list[str]]]()
    for task in sorted(tasks, key=lambda task: -"ABCDEFGHIJ".find(task.record.half)):
        record, (shape, lr) = task.record, task.record.best()
        mine = "autolr" in task.excess
        name = marked(f"[{record.name}]({_figure(task)})" if mine else record.name, "autolr", [task], current)
        found = percent(task.share("autolr")) if mine else ""
        if record.name in judging:
            rows.append([name, record.half, f"{shape}:{lr:g}", found + (_seeds(task) if mine else "")])
        else:
            far, near = others.setdefault(record.half, ([], []))
            is_near = mine and abs(task.share("autolr")) <= AIM_NEAR
            (near if is_near else far).append(name if is_near else f"{name} {found}".strip())
    heads = ["task", "half", "best of grid", "AutoLR (± 95% over seeds)"]
    lines = table(heads, rows)
    known, halves = {task.record.name for task in tasks}, {task.record.half for task in tasks}
    missing = [name for name in DEFAULT_ENTRIES if name not in known and BY_NAME[name].half in halves]
    said = "Links: learning rates of all seeds, the best fixed one dashed. Without a figure: within 2%."
    said += f" Not measured: {', '.join(missing)}." if missing else ""
    titles = {half: "Others" if half == "extra" else f"Half {half}{_mean(tasks, half)}" for half in others}
    listed = [f"- {titles[half]}: {', '.join([*far, *near])}." for half, (far, near) in others.items()]
    return [said, "", *(lines if rows else ()), *([""] if rows else ()), *listed, *footnote(lines + listed)]


def _mean(tasks: Sequence[TaskSummary], half: str) -> str:
    line = over_tasks(outside([task for task in tasks if task.record.half == half]), "autolr")
    return f" ({percent(line.mean)})" if line else ""


def _seeds(task: TaskSummary) -> str:
    half_width = t_interval(task.excess["autolr"])[1]
    return f" (±{100 * half_width:.2f})" if math.isfinite(half_width) else ""


def _methods(shown: Collection[str]) -> str:
    """What the docstring of the methods, which is where they are kept up to date, says of those that are shown."""
    parts = (methods.__doc__ or "").partition("\n\n")[2].strip().split("\n\n")
    parts = parts if "greedy" in shown else parts[:1]
    kept = ["\n".join(_bullets(part, {*shown, "grid"})) for part in parts]
    return "\n\n".join(kept).replace("``", "`")


def _bullets(part: str, shown: Collection[str]) -> list[str]:
    """The lines of a list, without items that name only methods which are not shown; a text is one item."""
    items: list[list[str]] = []
    for line in part.splitlines():
        if line.startswith("- ") or not items:
            items.append([])
        items[-1].append(line)
    named = [set(re.findall(r"``([a-z-]+)``", "\n".join(item))) & set(METHODS) for item in items]
    return [line for item, names in zip(items, named, strict=True) if not names or names & {*shown} for line in item]


def _defaults(records: Sequence[Record]) -> list[str]:
    """What was chosen on half A, as the records of its use have it."""
    chosen = dict.fromkeys(pair for record in records for pair in record.defaults.items())
    return [f"- Chosen on half A for {LABELS[method]}: {shape}, {lr:g}." for method, (shape, lr) in chosen]


def _facts(records: Sequence[Record]) -> list[str]:
    """One row for each machine and code, a machine named once; the records have the rest, task by task."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    halves: dict[tuple[str, str], set[str]] = {}
    for record in records:
        for fact in record.facts:
            device = ", ".join(fact["hardware"]["gpus"]) or fact["hardware"]["cpu"]
            commit = fact["git_commit"] or "unknown"
            commit = commit[:10] + ("+" if commit.endswith("+") else "")
            row = (f"{device}, torch {fact['torch']}", fact.get("code_sha256", "unknown")[:10])
            halves.setdefault(row, set()).add(record.half if len(record.half) == 1 else "-")
            found.setdefault(row, {})[commit] = None
    rows, last = [], ""
    for machine, code in sorted(found):
        key = (machine, code)
        rows.append(["" if machine == last else machine, code, ", ".join(found[key]), "".join(sorted(halves[key]))])
        last = machine
    return table(["machine", "code (SHA-256)", "commit, +: with changes", "halves"], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
