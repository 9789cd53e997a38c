"""The tables of docs/held_out.md, from the records that held_out.py and probe_cost.py have written.

python lab/benchmarks/held_out_pages.py                # of lab/benchmarks/results/held_out/
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import held_out_figure
from first_screen import filled

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "lab" / "benchmarks" / "results" / "held_out"
PAGE = ROOT / "docs" / "held_out.md"
TASKS = {
    "images": "2,000 pictures of Fashion-MNIST",
    "table": "diabetes, 222 rows",
    "digits": "digits, 600 rows",
    "text": "a GPT on a tenth of Shakespeare",
}
STARTS = {
    (1e-8, 0.0): "from a learning rate of 1e-8 and no weight decay",
    (1e-3, 0.01): "from AdamW's defaults, 1e-3 and 0.01",
    (1.0, 1.0): "from 1 and 1",
}
CLOSE = 0.01
"""Above the best of the grid: the target."""
Run = Mapping[str, Any]


class Task:
    """The runs of a record, and how far each is above the best of the grid of its seed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.seeds = sorted({run["seed"] for run in runs})
        self.grids = [[run for run in self.of("fixed") if run["seed"] == seed] for seed in self.seeds]

    def of(self, kind: str, start: tuple[float, float] | None = None) -> list[Run]:
        """In the order of seeds."""
        found = [r for r in self.runs if r["kind"] == kind and start in (None, (r["lr"], r["weight_decay"]))]
        return sorted(found, key=lambda run: int(run["seed"]))

    def best(self, by: str) -> list[float]:
        """Of the grid, by seed."""
        return [min(float(run[by]) for run in grid) for grid in self.grids]

    def above(self, runs: Sequence[Run], by: str) -> list[float]:
        """Shares above that of the same seed."""
        best = dict(zip(self.seeds, self.best(by), strict=True))
        return [run[by] / best[run["seed"]] - 1 for run in runs]

    def chosen(self, allowed: Callable[[Run], bool], by: str) -> list[Run]:
        """Of each seed's grid, the run with the lowest ``by``."""
        return [min(filter(allowed, grid), key=lambda run: float(run[by])) for grid in self.grids]


def load(folder: Path) -> dict[str, Task]:
    paths = {name: folder / f"{name}.json" for name in TASKS}
    return {name: Task(json.loads(path.read_text())["runs"]) for name, path in paths.items() if path.exists()}


def shares(values: Sequence[float]) -> str:
    """Their mean, the least and the most."""
    mean, least, most = (f"{100 * value:+.1f}%" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)) + "\n"


def test_table(tasks: Mapping[str, Task]) -> str:
    """Test loss of everything."""

    def row(label: str, cell: Callable[[Task], str]) -> list[str]:
        return [label, *(cell(task) for task in tasks.values())]

    def grid(by: str, allowed: Callable[[Run], bool] = lambda _: True) -> Callable[[Task], str]:
        return lambda task: shares(task.above(task.chosen(allowed, by), "test"))

    rows = [
        row("best of the grid, test loss", lambda task: f"{statistics.fmean(task.best('test')):.3f}"),
        row("chosen from the grid by held-out loss", grid("held_out")),
        row("best of the grid without weight decay", grid("test", lambda run: run["weight_decay"] == 0)),
        row("AutoLR, no probe", lambda task: shares(task.above(task.of("plain"), "test"))),
        row("AutoLR with `probe=`, weight decay 0.01", lambda task: shares(task.above(task.of("probe"), "test"))),
        row('**AutoLR with `probe=` and `weight_decay="learn"`**', lambda _: ""),
        *learned(tasks, "test"),
    ]
    return lines(["", *(TASKS[name] for name in tasks)], rows)


def learned(tasks: Mapping[str, Task], by: str) -> Iterator[list[str]]:
    for start, label in STARTS.items():
        yield [label, *(shares(task.above(task.of("learn", start), by)) for task in tasks.values())]
    counts = [[share <= CLOSE for share in task.above(task.of("learn"), by)] for task in tasks.values()]
    yield ["at or below 1% above", *(f"{sum(count)} of {len(count)} runs" for count in counts)]
    yield ["median", *(shares([statistics.median(task.above(task.of("learn"), by))]) for task in tasks.values())]


def cost_table(folder: Path) -> str:
    """What a probe costs, where it was measured."""
    rows = []
    for path in sorted(folder.glob("probe-cost-*.json"), key=lambda path: path.stem):
        record = json.loads(path.read_text())
        found, device = record["found"], record["provenance"]["hardware"]
        ratios = found["over gradient: median, least, most"]
        names = ("gradient + probe", "gradient + probe + weight decay")
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(*ratios[name]) for name in names]
        plain = f"{found['plain, ms a step']:.1f}"
        where = ", ".join(device["gpus"]) or device["cpu"]
        rows.append([f"{found['parameters'] / 1e6:.1f}M, {where}", plain, *cells])
    heads = ["parameters", "ms a step", "with `probe=`", 'and `weight_decay="learn"`']
    return lines(heads, rows) if rows else "Not measured on a GPU.\n"


def page(text: str, folder: Path) -> str:
    """The page with the figures of the records."""
    tasks = load(folder)
    parts = {"test": test_table(tasks), "cost": cost_table(folder)}
    for name, new in parts.items():
        text = filled(text, name, new, script="held_out_pages")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.page.write_text(page(options.page.read_text(), options.records))
    images = json.loads((options.records / "images.json").read_text())
    held_out_figure.PICTURE.write_text(held_out_figure.draw(images, 0))


if __name__ == "__main__":
    main()
