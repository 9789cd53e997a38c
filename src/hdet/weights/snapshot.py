"""The last healthy centre: weights and optimizer state to go back to."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = Mapping[int, Tensor] | Sequence[Tensor]


class Snapshot:
    """Two copies of tensors and of an optimizer's state: the last one taken, and the one before.

    A round whose loss looked healthy may have broken the model in its last steps, which only the next round shows. So
    :meth:`restore` goes back to the copy that a healthy round has started from: the one before the last.

    Args:
        device: where the copies live; default beside the original.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device
        self._last: _Copy | None = None
        self._proven: _Copy | None = None

    @property
    def taken(self) -> bool:
        return self._last is not None or self._proven is not None

    @property
    def latest(self) -> tuple[dict[int, Tensor], dict[int, dict[str, Any]]] | None:
        """Tensors by key, and optimizer state by parameter, that :meth:`restore` would bring back; None without any."""
        return self._proven or self._last

    def fill(self, tensors: Mapping[int, Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
        """Hold copies of these, as if they had been taken."""
        copied = {index: {name: self._kept(None, v) for name, v in each.items()} for index, each in state.items()}
        self._proven, self._last = None, _Copy({key: self._copy(t) for key, t in tensors.items()}, copied)

    def forget(self) -> None:
        self._last = self._proven = None

    @torch.no_grad()
    def take(self, tensors: Tensors, optimizer: Optimizer) -> None:
        """Copy the present; what was the last copy before is proven now, and the oldest is overwritten.

        Args:
            tensors: by a key each, or in an order, by which :meth:`restore` finds them again.
            optimizer: its state is copied too.
        """
        reused, self._proven = self._proven, self._last or self._proven
        old = _Copy({}, {}) if reused is None or reused is self._proven else reused
        kept = {key: self._kept(old.tensors.get(key), t) for key, t in _by_key(tensors).items()}
        state: dict[int, dict[str, Any]] = {}
        for index, p in enumerate(_parameters(optimizer)):
            before = old.state.get(index, {})
            live = optimizer.state.get(p, {})
            state[index] = {name: self._kept(before.get(name), value) for name, value in live.items()}
        self._last = _Copy(kept, state)

    def add(self, tensors: Mapping[int, Tensor]) -> None:
        """Put what the copies do not hold yet into them, as it is now: parameters that join in mid-run."""
        for kept in filter(None, (self._last, self._proven)):
            kept.tensors.update({key: self._copy(t) for key, t in tensors.items() if key not in kept.tensors})

    @torch.no_grad()
    def restore(self, tensors: Tensors, optimizer: Optimizer) -> None:
        """Bring back the proven copy; the last one is dropped. What was not copied then stays as it is."""
        source = self._proven or self._last
        if source is None:
            raise RuntimeError("there is nothing to go back to: no copy has been taken yet")
        self._proven, self._last = source, None
        for key, t in _by_key(tensors).items():
            if key in source.tensors:
                t.copy_(source.tensors[key])
        for index, p in enumerate(_parameters(optimizer)):
            kept_state = source.state.get(index, {})
            live = optimizer.state[p]
            for name in list(live):
                if name not in kept_state:
                    del live[name]  # the optimizer creates it again, as in its first step
            for name, value in kept_state.items():
                if isinstance(value, Tensor) and isinstance(live.get(name), Tensor):
                    live[name].copy_(value)  # in place: compiled and captured steps hold on to these tensors
                else:
                    live[name] = copy.deepcopy(value)
            if not live:
                del optimizer.state[p]

    def _kept(self, old: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype:
            return old.copy_(value, non_blocking=True)
        return self._copy(value)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=self.device, copy=True)


class _Copy(NamedTuple):
    tensors: dict[int, Tensor]
    state: dict[int, dict[str, Any]]


def _by_key(tensors: Tensors) -> Mapping[int, Tensor]:
    return tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
