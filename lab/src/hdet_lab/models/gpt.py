"""A small pre-norm GPT, written so that many copies of it run as one batched computation.

No dropout, no data-dependent control flow and no fused module that ``torch.func.vmap`` would unroll: every operation
maps to one batched kernel when the parameters carry a leading model axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention under a mask.

    Attributes:
        temperature: what attention scores are divided by, beside the square root of the heads' width.
        normalise: whether queries and keys have unit variance; only then is the temperature more than a scale of
            weights.
    """

    def __init__(self, width: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"num_heads ({num_heads}) must divide width ({width})")
        self.num_heads = num_heads
        self.temperature = 1.0
        self.normalise = False
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x``: (sequences, positions, width). ``mask``: added to the scores, -inf where a query may not see a key."""
        sequences, positions, width = x.shape
        heads = self.qkv(x).view(sequences, positions, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        # Spelled out: the fused attention kernels have no batching rule, so vmap would run them model by model.
        if self.normalise:
            query, key = (F.normalize(heads, dim=-1) * query.shape[-1] ** 0.5 for heads in (query, key))
        scores = (query * (1 / (math.sqrt(query.shape[-1]) * self.temperature))) @ key.transpose(-1, -2)
        weights = (scores + mask).softmax(-1)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).reshape(sequences, positions, width))
        return mixed


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, num_heads, bias=bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), mask)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """Next-token logits: token and position embeddings, ``num_layers`` blocks, an untied head.

    Norms are LayerNorm with a weight and no bias. Weights are normal(0.02), those that write into the residual stream
    scaled by 1/sqrt(2 layers). The default is 0.8M parameters.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int = 128,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        init_normal(self, num_layers, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (sequences, positions) of int64; returns (sequences, positions, vocabulary)."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions[:length]
        causal = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, causal)
        logits: Tensor = self.head(self.norm(x))
        return logits


def init_normal(model: nn.Module, num_layers: int, generator: torch.Generator | None) -> None:
    """GPT-2's initialisation, from a private generator where one is given."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = name.endswith(("attention.out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * num_layers) if residual else 0.02
                parameter.normal_(0.0, std, generator=generator)


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token of (sequences, context + 1) given those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
