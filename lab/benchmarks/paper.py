"""The paper, claim by claim: one subcommand each, on the lab's tasks and its stacked engine.

    python lab/benchmarks/paper.py nine shakespeare-gpt --seeds 0 1 2    # stable at 9 times the learning rate?
    python lab/benchmarks/paper.py warm shakespeare-gpt                  # does a warm noisy start help?
    python lab/benchmarks/paper.py mean shakespeare-gpt                  # is the mean more than the run with rho = 1?
    python lab/benchmarks/paper.py flat shakespeare-gpt                  # are the minima flatter?
    python lab/benchmarks/paper.py groups feed                           # in which order do groups decay?
    python lab/benchmarks/paper.py residual shakespeare-gpt              # Eq. 8 as printed
    python lab/benchmarks/paper.py permutations two-groups               # fixed, permuted, balanced
    python lab/benchmarks/paper.py means shakespeare-gpt --intervals 10  # other means, with local gradients
    python lab/benchmarks/paper.py distance shakespeare-gpt              # from learning rates far from the best
    python lab/benchmarks/paper.py tuning shakespeare-gpt                # sigma, lambda and beta varied
    python lab/benchmarks/paper.py barrier shakespeare-gpt               # are replicas in different basins?
    python lab/benchmarks/paper.py bias shakespeare-gpt                  # losses of own batches as a hypergradient
    python lab/benchmarks/paper.py search wikitext --full --device cuda  # against a grid at equal compute

Small versions of the tasks, minutes on two cores; ``--full --device cuda`` for the lab's own sizes. Every run is listed
and written to lab/benchmarks/results/paper/ with commit, settings, seeds, data hashes and hardware. The paper's
controller is run with both velocities of Eq. 7. Intervals are of 95%, by Student's t over seeds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet_lab.commands.ablate import find_divergence
from hdet_lab.recipes import PEAK_SHARE, starts
from hdet_lab.runs import provenance
from hdet_lab.stacked.buffers import mean_buffers
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks.base import Task
from paper_loop import ASSIGNMENTS, Outcome, Setting, printed_gamma, train
from paper_sharpness import sharpness
from paper_tasks import LRS, STEPS, Later, make_task, steps_of

SPREAD = 1 / 9
TEMPERATURES = (0.1, 0.002)
"""That of the paper, and the default of its code."""
VELOCITIES: tuple[Literal["relative", "absolute"], ...] = ("relative", "absolute")
Row = dict[str, Any]
# Student's t of 95% for 1 to 9 degrees of freedom.
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


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

    def train(self, settings: Sequence[Setting], *, task: Any = None, **options: Any) -> list[Outcome]:
        """All side by side, or as many at a time as ``--stack`` says; losses are printed as they come."""
        options = {"num_replicas": self.args.replicas, "interval": self.interval, **self.options, **options}
        size, found = self.args.stack or len(settings), []
        for first in range(0, len(settings), size):
            found += train(self.task if task is None else task, settings[first : first + size], **options)
            for outcome in found[first:] if size < len(settings) else ():
                s = outcome.setting
                print(
                    f"{s.label} | T={options['interval']} seed {s.seed} lr {s.lr:g} | {outcome.validation}", flush=True
                )
            gc.collect()  # the graph's memory, before the next
            if self.args.device.startswith("cuda"):
                torch.cuda.empty_cache()
        return found

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


def hdet(label: str, lr: float, seed: int, **more: Any) -> list[Setting]:
    """The paper's method, at both temperatures and with both velocities."""
    return [
        Setting(f"{label} {t} {v}", lr, seed, temperature=t, velocity=v, **more)
        for t in TEMPERATURES
        for v in VELOCITIES
    ]


def _outcome_row(outcome: Outcome, **more: Any) -> Row:
    s = outcome.setting
    row = {"label": s.label, "seed": s.seed, "lr": s.lr, "loss": outcome.validation["loss"], **more}
    return row | ({"error": outcome.error} if outcome.error else {})


