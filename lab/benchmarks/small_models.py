"""What a stranger tries first: 15 models of 100 to 5,000 parameters, 300 to 800 steps, against the best of a grid.

    python lab/benchmarks/small_models.py --json small.json     # the grid takes 15 minutes on two cores, AutoLR one

The grid: OneCycleLR and WSD at eleven peaks from 1e-4 to 10, the best by the geometric mean over seeds.
``--grid-of`` takes it from an earlier record.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hdet import AutoLR
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256

Fit = Callable[[Tensor, Tensor], Tensor]
PEAKS = [10 ** (half / 2) for half in range(-8, 3)]
BROKEN = 1e30


class Data(NamedTuple):
    """Rows to train on, and those that judge: the same ones where a task is to fit."""

    x: Tensor
    y: Tensor
    judged: tuple[Tensor, Tensor]
    fit: Fit = mse_loss


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sines(num: int = 512, noise: float = 0.1, scale: float = 1.0) -> Data:
    """A sum of three sines of projections: the mean is learned at once, and a plateau follows."""
    g = _seeded(100)
    directions = torch.randn(10, 3, generator=g) / math.sqrt(10)
    x = torch.randn(num, 10, generator=g)
    y = scale * torch.sin(2 * (x @ directions)).sum(1, keepdim=True) + noise * torch.randn(num, 1, generator=g)
    return Data(x, y, (x, y))


def moons() -> Data:
    """Two half circles."""
    g, num = _seeded(5), 2000
    t, c = torch.rand(num, generator=g) * math.pi, torch.randint(2, (num,), generator=g)
    x = torch.stack([torch.cos(t) * (1 - 2 * c) + c, torch.sin(t) * (1 - 2 * c) + 0.5 * c], 1)
    x = x + 0.15 * torch.randn(num, 2, generator=g)
    return Data(x, c, (x, c), cross_entropy)


def classes() -> Data:
    """Five classes from twenty features, of sizes from 0.1 to 10."""
    g, num = _seeded(6), 4000
    weights = torch.randn(20, 5, generator=g)
    x = torch.randn(num, 20, generator=g) * torch.logspace(-1, 1, 20)
    y = (x @ weights * 0.5).softmax(1).multinomial(1, generator=g)[:, 0]
    return Data(x, y, (x, y), cross_entropy)


def ratings() -> Data:
    """Half of a matrix of rank 4 with noise; rows are pairs of indices."""
    g, num = _seeded(9), 60
    table = torch.randn(num, 4, generator=g) @ torch.randn(4, num, generator=g)
    table = table + 0.3 * torch.randn(num, num, generator=g)
    x = (torch.rand(num, num, generator=g) < 0.5).nonzero()
    y = table[x[:, 0], x[:, 1]]
    return Data(x, y, (x, y))


def digits(*, labels: bool) -> Data:
    """scikit-learn's; the last 397 judge."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    if not labels:
        return Data(x[:1400], x[:1400], (x[1400:], x[1400:]))
    return Data(x[:1400], y[:1400], (x[1400:], y[1400:]), cross_entropy)


def mlp(first: int, *widths: int, last: int = 1, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    sizes = [first, *widths]
    layers = [m for a, b in zip(sizes, widths, strict=False) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], last))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def bottleneck() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 64))


