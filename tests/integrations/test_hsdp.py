"""FSDP2: two replicas of two shards each train as two whole ones do; shards alone train by the gradient signal."""

from __future__ import annotations

import functools
import io
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from hdet.launch import launch
from hdet.replicas.group import find_replicas
from hdet.replicas.sharding import local_tensor
from job import alike, error, everyone
from native import FACES, TOTAL_STEPS, Run, batch, net, paper

pytestmark = pytest.mark.slow

SAVED_AT = 6  # in the middle of the second round of three
LATER = 9  # in the third
FOREACH = functools.partial(torch.optim.Adam, foreach=True)  # sooner done with sharded tensors


def _sharded(mesh: DeviceMesh, num_hidden: int = 5) -> nn.Module:
    """Five hidden units: shards of unequal size, and one of the last layer is empty."""
    model = net(num_hidden)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class _Setting:
    """Ranks 0 and 1 are the shards of replica 0, ranks 2 and 3 those of replica 1."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.replica, self.shard = self.mesh.get_local_rank("replicate"), self.mesh.get_local_rank("shard")
        self.group = self.mesh.get_group("replicate")

    def hsdp(self, name: str, **options: Any) -> Run:
        return Run(_sharded(self.mesh), FACES[name], (self.replica + 2 * self.shard, 4), make=FOREACH, **options)

    def ddp(self, name: str, **options: Any) -> Run:
        """Two replicas, twice: on ranks 0 and 2, and on 1 and 3."""
        model = DistributedDataParallel(net(5), process_group=self.group)
        group = None if name == "gradient" else self.group  # WORLD is as good where replicas are equal
        return Run(model, FACES[name], (self.replica, 2), make=FOREACH, process_group=group, **options)


@functools.cache
def _setting() -> _Setting:
    """One for all: to connect its groups takes as long as a run."""
    return _Setting()


def _equal() -> dict[str, Any]:
    setting = _setting()
    out: dict[str, Any] = {}
    for name in FACES:
        mine, whole = setting.hsdp(name), setting.ddp(name)
        out[name] = {
            "hsdp": (mine.advance(TOTAL_STEPS), mine.told()),
            "ddp": (whole.advance(TOTAL_STEPS), whole.told()),
        }
        out[name]["scales alike"] = alike([scales for _, _, scales, _ in mine.told()])
    return out


def _resumed(folder: str) -> dict[str, Any]:
    setting = _setting()
    out: dict[str, Any] = {}
    for name in FACES:
        whole = setting.hsdp(name)
        whole.advance(SAVED_AT)
        if name == "paper":  # without an anchor there is no line on which a replica would find its place again
            whole.scheduler.converge()
        with whole.converged():
            model, optimizer = get_state_dict(whole.model, whole.optimizer)
            state = {"model": model, "optimizer": optimizer, "scheduler": whole.scheduler}
            save(state, checkpoint_id=f"{folder}/{name}")
        expected = whole.advance(LATER)
        resumed = setting.hsdp(name)
        model, optimizer = get_state_dict(resumed.model, resumed.optimizer)
        load({"model": model, "optimizer": optimizer, "scheduler": resumed.scheduler}, checkpoint_id=f"{folder}/{name}")
        set_optimizer_state_dict(resumed.model, resumed.optimizer, optimizer)
        out[name] = (expected, resumed.advance(LATER))
    return out


def _parts() -> dict[str, Any]:
    """Where the replicas are, and what is kept of the weights: this rank's part alone."""
    setting = _setting()
    out: dict[str, Any] = {}
    model = _sharded(setting.mesh)
    replicas = find_replicas(torch.optim.SGD(model.parameters(), lr=0.1), None, spread=0.1)
    out["index"] = replicas.index == setting.replica and replicas.count == 2
    out["parts"] = [dist.get_process_group_ranks(part) for part in replicas.parts] == [
        [2 * setting.replica, 2 * setting.replica + 1]
    ]
    run = setting.hsdp("nesterov")
    run.advance(5)
    shapes = [local_tensor(p).shape for p in run.model.parameters()]
    loop: Any = run.scheduler._run
    assert loop.anchor is not None
    assert loop.undo is not None
    snapshot = loop.undo.snapshot._last
    assert snapshot is not None
    out["anchor"] = [t.shape for t in loop.anchor.copies] == shapes
    out["centre"] = [t.shape for t in loop.replication.outer.centre.copies] == shapes
    out["velocity"] = [t.shape for t in loop.replication.outer.velocity] == shapes
    out["snapshot"] = [t.shape for t in snapshot.tensors.values()] == shapes
    out["lr by replica"] = len({row[0] for row in everyone(run.lrs())}) == 2
    out["lr of a replica's shards"] = len(set(everyone((setting.replica, run.lrs()[0])))) == 2

    # Gradients are averaged over both dimensions of the mesh.
    run = setting.hsdp("paper")
    torch.autograd.backward(run.loss(1))
    whole = net(5)
    x, y = batch(1)
    torch.autograd.backward(nn.functional.mse_loss(whole(x), y))
    for got, want in zip(run.model.parameters(), whole.parameters(), strict=True):
        assert isinstance(got.grad, DTensor)
        assert want.grad is not None
        out["gradient of all"] = out.get("gradient of all", True) and torch.allclose(got.grad.full_tensor(), want.grad)
    return out


