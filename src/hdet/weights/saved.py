"""Saved tensors: whether they can be copied into the place of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.replicas.sharding import local_tensor, own_part
from hdet.weights.columns import Columns


def tensors_of(
    saved: Any,
    parameters: Sequence[Tensor],
    name: str,
    shapes: str = "the parameters' shapes",
    columns: Sequence[Columns | None] | None = None,
    *,
    finite: bool = True,
) -> list[Tensor]:
    """This rank's part of ``saved``, a tensor for each parameter or none at all; ValueError where they do not fit.

    ``columns``: what was saved of each parameter; default all of it. ``finite``: whether all of them must be.
    """
    if not isinstance(saved, (list, tuple)) or not all(isinstance(t, Tensor) for t in saved):
        raise ValueError(f"{name} must be a list of tensors, but got {shown(saved)}")
    columns = [None] * len(parameters) if columns is None else columns
    homes = [local_tensor(p) if c is None else c.of(local_tensor(p)) for p, c in zip(parameters, columns, strict=True)]
    parts = [
        own_part(t, p, None if c is None else c.shape).detach()
        for t, p, c in zip(saved, parameters, columns, strict=False)
    ]
    if saved and (len(saved) != len(homes) or [t.shape for t in parts] != [home.shape for home in homes]):
        raise ValueError(f"{name} must have {shapes}; it is of another model")
    for part, home in zip(parts, homes, strict=False):
        kinds = [(t.is_floating_point(), t.is_complex(), t.layout) for t in (part, home)]
        if kinds[0] != kinds[1] or part.is_meta:
            raise ValueError(
                f"{name} must hold values of the parameters' kind, but got {part.dtype}, {part.layout} on "
                f"{part.device} for {home.dtype}, {home.layout}"
            )
        if finite and not bool(torch.isfinite(part).all()):
            raise ValueError(f"{name} must be finite, but got {shown(part)}")
    return parts
