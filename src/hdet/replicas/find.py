"""How replicas are found: the default process group, a mesh dimension, or the group that is given."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.group import Replicas
from hdet.replicas.sharding import is_flat, mesh_groups, sharding


def find_replicas(optimizer: Optimizer, process_group: dist.ProcessGroup | None, *, spread: float) -> Replicas:
    """The replicas that train ``optimizer``'s parameters; those of the default group, unasked, where spread is 0.

    Without a ``process_group``: the default group for ordinary parameters; for sharded ones the one mesh dimension
    along which all of them are replicated. Raises ValueError where there are no replicas to fan out, only shards.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Replicas(None)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    has_shards = any(map(is_flat, parameters))
    shards_state = any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)
    if spread == 0:
        found = _spread_out(process_group or dist.group.WORLD, parameters)
        found.holds_all_parameters = not (
            shards_state or has_shards or any(sharding(p) is not None for p in parameters)
        )
        return found
    if shards_state:
        raise ValueError(
            "optimizer must not shard its state across ranks, but got ZeroRedundancyOptimizer: each rank updates "
            "only its own shard, so a learning rate per rank would become a learning rate per shard; use the "
            "plain optimizer"
        )
    if has_shards:
        raise ValueError(
            "parameters are sharded by FullyShardedDataParallel, which does not tell who holds which shard of a "
            "replica, so their shards could not decide alike; use fully_shard with a replicate dimension, or DDP"
        )
    if process_group is not None:
        replicas = _spread_out(process_group, parameters)
        _refuse_shards_as_replicas(process_group, parameters)
        return replicas
    sharded = [s for p in parameters if (s := sharding(p)) is not None]
    if not sharded:
        return Replicas(dist.group.WORLD)
    mesh = sharded[0].mesh
    names = mesh.mesh_dim_names or tuple(str(d) for d in range(mesh.ndim))
    replicated = [
        d
        for d in range(mesh.ndim)
        if mesh.size(d) > 1
        and len(sharded) == len(parameters)
        and all(s.mesh == mesh and s.placements[d].is_replicate() for s in sharded)
    ]
    if len(replicated) != 1:
        raise ValueError(
            "parameters are DTensors, and exactly one mesh dimension along which all of them are replicated is "
            f"needed to find the replicas, but got {[names[d] for d in replicated]} of {list(names)}; pass "
            'process_group=mesh.get_group("...") of the data-parallel replicate dimension; with none there are '
            "only shards, no replicas to fan out"
        )
    return _spread_out(mesh.get_group(replicated[0]), parameters)


def _spread_out(group: dist.ProcessGroup | None, parameters: Iterable[Tensor]) -> Replicas:
    """The replicas of ``group``, with the groups over which each of them is spread."""
    assert group is not None
    ranks = set(dist.get_process_group_ranks(group))
    parts: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for p in parameters:
        for _, _, part in mesh_groups(p):
            members = tuple(dist.get_process_group_ranks(part))
            if not ranks.issuperset(members):
                parts.setdefault(members, part)
    return Replicas(group, list(parts.values()))


def _refuse_shards_as_replicas(group: dist.ProcessGroup, parameters: Iterable[Tensor]) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for p in parameters:
        for placement, name, part in mesh_groups(p):
            together = sorted(ranks & set(dist.get_process_group_ranks(part)))
            if len(together) > 1 and not placement.is_replicate():
                raise ValueError(
                    "process_group must have the ranks that hold the same shard of different replicas, but its ranks "
                    f"{together} hold different shards, along mesh dimension {name!r}; pass the group of the "
                    "data-parallel replicate dimension; with none there are only shards, no replicas to fan out"
                )


def refuse_shared_gradients(replicas: Replicas, optimizer: Optimizer) -> None:
    """With local gradients: raise where parameters lie on a mesh over which their gradients are averaged all the same.

    ``set_requires_all_reduce(False)`` of FSDP2 is no way out: it postpones the reduction, and there are no gradients
    until it has been made up for.
    """
    if replicas.group is None:
        return
    ranks = set(dist.get_process_group_ranks(replicas.group))
    for group in optimizer.param_groups:
        for p in group["params"]:
            for _, name, part in mesh_groups(p):
                if ranks.issuperset(dist.get_process_group_ranks(part)):
                    raise ValueError(
                        'gradients="local" needs replicas that do not share a mesh, but gradients are averaged over '
                        f"mesh dimension {name!r} in every step; shard each replica by itself, fully_shard(model, "
                        'mesh=mesh["shard"]), and pass process_group=mesh.get_group("replicate")'
                    )
