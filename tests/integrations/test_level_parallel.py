"""The first level on several processes: that of one process, whatever learning rate is given, and through a resume."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from hdet import AutoLR
from hdet.launch import launch
from job import alike, everyone
from native import Run, net, replicated

pytestmark = pytest.mark.slow

TOTAL_STEPS, STEPS = 200, 28
"""A warm-up of 12 steps, and four rounds more."""
LRS = (1e-8, 1.0, 100.0)
KINDS = {2: ("ddp", "fsdp", "tensor parallel"), 4: ("hsdp",)}
"""By number of ranks."""
SAVED_AT = {"search": 2, "warm-up": 7}


def _auto(optimizer: Optimizer, model: nn.Module) -> AutoLR:
    return AutoLR(optimizer, total_steps=TOTAL_STEPS, model=model)


class _Run(Run):
    """Without a schedule; it remembers losses."""

    def __init__(self, kind: str = "", lr: float = 1.0) -> None:
        place = (dist.get_rank(), dist.get_world_size()) if kind else (0, 1)
        model: nn.Module = net(8)
        if kind == "ddp":
            model = replicated(model)
        elif kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        elif kind == "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        elif kind == "tensor parallel":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            model, place = parallelize_module(model, init_device_mesh("cpu", (2,)), plan), (0, 1)
        self.losses: list[float] = []
        super().__init__(model, _auto, place, make=lambda parameters, lr, own=lr: torch.optim.Adam(parameters, lr=own))

    def loss(self, step: int | None = None) -> torch.Tensor:
        loss = super().loss(step)
        self.losses.append(loss.item())
        return loss

    @property
    def level(self) -> float:
        assert isinstance(self.scheduler, AutoLR)
        level = self.scheduler._run.policy.level
        assert level is not None
        assert level.done
        return level.lr


def _trained(kind: str = "", lr: float = 1.0) -> dict[str, Any]:
    """Learning rates, losses of the whole batch, level and final weights."""
    run = _Run(kind, lr)
    rows = run.advance(STEPS)
    losses = [run.losses] if not kind else everyone(run.losses)
    mean = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    return {"lrs": [lrs[0] for lrs, _ in rows], "losses": mean, "weights": rows[-1][1], "level": run.level}


def _resumed(kind: str, path: str, saved_at: int) -> bool:
    """Whether a run that was saved there goes on to the last bit."""
    whole, resumed = _Run(kind), _Run(kind, 100.0)
    whole.advance(saved_at)
    with whole.scheduler.converged():  # with what every rank has seen of the round
        save(_state(whole), checkpoint_id=path)
    expected = whole.advance(STEPS)
    state = _state(resumed)
    load(state, checkpoint_id=path)
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(resumed.model, resumed.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return resumed.advance(STEPS) == expected and resumed.level == whole.level


def _state(run: _Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": run.scheduler}


def _on_ranks(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet").addHandler(handler)
    out: dict[str, Any] = {}
    for kind in KINDS[dist.get_world_size()]:
        first, *others = (_trained(kind, lr) for lr in LRS)
        out[kind] = first | {"any start": all(other == first for other in others), "alike": alike(first)}
    out["told"] = list(told)
    for kind in ("ddp", "fsdp") if dist.get_world_size() == 2 else ():
        for name, step in SAVED_AT.items():
            out[f"{kind}, {name}"] = _resumed(kind, f"{folder}/{kind}-{step}", step)
    return out


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found, by the number of ranks."""
    folder = str(tmp_path_factory.mktemp("level"))
    return functools.cache(lambda num_ranks: launch(_on_ranks, num_ranks, folder, timeout_s=150))


@pytest.mark.parametrize(("num_ranks", "kind"), [(num, kind) for num, kinds in KINDS.items() for kind in kinds])
def test_all_ranks_find_what_one_process_finds_from_any_start(launched: Any, num_ranks: int, kind: str) -> None:
    alone = _trained()
    assert 1e-3 < alone["level"] < 1
    for rank in launched(num_ranks):
        found = rank[kind]
        assert found["any start"]
        assert found["alike"]
        for name, value in alone.items():
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_rank_says_what_was_found(launched: Any, num_ranks: int) -> None:
    first, *others = (rank["told"] for rank in launched(num_ranks))
    assert len(first) == len(LRS) * len(KINDS[num_ranks])
    assert all(line.startswith("the learning rate starts from ") for line in first)
    assert not any(others)


@pytest.mark.parametrize("name", SAVED_AT)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_the_first_steps_continues(launched: Any, kind: str, name: str) -> None:
    assert all(rank[f"{kind}, {name}"] for rank in launched(2))
