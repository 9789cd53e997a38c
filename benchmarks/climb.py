"""From any start: AutoLR with nothing set, against the best of schedules by learning rates.

    python benchmarks/climb.py shakespeare-gpt --device cuda --steps 500 --seeds 0 1 2 --json out.json
    python benchmarks/climb.py fashion --device cuda --steps 2000 --lrs 3e-3 1e-2 3e-2
    python benchmarks/climb.py quadratic --steps 300 --starts 1e-8 1e-2 1                  # a minute on two cores

Runs side by side on the stacked engine. The grid is one-cycle, cosine and WSD by eight learning rates, of the same
seed; ``none`` is AutoLR without a schedule. Every run is listed, and written with its learning rates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hdet import __version__
from hdet.lab.runs import provenance
from hdet.lab.stacked.run import Result, Run
from hdet.lab.stacked.sweep import sweep
from hdet.lab.tasks import TASKS, load_task
from hdet.lab.tasks.base import Task
from hdet.policy.timing import default_interval

SHAPES = ("one-cycle", "cosine", "wsd")
_ADAM = (1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 1e-1)
GRID = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "muon": _ADAM,
    "lion": (1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 3e-3, 1e-2),
    "sgd": (1e-3, 1e-2, 3e-2, 0.1, 0.3, 0.6, 1.0, 3.0),
}
STARTS = {"sgd": (1e-6, 1e-4, 1e-2, 1.0, 100.0)}
ADAM_STARTS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)


def loss_of(result: Result) -> float:
    loss = result.validation["loss"]
    return loss if math.isfinite(loss) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--optimizer", choices=sorted(GRID), default="adam")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--starts", type=float, nargs="+")
    parser.add_argument("--lrs", type=float, nargs="+", help="of the grid")
    parser.add_argument("--schedules", nargs="+", default=["none"], help="that AutoLR is given, beside the grid's")
    parser.add_argument("--no-grid", action="store_true", help="AutoLR only")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write every run here, after each sweep")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    task = load_task(args.task, args.data)
    provenance.tell_note(task)
    num_steps = args.steps or task.total_steps
    starts = args.starts or STARTS.get(args.optimizer, ADAM_STARTS)
    record: dict[str, Any] = {
        "hdet": __version__,
        "command": " ".join(sys.argv),
        "task": args.task,
        "optimizer": args.optimizer,
        "steps": num_steps,
        **provenance.describe(task),
        "runs": [],
    }
    lrs = args.lrs or GRID[args.optimizer]
    fixed = [Run(lr=lr, seed=seed) for seed in args.seeds for lr in lrs]
    found: dict[str, list[Result]] = {}
    auto = [
        Run(lr=lr, seed=seed, method="gradient", interval=default_interval(num_steps))
        for seed in args.seeds
        for lr in starts
    ]
    todo = [(f"autolr, {shape}", auto, shape) for shape in args.schedules]
    if not args.no_grid:
        todo = [(shape, fixed, shape) for shape in SHAPES] + todo
    for label, runs, shape in todo:
        begun = time.perf_counter()
        found[label] = train(task, runs, args.optimizer, shape, num_steps, args.device)
        print(f"{label}: {len(runs)} runs in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        record["runs"] += [{"schedule": shape, **r.as_dict()} for r in found[label]]
        if args.json:
            args.json.write_text(json.dumps(record, default=str) + "\n")
    show(found, args.seeds, starts, args.schedules)


def train(task: Task, runs: list[Run], optimizer: str, shape: str, num_steps: int, device: str) -> list[Result]:
    return sweep(task, runs, optimizer=optimizer, schedule=shape, num_steps=num_steps, device=device)


def show(found: dict[str, list[Result]], seeds: list[int], starts: tuple[float, ...], schedules: list[str]) -> None:
    """One table: for each seed the best of the grid, and each start against it."""
    print("| seed | best of the grid | AutoLR | " + " | ".join(f"{lr:g}" for lr in starts) + " |")
    print("|---" * (len(starts) + 3) + "|")
    for seed in seeds:
        grid = [(loss_of(r), shape, r.run.lr) for shape in SHAPES for r in found.get(shape, ()) if r.run.seed == seed]
        best = min(grid, default=None)
        for shape in schedules:
            mine = [r for r in found[f"autolr, {shape}"] if r.run.seed == seed]
            cells = []
            for r in mine:
                against = "" if best is None else f" {100 * (loss_of(r) / best[0] - 1):+.1f}%"
                cells.append(f"{loss_of(r):.4f}{against} ({r.climb_steps} {r.climb_ending}, {r.num_rollbacks} undone)")
            of_grid = "-" if best is None else f"{best[0]:.4f} ({best[1]}, {best[2]:g})"
            print(f"| {seed} | {of_grid} | {shape} | " + " | ".join(cells) + " |")
            if best is not None:
                excess = [100 * (loss_of(r) / best[0] - 1) for r in mine]
                print(
                    f"  seed {seed}, {shape}: worst {max(excess):+.1f}%, median {statistics.median(excess):+.1f}%, "
                    f"apart {max(excess) - min(excess):.1f} points",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    main()
