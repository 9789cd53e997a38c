"""Fashion-MNIST with a vision transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdet_lab.models.vit import ViT
from hdet_lab.tasks.fashion import NUM_CLASSES, FashionTask


class FashionViTTask(FashionTask):
    """:class:`FashionTask` with a small ViT and no BatchNorm.

    Args:
        data: folder that holds, or receives, ``fashion-mnist/``.
        num_layers, width, num_heads: of the model.
        **options: as in :class:`FashionTask`.
    """

    def __init__(
        self, data: str | Path = "data", *, num_layers: int = 3, width: int = 96, num_heads: int = 4, **options: Any
    ) -> None:
        super().__init__(data, name="fashion-vit", **options)
        self.sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads}

    def build(self, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers initialise themselves first
            return ViT(NUM_CLASSES, generator=generator, **self.sizes)
