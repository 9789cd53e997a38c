"""Weights to go back to: the last healthy ones, copied while the devices go on, and the best by evaluations."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import number, shown, whole_of
from hdet.replicas.sharding import (
    LARGE_MODEL,
    Sharding,
    as_saved,
    expanded_dims,
    local_tensor,
    local_tensors,
    num_parameters,
    on_mesh,
    sharding,
)
from hdet.weights.anchor import tensors_of
from hdet.weights.averaged import Weights

Tensors = Mapping[int, Tensor] | Sequence[Tensor]
_Key = TypeVar("_Key")


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
        kept = self._copies(old.tensors, _by_key(tensors))
        live, homes = _parts(optimizer)
        travelling = [live[place] for place in homes if beside and self._pins(live[place])]
        with self._aside.copying(travelling):
            self._last = _Copy(kept, self._copies(old.state, live), homes)

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
        self.settle()
        self._proven, self._last = source, None
        for key, t in _by_key(tensors).items():
            if key in source.tensors:
                _write(t, source.tensors[key])
        state: dict[int, dict[str, Any]] = {}
        for (index, name), value in source.state.items():
            state.setdefault(index, {})[name] = value
        for index, p in enumerate(_parameters(optimizer)):
            kept = state.get(index, {})
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

    def _copies(self, old: Mapping[Any, Any], values: Mapping[_Key, Any]) -> dict[_Key, Any]:
        """A copy of each value, in the memory of the old one where it fits."""
        found: dict[_Key, Any] = {}
        pairs: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for key, value in values.items():
            kept = old.get(key)
            if (
                not isinstance(value, Tensor)
                or not isinstance(kept, Tensor)
                or kept.dtype != value.dtype
                or kept.shape != value.shape
            ):
                found[key] = self._copy(value)
            elif type(value) is type(kept) is Tensor and value.layout == torch.strided:
                found[key] = kept
                pairs[kept.device, value.device, value.dtype].append((kept, value))
            else:
                found[key] = kept.copy_(value, non_blocking=True)
        for alike in pairs.values():  # some kernels for each of them would show
            onto, from_ = zip(*alike, strict=True)
            torch._foreach_copy_(onto, from_, non_blocking=True)
        return found

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if self._pins(value):
            return self._pinned.empty_like(value).copy_(value.detach(), non_blocking=True)
        return value.detach().to(device=self.device, copy=True)

    def _pins(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self.device is not None and self.device.type == "cpu"


class Best:
    """The weights and buffers of the lowest validation loss so far, on the host; each rank keeps its own shards.

    Args:
        weights: of this replica.

    Attributes:
        step, loss: of that evaluation; -1 and infinite before the first one.
        restoring: whether they are on their way back, or were interrupted there.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.step, self.loss = -1, math.inf
        self.restoring = False
        self._copies: dict[int, Tensor] = {}

    @torch.no_grad()
    def offer(self, step: int, loss: float) -> None:
        """Keep the weights as they are if the loss is the lowest."""
        if not loss < self.loss:
            return
        self.step = -1  # half of a copy is none
        tensors = self.weights.whole_model()
        for t, view in zip(tensors, local_tensors(tensors), strict=True):
            kept = self._copies.get(self.weights.key(t))
            if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
                self._copies[self.weights.key(t)] = view.detach().to("cpu", copy=True)
            else:
                kept.copy_(view)
        self.step, self.loss = step, loss

    @torch.no_grad()
    def restore(self) -> None:
        """Write them into the model. What has joined since stays as it is."""
        self.restoring = True
        tensors = self.weights.whole_model()
        for t, view in zip(tensors, local_tensors(tensors), strict=True):
            if (kept := self._copies.get(self.weights.key(t))) is not None:
                for dim in expanded_dims(view):  # their elements share memory: write it once
                    view, kept = view.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
                view.copy_(kept)
        self.restoring = False

    def state_dict(self) -> dict[str, Any]:
        """Sharded as the weights are; before the first evaluation those at hand, so that it always has as many."""
        tensors = self.weights.whole_model()
        found = zip(tensors, local_tensors(tensors), strict=True)
        copies = [as_saved(self._copies.get(self.weights.key(t), view).detach(), t) for t, view in found]
        return {"step": self.step, "loss": self.loss, "weights": copies}

    def read_state(self, state: Mapping[str, Any]) -> tuple[int, float, dict[int, Tensor]]:
        """What :meth:`load` takes; ValueError or KeyError where it cannot be used."""
        if not state or state["step"] == -1:  # of a run that kept none
            return -1, math.inf, {}
        tensors = self.weights.whole_model()
        parts = tensors_of(state["weights"], tensors, "the best weights", "the shapes of the model", finite=False)
        copies = {self.weights.key(t): part.to("cpu", copy=True) for t, part in zip(tensors, parts, strict=False)}
        step, loss = whole_of(state["step"], "step of the best weights"), number(state["loss"])
        if math.isnan(loss) or not copies:
            raise ValueError(f"the best weights must have a finite loss, but got {shown(state['loss'])}")
        return step, loss, copies

    def load(self, found: tuple[int, float, dict[int, Tensor]]) -> None:
        self.step, self.loss, self._copies = found