def against(rows: Sequence[Row], reference: str) -> None:
    """Give each row the change of its loss against that of the same seed in the row labelled ``reference``."""
    losses = {row["seed"]: row["loss"] for row in rows if row["label"] == reference}
    for row in rows:
        if row["label"] != "grid":
            row["change"] = _value(row["loss"]) / losses[row["seed"]] - 1


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its interval of 95%."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def nine(bench: Bench) -> list[Row]:
    """Nine times what is fine: the paper's configurations, cold and from a trained checkpoint."""
    low, rows = bench.best_lr()
    high = bench.args.factor * low
    eq_8: dict[str, Any] = {"decay": bench.args.decay}
    settings: list[Setting] = []
    for seed in bench.seeds:
        settings += [
            Setting("Baseline-High", high, seed, spread=0.0),
            Setting("Baseline-Low", low, seed, spread=0.0),
            Setting("Baseline-High, its decay", high, seed, spread=0.0, **eq_8),
            Setting("spread", high, seed),
            Setting("Baseline-Low, warm", low, seed, spread=0.0, warm_noise=0.0),
            Setting("Warm-Init", high, seed, spread=0.0, warm_noise=0.01, mean="once"),  # plain: never averaged
            Setting("spread, warm", high, seed, warm_noise=0.01),
            *hdet("HDET, cold", high, seed, **eq_8),
            *hdet("HDET, warm", high, seed, warm_noise=0.01, **eq_8),
        ]
    task = Later(bench.task, bench.num_steps)
    checkpoints = bench.checkpoints(low)
    acts_from = 0.02 if bench.args.decay == "one-cycle" else PEAK_SHARE  # S_warm: Eq. 8 begins at the peak
    intervals = bench.args.intervals if bench.args.decay != "one-cycle" else [bench.interval]
    for each in intervals:
        options = {"interval": each, "checkpoints": checkpoints, "acts_from": acts_from}
        chosen = [s for s in settings if s.spread or each == intervals[0]]  # T is nothing to the others
        found = [_outcome_row(outcome, interval=each) for outcome in bench.train(chosen, task=task, **options)]
        known = [row for row in rows if row["label"] == "Baseline-High"]
        against([*found, *known], "Baseline-High")
        rows += found
    return rows


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
            for v in VELOCITIES:
                paper = {"temperature": TEMPERATURES[0], "velocity": v}
                runs.append(bench.run(f"HDET {v} x{factor:g}", lr, seed, "paper", controller=paper))
    results = sweep(bench.task, runs, on_end=look, **bench.options)
    return rows + [_row(result, **found[id(result.run)]) for result in results]


def groups(bench: Bench) -> list[Row]:
    """Scale that the paper's controller gives each param group by the end, at the best learning rate and 9 times it."""
    low, rows = bench.best_lr()
    settings = [
        setting
        for factor in (1.0, bench.args.factor)
        for seed in bench.seeds
        for setting in hdet(f"x{factor:g}", factor * low, seed)
    ]
    names = list(bench.task.groups(bench.task.build(0)))
    for outcome in bench.train(settings):
        scales = dict(zip(names, outcome.scales[-1], strict=True))
        order = sorted(names, key=lambda name: scales[name])
        rows.append(_outcome_row(outcome, scales=scales, order=" < ".join(order)))
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
        Setting(f"{label} {v}", low, seed, decay=decay, factors=factors, temperature=TEMPERATURES[0], velocity=v)
        for label, decay, factors in kinds
        for v in VELOCITIES
        for seed in bench.seeds
    ]
    for outcome in bench.train(settings):
        s = outcome.setting
        left = 1 - printed_gamma(s.factors[0], s.factors[1], 1) if s.decay == "printed" else 1 / (25 * 1e4)
        rows.append(_outcome_row(outcome, left=left))
    return rows


def permutations(bench: Bench) -> list[Row]:
    """Two groups, one given a learning rate 4 times too high, the other 4 times too low: do their scales part?"""
    low, rows = bench.best_lr()
    num_groups = len(bench.task.groups(bench.task.build(0)))
    offsets = tuple(4.0 if i % 2 else 0.25 for i in range(num_groups))
    settings = [
        setting
        for how in ASSIGNMENTS
        for seed in bench.seeds
        for setting in hdet(how, low, seed, assignment=how, offsets=offsets)
    ]
    for outcome in bench.train(settings):
        rows.append(
            _outcome_row(outcome, moved=[end / start for end, start in zip(outcome.scales[-1], offsets, strict=True)])
        )
    return rows


