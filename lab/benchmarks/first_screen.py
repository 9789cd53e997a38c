"""The README's headline, and its rivals, from the records that ``hdet bench`` has written.

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


HEAD = "Final validation loss above the best of a grid, geometric mean over tasks and 95% interval:"
HALVES = ("J", "I")
"""The one that has judged today's rules, and the one before it."""


def rivals(records: Sequence[BenchRecord], current: Collection[str]) -> str:
    """AutoLR and its rivals with one run, over the tasks of each half around AdamW, which they have in common."""
    lines = [_half(half, records, current) for half in HALVES if any(record.half == half for record in records)]
    return "\n".join([HEAD, "", *lines, *footnote(lines)]) + "\n"


def _half(half: str, records: Sequence[BenchRecord], current: Collection[str]) -> str:
    every = [task for record in records if record.half == half and (task := summarize(record)) is not None]
    tasks = outside([task for task in every if "adam" in task.excess])
    shown = [method for method in LABELS if method in (*NOTHING_SET, *SHOWN)]
    # On fewer tasks means are not comparable.
    found = {method: line for method in shown if (line := over_tasks(tasks, method)) and line.num_tasks == len(tasks)}
    mine = found.pop("autolr")
    near = f"{mine.near[SHARES.index(AIM_NEAR)]} of {len(tasks)}"
    others = [
        f"{LABELS[line.method]} {percent(line.mean)}" for line in sorted(found.values(), key=lambda line: line.mean)
    ]
    return (
        f"- Half {half}: AutoLR **{percent(mine.mean)}** {interval(mine.low, mine.high)}, within 2% on {near}"
        f"{marked('', 'autolr', tasks, current)}. Others, the best five: {', '.join(others[:5])}."
    )


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
