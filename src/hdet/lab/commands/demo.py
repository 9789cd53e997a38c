"""``hdet demo``: four replicas train a small GPT on the source of Python's standard library, from a bad start.

The learning rate is 30 times too low. First the schedule as it is, then AutoLR around it: under three minutes on two
cores.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hdet.command_line import parse
from hdet.lab.commands.train import Job, prepare, run
from hdet.lab.recipes import TrainMethod
from hdet.lab.runs.progress import RunBar
from hdet.lab.runs.settings import SMALL, Settings

TOO_LOW = 30
RUNS: dict[TrainMethod, str] = {"fixed": "OneCycleLR", "gradient": "AutoLR"}


@dataclass(frozen=True)
class DemoOptions:
    """Train a small GPT from a learning rate 30 times too low: OneCycleLR as it is, then AutoLR around it."""

    replicas: int = 4
    """Processes, each a replica."""
    steps: int = 500
    """Optimizer steps of each run."""
    lr: float = 3e-3
    """A good learning rate; the runs start from a thirtieth of it."""
    out: Path | None = None
    """New folder for the two runs and their report; default runs/demo-TIME."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(DemoOptions, "demo", arguments)
    console = Console()
    out = options.out or Path("runs") / f"demo-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    lr = options.lr / TOO_LOW
    console.print(
        f"{options.replicas} replicas train a GPT on the source of Python's standard library, {options.steps} steps, "
        f"from a peak learning rate of {lr:.2g}, {TOO_LOW} times too low: first as it is, then with AutoLR."
    )
    ends: dict[TrainMethod, dict[str, Any]] = {}
    jobs: dict[TrainMethod, Job] = {}
    for method, name in RUNS.items():
        settings = Settings(SMALL, method=method, lr=lr, steps=options.steps)
        jobs[method] = prepare(settings, options.replicas, folder=out / method)
        with RunBar(console, name, options.steps) as bar:
            ends[method] = run(jobs[method], bar)
        if ends[method]["status"] == "stopped":
            return 130
    console.print(_table(ends))
    # Its packages draw: not before there is something to draw.
    from hdet.lab.commands.report import find_headline, write_report

    folders = [job.folder for job in jobs.values()]
    report = write_report(folders, out / "report")
    console.print(find_headline(folders), soft_wrap=True, markup=False, highlight=False)
    opened = can_open(console.is_terminal) and webbrowser.open(report.resolve().as_uri())
    console.print(f"{'Opened in your browser' if opened else 'To be opened in a browser'}: {report}", soft_wrap=True)
    return 0 if all(end["status"] == "done" for end in ends.values()) else 1


def can_open(interactive: bool) -> bool:
    """Whether somebody sits in front of a screen: not in a pipe, under CI or at the far end of ssh."""
    if not interactive or any(os.environ.get(name) for name in ("CI", "SSH_CONNECTION", "SSH_TTY")):
        return False
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def _table(ends: dict[TrainMethod, dict[str, Any]]) -> Table:
    table = Table(title="At the end")
    for column in ("run", "validation loss", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for method, end in ends.items():
        loss = end["validation"].get("loss")
        table.add_row(RUNS[method], "broke" if loss is None else f"{loss:.4f}", f"{end['time_s']:.0f}")
    return table
