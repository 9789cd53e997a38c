"""The parameters that replicas train: which they are, and what has no well-defined mean."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def trained_parameters(optimizer: Optimizer, model: nn.Module | None) -> list[nn.Parameter]:
    """Every parameter of the optimizer and the model, each once."""
    found: dict[int, nn.Parameter] = {}
    groups: Iterable[Iterable[nn.Parameter]] = [g["params"] for g in optimizer.param_groups]
    for source in [*groups, *([model.parameters()] if model is not None else [])]:
        for parameter in source:
            found.setdefault(_identity(parameter), parameter)
    return list(found.values())


def buffers_beside(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Buffers of the models that have any of these parameters, found among all that this process holds.

    Their order depends on the models and the parameters alone.
    """
    wanted = {id(p): place for place, p in enumerate(parameters)}
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    found = {id(m) for m in modules if any(id(p) in wanted for p in m._parameters.values())}
    num_found = 0
    while len(found) > num_found:  # up to the roots: a module may have buffers and no parameters
        num_found = len(found)
        found |= {id(m) for m in modules if any(id(child) in found for child in m._modules.values())}
    inner = {id(child) for m in modules if id(m) in found for child in m._modules.values()}
    roots = [m for m in modules if id(m) in found and id(m) not in inner]
    roots.sort(key=lambda m: min(wanted.get(id(p), len(wanted)) for p in m.parameters()))
    return list({id(b): b for root in roots for b in root.buffers()}.values())


def refuse_copies(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Raise where an optimizer trains copies or shards of the model's parameters instead of the parameters."""
    own = {_identity(p) for p in model.parameters()} if model is not None else set()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if own and trained and not any(_identity(p) in own for p in trained):
        raise ValueError(
            f"the optimizer must train parameters of the model that is averaged, but none of its {len(trained)} "
            "tensors is one: they are copies or shards that a wrapper made (mixed precision, ZeRO), and a mean of "
            "those need not be a model. Let the optimizer train the model itself, or pass the model that it trains"
        )


def _identity(parameter: Tensor) -> int:
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