def _broken() -> dict[str, Any]:
    """Something is wrong with one shard; the others of its replica must not go on as if nothing were."""
    setting = _setting()
    out: dict[str, Any] = {}
    for name in ("paper", "loss"):
        run = setting.hsdp(name)
        run.advance(7)
        run.step(lambda run=run: _spoil(run, dist.get_rank() == 3))  # type: ignore[misc]
        record = run.scheduler.history[-1]
        out[f"{name}: one replica is left out, by all"] = alike(record.unhealthy) and record.unhealthy == (1,)
        out[f"{name}: finite"] = all(math.isfinite(w) for w in run.weights())
        with run.converged():
            out[f"{name}: one model"] = alike(run.weights())

    run = setting.hsdp("loss")
    run.advance(4)
    with run.converged():
        centre = run.weights()  # where the healthy round from 4 to 8 starts
    run.advance(11)
    run.step(lambda: _spoil(run, setting.shard == 1))
    out["both broken: undone by all"] = alike(run.scheduler.history[-1].num_rollbacks)
    out["both broken: undone"] = run.scheduler.history[-1].num_rollbacks == 1
    with run.converged():
        out["both broken: back"] = np.allclose(run.weights(), centre, rtol=1e-10)
    return out


def _spoil(run: Run, here: bool) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            if here:
                local_tensor(p).fill_(math.nan)


def _evaluated() -> dict[str, Any]:
    """An evaluation leaves the root's parameters gathered; training must go on with the replica's own all the same."""
    setting = _setting()
    out: dict[str, Any] = {}
    for name in ("paper", "loss"):
        runs = [setting.hsdp(name) for _ in range(2)]
        losses = []
        for evaluates, run in enumerate(runs):
            run.advance(6)
            if evaluates:
                with run.scheduler.converged(), torch.no_grad():
                    losses.append(run.loss(99).item())
                    out[f"{name}: the mean"] = alike(run.weights()) or "weights differ"
            run.advance(LATER)
        out[f"{name}: no trace"] = runs[0].weights() == runs[1].weights()

    def probed(model: nn.Module) -> Any:
        x, y = batch(99)
        return lambda: nn.functional.mse_loss(model(x), y)

    seen = []
    for root_stays in (True, False):
        model = _sharded(setting.mesh)
        model.set_reshard_after_forward(not root_stays)  # type: ignore[operator]
        run = Run(model, FACES["nesterov"], (dist.get_rank(), 4), make=FOREACH, probe=probed(model))
        run.advance(LATER)
        seen.append(run.weights())
    out["probe: no trace"] = np.allclose(seen[0], seen[1], rtol=1e-12)
    return out


def _local() -> dict[str, Any]:
    """Replicas that share no gradients: each sharded over a mesh of its own."""
    setting = _setting()
    out: dict[str, Any] = {}
    options: dict[str, Any] = {"gradients": "local", "process_group": setting.group, "optimizer_state": "average"}
    out["refused"] = error(lambda: setting.hsdp("nesterov", gradients="local"))
    place = (setting.replica + 2 * setting.shard, 4)
    postponed = setting.hsdp("paper")
    postponed.model.set_requires_all_reduce(False)  # type: ignore[operator]
    torch.autograd.backward(postponed.loss(1))
    out["no gradients at all"] = all(p.grad is None for p in postponed.model.parameters())
    mine = Run(_sharded(setting.mesh["shard"]), FACES["nesterov"], place, make=FOREACH, **options)
    whole = setting.ddp("nesterov", gradients="local", optimizer_state="average")
    out["mine"], out["whole"] = mine.advance(10), whole.advance(10)
    out["scales alike"] = alike([record.scales for record in mine.scheduler.history])
    return out


def _one_dimension() -> dict[str, Any]:
    """Parameters sharded over all four ranks."""
    out: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    place = (dist.get_rank(), 4)
    run = Run(_sharded(mesh), FACES["gradient"], place, make=FOREACH)
    whole = Run(net(5), FACES["gradient"], (0, 1), make=FOREACH)
    out["fsdp"], out["one process"] = (run.advance(TOTAL_STEPS), run.told()), (whole.advance(TOTAL_STEPS), whole.told())
    for name in ("paper", "loss", "nesterov"):
        out[f"refused: {name}"] = error(lambda name=name: Run(_sharded(mesh), FACES[name], place))  # type: ignore[misc]
    out["refused: group"] = error(lambda: Run(_sharded(mesh), paper, place, process_group=dist.group.WORLD))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    out["refused: first version"] = error(lambda: Run(first, paper, place, process_group=dist.group.WORLD))

    # Rank 0's file for everyone, a file for each rank, and whole tensors.
    state = run.scheduler.state_dict()
    files: list[Any] = [_saved(state)]
    dist.broadcast_object_list(files, 0)
    out["rank 0's"] = error(lambda: _loaded(mesh, files[0]))
    out["its own"] = error(lambda: _loaded(mesh, _saved(state)))
    whole_state = tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, state)
    files = [_saved(whole_state)]
    dist.broadcast_object_list(files, 0)
    again: Any = None
    out["whole"] = error(lambda: _loaded(mesh, files[0]))
    if not out["whole"]:
        again = _loaded(mesh, files[0]).scheduler._run.anchor.copies  # type: ignore[union-attr]
        kept: Any = run.scheduler._run.anchor
        out["whole: the same anchor"] = all(torch.equal(a, b) for a, b in zip(again, kept.copies, strict=True))
    return out


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(mesh: DeviceMesh, file: bytes) -> Run:
    run = Run(_sharded(mesh), FACES["gradient"], (dist.get_rank(), 4), make=FOREACH)
    run.scheduler.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
    return run


