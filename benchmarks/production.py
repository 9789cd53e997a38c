"""What production options cost and give: late and partial means, memory of a long run, false alarms of the quarantine.

python benchmarks/production.py meet                # a round's time: waiting for the mean, overlapping it, within nodes
python benchmarks/production.py memory --plot memory.svg
python benchmarks/production.py quarantine
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from hdet import AutoLR, Averaging, Explorer, Faults
from hdet.launch import launch
from hdet.policy.quarantine import Quarantine, QuarantineState

MEETINGS: dict[str, dict[str, Any] | None] = {
    "never": None,
    "plain": {},
    "overlap": {"overlap": True},
    "nodes": {"node_size": 2, "node_rounds": 4},
    "nodes, overlap": {"node_size": 2, "node_rounds": 4, "overlap": True},
}


def _make(width: int, depth: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


# -- meeting --------------------------------------------------------------------------------------------------------


def time_rounds(device: str, width: int, depth: int, rows: int, interval: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by how replicas meet; they take turns, so that a slow moment hits all alike."""
    runs: dict[str, Any] = {}
    for name, options in MEETINGS.items():
        if options is not None and options.get("node_size", 1) >= dist.get_world_size():
            continue
        model, optimizer = _make(width, depth, device)
        explorer = None
        if options is not None:
            explorer = Explorer(model, optimizer, interval=interval, gradients="local", faults=Faults(rollback=False),
                                averaging=Averaging(**options))  # fmt: skip
        runs[name] = (model, optimizer, explorer)
    x = torch.randn(rows, width, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):  # the first two warm up; the first is never overlapped
        for name, (model, optimizer, explorer) in runs.items():
            _wait(device)
            dist.barrier()
            started = time.perf_counter()
            for step in range(interval + 1):
                loss = _step(model, optimizer, x)
                # One step more than a round, so that a mean that is late has landed before the clock stops.
                if explorer is not None and (step < interval or explorer.last_epoch % interval == 0):
                    explorer.step(loss)
            _wait(device)
            if index >= 2:
                seconds[name].append(time.perf_counter() - started)
            if explorer is not None:
                explorer._rounds.land()
                explorer.last_epoch = explorer.last_epoch // interval * interval
    return seconds


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def do_meet(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_replicas in args.replicas:
        sizes = (args.device, args.width, args.depth, args.rows, args.interval, args.rounds)
        results = launch(time_rounds, num_replicas, *sizes, timeout_s=500)
        medians = {
            name: statistics.median(max(r[name][i] for r in results) for i in range(args.rounds)) for name in results[0]
        }
        found[str(num_replicas)] = medians
        print(f"N = {num_replicas}, {args.depth * args.width * (args.width + 1):,} parameters, T = {args.interval}")
        for name, value in medians.items():
            extra = value / medians["never"] - 1
            print(f"  {name:16} {value * 1e3:8.1f} ms a round   {extra:+7.1%} over never meeting")
    return found


# -- memory ---------------------------------------------------------------------------------------------------------


def memory_curve(face: str, device: str, rounds: int, width: int = 500) -> list[float]:
    """Peak megabytes after each round: of the device's allocator, or resident in this process."""
    model, optimizer = _make(width, 4, device)
    interval = 2
    if face in ("gradient", "loss"):
        plain = ConstantLR(optimizer, 1.0)
        signal: Any = face
        scheduler: AutoLR | Explorer = AutoLR(plain, signal=signal, interval=interval, model=model)
    else:
        averaging = Averaging(outer="nesterov" if face == "nesterov" else "mean", overlap=face == "overlap")
        scheduler = Explorer(model, optimizer, interval=interval, gradients="local", faults=Faults(quarantine=20),
                             averaging=averaging)  # fmt: skip
    x, curve = torch.randn(16, width, device=device), []
    for _ in range(rounds):
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(interval):
            scheduler.step(_step(model, optimizer, x))
        curve.append(_megabytes(device))
    return curve


def _megabytes(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def do_memory(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for face in ("gradient", "loss", "mean", "nesterov", "overlap"):
        curve = launch(memory_curve, 2, face, args.device, args.rounds, timeout_s=300)[0]
        found[face] = curve
        marks = {n: curve[n - 1] for n in (1, 2, 3, 5, 20, 50, args.rounds) if n <= args.rounds}
        print(f"{face:10} MB after round " + ", ".join(f"{n}: {value:.1f}" for n, value in marks.items()))
    if args.plot is not None:
        plot_memory(found, args.plot, args.device)
    return found


def plot_memory(curves: dict[str, list[float]], path: Path, device: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for (face, curve), style in zip(curves.items(), ("-", "--", "-.", ":", (0, (5, 1))), strict=True):
        axes.plot(range(1, len(curve) + 1), [value - curve[0] for value in curve], linestyle=style, label=face)
    axes.set(xlabel="round", ylabel="MB above the first round", title=f"peak memory, {device}, a model of 4 MB")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


# -- quarantine -----------------------------------------------------------------------------------------------------


def do_quarantine(args: argparse.Namespace) -> dict[str, Any]:
    """Share of healthy rounds in which some replica is called sick."""
    rng = np.random.default_rng(0)
    draws: dict[str, Callable[[tuple[int, int]], Any]] = {
        "normal": lambda size: rng.standard_normal(size),
        "Student, 3 degrees": lambda size: rng.standard_t(3, size),
        "lognormal": lambda size: rng.lognormal(size=size),
    }
    found: dict[str, Any] = {}
    print(f"{'noise':20} {'N':>3}" + "".join(f"{threshold:>10}" for threshold in args.thresholds))
    for kind, draw in draws.items():
        for num_replicas in (2, 3, 4, 8, 16):
            rounds = 2 + 0.01 * draw((args.rounds, num_replicas))
            rates = []
            for threshold in args.thresholds:
                state, alarms = QuarantineState(), 0
                for losses in rounds:
                    state, out = Quarantine(threshold).update(state, losses)
                    alarms += bool(out.any())
                rates.append(alarms / args.rounds)
            found[f"{kind}, {num_replicas}"] = dict(zip(map(str, args.thresholds), rates, strict=True))
            print(f"{kind:20} {num_replicas:3}" + "".join(f"{rate:10.2%}" for rate in rates))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    meet = commands.add_parser("meet", help="a round's time by how replicas meet")
    meet.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    meet.add_argument("--width", type=int, default=1000)
    meet.add_argument("--depth", type=int, default=10)
    meet.add_argument("--rows", type=int, default=64)
    meet.add_argument("--interval", type=int, default=10)
    meet.add_argument("--rounds", type=int, default=9)
    memory = commands.add_parser("memory", help="peak memory over many rounds")
    memory.add_argument("--rounds", type=int, default=100)
    memory.add_argument("--plot", type=Path, default=None, help="draw the curves into this SVG file")
    quarantine = commands.add_parser("quarantine", help="false alarms on healthy noise")
    quarantine.add_argument("--rounds", type=int, default=10_000)
    quarantine.add_argument("--thresholds", type=float, nargs="+", default=[6, 10, 20, 50])
    for each in (meet, memory):
        each.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for each in (meet, memory, quarantine):
        each.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    args = parser.parse_args()
    found = {"meet": do_meet, "memory": do_memory, "quarantine": do_quarantine}[args.command](args)
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
