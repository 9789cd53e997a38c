"""Replicas that should hold equal weights and do not: a checksum of the bits to notice it by, and a copy to repair it.

Every tensor is read as integers, which are added up modulo 2**64: whatever the order of the sum, equal bits give equal
sums, and one weight that differs gives another one. The sums travel in the exchange that ends a round anyway
(:mod:`hdet.replicas.group`). Only where they differ do ranks exchange one sum for each parameter, to name the first
that does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import BoolArray, FloatArray
from hdet.replicas.group import Replicas, collective_device
from hdet.replicas.sharding import is_flat, local_tensor, memory_view, num_shards, sharding

MAX_NAMED = 20
"""So many ranks are named."""

SMALL = 2**14
"""Tensors of so many elements are copied together."""

_LANES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MASK = 2**64 - 1


class Checksum(NamedTuple):
    """Of one rank's weights; integers below 2**52, which a float64 holds exactly.

    Attributes:
        whole: of the parameters that every rank holds whole.
        part: of this rank's shards of the others, as far as another rank holds the same.
        place: which shards these are: ranks with the same number hold the same ones.
    """

    whole: int = 0
    part: int = 0
    place: int = 0


@dataclass(frozen=True)
class Fork:
    """Ranks whose weights differ from those of the others.

    Attributes:
        ranks: which, in the default process group; without those that agree with most of the ranks that hold the same,
            or, where as many do as do not, with the lowest.
        parameter: the index, among those compared, of the first that differs; their number where each has the same sum.
        sources: of the parameters held whole, and of the shards: for each rank that has to be repaired, the rank to
            copy from, and whether its optimizer state can be copied.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    parameter: int
    sources: tuple[dict[int, tuple[int, bool]], dict[int, tuple[int, bool]]]


