"""Language modelling on Shakespeare with an LSTM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hdet_lab.models.lstm import LSTM
from hdet_lab.tasks.text import SHAKESPEARE_SHA256, TextTask, characters, read_shakespeare


class LSTMTask(TextTask):
    """:class:`TextTask` with an LSTM; every sequence starts from a state of zeros."""

    def __init__(
        self,
        name: str,
        text: Tensor,
        vocabulary: int,
        *,
        context: int = 64,
        num_layers: int = 1,
        width: int = 256,
        total_steps: int = 2000,
        batch_rows: int = 32,
        num_validation: int = 512,
    ) -> None:
        super().__init__(
            name,
            text,
            vocabulary,
            context=context,
            total_steps=total_steps,
            batch_rows=batch_rows,
            num_validation=num_validation,
        )
        self.sizes = {"num_layers": num_layers, "width": width}

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return LSTM(self.vocabulary, generator=generator, **self.sizes)


def shakespeare_lstm(
    data: str | Path = "data", *, sha256: str | None = SHAKESPEARE_SHA256, download: bool = True, **sizes: int
) -> TextTask:
    """Character-level LSTM on tinyshakespeare, 0.6M parameters.

    Args:
        data: folder that holds, or receives, ``tinyshakespeare/input.txt``.
        sha256: what the file must hash to; None skips the check.
        download: fetch the file from its origin where it is missing.
        **sizes: as in :class:`LSTMTask`.
    """
    text, vocabulary = characters(read_shakespeare(data, sha256=sha256, download=download))
    return LSTMTask("lstm", text, vocabulary, **sizes)
