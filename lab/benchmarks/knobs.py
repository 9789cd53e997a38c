"""Knobs that start wrong, in experiments with a known answer: do they come back?

    python lab/benchmarks/knobs.py regression  # (a) learning rate and weight decay, against a two-dimensional grid
    python lab/benchmarks/knobs.py temperature  # (b) attention temperature of a small GPT, three times off
    python lab/benchmarks/knobs.py dropout  # (c) dropout on 2,000 images of Fashion-MNIST, and (d) the naive signal
    python lab/benchmarks/knobs.py smoothing  # (e) label smoothing on the same
    python lab/benchmarks/knobs.py groups --plot out.svg  # (f) one learning rate for each of four groups, on `feed`

Real processes: four replicas on gloo. Every run is listed. `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hdet import Adapt, AutoLR, Averaging, Ensemble, Explorer, Faults, knobs
from hdet.launch import launch
from hdet_lab.models.gpt import Attention
from hdet_lab.tasks import load_task
from hdet_lab.tasks.base import batch_of, param_groups

NUM_REPLICAS = 4
Run = dict[str, Any]


def run_all(function: Callable[[Run], Run], runs: Sequence[Run], num_workers: int) -> list[Run]:
    """Several at a time, each on four processes; with shared gradients and a fixed value one is as good as four."""

    def one(run: Run) -> Run:
        started = time.perf_counter()
        alone = run["method"] == "fixed" and function is not images
        result: Run = launch(function, 1 if alone else NUM_REPLICAS, run, timeout_s=600.0)[0]
        shown = " ".join(f"{key}={value}" for key, value in run.items())
        ends = " ".join(f"{key}={value:.4g}" for key, value in result.items() if isinstance(value, float))
        print(f"[{time.perf_counter() - started:.0f} s] {shown} -> {ends}", flush=True)
        return {**run, **result}

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(one, runs))


def batches(num_rows: int, size: int, seed: int) -> Callable[[], Tensor]:
    """Random rows, different on every replica; all of theirs where there is but one process."""
    alone = dist.get_world_size() == 1
    replicas = range(NUM_REPLICAS) if alone else [dist.get_rank()]
    generators = [torch.Generator().manual_seed(1000 * seed + r) for r in replicas]
    return lambda: torch.cat([torch.randint(num_rows, (size,), generator=g) for g in generators])


def cosine(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * min(t / num_steps, 1)))


def trace(explorer: Explorer | AutoLR) -> dict[str, list[float]]:
    """Base value of every knob, round by round."""
    names = explorer.history[0].knobs if explorer.history else {}
    return {name: [record.knobs[name].base for record in explorer.history] for name in names}


# -- (a) ---------------------------------------------------------------------------------------------------------


def regression(run: Run) -> Run:
    """Ridge regression by AdamW-like SGD: 100 features, 200 noisy rows, so that both knobs matter."""
    steps, interval = 2000, 20
    generator = torch.Generator().manual_seed(run["seed"])
    truth = torch.randn(100, generator=generator) / 10

    def rows(count: int, noise: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 100, generator=generator)
        return x, x @ truth + noise * torch.randn(count, generator=generator)

    x, y = rows(200, 1.0)
    held_x, held_y = rows(500, 1.0)
    test_x, test_y = rows(4000, 1.0)
    model = nn.Linear(100, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=run["lr"], momentum=0.9, weight_decay=run["weight_decay"])

    def loss_on(features: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(model(features).squeeze(1), labels)

    draw = batches(len(x), 16, run["seed"])
    schedule = cosine(optimizer, steps)
    is_explored = run["method"] != "fixed"
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    explorer = None
    if is_explored:
        explorer = AutoLR(
            schedule, model=wrapped, total_steps=steps, interval=interval,
            ensemble=Ensemble(spread=0.1, knobs=[knobs.WeightDecay()]),
            probe=lambda: loss_on(held_x, held_y), adapt=Adapt(_start_steps=0),
        )  # fmt: skip
    for _ in range(steps):
        i = draw()
        loss = F.mse_loss(wrapped(x[i]).squeeze(1), y[i])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if explorer is not None:
            explorer.step(loss)
        else:
            schedule.step()
    with torch.no_grad():
        found: Run = {"test": float(loss_on(test_x, test_y))}
    if explorer is not None:
        last = explorer.history[-1]
        found |= {"end_lr_scale": last.scales[0], "end_weight_decay": last.knobs["weight_decay"].base}
        found["trace"] = trace(explorer) | {"scale": [record.scales[0] for record in explorer.history]}
    return found


def do_regression(args: argparse.Namespace) -> list[Run]:
    runs: list[Run] = []
    for seed in args.seeds:
        grid = itertools.product((3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 6e-2), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
        runs += [{"method": "fixed", "seed": seed, "lr": lr, "weight_decay": wd} for lr, wd in grid]
        starts = [(1e-3, 0.01), (1e-3, 3.0), (3e-2, 0.01), (3e-2, 3.0)]
        runs += [{"method": "explored", "seed": seed, "lr": lr, "weight_decay": wd} for lr, wd in starts]
    results = run_all(regression, runs, args.workers)
    for seed in args.seeds:
        mine = [r for r in results if r["seed"] == seed]
        best = min(r["test"] for r in mine if r["method"] == "fixed")
        fixed = {(r["lr"], r["weight_decay"]): r["test"] for r in mine if r["method"] == "fixed"}
        print(f"seed {seed}: best of the grid {best:.4f}")
        for r in mine:
            if r["method"] == "explored":
                start = fixed[r["lr"], r["weight_decay"]]
                print(
                    f"  lr {r['lr']:g}, weight decay {r['weight_decay']:g}: "
                    f"fixed {start:.4f} ({start / best - 1:+.1%}), explored {r['test']:.4f} "
                    f"({r['test'] / best - 1:+.1%}); "
                    f"weight decay ended at {r['end_weight_decay']:.3g}, the scale at {r['end_lr_scale']:.3g}"
                )
    return results


# -- (b) ---------------------------------------------------------------------------------------------------------


def temperature(run: Run) -> Run:
    """A small GPT with normalised queries and keys, so that weights cannot make up for a wrong temperature."""
    steps, interval = 600, 10
    task = load_task("stdlib-gpt", context=64, num_layers=2, width=64, num_heads=4, num_validation=256, batch_rows=32)
    torch.manual_seed(run["seed"])
    model = task.build(run["seed"])
    layers = [module for module in model.modules() if isinstance(module, Attention)]

    def write(value: float) -> None:
        for layer in layers:
            layer.temperature = value

    for layer in layers:
        layer.normalise = True
    write(run["temperature"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1, cycle_momentum=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    explorer = None
    if run["method"] != "fixed":
        knob = knobs.Knob(
            "temperature", lambda: layers[0].temperature, write, low=0.01, high=100, space="log", acts="forward"
        )
        probe_batch = batch_of(task, 10**6, seed=run["seed"])
        explorer = Explorer(
            wrapped, optimizer, knobs=[knob], interval=interval, total_steps=steps,
            adapt=Adapt(_start_steps=steps // 20),
            probe=(lambda: task.loss(model, probe_batch)) if run["method"] == "explored" else None,
        )  # fmt: skip
    for step in range(steps):
        loss = task.loss(
            wrapped, batch_of(task, step, seed=run["seed"], replica=dist.get_rank(), num_replicas=dist.get_world_size())
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if explorer is not None:
            explorer.step(loss)
    found: Run = {"validation": task.evaluate(model)["loss"]}
    if explorer is not None:
        found["end"] = explorer.history[-1].knobs["temperature"].base
        found["trace"] = trace(explorer)
    return found


def do_temperature(args: argparse.Namespace) -> list[Run]:
    grid = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
    fixed = [{"method": "fixed", "seed": s, "temperature": t} for s in args.seeds for t in grid]
    results = run_all(temperature, fixed, args.workers)
    best = {
        seed: min((r for r in results if r["seed"] == seed), key=lambda r: float(r["validation"]))
        for seed in args.seeds
    }
    starts = [(s, factor * best[s]["temperature"]) for s in args.seeds for factor in (1 / 3, 3)]
    wrong = [{"method": m, "seed": s, "temperature": t} for m in ("fixed", "explored") for s, t in starts]
    results += (found := run_all(temperature, wrong, args.workers))
    for a, b in zip(found[: len(starts)], found[len(starts) :], strict=True):
        goal = best[a["seed"]]
        print(
            f"seed {a['seed']}, best fixed {goal['temperature']:g} ({goal['validation']:.4f}); "
            f"start {a['temperature']:.3g}: fixed {a['validation']:.4f}, explored {b['validation']:.4f}, "
            f"ended at {b['end']:.3g}, {b['end'] / goal['temperature']:.2f} times the best"
        )
    return results


# -- (c), (d), (e) -----------------------------------------------------------------------------------------------


def images(run: Run) -> Run:
    """An MLP on 2,000 images, local gradients; test loss of the mean weights."""
    steps, interval = run["steps"], 100
    data = load_task("fashion", data=run["data"])

    def rows(index: Tensor) -> tuple[Tensor, Tensor]:
        pixels, labels = data.gather(index)
        return (pixels.float() / 255 - 0.286) / 0.353, labels

    x, y = rows(torch.arange(2000))
    held, test = rows(torch.arange(2000, 5000)), rows(data.validation_rows)
    torch.manual_seed(run["seed"])
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(run["dropout"]),
        nn.Linear(256, 256), nn.ReLU(), nn.Dropout(run["dropout"]), nn.Linear(256, 10),
    )  # fmt: skip
    torch.manual_seed(1000 * run["seed"] + dist.get_rank())  # masks of dropout
    criterion = nn.CrossEntropyLoss(label_smoothing=run["smoothing"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = cosine(optimizer, steps)
    draw = batches(len(x), 32, run["seed"])
    explored: list[knobs.Knob] = []
    naive = run["method"] == "naive"
    if run["method"] != "fixed":
        explored = [knobs.Dropout(model, spread=0.2, check_signal=not naive)]
        if run["knob"] == "smoothing":
            explored = [knobs.LabelSmoothing(criterion, spread=0.2, check_signal=not naive)]
    explorer = Explorer(
        model, optimizer, knobs=explored, interval=interval, gradients="local", total_steps=steps,
        probe=None if naive or not explored else lambda: F.cross_entropy(model(held[0]), held[1]),
        faults=Faults(max_rollbacks=0), averaging=Averaging(optimizer_state="average"),
    )  # fmt: skip
    for _ in range(steps):
        i = draw()
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        explorer.step(loss)
    model.eval()
    with torch.no_grad():
        logits = model(test[0])
    found: Run = {
        "test": float(F.cross_entropy(logits, test[1])),
        "accuracy": float((logits.argmax(1) == test[1]).float().mean()),
    }
    if explored:
        found["end"] = explorer.history[-1].knobs[explored[0].name].base
        found["trace"] = trace(explorer)
    return found


def do_images(args: argparse.Namespace, knob: str, grid: Sequence[float], starts: Sequence[float]) -> list[Run]:
    runs: list[Run] = []
    common = {"knob": knob, "data": args.data, "steps": args.steps, "dropout": 0.0, "smoothing": 0.0}
    for seed in args.seeds:
        runs += [{**common, "method": "fixed", "seed": seed, knob: value} for value in grid]
        runs += [{**common, "method": m, "seed": seed, knob: v} for m in ("explored", "naive") for v in starts]
    results = run_all(images, runs, args.workers)
    for seed in args.seeds:
        mine = [r for r in results if r["seed"] == seed]
        fixed = {r[knob]: r for r in mine if r["method"] == "fixed"}
        best = min(fixed.values(), key=lambda r: float(r["test"]))
        print(f"seed {seed}: best fixed {knob} {best[knob]:g}, test loss {best['test']:.4f}")
        for r in mine:
            if r["method"] != "fixed":
                start = fixed[r[knob]]
                nearer = abs(r["end"] - best[knob]) < abs(r[knob] - best[knob])
                print(
                    f"  {r['method']} from {r[knob]:g}: ended at {r['end']:.3f} "
                    f"({'nearer' if nearer else 'NOT nearer'}), test loss "
                    f"{r['test']:.4f} against {start['test']:.4f} at the start value, "
                    f"accuracy {r['accuracy']:.3f} against {start['accuracy']:.3f}"
                )
    return results


# -- (f) ---------------------------------------------------------------------------------------------------------


def groups(run: Run) -> Run:
    """`feed` with AutoLR's gradient signal and a scale for each param group; one process, where replicas are equal."""
    task = load_task("feed", data=run["data"])
    model = task.build(run["seed"])
    steps = task.total_steps
    optimizer = torch.optim.Adam(param_groups(task, model), lr=run["lr"], betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, run["lr"], steps, pct_start=0.1, cycle_momentum=False)
    scheduler = AutoLR(
        schedule,
        model=model,
        interval=max(1, steps // 100),
        adapt=Adapt(groups="together" if run["method"] == "together" else "each"),
    )
    for step in range(steps):
        loss = task.loss(model, batch_of(task, step, seed=run["seed"]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss)
    names = list(task.groups(model))
    rates = {name: [record.base_values[g] for record in scheduler.history] for g, name in enumerate(names)}
    return {"validation": task.evaluate(model)["loss"], "steps": [r.step for r in scheduler.history], "rates": rates}


def do_groups(args: argparse.Namespace) -> list[Run]:
    results = []
    for seed, method in itertools.product(args.seeds, ("together", "per group")):
        torch.set_num_threads(2)
        result = groups({"method": method, "seed": seed, "lr": 1e-3, "data": args.data})
        results.append({"method": method, "seed": seed, "lr": 1e-3, **result})
        print(f"seed {seed}, {method}: validation loss {result['validation']:.4f}", flush=True)
        for name, rates in result["rates"].items():
            peak, half, late = max(rates), rates[len(rates) // 2], rates[int(0.9 * len(rates))]
            print(f"  {name}: peak {peak:.3g}, at half of the run {half:.3g}, at 90% {late:.3g} ({late / peak:.3f})")
    if args.plot:
        plot_groups(results, args.plot)
    return results


def plot_groups(results: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    styles = itertools.cycle(["-", "--", "-.", ":"])
    shown = [r for r in results if r["method"] == "per group"]
    for (name, style), colour in zip(
        [(n, next(styles)) for n in shown[0]["rates"]], ["#0072B2", "#D55E00", "#009E73", "#CC79A7"], strict=False
    ):
        for i, r in enumerate(shown):
            axis.semilogy(r["steps"], r["rates"][name], style, color=colour, label=name if i == 0 else None, lw=1.5)
    axis.set_xlabel("step")
    axis.set_ylabel("learning rate (base value)")
    axis.set_title("feed: one learned scale for each param group, every seed")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["regression", "temperature", "dropout", "smoothing", "groups"])
    parser.add_argument("--data", default="data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=2000, help="of dropout and smoothing")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.experiment == "regression":
        results = do_regression(args)
    elif args.experiment == "temperature":
        results = do_temperature(args)
    elif args.experiment == "dropout":
        results = do_images(args, "dropout", (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8), (0.0, 0.8))
    elif args.experiment == "smoothing":
        results = do_images(args, "smoothing", (0.0, 0.05, 0.1, 0.2, 0.3, 0.5), (0.0, 0.5))
    else:
        results = do_groups(args)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
