"""A plain multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class MLP(nn.Module):
    """ReLU layers of the given widths and a linear head. He-initialised, biases 0."""

    def __init__(
        self, num_inputs: int, num_outputs: int, *, widths: Sequence[int], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        inputs = [num_inputs, *widths]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(inputs, widths, strict=False))
        self.head = nn.Linear(inputs[-1], num_outputs)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.zero_()
                else:
                    gain = 1 if name == "head.weight" else 2
                    parameter.normal_(0.0, math.sqrt(gain / parameter.shape[1]), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (rows, inputs) of any number type; returns (rows, outputs)."""
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out
