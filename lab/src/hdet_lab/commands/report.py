"""``hdet report``: one HTML file about runs, the lab's or your own, and its charts as PNGs beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from hdet_lab.command_line import UsageError, parse, say
from hdet_lab.files import replace_file
from hdet_lab.reports.charts import Group
from hdet_lab.reports.compose import compose
from hdet_lab.reports.drawing import write_pngs
from hdet_lab.reports.headline import headline
from hdet_lab.reports.run import Run
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs import own
from hdet_lab.runs.folder import CONFIG, RunRecord

PAGE = "report.html"
# What does not make a run another configuration.
NOT_CONFIGURATION = ("seed", "data", "checkpoint_s", "freeze_file")
METHODS = {
    "fixed": ("fixed schedule", "the fixed schedule"),
    "paper": ("paper's controller", "the paper's controller"),
    "gradient": ("AutoLR", "AutoLR"),
    "loss": ("AutoLR (loss signal)", "AutoLR with the loss signal"),
}
"""For readers who do not know the lab's names: in a label, and in a sentence."""


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML file, with charts and every seed's figures, and the charts as PNGs beside it."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN ...]")]
    """Run folders; files of a JsonLinesSink, TensorBoard's event files; or folders that hold some."""
    out: Path | None = None
    """Folder of the report; default RUN-report for one run, else report beside the first."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(ReportOptions, "report", arguments)
    say(f"wrote {write_report(options.runs, options.out)}")
    return 0


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write ``report.html`` and its PNGs; returns the path of the former."""
    paths = find_runs(runs)
    ours = [run_folder.read(path) for path in paths if _is_ours(path)]
    empty = [record.folder for record in ours if not record.rounds]
    groups = group_runs([record for record in ours if record.rounds]) if ours and not empty else []
    for path in paths:
        if not _is_ours(path):
            found = own.read(path)
            groups += [Group(run.name.replace(".jsonl", ""), [run], fixed=not _explores(run)) for run in found]
            empty += [] if found else [path]
    if empty:
        raise UsageError(f"a report needs runs with at least one round, but {empty[0]} has none; train it first")
    if out is None:
        first = paths[0] if paths[0].name not in ("", "..") else paths[0].resolve()
        alone = first.stem if first.suffix == ".jsonl" else first.name
        out = first.with_name(f"{alone}-report") if len(paths) == 1 else first.parent / "report"
        if out.is_symlink():
            raise UsageError(f"--out must be given where a link is in the place of the report, but {out} is one")
    tasks = sorted({record.config["task"] for record in ours})
    if not tasks and len(paths) == 1:
        tasks = [paths[0].name or paths[0].resolve().name]
    text, charts = compose(", ".join(tasks), groups)
    path = out / PAGE
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_pngs(charts, out)
        replace_file(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be written, but {out} cannot: {error.strerror}") from None
    return path


def find_headline(folders: Sequence[Path]) -> str:
    """The first sentence of a report about these run folders."""
    return headline(group_runs([run_folder.read(folder) for folder in folders]))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders among ``paths`` and right below them, and records of other runs, each once, in order."""
    found: dict[Path, None] = {}
    for path in paths:
        if _is_ours(path) or path.is_file():
            found[path] = None
        elif not os.path.exists(path / PAGE):  # an older report lies among the runs it is about
            below = sorted(inner.parent for inner in path.glob(f"*/{CONFIG}")) or own.find(path)
            if not below:
                raise UsageError(
                    f"RUN must be a run folder or a sink's records, or hold some, but {path} "
                    f"{'has none' if os.path.exists(path) else 'does not exist'}; hdet train writes a run folder, "
                    "JsonLinesSink and TensorBoardSink records"
                )
            found.update(dict.fromkeys(below))
    if not found:
        raise UsageError("RUN must name at least one run, but got none; hdet train writes one")
    return list(found)


def _is_ours(path: Path) -> bool:
    return os.path.exists(path / CONFIG)  # Path.exists() raises where a folder may not be entered


def _explores(run: Run) -> bool:
    return run.learns or any(entry["control"] or entry.get("knobs") for entry in run.rounds)


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """Runs that differ in their seed only are one group, in the order of their first run."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(str(_configuration(record)), []).append(record)
    first = [_configuration(members[0]) for members in groups.values()]
    scheduled = [c for c in first if not _given_nothing(c)]
    differ = [name for name in ("task", "schedule", "optimizer") if _differ(scheduled, name)]
    names = ["method", "lr", *differ]
    if len({_label(c, names) for c in first}) < len(first):  # what they were given tells them apart, or something else
        scheduled = first
    for name in first[0]:
        if len({_label(c, names, full=scheduled is first) for c in first}) == len(first):
            break
        if name not in names and _differ(first, name):
            names.append(name)
    found = []
    for configuration, members in zip(first, groups.values(), strict=True):
        runs = [_run(record) for record in sorted(members, key=lambda record: record.config["seed"])]
        label = _label(configuration, names, full=scheduled is first)
        found.append(Group(label, runs, fixed=configuration["method"] == "fixed"))
    return found


def _given_nothing(configuration: dict[str, Any]) -> bool:
    """Whether neither a learning rate nor a schedule was given."""
    return configuration["method"] == "gradient" and configuration.get("schedule") == "none"


def _run(record: RunRecord) -> Run:
    method = record.config["method"]
    return Run(
        record.folder.name,
        record.rounds,
        record.facts["groups"],
        record.config["steps"],
        record.status,
        method=METHODS.get(method, ("", method))[1],
        facts=record.facts,
        seed=record.config["seed"],
        validation=dict((record.end or {}).get("validation", {})),
        time_s=(record.end or record.rounds[-1])["time_s"] if record.rounds else None,
    )


def _differ(configurations: Sequence[dict[str, Any]], name: str) -> bool:
    return len({str(configuration.get(name)) for configuration in configurations}) > 1


def _label(configuration: dict[str, Any], names: Sequence[str], *, full: bool = False) -> str:
    said = {**configuration, "method": METHODS.get(configuration["method"], (configuration["method"],))[0]}
    skipped = ("lr", "schedule") if _given_nothing(configuration) and not full else ()
    values = [(name, said.get(name)) for name in names if name not in skipped]
    return ", ".join(value if isinstance(value, str) else f"{name} {_short(value)}" for name, value in values)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _configuration(record: RunRecord) -> dict[str, Any]:
    """What makes a run another configuration; lists as text, so that it can be told apart by and named."""
    values = {name: value for name, value in record.config.items() if name not in NOT_CONFIGURATION}
    return {**values, "knobs": " ".join(values.get("knobs", ())) or "no knobs"}