class WeightsSum:
    """Checksums of the weights that all ranks should have in common, and what is done where they differ.

    Left out: what is frozen, since nothing writes it; parameters of FSDP1, which does not tell whose shard is where;
    tensor subclasses, whose bits need not be their values; shards that no other rank holds.

    Args:
        parameters: returns those that train, in the same order on every rank.
        optimizer: whose state is repaired with them.
        replicas: who should be equal.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], optimizer: Optimizer, replicas: Replicas) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._replicas = replicas
        self._known: list[Tensor] = []
        self._kinds: list[int | None] = []
        self._place = 0
        self._pending: list[list[Tensor]] = [[], []]

    def compared(self) -> list[tuple[Tensor, int]]:
        """The parameters that are compared, each with 0 where ranks hold it whole and 1 where it is a shard."""
        parameters = self._parameters()
        same = len(parameters) == len(self._known) and all(map(lambda a, b: a is b, parameters, self._known))
        if not same:
            num_ranks = self._replicas.count * self._replicas.num_parts
            self._known, self._kinds = parameters, [_kind(p, num_ranks) for p in parameters]
            places = [_place(p) for p, kind in zip(parameters, self._kinds, strict=True) if kind == 1]
            self._place = zlib.crc32(repr(places).encode()) if places else 0
        return [(p, kind) for p, kind in zip(parameters, self._kinds, strict=True) if kind is not None]

    def start(self) -> None:
        """Start adding up, on the devices; the host waits for nothing."""
        kinds: list[list[Tensor]] = [[], []]
        for parameter, kind in self.compared():
            kinds[kind].append(parameter)
        self._pending = [_combined(bit_sums(packed(parameters))) for parameters in kinds]

    def read(self) -> Checksum:
        """What :meth:`start` has begun. Waits for the devices."""
        whole, part = (_mixed(sum(int(total.item()) for total in totals)) for totals in self._pending)
        self._pending = [[], []]
        return Checksum(whole, part, self._place)

    def find_fork(self, found: FloatArray, healthy: BoolArray) -> Fork | None:
        """Who has parted from the others, by everyone's checksums, a row for each process. A collective if anyone has.

        Args:
            found: rows of ``(whole, part, place)``.
            healthy: who counts; the others are repaired anyway.
        """
        whole, part, place = found.T
        if all(is_equal(sums, classes, healthy) for sums, classes in ((whole, np.zeros_like(place)), (part, place))):
            return None
        compared = self.compared()
        states = [self._state(kind) for kind in (0, 1)]
        shapes = [zlib.crc32(repr([(i, n, tuple(t.shape), t.dtype) for i, n, t in state]).encode()) for state in states]
        sums = [float(_mixed(int(total.item()))) for total in bit_sums([p for p, _ in compared])]
        rows = self._replicas.gather([float(dist.get_rank()), *map(float, shapes), *sums])
        rows = rows.reshape(-1, rows.shape[-1])
        ranks, state_shapes, by_parameter = rows[:, 0].astype(int), rows[:, 1:3], rows[:, 3:]
        kinds = np.array([kind for _, kind in compared])
        sources: list[dict[int, tuple[int, bool]]] = []
        first = len(compared)
        for kind, (totals, classes) in enumerate(((whole, np.zeros_like(place)), (part, place))):
            source = majority(totals, classes, healthy, order=ranks)
            parted = np.flatnonzero(source != np.arange(len(source)))
            alike = state_shapes[parted, kind] == state_shapes[source[parted], kind]
            givers = zip(ranks[source[parted]].tolist(), alike.tolist(), strict=True)
            sources.append(dict(zip(ranks[parted].tolist(), givers, strict=True)))
            differs = (by_parameter[parted] != by_parameter[source[parted]]).any(axis=0) & (kinds == kind)
            first = min(first, int(np.argmax(differs)) if differs.any() else first)
        return Fork(tuple(sorted({*sources[0], *sources[1]})), int(healthy.sum()), first, (sources[0], sources[1]))

    @torch.no_grad()
    def repair(self, fork: Fork) -> None:
        """Ranks that have parted receive weights and optimizer state of one that agrees with most, to the last bit.

        Point to point: the other ranks wait for nothing.
        """
        for kind, sources in enumerate(fork.sources):
            weights = [local_tensor(p) for p, its_kind in self.compared() if its_kind == kind]
            state = [t for _, _, t in self._state(kind)]
            for receiver, (giver, state_too) in sorted(sources.items()):
                _copy([*weights, *(state if state_too else [])], giver=giver, receiver=receiver)

    def _state(self, kind: int) -> list[tuple[int, str, Tensor]]:
        """This rank's part of the optimizer's state, with the parameter's index and its name."""
        found = []
        for index, (parameter, its_kind) in enumerate(self.compared()):
            state = self._optimizer.state.get(parameter, {}) if its_kind == kind else {}
            found += [(index, n, local_tensor(state[n])) for n in sorted(state) if isinstance(state[n], Tensor)]
        return found


# -- sums -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor's bits, read as integers, modulo 2**64: one kernel each, and no host sync.

    A function of shape and values alone, whatever the strides.
    """
    return [_bit_sum(memory_view(local_tensor(t))) for t in tensors]


@torch.no_grad()
def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same bits in fewer tensors: small ones, which cost a kernel each, in one of each kind, after the others."""
    large: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in map(local_tensor, tensors):
        if tensor.numel() > SMALL:
            large.append(tensor)
            continue
        flat = tensor.reshape(-1)
        flat = flat.view(torch.uint8) if flat.itemsize == 1 else flat  # torch cannot join all kinds of float8
        small.setdefault((flat.device, flat.dtype), []).append(flat)
    return [*large, *(torch.cat(found) for found in small.values())]


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    num_bytes = flat.numel() * flat.itemsize
    width = next(w for w in _LANES if num_bytes % w == 0)  # the widest: an integer sum without a cast is the fastest
    if flat.itemsize < width and flat.storage_offset() * flat.itemsize % width:
        flat = flat.clone()
    return flat.view(_LANES[width]).sum(dtype=torch.int64)


