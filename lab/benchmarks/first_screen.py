"""The README's headline and table of rivals, from the records that ``hdet bench`` has written.

python lab/benchmarks/first_screen.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hdet_lab.bench.pages import footnote, marked
from hdet_lab.bench.records import Record as BenchRecord
from hdet_lab.bench.records import load
from hdet_lab.bench.suite import NOTHING_SET
from hdet_lab.bench.summary import (
    AIM_NEAR,
    COMPUTE,
    LABELS,
    SHARES,
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


SHOWN = ("search-8", "search-4")
"""Of what needs more than one run."""


def rivals(records: Sequence[BenchRecord], current: Collection[str]) -> str:
    """AutoLR and its rivals with one run, over the tasks of half B that do not overfit."""
    tasks = outside([task for record in records if record.half == "B" and (task := summarize(record)) is not None])
    shown = [method for method in LABELS if method in (*NOTHING_SET, *SHOWN)]
    # On fewer tasks means are not comparable.
    found = [line for method in shown if (line := over_tasks(tasks, method)) and line.num_tasks == len(tasks)]
    rows = []
    for line in sorted(found, key=lambda line: line.mean):
        label = marked(LABELS[line.method], line.method, tasks, current)
        if line.method == "autolr":
            label = f"**{label}**"
            head = f"On {len(tasks)} small tasks AutoLR is **{percent(line.mean)}** above the best of a grid, 95% "
            head += f"interval {interval(line.low, line.high)}."
        center, worst = (
            f"{percent(line.mean)} {interval(line.low, line.high)}",
            f"{percent(line.worst)} ({line.worst_task})",
        )
        near = f"{line.near[SHARES.index(AIM_NEAR)]}/{line.num_tasks}"
        rows.append(f"|{label}|{COMPUTE.get(line.method, '1')}|{center}|{near}|{worst}|")
    heads = ["|method|runs|geometric mean|within 2%|worst task|", "|---|---|---|---|---|"]
    lines = [head, "", *heads, *rows]
    return "\n".join([*lines, *footnote(lines)]) + "\n"


def filled(text: str, name: str, new: str, *, script: str = "first_screen") -> str:
    """The page with ``new`` between the two marks of that name, which the script writes."""
    begin, end = f"<!-- {name}: begin (python lab/benchmarks/{script}.py) -->\n", f"<!-- {name}: end -->\n"
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"the page must have the lines {begin.strip()!r} and {end.strip()!r}, but one is missing")
    return before + begin + new + end + after


def main() -> None:
    table = rivals(load(BENCH), equivalent(BENCH))
    README.write_text(filled(README.read_text(), "rivals", table))
    print(table)


if __name__ == "__main__":
    main()
