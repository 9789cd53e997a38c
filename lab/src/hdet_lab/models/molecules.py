"""Messages along the bonds of molecules."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.initial import lecun_normal


class MessageNet(nn.Module):
    """The kind of each atom from its neighbours: in each layer an atom adds what its bonds bring, a matrix a kind."""

    def __init__(
        self,
        num_atoms: int,
        num_bonds: int,
        *,
        width: int = 96,
        num_layers: int = 3,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.num_bonds = num_bonds
        self.tokens = nn.Embedding(num_atoms, width)
        self.messages = nn.ModuleList(nn.Linear(width, num_bonds * width, bias=False) for _ in range(num_layers))
        self.updates = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_atoms)
        lecun_normal(self, generator)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        """``atoms``: (rows, places); ``bonds``: (rows, places, places), 0 for none; returns (rows, places, kinds)."""
        x = self.tokens(atoms)
        kinds = torch.arange(1, self.num_bonds + 1, device=bonds.device)
        links = (bonds.unsqueeze(1) == kinds[:, None, None]).to(x.dtype)  # (rows, kinds, places, places)
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = message(norm(x)).unflatten(-1, (self.num_bonds, -1)).transpose(1, 2)
            x = x + update(F.relu((links @ sent).sum(1)))
        logits: Tensor = self.head(x)
        return logits
