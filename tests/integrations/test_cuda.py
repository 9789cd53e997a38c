"""What needs a GPU. Processes share the first one, and talk by gloo: NCCL refuses two of them on one device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import framework_task as task
from hdet import Adapt, AutoLR, Copies, Ensemble, OneCycleAutoLR
from hdet.launch import launch
from hdet.weights.snapshot import Snapshot
from job import alike, everyone
from native import MAX_LR, Run, batch, gradient_signal, loss_signal, net, paper

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of the frameworks, and of torch's compiler
]

DEVICE = "cuda"


# -- frameworks -----------------------------------------------------------------------------------------------------


def _frameworks(name: str, device: str, folder: str) -> dict[str, Any]:
    """All runs of one framework, and of the plain loop on the same device."""
    task.pretend_torchrun(device)
    fit: Callable[..., dict[str, Any]] = importlib.import_module(f"test_{name}").fit
    order: task.Order = "interleaved" if name == "lightning" else "blocks"
    if name == "accelerate":
        runs = {
            "gradient": fit(task.GRADIENT, 2, "schedule_after", "", device=device),
            "saved": fit(task.APART, 2, "scheduler_prepared", folder, device=device),
            "resumed": fit(task.APART, 2, "schedule_after", folder, resume=True, device=device),
        }
        half = fit(task.GRADIENT, 2, "schedule_after", "", device=device, half=True)
    elif name == "lightning":
        runs = {
            "gradient": fit(task.GRADIENT, 2, device=device),
            "saved": fit(task.APART, 2, folder, device=device),
            "resumed": fit(task.APART, 2, folder, resume=True, device=device),
        }
        half = fit(task.GRADIENT, 2, device=device, half=True)
    else:
        save = importlib.import_module("test_transformers").SAVE
        runs = {
            "gradient": fit(task.GRADIENT, 2, folder, device=device),
            "saved": fit(task.APART, 2, folder, device=device, **save),
            "resumed": fit(task.APART, 2, folder, case="resume", device=device),
        }
        half = fit(task.GRADIENT, 2, folder, device=device, fp16=True)
    plain_half = task.plain_loop(task.GRADIENT, 2, order, device=device, half=True, counts_skipped=name == "lightning")
    return {**runs, "half": half, "plain": task.plain_runs(order, device), "plain half": plain_half}


PACKAGES = {"accelerate": "accelerate", "lightning": "pytorch_lightning", "transformers": "transformers"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_framework_does_what_the_plain_loop_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[name], reason=f"pip install 'hdet[{name}]'")
    replicas = launch(_frameworks, 2, name, DEVICE, str(tmp_path), timeout_s=150)
    for replica in replicas:
        assert len(replica["gradient"]["lrs"]) == task.STEPS
        task.check_same(replica["gradient"], replica["plain"]["gradient-2"])
        # In fp16 the first steps are skipped, until the scale is low enough.
        assert 2 < len(replica["half"]["lrs"]) < task.STEPS
        task.check_same(replica["half"], replica["plain half"])
    task.check_apart(replicas)


# -- SyncBatchNorm --------------------------------------------------------------------------------------------------


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, activation, last = net()
        self.layers = nn.Sequential(first, nn.BatchNorm1d(4).double(), activation, last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _sync_batch_norm() -> dict[str, Any]:
    place = (dist.get_rank(), dist.get_world_size())

    def run(face: Any, place: tuple[int, int], *, ddp: bool) -> Run:
        model: nn.Module = _Norm().to(DEVICE)
        if ddp:
            converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
            model = DistributedDataParallel(converted)
        return Run(model, face, place, forward=lambda x: model(x.to(DEVICE)).cpu())

    out: dict[str, Any] = {}
    together, whole = run(gradient_signal, place, ddp=True), run(gradient_signal, (0, 1), ddp=False)
    out["gradient"] = (together.advance(9), whole.advance(9))
    for name, face in (("paper", paper), ("loss", loss_signal)):
        apart = run(face, place, ddp=True)
        rows = apart.advance(6)
        out[f"{name}: apart"] = not alike(apart.weights())
        with apart.converged():
            buffers = [b.tolist() for b in apart.model.buffers()]
            out[f"{name}: one model"] = alike((apart.weights(), buffers))
        out[f"{name}: learning rates"] = everyone([lrs[0] for lrs, _ in rows])
    return out


def test_sync_batch_norm() -> None:
    for result in launch(_sync_batch_norm, 2, timeout_s=150):
        for (lrs, got), (other_lrs, want) in zip(*result["gradient"], strict=True):
            assert lrs == pytest.approx(other_lrs, rel=1e-6)
            assert got == pytest.approx(want, rel=1e-6, abs=1e-8)  # its counts are float32
        for name in ("paper", "loss"):
            assert result[f"{name}: apart"]
            assert result[f"{name}: one model"]
            first, second = result[f"{name}: learning rates"]
            assert all(a != b for a, b in zip(first, second, strict=True))


# -- CUDA graphs ----------------------------------------------------------------------------------------------------

NUM_STEPS, TOTAL_STEPS, INTERVAL, WARM_UP = 13, 60, 4, 3


class _Captured:
    """A model in training, with forward and backward in a CUDA graph, and the optimizer's step too if ``whole``.

    Args:
        face: makes the scheduler.
        captures: "nothing", "backward" for all but the optimizer's step, "step" for all of it.
        place: which part of the batch this process has, of how many.
    """

    def __init__(self, face: Callable[..., Any], captures: str, place: tuple[int, int] = (0, 1)) -> None:
        self.place = place
        self.captures = captures
        self.model = net().float().to(DEVICE)
        lr = torch.tensor(MAX_LR, device=DEVICE)
        self.optimizer = Adam(self.model.parameters(), lr=lr, capturable=True)
        self.scheduler = face(self.optimizer, self.model)
        self.x, self.y = (t.float().to(DEVICE) for t in batch(0, *place))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # real steps, as torch asks for before a capture
                self._forward_backward()
                self.optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        if captures != "nothing":
            with torch.cuda.graph(self.graph):
                self._forward_backward()
                if captures == "step":
                    self.optimizer.step()

    def _forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss = nn.functional.mse_loss(self.model(self.x), self.y)
        torch.autograd.backward(self.loss)

    def advance(self, num_steps: int) -> list[tuple[float, list[float]]]:
        rows = []
        for step in range(num_steps):
            for target, source in zip((self.x, self.y), batch(step, *self.place), strict=True):
                target.copy_(source)
            if self.captures == "nothing":
                self._forward_backward()
            else:
                self.graph.replay()
            if self.captures != "step":
                self.optimizer.step()
            self.scheduler.step(self.loss)
            lr = self.optimizer.param_groups[0]["lr"]
            rows.append((float(lr), [w for p in self.model.parameters() for w in p.detach().flatten().tolist()]))
        return rows


def _one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, MAX_LR, TOTAL_STEPS, cycle_momentum=False)


def _auto(optimizer: Optimizer, model: nn.Module) -> AutoLR:
    return AutoLR(_one_cycle(optimizer), interval=INTERVAL, adapt=Adapt(_start_steps=0, level=False))


def _drop_in(optimizer: Optimizer, model: nn.Module) -> OneCycleAutoLR:
    return OneCycleAutoLR(optimizer, MAX_LR, TOTAL_STEPS, model_sync_interval=INTERVAL, cycle_momentum=False)


def _local(optimizer: Optimizer, model: nn.Module) -> AutoLR:
    return AutoLR(
        _one_cycle(optimizer),
        model=model,
        ensemble=Ensemble(spread=0.3, gradients="local"),
        adapt=Adapt(_start_steps=0, level=False),
        interval=INTERVAL,
    )


def _check_rows(found: list[Any], expected: list[Any]) -> None:
    assert len({lr for lr, _ in found}) > NUM_STEPS - 2
    for (lr, got), (other_lr, want) in zip(found, expected, strict=True):
        assert lr == pytest.approx(other_lr, rel=1e-5)
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("face", "captures"), [(_auto, "backward"), (_drop_in, "backward"), (_drop_in, "step")])
def test_a_replayed_graph_uses_the_new_learning_rate(face: Callable[..., Any], captures: str) -> None:
    found, expected = _Captured(face, captures), _Captured(face, "nothing")
    _check_rows(found.advance(NUM_STEPS), expected.advance(NUM_STEPS))
    assert [r.scales for r in found.scheduler.history] == [
        pytest.approx(r.scales, rel=1e-4) for r in expected.scheduler.history
    ]
    if face is _auto:
        assert found.scheduler.history[-1].scales[0] != 0.5  # it has learned something


def test_a_captured_step_with_the_gradient_signal_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"must not be captured in a CUDA graph with the gradient signal: a replay"):
        _Captured(_auto, "step")


def _replayed_replicas() -> dict[str, Any]:
    place = (dist.get_rank(), dist.get_world_size())
    runs = {captures: _Captured(_local, captures, place) for captures in ("nothing", "step")}
    rows = {captures: run.advance(NUM_STEPS) for captures, run in runs.items()}
    scales = {captures: [r.scales for r in run.scheduler.history] for captures, run in runs.items()}
    with runs["step"].scheduler.converged():
        weights = [w for p in runs["step"].model.parameters() for w in p.detach().flatten().tolist()]
    return {"rows": rows, "scales": scales, "one model": alike(weights)}


def test_replicas_that_replay_graphs_converge() -> None:
    """The means, and the places on the line, are written where the graph reads."""
    for result in launch(_replayed_replicas, 2, timeout_s=150):
        _check_rows(result["rows"]["step"], result["rows"]["nothing"])
        assert result["scales"]["step"] == [pytest.approx(s, rel=1e-3) for s in result["scales"]["nothing"]]
        assert result["one model"]


# -- torch.compile --------------------------------------------------------------------------------------------------


def _plain(optimizer: Optimizer, model: nn.Module) -> OneCycleLR:
    return _one_cycle(optimizer)


def _compiled(face: Callable[..., Any], *, compiles: bool, device: str) -> tuple[list[int], list[Any]]:
    """Graphs compiled so far, learning rate and weights, step by step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = net(16).float().to(device)
    optimizer = Adam(model.parameters(), lr=torch.tensor(MAX_LR, device=device), capturable=device != "cpu")
    scheduler = face(optimizer, model)
    forward, update = (torch.compile(f) if compiles else f for f in (model, optimizer.step))
    counts, rows = [], []
    for step in range(NUM_STEPS):
        x, y = (t.float().to(device) for t in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        torch.autograd.backward(loss)
        update()
        scheduler.step(*(() if type(scheduler) is OneCycleLR else (loss,)))
        counts.append(counters["stats"]["unique_graphs"])
        lr = optimizer.param_groups[0]["lr"]
        rows.append((float(lr), [w for p in model.parameters() for w in p.detach().flatten().tolist()]))
    return counts, rows


def test_inductor_compiles_as_often_as_under_torchs_schedule() -> None:
    expected, _ = _compiled(_plain, compiles=True, device=DEVICE)
    assert expected[-1] > 1
    for face in (_auto, _drop_in):
        counts, rows = _compiled(face, compiles=True, device=DEVICE)
        assert counts == expected
        _check_rows(rows, _compiled(face, compiles=False, device=DEVICE)[1])


# -- hybrid sharding ------------------------------------------------------------------------------------------------


def _hsdp() -> dict[str, Any]:
    """Learning rates and this process's shards, step by step; gloo does not survive a ``full_tensor()`` on the GPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.cuda.set_device(0)
    out = {}
    for device in ("cpu", DEVICE):
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
        for name, face in (("loss", loss_signal), ("gradient", gradient_signal)):
            model = net().to(device)
            fully_shard(model, mesh=mesh)
            forward = functools.partial(_elsewhere, model, device)
            run = Run(model, face, (dist.get_rank(), dist.get_world_size()), forward=forward)
            rows = []
            for _ in range(10):
                run.step()
                shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
                rows.append((run.lrs(), [w for shard in shards for w in shard.detach().flatten().tolist()]))
            out[f"{name}, {device}"] = rows
    return out


def _elsewhere(model: nn.Module, device: str, x: Tensor) -> Tensor:
    out: Tensor = model(x.to(device)).cpu()
    return out


def test_hybrid_sharding_trains_as_on_the_cpu() -> None:
    for result in launch(_hsdp, 4, timeout_s=150):
        for name in ("loss", "gradient"):
            for (lrs, got), (other_lrs, want) in zip(result[f"{name}, {DEVICE}"], result[f"{name}, cpu"], strict=True):
                assert lrs == pytest.approx(other_lrs, rel=1e-8)
                assert got == pytest.approx(want, rel=1e-8, abs=1e-9)


# -- copies on the host ---------------------------------------------------------------------------------------------


def _busy(matrix: Tensor) -> None:
    """Work for the device, so that what follows comes late."""
    for _ in range(50):
        matrix @= matrix
        matrix /= matrix.norm()


@pytest.mark.parametrize("beside", [False, True])
def test_a_snapshot_on_the_host_is_of_the_time_it_was_taken(beside: bool) -> None:
    """Neither the steps before it, which the device has yet to take, nor those after it are mixed in."""
    model = nn.Linear(1500, 1500).to(DEVICE)
    optimizer = Adam(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    snapshot, slow = Snapshot("cpu"), torch.randn(3000, 3000, device=DEVICE)

    def step() -> None:
        snapshot.settle()
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()

    def everything() -> list[Tensor]:
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*parameters, *state)]

    for time in range(4):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if time > 1 else "default")  # the first two allocate
        _busy(slow)
        step()
        expected = everything()
        snapshot.take(parameters, optimizer, beside=beside)
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("default")
    assert snapshot._last is not None
    kept = [*snapshot._last.tensors.values(), *snapshot._last.state.values()]
    assert all(t.is_pinned() for t in kept if t.dim())
    snapshot._proven = None  # go back to the last one
    torch.cuda.set_sync_debug_mode("error")
    snapshot.restore(parameters, optimizer)
    found = everything()
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    optimizer.state.clear()
    snapshot.restore(parameters, optimizer)
    assert {v.device.type for s in optimizer.state.values() for n, v in s.items() if n != "step"} == {DEVICE}
    assert all(torch.equal(a, b) for a, b in zip(everything(), expected, strict=True))


@pytest.mark.parametrize("captures", ["nothing", "backward"])
def test_a_rollback_from_the_host_is_one_from_the_device(captures: str) -> None:
    rows = []
    for device in (None, "cpu"):

        def face(optimizer: Optimizer, model: nn.Module, device: str | None = device) -> AutoLR:
            return AutoLR(
                _one_cycle(optimizer),
                interval=INTERVAL,
                adapt=Adapt(_start_steps=0, level=False),
                copies=Copies(snapshot_device=device),
            )

        run = _Captured(face, captures)
        run.advance(NUM_STEPS)
        with torch.no_grad():
            next(run.model.parameters()).fill_(torch.nan)
        rows.append(run.advance(NUM_STEPS))
        assert run.scheduler.history[-1].num_rollbacks > 0
    assert repr(rows[0]) == repr(rows[1])


def test_a_large_model_needs_no_more_than_4_bytes_a_parameter_and_no_waiting() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(DEVICE)
    count = sum(p.numel() for p in model.parameters())
    x = torch.randn(16, 2048, device=DEVICE)
    peaks, auto = [], None
    for steered in (False, True):
        optimizer = Adam(model.parameters(), lr=1e-4)
        schedule = _one_cycle(optimizer)
        auto = AutoLR(schedule, interval=8, adapt=Adapt(_start_steps=0)) if steered else None
        for step in range(1, 33):
            between = steered and step > 8 and step % 8 != 0
            torch.cuda.set_sync_debug_mode("error" if between else "default")
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if auto is not None:
                auto.step(loss)
            else:
                schedule.step()
            if step == 16:
                torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated())
    assert auto is not None
    anchor, fallback = auto._run.anchor, auto._run.undo
    assert anchor is not None
    assert anchor.stride == 16
    assert fallback is not None
    assert fallback.snapshot.device == torch.device("cpu")
    assert (peaks[1] - peaks[0]) / count < 4
