"""The README's table of rivals, from the records that ``hdet bench`` has written.

python lab/benchmarks/first_screen.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hdet_lab.bench.records import Record as BenchRecord
from hdet_lab.bench.records import load
from hdet_lab.bench.summary import COMPUTE, LABELS, over_tasks, percent, summarize

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCH = ROOT / "lab" / "benchmarks" / "results" / "bench"


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
    begin, end = f"<!-- {name}: begin (python lab/benchmarks/{script}.py) -->\n", f"<!-- {name}: end -->\n"
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"the page must have the lines {begin.strip()!r} and {end.strip()!r}, but one is missing")
    return before + begin + new + end + after


def main() -> None:
    table = rivals(load(BENCH))
    README.write_text(filled(README.read_text(), "rivals", table))
    print(table)


if __name__ == "__main__":
    main()
