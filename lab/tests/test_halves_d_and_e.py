"""Tasks of other kinds, each as small as it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdet_lab.bench.suite import ENTRIES, METHODS, jobs
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import TASKS, half_d, half_e
from small_tasks import write_sets

RNG = np.random.default_rng(0)
SMALL: dict[str, dict[str, Any]] = {
    "cifar10": {
        "train_images": RNG.integers(0, 256, (40, 32, 32, 3)).astype("u1"),
        "train_labels": RNG.integers(0, 10, 40).astype("u1"),
        "test_images": RNG.integers(0, 256, (20, 32, 32, 3)).astype("u1"),
        "test_labels": RNG.integers(0, 10, 20).astype("u1"),
    },
    "wikitext": {"words": RNG.integers(0, 8000, 4000).astype("i2")},
    "bible": {"text": RNG.integers(0, 128, 4000).astype("u1")},
    "phonemes": {
        "letters": RNG.integers(1, 27, (60, 12)).astype("u1"),
        "phones": RNG.integers(3, 42, (60, 14)).astype("u1"),
    },
    "cities": {
        "names": RNG.integers(0, 64, (60, 24)).astype("u1"),
        "places": RNG.uniform(-90, 90, (60, 2)).astype("f4"),
        "countries": RNG.integers(0, 64, 60).astype("u1"),
    },
    "speech": {"samples": RNG.integers(0, 256, 40 * 512).astype("u1")},
    "diamonds": {
        "inputs": RNG.uniform(1, 9, (60, 9)).astype("f4"),
        "targets": RNG.uniform(300, 9000, 60).astype("f4"),
    },
    "movielens": {
        "users": RNG.integers(0, 20, 60).astype("i2"),
        "films": RNG.integers(0, 30, 60).astype("i2"),
        "ratings": RNG.uniform(1, 5, 60).astype("f4"),
    },
}
MADE: dict[str, Callable[..., Any]] = {
    "adding": half_d.AddingTask,
    "sorting": half_d.SortingTask,
    "parity": half_d.ParityTask,
    "density": half_d.DensityTask,
    "spirals": half_d.SpiralsTask,
    "teacher": half_d.TeacherTask,
    "masks": half_d.MasksTask,
}
SIZES: dict[str, dict[str, int]] = {
    **{name: {"num": 5000, "batch_rows": 8} for name in MADE},
    "masks": {"num": 40, "batch_rows": 8},
    "spirals": {"num": 50},
    "boxes": {"num": 60, "batch_rows": 8},
    "pendulum": {"num": 60, "batch_rows": 8},
    "clouds": {"num": 60, "batch_rows": 8},
    "bible-gpt": {"batch_rows": 8, "context": 16, "width": 16, "num_validation": 8},
    "bible-rnn": {"batch_rows": 8, "context": 16, "num_validation": 8},
    "picture": {"side": 12, "batch_rows": 8},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few rows of each set."""
    return write_sets(tmp_path, SMALL, monkeypatch)


@pytest.mark.parametrize("name", sorted({entry.task_name for entry in ENTRIES if entry.half in "DE"}))
def test_task_keeps_the_contract(name: str, data: Path) -> None:
    task: Any = TASKS[name](data, **SIZES.get(name, {"batch_rows": 8}))
    model = task.build(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), task.build(0).parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), task.build(1).parameters(), strict=True))
    grouped = [name for names in task.groups(model).values() for name in names]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())
    first, again = (task.gather(task.rows(3, seed=1)) for _ in range(2))
    assert all(torch.equal(a, b) and len(a) == task.batch_rows for a, b in zip(first, again, strict=True))
    assert task.rows(0).max() < task.num_train <= task.validation_rows.min()
    loss = task.loss(model, first)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert math.isfinite(task.evaluate(model)["loss"])
    (result,) = sweep(task, [Run(lr=1e-3, schedule="wsd")], optimizer="adam", num_steps=2)
    assert math.isfinite(result.validation["loss"]), "models train on the stacked engine"


