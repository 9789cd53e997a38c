"""Data that a model can learn by heart: what does AutoLR find with a probe, against a grid of both settings?

    python lab/benchmarks/held_out.py images --json lab/benchmarks/results/held_out/images.json  # 2,000 pictures
    python lab/benchmarks/held_out.py text --device cuda --workers 12  # a GPT on 10% of Shakespeare
    python lab/benchmarks/held_out.py table  # the diabetes table, an MLP
    python lab/benchmarks/held_out.py digits  # 600 digits, an MLP

Rows to train on, to probe and to test are apart. The grid is AdamW under WSD, learning rates by weight decays, of the
same seed and steps, judged by the test rows: the best of it is what a sweep would find that saw them. AutoLR runs
without a schedule: ``plain``, with a ``probe``, and with ``weight_decay="learn"`` from several starts. Every run is
listed, and written when it ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from hdet import AutoLR, __version__
from hdet_lab.runs import provenance
from held_out_data import SPLITS, TASKS, Data

LRS, DECAYS = (3e-4, 1e-3, 3e-3), (0.0, 0.1, 1.0, 3.0)
STARTS = ((1e-8, 0.0), (1e-3, 0.01), (1.0, 1.0))
NUM_POINTS = 30
"""Of a curve of the held-out loss."""
KINDS = ("fixed", "plain", "probe", "learn")
DEFAULTS = (1e-3, 0.01)
"""AdamW's own."""


@dataclass(frozen=True)
class Run:
    """One run: ``fixed``, ``plain``, ``probe`` or ``learn``."""

    task: str
    data: str
    size: int
    device: str
    steps: int
    kind: str
    lr: float
    weight_decay: float
    seed: int


def wsd(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / (0.05 * steps), max(0.0, (steps - step) / (0.3 * steps)))


def prepare(device: str) -> None:
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")


class Batches:
    """Rows of each kind, drawn from generators of their own: the same for all runs of a seed."""

    def __init__(self, data: Data, seed: int, device: str) -> None:
        self.rows = {name: (x.to(device), y.to(device)) for name, (x, y) in data.rows.items()}
        self.generators = {name: torch.Generator().manual_seed(1000 * k + seed) for k, name in enumerate(SPLITS)}
        self.size, self.device = data.batch, device

    def __call__(self, name: str) -> tuple[Tensor, Tensor]:
        x, y = self.rows[name]
        chosen = torch.randint(len(x), (self.size,), generator=self.generators[name]).to(self.device)
        return x[chosen], y[chosen]


