"""One scale for all param groups, one for each, one level that groups part from by evidence, and two other rules.

    python lab/benchmarks/paper_groups.py --seeds 0 1 2 3 4
    python lab/benchmarks/paper_groups.py --data data --tasks shakespeare-gpt feed --seeds 1 2 3

AutoLR with the gradient signal on small problems whose groups need different learning rates, and on one whose groups do
not; with ``--tasks`` on real data, small enough for two cores, from its first level. Shrinkage: each group moves
by the mean of all moves plus a share of what it differs from it. The share is a constant, or as much as the z of the
groups differ beyond chance; then scales that have parted without evidence are drawn together again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet import Adapt, AutoLR
from hdet.controllers import EvidenceController
from hdet.controllers.base import Decision, Evidence
from hdet.options import Groups
from hdet_lab.runs.provenance import describe, git_commit, hardware
from hdet_lab.tasks.base import batch_of, param_groups
from paper import compact
from paper_tasks import make_task

STEPS, TASK_STEPS, INTERVAL = 400, 240, 4


class Shrunk(EvidenceController):
    """Moves of the groups, drawn together: 1 for one scale each, 0 for the same move for all."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        state, decision = super().update(state, evidence)
        moves = np.log(decision.factors)
        shrunk = moves.mean() + self.share * (moves - moves.mean())
        return state, decision._replace(factors=np.exp(shrunk))


class Weighed(EvidenceController):
    """The share is 1 - (K - 1) / sum of (z - mean z)^2 over K groups, not below 0, smoothed over ten rounds."""

    def __init__(self, pull: float = 0.1) -> None:
        super().__init__()
        self.pull, self.spread_of_z = pull, 0.0
        self.parted: Any = 0.0

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        state, decision = super().update(state, evidence)
        moves, z = np.log(decision.factors), np.array(decision.info["z"])
        self.spread_of_z += 0.1 * (float(np.square(z - z.mean()).sum()) - self.spread_of_z)
        share = max(0.0, 1 - (len(z) - 1) / max(self.spread_of_z, 1e-9))
        differing = share * (moves - moves.mean()) - self.pull * (1 - share) * self.parted
        self.parted = self.parted + differing
        return state, decision._replace(factors=np.exp(moves.mean() + differing))


Problem = tuple[list[list[Tensor]], Callable[[int], Tensor], Callable[[], float]]
"""Param groups, the loss of a step, and what counts in the end."""


def bowl(seed: int, ratio: float) -> Problem:
    """Two halves of a noisy quadratic whose curvatures are ``ratio`` apart."""
    g = torch.Generator().manual_seed(seed)
    flat, steep = (nn.Parameter(torch.randn(50, generator=g)) for _ in range(2))
    spectrum = torch.logspace(-1, 0, 50)

    def excess(noise: float) -> Tensor:
        parts = []
        for p, curvature in ((flat, spectrum / ratio), (steep, spectrum)):
            draw = noise * curvature.sqrt() * torch.randn(50, generator=g)
            parts.append((0.5 * curvature * p.square() + draw * p).sum())
        return parts[0] + parts[1]

    return [[flat], [steep]], lambda _: excess(0.3), lambda: excess(0.0).item()


def sizes(seed: int) -> Problem:
    """Two halves of a noisy quadratic whose weights are 30 apart in size: so are the rates that Adam needs."""
    g = torch.Generator().manual_seed(seed)
    large, small = (nn.Parameter(size * torch.randn(50, generator=g)) for size in (30.0, 1.0))
    spectrum = torch.logspace(-1, 0, 50)

    def excess(noise: float) -> Tensor:
        parts = []
        for p, curvature in ((large, spectrum / 900), (small, spectrum)):
            draw = noise * curvature.sqrt() * torch.randn(50, generator=g)
            parts.append((0.5 * curvature * p.square() + draw * p).sum())
        return parts[0] + parts[1]

    return [[large], [small]], lambda _: excess(0.3), lambda: excess(0.0).item()


def embeddings(seed: int) -> Problem:
    """Rare words, whose vectors see few gradients, under a small body that sees one in every step."""
    g = torch.Generator().manual_seed(seed)
    words, body = nn.Embedding(1000, 8), nn.Linear(8, 1)
    with torch.no_grad():
        for p in (*words.parameters(), *body.parameters()):
            p.copy_(0.3 * torch.randn(p.shape, generator=g))
    truth = torch.randn(1000, generator=g)
    odds = 1 / torch.arange(1, 1001).float()

    def loss(num_rows: int) -> Tensor:
        rows = torch.multinomial(odds, 5 * num_rows, replacement=True, generator=g).view(-1, 5)
        noise = 0.3 * torch.randn(num_rows, generator=g)
        error: Tensor = body(words(rows).mean(1)).squeeze(-1) - truth[rows].mean(1) - noise
        return error.square().mean()

    groups: list[list[Tensor]] = [list(words.parameters()), list(body.parameters())]
    return groups, lambda _: loss(64), lambda: loss(8000).item()


