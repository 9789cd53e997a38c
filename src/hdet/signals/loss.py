"""A replica's mean loss over a round (L_r of Eq. 4), summed where the losses live."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hdet.checks import shown

Loss = Tensor | float


class Sum:
    """Of numbers that are on the host or on devices, in the order in which they come."""

    def __init__(self, host: float = 0.0) -> None:
        self.host = host
        self._on_device: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """To add to. What was summed on the host goes on there."""
        found = self._on_device.get(device)
        if found is None:
            dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
            found = self._on_device[device] = torch.full((), self.host, dtype=dtype, device=device)
            self.host = 0.0
        return found

    def read(self) -> float:
        return self.host + sum(found.item() for found in self._on_device.values())


class LossMeter:
    """Weighted sum of a replica's losses. Nothing here waits for a device until :meth:`drain`."""

    def __init__(self) -> None:
        self.reset()

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add one loss: a tensor with a single float, or a number."""
        # The everyday case first, in one operation: this runs in every step.
        plain = type(weight) is float and weight == 1.0
        if plain and type(loss) is Tensor and loss.dtype is torch.float32 and loss.dim() == 0:
            if loss.is_meta or loss.layout is not torch.strided:
                require_scalar(loss, "loss")
            if loss.is_cpu:  # there is nothing to wait for
                self.total.host += loss.item()
            else:
                self.total.on(loss.device).add_(loss.detach())
            self.weight.host += 1.0
            return
        if isinstance(weight, Tensor):
            weight = _scalar(weight, "weight")
        elif not isinstance(weight, Real) or not (0 <= weight < math.inf):
            raise ValueError(f"weight must be a finite number >= 0, but got weight={weight!r}")
        elif weight == 0:
            return  # weight 0: skip, even if the loss is NaN, as that of a batch in which all is masked
        if isinstance(loss, Tensor):
            loss = _scalar(loss, "loss")
        elif not isinstance(loss, Real):
            raise TypeError(
                f"loss must be a number or a tensor with one element, but got {type(loss).__name__}; "
                "pass the scalar that is minimised, e.g. sum(losses.values()) for a dict"
            )
        else:
            loss = _as_float(loss, "loss")
        if not isinstance(weight, Tensor):
            weight = _as_float(weight, "weight")
        if isinstance(loss, Tensor):
            total = self.total.on(loss.device)
            total.add_(loss.to(total.dtype) * weight)
        elif isinstance(weight, Tensor):
            total = self.total.on(weight.device)
            total.add_(weight.to(total.dtype) * loss)
        else:
            self.total.host += loss * weight
        if isinstance(weight, Tensor):
            self.weight.on(weight.device).add_(weight)
        else:
            self.weight.host += weight

    def drain(self) -> tuple[float, float]:
        """The sums so far. The one place that waits.

        They stay where they are, and those of a state go on there: so a run that goes on, one that was saved here and
        one that was not add all losses in the same order and stay equal to the last bit.
        """
        return self.total.read(), self.weight.read()

    def reset(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.weight = Sum(total), Sum(weight)


def require_scalar(value: Tensor, name: str) -> None:
    """ValueError unless the tensor holds one number that can be read."""
    if value.numel() != 1:
        raise ValueError(
            f"{name} must have one element, but got shape {tuple(value.shape)}; reduce it first, e.g. loss.mean()"
        )
    if value.is_meta:
        raise ValueError(
            f"{name} must be a tensor with a value, but got one on the meta device, which has none; compute it with "
            "a model and data on a real device"
        )
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, but got layout {value.layout}; pass loss.to_dense()")


def _as_float(value: Any, name: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be a number that a float can hold, up to 1.8e308, but got {shown(value)}; divide it first, "
            "or pass math.inf for a loss that has overflowed"
        ) from None


def _scalar(value: Tensor, name: str) -> Tensor:
    require_scalar(value, name)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, but got dtype {value.dtype}")
    return (
        value.detach()
        .reshape(())
        .to(torch.promote_types(value.dtype, torch.float32) if value.itemsize > 1 else torch.float32)
    )