class Undo:
    """Where a round that is undone goes back to: the last healthy weights and optimizer state.

    Args:
        weights: and
        optimizer: what is copied.
        snapshot: where the copies live.
        every: keep every so many rounds only: a copy of a large model to the host takes time.
    """

    def __init__(self, weights: Weights, optimizer: Optimizer, snapshot: Snapshot, *, every: int = 1) -> None:
        self.weights = weights
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.every = every
        self._num_rounds = 0
        self._loaded: dict[int, Tensor] | None = None
        self._told_of_steps = False
        self.restoring = False
        """Whether it is on its way back, or was interrupted there."""

    def before_first_step(self) -> None:
        """Keep what training starts from; after a resume, the centre that was loaded."""
        if not self.snapshot.taken:
            self.snapshot.take(self._loaded or self.weights.kept(), self.optimizer)
            self._loaded = None
        self.snapshot.settle()

    def before_step(self) -> None:
        """Copies that are on their way are waited for. One that is replayed from a CUDA graph is not told of."""
        self._told_of_steps = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        self.snapshot.settle()

    def keep(self) -> None:
        """Go back to the present from now on. Its copy may be made beside steps that this is told of."""
        self._num_rounds += 1
        if self._num_rounds % self.every:
            return
        self.snapshot.take(self.weights.kept(), self.optimizer, beside=self._told_of_steps)
        self._told_of_steps = False

    def restore(self) -> None:
        """Go back."""
        self.restoring = True
        self.snapshot.restore(self.weights.kept(), self.optimizer)
        self.restoring = False

    def add(self) -> None:
        """Parameters that join in mid-run go back to where they are now."""
        tensors = self.weights.kept()
        self.snapshot.add(tensors)
        if self._loaded is not None:
            self._loaded |= {key: t.clone() for key, t in tensors.items() if key not in self._loaded}

    def restart(self, centre: Mapping[int, Tensor] | None) -> None:
        """After a resume; ``centre``: the weights to go back to, where they are not those at hand."""
        self.snapshot.forget()
        self._loaded = None if centre is None else {key: t.clone() for key, t in centre.items()}


class _Home(NamedTuple):
    """Where a tensor of the optimizer's state was."""

    device: torch.device
    sharding: Sharding | None

    def bring(self, value: Tensor) -> Tensor:
        value = value.to(self.device, copy=True)
        return value if self.sharding is None else on_mesh(value, self.sharding)


_Place = tuple[int, str]
"""Of a value of the optimizer's state: its parameter's index, and its name."""


class _Copy(NamedTuple):
    tensors: dict[int, Tensor]
    state: dict[_Place, Any]
    homes: dict[_Place, _Home]


def _parts(optimizer: Optimizer) -> tuple[dict[_Place, Any], dict[_Place, _Home]]:
    """An optimizer's state with this rank's parts of its tensors, and where each of them was."""
    live: dict[_Place, Any] = {}
    homes: dict[_Place, _Home] = {}
    for index, p in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(p, {}).items():
            live[index, name] = value
            if type(value) is Tensor:
                homes[index, name] = _Home(value.device, None)
            elif isinstance(value, Tensor):
                live[index, name] = local_tensor(value)
                homes[index, name] = _Home(value.device, sharding(value))
    return live, homes


def _write(target: Tensor, kept: Tensor) -> None:
    # The other way, into memory of the host that is not pinned, the host could read too early.
    target.copy_(kept, non_blocking=kept.device.type == "cpu")


def _by_key(tensors: Tensors) -> Mapping[int, Tensor]:
    return tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


MAX_SLAB_BYTES = 2**28
ALIGNED_BYTES = 64


def host_if_large(optimizer: Optimizer) -> torch.device | None:
    """The host, for copies of a large model whose weights are on an accelerator; None for beside the weights."""
    away = any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"])
    return torch.device("cpu") if away and num_parameters(optimizer) > LARGE_MODEL else None


class PinnedMemory:
    """Page-locked memory, which devices write to by themselves.

    Taken in slabs: torch rounds each allocation of it up to a power of two, which would nearly double small ones.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._slab_bytes = 2**19

    def empty_like(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if size > len(self._free):
            self._slab_bytes = min(MAX_SLAB_BYTES, 2 * self._slab_bytes)
            self._free = self._allocate(max(size, self._slab_bytes))
        taken = self._free[:size]
        self._free = self._free[-(-size // ALIGNED_BYTES) * ALIGNED_BYTES :]
        return taken.view(tensor.dtype).view(tensor.shape)

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class SideStreams:
    """A stream of its own on each device, for copies beside what the device does next."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._done: dict[torch.device, torch.cuda.Event] = {}

    @contextmanager
    def copying(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """A block that copies ``tensors``, as they are now, on these streams. Nothing waits before :meth:`settle`."""
        tensors = list(tensors)
        devices = {t.device for t in tensors}
        with ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield
            for t in tensors:  # whoever drops one of them meanwhile must not have its memory used again at once
                t.record_stream(self._streams[t.device])
            for device in devices:
                self._done[device] = self._streams[device].record_event()

    def settle(self) -> None:
        """From here on the devices' present streams may change what was copied. The host does not wait."""
        if self._done and not torch.cuda.is_current_stream_capturing():
            for device, event in self._done.items():
                torch.cuda.current_stream(device).wait_event(event)
        self._done = {}  # a capture begins with waiting for the whole device
