"""An LSTM in plain tensor operations: torch's own has no batching rule, so ``vmap`` would run it model by model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LSTMLayer(nn.Module):
    """One layer over a sequence, from a state of zeros. The gates are in torch's order: input, forget, cell, output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 4 * width)
        self.recurrent = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (sequences, positions, width); returns the hidden states, of the same shape."""
        gates = self.inputs(x)  # of all positions at once
        hidden = cell = torch.zeros_like(x[:, 0])
        found = []
        for position in range(x.shape[1]):
            mixed = gates[:, position] + self.recurrent(hidden)
            enter, forget, candidate, leave = mixed.chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            found.append(hidden)
        return torch.stack(found, dim=1)


class LSTM(nn.Module):
    """Next-token logits: an embedding, ``num_layers`` LSTM layers, a head.

    Weights are uniform within 1/sqrt(width) as torch has it, biases 0, those of the forget gates 1.
    """

    def __init__(
        self, vocabulary: int, *, width: int = 256, num_layers: int = 1, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LSTMLayer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)
        bound = 1 / math.sqrt(width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_() if parameter.dim() == 1 else parameter.uniform_(-bound, bound, generator=generator)
            self.tokens.weight.normal_(generator=generator)
            for layer in self.layers:
                layer.inputs.bias[width : 2 * width] = 1.0  # type: ignore[union-attr, operator]

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (sequences, positions) of int64; returns (sequences, positions, vocabulary)."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits
