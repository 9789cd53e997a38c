"""Whether AutoLR spoils a schedule that was fine: the best of each task's grid, alone and given to AutoLR.

    python lab/benchmarks/given.py --device cuda --workers 12 --json given.json

``--factor`` multiplies the peak that AutoLR is given. The losses of the schedules alone are those of the records.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hdet.policy.timing import default_interval
from hdet_lab.bench import records
from hdet_lab.bench.statistics import excess, geometric_mean
from hdet_lab.bench.suite import BY_NAME
from hdet_lab.bench.train import Bench
from hdet_lab.runs import provenance
from hdet_lab.runs.settings import open_task
from hdet_lab.stacked.run import Run

RECORDS = Path(__file__).parent / "results" / "bench"


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One task: its best schedule, and the losses with and without AutoLR, seed by seed."""
    logging.disable(logging.WARNING)
    record = next(record for record in records.load(RECORDS) if record.name == name)
    shape, lr = record.best()
    alone = record.losses("grid")[shape, lr]
    entry = BY_NAME[name]
    task = open_task(entry.task_name, args.data)
    bench = Bench(entry, task, args.seeds, record.steps, args.device)
    interval = default_interval(record.steps)
    runs = [Run(args.factor * lr, seed, "gradient", interval=interval, schedule=shape) for seed in args.seeds]
    given = bench.train(runs, entry.optimizer, watched=False)
    return {
        "task": name,
        "facts": provenance.describe(task),
        "schedule": shape,
        "lr": lr,
        "alone": [alone[seed] for seed in args.seeds],
        "given": [run["loss"] for run in given],
        "rates": [max(rate for _, rate in run["lrs"]) for run in given],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.tasks or [record.name for record in records.load(RECORDS) if record.methods.get("grid")]
    rows: list[dict[str, Any]] = []
    print("| task | schedule | alone | AutoLR given it | more | highest rate |\n|---|---|---|---|---|---|")
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = {name: pool.submit(train, name, args) for name in names}
        for name, job in jobs.items():
            try:
                row = job.result()
            except Exception as error:  # its data are not here, or it fails on this device; the others go on
                print(f"| {name} | {type(error).__name__}: {str(error)[:80]} | | | | |", flush=True)
                continue
            rows.append(row)
            losses = [math.inf if loss is None else loss for loss in row["given"]]
            more = geometric_mean(excess(losses, row["alone"]))
            alone, given = (", ".join(f"{loss:.4g}" for loss in column) for column in (row["alone"], losses))
            print(
                f"| {name} | {row['schedule']} {row['lr']:g} | {alone} | {given} | {more:+.1%} | "
                f"{max(row['rates']):.2g} |",
                flush=True,
            )
    if args.json:
        record = {"seeds": args.seeds, "factor": args.factor, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
