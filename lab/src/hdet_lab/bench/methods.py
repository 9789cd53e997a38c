"""The methods of the benchmark, each as its authors would run it. A method gives the records of its runs.

- ``grid``: fixed learning rates by half-decades under one-cycle, cosine and WSD; it grows where the best is at an edge.
  Adam, here and below, has betas 0.9 and 0.95 where nothing else is said.
- ``autolr``: ``AutoLR(optimizer, total_steps=N)``.
- ``adam``: of the grid, the schedule and learning rate with the lowest mean over half A, five seeds.
- ``adamw``, ``nadamw``: weight decay 0.1, the latter with betas 0.9 and 0.999; one schedule and learning rate for all
  tasks, the best of the grid on the mean over half A, first seed (AdamW with five, of `lstm` one: +1.5%, WSD at 0.003
  +1.4%).
- ``prodigy`` (with its safeguard for warm-ups), ``d-adaptation``: betas 0.9 and 0.999; ``mechanic`` around Adam. All
  three follow a cosine with a warm-up of 5% and a peak of 1.
- ``dog``: constant, evaluated at its polynomial average; first distance 1e-6, with BatchNorm 1e-4.
- ``schedule-free``: betas 0.9 and 0.999, constant after a warm-up of 10%, at its default of 0.0025.
- ``finder``: a tenth of the run grows the learning rate from 1e-7 to 10; a tenth of where the smoothed loss was lowest
  is the peak of a one-cycle in the other nine tenths.
- ``halving``: half of the run's compute for eight learning rates, then four, then two, judged by validation loss; the
  best has a one-cycle over the rest.

On halves C to J ``grid``, ``autolr`` and ``adam`` have ``torch.optim.AdamW`` at its defaults (betas 0.9, 0.999; decay
0.01), where a name ends so SGD with momentum or Lion. The grid has twice and half its best too, which random search
never draws. Besides:

- ``greedy``, ``plateau``, ``adalrs`` read the training loss, around AdamW from its default of 0.001: GreedyLR as in
  transformers, the loss smoothed over 50 steps; ReduceLROnPlateau at its defaults, told 50 means a run; AdaLRS from
  its abstract and summaries, searching in the first half of a cosine. ``schedule-free-plus``: as its authors' code,
  10% warm-up.
- ``muon``: its author's 0.02 for hidden matrices (before half I for most embeddings too), Adam at 0.0003 for the
  rest, under WSD. ``step-law``: its formula, under a cosine. ``autolr-adamw``, ``autolr-muon``: AutoLR around the
  optimizer of ``adamw`` and of ``muon``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hdet.policy.timing import default_interval
from hdet_lab.bench.loops import run_loop
from hdet_lab.bench.statistics import mean
from hdet_lab.bench.suite import AROUND_TORCH, GRIDS, PLAIN_LOOPS, SHAPES, START, half_decade
from hdet_lab.bench.train import Bench
from hdet_lab.recipes import ADAM_BETAS, ADAMW_DECAY, MUON_LR, author_muon
from hdet_lab.stacked.optim import EMBEDDINGS_AND_HEADS, Muon
from hdet_lab.stacked.rivals import DAdaptAdam, DoG, Mechanic, NAdamW, Prodigy, RangeTest, Rule, ScheduleFree
from hdet_lab.stacked.run import Run

Records = list[dict[str, Any]]
MAX_EXTENSIONS = 3
SCHEDULE_FREE_LR = 0.0025
HALVING_LRS = [half_decade(index) for index in range(-9, -1)]
_FINDER_RANGE = (1e-7, 10.0)
_ALL_INDICES = range(-20, 11)


def run_method(bench: Bench, method: str) -> Records:
    """All runs of a method on the task of ``bench``."""
    steps = bench.steps
    plain: dict[str, Callable[[], Records]] = {
        "grid": lambda: _grid(bench, bench.entry.optimizer, SHAPES, bench.entry.optimizer),
        "autolr": lambda: bench.train(_auto(bench), bench.entry.optimizer),
        "adamw-grid": lambda: _calibrate(bench, "adamw", "adamw"),
        "nadamw-grid": lambda: _calibrate(bench, "nadamw", _nadamw()),
        "adamw": lambda: bench.train(_at_default(bench, "adamw"), "adamw"),
        "nadamw": lambda: bench.train(_at_default(bench, "nadamw"), _nadamw()),
        "prodigy": lambda: bench.train(_fixed(bench.seeds, [1.0], ["cosine"]), Prodigy()),
        "d-adaptation": lambda: bench.train(_fixed(bench.seeds, [1.0], ["cosine"]), DAdaptAdam()),
        "mechanic": lambda: bench.train(_fixed(bench.seeds, [1.0], ["cosine"]), Mechanic(ADAM_BETAS)),
        "dog": lambda: bench.train(
            _fixed(bench.seeds, [1.0], ["constant"]), DoG(1e-4 if bench.has_statistics else 1e-6)
        ),
        "schedule-free": lambda: bench.train(
            _fixed(bench.seeds, [SCHEDULE_FREE_LR], ["constant"]), ScheduleFree(steps // 10)
        ),
        "finder": lambda: _finder(bench),
        "halving": lambda: _halving(bench),
        "muon": lambda: bench.train(_fixed(bench.seeds, [MUON_LR], ["wsd"]), _author_muon(bench)),
        "autolr-adamw": lambda: bench.train(_auto(bench), "adamw"),
        "autolr-muon": lambda: bench.train(_auto(bench), _author_muon(bench)),
        "step-law": lambda: bench.train(_fixed(bench.seeds, [_step_law(bench)], ["cosine"]), bench.entry.optimizer),
        **{name: functools.partial(run_loop, bench, name) for name in PLAIN_LOOPS},
    }
    return plain[method]()


def _author_muon(bench: Bench) -> Muon:
    return author_muon(bench.task.build(0))


def _nadamw() -> Rule:
    return NAdamW(weight_decay=ADAMW_DECAY)


def _fixed(seeds: Iterable[int], lrs: Iterable[float], shapes: Sequence[str]) -> list[Run]:
    return [Run(lr=lr, seed=seed, schedule=shape) for lr in lrs for shape in shapes for seed in seeds]


def _auto(bench: Bench) -> list[Run]:
    interval = default_interval(bench.steps)
    return [Run(lr=START, seed=seed, method="gradient", interval=interval, schedule="none") for seed in bench.seeds]


def _at_default(bench: Bench, method: str) -> list[Run]:
    shape, lr = bench.defaults[method]
    return _fixed(bench.seeds, [lr], [shape])


def _calibrate(bench: Bench, name: str, optimizer: str | Rule) -> Records:
    lrs = [half_decade(index) for index in GRIDS[name]]
    return bench.train(_fixed(bench.seeds, lrs, SHAPES), optimizer, watched=False)


# -- grids ----------------------------------------------------------------------------------------------------------


def _grid(bench: Bench, optimizer: str | Rule, shapes: Sequence[str], name: str) -> Records:
    first = GRIDS[name]

    def train(indices: Sequence[int], seeds: Sequence[int]) -> Records:
        lrs = {half_decade(index): index in first for index in indices}
        records = bench.train(_fixed(seeds, lrs, shapes), optimizer)
        return [{**record, "in_first_grid": lrs[record["lr"]]} for record in records]

    before = {record["lr"] for record in bench.earlier if not record.get("refined")}
    indices = [index for index in _ALL_INDICES if half_decade(index) in before] or list(first)
    records = train(indices, bench.seeds)
    everyone = sorted({record["seed"] for record in bench.earlier} | set(bench.seeds))
    for _ in range(MAX_EXTENSIONS):
        more = extension(indices, best_lr([*bench.earlier, *records]))
        if not more:
            break
        indices = sorted(indices + more)
        records += train(more, everyone)
    if bench.entry.half in AROUND_TORCH:
        best, old = best_lr([*bench.earlier, *records]), refined_lrs(bench.earlier)
        runs = _fixed(bench.seeds, old, shapes) + _fixed(everyone, {best / 2, best * 2} - set(old), shapes)
        near = bench.train(runs, optimizer)
        records += [{**record, "in_first_grid": False, "refined": True} for record in near]
    return records


def refined_lrs(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Learning rates beside the half-decades."""
    return sorted({record["lr"] for record in records if record.get("refined")})


