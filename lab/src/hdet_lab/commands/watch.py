"""``hdet watch``: a run folder, live in the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from hdet.checks import printable
from hdet.plot import mean_loss
from hdet_lab.command_line import UsageError, parse
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.folder import RunRecord

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
MAX_GROUPS = 20
"""More would not fit on a screen."""


@dataclass(frozen=True)
class WatchOptions:
    """Show a run while it trains; exits when it ends."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder."""
    once: bool = False
    """Print the current state and exit."""
    every_s: float = 1.0
    """Seconds between updates."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(WatchOptions, "watch", arguments)
    if not 0 < options.every_s < math.inf:
        raise UsageError(f"--every-s must be a finite number > 0, but got {options.every_s!r}")
    record = run_folder.read(options.run)
    console = Console()
    if options.once:
        console.print(view(record))
        return 0
    with Live(view(record), console=console, auto_refresh=False) as live:
        while record.end is None:
            time.sleep(options.every_s)
            record = run_folder.read(options.run)
            live.update(view(record), refresh=True)
    return 0


def view(record: RunRecord) -> Group:
    """The current state of a run."""
    config, rounds = record.config, record.rounds
    step = rounds[-1]["step"] if rounds else 0
    title = (
        f"{config['task']}, {config['method']}, lr {config['lr']:g}, seed {config['seed']}: step {step} of "
        f"{config['steps']}, {record.status}"
    )
    filled = step * WIDTH // config["steps"]
    bar = Text("━" * filled, style="green").append("━" * (WIDTH - filled), style="dim")
    parts: list[Any] = [_text(title, "bold"), bar]
    if rounds:
        parts.append(_numbers(record))
    if record.end is not None:
        figures = record.end["validation"].items()
        known = ", ".join(f"{name} {value:.4f}" for name, value in figures if value is not None)
        parts.append(_text(f"validation: {known or 'none'}"))
    return Group(*parts)


def _text(text: str, style: str = "") -> Text:
    """Plain text: no markup of rich, no control codes of the terminal."""
    return Text(printable(text), style=style)


def _numbers(record: RunRecord) -> Table:
    last = record.rounds[-1]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_column(no_wrap=True)

    def add(name: str, numbers: str, line: str = "") -> None:
        table.add_row(_text(name), _text(numbers), _text(line))

    losses = [mean_loss(entry) for entry in record.rounds]
    add("loss", f"{losses[-1]:.4f}", sparkline(losses))
    if len(last["losses"]) > 1:
        add("by replica", _row(last["losses"], ".4f"))
    for name, values in zip(record.facts["groups"][:MAX_GROUPS], last["values"], strict=False):
        add(f"lr {name}", _row(values, ".3g"))
    if (left := len(last["values"]) - MAX_GROUPS) > 0:
        add("lr", f"of {left:,} more param groups")
    scales = [math.log(scale) for entry in record.rounds if (scale := entry["scales"][0] or 0.0) > 0]
    add("scale", _row(last["scales"], ".3g"), sparkline(scales))
    for name, knob in last.get("knobs", {}).items():
        bases = [e["knobs"][name]["base"] for e in record.rounds if name in e.get("knobs", {})]
        add(name, _row(knob["values"], ".3g"), sparkline(bases))
    evidence = [entry["control"]["z"][0] for entry in record.rounds if entry["control"].get("z")]
    if evidence:
        add("z", _row([evidence[-1]], ".2f"), sparkline(evidence))
    if last["distance"]:
        add("distance", f"{last['distance']:.4g}")
    add("rollbacks", str(last["num_rollbacks"]))
    return table


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """The last ``width`` values as bars between the lowest and the highest of them; ``x`` where not finite."""
    shown = [math.nan if value is None else value for value in values][-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return "x" * len(shown)
    low, high = min(finite), max(finite)
    step = high / (len(BARS) - 1) - low / (len(BARS) - 1) or 1.0  # each alone: their difference may overflow

    def bar(value: float) -> str:
        return BARS[round(min(max(value / step - low / step, 0), len(BARS) - 1))] if math.isfinite(value) else "x"

    return "".join(map(bar, shown))


def _row(numbers: Sequence[float | None], form: str) -> str:
    return " ".join("-" if number is None else format(number, form) for number in numbers)
