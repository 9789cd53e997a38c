"""The README's picture and its tables of figures, from records that climb.py and ``hdet bench`` have written.

    python benchmarks/first_screen.py                     # of the records in benchmarks/results: writes both
    python benchmarks/first_screen.py a.json b.json       # of these; the picture has the first two

A record has one task: fixed learning rates under three schedules, and AutoLR without a schedule from several starts.
Every run is a dot; lines join medians over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet.lab.bench.records import Record as BenchRecord
from hdet.lab.bench.records import load
from hdet.lab.bench.summary import COMPUTE, LABELS, over_tasks, percent, summarize

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "climb"
RECORDS = tuple(
    FOLDER / f"{name}.json"
    for name in (
        "shakespeare-gpt-adam-500",
        "stdlib-gpt-adam-500",
        "shakespeare-gpt-adam-2000",
        "stdlib-gpt-adam-2000",
        "fashion-adam-500",
        "fashion-adam-2000",
        "feed-adam-335",
        "shakespeare-gpt-muon-500",
        "shakespeare-gpt-sgd-500",
        "shakespeare-gpt-lion-500",
        "stdlib-gpt-lion-500",
    )
)
NUM_PICTURED = 2
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "figures" / "any-start.svg"
BENCH = ROOT / "benchmarks" / "results" / "bench"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 880, 350, 46, 64, 52, 34
SCHEDULES = ("one-cycle", "cosine", "wsd")
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11.5px; fill: #57606a }
  .back { fill: #ffffff } .grid { stroke: #d8dee4 } polyline { fill: none; stroke-width: 1.6 }
  .fixed { stroke: #57606a } circle.fixed { fill: #57606a; stroke: none; opacity: .45 }
  .one-cycle { stroke-dasharray: none } .cosine { stroke-dasharray: 6 3 } .wsd { stroke-dasharray: 2 3 }
  .auto { stroke: #bc4c00; stroke-width: 2.6 } circle.auto { fill: #bc4c00; stroke: none; opacity: .75 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #a5afba } .back { fill: #0d1117 } .grid { stroke: #30363d }
    .fixed { stroke: #a5afba } circle.fixed { fill: #a5afba } .auto { stroke: #ffa657 } circle.auto { fill: #ffa657 }
  }
"""


@dataclass(frozen=True)
class Point:
    """One run."""

    schedule: str
    lr: float
    seed: int
    loss: float


@dataclass(frozen=True)
class Record:
    """All runs of a task."""

    task: str
    optimizer: str
    steps: int
    runs: tuple[Point, ...]

    @classmethod
    def read(cls, path: Path) -> Record:
        data: dict[str, Any] = json.loads(path.read_text())
        runs = []
        for each in data["runs"]:
            run, loss = each["run"], each["validation"]["loss"]
            auto = run["method"] == "gradient"
            if auto and each["schedule"] != "none":
                continue  # AutoLR around a schedule is not shown here
            schedule = "auto" if auto else each["schedule"]
            finite = loss is not None and math.isfinite(loss)
            runs.append(Point(schedule, run["lr"], run["seed"], loss if finite else math.inf))
        return cls(data["task"], data["optimizer"], data["steps"], tuple(runs))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def of(self, *schedules: str, seed: int | None = None) -> list[Point]:
        return [run for run in self.runs if run.schedule in schedules and seed in (None, run.seed)]

    def best(self, seed: int) -> Point:
        return min(self.of(*SCHEDULES, seed=seed), key=lambda run: run.loss)

    def medians(self, schedule: str) -> list[tuple[float, float]]:
        runs = self.of(schedule)
        lrs = sorted({run.lr for run in runs})
        return [(lr, statistics.median(run.loss for run in runs if run.lr == lr)) for lr in lrs]

    def excess(self) -> list[float]:
        """Of each of AutoLR's runs over the best fixed one of its seed, in percent."""
        return [100 * (run.loss / self.best(run.seed).loss - 1) for run in self.of("auto")]

    def neighbours(self, places: int) -> list[float]:
        """The same of the fixed run that is so many places higher on the grid than the best, under its schedule."""
        found = []
        for seed in self.seeds:
            best = self.best(seed)
            row = sorted(self.of(best.schedule, seed=seed), key=lambda run: run.lr)
            at = row.index(best) + places
            if 0 <= at < len(row):
                found.append(100 * (row[at].loss / best.loss - 1))
        return found


