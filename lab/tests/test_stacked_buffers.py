"""BatchNorm on the stacked engine against separate models."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hdet_lab.models.resnet import ResNet
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.optim import SGD
from hdet_lab.tasks.base import evaluation_mode

RUNS, REPLICAS, ROWS = 2, 3, 5


def build(seed: int) -> nn.Module:
    model = ResNet(3, widths=(2, 4), generator=torch.Generator().manual_seed(seed)).double()
    model.register_buffer("seen", torch.tensor(seed % 2 == 1))  # neither a mean nor a count
    return model


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(num_replicas: int = REPLICAS) -> StackedModels:
    models = [build(seed) for seed in range(RUNS)]
    names = [name for name, _ in models[0].named_parameters()]
    return StackedModels(
        models,
        loss_of,
        {"all": names},
        num_replicas=num_replicas,
        optimizer=SGD(momentum=0.9),
        dtype=torch.float64,
    )


def batch_of(step: int, num_replicas: int = REPLICAS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    lead = (RUNS, num_replicas, ROWS)
    return (
        torch.randint(0, 256, (*lead, 6, 6), generator=generator).to(torch.uint8),
        torch.randint(0, 3, lead, generator=generator),
    )


def rates(step: int, num_replicas: int = REPLICAS) -> Tensor:
    spread = torch.linspace(0.5, 1.5, num_replicas, dtype=torch.float64).roll(step)
    return (torch.tensor([[0.05], [0.2]], dtype=torch.float64) * spread).unsqueeze(-1)


def train(engine: StackedModels, first: int, last: int) -> None:
    for step in range(first, last):
        engine.step(batch_of(step), rates(step))


def copies(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}


def test_matches_separate_models_step_by_step() -> None:
    engine = make()
    models = [[copy.deepcopy(build(run)) for _ in range(REPLICAS)] for run in range(RUNS)]
    optimizers = [[torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9) for m in row] for row in models]
    for step in range(6):
        batch, lrs = batch_of(step), rates(step)
        losses = engine.step(batch, lrs).losses
        for run, row in enumerate(models):
            for replica, model in enumerate(row):
                model.zero_grad()
                loss = loss_of(model, tuple(t[run, replica] for t in batch))
                loss.backward()  # type: ignore[no-untyped-call]
                torch.testing.assert_close(losses[run, replica], loss.detach(), rtol=1e-9, atol=1e-12)
            for twins in zip(*(m.parameters() for m in row), strict=True):
                mean = torch.stack([p.grad for p in twins if p.grad is not None]).mean(0)
                for p in twins:
                    p.grad = mean.clone()
            for replica, optimizer in enumerate(optimizers[run]):
                optimizer.param_groups[0]["lr"] = lrs[run, replica, 0].item()
                optimizer.step()
        if step == 3:
            engine.converge()
            for row in models:
                average(row)
        for run, row in enumerate(models):
            for replica, model in enumerate(row):
                flat = engine.flatten(dict(model.named_parameters()))
                torch.testing.assert_close(engine.weights[run, replica], flat, rtol=1e-8, atol=1e-11)
                for name, buffer in model.named_buffers():
                    torch.testing.assert_close(engine.buffers[name][run, replica], buffer, rtol=1e-8, atol=1e-11)
    assert engine.buffers["norm.num_batches_tracked"].tolist() == [[6] * REPLICAS] * RUNS
    assert engine.buffers["norm.num_batches_tracked"].dtype == torch.int64
    assert engine.buffers["seen"].tolist() == [[False] * REPLICAS, [True] * REPLICAS]

    images, labels = batch_of(99)
    validation = [(images[0, 0], labels[0, 0]), (images[1, 1, :2], labels[1, 1, :2])]
    before = copies(engine.buffers)
    means = engine.evaluate(validation)
    whole = tuple(torch.cat(parts) for parts in zip(*validation, strict=True))
    for run, row in enumerate(models):
        average(row)
        mine = engine.mean_model(run)
        for name, value in row[0].state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-8, atol=1e-11)
        with torch.no_grad(), evaluation_mode(row[0]):
            torch.testing.assert_close(means[run], loss_of(row[0], whole), rtol=1e-8, atol=1e-11)
    assert engine.model.training
    assert all(torch.equal(engine.buffers[name], value) for name, value in before.items())


def average(models: list[nn.Module]) -> None:
    """What a converge of real processes does: the mean of floats, the maximum of the rest."""
    with torch.no_grad():
        for twins in zip(*(m.state_dict().values() for m in models), strict=True):
            stacked = torch.stack(twins)
            value = stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)
            for tensor in twins:
                tensor.copy_(value)


def test_the_models_that_were_passed_in_stay_as_they_are() -> None:
    models = [build(seed) for seed in range(RUNS)]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    names = [name for name, _ in models[0].named_parameters()]
    engine = StackedModels(models, loss_of, {"all": names}, num_replicas=REPLICAS, optimizer=SGD(), dtype=torch.float64)
    own = copies(dict(engine.model.named_buffers()))
    train(engine, 0, 2)
    assert all(torch.equal(value, own[name]) for name, value in engine.model.named_buffers())
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_restored_run_has_its_buffers_back() -> None:
    engine = make()
    train(engine, 0, 2)
    start = copies(engine.buffers)
    engine.snapshot()
    engine.snapshot()  # what is restored is the last snapshot but one
    train(engine, 2, 4)
    after = copies(engine.buffers)
    engine.restore(torch.tensor([True, False]))
    for name, buffer in engine.buffers.items():
        assert torch.equal(buffer[0], start[name][0])
        assert torch.equal(buffer[1], after[name][1])
    assert engine.buffers["norm.num_batches_tracked"].tolist() == [[2] * REPLICAS, [4] * REPLICAS]
    train(engine, 2, 4)
    for name, buffer in engine.buffers.items():
        torch.testing.assert_close(buffer[0], after[name][0], rtol=1e-12, atol=0)


def test_statistics_differ_between_replicas_until_they_converge() -> None:
    engine = make()
    train(engine, 0, 2)
    mean = engine.buffers["norm.running_mean"].mean(1)
    assert (engine.buffers["norm.running_mean"] - mean.unsqueeze(1)).abs().max() > 1e-3
    engine.converge()
    assert torch.equal(engine.buffers["norm.running_mean"], mean.unsqueeze(1).expand(-1, REPLICAS, -1))


def test_a_broken_run_leaves_the_buffers_of_the_other_alone() -> None:
    healthy, broken = make(), make()
    broken.weights[0] = torch.nan
    for engine in (healthy, broken):
        train(engine, 0, 2)
        engine.converge()
    assert broken.buffers["norm.running_var"][0].isnan().all()
    for name, buffer in broken.buffers.items():
        torch.testing.assert_close(buffer[1], healthy.buffers[name][1], rtol=1e-12, atol=1e-14)
    broken.restore(torch.tensor([True, False]))
    assert broken.buffers["norm.running_var"].isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_step_updates_buffers() -> None:
    names = [name for name, _ in build(0).named_parameters()]
    engines = [
        StackedModels(
            [build(seed) for seed in range(RUNS)],
            loss_of,
            {"all": names},
            num_replicas=REPLICAS,
            optimizer=SGD(momentum=0.9),
            dtype=torch.float64,
            device="cuda",
            graph=graph,
        )
        for graph in (False, True)
    ]
    for step in range(4):
        batch = tuple(t.cuda() for t in batch_of(step))
        for engine in engines:
            engine.step(batch, rates(step).cuda())
    for name, buffer in engines[0].buffers.items():
        torch.testing.assert_close(engines[1].buffers[name], buffer, rtol=1e-8, atol=1e-11)
    assert engines[1].buffers["norm.num_batches_tracked"].tolist() == [[4] * REPLICAS] * RUNS


def test_a_model_without_buffers_has_none() -> None:
    model = nn.Linear(2, 1)
    engine = StackedModels(
        [model], lambda m, b: m(b[0]).square().mean(), {"all": ["weight", "bias"]}, num_replicas=2, optimizer=SGD()
    )
    assert engine.buffers == {}
    assert list(engine._everything()) == ["weights"]
    engine.step((torch.ones(1, 2, 3, 2),), torch.full((1, 2, 1), 0.1))
