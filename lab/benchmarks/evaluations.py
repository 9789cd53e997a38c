"""Models that overfit: AutoLR with and without ``evaluated``, against what people do today.

    python lab/benchmarks/evaluations.py --json evaluations.json                       # tables, five seeds, on the CPU
    python lab/benchmarks/evaluations.py --tasks pictures-500 pictures-2000 gpt --device cuda --cifar cifar.npz
    python lab/benchmarks/evaluations.py --tasks movielens masked neighbours parity picture --device cuda

Few rows, an evaluation every twentieth of a run. One half of the validation rows steers and selects, the other half
judges; of tables, whose halves have 44 and 179 rows, each half judges once. Rivals: fixed learning rates with early
stopping under a cosine, WSD or one-cycle (the best of all is what others are compared with, by its mean over seeds),
ReduceLROnPlateau at its defaults, and an exponential average of the weights (0.99) at a constant learning rate.

``--cifar``: a file with the uint8 arrays ``train_images``, ``train_labels``, ``test_images`` and ``test_labels`` of
CIFAR-10, 32x32x3, of which the first images are taken.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hdet import AutoLR, Copies, __version__
from hdet_lab.models.resnet import ResidualBlock
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.tasks import load_task

NUM_EVALUATIONS = int(os.environ.get("NUM_EVALUATIONS", "20"))
TASKS = ("tabular", "tabular-regression", "pictures-500", "pictures-2000", "gpt")
STEERED = ("autolr, evaluated", "autolr, best", "plateau:0.001")
"""Runs that evaluations change: one for each half."""


def kinds_of(task: str) -> list[str]:
    """Tables, whose runs take a second, have every rival at five learning rates."""
    lrs: tuple[float, ...]
    shapes: tuple[str, ...]
    averaged: tuple[float, ...]
    if task.startswith("tabular"):
        lrs, shapes, averaged = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), ("wsd", "one-cycle", "cosine"), (1e-4, 3e-4, 1e-3, 3e-3)
    elif task == "neighbours":
        lrs, shapes, averaged = (1e-2, 3e-2, 6e-2), ("wsd", "cosine"), (3e-2,)
    else:
        lrs, shapes, averaged = (3e-4, 1e-3, 3e-3), ("wsd", "cosine"), (1e-3,)
    return ["autolr", *STEERED, *(f"{s}:{lr:g}" for s in shapes for lr in lrs), *(f"ema:{lr:g}" for lr in averaged)]


class Pictures(nn.Module):
    """A ResNet of three blocks, 0.22M parameters, for colour images."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
            self.blocks = nn.Sequential(ResidualBlock(32, 32), ResidualBlock(32, 64), ResidualBlock(64, 96))
            self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))
        return found


class Data:
    """Rows to train on, two halves of rows to validate on, and a model.

    Args:
        name: of the task.
        folder: of the data.
        cifar: the file of CIFAR-10.
        device: where it is trained.
    """

    def __init__(self, name: str, folder: Path, cifar: Path | None, device: str) -> None:
        self.device, self.steps = device, 500
        self.build: Callable[[int], nn.Module]
        self._loss: Callable[[nn.Module, Tensor], Tensor]
        if name.startswith("pictures"):
            assert cifar is not None
            num = int(name.partition("-")[2])
            arrays = np.load(cifar)
            images, labels = (
                np.concatenate([arrays[f"train_{what}"][:num], arrays[f"test_{what}"]]) for what in ("images", "labels")
            )
            x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
            y = torch.from_numpy(labels).long().to(device)
            self.train, held, self.batch_rows, self.build = torch.arange(num), torch.arange(num, len(x)), 64, Pictures
            self._loss = lambda model, rows: F.cross_entropy(model(x[rows.to(device)]), y[rows.to(device)])
        else:
            task: Any = load_task("shakespeare-gpt" if name == "gpt" else name, folder)
            num, held = task.num_train, task.validation_rows
            if name == "gpt":
                num, self.steps = num // 10, 1000
            elif name not in TASKS:
                self.steps = task.total_steps
            task.to(device)
            self.train, self.batch_rows, self.build = torch.arange(num), task.batch_rows, task.build
            self._loss = lambda model, rows: task.loss(model, task.gather(rows))
        self.halves = held[1::2], held[0::2]

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        return self._loss(model, rows)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> list[float]:
        """The loss on each half."""
        model.eval()
        sums = [sum(self.loss(model, part) * len(part) for part in torch.split(half, 500)) for half in self.halves]
        model.train()
        return [float(total) / len(half) for total, half in zip(sums, self.halves, strict=True)]


@cache
def data_of(name: str, folder: str, cifar: str | None, device: str) -> Data:
    return Data(name, Path(folder), None if cifar is None else Path(cifar), device)


