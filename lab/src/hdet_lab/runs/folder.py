"""A run folder: the settings, what happened round by round, and a checkpoint to continue from.

``config.json`` is written once, ``metrics.jsonl`` grows by a line a round, ``checkpoint.pt`` is replaced atomically.
The last line of a finished run has ``"event": "end"``; after that nothing in the folder changes.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hdet.checks import number, shown
from hdet.sinks import append_line
from hdet_lab.command_line import FailedError, UsageError
from hdet_lab.files import MAX_BYTES, open_regular, read_text, replace_file
from hdet_lab.runs.rules import check_entry, check_facts, parse

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"
MAX_CONFIG_BYTES = 2**24
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
    facts = {**facts, "folder_id": folder_id(folder)}
    _replace(folder / CONFIG, (json.dumps(plain(facts), indent=2, allow_nan=False) + "\n").encode())
    _replace(folder / METRICS, b"")


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
    text = _text(folder / CONFIG, MAX_CONFIG_BYTES)
    try:
        facts = parse(text)
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
            entry = parse(line)
            check_entry(entry, facts)
        except ValueError as error:
            raise UsageError(
                f"{folder / METRICS} cannot be used: line {count}: {error}; remove it, or start a new run"
            ) from None
        found.append((line, entry))
    return found


def _text(path: Path, most: int = MAX_BYTES) -> str:
    """What a file says. UsageError where it cannot be read."""
    try:
        return read_text(path, most)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"a run folder must hold {CONFIG} and {METRICS}, but {path} cannot be read ({reason}); hdet train "
            "writes one"
        ) from None


def folder_id(folder: Path) -> str:
    """What a folder is told by on its file system: a copy of it, unpacked or moved elsewhere, has another."""
    return str(folder.stat().st_ino)


def is_own(record: RunRecord) -> bool:
    """Whether this user has begun the run in this very folder."""
    user = os.geteuid() if hasattr(os, "geteuid") else None
    own = user is None or record.folder.stat().st_uid == user
    return own and record.facts.get("folder_id") == folder_id(record.folder)


def refuse_links(folder: Path) -> None:
    """UsageError where a run that is continued would be written through a link."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise UsageError(f"a run that is continued must not hold links, but {path} is one; put the file there")


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint; whenever the power or the disk fails, the old one or the new one is there."""
    path = folder / CHECKPOINT
    try:
        replace_file(path, lambda file: torch.save(dict(state), file))
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        reason = getattr(cause, "strerror", None) or "the file could not be written"
        kept = f"that of step {step} is intact" if (step := _step_of(path)) else "there is none before it"
        remedy = f"continue with: hdet train --resume {shlex.quote(str(folder))}" if step else "start a new run"
        raise FailedError(
            f"the checkpoint of step {state['step']} cannot be written into {folder} ({reason}); "
            f"{kept}. Make room, and {remedy}"
        ) from None


def _step_of(path: Path) -> int:
    """Of a checkpoint; 0 where there is none."""
    try:
        with open_regular(path, math.inf) as file:
            return int(torch.load(file, map_location="cpu", weights_only=True)["step"])
    except Exception:
        return 0


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint, on the host. UsageError where it is broken; nothing in it is ever run."""
    try:
        with open_regular(folder / CHECKPOINT, math.inf) as file:
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
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
    try:
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise FailedError(f"{path} cannot be written ({error.strerror or error}); make room, and try again") from None
