"""A small GPT pre-trained on Python source: trained once, then kept in the data folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import OneCycleLR

from hdet.notices import tell
from hdet_lab.tasks.base import batch_of
from hdet_lab.tasks.digest import data_sha256
from hdet_lab.tasks.download import make_writable
from hdet_lab.tasks.text import TextTask


@dataclass(frozen=True)
class Pretraining:
    """How a model is pre-trained: with Adam on a one-cycle schedule.

    Attributes:
        steps: of the optimizer.
        lr: peak of the schedule.
        seed: of weights and data order.
    """

    steps: int = 1000
    lr: float = 3e-3
    seed: int = 0


def pretrained(data: str | Path, source: TextTask, how: Pretraining) -> Tensor:
    """The parameters of ``source``'s model after pre-training, as one vector.

    They are kept in ``<data>/pretrained/``, in a file whose name has the task, the number of steps, a hash of all
    settings and the text, and one of the weights: training again on other hardware gives slightly other weights.
    """
    folder = Path(data) / "pretrained"
    stem = f"{source.name}-{how.steps}-{_settings_hash(source, how)}"
    files = sorted(folder.glob(f"{stem}-*.pt"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} must hold one model pre-trained with the same settings, but has {names}; keep one")
    if files:
        return _load(files[0])
    tell(f"pre-trains a GPT on {source.name}, {how.steps} steps; kept in {folder} for the next time")
    make_writable(folder)  # before minutes are spent
    vector = pretrain(source, how)
    path = folder / f"{stem}-{_hash(vector)}.pt"
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(vector, part)
    part.replace(path)  # no process ever reads half of it
    return vector


def pretrain(source: TextTask, how: Pretraining) -> Tensor:
    """Train the model of ``source``, on a GPU where there is one; returns its parameters as a vector on the host."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source.to(device)
    model = source.build(how.seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=how.lr, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, how.lr, how.steps, pct_start=0.1, cycle_momentum=False)
    for step in range(how.steps):
        optimizer.zero_grad()
        source.loss(model, batch_of(source, step, seed=how.seed)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return parameters_to_vector(model.parameters()).detach().cpu()


def _load(path: Path) -> Tensor:
    vector: Tensor = torch.load(path, weights_only=True)
    expected, found = path.stem.rpartition("-")[2], _hash(vector)
    if found != expected:
        raise ValueError(f"the weights in {path} must have the hash in its name, but got {found}; delete it")
    return vector


def _settings_hash(source: TextTask, how: Pretraining) -> str:
    settings = {**asdict(how), **source.sizes, "context": source.context, "batch_rows": source.batch_rows}
    text = json.dumps({**settings, "data_sha256": data_sha256(source)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _hash(vector: Tensor) -> str:
    return hashlib.sha256(vector.numpy().astype("<f4").tobytes()).hexdigest()[:12]
