"""A run folder: what was asked for, what happened round by round, and where to go on.

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

from hdet.lab.command_line import UsageError

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"


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
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"--out must be a new folder, but {folder} exists; choose another, or go on with --resume {folder}"
        ) from None
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be created, but {folder} cannot: {error.strerror}") from None
    _replace(folder / CONFIG, (json.dumps(plain(facts), indent=2, allow_nan=False) + "\n").encode())
    (folder / METRICS).touch()


def read(folder: Path | str) -> RunRecord:
    """Read a run folder, also of a run that is still going on."""
    folder = Path(folder)
    try:
        facts = json.loads((folder / CONFIG).read_text())
        text = (folder / METRICS).read_text()
    except (OSError, ValueError):
        raise UsageError(
            f"a run folder must hold {CONFIG} and {METRICS}, but {folder} does not; hdet train writes one"
        ) from None
    record = RunRecord(folder, facts)
    for line in text.split("\n")[:-1]:  # what has no newline yet is still being written
        entry = json.loads(line)
        if entry["event"] == "round":
            record.rounds.append(entry)
        elif entry["event"] == "end":
            record.end = entry
    return record


def append(folder: Path, entry: Mapping[str, Any]) -> None:
    """One more line of metrics; numbers that are not finite become null."""
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(plain(entry), allow_nan=False) + "\n")


def cut_metrics(folder: Path, step: int) -> None:
    """Forget what happened after ``step``: training goes on from there."""
    lines = (folder / METRICS).read_text().split("\n")[:-1]
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    _replace(folder / METRICS, "".join(f"{line}\n" for line in kept).encode())


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint; whenever the power fails, the old one or the new one is there."""
    path = folder / f"{CHECKPOINT}.new"
    torch.save(dict(state), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(folder / CHECKPOINT)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint, on the host."""
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
    return state


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
