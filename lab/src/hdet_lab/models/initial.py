"""Initial weights from a private generator."""

from __future__ import annotations

import math

import torch
from torch import nn


def lecun_normal(model: nn.Module, generator: torch.Generator | None) -> None:
    """Matrices normal with variance 1 / inputs, embeddings normal(0, 0.1), norms 1, biases 0."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 0.1, generator=generator)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                num_inputs = module.weight[0].numel()
                module.weight.normal_(0.0, 1 / math.sqrt(num_inputs), generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
