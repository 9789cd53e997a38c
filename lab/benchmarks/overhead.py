"""What HDET costs: a step between converges, a converge, and its memory, each against a baseline of the same run.

python lab/benchmarks/overhead.py            # the tables of lab/benchmarks/README.md
python lab/benchmarks/overhead.py --json     # the same for machines
python lab/benchmarks/overhead.py --cuda     # a GPT of 124M parameters with AutoLR and without, on a GPU
python lab/benchmarks/overhead.py --cuda --processes    # and the syncs and converges of several processes
python lab/benchmarks/overhead.py --cuda --checksum     # what ranks compare their weights by; --large on the CPU
python lab/benchmarks/overhead.py --cuda --layers 24 --width 1024 --batch 8 --interval 50     # another model
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Adapt, AutoLR, Copies, Ensemble, Faults, OneCycleAutoLR
from hdet.launch import launch
from hdet.replicas import average as converge_module
from hdet.replicas.average import mean_
from hdet.replicas.fork import WeightsSum
from hdet.replicas.group import Replicas

NUM_TENSORS, NUM_PARAMETERS = 300, 10_000_000
STEADY = Adapt(level=False)
"""Without the first level, for which the first steps are rounds of one step each."""


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
        apart = Ensemble(spread=0.1) if kind == "loss" else None
        scheduler = AutoLR(OneCycleLR(optimizer, 1e-3, 1000), model=model, ensemble=apart, interval=200, adapt=STEADY)
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


# -- a large model on one GPU ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        num, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(num, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(num, length, width))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


class GPT(nn.Module):
    """The shapes of GPT-2: 124M parameters with 12 layers of width 768."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        return nn.functional.linear(x, self.tokens.weight)


class Training:
    """A model in training on random tokens, by torch's schedule or by AutoLR over it."""

    def __init__(self, args: argparse.Namespace, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.interval, length = device, args.interval, args.length
        self.model = GPT(args.layers, args.width, length).to(device)
        self.tokens = torch.randint(50257, (args.batch, length + 1), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        schedule = OneCycleLR(self.optimizer, 1e-4, 10**6, cycle_momentum=False)
        options = options and {
            "adapt": Adapt(level=args.level),
            **options,
            "model": self.model,
            "interval": args.interval,
        }
        self.auto = AutoLR(schedule, **options) if options else None
        self.schedule = schedule
        self.steps = self.steps_without_sync = 0

    def step(self, *, guarded: bool = False) -> None:
        """``guarded``: torch raises at every host synchronisation in steps that end no round."""
        self.steps += 1
        between = guarded and self.steps % self.interval != 0
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if between else "default")
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.auto is None:
            self.schedule.step()
        else:
            self.auto.step(loss)
        self.steps_without_sync += between
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    def round_s(self) -> float:
        """Seconds of a round, with its end."""
        _wait(self.device)
        started = time.perf_counter()
        for _ in range(self.interval):
            self.step()
        _wait(self.device)
        return time.perf_counter() - started


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_large(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Variants beside one plain run, round by round in turns."""
    variants: dict[str, dict[str, Any]] = {
        "everything on (default)": {"copies": Copies()},
        "act=False": {"adapt": Adapt(level=args.level, act=False)},
        "without rollback": {"faults": Faults(max_rollbacks=0)},
        "anchor_share=1/256": {"copies": Copies(anchor_share=1 / 256)},
        "all on the device": {"copies": Copies(anchor_share=1, snapshot_device=device)},
    }
    runs: dict[str, Training] = {}
    memory: dict[str, tuple[int, int]] = {}
    for name, options in {"plain": {}, **dict(list(variants.items())[: args.variants])}.items():
        before = _allocated(device)
        runs[name] = Training(args, device, **options)
        for _ in range(max(3 * args.interval, args.warmup)):  # both copies on the host have been made
            runs[name].step()
        memory[name] = _allocated(device) - before, _peak(device, runs[name]) - before
    for run in list(runs.values())[1:]:
        for _ in range(2 * args.interval):
            run.step(guarded=True)
    seconds = in_turns({name: run.round_s for name, run in runs.items()}, args.rounds)
    plain = runs.pop("plain")
    count = sum(p.numel() for p in plain.model.parameters())
    rows = []
    for name, run in runs.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["plain"], strict=True)]
        added = [mine - theirs for mine, theirs in zip(memory[name], memory["plain"], strict=True)]
        rows.append(
            {
                "variant": name,
                "parameters, M": round(count / 1e6, 1),
                "plain step, ms": round(statistics.median(seconds["plain"]) / args.interval * 1e3, 2),
                # Of all rounds together: a copy to go back to is made in one of several.
                "step / plain": round(sum(seconds[name]) / sum(seconds["plain"]), 4),
                **spread_of("round / plain", ratios),
                "bytes a parameter": round(added[0] / count, 2),
                "at the peak": round(added[1] / count, 2),
                "steps without sync": f"{run.steps_without_sync} of {2 * (args.interval - 1)}",
            }
        )
    return rows


def in_turns(variants: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each variant returns; they take turns, and another one begins each time."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(variants[name]())
    return found


def spread_of(name: str, ratios: list[float]) -> dict[str, Any]:
    """The median with its quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {f"median {name}": round(middle, 5), "quartiles": f"{low:.5f} to {high:.5f}"}


def measure_checksum(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The checksum by which ranks notice that their weights differ: alone, and as part of a round.

    Alone it waits for its own kernels to be launched. In a round these are launched while the device still computes,
    and the host waits for the device at the end of every round anyway.
    """
    run = Training(args, device)
    for _ in range(3):
        run.step()
    parameters: list[Tensor] = list(run.model.parameters())
    sums = WeightsSum(lambda: parameters, run.optimizer, Replicas(None))

    def checksum() -> None:
        sums.start()
        sums.read()

    def alone() -> float:
        return timed(checksum)

    def round_s(*, checked: bool) -> float:
        def steps() -> None:
            for _ in range(args.interval):
                run.step()
            if checked:
                sums.start()
            _wait(device)
            if checked:
                sums.read()

        return timed(steps)

    def timed(work: Callable[[], Any]) -> float:
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - started

    seconds = in_turns(
        {"with": lambda: round_s(checked=True), "without": lambda: round_s(checked=False), "alone": alone}, args.rounds
    )
    plain, own = statistics.median(seconds["without"]), statistics.median(seconds["alone"])
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "parameters, M": round(sum(p.numel() for p in parameters) / 1e6, 1),
        "plain step, ms": round(plain / args.interval * 1e3, 2),
        "checksum alone, ms": round(own * 1e3, 3),
        f"its share of a round of {args.interval} steps": round(own / plain, 6),
        **spread_of("round with it / without", ratios),
    }


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _peak(device: str, run: Training) -> int:
    """The most that a round has allocated at any time."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    run.round_s()
    return torch.cuda.max_memory_allocated()


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    for name, default in {
        "layers": 12,
        "width": 768,
        "length": 1024,
        "batch": 8,
        "interval": 20,
        "rounds": 10,
        "variants": 5,
        "warmup": 200,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the large model, default {default}")
    parser.add_argument("--large", action="store_true", help="the large model on the CPU, too: a rehearsal of --cuda")
    parser.add_argument("--processes", action="store_true", help="with --cuda: several processes too: syncs, converges")
    parser.add_argument("--level", action="store_true", help="with the first level, and sizes of updates in each round")
    parser.add_argument("--checksum", action="store_true", help="of the large model, its checksum only")
    args = parser.parse_args()
    device = "cuda" if args.cuda else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if args.checksum:
        found |= {"gpu": torch.cuda.get_device_name()} if args.cuda else {}
        print(json.dumps(found | measure_checksum(args, device)))
        return
    if args.cuda:
        found["gpu"] = torch.cuda.get_device_name()
    if args.cuda and args.processes:
        found["steps between converges without a host synchronisation"] = {
            kind: launch(count_syncs, 2, kind, timeout_s=120)[0] for kind in ("paper", "gradient", "loss")
        }
    if args.cuda or args.large:
        found["large model"] = measure_large(args, device)
        if not args.json:
            print_table(found.pop("large model"))
    for n in (2, 4) if args.processes or not (args.cuda or args.large) else ():
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
    if not args.cuda and not args.large:
        found["converge memory, MB, by model MB"] = {mb: launch(measure_memory, 2, mb)[0] for mb in (40, 400, 2000)}
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
