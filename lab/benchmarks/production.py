"""What a long run costs in memory, and false alarms of the quarantine.

python lab/benchmarks/production.py memory --plot memory.svg
python lab/benchmarks/production.py quarantine
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from hdet import AutoLR, Averaging, Ensemble, Explorer, Faults
from hdet.launch import launch
from hdet.policy.quarantine import Quarantine, QuarantineState


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


# -- memory ---------------------------------------------------------------------------------------------------------


def memory_curve(face: str, device: str, rounds: int, width: int = 500) -> list[float]:
    """Peak megabytes after each round: of the device's allocator, or resident in this process."""
    model, optimizer = _make(width, 4, device)
    interval = 2
    if face in ("gradient", "loss"):
        plain = ConstantLR(optimizer, 1.0)
        apart = Ensemble(spread=0.1) if face == "loss" else None
        scheduler: AutoLR | Explorer = AutoLR(plain, ensemble=apart, interval=interval, model=model)
    else:
        averaging = Averaging(outer="nesterov" if face == "nesterov" else "mean")
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
    for face in ("gradient", "loss", "mean", "nesterov"):
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
    for (face, curve), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=True):
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
    memory = commands.add_parser("memory", help="peak memory over many rounds")
    memory.add_argument("--rounds", type=int, default=100)
    memory.add_argument("--plot", type=Path, default=None, help="draw the curves into this SVG file")
    quarantine = commands.add_parser("quarantine", help="false alarms on healthy noise")
    quarantine.add_argument("--rounds", type=int, default=10_000)
    quarantine.add_argument("--thresholds", type=float, nargs="+", default=[6, 10, 20, 50])
    memory.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for each in (memory, quarantine):
        each.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    args = parser.parse_args()
    found = {"memory": do_memory, "quarantine": do_quarantine}[args.command](args)
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