def step_law(num_parameters: int, num_tokens: int) -> float:
    """The learning rate of Li et al. 2025 (arXiv 2503.04715) for parameters outside of embeddings, and tokens."""
    return float(f"{1.79 * num_parameters**-0.713 * num_tokens**0.307:.4g}")


def _step_law(bench: Bench) -> float:
    named = bench.task.build(0).named_parameters()
    num = sum(parameter.numel() for name, parameter in named if not name.startswith(EMBEDDINGS_AND_HEADS))
    (tokens,) = bench.task.gather(bench.task.rows(0))
    return step_law(num, bench.steps * tokens[:, 1:].numel())


def best_lr(records: Records) -> float:
    """The learning rate of the condition with the lowest mean loss over seeds, among the half-decades."""
    losses: dict[tuple[str, float], list[float]] = {}
    for record in (record for record in records if not record.get("refined")):
        loss = math.inf if record["loss"] is None else record["loss"]
        losses.setdefault((record["schedule"], record["lr"]), []).append(loss)
    return min(losses, key=lambda condition: mean(losses[condition]))[1]


def extension(indices: Sequence[int], best: float) -> list[int]:
    """Two half-decades more beyond the edge at which the best learning rate lies; none where it is inside."""
    low, high = min(indices), max(indices)
    if best == half_decade(low):
        return [low - 2, low - 1]
    return [high + 1, high + 2] if best == half_decade(high) else []


