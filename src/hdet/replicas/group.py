"""Who the replicas are, and what they tell each other: facts when they start, a report when a round ends.

They are a process group, a mesh dimension, or this process alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import BoolArray, FloatArray
from hdet.replicas.sharding import is_flat, mesh_groups, sharding

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


MAX_LISTED = 20
"""So many disagreements are named."""

# How often this process has called `agree` in each group: all its ranks count alike, so that (group, number) names
# one call in the store.
_num_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Replicas:
    """The copies of one model. ``index`` is this process's place among ``count`` replicas.

    A replica may be spread over several processes (its shards). ``group`` then has the processes that hold the same
    shard of different replicas, and ``parts`` the groups of processes that make up one replica, one group for each
    mesh dimension.
    """

    def __init__(self, group: dist.ProcessGroup | None, parts: Sequence[dist.ProcessGroup] = ()) -> None:
        self.group = group
        self.parts = tuple(parts)
        self.num_parts = math.prod(dist.get_world_size(part) for part in self.parts)
        self.index = dist.get_rank(group) if group is not None else 0
        self.count = dist.get_world_size(group) if group is not None else 1
        self.device = collective_device(group) if group is not None else torch.device("cpu")
        self._device_types = device_types(group) if group is not None else set()
        self.holds_all_parameters = True
        """Whether each of them holds all that it trains; False where members of the group are shards of one model."""
        self._key = ""
        self._lost = False
        self._step = 0

    def agree(self, facts: Mapping[str, Any], *, by_group: Sequence[Mapping[str, Any]] = (), wait: bool = True) -> None:
        """Raise on every replica when replicas disagree about ``facts``. No collective, no weights touched.

        ``by_group``: further facts about each param group.

        It takes place in the process group's key-value store, where a replica that never comes, or comes
        with other arguments, is found out instead of leaving the rest in a collective that cannot match. The cost is
        a handful of small messages a replica, whatever their number. With ``wait=False`` this replica only states its
        facts. The last to leave clears up: torchrun restarts workers with the same store.
        """
        if self.group is None or self.count == 1:
            return
        call = _num_calls[self.group] = _num_calls.get(self.group, 0) + 1
        key = self._key = f"hdet/{self.group.group_name}/{dist.get_process_group_ranks(self.group)[0]}/{call}"
        store = _store()
        stated = {name: str(value) for name, value in facts.items()}
        text = json.dumps({"all": stated, "groups": _in_runs(by_group)})
        store.set(f"{key}/step/{self.index}", "0")
        store.set(f"{key}/reason/{self.index}", "")
        store.set(f"{key}/facts/{self.index}", text)
        digest = f"{key}/digest/{zlib.crc32(text.encode())}"
        store.add(digest, 1)
        if store.add(f"{key}/arrived", 1) == self.count:
            # Last to arrive, so by now every digest has been counted: how many are like mine? Only a disagreement is
            # worth reading everyone's facts.
            verdict = "" if store.add(digest, 0) == self.count else self._disagreement(store, key)
            store.set(f"{key}/verdict", verdict or "agreed")
        try:
            verdict = store.get(f"{key}/verdict").decode() if wait else "agreed"
        except Exception as error:  # torch raises several types for a store that times out
            missing = [r for r in range(self.count) if not store.check([f"{key}/facts/{r}"])]
            raise RuntimeError(
                f"replicas {missing} did not construct the scheduler while replica {self.index} waited for them; "
                "construct it on every rank of the process group, with the same arguments"
            ) from error
        if verdict != "agreed":
            raise ValueError(verdict)
        if store.add(f"{key}/left", 1) == self.count:
            facts_of_all = [f"facts/{r}" for r in range(self.count)]
            with contextlib.suppress(Exception):  # not every store can delete; those of torchrun's default can
                for name in (digest.removeprefix(f"{key}/"), "arrived", "verdict", "left", *facts_of_all):
                    store.delete_key(f"{key}/{name}")

    def _disagreement(self, store: Store, key: str) -> str:
        facts = [_all_facts(json.loads(store.get(f"{key}/facts/{r}"))) for r in range(self.count)]
        lines = []
        for name in dict.fromkeys(name for fact in facts for name in fact):
            by_value: dict[str, list[int]] = {}
            for r, fact in enumerate(facts):
                by_value.setdefault(fact.get(name, "absent"), []).append(r)
            if len(by_value) > 1:
                said = ", ".join(f"{value} on replicas {rs}" for value, rs in by_value.items())
                lines.append(f"{name}={said}")
        if len(lines) > MAX_LISTED:
            lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
        # A start that was cut short may have left arrivals behind, so that not all digests had been counted.
        return "replicas must agree about their arguments and parameters, but got " + "; ".join(lines) if lines else ""

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes of all replicas, in place. A collective."""
        for each in (self.group, *self.parts):
            if each is not None:
                dist.all_reduce(tensor, group=each)
        return tensor

    def any_true(self, flag: Tensor) -> Tensor:
        """Whether ``flag``, a boolean, is true on any of them. A collective, which the host does not wait for."""
        if self.group is None:
            return flag
        device = flag.device if flag.device.type in self._device_types else self.device
        found = flag.to(device, torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return (found > 0).to(flag.device)

    def gather(self, values: Sequence[float], *, step: int | None = None) -> FloatArray:
        """Everyone's ``values``, by replica and part; a collective. Names who is missing when it fails.

        ``step``: which one it is for; default that of the last call.
        """
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)[None]
        if self.group is None:
            return mine.numpy()[None]
        if step is not None:
            self._step = step
            if self._key:
                _store().set(f"{self._key}/step/{self.index}", str(step))
        try:
            for part in self.parts:
                mine = torch.cat(_all_gather(mine, part))
            return torch.stack(_all_gather(mine, self.group)).cpu().numpy()
        except RuntimeError as error:
            self._lost = True
            raise RuntimeError(self._who_is_missing(self._step)) from error

    def exchange(
        self,
        mine: Report,
        *,
        losses_required: bool,
        updates_alike: bool = False,
        num_steps: int | None = None,
        evaluations_alike: bool = False,
    ) -> Reports:
        """Everyone's facts; an error on all replicas where they cannot go on together.

        Nothing has been changed when it raises. One small collective.
        """
        rows = self.gather([float(fact) for fact in mine], step=mine.step)
        found = dict(zip(Report._fields, np.moveaxis(rows, 2, 0), strict=True))  # by replica and part
        # What a replica's parts saw makes up what it saw. All must decide alike, or its shards no longer fit together.
        totals, weights = found["total"].sum(axis=1), found["weight"].sum(axis=1)
        steps, states, shapes = found["step"].flatten(), found["state"].flatten(), found["shapes"]
        if len(set(steps)) > 1:
            by_replica = [sorted({int(s) for s in parts}) for parts in found["step"]]
            listing = ", ".join(f"replica {r}: {' and '.join(map(str, all_))}" for r, all_ in enumerate(by_replica))
            asked = found["asked"].max(axis=1) > 0
            alone = (
                f"only replicas {np.flatnonzero(asked).tolist()} are in converge(), converged() or finish(), which "
                "must be called on every rank after the same step; "
            )
            raise RuntimeError(
                f"replicas must take the same number of steps between converges, but got {listing}; "
                f"{alone if asked.any() and not asked.all() else ''}"
                "check for uneven data or steps skipped on some ranks. No weights were averaged"
            )
        num_updates = found["num_updates"][:, 0]
        if updates_alike and len(set(found["num_updates"].flatten())) > 1:
            listing = ", ".join(f"replica {r}: {int(n)}" for r, n in enumerate(num_updates))
            raise RuntimeError(
                "replicas that share gradients must take the same optimizer steps, but in the round up to step "
                f"{mine.step} they took {listing}; never skip optimizer.step() on some ranks alone. Nothing was "
                "averaged"
            )
        # Fewer than the scheduler's is a GradScaler's business. More on some: they have left out scheduler.step().
        if num_steps is not None and num_updates.min() <= num_steps < num_updates.max():
            listing = ", ".join(f"replica {r}: {int(n)}" for r, n in enumerate(num_updates))
            raise RuntimeError(
                f"scheduler.step() must follow every optimizer step on all replicas, but in the {num_steps} steps up "
                f"to step {mine.step} their optimizers took {listing}; never skip it on some ranks alone. Nothing was "
                "averaged"
            )
        if (shapes != shapes[0]).any():  # parts of one replica may differ, those of two not
            raise RuntimeError(
                f"replicas must hold the same parameters, but their shapes differ at step {mine.step} (digest by "
                f"replica: {[int(s) for s in shapes.flatten()]}); add param groups and freeze parameters on all ranks "
                "alike"
            )
        if len(set(states)) > 1:
            raise RuntimeError(
                f"replicas must continue from the same scheduler state, but at step {mine.step} theirs differ (digest "
                f"by replica: {[int(d) for d in states]}); load the same state_dict on every rank"
            )
        if losses_required and not weights.all():
            raise RuntimeError(
                f"the controller needs a loss from every replica in every round, but replicas "
                f"{np.flatnonzero(weights == 0).tolist()} gave none up to step {mine.step}; "
                "call step(loss), or observe(loss) before a bare step()"
            )
        given = [found[name].flatten() for name in ("num_evaluations", "evaluation")]
        if evaluations_alike and any(
            not np.array_equal(each, np.full_like(each, each[0]), equal_nan=True) for each in given
        ):
            raise RuntimeError(
                "with Copies(best=True) every rank must pass the same validation loss to evaluated(), after the same "
                f"step, but in the round up to step {mine.step} ranks passed {[int(n) for n in given[0]]} losses, with "
                f"the sums {given[1].tolist()}; reduce the loss over ranks first (in Lightning, self.log(..., "
                "sync_dist=True))"
            )
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = totals / weights
        num_evaluations = float(found["num_evaluations"].sum())
        evaluation = float(found["evaluation"].sum()) / num_evaluations if num_evaluations else math.nan
        frozen, mode_given = bool(found["frozen"].any()), bool(found["mode_given"].any())
        finite = found["finite"].min(axis=1) > 0
        checksums = np.stack([found[name].flatten() for name in ("whole", "part", "place")], axis=1)
        return Reports(totals, weights, losses, finite, num_updates, frozen, evaluation, mode_given, checksums)

    @contextlib.contextmanager
    def telling_others(self, step: int) -> Iterator[None]:
        """Around all that replicas do together: what one of them raises there is told to those it leaves waiting."""
        self._lost = False
        try:
            yield
        except Exception as error:
            if self._lost or not self._key:
                raise
            text = f"{type(error).__name__}: {str(error)[:1000]}"
            # Where all have found out the same there is nothing to add.
            others = [reason for reason in self._reasons() if text not in reason]
            if isinstance(error, RuntimeError) and others:  # a collective that failed with the one that has raised
                raise RuntimeError(f"{error} (at the converge of step {step}; {'; '.join(others)})") from error
            with contextlib.suppress(Exception):
                _store().set(f"{self._key}/reason/{self.index}", text)
            raise

    def _reasons(self) -> list[str]:
        """What other replicas have raised."""
        found = []
        with contextlib.suppress(Exception):  # the process that hosts the store may be the one that died
            for r in range(self.count):
                key = f"{self._key}/reason/{r}"
                if r != self.index and _store().check([key]) and (text := _store().get(key).decode()):
                    found.append(f"replica {r} raised {text}")
        return found

    def _who_is_missing(self, step: int) -> str:
        lost = f"replica {self.index} lost the others at the converge of step {step}"
        if reasons := self._reasons():
            return f"{lost}: {'; '.join(reasons)}"
        try:
            store = _store()
            steps = {}
            for r in range(self.count):
                key = f"{self._key}/step/{r}"
                steps[r] = int(store.get(key)) if store.check([key]) else 0
        except Exception:  # the process that hosts the store may be the one that died
            return f"{lost}; their steps cannot be read, because the process group's store is gone too"
        late = {r: s for r, s in steps.items() if s != step}
        if not late and self.parts:
            return (
                f"{lost}; every replica's process with this shard is there, so one with another shard is missing. All "
                "processes must take the same number of optimizer steps: check for uneven data or a crashed rank"
            )
        return (
            f"{lost}; last converge reached by each of the missing replicas (replica: step): {late}. Every replica "
            "must take the same number of optimizer steps, and enter converged() with the others: check for uneven "
            "data, skipped steps, a converged() or converge() on some ranks alone, or a crashed rank"
        )


