"""The README's headline, and its rivals, from the records that ``hdet bench`` has written.

python lab/benchmarks/first_screen.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from hdet_lab.bench.pages import footnote, marked, table
from hdet_lab.bench.records import Record as BenchRecord
from hdet_lab.bench.records import load
from hdet_lab.bench.suite import NOTHING_SET
from hdet_lab.bench.summary import (
    AIM_NEAR,
    LABELS,
    SHARES,
    TaskSummary,
    interval,
    outside,
    over_tasks,
    percent,
    summarize,
)
from hdet_lab.bench.versions import equivalent

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCH = ROOT / "lab" / "benchmarks" / "results" / "bench"


HEAD = "Final validation loss above the best of a grid; geometric mean over tasks around Adam, and its 95% interval:"
SEARCH = "search-8"
JUDGED = "J"
"""The half that has judged today's rules, or nearly these."""
MOST = 0.85
"""Share of the tasks that a method has to have been run on to be in the table."""


def rivals(records: Sequence[BenchRecord], current: Collection[str]) -> str:
    """AutoLR, a random search and rivals with one run: over all halves but A, and over the one that has judged."""
    every = [task for record in records if "B" <= record.half <= JUDGED and (task := summarize(record)) is not None]
    tasks = outside([task for task in every if "adam" in task.excess])
    judged = [task for task in tasks if task.record.half == JUDGED]
    heads = ["method", "runs", f"{len(tasks)} tasks", "within 2%", f"{len(judged)} tasks of half {JUDGED}", "within 2%"]
    lines = {method: over_tasks(tasks, method) for method in LABELS if method in (*NOTHING_SET, SEARCH)}
    shown = [line for line in lines.values() if line is not None and line.num_tasks >= MOST * len(tasks)]
    rows = []
    for line in sorted(shown, key=lambda line: line.mean):
        label = marked(LABELS[line.method], line.method, tasks, current)
        label += f" ({line.num_tasks})" * (line.num_tasks < len(tasks))
        cells = [cell for part in (tasks, judged) for cell in _cells(part, line.method)]
        rows.append(
            [f"**{label}**" if line.method == "autolr" else label, "8" if line.method == SEARCH else "1", *cells]
        )
    lines_of_table = table(heads, rows)
    return "\n".join([HEAD, "", *lines_of_table, *footnote(lines_of_table)]) + "\n"


def _cells(tasks: Sequence[TaskSummary], method: str) -> list[str]:
    """Its mean and interval, and on how many tasks it is near the best."""
    line = over_tasks(tasks, method)
    if line is None:
        return ["", ""]
    mean = percent(line.mean, 1)
    if math.isfinite(line.mean):
        mean += f" {interval(line.low, line.high, lambda share: percent(share, 1))}"
    return [mean, str(line.near[SHARES.index(AIM_NEAR)])]


def filled(text: str, name: str, new: str, *, script: str = "first_screen") -> str:
    """The page with ``new`` between the two marks of that name, which the script writes."""
    begin, end = f"<!-- {name}: begin (python lab/benchmarks/{script}.py) -->\n", f"<!-- {name}: end -->\n"
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"the page must have the lines {begin.strip()!r} and {end.strip()!r}, but one is missing")
    return before + begin + new + end + after


def main() -> None:
    new = rivals(load(BENCH), equivalent(BENCH))
    README.write_text(filled(README.read_text(), "rivals", new))
    print(new)


if __name__ == "__main__":
    main()