def table(records: Iterable[Record]) -> str:
    lines = [
        "| task | "
        "fixed, one place lower on the grid | fixed, one place higher | AutoLR, median | AutoLR, worst | "
        "AutoLR's runs at or below the best |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        excess = record.excess()
        cells = [
            f"`{record.task}`, {record.optimizer}, {record.steps} steps",
            _span(record.neighbours(-1)),
            _span(record.neighbours(1)),
            f"{statistics.median(excess):+.1f}%",
            f"{max(excess):+.1f}%",
            f"{sum(e <= 0 for e in excess)} of {len(excess)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _span(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):+.1f}%", f"{max(values):+.1f}%"
    return low if low == high else f"{low} to {high}"


def picture(records: list[Record]) -> str:
    title = "Validation loss by the learning rate that a run is given: U-curves of fixed ones, a flat line of AutoLR"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    x = LEFT
    for name in (*SCHEDULES, "auto"):
        label = "AutoLR, no schedule" if name == "auto" else f"fixed, {name.replace('wsd', 'constant then linear')}"
        kind = "auto" if name == "auto" else f"fixed {name}"
        parts.append(
            f'<polyline class="{kind}" points="{x},16 {x + 30},16"/><text x="{x + 37}" y="20.5">{label}</text>'
        )
        x += 52 + 7 * len(label)
    width = (WIDTH - LEFT - 14 - (len(records) - 1) * (GAP + LEFT)) / len(records)
    for number, record in enumerate(records):
        parts += _panel(record, LEFT + number * (width + GAP + LEFT), width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(record: Record, left: float, width: float) -> list[str]:
    losses = [run.loss for run in record.runs if math.isfinite(run.loss)]
    low, high = min(losses), max(losses)
    step = 0.1 * 2.0 ** math.ceil(math.log2(max(high - low, 0.1) / 0.6))
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    decades = [math.log10(run.lr) for run in record.runs]
    first, last = math.floor(min(decades)), math.ceil(max(decades))
    floor = HEIGHT - BOTTOM

    def x(lr: float) -> float:
        return left + 8 + (width - 16) * (math.log10(lr) - first) / (last - first)

    def y(loss: float) -> float:  # what diverged lies on the upper edge
        return floor - (floor - TOP) * (min(loss, high) - low) / (high - low)

    parts = [f'<text x="{left}" y="{TOP - 14}">{record.task}, {record.steps} steps: validation loss</text>']
    for i in range(round((high - low) / step) + 1):
        at = y(low + i * step)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left + width:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="small" text-anchor="end" x="{left - 7}" y="{at + 4:.1f}">{low + i * step:.1f}</text>'
        )
    for decade in range(first, last + 1, 2):
        label = f"1e{decade}" if decade else "1"
        at = x(10.0**decade)
        parts.append(f'<text class="small" text-anchor="middle" x="{at:.1f}" y="{floor + 18}">{label}</text>')
    middle = left + width / 2
    parts.append(
        f'<text class="small" text-anchor="middle" x="{middle:.1f}" y="{floor + 38}">learning rate given</text>'
    )
    for name in (*SCHEDULES, "auto"):
        kind = "auto" if name == "auto" else "fixed"
        points = " ".join(f"{x(lr):.1f},{y(loss):.1f}" for lr, loss in record.medians(name))
        parts.append(f'<polyline class="{kind} {name}" points="{points}"/>')
        radius = 2.8 if name == "auto" else 1.7
        parts += [
            f'<circle class="{kind}" cx="{x(run.lr):.1f}" cy="{y(run.loss):.1f}" r="{radius}"/>'
            for run in record.of(name)
        ]
    return parts


def rivals(records: Sequence[BenchRecord]) -> str:
    """AutoLR and its rivals over the half of the benchmark on which nothing was chosen."""
    tasks = [task for record in records if record.half == "B" and (task := summarize(record)) is not None]
    found = [line for method in LABELS if (line := over_tasks(tasks, method)) is not None]
    rows = [
        "| method | runs of compute | median task | mean over the tasks | worst task |",
        "|---|---|---|---|---|",
    ]
    for line in sorted(found, key=lambda line: line.median):
        if line.num_tasks == len(tasks):  # on fewer, means are not comparable
            label = f"**{LABELS[line.method]}**" if line.method == "autolr" else LABELS[line.method]
            compute = COMPUTE.get(line.method, "1")
            worst = f"{percent(line.worst)} ({line.worst_task})"
            rows.append(f"| {label} | {compute} | {percent(line.median)} | {percent(line.mean)} | {worst} |")
    return "\n".join(rows) + "\n"


def filled(text: str, name: str, new: str, *, script: str = "first_screen") -> str:
    """The page with ``new`` between the two marks of that name, which the script writes."""
    begin, end = f"<!-- {name}: begin (python benchmarks/{script}.py) -->\n", f"<!-- {name}: end -->\n"
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"the page must have the lines {begin.strip()!r} and {end.strip()!r}, but one is missing")
    return before + begin + new + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", default=RECORDS)
    parser.add_argument("--readme", type=Path, default=README, help="whose table is replaced")
    parser.add_argument("--svg", type=Path, default=PICTURE)
    args = parser.parse_args()
    records = [Record.read(path) for path in args.records]
    args.svg.write_text(picture(records[:NUM_PICTURED]))
    text = filled(args.readme.read_text(), "figures", table(records))
    args.readme.write_text(filled(text, "rivals", rivals(load(BENCH))))
    print(table(records))


if __name__ == "__main__":
    main()