# -- methods of several stages --------------------------------------------------------------------------------------


def found_lr(losses: Sequence[float], lrs: Sequence[float]) -> float:
    """A tenth of the learning rate at which the smoothed loss of a range test was lowest."""
    smooth, total, best = 0.0, [], math.inf
    for step, loss in enumerate(losses, 1):
        smooth = 0.9 * smooth + 0.1 * loss
        value = smooth / (1 - 0.9**step)
        if not math.isfinite(value) or (best < math.inf and value > 4 * abs(best)):
            break  # what comes after it has exploded means nothing
        total.append(value)
        best = min(best, value)
    return lrs[int(np.argmin(total))] / 10 if total else lrs[0]


def _finder(bench: Bench) -> Records:
    num_search = max(bench.steps // 10, 20)
    lrs = np.geomspace(*_FINDER_RANGE, num_search).tolist()
    tests = [Run(lr=1.0, seed=seed, schedule="constant", interval=1) for seed in bench.seeds]
    tested = bench.sweep(tests, RangeTest(*_FINDER_RANGE, num_search, ADAM_BETAS), num_search)
    found = [found_lr(result.train_loss, lrs) for result in tested]
    runs = [Run(lr=lr, seed=seed, schedule="one-cycle") for lr, seed in zip(found, bench.seeds, strict=True)]
    return bench.train(runs, "adam", steps=bench.steps - num_search, spent=num_search)


def _halving(bench: Bench) -> Records:
    lrs = {seed: list(HALVING_LRS) for seed in bench.seeds}
    spent, num = 0, len(HALVING_LRS)
    while num > 1:
        length = max(bench.steps // (6 * num), 2)
        runs = [Run(lr=lr, seed=seed, schedule="cosine") for seed in bench.seeds for lr in lrs[seed]]
        results = bench.sweep(runs, "adam", length)
        spent, num = spent + num * length, num // 2
        for seed in bench.seeds:
            mine = [(r.validation["loss"], r.run.lr) for r in results if r.run.seed == seed]
            ranked = sorted(mine, key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)
            lrs[seed] = [lr for _, lr in ranked[:num]]
    runs = [Run(lr=lrs[seed][0], seed=seed, schedule="one-cycle") for seed in bench.seeds]
    return bench.train(runs, "adam", steps=bench.steps - spent, spent=spent)
