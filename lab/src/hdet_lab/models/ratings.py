"""Ratings from who gives them and what is rated."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.initial import lecun_normal


class RatingNet(nn.Module):
    """Embeddings of user and film, their product, and a hidden layer."""

    def __init__(
        self, num_users: int, num_films: int, *, width: int = 32, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, width)
        self.items = nn.Embedding(num_films, width)
        self.hidden = nn.Linear(3 * width, 2 * width)
        self.head = nn.Linear(2 * width, 1)
        lecun_normal(self, generator)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        """Both (rows,); returns (rows,)."""
        user, film = self.users(users), self.items(films)
        out: Tensor = self.head(F.relu(self.hidden(torch.cat([user, film, user * film], dim=-1))))
        return out.squeeze(-1)
