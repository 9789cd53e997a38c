"""The paper, claim by claim: one subcommand each, on the lab's tasks and its stacked engine.

    python lab/benchmarks/paper.py nine shakespeare-gpt --seeds 0 1 2    # stable at 9 times the learning rate?
    python lab/benchmarks/paper.py warm shakespeare-gpt                  # does a warm noisy start help?
    python lab/benchmarks/paper.py mean shakespeare-gpt                  # is the mean more than the run with rho = 1?
    python lab/benchmarks/paper.py flat shakespeare-gpt                  # are the minima flatter?
    python lab/benchmarks/paper.py groups feed                           # in which order do groups decay?
    python lab/benchmarks/paper.py residual shakespeare-gpt              # Eq. 8 as printed
    python lab/benchmarks/paper.py permutations two-groups               # fixed, permuted, balanced
    python lab/benchmarks/paper.py means shakespeare-gpt --intervals 10  # other means, with local gradients

Small versions of the tasks, minutes on two cores; ``--full --device cuda`` for the lab's own sizes. Every run is listed
and written to lab/benchmarks/results/paper/ with commit, settings, seeds, data hashes and hardware.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet_lab.commands.ablate import find_divergence
from hdet_lab.runs import provenance
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks.base import Task
from paper_loop import ASSIGNMENTS, Setting, printed_gamma, train
from paper_sharpness import sharpness
from paper_tasks import LRS, Later, make_task, steps_of

SPREAD = 1 / 9
TEMPERATURES = (0.1, 0.002)
"""That of the paper, and the default of its code."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What all claims share: the task and how to train on it."""

    args: argparse.Namespace
    task: Task
    num_steps: int

    @property
    def seeds(self) -> list[int]:
        return list(self.args.seeds)

    @property
    def interval(self) -> int:
        return int(self.args.interval or max(4, self.num_steps // 60))  # with T = 1 losses come before any difference

    @property
    def options(self) -> dict[str, Any]:
        return {"optimizer": self.args.optimizer, "num_steps": self.num_steps, "device": self.args.device}

    def run(self, label: str, lr: float, seed: int, method: Any = "fixed", **settings: Any) -> Run:
        settings = {"num_replicas": self.args.replicas, "interval": self.interval, "spread": SPREAD, **settings}
        return Run(lr=lr, seed=seed, method=method, label=label, **settings)

    def train(self, settings: Sequence[Setting], **options: Any) -> list[Any]:
        options = {"num_replicas": self.args.replicas, "interval": self.interval, **self.options, **options}
        return train(self.task, settings, **options)

    def best_lr(self) -> tuple[float, list[Row]]:
        """The learning rate that is fine: the best of plain training, by the mean over seeds."""
        if self.args.lr is not None:
            return self.args.lr, []
        lrs = LRS[self.args.optimizer]
        runs = [Run(lr=lr, seed=seed, label="grid") for lr in lrs for seed in self.seeds]
        rows = [_row(result) for result in sweep(self.task, runs, **self.options)]
        by_lr = {lr: statistics.fmean(_value(r["loss"]) for r in rows if r["lr"] == lr) for lr in lrs}
        return min(lrs, key=lambda lr: by_lr[lr]), rows

    def checkpoints(self, lr: float) -> dict[int, dict[str, Tensor]]:
        """Really trained: a whole one-cycle run of each seed at a learning rate that is fine."""
        found: dict[int, dict[str, Tensor]] = {}

        def keep(run: Run, model: nn.Module) -> None:
            found[run.seed] = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

        sweep(self.task, [Run(lr=lr, seed=seed) for seed in self.seeds], on_end=keep, **self.options)
        return found


def _value(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _row(result: Any, **more: Any) -> Row:
    divergence = find_divergence(result.train_loss)
    return {
        "label": result.run.label,
        "lr": result.run.lr,
        "seed": result.run.seed,
        "loss": result.validation["loss"],
        "diverged_at": None if divergence is None else result.steps[divergence.round_index - 1],
        "lr_at_half": result.base_lr[len(result.base_lr) // 2],
        **more,
    }


def nine(bench: Bench) -> list[Row]:
    """Nine times what is fine: the paper's configurations, cold and from a trained checkpoint."""
    low, rows = bench.best_lr()
    high = bench.args.factor * low
    checkpoints = bench.checkpoints(low)
    runs = []
    for seed in bench.seeds:
        runs += [
            bench.run("Baseline-Low", low, seed),
            bench.run("Baseline-High", high, seed),
            bench.run("spread", high, seed, "spread"),
            bench.run("Baseline-Low, warm", low, seed, warm_noise=0.0),
            bench.run("Warm-Init", high, seed, warm_noise=0.01),
            bench.run("spread, warm", high, seed, "spread", warm_noise=0.01),
            bench.run("AutoLR", high, seed, "gradient"),
        ]
        for t in TEMPERATURES:
            paper = {"controller": {"temperature": t}}
            runs.append(bench.run(f"HDET {t}", high, seed, "paper", **paper))
            runs.append(bench.run(f"HDET {t}, warm", high, seed, "paper", warm_noise=0.01, **paper))
    task = Later(bench.task, bench.num_steps)
    return rows + [_row(result) for result in sweep(task, runs, checkpoints=checkpoints, **bench.options)]


def warm(bench: Bench) -> list[Row]:
    """Two stages: from a trained checkpoint, with and without noise, at the same learning rate and at 9 times it."""
    low, rows = bench.best_lr()
    checkpoints = bench.checkpoints(low)
    runs = []
    for seed in bench.seeds:
        for factor in (1.0, bench.args.factor):
            lr = factor * low
            runs.append(bench.run(f"cold, x{factor:g}", lr, seed))
            runs += [bench.run(f"plain, nu {nu:g}, x{factor:g}", lr, seed, warm_noise=nu) for nu in (0.0, 0.01, 0.1)]
            for nu in (0.0, 0.01):
                runs.append(bench.run(f"spread, nu {nu:g}, x{factor:g}", lr, seed, "spread", warm_noise=nu))
    task = Later(bench.task, bench.num_steps)
    return rows + [_row(result) for result in sweep(task, runs, checkpoints=checkpoints, **bench.options)]


def mean(bench: Bench) -> list[Row]:
    """How far the mean of a spread is from the run with rho = 1, after one round and after the run."""
    low, rows = bench.best_lr()
    for num_steps, dtype in ((bench.interval, torch.float64), (bench.num_steps, torch.float32)):
        spreads = (0.0, SPREAD / 2, SPREAD, 2 * SPREAD, 0.5)
        settings = [Setting(f"spread {s:.3f}", low, seed, spread=s) for s in spreads for seed in bench.seeds]
        found = bench.train(settings, num_steps=num_steps, dtype=dtype)
        plain = {o.setting.seed: o for o in found if o.setting.spread == 0}
        for outcome in found:
            same = plain[outcome.setting.seed]
            distance = (outcome.weights - same.weights).norm() / same.weights.norm()
            change = outcome.validation["loss"] / same.validation["loss"] - 1
            rows.append(
                {"label": outcome.setting.label, "seed": outcome.setting.seed, "steps": num_steps,
                 "loss": outcome.validation["loss"], "distance": distance.item(), "change": change}
            )  # fmt: skip
    return rows


def flat(bench: Bench) -> list[Row]:
    """Sharpness of the mean at the end of runs at the best learning rate and at three times it."""
    low, rows = bench.best_lr()
    found: dict[int, dict[str, float]] = {}
    sample = torch.cat([bench.task.rows(step, seed=99) for step in range(math.ceil(128 / bench.task.batch_rows))])

    def look(run: Run, model: nn.Module) -> None:
        found[id(run)] = sharpness(bench.task, model, sample)

    runs = []
    for seed in bench.seeds:
        for factor in (1.0, 3.0):
            lr = factor * low
            runs += [
                bench.run(f"plain x{factor:g}", lr, seed),
                bench.run(f"spread 1/9 x{factor:g}", lr, seed, "spread"),
                bench.run(f"local mean x{factor:g}", lr, seed, "local"),
            ]
            runs.append(bench.run(f"HDET x{factor:g}", lr, seed, "paper", controller={"temperature": TEMPERATURES[0]}))
    results = sweep(bench.task, runs, on_end=look, **bench.options)
    return rows + [_row(result, **found[id(result.run)]) for result in results]


def groups(bench: Bench) -> list[Row]:
    """Scale that the paper's controller gives each param group by the end, at the best learning rate and 9 times it."""
    low, rows = bench.best_lr()
    settings = [
        Setting(f"sigma {t} x{factor:g}", factor * low, seed, temperature=t)
        for t in TEMPERATURES
        for factor in (1.0, bench.args.factor)
        for seed in bench.seeds
    ]
    names = list(bench.task.groups(bench.task.build(0)))
    for outcome in bench.train(settings):
        scales = dict(zip(names, outcome.scales[-1], strict=True))
        order = sorted(names, key=lambda name: scales[name])
        s = outcome.setting
        rows.append(
            {"label": s.label, "seed": s.seed, "lr": s.lr, "loss": outcome.validation["loss"],
             "scales": scales, "order": " < ".join(order)}
        )  # fmt: skip
    return rows


def residual(bench: Bench) -> list[Row]:
    """Eq. 8: the learning rate that is left, and what it costs."""
    low, rows = bench.best_lr()
    kinds: list[tuple[str, Any, tuple[float, float]]] = [
        ("one-cycle", "one-cycle", (0.0, 0.0)),
        ("floor", "floor", (0.0, 0.0)),
        ("printed 9, 0.5", "printed", (9.0, 0.5)),
        ("printed 25, 1e4", "printed", (25.0, 1e4)),
    ]
    settings = [
        Setting(label, low, seed, decay=decay, factors=factors, temperature=TEMPERATURES[0])
        for label, decay, factors in kinds
        for seed in bench.seeds
    ]
    for outcome in bench.train(settings):
        s = outcome.setting
        left = 1 - printed_gamma(s.factors[0], s.factors[1], 1) if s.decay == "printed" else 1 / (25 * 1e4)
        rows.append(
            {"label": s.label, "seed": s.seed, "lr": s.lr, "loss": outcome.validation["loss"], "left": left}
        )  # fmt: skip
    return rows


def permutations(bench: Bench) -> list[Row]:
    """Two groups, one given a learning rate 4 times too high, the other 4 times too low: do their scales part?"""
    low, rows = bench.best_lr()
    num_groups = len(bench.task.groups(bench.task.build(0)))
    offsets = tuple(4.0 if i % 2 else 0.25 for i in range(num_groups))
    settings = [
        Setting(f"{how}, sigma {t}", low, seed, temperature=t, assignment=how, offsets=offsets)
        for how in ASSIGNMENTS
        for t in TEMPERATURES
        for seed in bench.seeds
    ]
    for outcome in bench.train(settings):
        s = outcome.setting
        moved = [end / start for end, start in zip(outcome.scales[-1], offsets, strict=True)]
        rows.append(
            {"label": s.label, "seed": s.seed, "lr": s.lr, "loss": outcome.validation["loss"], "moved": moved}
        )  # fmt: skip
    return rows


def means(bench: Bench) -> list[Row]:
    """With local gradients, at equal steps: what becomes of the replicas at a converge."""
    low, rows = bench.best_lr()

    def add(label: str, settings: Sequence[Setting], **options: Any) -> None:
        for outcome in bench.train(settings, shared=False, **options):
            s = outcome.setting
            rows.append(
                {"label": f"{label}{s.label}", "seed": s.seed, "lr": s.lr, "loss": outcome.validation["loss"],
                 "mb_sent": outcome.bytes_sent / 1e6}
            )  # fmt: skip

    def of(rule: str) -> list[Setting]:
        spread = SPREAD if rule.endswith(" spread") else 0.0
        return [Setting(rule, low, seed, spread=spread, mean=rule.split()[0]) for seed in bench.seeds]

    for interval in bench.args.intervals:
        add(f"T={interval} ", [setting for rule in bench.args.rules for setting in of(rule)], interval=interval)
    for share in bench.args.swap:  # shared gradients, then apart, then one mean
        add(f"apart from {share:g}: ", of("once"), apart_from=share)
    shared = sweep(bench.task, [bench.run("shared gradients", low, seed) for seed in bench.seeds], **bench.options)
    return rows + [_row(result) for result in shared]


CLAIMS: dict[str, Callable[[Bench], list[Row]]] = {
    each.__name__: each for each in (nine, warm, mean, flat, groups, residual, permutations, means)
}
RULES = ("mean", "mean spread", "elastic", "grawa", "nesterov:0.7,0.9", "nesterov:0.7,0.9 spread")


def compact(value: Any) -> Any:
    """Five digits are what a figure needs."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: compact(each) for name, each in value.items()}
    return [compact(each) for each in value] if isinstance(value, list) else value


def show(rows: Sequence[Row]) -> None:
    for label in dict.fromkeys(row["label"] for row in rows):
        for steps in dict.fromkeys(row.get("steps") for row in rows if row["label"] == label):
            mine = [row for row in rows if row["label"] == label and row.get("steps") == steps]
            if label == "grid":
                lrs = dict.fromkeys(row["lr"] for row in mine)
                print("grid:", {lr: [round(_value(r["loss"]), 4) for r in mine if r["lr"] == lr] for lr in lrs})
                continue
            names = [name for name in mine[0] if name not in ("label", "seed", "steps")]
            cells = [f"{name} " + ", ".join(_cell(row[name]) for row in mine) for name in names]
            print(label, "" if steps is None else f"({steps} steps)", "|", " | ".join(cells))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(compact(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("task", choices=["shakespeare-gpt", "feed", "fashion", "quadratic", "two-groups"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizer", choices=sorted(LRS), default="adam")
    parser.add_argument("--lr", type=float, help="that is fine; default the best of plain training")
    parser.add_argument("--factor", type=float, default=9.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--interval", type=int, help="T; default a sixtieth of the run")
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 50, 200], help="of means")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help='of means; "mean spread": with a spread')
    parser.add_argument("--swap", type=float, nargs="*", default=[0.5, 0.75], help="of means: where SWAP trains apart")
    parser.add_argument("--suffix", default="", help="of the record's name")
    parser.add_argument("--full", action="store_true", help="the lab's own sizes")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "paper")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    task = make_task(args.task, args.data, full=args.full)
    facts = provenance.describe(task)
    bench = Bench(args, task, args.steps or steps_of(args.task, full=args.full))
    started = time.perf_counter()
    rows = CLAIMS[args.claim](bench)
    seconds = time.perf_counter() - started
    show(rows)
    words = [word for i, word in enumerate(sys.argv) if i and not {word, sys.argv[i - 1]} & {"--data", "--out"}]
    settings = {"steps": bench.num_steps, "interval": bench.interval, "replicas": args.replicas, "spread": SPREAD}
    command = " ".join(["python lab/benchmarks/paper.py", *words])
    record = {"claim": args.claim, "task": args.task, "command": command, **facts, "settings": settings,
              "seconds": seconds, "runs": rows}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{args.claim}-{args.task}-{args.optimizer}" + ("-full" if args.full else "") + args.suffix
    (args.out / f"{name}.json").write_text(json.dumps(compact(record), separators=(",", ":")) + "\n")
    print(f"{seconds:.0f} s, {name}.json")


if __name__ == "__main__":
    main()
