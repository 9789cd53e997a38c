"""Which models are large: by default they keep less on their device, and look at their gradients less often."""

from __future__ import annotations

from torch.optim import Optimizer

from hdet.replicas.sharding import num_shards, sharding

LARGE_MODEL = 10_000_000
"""Parameters above which a model is large."""


def num_parameters(optimizer: Optimizer, *, whole: bool = False) -> float:
    """Of a rank's even share, which is the same on all ranks where their own differ; or of the ``whole`` model."""
    total = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            found = sharding(p)
            size = p.numel() if found is None else found.shape.numel()
            total += size if whole else size / num_shards(p)
    return total