def _in_runs(by_group: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str | None, int]]]:
    """By name the value of each group, neighbours that are equal counted: most are, and there may be thousands."""
    names = dict.fromkeys(name for facts in by_group for name in facts)
    columns = {name: [str(facts[name]) if name in facts else None for facts in by_group] for name in names}
    return {name: [(value, len(list(run))) for value, run in itertools.groupby(columns[name])] for name in names}


def _all_facts(found: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, str] = dict(found["all"])
    for name, runs in found["groups"].items():
        values = [value for value, length in runs for _ in range(length)]
        facts |= {f"{name} of param group {k}": value for k, value in enumerate(values) if value is not None}
    return facts


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return rows


def _store() -> Store:
    """Of the default group; older releases of torch have no public name for it."""
    public = getattr(dist.group.WORLD, "get_group_store", None)
    return public() if public is not None else dist.distributed_c10d._get_default_store()


def device_types(group: dist.ProcessGroup) -> set[str]:
    """Kinds of devices that the group has a backend for."""
    return {pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")}


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where small collectives live: the host if the backend can, else the accelerator."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    kind = next(iter(types))
    return torch.device(kind, torch.get_device_module(kind).current_device())


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


class Report(NamedTuple):
    """One replica's facts at the end of a round, or when asked in its middle.

    Attributes:
        step: optimizer steps it has taken.
        total, weight: weighted sum of its losses, and the weights'.
        finite: whether its weights are.
        shapes, state: digests of what it would average, and of where its scheduler stands.
        num_updates: calls of its optimizer in this round; 0 where they are not counted.
        asked: whether it was called for, by converge(), converged() or finish(), instead of ending a round.
        frozen: whether it was told to hold its scale.
        evaluation, num_evaluations: sum of the validation losses that it was given since, and how many.
        mode_given: whether it was told which way they are better.
        whole, part, place: the :class:`~hdet.replicas.fork.Checksum` of its weights; zeros where none is taken.
    """

    step: int
    total: float
    weight: float
    finite: bool
    shapes: int
    state: int
    num_updates: int = 0
    asked: bool = False
    frozen: bool = False
    evaluation: float = 0.0
    num_evaluations: float = 0.0
    mode_given: bool = False
    whole: int = 0
    part: int = 0
    place: int = 0


class Reports(NamedTuple):
    """Everyone's facts, an entry for each replica.

    Attributes:
        totals, weights, losses: weighted sum of the losses, the weights' sum, and their quotient, NaN without any.
        finite: whose weights are finite.
        num_updates: calls of the optimizer.
        frozen: whether any was told to hold its scale.
        evaluation: the mean of the validation losses that any was given; NaN without.
        mode_given: whether any was told which way they are better.
        checksums: of the weights, a row for each process.
    """

    totals: FloatArray
    weights: FloatArray
    losses: FloatArray
    finite: BoolArray
    num_updates: FloatArray
    frozen: bool
    evaluation: float
    mode_given: bool
    checksums: FloatArray
