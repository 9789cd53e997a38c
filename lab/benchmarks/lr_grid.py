"""Learning rates over four decades, side by side on one device: fixed schedule, the paper's controller, AutoLR.

    python lab/benchmarks/lr_grid.py shakespeare-gpt --device cuda  # every method, every start, one seed
    python lab/benchmarks/lr_grid.py feed --device cuda --seeds 0 1 2 --json out.json
    python lab/benchmarks/lr_grid.py shakespeare-gpt --device cuda --optimizer lion --starts 1e-5 1e-4 1e-3
    python lab/benchmarks/lr_grid.py shakespeare-gpt --device cuda --variant eager:method=gradient,optimism=3

Runs on the lab's stacked engine. A variant is NAME:KEY=VALUE,...; the keys are those of `hdet_lab.stacked.sweep.Run`
and of its controller. Every run is listed, in the table and in the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from hdet import __version__
from hdet.policy.timing import default_interval
from hdet_lab.recipes import starts as default_starts
from hdet_lab.stacked.run import Result, Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import TASKS, load_task

DEFAULTS = (
    "fixed:method=fixed",
    "paper:method=paper,num_replicas=8,spread=0.1111",
    "gradient:method=gradient",
    "loss:method=loss,num_replicas=8",
)
RUN_KEYS = {f.name for f in fields(Run)}


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {"controller": {}}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        parsed: Any = value if key == "method" else json.loads(value)
        (settings if key in RUN_KEYS else settings["controller"])[key] = parsed
    return name, settings


def table(results: list[Result], starts: list[float]) -> str:
    lines = [
        "| variant | seed | " + " | ".join(f"{s:g}" for s in starts) + " | median |",
        "|---" * (len(starts) + 3) + "|",
    ]
    for label in dict.fromkeys(r.run.label for r in results):
        for seed in dict.fromkeys(r.run.seed for r in results):
            row = {r.run.lr: r for r in results if (r.run.label, r.run.seed) == (label, seed)}
            if row:
                losses = [row[s].validation["loss"] for s in starts]
                backs = [row[s].num_rollbacks for s in starts]
                cells = [f"{x:.3f}" + (f" ({b} back)" if b else "") for x, b in zip(losses, backs, strict=True)]
                lines.append(f"| {label} | {seed} | {' | '.join(cells)} | {statistics.median(losses):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", default="data", help="folder of the data sets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizer", default="adam", choices=["adam", "adamw", "sgd", "lion", "muon"])
    parser.add_argument("--schedule", default="one-cycle")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--starts", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variant", action="append", help="NAME:KEY=VALUE,...; default: every method")
    parser.add_argument("--json", type=Path, help="write every run here")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    task = load_task(args.task, data=args.data)
    starts = args.starts or list(default_starts(args.optimizer))
    interval = default_interval(args.steps or task.total_steps)
    runs = []
    for text in args.variant or DEFAULTS:
        name, settings = parse_variant(text)
        settings.setdefault("interval", interval)
        runs += [Run(lr=lr, seed=seed, label=name, **settings) for seed in args.seeds for lr in starts]
    started = time.perf_counter()

    results = sweep(
        task, runs, optimizer=args.optimizer, schedule=args.schedule, num_steps=args.steps, device=args.device,
        compile=args.compile,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    print(f"{args.task}, {args.optimizer}, {args.schedule}, {len(runs)} runs, {seconds:.0f} s on {device}")
    print(table(results, starts))
    if args.json:
        facts = {"hdet": __version__, "torch": torch.__version__, "device": device, "argv": sys.argv[1:], "s": seconds}
        args.json.write_text(json.dumps({**facts, "results": [r.as_dict() for r in results]}))


if __name__ == "__main__":
    main()
