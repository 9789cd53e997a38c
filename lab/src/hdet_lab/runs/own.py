"""Runs of your own: records of a JsonLinesSink or a TensorBoardSink, also while they are being written."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hdet.checks import as_int
from hdet_lab.command_line import UsageError
from hdet_lab.files import open_regular, read_text, require_regular
from hdet_lab.reports.run import Run
from hdet_lab.runs.rules import check_record, count_of, parse

DEPTH = 3
"""Folders below the one that is named in which records are looked for."""
EVENTS = "tfevents"
MAX_EVENT_BYTES = 2**32
"""Of an event file, which may hold images too."""
LAST_YEAR_S = 253_402_300_800.0
"""A time from here on is in no year that a date can have."""


def find(folder: Path) -> list[Path]:
    """Files of JSON lines that hold records, and folders with TensorBoard's events, in a folder and below it."""
    below = [path for depth in range(DEPTH + 1) for path in sorted(folder.glob("*/" * depth + "*"))]
    lines = [path for path in below if path.suffix == ".jsonl" and path.is_file() and _holds_records(path)]
    known = {path.parent for path in lines}  # lines hold more than events
    boards = {path.parent: None for path in below if EVENTS in path.name and path.is_file()}
    return [*lines, *(board for board in boards if board not in known and _tags(board))]


def read(path: Path) -> list[Run]:
    """The runs of a file of JSON lines, which may hold several one after another, or of TensorBoard's events."""
    if path.is_dir() or EVENTS in path.name:
        rounds, groups = _rounds_of(path, _tags(path))
        return [_run(path, path.name or path.resolve().name, rounds, groups)] if rounds else []
    parts = _split(_records(path))
    names = [path.name] if len(parts) == 1 else [f"{path.name}, run {k}" for k in range(1, len(parts) + 1)]
    return [_run(path, name, part, part[-1].get("names", ())) for name, part in zip(names, parts, strict=True)]


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that is cut is still being written."""
    try:
        *lines, last = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"RUN must be a file of records, but {path} cannot be read ({reason})") from None
    found = []
    for count, line in enumerate([*lines, last], 1):
        try:
            entry = parse(line)
        except ValueError as error:
            if count > len(lines):
                break
            raise UsageError(f"{path} cannot be used: line {count}: {error}; remove the line") from None
        try:
            if isinstance(entry, dict) and entry.get("event", "round") != "round":
                continue  # what hdet train writes has lines of other kinds, too
            check_record(entry)
        except ValueError as error:
            raise UsageError(
                f"{path} cannot be used: line {count}: {error}; it must be what a JsonLinesSink writes"
            ) from None
        found.append(entry)
    return found


def _holds_records(path: Path) -> bool:
    """Whether the first line is a sink's record: a folder may hold other lines, and those of a broken run folder."""
    try:
        with open_regular(path) as file:
            entry = parse(file.readline(10_000_000).decode("utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(entry, dict) and "event" not in entry and {"index", "step", "losses", "base_values"} <= entry.keys()
    )


def _split(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One list a run. A round that is there again was repeated by a resumed run; the first again, by a new one."""
    parts: list[list[dict[str, Any]]] = []
    for record in records:
        if not parts or (record["index"] == 0 and parts[-1]):
            parts.append([])
        while parts[-1] and parts[-1][-1]["index"] >= record["index"]:
            parts[-1].pop()
        parts[-1].append(record)
    return parts


def _tags(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every scalar that a TensorBoardSink has written to a file or a folder."""
    for file in [path] if not path.is_dir() else [each for each in sorted(path.iterdir()) if EVENTS in each.name]:
        try:
            require_regular(file, MAX_EVENT_BYTES)  # TensorBoard opens all of them, and would wait for a pipe
        except OSError as error:
            raise UsageError(f"{file} cannot be used: {error.strerror or error}; remove it") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that TensorBoard imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        try:
            events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        except Exception as error:  # of a dozen types
            raise UsageError(f"RUN must hold TensorBoard's events, but {path} cannot be read ({error})") from None
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("hdet/")]
    return {tag.removeprefix("hdet/"): [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def _rounds_of(path: Path, tags: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Records as far as scalars tell, and the names of the param groups."""
    values = {tag: dict(series) for tag, series in tags.items()}  # of a repeated step the last counts
    steps: list[int] = []
    for step, _ in tags.get("round", ()):
        while steps and steps[-1] >= step:
            steps.pop()
        steps.append(step)
    groups = [tag[3:-5] for tag in tags if re.fullmatch(r"lr/.+/base", tag, re.DOTALL)]
    knobs = [tag[5:-5] for tag in tags if re.fullmatch(r"knob/.+/base", tag, re.DOTALL)]
    keys = {tag.split("/")[1] for tag in tags if tag.startswith("control/")}

    numbered = Counter(re.sub("[0-9]+$", "", tag) for tag in tags if re.search("[0-9]$", tag))

    def row(prefix: str, step: int) -> list[float | None]:
        return [finite(f"{prefix}{r}", step) for r in range(numbered[prefix])]

    def one(tag: str, step: int) -> float | None:
        return values.get(tag, {}).get(step)

    def finite(tag: str, step: int) -> float | None:
        found = one(tag, step)
        return found if found is not None and math.isfinite(found) else None

    def entry_at(step: int) -> dict[str, Any]:
        losses = row("loss/replica", step) or [None]
        control = {key: row(f"control/{key}/", step) for key in sorted(keys)}
        entry = {
            "step": step,
            "index": count_of(one("round", step), "round"),
            "losses": losses,
            "values": [row(f"lr/{name}/replica", step) for name in groups],
            "base_values": [finite(f"lr/{name}/base", step) for name in groups],
            "scales": row("scale/", step) or [None],
            "control": {key: numbers for key, numbers in control.items() if any(n is not None for n in numbers)},
            "unhealthy": list(range(count_of(one("unhealthy", step), "unhealthy", len(losses)))),
            "quarantined": list(range(count_of(one("quarantined", step), "quarantined", len(losses)))),
            "num_rollbacks": count_of(one("rollbacks", step), "rollbacks"),
            "distance": finite("distance", step),
            "knobs": {
                n: {"base": finite(f"knob/{n}/base", step), "values": row(f"knob/{n}/replica", step) or [None]}
                for n in knobs
            },
        }
        check_record(entry)
        return entry

    found = []
    for step in steps:
        try:
            entry = entry_at(step)
        except ValueError as error:
            raise UsageError(
                f"{path} cannot be used: step {step}: {error}; it must be what a TensorBoardSink writes"
            ) from None
        if any(value is not None for value in (*entry["losses"], *entry["base_values"])):
            found.append(entry)  # of one that is being written, the rest is still to come
    return found, groups


def _run(path: Path, name: str, rounds: list[dict[str, Any]], names: Sequence[str]) -> Run:
    count = max(len(entry["base_values"]) for entry in rounds)
    groups = [*names, *(f"group{k}" for k in range(len(names), count))]
    first, last = rounds[0], rounds[-1]
    config = {
        "records": str(path),
        "last written": _when(path.stat().st_mtime),
        "rounds": f"{as_int(first['index'])} to {as_int(last['index'])}",
        "steps of a round": rounds[1]["step"] - first["step"] if len(rounds) > 1 else first["step"],
        "replicas": len(last["losses"]),
        "param groups": groups,
        "knobs": list(last.get("knobs", {})),
    }
    return Run(name, rounds, groups, facts={"config": config})


def _when(time_s: float) -> str:
    if not 0 <= time_s < LAST_YEAR_S:
        return "not known"
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%Y-%m-%d %H:%M} UTC"
