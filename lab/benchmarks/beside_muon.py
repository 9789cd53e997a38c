"""AutoLR around ``torch.optim.Muon`` and AutoLR around AdamW for the rest of the model, on tasks of ``hdet bench``.

    python lab/benchmarks/beside_muon.py --data data --tasks hyphens lemmas --json beside-muon.json

What AdamW starts from: ``model``, the size of the whole model, as AutoLR does; ``own``, that of the parameters that are
left to it; or a fixed learning rate under WSD, ``wsd:3e-3``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hdet import AutoLR
from hdet.signals import update_size
from hdet_lab.bench.suite import BY_NAME
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256
from hdet_lab.stacked.optim import outer_matrices
from hdet_lab.tasks import load_task
from hdet_lab.tasks.base import Task

TASKS = ("hyphens", "colours", "sorting", "glosses", "lemmas", "phonemes", "clusters")
FROM_MODEL = vars(update_size)["trained_by_muon"]


def train(task: Task, steps: int, seed: int, rest: str) -> dict[str, Any]:
    """One run; the log has the learning rates."""
    model = task.build(seed)
    outer = set(outer_matrices(model))
    hidden = {name: p for name, p in model.named_parameters() if p.ndim == 2 and not {name, name.split(".")[0]} & outer}
    others = [p for name, p in model.named_parameters() if name not in hidden]
    muon: torch.optim.Optimizer = torch.optim.Muon(hidden.values())
    adamw = torch.optim.AdamW(others)
    vars(update_size)["trained_by_muon"] = (lambda *_: []) if rest == "own" else FROM_MODEL
    schedulers: list[Any] = [AutoLR(muon, total_steps=steps)]
    shape, _, lr = rest.partition(":")
    schedulers.append(make_schedule(shape, adamw, float(lr), steps) if lr else AutoLR(adamw, total_steps=steps))
    for step in range(steps):
        loss = task.loss(model, task.gather(task.rows(step, seed=seed)))
        model.zero_grad()
        torch.autograd.backward(loss)
        for optimizer in (muon, adamw):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*[loss] * isinstance(scheduler, AutoLR))
    sizes = {"hidden": sum(p.numel() for p in hidden.values()), "others": sum(p.numel() for p in others)}
    found = [str(scheduler.found()) for scheduler in schedulers if isinstance(scheduler, AutoLR)]
    return {"seed": seed, "rest": rest, "loss": task.evaluate(model)["loss"], "found": found, **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--rest", nargs="+", default=["own", "model"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path, help="write every run here, after each")
    args = parser.parse_args()
    record: dict[str, Any] = {"torch": torch.__version__, "command": " ".join(sys.argv), "runs": []}
    record |= {"git_commit": provenance.git_commit(), "code_sha256": code_sha256(), "hardware": provenance.hardware()}
    for name in args.tasks:
        entry = BY_NAME[name]
        task = load_task(entry.task_name, args.data)
        for seed, rest in itertools.product(args.seeds, args.rest):
            run = {"task": name, **train(task, entry.steps, seed, rest)}
            record["runs"].append(run)
            print(f"{name}, seed {seed}, {rest}: {run['loss']:.5g}. {' '.join(run['found'])}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
