"""Fashion-MNIST with a wide perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet_lab.models.mlp import MLP
from hdet_lab.tasks.fashion import NUM_CLASSES, FashionTask


class FashionWideTask(FashionTask):
    """:class:`FashionTask` with an MLP of 5.8M parameters: the wider, the smaller the learning rate.

    Args:
        data: folder that holds, or receives, ``fashion-mnist/``.
        widths: of the hidden layers.
        **options: as in :class:`FashionTask`.
    """

    def __init__(self, data: str | Path = "data", *, widths: Sequence[int] = (2048, 2048), **options: Any) -> None:
        super().__init__(data, name="fashion-wide", widths=widths, **options)

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return PixelMLP(self.pixels[0].numel(), NUM_CLASSES, widths=self.widths, generator=generator)


class PixelMLP(MLP):
    """Images of bytes, from 0 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (rows, height, width)."""
        return super().forward(x.flatten(1) / 255)
