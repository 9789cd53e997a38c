"""Models that overfit: AutoLR with and without ``evaluated``, against what people do today.

    python lab/benchmarks/evaluations.py --json evaluations.json      # five seeds, about two minutes on 16 cores

Small tables and few pictures, 500 steps, an evaluation every 25. Odd validation rows steer and select, even ones judge.
Rivals: the best of ten fixed runs (WSD and one-cycle, five learning rates), chosen by the mean over seeds of what they
have at their best evaluation (early stopping), ReduceLROnPlateau at its defaults with early stopping, and a cosine.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet import AutoLR, __version__
from hdet_lab.models.mlp import MLP
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.tasks import load_task

STEPS, EVERY = 500, 25
LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
TASKS = ("tabular", "tabular-regression", "pictures-500", "pictures-2000")
KINDS = [
    "autolr",
    "autolr, evaluated",
    "plateau:0.001",
    *(f"{s}:{lr:g}" for s in ("wsd", "one-cycle", "cosine") for lr in LRS),
]


class Data:
    """Rows to train on, rows that steer, and rows that judge."""

    def __init__(self, name: str, folder: Path) -> None:
        if name.startswith("pictures"):
            task: Any = load_task("fashion-wide", folder)
            num = int(name.partition("-")[2])
            rows = torch.arange(num)
            task.batch_rows = 64
        else:
            task = load_task(name, folder)
            rows = torch.arange(task.num_train)
        self.pictures = name.startswith("pictures")
        self.task, self.train, held = task, rows, task.validation_rows[:2000]
        self.steer, self.judge = held[1::2], held[0::2]

    def build(self, seed: int) -> nn.Module:
        if not self.pictures:
            model: nn.Module = self.task.build(seed)
            return model
        generator = torch.Generator().manual_seed(seed)
        layers = nn.Flatten(), nn.LayerNorm(784, elementwise_affine=False)
        return nn.Sequential(*layers, MLP(784, 10, widths=(256, 256), generator=generator))

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        inputs, targets = self.task.gather(rows)
        found: Tensor = self.task.loss(model, (inputs.float(), targets))
        return found


def run(job: tuple[str, str, int, str]) -> dict[str, Any]:
    """One run: task, kind, seed and the folder of the data."""
    name, kind, seed, folder = job
    torch.set_num_threads(1)
    data = Data(name, Path(folder))
    model = data.build(seed)
    shape, _, lr = kind.partition(":")
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(lr or 1e-3))
    auto = AutoLR(optimizer, total_steps=STEPS) if shape.startswith("autolr") else None
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if shape == "plateau" else None
    schedule = None if auto or plateau else make_schedule(shape, optimizer, float(lr), STEPS)
    batches = torch.Generator().manual_seed(seed)
    best, end = (math.inf, math.inf, 0), STEPS
    for step in range(1, STEPS + 1):
        rows = data.train[torch.randint(len(data.train), (data.task.batch_rows,), generator=batches)]
        loss = data.loss(model, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if auto is not None:
            auto.step(loss)
        elif schedule is not None:
            schedule.step()
        done = auto is not None and auto.finished
        if step % EVERY == 0 or done:
            model.eval()
            with torch.no_grad():
                steer, judge = data.loss(model, data.steer).item(), data.loss(model, data.judge).item()
            model.train()
            if steer < best[0]:
                best = steer, judge, step
            if plateau is not None:
                plateau.step(steer)
            if auto is not None and kind.endswith("evaluated") and not done:
                auto.evaluated(steer)
        if done:
            end = step
            break
    return {"task": name, "kind": kind, "seed": seed, "end": judge, "best": best[1], "best_step": best[2], "steps": end}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jobs = [(task, kind, seed, str(args.data)) for task in args.tasks for kind in KINDS for seed in args.seeds]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        runs = pool.map(run, jobs, chunksize=1)
    if args.json:
        facts = {"hdet": __version__, "torch": torch.__version__, "git_commit": provenance.git_commit()}
        args.json.write_text(json.dumps({**facts, "steps": STEPS, "every": EVERY, "runs": runs}) + "\n")
    for task in args.tasks:
        print(task)
        mine = [each for each in runs if each["task"] == task]
        fixed = [kind for kind in KINDS if kind.partition(":")[0] in ("wsd", "one-cycle")]
        means = {kind: statistics.fmean(r["best"] for r in mine if r["kind"] == kind) for kind in fixed}
        chosen = min(means, key=lambda kind: means[kind])
        reference = {r["seed"]: r["best"] for r in mine if r["kind"] == chosen}
        print(f"  best fixed with early stopping: {chosen}, {means[chosen]:.4g}")
        for kind in KINDS:
            rows = [r for r in mine if r["kind"] == kind]
            for what in ("end", "best"):
                shares = [100 * (r[what] / reference[r["seed"]] - 1) for r in rows]
                steps = statistics.fmean(r["steps"] for r in rows)
                each = " ".join(f"{share:+.0f}" for share in shares)
                print(f"  {kind:20s} {what:5s} {statistics.median(shares):+.1f}%  {each}  {steps:.0f} steps")


if __name__ == "__main__":
    main()
