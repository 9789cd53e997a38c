"""What HDET costs: a step between converges, a converge, and its memory, each against a baseline of the same run.

python benchmarks/overhead.py            # the tables of benchmarks/README.md
python benchmarks/overhead.py --json     # the same for machines
python benchmarks/overhead.py --cuda     # host synchronisations between converges, and the same ratios, on a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR, OneCycleAutoLR
from hdet.launch import launch
from hdet.replicas import average as converge_module
from hdet.replicas.average import mean_
from hdet.replicas.group import Replicas

NUM_TENSORS, NUM_PARAMETERS = 300, 10_000_000


def median_s(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each variant; they take turns, so that a slow moment of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            run()
            if dist.is_initialized():
                dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_step(device: str = "cpu", num_steps: int = 2000) -> dict[str, float]:
    """``scheduler.step(loss)`` between converges against ``OneCycleLR.step()``, four param groups."""

    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(8, device=device))]} for _ in range(4)]
        made = torch.optim.Adam(groups, lr=1e-3)
        made.step()
        return made

    loss = torch.tensor(1.0, device=device)

    def steps(scheduler: Any, *args: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in range(num_steps):
                scheduler.step(*args)
            scheduler.last_epoch = 0

        return run

    total, rest = 10 * num_steps, {"ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 10**9}
    ours = OneCycleAutoLR(optimizer(), 1e-3, total, enable_auto_lr=True, auto_lr_warmup_steps=0, **rest)  # type: ignore[arg-type]
    theirs = OneCycleLR(optimizer(), 1e-3, total)
    times = median_s({"ours": steps(ours, loss), "torch": steps(theirs)}, repeats=9)
    return {name: value / num_steps * 1e6 for name, value in times.items()}


def measure_converge(device: str = "cpu", repeats: int = 11) -> dict[str, float]:
    """Converge against one flat all-reduce, and against one all-reduce a tensor as in the paper's code."""
    tensors = [torch.randn(NUM_PARAMETERS // NUM_TENSORS, device=device) for _ in range(NUM_TENSORS)]
    parameters = [torch.nn.Parameter(t) for t in tensors]
    flat = torch.cat(tensors)
    replicas = Replicas(dist.group.WORLD)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    rest = {"ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 10**9}
    scheduler = OneCycleAutoLR(optimizer, 1e-3, 10**6, cycle_momentum=False, **rest)  # type: ignore[arg-type]

    def per_tensor() -> None:
        for t in tensors:
            dist.all_reduce(t)
            t.div_(replicas.count)

    def synced(run: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            run()
            if device != "cpu":
                torch.cuda.synchronize()

        return both

    variants = {
        "raw": lambda: dist.all_reduce(flat),
        "mean": lambda: mean_(tensors, replicas, [True] * replicas.count),
        "converge": scheduler.converge,
        "per_tensor": per_tensor,
    }
    times = median_s({name: synced(run) for name, run in variants.items()}, repeats)
    return {name: value * 1e3 for name, value in times.items()}


def measure_memory(num_megabytes: int) -> float:
    """Megabytes a converge allocates for a model of ``num_megabytes``."""
    allocated = 0
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal allocated
        made = empty(*args, **kwargs)
        allocated += made.nbytes
        return made

    tensors = [torch.zeros(num_megabytes * 2**20 // 4 // 10) for _ in range(10)]
    converge_module.torch.empty = counting  # type: ignore[attr-defined]
    mean_(tensors, Replicas(dist.group.WORLD), [True] * dist.get_world_size())
    return allocated / 2**20


def count_syncs(kind: str) -> int:
    """Steps on a GPU under a mode in which torch raises at every host synchronisation; how many there were."""
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler: AutoLR | OneCycleAutoLR
    if kind == "paper":
        scheduler = OneCycleAutoLR(
            optimizer, 1e-3, 1000, ensemble_lr_spread_ratio=0.1, model_sync_interval=200, model=model,
            enable_auto_lr=True, auto_lr_warmup_steps=0,
        )  # fmt: skip
    else:
        signal: Any = kind
        scheduler = AutoLR(OneCycleLR(optimizer, 1e-3, 1000), model=model, signal=signal, interval=200)
    x = torch.randn(8, 64, device="cuda")
    num_steps = 0
    for step in range(1, 401):
        between = step % 200 != 0 and step > 1  # the first step makes the copies
        torch.cuda.set_sync_debug_mode("error" if between else "default")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        scheduler.observe(loss, 0.5)
        num_steps += between
    torch.cuda.set_sync_debug_mode("default")
    return num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    args = parser.parse_args()
    device = "cuda" if args.cuda else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if args.cuda:
        found["gpu"] = torch.cuda.get_device_name()
        found["steps between converges without a host synchronisation"] = {
            kind: launch(count_syncs, 2, kind, timeout_s=120)[0] for kind in ("paper", "gradient", "loss")
        }
    for n in (2, 4):
        step = launch(measure_step, n, device, timeout_s=300)[0]
        converge = launch(measure_converge, n, device, timeout_s=500)[0]
        found[f"N={n}"] = {
            "step, us (ours, torch)": (round(step["ours"], 1), round(step["torch"], 1)),
            "step ratio": round(step["ours"] / step["torch"], 2),
            "converge, ms": {name: round(value, 1) for name, value in converge.items()},
            "converge / raw": round(converge["converge"] / converge["raw"], 2),
            "mean / raw": round(converge["mean"] / converge["raw"], 2),
            "per-tensor / converge": round(converge["per_tensor"] / converge["converge"], 1),
        }
    if not args.cuda:
        found["converge memory, MB, by model MB"] = {mb: launch(measure_memory, 2, mb)[0] for mb in (40, 400, 2000)}
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
