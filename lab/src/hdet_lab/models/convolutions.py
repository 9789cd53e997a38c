"""Convolutions along one axis: a causal stack for sounds and series, and a circular one for fields on a ring."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.initial import lecun_normal


class CausalStack(nn.Module):
    """Residual convolutions of two places, 1, 2, 4, ... apart, each behind a LayerNorm. No place sees a later one."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.inner = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(num_layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (rows, places, width)."""
        for layer, (norm, inner, outer) in enumerate(zip(self.norms, self.inner, self.outer, strict=True)):
            now = norm(x)
            before = F.pad(now, (0, 0, 2**layer, 0))[:, : now.shape[1]]
            value, gate = inner(torch.cat([before, now], dim=-1)).chunk(2, dim=-1)
            x = x + outer(value.tanh() * gate.sigmoid())
        return x


class WaveNet(nn.Module):
    """Next-sample logits of sound: an embedding, a :class:`CausalStack`, a head. 0.1M parameters by default."""

    def __init__(
        self, vocabulary: int, *, width: int = 48, num_layers: int = 8, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.stack = CausalStack(width, num_layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        lecun_normal(self, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (rows, places); returns (rows, places, vocabulary)."""
        logits: Tensor = self.head(self.norm(self.stack(self.tokens(tokens))))
        return logits


class SeriesNet(nn.Module):
    """One number from the end of a series of several measurements, taken as they are."""

    def __init__(
        self, num_inputs: int, *, width: int = 48, num_layers: int = 5, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.inputs = nn.Linear(num_inputs, width)
        self.stack = CausalStack(width, num_layers)
        self.head = nn.Linear(width, 1)
        lecun_normal(self, generator)

    def forward(self, series: Tensor) -> Tensor:
        """``series``: (rows, hours, inputs); returns (rows,)."""
        out: Tensor = self.head(self.stack(self.inputs(series))[:, -1])
        return out.squeeze(-1)


class RingNet(nn.Module):
    """A field on a ring from another: circular convolutions of five places, 1, 2, 4, ... apart, with shortcuts."""

    def __init__(self, *, width: int = 48, num_layers: int = 5, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.inputs = nn.Linear(1, width)
        self.inner = nn.ModuleList(nn.Linear(5 * width, width) for _ in range(num_layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)
        lecun_normal(self, generator)

    def forward(self, field: Tensor) -> Tensor:
        """``field``: (rows, places)."""
        x = self.inputs(field.unsqueeze(-1))
        for layer, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            around = torch.cat([x.roll(shift * 2**layer, 1) for shift in (-2, -1, 0, 1, 2)], dim=-1)
            x = x + outer(F.gelu(inner(around)))
        out: Tensor = self.head(x)
        return out.squeeze(-1)
