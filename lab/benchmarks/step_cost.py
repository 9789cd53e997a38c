"""What AutoLR costs a step: a GPT of 124M parameters under the plain schedule, with the gradient and the loss signal.

    python lab/benchmarks/step_cost.py                       # on a GPU: bf16, fused AdamW, 8 sequences of 1024 tokens
    python lab/benchmarks/step_cost.py --compile             # the model compiled; counts compiled graphs
    python lab/benchmarks/step_cost.py --layers 2 --width 64 --context 64 --device cpu

Variants take turns within one process, so that their ratio does not depend on a moment of the machine. The loss signal
needs replicas: two processes share the device, each with its own gradient, and their converge is timed by itself
against one raw all-reduce of the same bytes. Memory is what a variant adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR, Ensemble, Faults
from hdet.launch import launch
from hdet_lab.models.gpt import GPT, Attention, next_token_loss

INTERVAL = 20


class FusedAttention(Attention):
    """The lab's attention on torch's fused kernel: what a user would train with."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        sequences, positions, width = x.shape
        heads = self.qkv(x).view(sequences, positions, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(sequences, positions, width))
        return out


class Trainer:
    """A model, its optimizer and its schedule, on random tokens."""

    def __init__(self, shape: dict[str, int], device: str, wrap: Callable[[Any], Any] | None) -> None:
        vocabulary, self.batch, self.device = shape["vocabulary"], shape["batch"], device
        self.model = GPT(
            vocabulary,
            context=shape["context"],
            num_layers=shape["num_layers"],
            width=shape["width"],
            num_heads=shape["num_heads"],
        ).to(device)
        self.model.head.weight = self.model.tokens.weight  # as in GPT-2: 124M parameters
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.__class__ = FusedAttention
        fused = device.startswith("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)
        schedule = OneCycleLR(self.optimizer, 3e-4, 100_000)
        self.scheduler: Any = wrap(schedule) if wrap else schedule
        self.plain = wrap is None
        self.forward: Any = torch.compile(self.model) if shape["compile"] else self.model
        self.tokens = torch.randint(vocabulary, (self.batch, shape["context"] + 1), device=device)

    def step(self) -> None:
        with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16):
            loss = next_token_loss(self.forward, self.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step() if self.plain else self.scheduler.step(loss)
        self.optimizer.zero_grad()


def measure(shape: dict[str, int], device: str, rounds: int, variants: list[str]) -> dict[str, Any]:
    """Median seconds of a round of INTERVAL steps of each variant, its converge included, and what memory it adds."""
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    wraps: dict[str, Callable[[Any], Any] | None] = {
        "plain": None,
        "gradient": lambda s: AutoLR(s, interval=INTERVAL, faults=Faults(max_rollbacks=0)),
        "gradient + rollback": lambda s: AutoLR(s, interval=INTERVAL),
        "gradient, T = 200": lambda s: AutoLR(s, interval=200, faults=Faults(max_rollbacks=0)),
        "loss": lambda s: AutoLR(s, ensemble=Ensemble(spread=0.1), interval=10**6, faults=Faults(max_rollbacks=0)),
    }
    trainers, memory, graphs = {}, {}, {}
    for name in variants:
        before, compiled = _allocated(device), _num_graphs()
        trainers[name] = Trainer(shape, device, wraps[name])
        for _ in range(2 * INTERVAL + 1):
            trainers[name].step()
        memory[name], graphs[name] = _allocated(device) - before, _num_graphs() - compiled
    compiled = _num_graphs()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            _wait(device)
            started = time.perf_counter()
            for _ in range(INTERVAL):
                trainer.step()
            _wait(device)
            seconds[name].append(time.perf_counter() - started)
    converge = _measure_converge(trainers["loss"], device) if "loss" in trainers else {}
    base = statistics.median(seconds["plain"])
    num_parameters = sum(p.numel() for p in trainers["plain"].model.parameters())
    return {
        **converge,
        "parameters": num_parameters,
        "plain, ms a step": round(base / INTERVAL * 1e3, 2),
        "tokens a second": {
            name: round(INTERVAL * trainers[name].tokens[:, 1:].numel() / statistics.median(times))
            for name, times in seconds.items()
        },
        "compiled graphs, at first": graphs,
        "compiled graphs, later": _num_graphs() - compiled,
        "ratio": {
            name: round(statistics.median(b / a for a, b in zip(seconds["plain"], times, strict=True)), 4)
            for name, times in seconds.items()
        },
        "memory added, in bytes a parameter": {
            name: round((used - memory["plain"]) / num_parameters, 2) for name, used in memory.items()
        },
    }


def _measure_converge(trainer: Trainer, device: str) -> dict[str, float]:
    flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    seconds: dict[str, list[float]] = {"raw": [], "ours": []}
    for _ in range(3):
        for name, run in (("raw", lambda: dist.all_reduce(flat)), ("ours", trainer.scheduler.converge)):
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            seconds[name].append(time.perf_counter() - started)
    ours, raw = (statistics.median(seconds[name]) for name in ("ours", "raw"))
    return {"converge, s": round(ours, 3), "raw all-reduce, s": round(raw, 3), "converge / raw": round(ours / raw, 2)}


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _allocated(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def make_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """With the sizes of the model, by default those of 124M parameters."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def shape_of(args: argparse.Namespace, *, compiled: bool = False) -> dict[str, int]:
    """What the arguments of :func:`make_parser` say of the model."""
    return {
        "num_layers": args.layers, "width": args.width, "num_heads": args.heads, "context": args.context,
        "vocabulary": args.vocabulary, "batch": args.batch, "compile": int(compiled),
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    shape = shape_of(args, compiled=args.compile)
    one = measure(shape, args.device, args.rounds, ["plain", "gradient", "gradient + rollback", "gradient, T = 200"])
    print("one process:", json.dumps(one), flush=True)
    if args.compile:
        return
    two = launch(measure, 2, shape, args.device, args.rounds, ["plain", "loss"], timeout_s=300)[0]
    print("two processes:", json.dumps(two))


if __name__ == "__main__":
    main()
