"""What a wrong learning rate costs: fixed runs of the benchmark's records, off the best one by a random factor.

python lab/benchmarks/level_error.py

Of each task around Adam that does not overfit, the loss under WSD is taken as a function of the learning rate, in
logarithms linear between those of the grid; the factor is lognormal. AutoLR's losses stand beside it.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hdet.checks import FloatArray
from hdet_lab.bench.records import Record, load
from hdet_lab.bench.statistics import mean
from hdet_lab.bench.suite import BY_NAME

BENCH = Path(__file__).parent / "results" / "bench"
DEVIATIONS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Of the logarithm of the factor."""
SHIFTS = (-0.3, 0.0, 0.3)
"""Of its mean, where there is a deviation."""
NUM_DRAWS = 2000


def excesses(record: Record, factors: FloatArray) -> FloatArray:
    """Logarithm of the loss at these factors from the best learning rate of WSD, over the best of the whole grid."""
    losses = {key: mean(list(by.values())) for key, by in record.losses("grid").items()}
    fixed = {lr: loss for (shape, lr), loss in losses.items() if shape == "wsd" and np.isfinite(loss)}
    lrs = sorted(fixed)
    center = np.log(min(fixed, key=lambda lr: fixed[lr]))
    found: FloatArray = np.interp(center + np.log(factors), np.log(lrs), np.log([fixed[lr] for lr in lrs]))
    return found - math.log(min(losses.values()))


def summary(by_task: list[float]) -> str:
    """Geometric mean, median and share within 2%."""
    logs = np.array(by_task)
    shares = np.expm1([logs.mean(), np.median(logs)])
    return f"mean {shares[0]:+.1%}, median {shares[1]:+.1%}, within 2% on {np.mean(logs < np.log(1.02)):.0%}"


def main() -> None:
    records = [
        record for record in load(BENCH)
        if record.optimizer in ("adam", "torch-adamw", "adamw") and "autolr" in record.methods
        and not BY_NAME[record.name].overfits
    ]  # fmt: skip
    draws = np.random.default_rng(0).standard_normal(NUM_DRAWS)
    print(f"{len(records)} tasks, above the best of the grid")
    for deviation in DEVIATIONS:
        for shift in SHIFTS if deviation else (0.0,):
            factors = np.exp(deviation * draws + shift)
            by_task = [float(excesses(record, factors).mean()) for record in records]
            print(f"WSD, deviation {deviation:g}, shift {shift:+g}: {summary(by_task)}")
    best = [record.losses("grid")[record.best()] for record in records]
    runs = [{run["seed"]: run["loss"] for run in record.methods["autolr"]} for record in records]
    mine = [
        float(np.mean([np.log(loss / losses[seed]) for seed, loss in run.items() if seed in losses]))
        for run, losses in zip(runs, best, strict=True)
    ]
    print(f"AutoLR: {summary(mine)}")


if __name__ == "__main__":
    main()