class Factors(nn.Module):
    """A product of two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(60, 8), nn.Embedding(60, 8)
        for table in (self.rows, self.columns):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        products: Tensor = self.rows(pairs[:, 0]) * self.columns(pairs[:, 1])
        return products.sum(1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


class Task(NamedTuple):
    """A model, its data and how it is trained."""

    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    batch: int = 32


TASKS: dict[str, Task] = {
    "sines": Task(sines, lambda: mlp(10, 32), adamw, 400),
    "sines, 256 wide": Task(sines, lambda: mlp(10, 256), adam, 600),
    "sines, deep": Task(sines, lambda: mlp(10, 48, 48, 48, act=nn.ReLU), adamw, 800),
    "sines, all rows": Task(sines, lambda: mlp(10, 32), adam, 500, batch=512),
    "sines, momentum": Task(sines, lambda: mlp(10, 32), momentum, 600),
    "sines times 30": Task(lambda: sines(noise=3.0, scale=30.0), lambda: mlp(10, 32), adam, 600),
    "sines, noise": Task(lambda: sines(4096, noise=1.0), lambda: mlp(10, 32), adamw, 500),
    "moons": Task(moons, lambda: mlp(2, 16, 16, last=2, act=nn.ReLU), adamw, 300, batch=64),
    "moons, momentum": Task(moons, lambda: mlp(2, 16, 16, last=2, act=nn.ReLU), momentum, 500, batch=64),
    "logistic": Task(classes, lambda: nn.Linear(20, 5), adam, 400, batch=64),
    "logistic, SGD": Task(classes, lambda: nn.Linear(20, 5), sgd, 400, batch=64),
    "factors": Task(ratings, Factors, adam, 600, batch=256),
    "digits, autoencoder": Task(lambda: digits(labels=False), bottleneck, adamw, 600, batch=64),
    "digits, CNN": Task(lambda: digits(labels=True), convolutions, adamw, 300, batch=64),
    "digits, CNN, momentum": Task(lambda: digits(labels=True), convolutions, momentum, 300, batch=64),
}


def train(name: str, schedule: str, peak: float, seed: int) -> float:
    """The final loss; ``schedule``: "one-cycle", "wsd" or "autolr"."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    task, data = TASKS[name], TASKS[name].data()
    torch.manual_seed(seed)
    model = task.model()
    optimizer, n = task.optimizer(model.parameters()), task.steps
    scheduler: Any
    if schedule == "autolr":
        scheduler = AutoLR(optimizer, total_steps=n)
    else:
        for group in optimizer.param_groups:
            group["lr"] = peak
        scheduler = (
            OneCycleLR(optimizer, peak, n, cycle_momentum=False)
            if schedule == "one-cycle"
            else LambdaLR(optimizer, lambda i: min((i + 1) / (0.06 * n), 1) * min(1.0, (n - i) / (0.3 * n)))
        )
    for step in range(n):
        rows = torch.randint(len(data.x), (task.batch,), generator=_seeded(step * 7919 + seed))
        whole = task.batch >= len(data.x)
        loss = data.fit(model(data.x if whole else data.x[rows]), data.y if whole else data.y[rows])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*[loss] if schedule == "autolr" else [])
    with torch.no_grad():
        found = data.fit(model(data.judged[0]), data.judged[1]).item()
    return found if math.isfinite(found) else BROKEN


def mean(losses: list[float]) -> float:
    return math.exp(sum(math.log(max(loss, 1e-30)) for loss in losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--grid-of", type=Path, help="a record whose grid is used")
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args()
    grid = {} if args.grid_of is None else json.loads(args.grid_of.read_text(encoding="utf-8"))["grid"]
    facts = {"git_commit": provenance.git_commit(), "code_sha256": code_sha256(), "hardware": provenance.hardware()}
    facts = {**facts, "torch": torch.__version__, "seeds": args.seeds}
    record: dict[str, Any] = {"facts": facts, "grid": {}, "autolr": {}}
    rows = []
    with ProcessPoolExecutor(args.workers) as pool:
        runs = {
            (name, schedule, peak): [pool.submit(train, name, schedule, peak, seed) for seed in args.seeds]
            for name in args.tasks
            for schedule in ("autolr", *(() if name in grid else ("one-cycle", "wsd")))
            for peak in (PEAKS if schedule != "autolr" else [0.0])
        }
        for name in args.tasks:
            done = {key[1:]: [run.result() for run in each] for key, each in runs.items() if key[0] == name}
            mine = done.pop(("autolr", 0.0))
            found = grid.get(name) or {f"{schedule} {peak:.3g}": losses for (schedule, peak), losses in done.items()}
            best = min(found, key=lambda key: mean(found[key]))
            more = mean(mine) / mean(found[best])
            record["grid"][name], record["autolr"][name] = found, mine
            shown = [", ".join(f"{loss:.3g}" for loss in losses) for losses in (found[best], mine)]
            rows.append(more)
            print(f"| {name} | {best} | {shown[0]} | {shown[1]} | {more - 1:+.1%} |", flush=True)
    print(f"geometric mean {mean(rows) - 1:+.1%}, median {sorted(rows)[len(rows) // 2] - 1:+.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