def test_what_is_to_be_learned() -> None:
    numbers, wanted = half_d.SortingTask(num=3000).gather(torch.arange(200))
    assert 0.9 < (numbers.sort(-1).values == wanted).float().mean() < 1
    inputs, total = half_d.AddingTask(num=3000).gather(torch.arange(200))
    assert torch.all(inputs[..., 1].sum(-1) == 2)
    assert (total - inputs.prod(-1).sum(-1)).std() == pytest.approx(0.1, rel=0.2)
    bits, odd = half_d.ParityTask(num=5000).gather(torch.arange(1000))
    assert (bits[:, :4].prod(-1) == 1 - 2 * odd).float().mean() == pytest.approx(0.9, abs=0.04)
    pictures, disc = half_d.MasksTask(num=40).gather(torch.arange(40))
    assert pictures[disc].mean() - pictures[~disc].mean() == pytest.approx(1, abs=0.1)


def test_what_is_to_be_learned_in_half_e() -> None:
    pictures, kind, boxes = half_e.BoxesTask(num=200).gather(torch.arange(160))
    down, across, height, width = (boxes * 32).unbind(1)
    assert torch.all((down - height >= 0) & (down + height <= 32) & (across - width >= 0) & (across + width <= 32))
    rows, columns = down.round().long().clamp(0, 31), across.round().long().clamp(0, 31)
    assert pictures[torch.arange(160), rows, columns].mean() == pytest.approx(1, abs=0.25)
    assert set(kind.tolist()) == {0, 1, 2}
    (path,) = half_e.PendulumTask(num=50).gather(torch.arange(40))
    a, b, da, db = path.double().unbind(-1)
    energy = da**2 + db**2 / 2 + da * db * (a - b).cos() - 9.81 * (2 * a.cos() + b.cos())
    assert (energy - energy[:, :1]).abs().max() < 1e-2, "a double pendulum keeps its energy"
    points, shape = half_e.CloudsTask(num=600).gather(torch.arange(480))
    assert points[shape == 0].norm(dim=-1).mean() == pytest.approx(1, abs=0.05), "the first is a sphere"


def test_experts_are_two_and_even_use_costs_least() -> None:
    torch.manual_seed(0)
    layer = half_e.Experts(8)
    found, uneven = layer(torch.randn(4, 6, 8))
    assert found.shape == (4, 6, 8)
    assert uneven.item() == pytest.approx(1, abs=0.2)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.arange(8.0)[:, None] * torch.ones(8))
    assert layer(torch.rand(4, 6, 8) + 1)[1] > 3


def test_density_is_one() -> None:
    flow = half_d.DensityTask(num=5000).build(0)
    points = half_d.normal(0, 20_000, 8) * 2
    proposal = -points.square().sum(-1) / 8 - 8 * math.log(2 * math.sqrt(2 * math.pi))
    with torch.no_grad():
        assert (flow(points) - proposal).exp().mean() == pytest.approx(1, abs=0.1)


def test_numbers_are_the_same_everywhere() -> None:
    assert half_d.uniform(3, 2).tolist() == [0.0856491671436244, 0.23681050659609976]
    assert half_d.integers(3, 100, 2).tolist() == [8, 23]
    drawn = half_d.normal(3, 40_000)
    assert drawn.mean().item() == pytest.approx(0, abs=0.02)
    assert drawn.std().item() == pytest.approx(1, abs=0.02)


def test_half_d_is_run_around_the_optimizer_of_the_snippet() -> None:
    mine = [job for job in jobs(ENTRIES, METHODS) if job.entry.half == "D"]
    by_task = {entry: {job.method for job in mine if job.entry.name == entry} for entry in ("adding", "mixer-sgd")}
    assert {"grid", "autolr", "adamw", "greedy", "muon"} <= by_task["adding"]
    assert by_task["mixer-sgd"] == {"grid", "autolr"}
