"""How the distance to the best of the grid changes with the length of a run: AutoLR and a grid at each length.

PYTHONPATH=src:lab/src python lab/benchmarks/lengths.py --out runs/lengths --steps 500 --device cuda
PYTHONPATH=src:lab/src python lab/benchmarks/lengths.py --out runs/lengths --chart docs/figures/lengths.svg

The first writes ``<out>/<steps>.json`` for each of ``--steps``; the second draws what is there. ``--grid FOLDER`` takes
the fixed runs of such records over, with their facts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from hdet_lab.bench.methods import run_method
from hdet_lab.bench.records import _best
from hdet_lab.bench.runner import write
from hdet_lab.bench.statistics import excess, geometric_mean
from hdet_lab.bench.suite import BY_NAME
from hdet_lab.bench.train import Bench
from hdet_lab.runs import provenance
from hdet_lab.stacked.run import Run
from hdet_lab.tasks import load_task

LENGTHS = (150, 500, 1500, 5000, 15000)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SHAPES = ("wsd", "cosine")
TASK = "speech"
SEEDS = (0, 1, 2)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 60, 40, 40


def train(steps: int, data: Path, device: str, have: Path | None = None) -> dict[str, Any]:
    """All runs of one length."""
    task = load_task(TASK, data)
    bench = Bench(BY_NAME[TASK], task, SEEDS, steps, device)
    facts = old = provenance.describe(task)
    if have is None:
        runs = [Run(lr=lr, seed=seed, schedule=shape) for lr in RATES for shape in SHAPES for seed in SEEDS]
        grid = bench.train(runs, bench.entry.optimizer, watched=False)
    else:
        known = json.loads((have / f"{steps}.json").read_text())
        grid, old = known["grid"], known.get("grid_facts", known["facts"])
        if old["data_sha256"] != facts["data_sha256"]:
            raise SystemExit(f"{have} is of other data")
    auto = run_method(bench, "autolr")
    return {"steps": steps, "facts": facts, "grid_facts": old, "grid": grid, "autolr": auto}


def shares(record: dict[str, Any]) -> tuple[tuple[str, float], list[float]]:
    """The best schedule and learning rate, and by which share AutoLR is above it, seed by seed."""
    best = _best(record["grid"])
    chosen = {run["seed"]: run["loss"] for run in record["grid"] if (run["schedule"], run["lr"]) == best}
    losses = {run["seed"]: math.inf if run["loss"] is None else run["loss"] for run in record["autolr"]}
    return best, excess([losses[seed] for seed in SEEDS], [chosen[seed] for seed in SEEDS])


def chart(records: list[dict[str, Any]]) -> str:
    """The share above the best of the grid (upwards) by the length (to the right), with every seed."""
    found = {record["steps"]: shares(record)[1] for record in records}
    every = [share for part in found.values() for share in part] + [0.0]
    low, high = min(every), max(every)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    ends = math.log(min(found)), math.log(max(found))

    def x_of(steps: int) -> float:
        return LEFT + 20 + (WIDTH - LEFT - 50) * (math.log(steps) - ends[0]) / max(ends[1] - ends[0], 1e-9)

    def y_of(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (share - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<style>text { font: 12px system-ui, sans-serif; fill: #24292f } .back { fill: #ffffff }"
        " @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #0d1117 } }</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="20">{TASK}: AutoLR above the best of the grid of the same length, by steps</text>',
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y_of(0):.1f}" y2="{y_of(0):.1f}" stroke="#808890"/>',
    ]
    for share in {low, 0.0, high}:
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(share) + 4:.1f}" text-anchor="end">{share:+.1%}</text>')
    line = " ".join(f"{x_of(steps):.1f},{y_of(geometric_mean(part)):.1f}" for steps, part in sorted(found.items()))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#bc4c00" stroke-width="2.5"/>')
    for steps, part in sorted(found.items()):
        parts.append(f'<text x="{x_of(steps):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{steps:,}</text>')
        parts += [f'<circle cx="{x_of(steps):.1f}" cy="{y_of(share):.1f}" r="3" fill="#bc4c00"/>' for share in part]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/lengths"))
    parser.add_argument("--steps", type=int, nargs="*", default=[])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    for steps in options.steps:
        write(options.out / f"{steps}.json", train(steps, options.data, options.device, options.grid))
    if options.chart:
        paths = sorted(options.out.glob("*.json"), key=lambda path: int(path.stem))
        records = [json.loads(path.read_text()) for path in paths]
        options.chart.write_text(chart(records), encoding="utf-8")
        for record in records:
            (shape, lr), part = shares(record)
            print(f"{record['steps']}: best {shape} {lr:g}, AutoLR {geometric_mean(part):+.2%}")


if __name__ == "__main__":
    main()
