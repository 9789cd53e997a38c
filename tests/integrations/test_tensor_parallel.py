"""Tensor parallelism inside each of two data-parallel replicas: they train as two whole ones do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hdet import warm_noisy_init
from hdet.launch import launch
from job import alike, error
from native import FACES, TOTAL_STEPS, Run, gradient_signal, net, paper

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def _cut(mesh: DeviceMesh) -> nn.Module:
    model = net()
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(_cut(mesh), device_mesh=mesh["dp"])


def _fsdp(mesh: DeviceMesh) -> nn.Module:
    model = _cut(mesh)
    fully_shard(model, mesh=mesh["dp"])
    return model


def _whole(run: Run) -> list[float]:
    """The weights of a model whose parts are plain tensors, put together."""
    found = []
    for p in run.optimizer.param_groups[0]["params"]:
        part: Any = torch.distributed.tensor.DTensor.from_local(p.detach(), p._st_info.mesh, p._st_info.placements)
        found += part.full_tensor().flatten().tolist()
    return found


def _all() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, replica, place = mesh.get_group("dp"), mesh.get_local_rank("dp"), (mesh.get_local_rank("dp"), 2)
    out: dict[str, Any] = {}
    for name in FACES:
        run = Run(_ddp(mesh), FACES[name], place, process_group=group)
        whole = Run(DistributedDataParallel(net(), process_group=group), FACES[name], place, process_group=group)
        for each in (run, whole):
            each.advance(TOTAL_STEPS) if name != "nesterov" else each.advance(10)
        with run.converged(), whole.converged():
            out[name] = (run.lrs(), _whole(run), run.told()), (whole.lrs(), whole.weights(), whole.told())
        out[f"{name}: alike"] = alike([scales for _, _, scales, _ in run.told()])

    # The gradient signal finds all parts of the dot product, whichever group it is given, and however they are cut.
    for label, model in (("ddp, all ranks", _ddp(mesh)), ("fsdp, all ranks", _fsdp(mesh))):
        run = Run(model, gradient_signal, place, make=_plain_adam)
        run.advance(TOTAL_STEPS)
        out[label] = run.told()
        out[f"{label}: alike"] = alike(run.told())

    # One part of replica 1 is broken: it is left out as a whole.
    run = Run(_ddp(mesh), FACES["loss"], place, process_group=group)
    run.advance(7)
    run.step(lambda: _spoil(run, dist.get_rank() == 3))
    record = run.scheduler.history[-1]
    out["left out"] = record.unhealthy == (1,) and alike(record.unhealthy)
    out["finite"] = all(math.isfinite(w) for w in _whole(run))
    out["kept once"] = len(run.scheduler._run.weights.local()) == 4
    out["index"] = run.scheduler._run.replicas.index == replica

    out["no group"] = error(lambda: Run(_ddp(mesh), paper, place))
    out["no group, parts"] = error(lambda: Run(_cut(mesh), paper, place))
    out["wrong group"] = error(lambda: Run(_ddp(mesh), paper, place, process_group=mesh.get_group("tp")))
    out["all ranks"] = error(lambda: Run(_ddp(mesh), paper, place, process_group=dist.group.WORLD))
    out["noise"] = error(lambda: warm_noisy_init(_ddp(mesh), process_group=group))
    return out


def _plain_adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, foreach=False)  # parameters of one step lie on different meshes


def _spoil(run: Run, here: bool) -> None:
    with torch.no_grad():
        for p in run.optimizer.param_groups[0]["params"]:
            if here:
                p.fill_(math.nan)


@pytest.fixture(scope="module")
def found() -> Found:
    return launch(_all, 4, timeout_s=150)


@pytest.mark.parametrize("name", FACES)
def test_replicas_in_parts_train_as_whole_ones(found: Found, name: str) -> None:
    for result in found:
        (lrs, weights, told), (other_lrs, other_weights, other_told) = result[name]
        assert_allclose(lrs, other_lrs, rtol=1e-9)
        assert_allclose(weights, other_weights, rtol=1e-7, atol=1e-9)
        for (step, losses, scales, slope), (other_step, other_losses, other_scales, other_slope) in zip(
            told, other_told, strict=True
        ):
            assert step == other_step
            assert_allclose(losses, other_losses, rtol=1e-9)
            assert_allclose(scales, other_scales, rtol=1e-9)
            assert_allclose(slope, other_slope, rtol=1e-7)
        assert result[f"{name}: alike"]


@pytest.mark.parametrize("label", ["ddp, all ranks", "fsdp, all ranks"])
def test_the_gradient_signal_adds_up_all_parts(found: Found, label: str) -> None:
    for result in found:
        want = result["gradient"][1][2]
        assert_allclose([slope for *_, slope in result[label]], [slope for *_, slope in want], rtol=1e-7)
        assert np.isfinite([slope for *_, slope in want]).all()
        assert result[f"{label}: alike"]


def test_a_broken_part_is_a_broken_replica(found: Found) -> None:
    for result in found:
        for name in ("left out", "finite", "kept once", "index"):
            assert result[name], name


def test_parts_are_never_averaged_with_other_parts(found: Found) -> None:
    for result in found:
        for name in ("no group", "no group, parts"):
            assert "exactly one mesh dimension along which all of them are replicated is needed" in result[name]
            assert "but got [] of ['tp']; pass process_group=" in result[name]
        assert "hold different shards, along mesh dimension 'tp'" in result["wrong group"]
        assert "hold different shards, along mesh dimension 'tp'" in result["all ranks"]
        assert "warm_noisy_init takes unsharded parameters" in result["noise"]
