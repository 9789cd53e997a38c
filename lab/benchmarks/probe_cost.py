"""What a probe costs a step: AutoLR without one, with ``probe=`` and with ``weight_decay="learn"``, on one model.

    python lab/benchmarks/probe_cost.py  # on a GPU: 124M parameters, bf16, fused AdamW; the next has 11M
    python lab/benchmarks/probe_cost.py --layers 6 --width 384 --heads 6 --vocabulary 256 --context 256 --batch 64
    python lab/benchmarks/probe_cost.py --layers 2 --width 64 --heads 2 --context 64 --vocabulary 65 --device cpu

A probe has as many sequences as a step of training. Variants take turns within one process, as long as two probes are
apart; the ratio of every turn to the plain schedule's is kept, and the medians are told. Rollback is off in all,
whose copies are timed by ``overhead.py``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hdet import AutoLR, Faults, __version__
from hdet.signals.held_out import PROBE_EVERY
from hdet_lab.models.gpt import next_token_loss
from hdet_lab.runs import provenance
from step_cost import Trainer, _allocated, _wait, make_parser, shape_of

VARIANTS: dict[str, dict[str, Any]] = {
    "gradient": {},
    "gradient + probe": {"probe": True},
    "gradient + probe + weight decay": {"probe": True, "weight_decay": "learn"},
}


class Probed(Trainer):
    """A trainer whose AutoLR may have a probe, of tokens of its own."""

    def __init__(self, shape: dict[str, int], device: str, given: dict[str, Any]) -> None:
        def wrap(schedule: Any) -> AutoLR:
            options = {**given, "model": self.model, "probe": self.probe} if "probe" in given else given
            return AutoLR(schedule, interval=PROBE_EVERY, faults=Faults(max_rollbacks=0), **options)

        super().__init__(shape, device, wrap)
        self.unseen = torch.randint(shape["vocabulary"], self.tokens.shape, device=device)

    def probe(self) -> torch.Tensor:
        with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16):
            return next_token_loss(self.forward, self.unseen)


def measure(shape: dict[str, int], device: str, rounds: int) -> dict[str, Any]:
    makers: dict[str, Callable[[], Trainer]] = {"plain": lambda: Trainer(shape, device, None)}
    for name, given in VARIANTS.items():
        makers[name] = lambda given=given: Probed(shape, device, given)  # type: ignore[misc]
    trainers, memory = {}, {}
    for name, make in makers.items():
        before = _allocated(device)
        trainers[name] = make()
        for _ in range(6 * PROBE_EVERY):
            trainers[name].step()
        memory[name] = _allocated(device) - before
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            _wait(device)
            started = time.perf_counter()
            for _ in range(PROBE_EVERY):
                trainer.step()
            _wait(device)
            seconds[name].append(time.perf_counter() - started)
    size = sum(p.numel() for p in trainers["plain"].model.parameters())

    def ratios(base: str) -> dict[str, list[float]]:
        pairs = {name: zip(seconds[base], times, strict=True) for name, times in seconds.items()}
        found = {name: sorted(b / a for a, b in both) for name, both in pairs.items()}
        return {name: [round(x, 4) for x in (statistics.median(r), r[0], r[-1])] for name, r in found.items()}

    return {
        "parameters": size,
        "plain, ms a step": round(statistics.median(seconds["plain"]) / PROBE_EVERY * 1e3, 3),
        "over plain: median, least, most": ratios("plain"),
        "over gradient: median, least, most": ratios("gradient"),
        "memory added, in bytes a parameter": {n: round((m - memory["plain"]) / size, 2) for n, m in memory.items()},
    }


def main() -> None:
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    shape = shape_of(args)
    facts = {"hdet": __version__, "git_commit": provenance.git_commit(), "torch": torch.__version__}
    record = {
        "settings": {**shape, "rounds": args.rounds, "probe_every": PROBE_EVERY, "device": args.device},
        "provenance": {**facts, "hardware": provenance.hardware()},
        "found": measure(shape, args.device, args.rounds),
    }
    print(json.dumps(record["found"], indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
