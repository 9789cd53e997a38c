"""Where AutoLR has a hard time: optimizers, batches and lengths of run on digits, against OneCycleLR at its best peak.

    python lab/benchmarks/hard_cases.py --json hard_cases.json          # five seeds, some six minutes on two cores

An MLP of torch's first weights on scikit-learn's digits in [0, 1]; the training loss on all rows, at the end. The peak
of OneCycleLR, momentum not cycled, is the best of seven by half-decades, in the geometric mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR
from hdet_lab.runs import provenance
from hdet_lab.tasks import load_task
from hdet_lab.tasks.tabular import read_table


class Lion(Optimizer):
    """Signs of momentum (Chen et al., 2023), betas 0.9 and 0.99."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        peak: in the middle of those tried for OneCycleLR.
        given: the peak of the schedule that AutoLR is given, and the only one tried.
    """

    optimizer: Callable[..., Optimizer] = AdamW
    peak: float = 1e-2
    rows: int = 64
    steps: int = 600
    clip: float = math.inf
    given: float | None = None
    cooldown: bool = False

    @property
    def peaks(self) -> list[float]:
        return [self.given] if self.given else [float(f"{self.peak * 10 ** (k / 2):.1g}") for k in range(-3, 4)]


def momentum(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return SGD(parameters, lr, momentum=0.9)


CASES = {
    "plain SGD": Case(SGD, 1.0),
    "momentum SGD, 4 rows": Case(momentum, 1e-2, rows=4),
    "AdamW": Case(),
    "AdamW, 4 rows": Case(peak=3e-3, rows=4),
    "AdamW, 1 row": Case(peak=1e-3, rows=1),
    "AdamW, clipped at .01": Case(clip=0.01),
    "AdamW, unknown length, `cooldown` over the last 30%": Case(cooldown=True),
    "AdamW, 50 steps": Case(steps=50),
    "AdamW, 200 steps": Case(steps=200),
    "Lion": Case(Lion, 1e-3),
    "RMSprop": Case(RMSprop),
    "Adagrad": Case(Adagrad, 1e-1),
    "`AutoLR(OneCycleLR)` at .03": Case(given=0.03),
    "the same at .9": Case(given=0.9),
    "the same at .001, near the level and so followed": Case(given=0.001),
}


def digits(data: Path) -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(read_table(data, "digits.csv.gz", delimiter=","))
    return table[:, :-1].float() / 16, table[:, -1].long()


def train(job: tuple[str, float | None, int, Path]) -> float:
    """The loss of one run: of OneCycleLR at a peak, or of AutoLR."""
    name, peak, seed, data = job
    case = CASES[name]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x, y = digits(data)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = case.optimizer(model.parameters(), lr=peak or 1e-3)
    given = peak or case.given
    plain = OneCycleLR(optimizer, given, case.steps, cycle_momentum=False) if given else None
    auto = None
    if peak is None:
        auto = AutoLR(plain or optimizer, total_steps=None if case.cooldown or plain else case.steps)
    for step in range(1, case.steps + 1):
        rows = torch.randint(len(x), (case.rows,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        if auto is not None:
            auto.step(loss)
        elif plain is not None:
            plain.step()
        if auto is not None and case.cooldown and step == int(0.7 * case.steps):
            auto.cooldown(case.steps - step)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def mean(losses: list[float]) -> float:
    return statistics.geometric_mean(loss if math.isfinite(loss) else 1e30 for loss in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    print("| case | OneCycleLR | AutoLR | mean |\n|---|---|---|---|")
    with get_context("spawn").Pool(args.workers) as pool:
        for name in args.cases:
            jobs = [(name, peak, seed, args.data) for peak in (*CASES[name].peaks, None) for seed in args.seeds]
            losses: dict[float | None, list[float]] = {}
            for (_, peak, seed, _), loss in zip(jobs, pool.map(train, jobs, chunksize=1), strict=True):
                losses.setdefault(peak, []).append(loss)
                runs.append({"case": name, "peak": peak, "seed": seed, "loss": loss})
            auto = losses.pop(None)
            best, plain = min(losses.items(), key=lambda item: mean(item[1]))
            shown = [", ".join(f"{loss:.2g}".lstrip("0") for loss in found) for found in (plain, auto)]
            print(f"| {name} | {shown[0]} ({best:g}) | {shown[1]} | {mean(auto) / mean(plain) - 1:+.0%} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({**provenance.describe(load_task("tabular", args.data)), "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
