"""A replica's mean loss over a round (L_r of Eq. 4), summed where the losses live."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hdet.checks import shown

Loss = Tensor | float


class LossMeter:
    """Weighted sum of a replica's losses. Nothing here waits for a device until :meth:`drain`."""

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add one loss: a tensor with a single float, or a number."""
        # The everyday case first, in one operation: this runs in every step.
        plain = type(weight) is float and weight == 1.0
        if plain and type(loss) is Tensor and loss.dtype is torch.float32 and loss.dim() == 0:
            if loss.is_meta or loss.layout is not torch.strided:
                require_scalar(loss, "loss")
            if loss.is_cpu:  # there is nothing to wait for
                self.total += loss.item()
            else:
                self._accumulator(loss.device)[0].add_(loss.detach())
            self.weight += 1.0
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
            total = self._accumulator(loss.device)[0]
            total.add_(loss.to(total.dtype) * weight)
        elif isinstance(weight, Tensor):
            total = self._accumulator(weight.device)[0]
            total.add_(weight.to(total.dtype) * loss)
        else:
            self.total += loss * weight
        if isinstance(weight, Tensor):
            self._accumulator(weight.device)[1].add_(weight)
        else:
            self.weight += weight

    def drain(self) -> tuple[float, float]:
        """Move what the devices hold into the host sums and return them. The one place that waits.

        Draining moves the sums rather than copying them, so that a run which was saved here and one which goes on
        add the following losses in the same order and stay equal to the last bit.
        """
        for total, weight in self._on_device.values():
            self.total += total.item()
            self.weight += weight.item()
            total.zero_()
            weight.zero_()
        return self.total, self.weight

    def reset(self, total: float = 0.0, weight: float = 0.0) -> None:
        self._on_device.clear()
        self.total, self.weight = total, weight

    def _accumulator(self, device: torch.device) -> tuple[Tensor, Tensor]:
        sums = self._on_device.get(device)
        if sums is None:
            dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
            sums = (torch.zeros((), dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device))
            self._on_device[device] = sums
        return sums


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