def means(bench: Bench) -> list[Row]:
    """With local gradients, at equal steps: what becomes of the replicas at a converge."""
    low, rows = bench.best_lr()

    def add(label: str, settings: Sequence[Setting], **options: Any) -> None:
        found = [
            _outcome_row(outcome, mb_sent=outcome.bytes_sent / 1e6) | {"label": f"{label}{outcome.setting.label}"}
            for outcome in bench.train(settings, shared=False, **options)
        ]
        if label.startswith("T="):
            against(found, f"{label}{bench.args.rules[0]}")
        rows.extend(found)

    def of(rule: str) -> list[Setting]:
        spread = SPREAD if rule.endswith(" spread") else 0.0
        return [Setting(rule, low, seed, spread=spread, mean=rule.split()[0]) for seed in bench.seeds]

    for interval in bench.args.intervals:
        add(f"T={interval} ", [setting for rule in bench.args.rules for setting in of(rule)], interval=interval)
    for share in bench.args.swap:  # shared gradients, then apart, then one mean
        add(f"apart from {share:g}: ", of("once"), apart_from=share)
    shared = sweep(bench.task, [bench.run("shared gradients", low, seed) for seed in bench.seeds], **bench.options)
    return rows + [_row(result) for result in shared]


def distance(bench: Bench) -> list[Row]:
    """From learning rates far from the best: what the controller gains on the schedule alone, and where it goes."""
    low, rows = bench.best_lr()
    best = dict.fromkeys(bench.seeds, math.inf)
    for factor in (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0, 9.0, 27.0):
        lr, name = factor * low, f"x{factor:.3g}"
        settings: list[Setting] = []
        for seed in bench.seeds:
            settings += [Setting(f"{name} plain", lr, seed, spread=0.0), *hdet(f"{name} HDET", lr, seed)]
        outcomes = bench.train(settings)
        found = [_outcome_row(o, scale=math.exp(statistics.fmean(map(_log, o.scales[-2])))) for o in outcomes]
        against(found, f"{name} plain")
        for row in found:
            best[row["seed"]] = min(best[row["seed"]], _value(row["loss"]))
        rows += found
    for row in rows:
        if row["label"] != "grid":
            row["above_best"] = _value(row["loss"]) / best[row["seed"]] - 1
    return rows


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def tuning(bench: Bench) -> list[Row]:
    """Sigma, lambda and beta, one at a time around the paper's .1, .5, .9; at the best learning rate and 9 times it."""
    low, rows = bench.best_lr()
    varied: list[tuple[str, dict[str, float]]] = [
        *((f"sigma {t}", {"temperature": t}) for t in (0.0002, 0.002, 0.02, 0.1, 1.0)),
        *((f"lambda {r}", {"rate": r}) for r in (0.1, 2.0, 8.0)),
        *((f"beta {m}", {"momentum": m}) for m in (0.0, 0.5, 0.99)),
        # With a temperature at which the controller acts at all.
        *((f"sigma 0.002, lambda {r}", {"temperature": 0.002, "rate": r}) for r in (0.1, 2.0, 8.0)),
        *((f"sigma 0.002, beta {m}", {"temperature": 0.002, "momentum": m}) for m in (0.0, 0.5, 0.99)),
    ]
    for factor in (1.0, bench.args.factor):
        settings = [Setting(f"x{factor:g} plain", factor * low, seed, spread=0.0) for seed in bench.seeds]
        for v in VELOCITIES:
            for name, given in varied:
                arguments: dict[str, Any] = {"temperature": 0.1, "velocity": v, **given}
                settings += [Setting(f"x{factor:g} {name} {v}", factor * low, s, **arguments) for s in bench.seeds]
        found = [_outcome_row(outcome) for outcome in bench.train(settings)]
        against(found, f"x{factor:g} plain")
        rows += found
    return rows


