"""What held_out.py trains on: rows to train on, to probe and to test, and a model that can learn them by heart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.gpt import GPT
from hdet_lab.models.mlp import MLP
from hdet_lab.tasks.fashion import read_idx
from hdet_lab.tasks.tabular import read_table

SPLITS = ("train", "held_out", "test")


@dataclass(frozen=True)
class Data:
    """Inputs and targets of rows to train on, to probe and to test; a model, and the loss of its outputs."""

    rows: dict[str, tuple[Tensor, Tensor]]
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    steps: int

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in SPLITS:
            for tensor in self.rows[name]:
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def images(data: Path, size: int) -> Data:
    """Fashion-MNIST at 14 by 14: so many pictures to train on, 2,000 to probe, 10,000 to test."""
    folder, kinds = data / "fashion-mnist", ("images-idx3-ubyte", "labels-idx1-ubyte")
    seen, labels, unseen, other = (
        read_idx(folder, f"{part}-{kind}", check=True, download=True) for part in ("train", "t10k") for kind in kinds
    )
    seen, unseen = (
        F.avg_pool2d((each.float() / 255 - 0.286)[:, None] / 0.353, 2).flatten(1) for each in (seen, unseen)
    )
    rows = {
        "train": (seen[:size], labels[:size].long()),
        "held_out": (seen[-2000:], labels[-2000:].long()),
        "test": (unseen, other.long()),
    }
    return Data(rows, lambda: MLP(196, 10, widths=(128, 128)), cross_entropy, 64, 1500)


def text(data: Path, size: int) -> Data:
    """A tenth of tinyshakespeare's characters to train on, the next twentieth to probe, the last tenth to test."""
    letters = (data / "tinyshakespeare" / "input.txt").read_text()
    alphabet = {letter: index for index, letter in enumerate(sorted(set(letters)))}
    tokens, context = torch.tensor([alphabet[letter] for letter in letters]), 48
    tenth = len(tokens) // 10

    def windows(part: Tensor, every: int) -> tuple[Tensor, Tensor]:
        found = part.unfold(0, context + 1, every)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    rows = {
        "train": windows(tokens[:tenth], 1),
        "held_out": windows(tokens[tenth : tenth + tenth // 2], 8),
        "test": windows(tokens[-tenth:], context),
    }
    return Data(
        rows, lambda: GPT(len(alphabet), context=context, num_layers=4, width=192), cross_entropy, batch=64, steps=1000
    )


def table(data: Path, size: int) -> Data:
    """The diabetes table that scikit-learn ships: 222 rows to train on, 110 to probe, 110 to test."""
    x, y = (torch.from_numpy(read_table(data, f"diabetes_{name}.csv.gz")) for name in ("data_raw", "target"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x, y = (x - x[:222].mean(0)) / x[:222].std(0), ((y - y[:222].mean()) / y[:222].std())[:, None]
    ends = {"train": slice(222), "held_out": slice(222, 332), "test": slice(332, None)}
    rows = {name: (x[part], y[part]) for name, part in ends.items()}
    return Data(rows, lambda: MLP(10, 1, widths=(64, 64)), F.mse_loss, 32, 1500)


def digits(data: Path, size: int) -> Data:
    """Handwritten digits of 8 by 8 pixels, which scikit-learn ships too: 600 to train on, 300 to probe, 897 to test."""
    found = torch.from_numpy(read_table(data, "digits.csv.gz", delimiter=","))
    found = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
    x, y = found[:, :-1] / 8 - 1, found[:, -1].long()
    ends = {"train": slice(600), "held_out": slice(600, 900), "test": slice(900, None)}
    return Data({name: (x[part], y[part]) for name, part in ends.items()}, lambda: MLP(64, 10, widths=(128, 128)),
                cross_entropy, 64, 1500)  # fmt: skip


TASKS = {"images": images, "text": text, "table": table, "digits": digits}
