"""How often is a run ruined? Hundreds of short runs of AutoLR on small real tasks.

    python lab/benchmarks/ruined.py --data DATA                       # every case: some 12 minutes on one core
    python lab/benchmarks/ruined.py --cases digits --optimizers sgd --seeds 16 --json out.json
    python lab/benchmarks/ruined.py --grid-of lab/benchmarks/results/ruined/level.json    # AutoLR alone

A benchmark of a few seeds does not see what happens to one run in fifty. For each case, optimizer, batch and clipping:
the best of a grid of peak learning rates with torch's OneCycleLR (two seeds), then AutoLR without a schedule. A run is
ruined if its loss on all rows it was trained on is not finite, or has lost more than half of the best's progress from
the loss of the untrained model.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet import AutoLR, __version__
from hdet_lab.models.mlp import MLP
from hdet_lab.runs import provenance
from held_out_data import TASKS

START = 1e-3
"""Learning rate that AutoLR is given, which does not matter to it."""
GRID = tuple(10 ** (power / 2) for power in range(-10, 3))
NUM_BEST = 2
"""Seeds of the grid."""


class Positive(nn.Module):
    """Inputs between 0 and 1, as many have them."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) / 2


def plain(num_in: int, num_out: int) -> nn.Module:
    """With torch's own first weights, from which a loss takes its time to fall."""
    hidden = [nn.Linear(num_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(Positive(), *hidden, nn.Linear(64, num_out))


CASES: dict[str, tuple[str, Callable[[int, int], nn.Module], float]] = {
    "digits": ("digits", lambda num_in, num_out: MLP(num_in, num_out, widths=(64, 64)), 1.0),
    "digits-plain": ("digits", plain, 1.0),
    "digits-linear": ("digits", nn.Linear, 1.0),
    "table": ("table", lambda num_in, num_out: MLP(num_in, num_out, widths=(64, 64)), 1.0),
    "table-raw": ("table", lambda num_in, num_out: MLP(num_in, num_out, widths=(64, 64)), 77.0),
    "table-raw-linear": ("table", nn.Linear, 77.0),
}
"""Data, model, and what targets are multiplied by: 77 is how many units the table's standard deviation has."""

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    optimizer: str
    batch: int
    clip: float
    steps: int


class Trainer:
    """Trains a case again and again, on the same rows."""

    def __init__(self, case: Case, data: Path) -> None:
        source, self.build, self.scale = CASES[case.name]
        self.case, found = case, TASKS[source](data, 0)
        self.loss, (self.x, self.y), self.sha256 = found.loss, found.rows["train"], found.sha256()
        self.x = self.x.float()
        self.y = self.y if self.y.dtype == torch.int64 else self.y.float() * self.scale
        self.num_out = int(self.y.max()) + 1 if self.y.dtype == torch.int64 else 1

    def make(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.build(self.x.shape[1], self.num_out)

    @torch.no_grad()
    def whole(self, model: nn.Module) -> float:
        return float(self.loss(model(self.x), self.y))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator().manual_seed(1000 + seed)
        for _ in range(self.case.steps):
            rows = torch.randint(len(self.x), (self.case.batch,), generator=draws)
            yield self.x[rows], self.y[rows]

    def train(self, lr: float, seed: int, *, auto: bool) -> tuple[float, dict[str, Any]]:
        """The loss on all rows at the end, and what AutoLR has done."""
        model = self.make(seed)
        optimizer = OPTIMIZERS[self.case.optimizer](model.parameters(), lr)
        if auto:
            scheduler: Any = AutoLR(optimizer, total_steps=self.case.steps)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=self.case.steps)
        for x, y in self.batches(seed):
            loss = self.loss(model(x), y)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if self.case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.case.clip)
            optimizer.step()
            scheduler.step(*([loss.detach()] if auto else []))
        told = {"undone": scheduler.history[-1].num_rollbacks, "found": str(scheduler.found())} if auto else {}
        return self.whole(model), told


def examine(case: Case, data: Path, num_seeds: int, means: dict[float, float] | None) -> dict[str, Any]:
    """``means``: losses of the grid, where they are known."""
    trainer = Trainer(case, data)
    first = trainer.whole(trainer.make(0))
    if means is None:
        grid = {lr: [trainer.train(lr, seed, auto=False)[0] for seed in range(NUM_BEST)] for lr in GRID}
        means = {lr: value for lr, losses in grid.items() if math.isfinite(value := statistics.fmean(losses))}
    best_lr = min(means, key=lambda lr: means[lr])
    best = means[best_lr]
    limit, runs = (first + best) / 2, []
    for seed in range(num_seeds):
        loss, told = trainer.train(START, seed, auto=True)
        ruined = not loss <= limit
        runs.append({"seed": seed, "loss": float(f"{loss:.5g}"), "ruined": ruined, **told})
    facts = {**vars(case), "data_sha256": trainer.sha256}
    return {**facts, "first": first, "best": best, "best_lr": best_lr, "grid": list(means.items()), "runs": runs}


def show(found: dict[str, Any]) -> str:
    case = f"{found['name']}, {found['optimizer']}, batch {found['batch']}, clip {found['clip']:g}"
    losses = [run["loss"] for run in found["runs"]]
    ruined = [run["seed"] for run in found["runs"] if run["ruined"]]
    undone = sum(run["undone"] for run in found["runs"])
    text = f"{statistics.median(losses):.3g} (worst {max(losses):.3g}, {undone} undone"
    text += f", ruined: seeds {ruined})" if ruined else ")"
    return f"{case}: best {found['best']:.3g} at {found['best_lr']:.2g}; AutoLR {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--clips", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--grid-of", type=Path, help="a record whose fixed learning rates are taken as they are")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hdet").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of rounds that are undone, which are counted
    known = json.loads(options.grid_of.read_text())["cases"] if options.grid_of else []
    grids = {Case(**{name: each[name] for name in Case.__annotations__}): dict(each["grid"]) for each in known}
    results, started = [], time.perf_counter()
    for each in product(options.cases, options.optimizers, options.batches, options.clips):
        case = Case(*each, options.steps)
        results.append(examine(case, options.data, options.seeds, grids.get(case)))
        print(show(results[-1]), flush=True)
        if options.json:
            versions = {"hdet": __version__, "torch": torch.__version__, "git_commit": provenance.git_commit()}
            record = {**versions, "hardware": provenance.hardware(), "num_seeds": options.seeds}
            lines = ",\n".join(json.dumps(each) for each in results)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(f'{json.dumps(record)[:-1]}, "cases": [\n{lines}\n]}}\n')
    runs = [run for each in results for run in each["runs"]]
    ruined = sum(run["ruined"] for run in runs)
    print(f"{ruined} of {len(runs)} runs ruined; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
