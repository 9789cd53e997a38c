"""AutoLR with an anchor of a share of the entries: saved and continued, sharded, and where it is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, Copies, Ensemble, Explorer
from hdet.ensemble.knobs import LearningRate
from job import launch

STEPS, SAVED_AT, INTERVAL = 20, 9, 4


def _net() -> nn.Sequential:
    """Two tensors of more than 4096 entries, of 67 rows: no number of ranks shares them out evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 67), nn.Tanh(), nn.Linear(67, 67), nn.Tanh(), nn.Linear(67, 1)).double()


class _Run:
    def __init__(self, model: nn.Module, share: float | None = 1 / 8, signal: Any = "gradient") -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.auto = AutoLR(
            CosineAnnealingLR(self.optimizer, 100),
            model=model,
            interval=INTERVAL,
            ensemble=Ensemble(spread=0.1) if signal == "loss" else None,
            adapt=Adapt(_start_steps=0, level=False),
            copies=Copies(anchor_share=share),
        )
        self.steps = 0

    def advance(self, until: int) -> list[float]:
        lrs = []
        for step in range(self.steps, until):
            x = torch.randn(24, 96, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            if dist.is_initialized():
                x = x.tensor_split(dist.get_world_size())[dist.get_rank()]
            self.optimizer.zero_grad()
            loss = (self.model(x) - x[:, :1].sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.auto.step(loss)
            lrs.append(float(self.optimizer.param_groups[0]["lr"]))
        self.steps = until
        return lrs

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "scheduler": self.auto.state_dict()})

    def copies(self) -> list[Tensor]:
        anchor = self.auto._run.anchor
        assert anchor is not None
        return anchor.copies


def _resumed(state: dict[str, Any], model: nn.Module, **options: Any) -> _Run:
    run = _Run(copy.deepcopy(model), **options)
    run.optimizer.load_state_dict(state["optimizer"])
    run.auto.load_state_dict(state["scheduler"])
    run.steps = SAVED_AT
    return run


def test_a_run_continues_with_the_share_it_was_saved_with_bit_for_bit() -> None:
    run = _Run(_net())
    before = run.auto.state_dict()
    run.advance(SAVED_AT)
    assert [tuple(c.shape) for c in run.copies()[::2]] == [(67, 12), (67, 8), (1, 67)]
    state = run.state()
    after = state["scheduler"]["rounds"]
    assert before["rounds"].keys() == after.keys()
    assert [t.shape for t in before["rounds"]["anchor"]] == [t.shape for t in after["anchor"]]
    saved = copy.deepcopy(run.model)
    expected = run.advance(STEPS)
    assert len(set(expected)) > 5
    assert _resumed(state, saved).advance(STEPS) == expected


def test_a_whole_anchor_serves_every_share() -> None:
    run = _Run(_net(), 1)
    run.advance(SAVED_AT)
    state = run.state()
    older = copy.deepcopy(state)
    del older["scheduler"]["rounds"]["anchor_stride"]  # as saved before there were shares
    first = run.copies()[0].clone()
    for each in (state, older):
        for share in (1, 1 / 8, 1 / 32):
            sampled = _resumed(each, run.model, share=share)
            anchor = sampled.auto._run.anchor
            assert anchor is not None
            assert torch.equal(anchor.copies[0], anchor.kept([first], anchor.columns[:1])[0])
            assert all(lr > 0 for lr in sampled.advance(STEPS))


@pytest.mark.parametrize(("share", "needs"), [(1, "all of them"), (None, "all of them"), (1 / 4, "1 in 4")])
def test_a_share_is_refused_by_runs_with_another(share: float | None, needs: str) -> None:
    run = _Run(_net())
    run.advance(SAVED_AT)
    state = run.state()
    with pytest.raises(
        ValueError, match=rf"1 in 8 of its entries, and this run needs {needs}: construct .*anchor_share=1 / 8"
    ):
        _resumed(state, run.model, share=share)
    with pytest.raises(ValueError, match="anchor_stride must be an integer >= 1"):
        _resumed({**state, "scheduler": _with(state["scheduler"], "anchor_stride", 0)}, run.model)
    with pytest.raises(ValueError, match="anchor must have the shapes"):
        _resumed({**state, "scheduler": _with(state["scheduler"], "anchor_stride", 3)}, run.model)


def _with(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**state, "rounds": {**state["rounds"], name: value}}


@pytest.mark.filterwarnings("ignore:.*there is one")
def test_shares_are_refused_where_the_whole_anchor_is_needed() -> None:
    copies = Copies(anchor_share=1 / 16)
    message = "anchor_share below 1 needs the gradient signal without a spread"
    with pytest.raises(ValueError, match=message):
        _Run(_net(), 1 / 16, signal="loss")
    model = _net()
    with pytest.raises(ValueError, match=message):
        Explorer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            knobs=[LearningRate()],
            interval=4,
            gradients="local",
            copies=copies,
        )
    _Run(_net(), 1, signal="loss")
    for wrong in (0, -1, 1.5, float("nan"), "1/16"):
        with pytest.raises(ValueError, match=r"anchor_share must be None or in \(0, 1\]"):
            Copies(anchor_share=wrong)  # type: ignore[arg-type]


# -- sharded ----------------------------------------------------------------------------------------------------------


def _sharded(*sizes: int) -> nn.Module:
    model = _net()
    # Of no other test: torch takes a mesh of another job in this process for an equal one, with groups that are gone.
    names = ("copies", "parts")[-len(sizes) :]
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    return model


def _save(run: _Run, path: str) -> None:
    with run.auto.converged():
        model, optimizer = get_state_dict(run.model, run.optimizer)
        save({"model": model, "optimizer": optimizer, "scheduler": run.auto}, checkpoint_id=path)


def _load(run: _Run, path: str) -> _Run:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    load({"model": model, "optimizer": optimizer, "scheduler": run.auto}, checkpoint_id=path)
    set_optimizer_state_dict(run.model, run.optimizer, optimizer)
    run.steps = SAVED_AT
    return run


def _meshes(folder: str) -> dict[str, Any]:
    shapes: dict[str, Any] = {
        "whole": lambda: DistributedDataParallel(_net()),
        "4": lambda: _sharded(4),
        "2x2": lambda: _sharded(2, 2),
    }
    out: dict[str, Any] = {"runs": {}, "resumed": {}}
    for name, make in shapes.items():
        run = _Run(make())
        run.advance(SAVED_AT)
        if name != "whole":
            _save(run, f"{folder}/{name}")
        out["runs"][name] = run.advance(STEPS)
    for saved, loaded in (("4", "2x2"), ("2x2", "4"), ("4", "4")):
        out["resumed"][f"{saved} as {loaded}"] = _load(_Run(shapes[loaded]()), f"{folder}/{saved}").advance(STEPS)
    return out


@pytest.mark.slow
def test_shards_hold_their_part_of_the_same_entries(tmp_path: Path) -> None:
    """On every mesh the run is that of the whole model, and so is one that goes on upon another mesh."""
    for found in launch(_meshes, 4, str(tmp_path), timeout_s=150):
        expected = found["runs"]["whole"]
        assert len(set(expected)) > 5
        for lrs in (*found["runs"].values(), *found["resumed"].values()):
            assert lrs == pytest.approx(expected, rel=1e-9)
