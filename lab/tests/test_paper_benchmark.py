"""benchmarks/paper.py: its loop is the lab's where both do the same, and its means are those of a slow version."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdet.checks import FloatArray
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks.quadratic import QuadraticTask

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = {"num_replicas": 2, "interval": 4, "num_steps": 20, "optimizer": "sgd"}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_its_loop_is_the_labs() -> None:
    loop: Any = importlib.import_module("paper_loop")
    (plain,) = loop.train(QuadraticTask(dimension=6), [loop.Setting("plain", 0.1, spread=0.0)], **SMALL)
    (local,) = loop.train(QuadraticTask(dimension=6), [loop.Setting("local", 0.1, spread=0.0)], shared=False, **SMALL)
    runs = [Run(lr=0.1, num_replicas=2, interval=4), Run(lr=0.1, method="local", num_replicas=2, interval=4)]
    expected = sweep(QuadraticTask(dimension=6), runs, optimizer="sgd", num_steps=20)
    assert plain.validation["loss"] == pytest.approx(expected[0].validation["loss"], rel=1e-5)
    assert local.validation["loss"] == pytest.approx(expected[1].validation["loss"], rel=1e-5)
    assert plain.validation["loss"] != local.validation["loss"]


def test_where_eq_7_would_ascend_a_run_ends_with_an_error() -> None:
    loop: Any = importlib.import_module("paper_loop")
    settings = [
        loop.Setting("", 4.0, temperature=0.002, rate=4.0, velocity=velocity) for velocity in ("relative", "absolute")
    ]
    relative, absolute = loop.train(QuadraticTask(dimension=6), settings, **SMALL | {"num_steps": 60})
    assert not relative.error
    assert absolute.error.startswith("learning rates must stay above 0, but Eq. 7")
    assert absolute.scales[-1] == [0.0]  # nothing is trained any more


def test_eq_8_as_printed_leaves_what_the_page_says() -> None:
    loop: Any = importlib.import_module("paper_loop")
    for factors, left in (((9.0, 0.5), 1 / 18), ((25.0, 1e4), 400.0)):
        setting = loop.Setting("", 1.0, decay="printed", factors=factors)
        table = loop.decay_table(setting, 1000, 10)
        gamma = loop.printed_gamma(*factors, 90)
        assert table[-1] * (1 - gamma) ** 0.1 == pytest.approx(left)  # after the last of 900 steps
        assert table.max() == pytest.approx(max(1.0, table[-1]))
    floor = loop.decay_table(loop.Setting("", 1.0, decay="floor"), 1000, 10)
    assert floor[-1] * (1 - loop.printed_gamma(25.0 * 1e4, 1.0, 90)) ** 0.1 == pytest.approx(4e-6)


def _slow(name: str, theta: FloatArray, centre: FloatArray) -> tuple[FloatArray, FloatArray]:
    """One converge of (N, d) by its formula; replicas and centre after it."""
    count = len(theta)
    if name == "elastic":
        rate = 0.9 / count
        moved = [(1 - rate) * each + rate * centre for each in theta]
        return np.array(moved), centre + rate * sum(each - centre for each in theta)
    mean = theta.mean(0)
    return np.tile(mean, (count, 1)), mean


@pytest.mark.parametrize("name", ["mean", "elastic", "grawa"])
def test_means_against_their_formulas(name: str) -> None:
    means: Any = importlib.import_module("paper_means")
    generator = np.random.default_rng(0)
    start = generator.standard_normal(10)
    theta, centre = np.tile(start, (3, 1)), start
    weights = torch.from_numpy(theta).float()
    mean = means.make_mean(name, weights)
    for _ in range(5):
        step = generator.standard_normal((3, 10))
        theta, weights = theta + step, weights + torch.from_numpy(step).float()
        mean.apply_(weights, np.zeros(3), np.ones(3), last=False)
        theta, centre = _slow(name, theta, centre)
        np.testing.assert_allclose(weights.numpy(), theta, atol=1e-6)
    mean.apply_(weights, np.zeros(3), np.ones(3), last=True)
    assert (weights == weights[0]).all()
    assert mean.bytes_sent > 0
