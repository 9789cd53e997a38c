"""Optimizers that set their own step size, on the lab's tasks: Prodigy, D-Adaptation, Schedule-Free.

    pip install prodigyopt dadaptation schedulefree
    python benchmarks/baselines.py shakespeare-gpt --device cuda --seeds 0 1 2 --json out.json

One model a run, several runs at a time. Prodigy and D-Adaptation follow the same one-cycle schedule as the other tables
(peak 1); Schedule-Free has none, a warm-up of a tenth of the run, and is tried at several learning rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from hdet.lab.sweep import schedule_table
from hdet.lab.tasks import load_task

SCHEDULE_FREE_LRS = (1e-4, 1e-3, 3e-3, 1e-2)


def make_optimizer(method: str, model: torch.nn.Module, lr: float, num_steps: int) -> Any:
    parameters = model.parameters()
    if method == "prodigy":
        from prodigyopt import Prodigy  # type: ignore[import-not-found]

        return Prodigy(parameters, lr=1.0, safeguard_warmup=True)
    if method == "d-adaptation":
        from dadaptation import DAdaptAdam  # type: ignore[import-not-found]

        return DAdaptAdam(parameters, lr=1.0)
    from schedulefree import AdamWScheduleFree  # type: ignore[import-not-found]

    return AdamWScheduleFree(parameters, lr=lr, warmup_steps=num_steps // 10)


def train(job: tuple[str, str, str, str, float, int, int | None]) -> dict[str, Any]:
    task_name, data, device, method, lr, seed, steps = job
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    task = load_task(task_name, data=data).to(device)
    num_steps = steps or task.total_steps
    model = task.build(seed).to(device)
    optimizer = make_optimizer(method, model, lr, num_steps)
    table = schedule_table("one-cycle", num_steps)
    is_schedule_free = method == "schedule-free"
    if is_schedule_free:
        optimizer.train()
    for step in range(num_steps):
        if not is_schedule_free:
            for group in optimizer.param_groups:
                group["lr"] = table[step]
        loss = task.loss(model, task.batch(step, seed=seed))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if is_schedule_free:
        optimizer.eval()
    return {"method": method, "lr": lr, "seed": seed, "validation": task.evaluate(model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["stdlib-gpt", "shakespeare-gpt", "feed"])
    parser.add_argument("--data", default="data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    methods = [("prodigy", 1.0), ("d-adaptation", 1.0), *[("schedule-free", lr) for lr in SCHEDULE_FREE_LRS]]
    jobs = [(args.task, args.data, args.device, m, lr, s, args.steps) for m, lr in methods for s in args.seeds]
    started = time.perf_counter()
    with mp.get_context("spawn").Pool(min(args.workers, len(jobs))) as pool:
        results = pool.map(train, jobs, chunksize=1)
    print(f"{args.task}, {len(jobs)} runs, {time.perf_counter() - started:.0f} s")
    print("| method | " + " | ".join(f"seed {s}" for s in args.seeds) + " |\n|---" + "|---" * len(args.seeds) + "|")
    for method, lr in methods:
        row = [r["validation"]["loss"] for r in results if (r["method"], r["lr"]) == (method, lr)]
        name = f"{method}, lr {lr:g}" if method == "schedule-free" else method
        print(f"| {name} | " + " | ".join(f"{loss:.3f}" for loss in row) + " |")
    if args.json:
        args.json.write_text(json.dumps({"argv": sys.argv[1:], "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
