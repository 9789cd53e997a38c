"""How well a wrong learning rate is recovered from: a small GPT on the standard library's text, on two cores.

    python lab/benchmarks/lr_recovery.py              # about a quarter of an hour; the table of docs/results_paper.md
    python lab/benchmarks/lr_recovery.py --steps 100  # a quick look

First a grid of fixed learning rates finds the best one. Then every method starts from 1/100 to 30 times it: the fixed
schedule, the paper's controller and AutoLR with each signal, four replicas. Runs on the lab's stacked engine, which
matches real processes step for step (lab/tests/test_sweep.py). Every run is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from hdet import __version__
from hdet.policy.timing import default_interval
from hdet_lab.recipes import SweepMethod
from hdet_lab.stacked.run import Result, Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import stdlib_gpt

GRID = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2)
FACTORS = (1 / 100, 1 / 30, 1 / 10, 1 / 3, 1, 3, 10, 30)
METHODS: tuple[tuple[SweepMethod, int, float], ...] = (
    ("fixed", 1, 0.0),
    ("paper", 4, 1 / 9),
    ("loss", 4, 0.1),
    ("gradient", 1, 0.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", default="one-cycle", help="one-cycle, cosine, wsd or constant")
    parser.add_argument("--methods", nargs="+", default=[m for m, *_ in METHODS], choices=[m for m, *_ in METHODS])
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    task = stdlib_gpt(num_layers=2, width=64, num_heads=2, context=64, batch_rows=16, num_validation=256)
    started = time.perf_counter()
    interval = default_interval(args.steps)

    def progress(label: str, results: list[Result]) -> list[Result]:
        print(f"[{time.perf_counter() - started:5.0f} s] {label}", file=sys.stderr, flush=True)
        return results

    def train(runs: list[Run]) -> list[Result]:
        return sweep(task, runs, num_steps=args.steps, schedule=args.schedule)

    grid = progress("grid", train([Run(lr=lr, seed=args.seed) for lr in GRID]))
    best = min(grid, key=lambda r: r.validation["loss"])
    best_lr, best_loss = best.run.lr, best.validation["loss"]
    table: dict[str, list[Result]] = {}
    for method, num_replicas, spread in METHODS:
        if method not in args.methods:
            continue
        runs = [
            Run(
                lr=factor * best_lr,
                seed=args.seed,
                method=method,
                num_replicas=num_replicas,
                interval=interval,
                spread=spread,
                controller={"temperature": 0.002} if method == "paper" else {},
            )
            for factor in FACTORS
        ]
        table[method] = progress(method, train(runs))

    print(f"best fixed learning rate {best_lr:g}, validation loss {best_loss:.3f}; fixed, by learning rate: ", end="")
    print(", ".join(f"{r.run.lr:g}: {r.validation['loss']:.3f}" for r in grid))
    print("| start / best | " + " | ".join(f"{f:.3g}" for f in FACTORS) + " | median |")
    print("|---" * (len(FACTORS) + 2) + "|")
    for name, results in table.items():
        losses = [r.validation["loss"] for r in results]
        cells = [f"{x:.3f} ({100 * (x / best_loss - 1):+.1f}%)" for x in losses]
        print(f"| {name} | " + " | ".join(cells) + f" | {100 * (statistics.median(losses) / best_loss - 1):+.1f}% |")
    if args.json:
        facts = {"hdet": __version__, "torch": torch.__version__, "python": platform.python_version()}
        everything = {"grid": grid, **table}
        runs_as_dicts = {name: [r.as_dict() for r in results] for name, results in everything.items()}
        args.json.write_text(json.dumps({**facts, "argv": sys.argv[1:], "results": runs_as_dicts}))


if __name__ == "__main__":
    main()