def _combined(sums: Sequence[Tensor]) -> list[Tensor]:
    """One number for each device; every tensor counts an odd number of times of its own, so that order matters."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, total in enumerate(sums):
        by_device.setdefault(total.device, []).append((index, total))
    combined = []
    for device, found in by_device.items():
        if len(by_device) == 1:
            factors = torch.arange(1, 2 * len(found), 2, device=device)
        else:
            factors = torch.tensor([2 * index + 1 for index, _ in found], device=device)
        combined.append((torch.stack([total for _, total in found]) * factors).sum())
    return combined


def _mixed(total: int) -> int:
    """52 bits that depend on all 64 of ``total``: the finaliser of SplitMix64."""
    x = total & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return (x ^ (x >> 31)) >> 12


# -- who holds what -------------------------------------------------------------------------------------------------


def _kind(parameter: Tensor, num_ranks: int) -> int | None:
    """0 for a parameter that ranks hold whole, 1 for a shard that others hold too; None where there is no equal."""
    if is_flat(parameter) or type(local_tensor(parameter)) is not Tensor:
        return None
    shards = num_shards(parameter)
    if shards == 1:
        return 0
    return 1 if num_ranks > shards else None


def _place(parameter: Tensor) -> tuple[Any, ...]:
    """Which shard of a parameter this rank has: where it stands along the mesh dimensions that cut it."""
    found = sharding(parameter)
    assert found is not None
    coordinate: Sequence[int] = found.mesh.get_coordinate() or ()
    return tuple(
        (size, str(placement), place)
        for size, place, placement in zip(found.mesh.shape, coordinate, found.placements, strict=False)
        if not placement.is_replicate()
    )


def is_equal(sums: FloatArray, classes: FloatArray, healthy: BoolArray) -> bool:
    """Whether the healthy rows of each class have one sum."""
    pairs = np.stack([classes, sums], axis=1)[healthy]
    return len(np.unique(pairs, axis=0)) == len(np.unique(pairs[:, 0]))


def majority(
    sums: FloatArray, classes: FloatArray, healthy: BoolArray, *, order: NDArray[np.int_] | None = None
) -> NDArray[np.int_]:
    """For each row the one to copy from: itself, or the first of those that most of its class agree with.

    Where two sums are as frequent, the one that the lowest rank has. ``order``: the ranks of the rows.
    """
    source = np.arange(len(sums))
    ranks = source if order is None else order
    for each in np.unique(classes):
        members = np.flatnonzero((classes == each) & healthy)
        members = members[np.argsort(ranks[members], kind="stable")]
        if not len(members):
            continue
        values, first, counts = np.unique(sums[members], return_index=True, return_counts=True)
        best = min(range(len(values)), key=lambda i: (-counts[i], first[i]))
        source[members[sums[members] != values[best]]] = members[first[best]]
    return source


# -- copies ---------------------------------------------------------------------------------------------------------


def _copy(tensors: Sequence[Tensor], *, giver: int, receiver: int) -> None:
    """From rank to rank, bit for bit; to be called by all."""
    rank = dist.get_rank()
    if rank not in (giver, receiver):
        return
    group = dist.group.WORLD
    assert group is not None
    device = collective_device(group)
    for tensor in (memory_view(t) for t in tensors if t.numel()):
        bits = tensor.contiguous().view(-1).view(torch.uint8).to(device)
        if rank == giver:
            dist.send(bits, receiver)
        else:
            received = torch.empty_like(bits)
            dist.recv(received, giver)
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def described(fork: Fork, name: str, step: int) -> str:
    """What has happened, in one sentence."""
    named = [str(rank) for rank in fork.ranks[:MAX_NAMED]]
    more = f" and {len(fork.ranks) - MAX_NAMED} more" if len(fork.ranks) > MAX_NAMED else ""
    who = f"rank{'s' if len(fork.ranks) > 1 else ''} {', '.join(named)}{more}"
    most = math.ceil((fork.num_ranks + 1) / 2)
    others = "the others'" if fork.num_ranks - len(fork.ranks) >= most else "those of the lowest rank they compare with"
    return f"the weights of {who} differ from {others} at step {step}, first in {name}"