def run(job: tuple[str, str, int, int, str, str | None, str]) -> dict[str, Any]:
    """One run: task, kind, seed, the half that steers, and where the data are."""
    name, kind, seed, half, *where = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = data_of(name, *where)
    model = data.build(seed).to(data.device)
    shape, _, lr = kind.partition(":")
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(lr or 1e-3))
    auto = schedule = plateau = ema = None
    if shape.startswith("autolr"):
        copies = Copies(best=shape.endswith("best"))
        auto = AutoLR(optimizer, total_steps=data.steps, model=model, copies=copies)
    elif shape == "plateau":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    elif shape == "ema":
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)  # type: ignore[no-untyped-call]
    else:
        schedule = make_schedule(shape, optimizer, float(lr), data.steps)
    batches = torch.Generator().manual_seed(seed)
    every, curve = data.steps // NUM_EVALUATIONS, []
    for step in range(1, data.steps + 1):
        rows = data.train[torch.randint(len(data.train), (data.batch_rows,), generator=batches)]
        loss = data.loss(model, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if auto is not None:
            auto.step(loss)
        if schedule is not None:
            schedule.step()
        if ema is not None:
            ema.update_parameters(model)
        done = auto is not None and auto.finished
        if step % every == 0 or done:
            curve.append((step, *data.evaluate(model if ema is None else ema)))
            if plateau is not None:
                plateau.step(curve[-1][1 + half])
            if auto is not None and shape != "autolr" and not done:
                auto.evaluated(curve[-1][1 + half], mode="min")
        if done:
            break
    return {"task": name, "kind": kind, "seed": seed, "half": half, "curve": curve}


def judged(run: dict[str, Any], half: int) -> dict[str, float]:
    """What a run has where ``half`` selects: at its end, at its best evaluation, and after how many steps."""
    best = min(run["curve"], key=lambda point: point[1 + half])
    return {"end": run["curve"][-1][2 - half], "best": best[2 - half], "steps": run["curve"][-1][0]}


def show(task: str, runs: list[dict[str, Any]]) -> None:
    """Losses relative to the best fixed learning rate with early stopping, over seeds and halves."""
    found: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    halves = (0, 1) if task.startswith("tabular") else (0,)
    for each in runs:
        for half in halves if each["kind"] not in STEERED else (each["half"],):
            found.setdefault(each["kind"], {})[half, each["seed"]] = judged(each, half)
    fixed = [kind for kind in found if kind.partition(":")[0] in ("wsd", "one-cycle", "cosine")]
    whole = set.intersection(*(set(found[kind]) for kind in found))
    print(task, f"{len({seed for _, seed in whole})} seeds")
    if not whole:
        return

    def mean(kind: str, half: int) -> float:
        return statistics.fmean(value["best"] for at, value in found[kind].items() if at in whole and at[0] == half)

    chosen = {half: min(fixed, key=lambda kind: mean(kind, half)) for half in halves}
    print(f"  best fixed with early stopping: {', '.join(sorted(set(chosen.values())))}")
    for kind, values in found.items():
        for what in ("end", "best"):
            shares = [100 * (values[at][what] / found[chosen[at[0]]][at]["best"] - 1) for at in sorted(whole)]
            steps = statistics.fmean(values[at]["steps"] for at in whole)
            listing = " ".join(f"{share:+.0f}" for share in shares)
            line = f"{statistics.median(shares):+6.1f}%, at most {max(shares):+.0f}%  ({listing})"
            print(f"  {kind:18s} {what:5s}{line}  {steps:.0f} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="*", default=TASKS[:2], help=f"{', '.join(TASKS)}, or others of the lab")
    parser.add_argument("--kinds", nargs="*", help="of runs, as the output names them; default all of a task")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-s", type=float, default=math.inf, help="begin no run later than this")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--show", type=Path, nargs="*", help="records to show instead; of runs that two have, the later one's"
    )
    args = parser.parse_args()
    if args.show:
        runs = [each for path in args.show for each in json.loads(path.read_text())["runs"]]
        for task in dict.fromkeys(each["task"] for each in runs):
            show(task, [each for each in runs if each["task"] == task])
        return
    cifar = None if args.cifar is None else str(args.cifar)
    jobs = []
    for seed in args.seeds:
        for task in args.tasks:
            for kind in args.kinds or kinds_of(task):
                halves = (0, 1) if task.startswith("tabular") and kind in STEERED else (0,)
                jobs += [(task, kind, seed, half, str(args.data), cifar, args.device) for half in halves]
    begun, runs = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for found in pool.imap_unordered(run, jobs, chunksize=1):
            runs.append(found)
            if time.monotonic() - begun > args.max_s:
                break
    if args.json:
        facts = {"hdet": __version__, "torch": torch.__version__, "git_commit": provenance.git_commit()}
        args.json.write_text(json.dumps({**facts, "device": args.device, "runs": runs}) + "\n")
    for task in args.tasks if not args.kinds else ():
        show(task, [each for each in runs if each["task"] == task])


if __name__ == "__main__":
    main()