def barrier(bench: Bench) -> list[Row]:
    """The loss on the line between the two outermost replicas before a converge, above that at its ends.

    Halfway through the run; against the line between two runs of different seeds: a deep ensemble.
    """
    low, rows = bench.best_lr()

    def compare(label: str, settings: Sequence[Setting], interval: int, *, shared: bool = True) -> None:
        at = max(interval, bench.num_steps // 2 // interval * interval)

        def look(step: int, engine: StackedModels, *_: Any) -> None:
            for i, setting in enumerate(settings) if step == at else ():
                other = engine.weights[i, -1] if setting.spread else engine.weights[(i + 1) % len(settings), 0]
                found = _line(bench.task, engine, i, engine.weights[i, 0], other)
                rows.append({"label": label.format(setting.spread), "seed": setting.seed, **found})

        bench.train(settings, interval=interval, watch=look, shared=shared)

    for each in bench.args.intervals:
        spread = [Setting("", low, seed, spread=a, assignment="fixed") for a in (SPREAD, 0.5) for seed in bench.seeds]
        for name in ("shared", "local"):
            compare(f"{name}, T={each}, spread {{:.2f}}", spread, each, shared=name == "shared")
    compare("two seeds", [Setting("", low, seed, spread=0.0) for seed in bench.seeds], bench.interval)
    return rows


def _line(task: Task, engine: StackedModels, run: int, one: Tensor, other: Tensor) -> Row:
    buffers = mean_buffers(engine.buffers)
    shares = [k / 10 for k in range(11)]
    losses = [
        task.evaluate(engine._filled_model(torch.lerp(one, other, share), buffers, run))["loss"] for share in shares
    ]
    chords = [losses[0] + share * (losses[-1] - losses[0]) for share in shares]
    above = max(loss - chord for loss, chord in zip(losses, chords, strict=True))
    return {"loss": losses[0], "barrier": above / losses[0], "distance": float((one - other).norm() / one.norm())}


def bias(bench: Bench) -> list[Row]:
    """Slopes of the loss over rho at the end of each round: of a fresh batch each, and of one large batch for all."""
    low, rows = bench.best_lr()
    task, n = bench.task, bench.args.replicas
    probe = torch.cat([task.rows(10**6 + k) for k in range(math.ceil(1024 / task.batch_rows))])[:1024]
    for batch in bench.args.rows_each:
        seen: dict[int, list[tuple[float, ...]]] = {seed: [] for seed in bench.seeds}

        def look(
            step: int, engine: StackedModels, losses: Any, rho: Sequence[Any],
            batch: int = batch, seen: dict[int, list[tuple[float, ...]]] = seen,
        ) -> None:  # fmt: skip
            fresh = [
                torch.cat(
                    [
                        task.rows(2 * 10**6 + 1000 * step + k, seed=seed)
                        for k in range(math.ceil(n * batch / task.batch_rows))
                    ]
                )
                for seed in bench.seeds
            ]
            own = _losses(task, engine, torch.stack([rows[: n * batch] for rows in fresh]).view(-1, n, batch))
            same = _losses(task, engine, probe.view(1, 1, -1).expand(len(bench.seeds), n, len(probe)))
            kept = engine.weights.clone()
            engine.weights.copy_(engine.mean().unsqueeze(1).expand_as(kept))
            at_mean = _losses(task, engine, probe.view(1, 1, -1).expand(len(bench.seeds), n, len(probe)))[:, 0]
            engine.weights.copy_(kept)
            for i, seed in enumerate(bench.seeds):
                places = torch.from_numpy(rho[i][0]) - 1  # of the first group
                slopes = [float(places @ each[i] / places.square().sum()) for each in (own, same)]
                deltas = [float(places @ torch.softmax(-each[i] / t, 0)) for each in (own, same) for t in TEMPERATURES]
                seen[seed].append((*slopes, *deltas, float(same[i].mean() - at_mean[i]), float(own[i].std())))

        settings = [Setting("", low, seed, temperature=0.1) for seed in bench.seeds]
        bench.train(settings, watch=look)
        for seed, found in seen.items():
            own, same, d1, d2, p1, p2, gap, spread = map(torch.tensor, zip(*found, strict=True))
            difference = own - same
            rows.append(
                {"label": f"{batch} rows", "seed": seed, "slope": float(same.mean()),
                 "slope_bias": float(difference.mean()),
                 "slope_noise": float(difference.std()), "signal": float(same.std()),
                 "same_sign": float((own.sign() == same.sign()).float().mean()),
                 "delta_0.1": float(d1.mean()), "delta_0.1_probe": float(p1.mean()),
                 "delta_0.002": float(d2.mean()), "delta_0.002_probe": float(p2.mean()),
                 "delta_0.002_sd": float(d2.std()), "delta_0.002_probe_sd": float(p2.std()),
                 "mean_of_losses_above_loss_of_mean": float(gap.mean()), "batch_sd": float(spread.mean())}
            )  # fmt: skip
    return rows


@torch.no_grad()
def _losses(task: Task, engine: StackedModels, rows: Tensor) -> Tensor:
    """(R, N), of each replica on its rows of (R, N, rows)."""
    batch = tuple(t.flatten(0, 1) for t in task.gather(rows))
    buffers = {name: buffer.flatten(0, 1).clone() for name, buffer in engine.buffers.items()}
    found = engine._losses(engine.weights.flatten(0, 1), buffers, batch)
    return found.view(engine.weights.shape[:2]).double().cpu()


def search(bench: Bench) -> list[Row]:
    """HDET on N replicas, each with a full batch, against a grid of N learning rates, at equal compute and steps."""
    n, args = bench.args.replicas, bench.args
    alone = make_task(args.task, args.data, full=args.full, batch_rows=bench.task.batch_rows // n)
    grid = starts(args.optimizer)
    rows: list[Row] = []

    def add(settings: Sequence[Setting], **options: Any) -> None:
        began = time.perf_counter()
        outcomes = bench.train(settings, **options)
        seconds = (time.perf_counter() - began) / len(settings)
        for outcome in outcomes:
            more = {k: v for k, v in outcome.validation.items() if k != "loss"}
            rows.append(_outcome_row(outcome, seconds=seconds, **more))

    add([Setting("grid", lr, seed, spread=0.0) for lr in grid for seed in bench.seeds], task=alone, num_replicas=1)
    best = {seed: min(_value(r["loss"]) for r in rows if r["seed"] == seed) for seed in bench.seeds}
    for lr in args.starts:
        chosen: list[Setting] = []
        for seed in bench.seeds:
            chosen += [Setting(f"plain, N batches, {lr:g}", lr, seed, spread=0.0), *hdet(f"HDET, {lr:g}", lr, seed)]
        add(chosen)
    auto = [Run(lr=1e-3, seed=seed, method="gradient", interval=bench.interval, label="AutoLR, N batches") for seed in
            bench.seeds]  # fmt: skip
    results = sweep(bench.task, auto, schedule="none", **bench.options)
    rows += [{"label": r.run.label, "seed": r.run.seed, "lr": r.run.lr, "loss": r.validation["loss"]} for r in results]
    for row in rows:
        row["change"] = _value(row["loss"]) / best[row["seed"]] - 1
    return rows


CLAIMS: dict[str, Callable[[Bench], list[Row]]] = {
    each.__name__: each
    for each in (
        *(nine, warm, mean, flat, groups, residual, permutations, means),
        *(distance, tuning, barrier, bias, search),
    )
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
        for steps in dict.fromkeys(row.get("steps", row.get("interval")) for row in rows if row["label"] == label):
            mine = [row for row in rows if row["label"] == label and row.get("steps", row.get("interval")) == steps]
            if label == "grid":
                lrs = dict.fromkeys(row["lr"] for row in mine)
                print("grid:", {lr: [round(_value(r["loss"]), 4) for r in mine if r["lr"] == lr] for lr in lrs})
                continue
            names = [name for name in mine[0] if name not in ("label", "seed", "steps")]
            cells = [f"{name} " + ", ".join(_cell(row.get(name)) for row in mine) for name in names]
            for name in ("loss", "change"):
                if all(isinstance(row.get(name), float) and math.isfinite(row[name]) for row in mine):
                    middle, half = interval([row[name] for row in mine])
                    cells.append(f"mean {name} {middle:.4g} +- {half:.2g}")
            print(label, "" if steps is None else f"({steps} steps)", "|", " | ".join(cells))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(compact(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("task", choices=[*STEPS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizer", choices=sorted(LRS), default="adam")
    parser.add_argument("--lr", type=float, help="that is fine; default the best of plain training")
    parser.add_argument("--factor", type=float, default=9.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="of a global batch; default the task's")
    parser.add_argument("--stack", type=int, help="runs at a time; default all")
    parser.add_argument("--interval", type=int, help="T; default a sixtieth of the run")
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 50, 200], help="of means and barrier")
    parser.add_argument(
        "--decay", choices=["one-cycle", "floor", "printed"], default="one-cycle", help="Eq. 8, of nine"
    )
    parser.add_argument("--rows-each", type=int, nargs="+", default=[4, 16, 64], help="of bias: rows of a replica")
    parser.add_argument("--starts", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2], help="of search")
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
    task = make_task(args.task, args.data, full=args.full, **({"batch_rows": args.rows} if args.rows else {}))
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
