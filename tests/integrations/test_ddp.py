"""DistributedDataParallel in its various ways of use: replicas train as under gradients averaged by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from job import alike, error, everyone, launch, weights
from native import FACES, INTERVAL, TOTAL_STEPS, Face, Run, batch, nesterov, net, paper

Found = list[dict[str, Any]]
FAN_OUTS = ("paper", "loss", "gradient")


class _Branches(nn.Module):
    """Uses one of two layers, by turns: a graph that changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.even, self.odd = net()[0], net()[2], net()[2]
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        branch = self.even if self.num_calls % 2 == 0 else self.odd
        result: Tensor = branch(torch.tanh(self.trunk(x)))
        return result


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = net()[0], nn.BatchNorm1d(4).double(), net()[2]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return result


class _ByHand(Run):
    """The same without DistributedDataParallel."""

    def step(self, accident: Callable[[], None] | None = None) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        torch.autograd.backward(loss)
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.optimizer.step()
        self.scheduler.step(loss)


class _Accumulating(Run):
    """Two micro-batches a step; gradients are exchanged with the second one."""

    def step(self, accident: Callable[[], None] | None = None) -> None:
        self.optimizer.zero_grad()
        x, y = batch(self.scheduler.last_epoch + 1, *self.place)
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            self._micro(x[0::2], y[0::2])
        self._micro(x[1::2], y[1::2])
        self.optimizer.step()
        self.scheduler.step()

    def _micro(self, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.mse_loss(self.forward(x), y)
        torch.autograd.backward(loss / 2)
        self.scheduler.observe(loss, weight=float(len(x)))


class _Bfloat16(Run):
    def loss(self, step: int | None = None) -> Tensor:
        x, y = (t.float() for t in batch(self.scheduler.last_epoch + 1 if step is None else step, *self.place))
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.mse_loss(self.forward(x), y)


class _Bfloat16ByHand(_Bfloat16, _ByHand):
    pass


def _ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def _ways(names: tuple[str, ...] = FAN_OUTS) -> dict[str, Any]:
    """Each way of use, for each signal, beside a reference."""
    place = (dist.get_rank(), dist.get_world_size())
    out: dict[str, Any] = {}
    for name in names:
        face = FACES[name]
        runs: dict[str, tuple[Run, Run]] = {
            "static graph": (Run(_ddp(net(), static_graph=True), face, place), _ByHand(net(), face, place)),
            "dynamic graph": (
                Run(_ddp(_Branches(), find_unused_parameters=True), face, place),
                _ByHand(_Branches(), face, place),
            ),
            "accumulation": (_Accumulating(_ddp(net()), face, place), _ByHand(net(), face, place)),
            "bfloat16": (_Bfloat16(_ddp(net().float()), face, place), _Bfloat16ByHand(net().float(), face, place)),
            "small buckets": (
                Run(_ddp(net(), bucket_cap_mb=1e-5, gradient_as_bucket_view=True), face, place),
                _ByHand(net(), face, place),
            ),
        }
        for way, (run, reference) in runs.items():
            out[f"{way}, {name}"] = (
                (run.advance(TOTAL_STEPS), run.told()),
                (reference.advance(TOTAL_STEPS), reference.told()),
            )
            out[f"{way}, {name}: one model in the end"] = alike(run.weights())
    return out


# -- GradScaler ---------------------------------------------------------------------------------------------------


class _Scaled(Run):
    """Steps through a GradScaler; in the steps of ``overflows`` this rank's gradients are infinite."""

    def __init__(self, *args: Any, overflows: tuple[int, ...] = (), guarded: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        self.overflows, self.guarded = overflows, guarded
        self.num_batches = 0
        self.skipped: list[int] = []

    def step(self, accident: Callable[[], None] | None = None) -> None:
        self.num_batches += 1
        self.optimizer.zero_grad()
        loss = self.loss(self.num_batches)
        factor = math.inf if self.num_batches in self.overflows else 1.0
        torch.autograd.backward(self.scaler.scale(loss) * factor)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.skipped.append(self.num_batches)
            if self.guarded:
                return
        self.scheduler.step(loss)


def _scaled() -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`")
    rank, place = dist.get_rank(), (dist.get_rank(), dist.get_world_size())
    out: dict[str, Any] = {}
    for name in ("paper", "loss", "gradient", "nesterov"):
        # Infinite on one rank, shared: all skip.
        run = _Scaled(_ddp(net()), FACES[name], place, overflows=(2, 6) if rank == 1 else ())
        run.advance(INTERVAL * 2)
        out[f"{name}: all skip"] = run.skipped == [2, 6] and alike(run.skipped)
        out[f"{name}: on time"] = [record.step for record in run.scheduler.history] == [4, 8]
        # Nothing at all has been trained when the first round ends.
        run = _Scaled(_ddp(net()), FACES[name], place, overflows=(1, 2, 3, 4))
        run.advance(INTERVAL)
        with run.converged():
            out[f"{name}: a round of skips moves nothing"] = run.weights() == weights(net())
        run.advance(INTERVAL * 2)
        with run.converged():
            out[f"{name}: and training goes on"] = all(map(math.isfinite, run.weights())) and alike(run.weights())

    # Local gradients: one rank skips alone, but counts its steps all the same.
    options: dict[str, Any] = {"gradients": "local", "knobs": (), "outer": "mean"}
    run = _Scaled(_ddp(net()), nesterov, place, overflows=(2,) if rank == 1 else (), **options)
    run.advance(INTERVAL)
    out["one skips alone"] = everyone(run.skipped) == [[2] if r == 1 else [] for r in range(place[1])]
    out["one skips alone: averaged on time"] = alike(run.weights())

    # It does not count them: it is one behind when the others are done.
    run = _Scaled(_ddp(net()), nesterov, place, overflows=(2,) if rank == 1 else (), guarded=True, **options)
    for _ in range(INTERVAL - 1):
        run.step()
    out["behind"] = error(run.scheduler.converge)
    return out


# -- what cannot work ---------------------------------------------------------------------------------------------


def _joined() -> str:
    run = Run(_ddp(net()), paper, (dist.get_rank(), dist.get_world_size()))
    assert isinstance(run.model, DistributedDataParallel)

    def train() -> None:
        with run.model.join():  # type: ignore[operator]
            for _ in range(INTERVAL if dist.get_rank() else 2 * INTERVAL):
                run.step()

    return error(train)


def _sync_batch_norm() -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(_Norm())  # type: ignore[no-untyped-call]
    return error(lambda: _ddp(model)(batch(1)[0]))


def _batch_norm() -> dict[str, bool]:
    run = Run(_ddp(_Norm(), broadcast_buffers=False), paper, (dist.get_rank(), dist.get_world_size()))
    run.advance(INTERVAL - 1)
    mean = run.model.get_buffer("module.norm.running_mean")
    out = {"buffers differ": not alike(mean.tolist())}
    run.step()
    out["buffers are averaged"] = alike(mean.tolist())
    return out


def _two() -> dict[str, Any]:
    return {
        "ways": _ways(),
        "scaled": _scaled(),
        "sync": _sync_batch_norm(),
        "norm": _batch_norm(),
    }


@pytest.fixture(scope="module")
def found() -> Found:
    return launch(_two, 2, timeout_s=150)


def _check(result: dict[str, Any], way: str, name: str) -> None:
    (rows, told), (other_rows, other_told) = result[f"{way}, {name}"]
    rtol = 2e-2 if way == "bfloat16" else 1e-8  # bucket by bucket, gradients are rounded in another order
    for (lrs, got), (other_lrs, want) in zip(rows, other_rows, strict=True):
        assert_allclose(lrs, other_lrs, rtol=rtol)
        assert_allclose(got, want, rtol=rtol, atol=rtol)
    for (step, losses, scales, _), (other_step, other_losses, other_scales, _) in zip(told, other_told, strict=True):
        assert step == other_step
        assert_allclose(losses, other_losses, rtol=rtol)
        assert_allclose(scales, other_scales, rtol=rtol)
    assert result[f"{way}, {name}: one model in the end"]


WAYS = ("static graph", "dynamic graph", "accumulation", "bfloat16", "small buckets")


@pytest.mark.parametrize("name", FAN_OUTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_use_trains_as_gradients_averaged_by_hand(found: Found, way: str, name: str) -> None:
    for result in found:
        _check(result["ways"], way, name)


@pytest.mark.slow
def test_four_replicas_do_too() -> None:
    for result in launch(_ways, 4, ("loss",), timeout_s=150):
        for way in WAYS:
            _check(result, way, "loss")


def test_steps_that_grad_scaler_skips(found: Found) -> None:
    for result in found:
        scaled = result["scaled"]
        assert all(scaled[name] for name in scaled if name != "behind"), [n for n, ok in scaled.items() if not ok]


def test_a_rank_that_does_not_count_the_steps_it_skips_is_named(found: Found) -> None:
    for result in found:
        text = result["scaled"]["behind"]
        assert "RuntimeError: replicas must take the same number of steps between converges" in text
        assert "replica 0: 3, replica 1: 2; check for uneven data or steps skipped on some ranks" in text


def test_join_is_refused() -> None:
    for text in launch(_joined, 2, timeout_s=120):
        assert "RuntimeError: replicas cannot converge inside DistributedDataParallel.join(), but step 4 is" in text
        assert "DistributedSampler(drop_last=True)" in text


def test_buffers_of_batch_norm_are_averaged(found: Found) -> None:
    for result in found:
        assert all(result["norm"].values()), result["norm"]


def test_torch_has_no_sync_batch_norm_on_the_cpu(found: Found) -> None:
    """Should that change, it is to be tested here."""
    for result in found:
        assert "SyncBatchNorm layers only work with GPU modules" in result["sync"]


# -- uneven data --------------------------------------------------------------------------------------------------


def _uneven(gradients: str) -> str:
    """Rank 1 has two batches less, and comes to the end of its epoch."""
    rank = dist.get_rank()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    face: Face = paper if gradients == "shared" else nesterov
    run = Run(_ddp(net()), face, (rank, 2), gradients=gradients)

    def train() -> None:
        for _ in range(INTERVAL * 2 - 2 * rank):
            run.step()
        run.scheduler.converge()

    return error(train)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_uneven_data_ends_in_an_error_that_names_ranks_within_the_timeout(gradients: str) -> None:
    long, short = launch(_uneven, 2, gradients, timeout_s=150)
    assert long
    if gradients == "local":
        for text in (long, short):
            assert (
                "replicas must take the same number of steps between converges, but got replica 0: 8, replica 1: 6"
                in text
            )
    else:
        # Rank 0 waits for gradients, in DistributedDataParallel.
        assert "RuntimeError: replica 1 lost the others at the converge of step 6" in short
        assert "(replica: step): {0: 4}" in short
        assert "check for uneven data" in short
