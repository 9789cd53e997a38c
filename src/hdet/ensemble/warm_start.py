"""Warm noisy start: every replica begins at its own point around a checkpoint (Eq. 10)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet.checks import as_int, number, require, shown
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import sharding


@torch.no_grad()
def warm_noisy_init(
    model: nn.Module,
    nu: float = 0.01,
    *,
    scope: Literal["tensor", "model"] = "tensor",
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    filter: Callable[[str], bool] | None = None,  # noqa: A002
) -> None:
    r"""Add to every trainable parameter noise of its own size, different on each replica.

    .. math:: \theta_r \leftarrow \theta_0 + \epsilon, \quad \epsilon \sim N(0, \nu^2 \|\theta_0\|^2 / d) \quad (10)

    The noise of a replica depends on the seed, the replica and the parameter's name alone: it is reproducible, and the
    global random state is not touched. Buffers, integer tensors and frozen parameters stay as they are (frozen ones
    are not averaged either, so noise in them would stay). Call it after DDP has wrapped the model: DDP's constructor
    overwrites all replicas with rank 0's weights.

    Args:
        model: wrapped in DDP, or bare.
        nu: size of the noise relative to the weights, >= 0.
        scope: norm and size d of each ``"tensor"`` by itself, or of the whole ``"model"`` (as the equation is printed).
        seed: of the noise, >= 0.
        process_group: the ranks that hold replicas; default all.
        filter: takes a parameter's name (without DDP's ``module.``) and returns whether it gets noise; default all do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but got {type(model).__name__}")
    require(number(nu) >= 0, "nu", "a finite number >= 0", nu)
    if nu > 1000:
        raise ValueError(f"nu must be at most 1000, a thousand times the size of the weights, but got nu={nu!r}")
    require(isinstance(scope, str) and scope in ("tensor", "model"), "scope", '"tensor" or "model"', scope)
    require(as_int(seed) >= 0, "seed", "an integer >= 0", seed)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a parameter's name, but got {shown(filter)}")
    has_group = dist.is_available() and dist.is_initialized()
    replicas = Replicas((process_group or dist.group.WORLD) if has_group else None)
    if replicas.count > 1 and not isinstance(model, DistributedDataParallel):
        warnings.warn(
            "warm_noisy_init was called on a model that is not wrapped in DistributedDataParallel; wrapping it later "
            "would overwrite the noise of every replica with rank 0's. Wrap the model first, if you are going to",
            stacklevel=2,
        )
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    chosen = {
        name: p
        for name, p in bare.named_parameters()
        if p.requires_grad and p.numel() and (filter is None or filter(name))
    }
    if any(sharding(p) is not None for p in chosen.values()):
        raise ValueError("warm_noisy_init takes unsharded parameters, but got DTensors; call it before sharding")
    whole = math.sqrt(sum(p.double().square().sum().item() for p in chosen.values())) if scope == "model" else 0.0
    num_whole = sum(p.numel() for p in chosen.values())
    for name, p in chosen.items():
        noise = unit_noise(p, name, seed=seed, replica=replicas.index)
        if scope == "tensor":
            size = torch.linalg.vector_norm(p, dtype=noise.dtype) / math.sqrt(p.numel())
        else:
            size = torch.tensor(whole / math.sqrt(num_whole), device=p.device)
        p.copy_(p + noise * (nu * size))


def unit_noise(parameter: Tensor, name: str, *, seed: int, replica: int) -> Tensor:
    """A normal(0, 1) draw of a parameter's shape, on its device: a function of seed, replica and name alone."""
    key = np.random.SeedSequence([seed, replica, *name.encode()]).generate_state(1, np.uint64)[0]
    generator = torch.Generator(parameter.device).manual_seed(int(key) % 2**63)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=dtype)
