"""AutoLR around the optimizers of torch, against the best of a grid: an MLP learns what another one says.

    python lab/benchmarks/optimizers.py --json optimizers.json      # 15 minutes on two cores

A network of 14,000 parameters, 250 steps of 64 rows, none of which comes twice; the cross-entropy on 4,096 others. The
grid: WSD at eleven peaks from 1e-4 to 10, the best by the geometric mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from hdet import AutoLR
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256

STEPS, ROWS, INPUTS, CLASSES, WIDTH = 250, 64, 32, 10, 96
PEAKS = [10 ** (half / 2) for half in range(-8, 3)]
START = 1e-3
BROKEN = 1e30
Make = Callable[[Iterable[nn.Parameter], float], Optimizer]


def _named(name: str, **settings: object) -> Make:
    return lambda parameters, lr: getattr(torch.optim, name)(parameters, lr=lr, **settings)


OPTIMIZERS: dict[str, Make] = {
    **{name: _named(name) for name in ("AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "Adafactor")},
    "Adam": _named("Adam"),
    "Adam, amsgrad": _named("Adam", amsgrad=True),
    "RMSprop": _named("RMSprop"),
    "RMSprop, momentum": _named("RMSprop", momentum=0.9),
    "SGD": _named("SGD"),
    "SGD, momentum": _named("SGD", momentum=0.9),
    "SGD, nesterov": _named("SGD", momentum=0.9, nesterov=True),
}


def _rows(teacher: nn.Module, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, INPUTS, generator=generator)
    with torch.no_grad():
        said = teacher(x) + 0.3 * torch.randn(num, CLASSES, generator=generator)
    return x, said.argmax(1)


def train(name: str, peak: float | None, seed: int) -> float:
    """The loss on rows that were not trained on; ``peak``: of WSD, None for AutoLR."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(1000)
    teacher = nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    for p in teacher.parameters():
        nn.init.normal_(p, std=4 / math.sqrt(p.shape[-1]) if p.ndim == 2 else 0.1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                          nn.Linear(WIDTH, CLASSES))  # fmt: skip
    optimizer = OPTIMIZERS[name](model.parameters(), START if peak is None else peak)
    auto = AutoLR(optimizer, total_steps=STEPS) if peak is None else None
    fixed = None if peak is None else make_schedule("wsd", optimizer, peak, STEPS)
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(STEPS):
        x, y = _rows(teacher, ROWS, generator)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if auto is not None:
            auto.step(loss)
        elif fixed is not None:
            fixed.step()
    x, y = _rows(teacher, 4096, torch.Generator().manual_seed(99))
    with torch.no_grad():
        found = cross_entropy(model(x), y).item()
    return found if math.isfinite(found) else BROKEN


def mean(losses: list[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, losses)) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args()
    facts = {"git_commit": provenance.git_commit(), "code_sha256": code_sha256(), "hardware": provenance.hardware()}
    record = {"facts": {**facts, "torch": torch.__version__, "seeds": args.seeds}, "grid": {}, "autolr": {}}
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        runs = {
            name: [list(pool.map(partial(train, name, peak), args.seeds)) for peak in (None, *PEAKS)]
            for name in OPTIMIZERS
        }
        for name, (mine, *grid) in runs.items():
            best = min(range(len(PEAKS)), key=lambda k: mean(grid[k]))
            record["grid"][name] = {f"{peak:.3g}": losses for peak, losses in zip(PEAKS, grid, strict=True)}
            record["autolr"][name] = mine
            shown = [", ".join(f"{loss:.3f}" for loss in losses) for losses in (grid[best], mine)]
            more = mean(mine) / mean(grid[best]) - 1
            print(f"| {name} | {PEAKS[best]:.3g} | {shown[0]} | {shown[1]} | {more:+.1%} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
