"""A report about runs, wherever they come from: its sentence, tables, charts and list of events."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from hdet.plot import events
from hdet_lab.reports.charts import Group, draw_all
from hdet_lab.reports.drawing import Chart
from hdet_lab.reports.headline import differ_in_length, headline
from hdet_lab.reports.page import Table, facts_table, number, page
from hdet_lab.reports.run import Run

MAX_EVENTS = 60


def compose(subject: str, groups: Sequence[Group]) -> tuple[str, list[Chart]]:
    """The page about these runs, and its charts. Every run must have a round."""
    runs = [run for group in groups for run in group.runs]
    charts = draw_all(groups)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    tables = [seed_table(groups), *([summary_table(groups)] if len(runs) > len(groups) else [])]
    text = page(
        f"{subject}: {count}" if subject else count,
        tables,
        charts,
        [facts_table(run.name, run.facts) for run in runs if run.facts],
        headline=headline(groups),
        about=[*([subject] if subject else []), count],
        notes=_notes(groups),
        events=_all_events(groups),
    )
    return text, charts


def seed_table(groups: Sequence[Group]) -> Table:
    """A row for every run: nothing is averaged away."""
    runs = [run for group in groups for run in group.runs]
    figures = list(dict.fromkeys(name for run in runs for name in run.validation))
    heads = ["configuration", "seed", *(f"validation {name}" for name in figures)]
    if not figures:
        heads.append("training loss")
    table = Table("Every run", [*heads, "peak LR", "LR given", "steps", "replicas", "rollbacks", "state", "seconds"])
    for group in groups:
        for run, seed in zip(group.runs, _seeds(group), strict=True):
            losses = [number(run.validation.get(name)) for name in figures] or [number(run.final_loss)]
            table.rows.append(
                [
                    group.label,
                    seed,
                    *losses,
                    _rate(run.peak),
                    _rate(run.start),
                    f"{run.steps[-1]:,}",
                    str(run.num_replicas),
                    str(run.rounds[-1]["num_rollbacks"]),
                    run.status,
                    "" if run.time_s is None else f"{run.time_s:.0f}",
                ]
            )
    return table.without_empty_columns()


def summary_table(groups: Sequence[Group]) -> Table:
    """By configuration, over its seeds."""
    kind = "validation" if any("loss" in run.validation for group in groups for run in group.runs) else "training"
    table = Table(f"By configuration: {kind} loss", ["configuration", "seeds", "mean", "sd", "best", "worst"])
    for group in groups:
        losses = [run.validation.get("loss") if kind == "validation" else run.final_loss for run in group.runs]
        seen = [loss for loss in losses if loss is not None and loss == loss]
        # A run that broke has no loss, and a mean over the rest would hide it.
        mean = statistics.fmean(seen) if len(seen) == len(losses) else None
        sd = statistics.stdev(seen) if len(seen) == len(losses) > 1 else None
        worst = max(seen) if len(seen) == len(losses) else None
        figures = [number(value) for value in (mean, sd, min(seen, default=None), worst)]
        table.rows.append([group.label, str(len(losses)), *figures])
    return table


def _rate(lr: float) -> str:
    return f"{lr:.2g}" if lr > 0 else "-"


def _seeds(group: Group) -> list[str]:
    """The seed of each run, with the run's name where another one has the same."""
    counts = Counter(run.seed for run in group.runs)
    return [
        "" if run.seed is None else str(run.seed) if counts[run.seed] == 1 else f"{run.seed} ({run.name})"
        for run in group.runs
    ]


def _notes(groups: Sequence[Group]) -> list[str]:
    lengths = sorted({run.length for group in groups for run in group.runs})
    said = []
    if differ_in_length(groups):
        said.append(
            f"These runs have from {lengths[0]:,} to {lengths[-1]:,} steps. A longer run ends at a lower loss, "
            "whatever sets its learning rate: compare runs of equal length."
        )
    return said + [
        f"{f'{_who(group, run)}: t' if len(groups) > 1 else 'T'}he first {run.num_missing:,} rounds are not in the "
        "records, and no figure here is about them: a scheduler's history keeps the last 1000 rounds, a JsonLinesSink "
        "all from when it was added."
        for group in groups
        for run in group.runs
        if run.num_missing
    ]


def _all_events(groups: Sequence[Group]) -> list[tuple[str, str]]:
    several = sum(len(group.runs) for group in groups) > 1
    found = [
        (f"{_who(group, run)}, step {step:,}" if several else f"step {step:,}", text)
        for group in groups
        for run in group.runs
        for step, text in events(run)
    ]
    if len(found) > MAX_EVENTS:
        left = len(found) - MAX_EVENTS
        found = [*found[:MAX_EVENTS], ("later", f"{left:,} more, not listed here.")]
    return found


def _who(group: Group, run: Run) -> str:
    seeds = _seeds(group)[[id(other) for other in group.runs].index(id(run))]
    return f"{group.label}, seed {seeds}" if len(group.runs) > 1 and seeds else group.label
