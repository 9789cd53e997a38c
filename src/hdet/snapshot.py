"""The last healthy centre: weights and optimizer state to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Snapshot:
    """A copy of tensors and of an optimizer's state, overwritten each time it is taken.

    Args:
        device: where the copy lives; default beside the original.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device
        self.taken = False
        self._tensors: list[Tensor] = []
        self._state: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor], optimizer: Optimizer) -> None:
        if [t.shape for t in self._tensors] != [t.shape for t in tensors]:
            self._tensors = [self._copy(t) for t in tensors]
        else:
            for kept, t in zip(self._tensors, tensors, strict=True):
                kept.copy_(t, non_blocking=True)
        state: dict[int, dict[str, Any]] = {}
        for index, p in enumerate(_parameters(optimizer)):
            old = self._state.get(index, {})
            state[index] = {
                name: self._kept(old.get(name), value) for name, value in optimizer.state.get(p, {}).items()
            }
        self._state = state
        self.taken = True

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor], optimizer: Optimizer) -> None:
        for kept, t in zip(self._tensors, tensors, strict=True):
            t.copy_(kept)
        for index, p in enumerate(_parameters(optimizer)):
            kept_state = self._state.get(index, {})
            live = optimizer.state.get(p, {})
            for name in list(live):
                if name not in kept_state:
                    del live[name]  # the optimizer makes it anew, as in its first step
            for name, value in kept_state.items():
                if isinstance(value, Tensor) and isinstance(live.get(name), Tensor):
                    live[name].copy_(value)  # in place: compiled and captured steps hold on to these tensors
                else:
                    live[name] = value
            if not live:
                optimizer.state.pop(p, None)

    def _kept(self, old: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype:
            return old.copy_(value, non_blocking=True)
        return self._copy(value)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=self.device, copy=True)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
