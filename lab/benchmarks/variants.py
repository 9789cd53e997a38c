"""What each rule of AutoLR is worth: every task of the benchmark with one rule taken out, beside AutoLR as it is.

    python lab/benchmarks/variants.py --device cuda --workers 15 --json rules.json
    python lab/benchmarks/variants.py --rules --decay 0.5 --pace 2.25         # other lengths of the decay, other paces

A rule is taken out of the source of the controller, where its text has to be found. Runs of a task train side by side,
on the benchmark's own seeds; the last lines compare each variant, task by task, with AutoLR as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import types
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hdet.schedule
from hdet.controllers import Controller
from hdet.controllers import level as rules
from hdet.policy.timing import default_interval
from hdet_lab.bench.records import load
from hdet_lab.bench.suite import BY_NAME, START
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256
from hdet_lab.runs.settings import open_task
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep

BENCH = Path(__file__).parent / "results" / "bench"
Edits = tuple[tuple[str, str], ...]
RULES: dict[str, Edits] = {
    "small updates": (("and evidence.update is not None and _fall(evidence) > LEARNED:", "and False:"),),
    "small cost, late": (("is_open = max(is_open, _share(done, LATE) * _share(trail.cost, CHEAP))", "pass"),),
    "certain slope": (("asked = evidence.shrinks *", "asked = 0.0 *"),),
    "bound of small models": (
        ("evidence.ease ** _share(trail.most, SURELY_CHEAP)", "1.0"),
        ("evidence.ease ** _share(trail.most, SUPPORTED)", "1.0"),
    ),
    "bound that grows": (("largest = first * (last / first) ** _share(done, WIDENING)", "largest = last"),),
    "plateau": (("(rising or trail.z >= LEANS)", "True"),),
    "late slope too high": (("late if trail.z > SURE else 0.0", "0.0"),),
    "sure cost": (("if trail.least > TOO_DEAR:", "if False:"),),
    "linear loss": (("if e < LINEAR:", "if False:"),),
    "slope supports": (("if supported and (z < -VERY_SURE or trail.progress >= EARNED[0]):", "if False:"),),
    "outliers of losses": (("    losses = _without_outliers(losses)\n", ""),),
    "outliers of slopes": (
        ("is_outlier = np.isfinite(error) & (usual > 0) & (variance > usual)", "is_outlier = ~seen"),
    ),
    "jump": ((" or trail.jump > SURE else", " else"),),
    "rises fade": (("min((1 - dear) * rise, MAX_RISE)", "min(rise, MAX_RISE)"),),
    "early decay": (("move += dear * _share(done, LATE) * evidence.decay", "pass"),),
    "too high": (("if too_high > TOO_HIGH:", "if False:"),),
}


def without(edits: Edits) -> Any:
    """The controller's class, made of its source with these edits."""
    source = Path(rules.__file__).read_text()
    for old, new in edits:
        if old not in source:
            raise ValueError(f"the rule must be found in {rules.__file__}, but there is no {old!r}")
        source = source.replace(old, new)
    module = types.ModuleType(rules.__name__)
    exec(compile(source, rules.__file__, "exec"), vars(module))
    return module.LevelController


@dataclass(frozen=True)
class Variant(Run):
    """A run of AutoLR whose ``label`` names the rule that is taken out; empty for none."""

    def make_controller(self) -> Controller:
        controller: Controller = without(RULES.get(self.label, ()))(**self.controller)
        return controller


def run(name: str, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Final validation losses by rule and seed."""
    hdet.schedule.DECAY_SHARE = args.decay
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    entry = BY_NAME[name]
    runs = [
        Variant(START, seed, "gradient", interval=default_interval(entry.steps), schedule="none", label=rule,
                controller={"pace": args.pace})
        for seed in args.seeds for rule in ("", *args.rules)
    ]  # fmt: skip
    task, found = open_task(entry.task_name, args.data), []
    for first in range(0, len(runs), entry.stacked):
        part = runs[first : first + entry.stacked]
        found += sweep(task, part, optimizer=entry.optimizer, num_steps=entry.steps, device=args.device)
    losses: dict[str, dict[int, float]] = {}
    for result in found:
        losses.setdefault(result.run.label, {})[result.run.seed] = result.validation["loss"]
    return losses


def compared(losses: dict[str, dict[str, dict[int, float]]]) -> dict[str, tuple[float, float]]:
    """By rule: mean over tasks of the log-percent that a run without it ends above AutoLR as it is, and its error."""
    found = {}
    for rule in next(iter(losses.values())):
        worse = [
            np.mean([100 * math.log(loss / by[""][seed]) for seed, loss in by[rule].items()]) for by in losses.values()
        ]
        found[rule] = (float(np.mean(worse)), float(np.std(worse)) / math.sqrt(len(worse)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    around_adam = [
        r.name for r in load(BENCH) if r.optimizer in ("adam", "torch-adamw") and not BY_NAME[r.name].overfits
    ]
    parser.add_argument("--tasks", nargs="+", default=around_adam, metavar="TASK")
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES), metavar="RULE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--decay", type=float, default=hdet.schedule.DECAY_SHARE, help="the final decay's share of a run"
    )
    parser.add_argument("--pace", type=float, default=rules.LevelController().pace)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--json", type=Path, help="write the losses here, after each task")
    args = parser.parse_args()
    record = {"git_commit": provenance.git_commit(), "code_sha256": code_sha256(), "device": args.device}
    record |= {"decay": args.decay, "pace": args.pace}
    losses: dict[str, dict[str, dict[int, float]]] = {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for name, future in [(name, pool.submit(run, name, args)) for name in args.tasks]:
            losses[name] = future.result()
            print(
                name, {rule: [f"{loss:.4g}" for loss in by.values()] for rule, by in losses[name].items()}, flush=True
            )
            if args.json:
                args.json.write_text(json.dumps({**record, "losses": losses}) + "\n")
    for rule, (mean, error) in compared(losses).items():
        print(f"without {rule or 'nothing'}: {mean:+.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