def low_rank(seed: int) -> Problem:
    """An adapter B A on a frozen matrix, B from zero: B does better with a higher learning rate than A."""
    g = torch.Generator().manual_seed(seed)
    a, b = nn.Parameter(torch.randn(4, 64, generator=g) / 8), nn.Parameter(torch.zeros(64, 4))
    target = torch.randn(64, 4, generator=g) @ torch.randn(4, 64, generator=g) / 8

    def loss(num_rows: int) -> Tensor:
        x = torch.randn(num_rows, 64, generator=g)
        error: Tensor = x @ (b @ a - target).T + 0.3 * torch.randn(num_rows, 64, generator=g)
        return error.square().mean()

    return [[a], [b]], lambda _: loss(32), lambda: loss(4000).item()


PROBLEMS: dict[str, tuple[Callable[[int], Problem], str, float]] = {
    "bowl, 100 apart": (lambda seed: bowl(seed, 100.0), "sgd", 0.03),
    "bowl, alike": (lambda seed: bowl(seed, 1.0), "sgd", 0.03),
    "embeddings": (embeddings, "sgd", 0.03),
    "low rank, Adam": (low_rank, "adam", 1e-3),
    "low rank, SGD": (low_rank, "sgd", 1e-2),
    "sizes, 30 apart, Adam": (sizes, "adam", 3e-3),
}
VARIANTS: dict[str, Callable[[], Adapt]] = {
    "together": lambda: Adapt(controller=EvidenceController(), level=False),
    "each": lambda: Adapt(controller=EvidenceController(), level=False, groups="each"),
    "auto": lambda: Adapt(controller=EvidenceController(), level=False, groups="auto"),
    "shrunk 0.5": lambda: Adapt(controller=Shrunk(0.5), level=False, groups="each"),
    "weighed": lambda: Adapt(controller=Weighed(), level=False, groups="each"),
}


def train(
    make: Callable[[int], Problem], optimizer_name: str, lr: float, seed: int, adapt: Adapt, steps: int = STEPS
) -> dict[str, Any]:
    groups, loss_of, final = make(seed)
    params = [{"params": group} for group in groups]
    maker: Any = torch.optim.Adam if optimizer_name == "adam" else torch.optim.SGD
    optimizer = maker(params, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scheduler = AutoLR(schedule, interval=INTERVAL, total_steps=steps, adapt=adapt)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss.detach())
    with torch.no_grad():
        return {"loss": final(), "scales": list(scheduler.history[-1].scales)}


def on_task(name: str, data: Path, seed: int) -> Problem:
    """Real data. Groups are the task's, where it has more than two; else embeddings, matrices, norms and biases."""
    task = make_task(name, data, full=False)
    model = task.build(seed)
    parts: dict[str, list[Tensor]] = {"embedding": [], "body": [], "no_decay": []}
    for key, p in model.named_parameters():
        parts["no_decay" if p.dim() < 2 else "embedding" if is_embedding(model, key) else "body"].append(p)
    own = [group["params"] for group in param_groups(task, model)]

    def loss(step: int) -> Tensor:
        return task.loss(model, batch_of(task, step, seed=seed))

    return own if len(own) > 2 else list(parts.values()), loss, lambda: task.evaluate(model)["loss"]


def is_embedding(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)


def on_tasks(names: list[str], data: Path) -> tuple[dict[str, Any], dict[str, Callable[[], Adapt]]]:
    """As PROBLEMS and VARIANTS, for real data: the settings are AutoLR's own."""
    problems: dict[str, Any] = {}
    for name in names:
        for optimizer, lr in (("adam", 1e-3), ("sgd", 0.1)):
            problems[f"{name}, {optimizer}"] = (partial(on_task, name, data), optimizer, lr)
    choices: tuple[Groups, ...] = ("together", "each", "auto")
    return problems, {groups: partial(Adapt, groups=groups) for groups in choices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "paper")
    parser.add_argument("--tasks", nargs="+", default=[], help="of the lab, instead of the small problems")
    parser.add_argument("--data", type=Path, default=Path("data"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.perf_counter(), []
    problems, variants = on_tasks(args.tasks, args.data) if args.tasks else (PROBLEMS, VARIANTS)
    steps = TASK_STEPS if args.tasks else STEPS
    for problem, (make, optimizer, lr) in problems.items():
        for variant, adapt in variants.items():
            mine = [train(make, optimizer, lr, seed, adapt(), steps) for seed in args.seeds]
            rows += [
                {"problem": problem, "label": variant, "seed": s, **m} for s, m in zip(args.seeds, mine, strict=True)
            ]
            mean = math.exp(statistics.fmean(math.log(max(m["loss"], 1e-30)) for m in mine))
            print(problem, variant, f"{mean:.5g}", [f"{m['loss']:.4g}" for m in mine], compact(mine[0]["scales"]))
    words = [word for i, word in enumerate(sys.argv) if i and not {word, sys.argv[i - 1]} & {"--data", "--out"}]
    name = "groups-tasks" if args.tasks else "groups"
    record = {
        "claim": name, "command": " ".join(["python lab/benchmarks/paper_groups.py", *words]),
        "git_commit": git_commit(), "torch": torch.__version__, "hardware": hardware(),
        "seconds": time.perf_counter() - started,
        "settings": {"steps": steps, "interval": INTERVAL},
        "tasks": [describe(make_task(each, args.data, full=False)) for each in args.tasks], "runs": rows,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(compact(record), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
