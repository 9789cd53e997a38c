"""A small ResNet with BatchNorm for grey or coloured images, whose many copies run as one batched computation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's training pixels, in [0, 1]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, the first of stride 2, beside a 1x1 convolution of stride 2."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(num_inputs, width, 3, stride=2, padding=1, bias=False)
        self.norm_in = nn.BatchNorm2d(width)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_out = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(num_inputs, width, 1, stride=2, bias=False)
        self.norm_shortcut = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_in(self.conv_in(x)))
        return F.relu(self.norm_out(self.conv_out(inner)) + self.norm_shortcut(self.shortcut(x)))


class ResNet(nn.Module):
    """Class logits of square images: a 3x3 convolution, one block for each width, a mean over places, a head.

    Convolutions and head are He-initialised. The default is 0.22M parameters.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        widths: Sequence[int] = (32, 64, 96),
        num_colours: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(num_colours, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        inputs = [widths[0], *widths]
        self.blocks = nn.ModuleList(ResidualBlock(a, b) for a, b in zip(inputs, widths, strict=False))
        self.head = nn.Linear(widths[-1], num_classes)
        with torch.no_grad():
            self.head.bias.zero_()
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    num_inputs = parameter[0].numel()
                    gain = 1 if parameter is self.head.weight else 2
                    parameter.normal_(0.0, math.sqrt(gain / num_inputs), generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """``images``: (rows, height, width) of bytes, or (rows, height, width, colours); returns (rows, classes)."""
        images = images.unsqueeze(-1) if images.dim() == 3 else images
        x = (images.movedim(-1, 1).to(self.stem.weight.dtype) / 255 - MEAN) / STD
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