def train_grid(runs: list[Run]) -> list[dict[str, Any]]:
    """All fixed runs side by side, with AdamW written out."""
    first = runs[0]
    prepare(first.device)
    data = TASKS[first.task](Path(first.data), first.size)
    models = []
    for run in runs:
        torch.manual_seed(run.seed)
        models.append(data.build())
    parameters = {
        name: stacked.detach().to(first.device) for name, stacked in torch.func.stack_module_state(models)[0].items()
    }
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    batches = {seed: Batches(data, seed, first.device) for seed in sorted({run.seed for run in runs})}
    lrs, decays = (
        torch.tensor(row, device=first.device) for row in zip(*((r.lr, r.weight_decay) for r in runs), strict=True)
    )

    def loss_of(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return data.loss(torch.func.functional_call(models[0], own, (x,)), y)

    gradients_of = torch.vmap(torch.func.grad(loss_of))
    began = time.perf_counter()
    for step in range(first.steps):
        drawn = {seed: draw("train") for seed, draw in batches.items()}
        x, y = (torch.stack([drawn[run.seed][k] for run in runs]) for k in (0, 1))
        for name, gradient in gradients_of(parameters, x, y).items():
            p, (mean, square) = parameters[name], moments[name]
            lr, decay = (row.view(-1, *[1] * (p.dim() - 1)) for row in (lrs * wsd(step, first.steps), decays))
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient**2, 0.001)
            p.mul_(1 - lr * decay)
            p.sub_(lr * mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
    found: list[dict[str, Any]] = [{"seconds": round((time.perf_counter() - began) / len(runs), 2)} for _ in runs]
    with torch.no_grad():
        for index, results in enumerate(found):
            model = partial(torch.func.functional_call, models[0], {name: p[index] for name, p in parameters.items()})
            results |= tested(data, batches[runs[index].seed].rows, model)
    return found


def tested(data: Data, rows: dict[str, tuple[Tensor, Tensor]], model: Callable[[Tensor], Tensor]) -> dict[str, float]:
    found = {}
    for name in SPLITS:
        parts = zip(*(torch.split(tensor[:20_000], 1000) for tensor in rows[name]), strict=True)
        losses = [float(data.loss(model(x), y)) * len(x) for x, y in parts]
        found[name] = round(sum(losses) / min(len(rows[name][0]), 20_000), 5)
    return found


def train(run: Run) -> dict[str, Any]:
    """Train with AutoLR, test, and tell what was found and what the probes cost."""
    prepare(run.device)
    warnings.simplefilter("ignore")
    data = TASKS[run.task](Path(run.data), run.size)
    torch.manual_seed(run.seed)
    model, batches = data.build().to(run.device), Batches(data, run.seed, run.device)

    def loss_of(name: str) -> Tensor:
        x, y = batches(name)
        return data.loss(model(x), y)

    probed: list[int] = []

    def probe() -> Tensor:
        probed.append(len(seconds))
        return loss_of("held_out")

    optimizer = AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
    given: dict[str, Any] = {}
    if run.kind in ("probe", "learn"):
        given = {"model": model, "probe": probe}
    if run.kind == "learn":
        given["weight_decay"] = "learn"
    scheduler = AutoLR(optimizer, total_steps=run.steps, **given)
    seconds: list[float] = []
    curve: list[tuple[int, Tensor]] = []
    began = time.perf_counter()
    for step in range(1, run.steps + 1):
        started = time.perf_counter()
        loss = loss_of("train")
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        if step % max(1, run.steps // NUM_POINTS) == 0:
            x, y = (rows[:2000] for rows in batches.rows["held_out"])
            with torch.no_grad():
                curve.append((step, data.loss(model(x), y)))
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 2), **story(scheduler)}
    found["held_out_curve"] = [[step, round(float(loss), 5)] for step, loss in curve]
    if probed and run.device == "cpu":
        found["probe_cost"] = probe_cost(seconds, probed)
    with torch.no_grad():
        return found | tested(data, batches.rows, model.eval())


