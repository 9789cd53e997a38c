"""Language modelling on text: Python's own standard library, and Shakespeare."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdet_lab.models.gpt import GPT, next_token_loss
from hdet_lab.tasks.base import Batch, decay_groups, random_rows
from hdet_lab.tasks.digest import data_sha256
from hdet_lab.tasks.download import check_sha256, read_or_download

TRAIN_SHARE = 0.9
"""Of a text, from its start; the rest validates."""
STDLIB_BYTES = 4_000_000
# data_sha256 of the task in its default sizes, in the records of the published results (Python 3.12.3).
STDLIB_DATA_SHA256 = "e620ebb7e90080805659d49ddc0fa0630faa635c9af291ad32b8d9225ba5c5cc"
# Tests are not ordinary code, site-packages not Python's own; the other two hold tables and help texts.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class TextTask:
    """A GPT on one long text: the first 90% to train on, ``num_validation`` even samples of the rest to validate.

    Args:
        name: of the task.
        text: one number below ``vocabulary`` for each token.
        vocabulary: how many tokens there are.
        total_steps: default length of a run.
        batch_rows: sequences of a global batch.
        num_validation: sequences of the validation set.
        context, num_layers, width, num_heads: of the model.

    Attributes:
        note: what a reader of the results should know of the text; kept in records, shown on the console.
    """

    note = ""

    def __init__(
        self,
        name: str,
        text: Tensor,
        vocabulary: int,
        *,
        total_steps: int = 2000,
        batch_rows: int = 32,
        num_validation: int = 512,
        context: int = 128,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
    ) -> None:
        split = int(len(text) * TRAIN_SHARE)
        self.num_train = split - context  # starts whose context and target lie in the training part
        if self.num_train < 1 or len(text) - split <= context:
            raise ValueError(f"the text must be longer than {10 * (context + 1)} tokens, but got {len(text)}")
        self.name = name
        self.text = text.to(torch.uint8 if vocabulary <= 256 else torch.int16)
        self.vocabulary = vocabulary
        self.total_steps = total_steps
        self.batch_rows = batch_rows
        self.context = context
        self.sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads}
        self.validation_rows = torch.linspace(
            split, len(text) - context - 1, num_validation, dtype=torch.float64
        ).long()
        self._window = torch.arange(context + 1)

    def to(self, device: torch.device | str) -> TextTask:
        self.text, self._window = self.text.to(device), self._window.to(device)
        return self

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return GPT(self.vocabulary, context=self.context, generator=generator, **self.sizes)

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """``decay``: matrices; ``no_decay``: the weights of the norms."""
        return decay_groups(model)

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return random_rows(self.num_train, self.batch_rows, seed=seed, step=step)

    def gather(self, rows: Tensor) -> Batch:
        """A row is where a sequence starts."""
        return (self.text[rows.to(self.text.device).unsqueeze(-1) + self._window].long(),)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return next_token_loss(model, *batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        parts = torch.split(self.validation_rows, 64)
        losses = torch.stack([self.loss(model, self.gather(rows)) * len(rows) for rows in parts])
        return {"loss": losses.sum().item() / len(self.validation_rows)}


def stdlib_gpt(folder: str | Path | None = None, *, max_bytes: int = STDLIB_BYTES, **sizes: int) -> TextTask:
    """Byte-level GPT on the source of Python's standard library, which every machine has.

    Args:
        folder: where the library is; default that of the running interpreter. The text depends on its version: the
            task's ``note`` says so where it is not that of the published results.
        max_bytes: the text ends here, in the middle of a file if need be. Only the default has published results.
        **sizes: as in :class:`TextTask`.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(_sources(root)):
        if len(text) < max_bytes:
            text += (root / path).read_bytes()
    if not text:
        raise FileNotFoundError(f"no Python source in {root}; this Python is installed without its library's source")
    task = TextTask("stdlib-gpt", torch.frombuffer(text[:max_bytes], dtype=torch.uint8), 256, **sizes)
    if max_bytes == STDLIB_BYTES and not _is_published(task.text):
        task.note = (
            f"stdlib-gpt reads the standard library of this machine, whose text (SHA-256 "
            f"{hashlib.sha256(text[:max_bytes]).hexdigest()}) is not that of the published results: losses do not "
            "compare with theirs; code-gpt has the same text on every machine"
        )
    return task


def _is_published(text: Tensor) -> bool:
    return len(text) == STDLIB_BYTES and data_sha256(TextTask("stdlib-gpt", text, 256)) == STDLIB_DATA_SHA256


def _sources(root: Path) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = set(below) - SKIPPED_FOLDERS  # not entered: site-packages may hold tens of thousands of files
        for name in files:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def read_shakespeare(data: str | Path, *, sha256: str | None = SHAKESPEARE_SHA256, download: bool = True) -> bytes:
    """The bytes of ``tinyshakespeare/input.txt`` below ``data``; fetched and checked as in :func:`shakespeare_gpt`."""
    path = Path(data) / "tinyshakespeare" / "input.txt"
    text = read_or_download(path, SHAKESPEARE_URL, download=download)
    check_sha256(text, sha256, path)
    return text


def characters(text: bytes) -> tuple[Tensor, int]:
    """Each byte's number among the different bytes of ``text``, and how many there are."""
    found, tokens = np.unique(np.frombuffer(text, dtype=np.uint8), return_inverse=True)
    return torch.from_numpy(tokens), len(found)


def shakespeare_gpt(
    data: str | Path = "data",
    *,
    sha256: str | None = SHAKESPEARE_SHA256,
    download: bool = True,
    name: str = "shakespeare-gpt",
    **sizes: int,
) -> TextTask:
    """Character-level GPT on tinyshakespeare, 0.8M parameters.

    Args:
        data: folder that holds, or receives, ``tinyshakespeare/input.txt``.
        sha256: what the file must hash to; None skips the check.
        download: fetch the file from its origin where it is missing.
        name: of the task.
        **sizes: as in :class:`TextTask`.
    """
    tokens, vocabulary = characters(read_shakespeare(data, sha256=sha256, download=download))
    return TextTask(name, tokens, vocabulary, **sizes)


def shakespeare_gpt_10m(data: str | Path = "data", **options: Any) -> TextTask:
    """:func:`shakespeare_gpt` with a model of 10.8M parameters and a context of 256."""
    sizes = {"num_layers": 6, "width": 384, "num_heads": 6, "context": 256}
    return shakespeare_gpt(data, name="shakespeare-gpt-10m", **{**sizes, **options})
