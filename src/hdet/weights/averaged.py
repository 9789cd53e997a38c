"""The weights flow: what the replicas of a model average, and how this replica's part of it is set aside."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import BoolArray
from hdet.replicas.average import Buffers, Flight, is_healthy, mean_, memory_view
from hdet.replicas.group import Replicas
from hdet.replicas.parameters import buffers_beside, shape_digest, trained_parameters
from hdet.replicas.sharding import is_dtensor, local_tensor
from hdet.replicas.transport import Transport, coded_mean_


class Weights:
    """Parameters that train, and buffers.

    Args:
        optimizer: its parameters are averaged.
        model: its other trainable parameters and its buffers are averaged too.
        replicas: who takes part.
        transport: how a mean travels. Not ``"full"``: as coded displacements from the last mean, of which there is then
            a copy. The first mean, and one with unhealthy replicas, is a full one.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module | None, replicas: Replicas, transport: Transport = "full"
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.replicas = replicas
        self.transport: Transport = transport
        self._bases: dict[int, Tensor] = {}
        self._buffers: Buffers = {}
        self._trainable = self._requiring_grad()
        self._unnamed: list[Tensor] | None = None
        self._keys: dict[int, tuple[Tensor, int]] = {}
        self._num_keys = 0

    def anchored(self) -> list[Tensor]:
        """What the learning rate moves: the optimizer's parameters, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def averaged(self) -> list[Tensor]:
        """What trains or has trained in this round, and the buffers."""
        self.reshard()
        parameters = [
            p for p in trained_parameters(self.optimizer, self.model) if p.requires_grad or id(p) in self._trainable
        ]
        buffers = {id(b): b for b in self.model.buffers()} if self.model is not None else {}
        return [*parameters, *buffers.values()]

    def reshard(self) -> None:
        """Let go of parameters that ``fully_shard`` has gathered for an evaluation and kept.

        It keeps the root module's until a backward pass, unless told otherwise, and would go on with old weights.
        """
        if self.model is None or not any(is_dtensor(p) for p in self.anchored()):
            return
        from torch.distributed.fsdp import FSDPModule  # loaded already where it is used, and slow to load where not

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def refuse_join(self, step: int) -> None:
        """Raise inside DistributedDataParallel's ``join()``: ranks that are done answer other collectives than ours."""
        for module in self.model.modules() if self.model is not None else ():
            if isinstance(module, DistributedDataParallel) and module._join_config.enable:
                raise RuntimeError(
                    f"replicas cannot converge inside DistributedDataParallel.join(), but step {step} is: ranks that "
                    "have run out of data would not take part, and in the end one rank's weights would replace all "
                    "others'. Give every rank the same number of batches, e.g. DistributedSampler(drop_last=True)"
                )

    def warn_if_not_shared(self) -> None:
        """DistributedDataParallel never averages gradients of parameters that were frozen when it was constructed."""
        for module in self.model.modules() if self.model is not None else ():
            if not isinstance(module, DistributedDataParallel):
                continue
            num_trained = sum(p.requires_grad for p in module.parameters())
            num_shared = module._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
            if num_trained > num_shared:
                warnings.warn(
                    f"DistributedDataParallel averages the gradients of {num_shared} tensors, but {num_trained} are "
                    "trained: it leaves out those that were frozen when it was constructed, and ranks drift apart in "
                    "them. Freeze them after it is constructed, with find_unused_parameters=True",
                    stacklevel=2,
                )

    def local(self) -> dict[int, Tensor]:
        """This rank's part of what is averaged, every element of memory once, by a key that a copy keeps."""
        return {self.key(t): memory_view(local_tensor(t)) for t in self.averaged()}

    def key(self, tensor: Tensor) -> int:
        """The number of a parameter or buffer: the same one at any time, and in a copy of it all."""
        found = self._keys.get(id(tensor))
        if found is None or found[0] is not tensor:
            found = self._keys[id(tensor)] = tensor, self._num_keys
            self._num_keys += 1
        return found[1]

    def kept(self) -> dict[int, Tensor]:
        """What a round that is undone changes here: :meth:`local`, and buffers of a model that nobody has named.

        A model that has broken leaves infinities in the statistics of its BatchNorms, which training cannot undo.
        """
        return self.local() | {self.key(b): memory_view(local_tensor(b)) for b in self.unnamed()}

    def unnamed(self) -> list[Tensor]:
        """Buffers of a model that nobody has named."""
        if self.model is None and self._unnamed is None:
            self._unnamed = buffers_beside(self.anchored())
        return self._unnamed or []

    def is_healthy(self) -> bool:
        return is_healthy(list(self.local().values()))

    def digest(self) -> int:
        """Of whole parameters: the shards of one need not be of equal size."""
        digest = shape_digest(self.averaged())
        if self.transport != "full":  # who has no last mean takes other collectives: to be found before they are called
            digest = zlib.crc32(struct.pack("2I", digest, sorted(self._bases) == sorted(self._floating())))
        return digest

    def _floating(self) -> dict[int, Tensor]:
        return {key: t for key, t in self.local().items() if t.is_floating_point()}

    def average(
        self,
        healthy: BoolArray,
        *,
        step: int,
        share: float = 1.0,
        node: Replicas | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> float:
        """Eq. 3. Returns the largest distance of a healthy replica from its mean.

        ``share``: what this replica counts. ``node``: take the mean among these alone, all of them healthy. ``part``:
        which of how many parts of every tensor are averaged; the others stay as they are.
        """
        among, fine = (self.replicas, healthy.tolist()) if node is None else (node, [True] * node.count)
        tensors = {key: _fragment(t, *part) for key, t in self.local().items()}
        bases = self._floating().keys() <= self._bases.keys()
        if self.transport == "full" or not (bases and all(fine) and node is None):
            distance = mean_(tensors.values(), among, fine, self._buffers, share=share).item()
        else:
            distance = coded_mean_(tensors, self._bases, among, self.transport, self._buffers, share=share).item()
        if self.transport != "full":
            self._bases = {key: t.detach().clone() for key, t in self._floating().items()}
        distances = np.linalg.norm(self.replicas.gather([distance], step=step)[:, :, 0], axis=1)
        self._trainable = self._requiring_grad()
        return float(distances[healthy].max())

    def depart(self, node: Replicas | None = None) -> Flight:
        """Eq. 3, to be applied later; all replicas are healthy."""
        tensors = self.local().values()
        self._trainable = self._requiring_grad()
        return Flight(tensors, node or self.replicas)

    def average_also(self, tensors: list[Tensor], healthy: BoolArray, *, share: float = 1.0) -> None:
        """The mean of other tensors, such as an optimizer's state."""
        mean_([memory_view(t) for t in tensors], self.replicas, healthy.tolist(), self._buffers, share=share)

    def repair(self, tensors: Iterable[Tensor], healthy: BoolArray, *, alike: bool) -> None:
        """A replica that is not healthy receives the mean of the others, who keep what they have to the last bit.

        Where the others are ``alike`` one of them gives: a mean of equal numbers can differ from them in the last bit.
        """
        receives = not healthy[self.replicas.index]
        givers = healthy & (np.cumsum(healthy) == 1) if alike else healthy
        mean_([memory_view(t) for t in tensors], self.replicas, givers.tolist(), self._buffers, receives=receives)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """This replica's own weights come back after the block, whatever it did to them. A second copy meanwhile."""
        tensors = list(self.local().values())
        own = [t.clone() for t in tensors]
        trainable = self._trainable
        try:
            yield
        finally:
            self._trainable = trainable
            self.reshard()
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    def recount(self) -> None:
        """After a copy: these are other tensors."""
        self._keys = {id(tensor): (tensor, key) for tensor, key in self._keys.values()}
        self._trainable = self._requiring_grad()

    def _requiring_grad(self) -> set[int]:
        # A parameter frozen in mid-round still has to be averaged at its end; one frozen all along must not be
        # touched, since a mean of equal numbers can differ from them in the last bit.
        return {id(p) for p in trained_parameters(self.optimizer, self.model) if p.requires_grad}


def _fragment(tensor: Tensor, which: int, num: int) -> Tensor:
    """One of ``num`` parts of a tensor, along its longest dimension: a view, whatever its strides."""
    if num == 1:
        return tensor
    if not tensor.dim():
        return tensor if which == 0 else tensor.new_empty(0)
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    return torch.tensor_split(tensor, num, dim=longest)[which]