def story(scheduler: AutoLR) -> dict[str, Any]:
    """Some forty points of both curves."""
    records = list(scheduler.history)
    records = records[:: max(1, len(records) // 40)]

    def rounded(value: float) -> float:
        return float(f"{value:.3g}")

    curves = {"at": [r.step for r in records], "lrs": [rounded(r.base_values[0]) for r in records]}
    if records and "weight_decay" in records[-1].knobs:
        curves["decays"] = [rounded(r.knobs["weight_decay"].base) for r in records]
    return curves


def probe_cost(seconds: list[float], probed: list[int]) -> float:
    """By what share steps with a probe made the run longer; by medians, because others use the machine too."""
    with_probe = [seconds[k] for k in probed]
    others = [each for k, each in enumerate(seconds) if k not in set(probed) and k > probed[0]]
    usual = statistics.median(others)
    return round((statistics.median(with_probe) - usual) * len(with_probe) / (usual * len(others)), 4)


def runs_of(options: argparse.Namespace) -> Iterable[Run]:
    steps = options.steps or TASKS[options.task](options.data, options.size).steps
    kinds = [("fixed", *pair) for pair in itertools.product(options.lrs, options.decays)]
    kinds = [*(("learn", *start) for start in STARTS), ("plain", *DEFAULTS), ("probe", *DEFAULTS), *kinds]
    for seed in options.seeds:
        for kind, lr, decay in (each for each in kinds if each[0] in options.kinds):
            yield Run(options.task, str(options.data), options.size, options.device, steps, kind, lr, decay, seed)


def key_of(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("kind", "lr", "weight_decay", "seed", "steps"))


def show(results: list[dict[str, Any]]) -> None:
    """Medians over seeds of what each run is above the best of the grid of its seed."""
    best = {
        seed: min((r["test"] for r in results if r["kind"] == "fixed" and r["seed"] == seed), default=math.nan)
        for seed in {r["seed"] for r in results}
    }
    print("best of the grid, by seed:", {seed: round(value, 4) for seed, value in sorted(best.items())})
    for key in dict.fromkeys((r["kind"], r["lr"], r["weight_decay"]) for r in results):
        mine = [r for r in results if (r["kind"], r["lr"], r["weight_decay"]) == key]
        above = [100 * (r["test"] / best[r["seed"]] - 1) for r in mine]
        print(
            f"{key[0]:>6} from lr {key[1]:g}, wd {key[2]:g}: {statistics.median(above):+.1f}%",
            [f"{a:+.1f}" for a in above],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--size", type=int, default=2000, help="pictures to train on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lrs", type=float, nargs="+", default=list(LRS))
    parser.add_argument("--decays", type=float, nargs="+", default=list(DECAYS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--have", type=Path, nargs="+", default=[], help="records whose runs are taken over")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = TASKS[options.task](options.data, options.size)
    record: dict[str, Any] = {
        "settings": {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(options).items()
            if k not in ("data", "json", "have")
        },
        "provenance": {
            "hdet": __version__,
            "git_commit": provenance.git_commit(),
            "torch": torch.__version__,
            "hardware": provenance.hardware(),
            "data_sha256": data.sha256(),
        },
        "runs": [],
    }
    runs = list(runs_of(options))

    def keep(run: Run, found: dict[str, Any]) -> None:
        own = {name: getattr(run, name) for name in ("kind", "lr", "weight_decay", "seed", "steps")}
        record["runs"].append({**own, **found})
        print(found["test"], own, flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(each) for each in record["runs"])
            head = json.dumps({k: v for k, v in record.items() if k != "runs"})[:-1]
            options.json.write_text(f'{head}, "runs": [\n{lines}\n]}}\n')

    for path in options.have:
        old = json.loads(path.read_text())
        if old["provenance"]["data_sha256"] != record["provenance"]["data_sha256"]:
            raise SystemExit(f"{path} is of other data")
        wanted, commit = {key_of(vars(run)) for run in runs}, old["provenance"]["git_commit"]
        record["runs"] += [{"commit": commit, **run} for run in old["runs"] if key_of(run) in wanted]
        have = {key_of(run) for run in record["runs"]}
        runs = [run for run in runs if key_of(vars(run)) not in have]
    learning = [run for run in runs if run.kind != "fixed"]
    fixed = [run for run in runs if run.kind == "fixed"]
    # On a GPU side by side, on cores one after the other.
    seeds = [None] if options.device != "cpu" else sorted({run.seed for run in fixed})
    grids = [[run for run in fixed if seed in (None, run.seed)] for seed in seeds]
    with ProcessPoolExecutor(options.workers, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Future[Any], list[Run]] = {}
        waiting |= {pool.submit(train_grid, grid): grid for grid in grids if grid}  # first: they take longest
        waiting |= {pool.submit(train, run): [run] for run in learning}
        for future in as_completed(waiting):
            ended = waiting[future]
            results = future.result() if ended[0].kind == "fixed" else [future.result()]
            for run, found in zip(ended, results, strict=True):
                keep(run, found)
    show(record["runs"])


if __name__ == "__main__":
    main()
