"""A run folder: the settings, what happened round by round, and a checkpoint to continue from.

``config.json`` is written once, ``metrics.jsonl`` grows by a line a round, ``checkpoint.pt`` is replaced atomically.
The last line of a finished run has ``"event": "end"``; after that nothing in the folder changes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hdet.checks import number, shown
from hdet.command_line import UsageError
from hdet.lab.runs.rules import check_entry, check_facts
from hdet.sinks import append_line

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"
KEYS = ("step", "time_s", "model", "optimizer", "scheduler")


@dataclass
class RunRecord:
    """What a run folder says.

    Attributes:
        folder: where it is.
        facts: ``config.json``.
        rounds: lines of finished rounds, in order.
        end: the last line of a finished run.
    """

    folder: Path
    facts: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.facts["config"]
        return config

    @property
    def status(self) -> str:
        """``done``, ``diverged`` or ``unfinished``."""
        return "unfinished" if self.end is None else str(self.end["status"])


def create(folder: Path, facts: Mapping[str, Any]) -> None:
    """A new run folder; one that exists is refused."""
    make_folder(folder, f", or continue it with --resume {folder}")
    _replace(folder / CONFIG, (json.dumps(plain(facts), indent=2, allow_nan=False) + "\n").encode())
    (folder / METRICS).touch()


def make_folder(folder: Path, remedy: str = "") -> None:
    """Make the new folder that --out names; ``remedy`` is what else to do where it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"--out must be a new folder, but {folder} exists; choose another{remedy}") from None
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be created, but {folder} cannot: {error.strerror}") from None


def read(folder: Path | str) -> RunRecord:
    """Read a run folder, also while the run is still training."""
    folder = Path(folder)
    text = _text(folder / CONFIG)
    try:
        facts = _parse(text)
        check_facts(facts)
    except ValueError as error:
        raise UsageError(f"{folder / CONFIG} cannot be used: {error}; start a new run") from None
    record = RunRecord(folder, facts)
    for _, entry in _entries(folder, facts):
        if entry["event"] == "round":
            record.rounds.append(entry)
        elif entry["event"] == "end":
            record.end = entry
    return record


def append(folder: Path, entry: Mapping[str, Any]) -> None:
    """One more line of metrics, whole or not at all; numbers that are not finite become null."""
    append_line(folder / METRICS, json.dumps(plain(entry), allow_nan=False))


def cut_metrics(folder: Path, step: int) -> None:
    """Remove the lines after ``step``: training continues from there."""
    kept = [line for line, entry in _entries(folder, read(folder).facts) if entry["step"] <= step]
    _replace(folder / METRICS, "".join(f"{line}\n" for line in kept).encode())


def _entries(folder: Path, facts: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of the metrics, as text and as what they say; what has no newline yet is still being written."""
    found = []
    for count, line in enumerate(_text(folder / METRICS).split("\n")[:-1], 1):
        try:
            entry = _parse(line)
            check_entry(entry, facts)
        except ValueError as error:
            raise UsageError(
                f"{folder / METRICS} cannot be used: line {count}: {error}; remove it, or start a new run"
            ) from None
        found.append((line, entry))
    return found


def _text(path: Path) -> str:
    """What a file says. UsageError where it cannot be read: a device or a pipe is not even opened."""
    try:
        if os.path.exists(path) and not path.is_file():
            raise OSError("it is not a file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"a run folder must hold {CONFIG} and {METRICS}, but {path} cannot be read ({reason}); hdet train "
            "writes one"
        ) from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be JSON, but got {shown(text)} ({error})") from None


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint; whenever the power fails, the old one or the new one is there."""
    path = folder / f"{CHECKPOINT}.new"
    torch.save(dict(state), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(folder / CHECKPOINT)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint, on the host. UsageError where it is broken; nothing in it is ever run."""
    try:
        state: Any = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen types
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise UsageError(
            f"a checkpoint must be whole and hold tensors and plain values only, but {folder / CHECKPOINT} cannot be "
            f"loaded ({type(error).__name__}: {reason}); put an older one in its place, or start a new run"
        ) from None
    missing = [key for key in KEYS if key not in state] if isinstance(state, dict) else list(KEYS)
    if missing:
        raise UsageError(f"a checkpoint must be written by hdet train, but {folder / CHECKPOINT} has no {missing}")
    if not number(state["time_s"]) >= 0:
        raise UsageError(f"time_s of {folder / CHECKPOINT} must be a number >= 0, but got {shown(state['time_s'])}")
    loaded: dict[str, Any] = state
    return loaded


def plain(value: Any) -> Any:
    """JSON's types only: lists for tuples, strings for paths, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)
