"""The last healthy centre: weights and optimizer state to go back to."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.sharding import Sharding, local_tensor, on_mesh, sharding
from hdet.weights.host import PinnedMemory, SideStreams

Tensors = Mapping[int, Tensor] | Sequence[Tensor]


class Snapshot:
    """Two copies of tensors and of an optimizer's state: the last one taken, and the one before.

    A round whose loss looked healthy may have broken the model in its last steps, which only the next round shows. So
    :meth:`restore` goes back to the copy that a healthy round has started from: the one before the last.

    Copies on the host of what is on a CUDA device are made without waiting for them.

    Args:
        device: where the copies live; default beside the original.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)
        self._last: _Copy | None = None
        self._proven: _Copy | None = None
        self._pinned = PinnedMemory()
        self._aside = SideStreams()

    @property
    def taken(self) -> bool:
        return self._last is not None or self._proven is not None

    def forget(self) -> None:
        self._last = self._proven = None
        self._pinned = PinnedMemory()

    def settle(self) -> None:
        """To be called before the optimizer's state changes: devices wait for copies of it that are on their way."""
        self._aside.settle()

    @torch.no_grad()
    def take(self, tensors: Tensors, optimizer: Optimizer, *, beside: bool = False) -> None:
        """Copy the present; what was the last copy before is proven now, and the oldest is overwritten.

        Args:
            tensors: by a key each, or in an order, by which :meth:`restore` finds them again.
            optimizer: its state is copied too.
            beside: copy the state from CUDA devices to the host beside what they do next, up to :meth:`settle`. Never
                the tensors: others than the optimizer write them, e.g. whoever swaps averaged weights in to evaluate.
        """
        self.settle()
        reused, self._proven = self._proven, self._last or self._proven
        old = _Copy({}, {}, {}) if reused is None or reused is self._proven else reused
        kept = {key: self._kept(old.tensors.get(key), t) for key, t in _by_key(tensors).items()}
        live, homes = _parts({index: optimizer.state.get(p, {}) for index, p in enumerate(_parameters(optimizer))})
        travelling = [live[index][name] for index, name in homes if beside and self._pins(live[index][name])]
        with self._aside.copying(travelling):
            state = {
                index: {name: self._kept(old.state.get(index, {}).get(name), value) for name, value in values.items()}
                for index, values in live.items()
            }
        self._last = _Copy(kept, state, homes)

    def add(self, tensors: Mapping[int, Tensor]) -> None:
        """Put what the copies do not hold yet into them, as it is now: parameters that join in mid-run."""
        for kept in filter(None, (self._last, self._proven)):
            kept.tensors.update({key: self._kept(None, t) for key, t in tensors.items() if key not in kept.tensors})

    @torch.no_grad()
    def restore(self, tensors: Tensors, optimizer: Optimizer) -> None:
        """Bring back the proven copy; the last one is dropped. What was not copied then stays as it is."""
        source = self._proven or self._last
        if source is None:
            raise RuntimeError("there is nothing to go back to: no copy has been taken yet")
        self.settle()
        self._proven, self._last = source, None
        for key, t in _by_key(tensors).items():
            if key in source.tensors:
                _write(t, source.tensors[key])
        for index, p in enumerate(_parameters(optimizer)):
            kept = source.state.get(index, {})
            live = optimizer.state[p]
            for name in list(live):
                if name not in kept:
                    del live[name]  # the optimizer creates it again, as in its first step
            for name, value in kept.items():
                if isinstance(value, Tensor) and isinstance(live.get(name), Tensor):
                    _write(local_tensor(live[name]), value)  # in place: compiled and captured steps hold on to them
                elif isinstance(value, Tensor):
                    live[name] = source.homes[index, name].bring(value)
                else:
                    live[name] = copy.deepcopy(value)
            if not live:
                del optimizer.state[p]

    def _kept(self, old: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype:
            return old.copy_(value, non_blocking=True)
        if self._pins(value):
            return self._pinned.empty_like(value).copy_(value.detach(), non_blocking=True)
        return value.detach().to(device=self.device, copy=True)

    def _pins(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self.device is not None and self.device.type == "cpu"


class _Home(NamedTuple):
    """Where a tensor of the optimizer's state was."""

    device: torch.device
    sharding: Sharding | None

    def bring(self, value: Tensor) -> Tensor:
        value = value.to(self.device, copy=True)
        return value if self.sharding is None else on_mesh(value, self.sharding)


class _Copy(NamedTuple):
    tensors: dict[int, Tensor]
    state: dict[int, dict[str, Any]]
    homes: dict[tuple[int, str], _Home]


def _parts(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[int, dict[str, Any]], dict[tuple[int, str], _Home]]:
    """An optimizer's state with this rank's parts of its tensors, and where each of them was."""
    live, homes = {index: dict(values) for index, values in state.items()}, {}
    for index, values in live.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                homes[index, name] = _Home(value.device, sharding(value))
                values[name] = local_tensor(value)
    return live, homes


def _write(target: Tensor, kept: Tensor) -> None:
    # The other way, into memory of the host that is not pinned, the host could read too early.
    target.copy_(kept, non_blocking=kept.device.type == "cpu")


def _by_key(tensors: Tensors) -> Mapping[int, Tensor]:
    return tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
