"""torch.optim.swa_utils.AveragedModel beside replicas that differ: which weights it has to be shown, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from hdet import Adapt, AutoLR
from job import alike, launch, weights
from native import FACES, INTERVAL, TOTAL_STEPS, Run, batch, net

DECAY = 0.7
EMA: Any = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
KINDS: dict[str, Any] = {"swa": {}, "ema": {"multi_avg_fn": EMA}}


def _reference(kind: str, means: list[list[float]]) -> list[float]:
    """What the average of the means is."""
    value = list(means[0])
    for count, mean in enumerate(means[1:], start=1):
        keep = DECAY if kind == "ema" else count / (count + 1)
        value = [keep * v + (1 - keep) * m for v, m in zip(value, mean, strict=True)]
    return value


def _averages() -> dict[str, Any]:
    place = (dist.get_rank(), dist.get_world_size())
    out: dict[str, Any] = {}
    for name in FACES:
        for kind, options in KINDS.items():
            run = Run(DistributedDataParallel(net()), FACES[name], place)
            model = run.model.module
            assert isinstance(model, nn.Module)
            by_round, by_block, careless = (AveragedModel(model, **options) for _ in range(3))
            means: list[list[float]] = []
            own: list[list[float]] = []
            for step in range(1, TOTAL_STEPS):
                run.step()
                if step % 2 == 0:  # any step, also inside a round
                    with run.scheduler.converged():
                        by_block.update_parameters(model)
                        means.append(weights(model))
                careless.update_parameters(model)
                if run.scheduler.history and run.scheduler.history[-1].step == step:
                    by_round.update_parameters(model)
                    own.append(weights(model))
            out[f"{name}, {kind}"] = {
                "block": (weights(by_block.module), _reference(kind, means), alike(weights(by_block.module))),
                "round": (weights(by_round.module), _reference(kind, own), alike(weights(by_round.module))),
                "careless": alike(weights(careless.module)),
            }
    out["broken"] = _broken(place)
    return out


def _broken(place: tuple[int, int]) -> bool:
    """A round that is undone: what is averaged at its end is the centre it went back to."""
    run = Run(DistributedDataParallel(net()), FACES["gradient"], place)
    model = run.model.module
    assert isinstance(model, nn.Module)
    ema = AveragedModel(model, multi_avg_fn=EMA)
    for step in range(1, TOTAL_STEPS):
        run.step((lambda: _spoil(model)) if step == 2 * INTERVAL else None)
        if run.scheduler.history and run.scheduler.history[-1].step == step:
            ema.update_parameters(model)
    return run.scheduler.history[-1].num_rollbacks == 1 and all(map(math.isfinite, weights(ema.module)))


@pytest.mark.parametrize("first", ["ema", "scheduler"])
@pytest.mark.filterwarnings("ignore:the round that ended at step 24 was undone")
def test_an_average_is_undone_with_the_round(first: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = AutoLR(optimizer, total_steps=60, interval=4, adapt=Adapt(level=False))
    ema = AveragedModel(model, multi_avg_fn=EMA)
    scheduler.undo_also(ema)
    averages = []
    for step in range(1, 25):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean() * (math.nan if step == 22 else 1.0)
        loss.backward()
        optimizer.step()
        if first == "ema":
            ema.update_parameters(model)
        scheduler.step(loss)
        averages.append((weights(ema.module), int(ema.n_averaged)))
        if first == "scheduler":
            ema.update_parameters(model)
    assert scheduler.history[-1].num_rollbacks == 1
    assert averages[-1] == averages[15]  # from the start of the last healthy round


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(_averages, 2, timeout_s=150)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FACES)
def test_inside_converged_the_average_is_of_means(found: list[dict[str, Any]], name: str, kind: str) -> None:
    for result in found:
        got, want, same = result[f"{name}, {kind}"]["block"]
        assert same
        assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_step_that_ends_a_round_weights_are_the_mean_unless_replicas_are_on_a_line(
    found: list[dict[str, Any]], kind: str
) -> None:
    for result in found:
        for name in ("paper", "gradient"):
            got, want, same = result[f"{name}, {kind}"]["round"]
            assert same
            assert_allclose(got, want, rtol=1e-10)
        for name in ("loss", "nesterov"):  # placed around the mean at once
            assert not result[f"{name}, {kind}"]["round"][2]


@pytest.mark.parametrize("kind", KINDS)
def test_in_every_step_it_is_one_replicas_own_unless_replicas_are_equal(found: list[dict[str, Any]], kind: str) -> None:
    for result in found:
        for name in FACES:
            assert result[f"{name}, {kind}"]["careless"] == (name == "gradient")


def test_a_round_that_is_undone_does_not_reach_the_average(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["broken"]


def test_buffers_are_averaged_or_recomputed() -> None:
    """As torch has it; nothing of a scheduler is copied with the model."""
    model = nn.Sequential(net()[0], nn.BatchNorm1d(4).double(), net()[2])
    run = Run(model, FACES["gradient"], (0, 1))
    average = AveragedModel(model, use_buffers=True)
    fresh = AveragedModel(model)
    for _ in range(INTERVAL):
        run.step()
        average.update_parameters(model)
        fresh.update_parameters(model)
    update_bn([batch(step)[0] for step in range(3)], fresh)
    mean = average.module.get_buffer("1.running_mean")
    assert torch.isfinite(mean).all()
    assert not torch.equal(mean, fresh.module.get_buffer("1.running_mean"))
    assert fresh.module.get_buffer("1.num_batches_tracked") == 3
