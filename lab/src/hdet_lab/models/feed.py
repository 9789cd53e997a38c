"""The ranking model of the feed: embeddings, a transformer over the user's history, an MLP."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.gpt import Block, init_normal


class FeedModel(nn.Module):
    """One logit per label for a shown video.

    The candidate joins the history as its last token, so that attention compares it with what was watched before.
    """

    def __init__(
        self,
        *,
        num_items: int,
        num_fields: int,
        num_values: int,
        num_labels: int,
        history: int,
        width: int,
        num_layers: int,
        num_heads: int,
        field_width: int,
        hidden: int = 128,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items + 1, width)  # one more for padding
        self.behaviours = nn.Embedding(4, width)
        self.fields = nn.Embedding(num_values, field_width)
        self.positions = nn.Parameter(torch.empty(history + 1, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, bias=True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(2 * width + num_fields * field_width, hidden)
        self.mlp_mid = nn.Linear(hidden, hidden // 2)
        self.mlp_out = nn.Linear(hidden // 2, num_labels)
        init_normal(self, num_layers, generator)
        with torch.no_grad():
            for layer in (self.mlp_in, self.mlp_mid, self.mlp_out):
                layer.weight.normal_(0.0, 1 / math.sqrt(layer.in_features), generator=generator)

    def forward(self, fields: Tensor, item: Tensor, past: Tensor, behaviour: Tensor) -> Tensor:
        """``fields``: (rows, fields); ``item``: (rows,); ``past``, ``behaviour``: (rows, history)."""
        item = item.unsqueeze(1)
        behaviour = torch.cat([behaviour, torch.zeros_like(item)], dim=1)
        items = self.items(torch.cat([past, item], dim=1))
        x = items + self.behaviours(behaviour) + self.positions
        hidden = (behaviour == 0) & (torch.arange(behaviour.shape[1], device=x.device) < past.shape[1])
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -torch.inf)[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        features = torch.cat([self.norm(x[:, -1]), items[:, -1], self.fields(fields).flatten(1)], dim=1)
        logits: Tensor = self.mlp_out(F.relu(self.mlp_mid(F.relu(self.mlp_in(features)))))
        return logits
