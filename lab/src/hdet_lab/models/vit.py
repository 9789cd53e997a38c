"""A small vision transformer for grey images, of the GPT's blocks without their causal mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hdet_lab.models.gpt import Block, init_normal
from hdet_lab.models.resnet import MEAN, STD


class ViT(nn.Module):
    """Class logits of square grey images: an embedding of each patch, blocks, a mean over patches, a head.

    Initialised like the GPT, patch embedding and head by their number of inputs. The default is 0.34M parameters.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        size: int = 28,
        patch: int = 4,
        num_layers: int = 3,
        width: int = 96,
        num_heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"patch ({patch}) must divide the size of the images ({size})")
        self.patch = patch
        self.embed = nn.Linear(patch**2, width)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, bias=True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        init_normal(self, num_layers, generator)
        with torch.no_grad():
            for layer in (self.embed, self.head):
                layer.weight.normal_(0.0, 1 / math.sqrt(layer.in_features), generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """``images``: (rows, height, width) of bytes; returns (rows, classes)."""
        x = (images.to(self.embed.weight.dtype) / 255 - MEAN) / STD
        x = self.embed(patches(x, self.patch)) + self.positions
        seen = x.new_zeros(())  # every patch sees every other
        for block in self.blocks:
            x = block(x, seen)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def patches(images: Tensor, size: int) -> Tensor:
    """(rows, height, width) to (rows, patches, pixels of a patch), line by line."""
    rows, height, width = images.shape
    cut = images.view(rows, height // size, size, width // size, size)
    return cut.transpose(2, 3).reshape(rows, -1, size**2)
