"""``hdet demo``: a small GPT learns the source of Python's standard library, with AutoLR and with fixed learning rates.

AutoLR with nothing set; then OneCycleLR at a good learning rate, and at one that is far too low. Two replicas, 300
steps each.
"""

from __future__ import annotations

import math
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

from hdet_lab.command_line import parse
from hdet_lab.commands.train import Job, make_stop, prepare, run
from hdet_lab.runs.progress import RunBar
from hdet_lab.runs.settings import SMALL, Settings


@dataclass(frozen=True)
class DemoOptions:
    """Train a small GPT: AutoLR with nothing set, then OneCycleLR at a good and at a bad learning rate."""

    replicas: int = 2
    """Processes, each a replica."""
    steps: int = 300
    """Optimizer steps of each run."""
    lr: float = 3e-3
    """A good learning rate, for OneCycleLR."""
    bad_lr: float = 1e-4
    """A bad one."""
    out: Path | None = None
    """New folder for the runs and their report; default runs/demo-TIME."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(DemoOptions, "demo", arguments)
    console = Console()
    out = options.out or Path("runs") / f"demo-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    steps, lrs = options.steps, (options.lr, options.bad_lr)
    console.print(
        f"{options.replicas} replicas train a GPT on the source of Python's standard library, {steps} steps, three "
        f"times: AutoLR with nothing set; OneCycleLR at {lrs[0]:g}, a good learning rate; OneCycleLR at "
        f"{lrs[1]:g}, a bad one."
    )
    runs = {"AutoLR": Settings(SMALL, method="gradient", schedule="none", steps=steps)}
    runs |= {f"OneCycleLR at {lr:g}": Settings(SMALL, method="fixed", lr=lr, steps=steps) for lr in lrs}
    ends: dict[str, dict[str, Any]] = {}
    jobs: dict[str, Job] = {}
    # A signal between two runs, or where one is at its end already, must not start the next.
    stop = make_stop()
    with stop.on_signals(in_charge=True):
        for name, settings in runs.items():
            jobs[name] = prepare(settings, options.replicas, folder=out / name.lower().replace(" ", "-"))
            with RunBar(console, name, steps) as bar:
                ends[name] = run(jobs[name], bar, stop)
            if stop or ends[name]["status"] == "stopped":
                return 130
    console.print(_table(ends))
    # Its packages draw: not before there is something to draw.
    from hdet_lab.commands.report import write_report

    report = write_report([job.folder for job in jobs.values()], out / "report")
    console.print(_sentence(ends), soft_wrap=True, markup=False, highlight=False)
    opened = can_open(console.is_terminal) and webbrowser.open(report.resolve().as_uri())
    where = f"{'Opened in your browser' if opened else 'To be opened in a browser'}: {report}"
    console.print(where, soft_wrap=True, markup=False)
    return 0 if all(end["status"] == "done" for end in ends.values()) else 1


def can_open(interactive: bool) -> bool:
    """Whether somebody sits in front of a screen: not in a pipe, under CI or at the far end of ssh."""
    if not interactive or any(os.environ.get(name) for name in ("CI", "SSH_CONNECTION", "SSH_TTY")):
        return False
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def _loss(end: dict[str, Any]) -> float:
    return float(end["validation"].get("loss", math.nan))


def _sentence(ends: dict[str, dict[str, Any]]) -> str:
    """What a stranger should take home."""
    (_, found), *others = ((name, _loss(end)) for name, end in ends.items())
    against = ", and ".join(f"{found / loss - 1:+.1%} against {name}" for name, loss in others)
    return (
        f"AutoLR was given no learning rate; its validation loss is {against}. "
        "In your own loop: scheduler = AutoLR(optimizer, total_steps=N), and scheduler.step(loss)."
    )


def _table(ends: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="At the end")
    for column in ("run", "validation loss", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, end in ends.items():
        loss = _loss(end)
        table.add_row(name, f"{loss:.4f}" if math.isfinite(loss) else "broke", f"{end['time_s']:.0f}")
    return table
