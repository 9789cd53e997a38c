"""``hdet report``: one HTML file about one run or several, and its charts as PNGs beside it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from hdet.command_line import UsageError, parse
from hdet.lab.reports.charts import Group, draw_all, write_pngs
from hdet.lab.reports.page import Table, facts_table, number, page
from hdet.lab.runs import folder as run_folder
from hdet.lab.runs.folder import CONFIG, RunRecord

PAGE = "report.html"
# What does not make a run another configuration.
NOT_CONFIGURATION = ("seed", "data", "checkpoint_s")


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML file, with charts and every seed's figures, and the charts as PNGs beside it."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN ...]")]
    """Run folders, or folders that hold some."""
    out: Path | None = None
    """Folder of the report; default RUN-report for one run, else report beside the first."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(ReportOptions, "report", arguments)
    print(f"wrote {write_report(options.runs, options.out)}")
    return 0


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write ``report.html`` and its PNGs; returns the path of the former."""
    runs = [run_folder.read(folder) for folder in find_runs(folders)]
    empty = [run.folder for run in runs if not run.rounds]
    if empty:
        raise UsageError(f"a report needs runs with at least one round, but {empty[0]} has none; train it first")
    if out is None:
        first = runs[0].folder if runs[0].folder.name not in ("", "..") else runs[0].folder.resolve()
        out = first.with_name(f"{first.name}-report") if len(runs) == 1 else first.parent / "report"
    groups = group_runs(runs)
    charts = draw_all(groups)
    tasks = sorted({run.config["task"] for run in runs})
    path = out / PAGE
    text = page(
        f"{', '.join(tasks)}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}",
        [_seed_table(groups), *([_summary_table(groups)] if len(runs) > len(groups) else [])],
        charts,
        [facts_table(run.folder.name, run.facts) for run in runs],
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_pngs(charts, out)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be written, but {out} cannot: {error.strerror}") from None
    return path


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Run folders among ``folders`` and right below them, each once, in order."""
    found: dict[Path, None] = {}
    for folder in folders:
        if os.path.exists(folder / CONFIG):  # Path.exists() raises where a folder may not be entered
            found[folder] = None
        elif not os.path.exists(folder / PAGE):  # an older report lies among the runs it is about
            below = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
            if not below:
                raise UsageError(
                    f"RUN must be a run folder, or hold some, but {folder} "
                    f"{'has none' if os.path.exists(folder) else 'does not exist'}; hdet train writes one"
                )
            found.update(dict.fromkeys(below))
    if not found:
        raise UsageError("RUN must name at least one run folder, but got none; hdet train writes one")
    return list(found)


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs that differ in their seed only are one group, in the order of their first run."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(str(_configuration(run)), []).append(run)
    first = [_configuration(members[0]) for members in groups.values()]
    names = ["method", "lr", *(name for name in ("task", "schedule", "optimizer") if _differ(first, name))]
    for name in first[0]:
        if len({_label(c, names) for c in first}) == len(first):
            break
        if name not in names and _differ(first, name):
            names.append(name)
    pairs = zip(first, groups.values(), strict=True)
    return [Group(_label(c, names), sorted(members, key=lambda run: run.config["seed"])) for c, members in pairs]


def _differ(configurations: Sequence[dict[str, Any]], name: str) -> bool:
    return len({str(configuration.get(name)) for configuration in configurations}) > 1


def _label(configuration: dict[str, Any], names: Sequence[str]) -> str:
    values = [(name, configuration.get(name)) for name in names]
    return ", ".join(value if isinstance(value, str) else f"{name} {_short(value)}" for name, value in values)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _configuration(run: RunRecord) -> dict[str, Any]:
    """What makes a run another configuration; lists as text, so that it can be told apart by and named."""
    values = {name: value for name, value in run.config.items() if name not in NOT_CONFIGURATION}
    return {**values, "knobs": " ".join(values.get("knobs", ())) or "no knobs"}


def _seed_table(groups: Sequence[Group]) -> Table:
    runs = [run for group in groups for run in group.runs]
    figures = list(dict.fromkeys(name for run in runs for name in _validation(run)))
    table = Table(
        "Every run", ["configuration", "seed", *(f"validation {name}" for name in figures), "rollbacks", "state", "s"]
    )
    for group in groups:
        for run in group.runs:
            values = [number(_validation(run).get(name)) for name in figures]
            rollbacks = str(run.rounds[-1]["num_rollbacks"])
            seconds = f"{(run.end or run.rounds[-1])['time_s']:.0f}"
            table.rows.append([group.label, str(run.config["seed"]), *values, rollbacks, run.status, seconds])
    return table


def _summary_table(groups: Sequence[Group]) -> Table:
    table = Table("By configuration: validation loss", ["configuration", "seeds", "mean", "sd", "best", "worst"])
    for group in groups:
        losses = [_validation(run).get("loss") for run in group.runs]
        seen = [loss for loss in losses if loss is not None]
        # A run that broke has no loss, and a mean over the rest would hide it.
        mean = statistics.fmean(seen) if len(seen) == len(losses) else None
        sd = statistics.stdev(seen) if len(seen) == len(losses) > 1 else None
        worst = max(seen) if len(seen) == len(losses) else None
        numbers = [number(value) for value in (mean, sd, min(seen, default=None), worst)]
        table.rows.append([group.label, str(len(losses)), *numbers])
    return table


def _validation(run: RunRecord) -> dict[str, float | None]:
    return dict((run.end or {}).get("validation", {}))
