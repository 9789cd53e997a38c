"""Copies on the host of what is on CUDA devices, made while the devices go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.weights.size import LARGE_MODEL, num_parameters

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
