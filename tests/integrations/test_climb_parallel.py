"""The climb on several processes: all end it at the same step with the same learning rate, that of one process."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from climbing import Run, make_optimizer, net
from hdet.knobs import Momentum
from hdet.launch import launch
from native import replicated

STEPS = 52
"""Three rounds after the longest climb."""
KINDS = {2: ("ddp", "fsdp", "tensor parallel"), 4: ("ddp", "hsdp")}
"""By number of ranks."""


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _ddp(**options: Any) -> Run:
    return Run(model=replicated(net()), place=_place(), named=True, **options)


def _fsdp(**options: Any) -> Run:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return Run(model=model, place=_place(), named=True, **options)


def _hsdp(**options: Any) -> Run:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Run(model=model, place=_place(), named=True, **options)


def _tensor_parallel(**options: Any) -> Run:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return Run(model=model, named=True, **options)  # all ranks have the whole batch


def _tell(run: Run) -> dict[str, Any]:
    first = run.weights
    ended = run.climb()
    back = run.weights == first
    rows = run.advance(STEPS)
    return {"ended": ended, "ending": run.ending, "back": back, "rows": rows}


def _resumes() -> list[bool]:
    """From every sixth step of the climb, through a file, to the third round after it."""
    whole = _ddp(kind="adam")
    states = []
    while whole.climbing:
        whole.step()
        states.append(whole.saved())
    until = len(states) + 13
    rows = whole.advance(until)
    out = []
    for state in states[::6]:
        resumed = _ddp(kind="adam")
        resumed.load(copy.deepcopy(state))
        out.append(resumed.advance(until)[-len(rows) :] == rows)
    return out


def _on_ranks(kinds: tuple[str, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {"ddp": _ddp, "fsdp": _fsdp, "hsdp": _hsdp, "tensor parallel": _tensor_parallel}
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet").addHandler(handler)
    out: dict[str, Any] = {kind: _tell(made[kind]()) for kind in kinds}
    out["told"] = list(told)
    if dist.get_world_size() == 2:
        out["resumes"] = _resumes()
        model = replicated(net())
        optimizer = make_optimizer("adam", model.parameters())
        beside = Run(model=model, optimizer=optimizer, place=_place(), named=True, knobs=[Momentum()])
        out["knobs"] = _tell(beside)
    return out


@functools.cache
def _launched(num_ranks: int) -> list[dict[str, Any]]:
    return launch(_on_ranks, num_ranks, KINDS[num_ranks], timeout_s=100)


@functools.cache
def _alone() -> dict[str, Any]:
    return _tell(Run())


@pytest.mark.parametrize(("num_ranks", "kind"), [(count, kind) for count, kinds in KINDS.items() for kind in kinds])
def test_all_ranks_find_what_one_process_finds(num_ranks: int, kind: str) -> None:
    alone = _alone()
    for rank in _launched(num_ranks):
        found = rank[kind]
        assert (found["ended"], found["ending"], found["back"]) == (alone["ended"], alone["ending"], True)
        assert len(found["rows"]) == len(alone["rows"])
        for (lrs, weights), (one_lrs, one_weights) in zip(found["rows"], alone["rows"], strict=True):
            assert lrs == pytest.approx(one_lrs, rel=1e-6)
            assert weights == pytest.approx(one_weights, rel=1e-6, abs=1e-8)
        assert found["rows"] == _launched(num_ranks)[0][kind]["rows"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_rank_says_so(num_ranks: int) -> None:
    first, *others = _launched(num_ranks)
    assert [line.startswith("the climb is over after") for line in first["told"]] == [True] * len(KINDS[num_ranks])
    assert all(rank["told"] == [] for rank in others)


def test_a_state_of_its_middle_continues_on_both_ranks() -> None:
    for rank in _launched(2):
        assert len(rank["resumes"]) > 4
        assert all(rank["resumes"])


def test_knobs_beside_it_do_not_keep_it_from_its_end() -> None:
    first, second = (rank["knobs"] for rank in _launched(2))
    assert first["ending"] in ("turned", "broken", "limit")
    assert (first["ended"], first["ending"]) == (second["ended"], second["ending"])
    assert [lrs for lrs, _ in first["rows"]] == [lrs for lrs, _ in second["rows"]]
    assert first["back"]
    assert second["back"]
    assert torch.tensor(first["rows"][-1][1]).isfinite().all()