def _all(folder: str) -> dict[str, Any]:
    return {
        "equal": _equal(),
        "resumed": _resumed(folder),
        "parts": _parts(),
        "broken": _broken(),
        "evaluated": _evaluated(),
        "local": _local(),
        "one dimension": _one_dimension(),
    }


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(_all, 4, str(tmp_path_factory.mktemp("hsdp")), timeout_s=150)


def _check(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for (lrs, weights), (other_lrs, other_weights) in zip(got, want, strict=True):
        assert_allclose(lrs, other_lrs, rtol=1e-9)
        assert_allclose(weights, other_weights, rtol=1e-7, atol=1e-9)


def _check_told(got: list[Any], want: list[Any]) -> None:
    for (step, losses, scales, slope), (other_step, other_losses, other_scales, other_slope) in zip(
        got, want, strict=True
    ):
        assert step == other_step
        assert_allclose(scales, other_scales, rtol=1e-9)
        assert_allclose(slope, other_slope, rtol=1e-7)
        assert_allclose(np.mean(losses), np.mean(other_losses), rtol=1e-9)


@pytest.mark.parametrize("name", FACES)
def test_two_replicas_of_two_shards_train_as_two_whole_ones(found: Found, name: str) -> None:
    for result in found:
        hsdp, ddp = result["equal"][name]["hsdp"], result["equal"][name]["ddp"]
        _check(hsdp[0], ddp[0])
        _check_told(hsdp[1], ddp[1])
        assert result["equal"][name]["scales alike"]


@pytest.mark.parametrize("name", FACES)
def test_a_sharded_run_resumes_from_a_checkpoint_in_mid_round(found: Found, name: str) -> None:
    for result in found:
        expected, got = result["resumed"][name]
        _check(got, expected)


def test_replicas_are_found_and_each_rank_keeps_its_part_alone(found: Found) -> None:
    for result in found:
        assert all(result["parts"].values()), [name for name, ok in result["parts"].items() if not ok]


def test_what_is_wrong_with_one_shard_is_wrong_with_its_replica(found: Found) -> None:
    for result in found:
        assert all(result["broken"].values()), [name for name, ok in result["broken"].items() if not ok]


def test_an_evaluation_leaves_no_trace(found: Found) -> None:
    for result in found:
        assert all(ok is True for ok in result["evaluated"].values()), result["evaluated"]


def test_local_gradients_need_a_mesh_for_each_replica(found: Found) -> None:
    for result in found:
        local = result["local"]
        assert "gradients are averaged over mesh dimension 'replicate' in every step" in local["refused"]
        assert 'process_group=mesh.get_group("replicate")' in local["refused"]
        assert local["no gradients at all"]  # which is why set_requires_all_reduce(False) is no way to have them local
        _check(local["mine"], local["whole"])
        assert local["scales alike"]


def test_shards_alone_have_the_gradient_signal_of_the_whole(found: Found) -> None:
    for result in found:
        fsdp, one = result["one dimension"]["fsdp"], result["one dimension"]["one process"]
        _check(fsdp[0], one[0])
        _check_told(fsdp[1], one[1])
        assert all(slope for _, _, _, slope in fsdp[1])


def test_shards_alone_cannot_fan_out(found: Found) -> None:
    for result in found:
        for name in ("paper", "loss", "nesterov"):
            text = result["one dimension"][f"refused: {name}"]
            assert "with none there are only shards, no replicas to fan out" in text
            assert "but got [] of ['shard']" in text
        text = result["one dimension"]["refused: group"]
        assert "its ranks [0, 1, 2, 3] hold different shards, along mesh dimension 'shard'" in text


def test_the_first_version_cannot_fan_out_whatever_the_group(found: Found) -> None:
    for result in found:
        text = result["one dimension"]["refused: first version"]
        assert "sharded by FullyShardedDataParallel, which does not tell who holds which shard" in text
        assert "use fully_shard with a replicate dimension, or DDP" in text


def test_a_state_of_shards_is_never_loaded_by_another_rank(found: Found) -> None:
    for rank, result in enumerate(found):
        one = result["one dimension"]
        if rank:
            assert "was saved by the rank at" in one["rank 0's"]
            assert "use torch.distributed.checkpoint" in one["rank 0's"]
        assert one["its own"] == ""
        assert one["whole"] == ""
        assert one["whole: the same anchor"]
