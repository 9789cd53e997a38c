"""The weights flow: which parameters train, what replicas average, and how this replica's part of it is set aside."""

from __future__ import annotations

import gc
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import BoolArray
from hdet.replicas.average import BUCKET_BYTES, Buffers, mean_, pieces_of
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import doubled, is_dtensor, memory_view, memory_views


class Weights:
    """Parameters that train, and buffers.

    Args:
        optimizer: its parameters are averaged.
        model: its other trainable parameters and its buffers are averaged too.
        replicas: who takes part.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, replicas: Replicas) -> None:
        self.optimizer = optimizer
        self.model = model
        self.replicas = replicas
        self._buffers: Buffers = {}
        self._trainable = self._requiring_grad()
        self._unnamed: list[Tensor] | None = None
        self.also: list[nn.Module] = []
        """What is undone with the weights, and is not averaged."""
        self._keys: dict[int, tuple[Tensor, int]] = {}

    def anchored(self) -> list[Tensor]:
        """What the learning rate moves: the optimizer's parameters, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def moved(self) -> list[Tensor]:
        """The optimizer's parameters that train or have trained in this round."""
        return [p for p in self.anchored() if p.requires_grad or id(p) in self._trainable]

    def name_of(self, parameter: Tensor) -> str:
        """For a message: as the model or the optimizer calls it, else by its place."""
        names = {id(p): name for name, p in self.model.named_parameters()} if self.model is not None else {}
        for k, group in enumerate(self.optimizer.param_groups):
            named = group.get("param_names") or [""] * len(group["params"])
            for i, (p, name) in enumerate(zip(group["params"], named, strict=False)):
                if p is parameter:
                    called = names.get(id(p)) or name
                    return f"{called!r}" if called else f"parameter {i} of param group {k}, of shape {tuple(p.shape)}"
        return "a parameter that has left the optimizer"

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

    def _refuse_join(self, step: int) -> None:
        """Raise inside DistributedDataParallel's ``join()``: ranks that are done answer other collectives than ours."""
        for module in self.model.modules() if self.model is not None else ():
            joining = getattr(module, "_join_config", None) if isinstance(module, DistributedDataParallel) else None
            if getattr(joining, "enable", False):
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
        """This rank's part of what is averaged, every element of memory once, by :meth:`key`."""
        return self._by_key(self.averaged())

    def _by_key(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        return {self.key(t): view for t, view in zip(tensors, memory_views(tensors), strict=True)}

    def key(self, tensor: Tensor) -> int:
        """The number of a parameter or buffer: the same one at any time."""
        return self._keys.setdefault(id(tensor), (tensor, len(self._keys)))[1]

    def kept(self) -> dict[int, Tensor]:
        """What a round that is undone changes here: :meth:`local`, and buffers where ``model=`` was not passed.

        And what the user has named. A model that has broken leaves infinities in the statistics of its BatchNorms,
        which training cannot undo.
        """
        also = [t for module in self.also for t in (*module.parameters(), *module.buffers())]
        return self._by_key([*self.averaged(), *self.unnamed(), *also])

    def whole_model(self) -> list[Tensor]:
        """All that training may change, frozen or not: the same tensors in the same order at any time."""
        self.reshard()
        buffers = {id(b): b for b in self.model.buffers()} if self.model is not None else {}
        return [*trained_parameters(self.optimizer, self.model), *buffers.values(), *self.unnamed()]

    def unnamed(self) -> list[Tensor]:
        """Buffers of the model, where ``model=`` was not passed."""
        if self.model is None and self._unnamed is None:
            self._unnamed = buffers_beside(self.anchored())
        return self._unnamed or []

    def inspect(self, step: int) -> Callable[[], tuple[int, bool]]:
        """A digest of what would be averaged, and whether this rank's part of it is finite.

        Started on the device here; to call what is returned is to wait for it. The digest is of whole parameters: the
        shards of one need not be of equal size.
        """
        self._refuse_join(step)
        tensors = self.averaged()
        shapes, healthy = shape_digest(tensors), health_of(tensors)
        return lambda: (shapes, healthy())

    def average(self, healthy: BoolArray, *, step: int, share: float = 1.0) -> float:
        """Eq. 3. Returns the largest distance of a healthy replica from the mean; ``share``: what this one counts."""
        tensors = self.local().values()
        distance = mean_(tensors, self.replicas, healthy.tolist(), self._buffers, share=share).item()
        distances = np.linalg.norm(self.replicas.gather([distance], step=step)[:, :, 0], axis=1)
        self._trainable = self._requiring_grad()
        return float(distances[healthy].max())

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

    def _requiring_grad(self) -> set[int]:
        # A parameter frozen in mid-round still has to be averaged at its end; one frozen all along must not be
        # touched, since a mean of equal numbers can differ from them in the last bit.
        return {id(p) for p in trained_parameters(self.optimizer, self.model) if p.requires_grad}


def trained_parameters(optimizer: Optimizer, model: nn.Module | None) -> list[nn.Parameter]:
    """Every parameter of the optimizer and the model, each once."""
    found: dict[int, nn.Parameter] = {}
    groups: Iterable[Iterable[nn.Parameter]] = [g["params"] for g in optimizer.param_groups]
    for source in [*groups, *([model.parameters()] if model is not None else [])]:
        for parameter in source:
            found.setdefault(identity_of(parameter), parameter)
    return list(found.values())


def buffers_beside(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Buffers of the models that have any of these parameters, found among all that this process holds.

    Their order depends on the models and the parameters alone.
    """
    return list({id(b): b for root in models_of(parameters) for b in root.buffers()}.values())


def models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The models that have any of these parameters, found among all that this process holds."""
    wanted = {id(p): place for place, p in enumerate(parameters)}
    held = gc.get_objects()  # millions: looked at without a line of Python for each
    kinds = {kind for kind in set(map(type, held)) if issubclass(kind, nn.Module)}
    modules: list[nn.Module] = list(compress(held, map(kinds.__contains__, map(type, held))))
    del held
    found = {id(m) for m in modules if any(id(p) in wanted for p in m.parameters(recurse=False))}
    num_found = 0
    while len(found) > num_found:  # up to the roots: a module may have buffers and no parameters
        num_found = len(found)
        found |= {id(m) for m in modules if any(id(child) in found for child in m.children())}
    inner = {id(child) for m in modules if id(m) in found for child in m.children()}
    roots = [m for m in modules if id(m) in found and id(m) not in inner]
    roots.sort(key=lambda m: min(wanted.get(id(p), len(wanted)) for p in m.parameters()))
    return roots


def identity_of(parameter: Tensor) -> int:
    """The same for what is one parameter."""
    # DistributedDataParallel over tensor parallelism gives the module new parameters, of the same memory, each forward.
    return parameter.data_ptr() if getattr(parameter, "_st_info", None) is not None else id(parameter)


def check_parameters(parameters: Iterable[Tensor]) -> None:
    """Refuse what has no well-defined mean."""
    for index, parameter in enumerate(parameters):
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameters must have a shape, but parameter {index} is a lazy one; run one forward pass first"
            )
        if parameter.layout != torch.strided:
            raise ValueError(
                f"parameters must be dense, but parameter {index} has layout {parameter.layout}, whose entries need "
                "not match between replicas; use a dense parameter (sparse gradients are fine)"
            )


def shape_digest(tensors: Iterable[Tensor]) -> int:
    """A number that differs between ranks whose tensors differ in count, shape or dtype."""
    digest = 0
    for t in tensors:
        digest = zlib.crc32(f"{tuple(t.shape)}{t.dtype}".encode(), digest)
    return digest


def health_of(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Whether every floating-point value is finite: started here, and the call of what is returned waits for it."""
    floating = [t for t in memory_views(tensors) if t.is_floating_point() and t.numel()]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in floating:
        by_kind.setdefault((t.device, t.dtype), []).append(t)
    # The norm is the fastest pass over memory torch has and finite almost always; it may overflow where the values
    # do not, so only a non-finite norm is worth a look at the values themselves.
    norms = [doubled(torch.stack(torch._foreach_norm(kind))).sum() for kind in by_kind.values()]

    def read() -> bool:
        if math.isfinite(sum(norm.item() for norm in norms)):
            return True
        return all(bool(torch.isfinite(piece).all()) for t in floating for piece in pieces_of(t, BUCKET_BYTES))

    return read
