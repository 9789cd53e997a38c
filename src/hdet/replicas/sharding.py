"""How a parameter lies on a mesh and in memory: this rank's part of it, its form in a checkpoint. No collective."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs

LARGE_MODEL = 10_000_000
"""Parameters above which a model is large: it keeps less on its device, and looks at its gradients less often."""


class Sharding(NamedTuple):
    """How a parameter lies on a mesh, and its whole shape."""

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Without the module that has the class, which takes long to load, there are none."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False  # asked of every tensor in every round: this is the fastest answer
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharding(parameter: Tensor) -> Sharding | None:
    """None for a parameter that this process holds whole."""
    if is_dtensor(parameter):
        return Sharding(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
    # DistributedDataParallel over a sliced mesh trains the local parts of a tensor-parallel model's DTensors.
    spec: Any = getattr(parameter, "_st_info", None)
    return None if spec is None else Sharding(spec.mesh, spec.placements, spec.shape, tuple(spec.stride))


def is_flat(parameter: Tensor) -> bool:
    """Whether FullyShardedDataParallel (FSDP1) has it, which does not tell whose part is where."""
    return type(parameter).__name__ == "FlatParameter" or bool(getattr(parameter, "_fsdp_flattened", False))


def num_shards(parameter: Tensor) -> int:
    """Into how many parts a parameter is cut. Parts add up in a sum over ranks; copies have to be averaged."""
    found = sharding(parameter)
    if found is None:
        return 1
    sizes = zip(found.mesh.shape, found.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def shares_of(parameters: Iterable[Tensor], num_ranks: int) -> list[float]:
    """What this rank's part of each counts in a sum over so many ranks."""
    return [num_shards(p) / num_ranks for p in parameters]


def mesh_groups(parameter: Tensor) -> list[tuple[Placement, str, dist.ProcessGroup]]:
    """Placement, name and process group of each mesh dimension, longer than 1, that a parameter lies on."""
    found = sharding(parameter)
    if found is None:
        return []
    names = found.mesh.mesh_dim_names or tuple(str(d) for d in range(found.mesh.ndim))
    return [
        (found.placements[d], names[d], found.mesh.get_group(d))
        for d in range(found.mesh.ndim)
        if found.mesh.size(d) > 1
    ]


def as_saved(part: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """A copy of ``part``, this rank's of something like a parameter, in the form to be saved: sharded alike.

    ``shape``: of the whole, where it is not the parameter's.
    """
    found = sharding(parameter)
    if found is not None and shape is not None:
        found = found._replace(shape=shape, stride=torch.empty(shape, device="meta").stride())
    return part.clone() if found is None else on_mesh(part.clone(), found)


def on_mesh(part: Tensor, found: Sharding) -> DTensor:
    """Something sharded in this way, of which this rank has ``part``."""
    from torch.distributed.tensor import DTensor  # loaded already where a parameter lies on a mesh

    mesh, placements, shape, stride = found
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_part(saved: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """The inverse of :func:`as_saved`; a whole tensor is cut as the parameter is. No collective."""
    found = sharding(parameter)
    if found is not None and shape is None:
        shape = found.shape
    if is_dtensor(saved):
        if found is None or list(saved.placements) != list(found.placements) or saved.shape != shape:
            raise ValueError(
                f"a state saved with placements {saved.placements} cannot be loaded where they are "
                f"{None if found is None else tuple(found.placements)}; save whole tensors, or use "
                "torch.distributed.checkpoint, which shards them for this mesh"
            )
        here, there = found.mesh.get_coordinate(), saved.device_mesh.get_coordinate()
        if here != there:
            raise ValueError(
                f"a state of sharded tensors was saved by the rank at {there} of the mesh, and cannot be loaded by the "
                f"one at {here}; use torch.distributed.checkpoint, or a file for each rank, or save whole tensors"
            )
        return saved.to_local()
    if found is not None and saved.shape == shape and num_shards(parameter) > 1:
        from torch.distributed.tensor import distribute_tensor

        saved = distribute_tensor(saved, found.mesh, found.placements, src_data_rank=None).to_local()
    return saved


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory."""
    if type(tensor) is Tensor and not tensor.requires_grad:
        return tensor
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor


def own_tensor(tensor: Tensor) -> Tensor:
    """The same where no gradient is recorded, at once where it is the tensor itself."""
    return tensor if type(tensor) is Tensor or type(tensor) is nn.Parameter else local_tensor(tensor)


def doubled(tensor: Tensor) -> Tensor:
    """In float64; on the host, where it is on an Apple GPU, which has none."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """That of each."""
    return [local_tensor(t) for t in tensors]


def memory_view(tensor: Tensor) -> Tensor:
    """A view that names every element of memory once: expanded dimensions are cut to length 1."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor
    for dim in expanded_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def memory_views(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each, every element of memory once."""
    return [memory_view(t) for t in local_tensors(tensors)]


def expanded_dims(tensor: Tensor) -> list[int]:
    """Dimensions along which all elements share their memory."""
    return [d for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if stride == 0 and n > 1]


def num_parameters(optimizer: Optimizer, *, whole: bool = False) -> float:
    """Of a rank's even share, which is the same on all ranks where their own differ; or of the ``whole`` model."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(whole_size(p) / (1 if whole else num_shards(p)) for p in parameters)


def whole_size(parameter: Tensor) -> float:
    """Entries of a parameter, of which a rank may have a part."""
    found = sharding(parameter)
    return float(parameter.numel() if found is None else found.shape.numel())
