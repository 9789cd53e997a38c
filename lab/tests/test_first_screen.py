"""The README's table of rivals is that of the records."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

from hdet.auto_lr import LION
from hdet_lab.bench.records import Record
from hdet_lab.bench.summary import over_tasks, summarize

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    first_screen = importlib.import_module("first_screen")
    records, readme = first_screen.load(first_screen.BENCH), first_screen.README.read_text()
    rivals = first_screen.rivals(records, first_screen.equivalent(first_screen.BENCH))
    assert first_screen.filled(readme, "rivals", rivals) == readme, "run python lab/benchmarks/first_screen.py"


def test_what_a_wrong_learning_rate_costs_is_read_between_those_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    level_error = importlib.import_module("level_error")
    losses = {("wsd", 0.1): 4.0, ("wsd", 1.0): 2.0, ("wsd", 10.0): 8.0, ("cosine", 1.0): 1.0, ("wsd", 100.0): math.inf}
    grid = [{"schedule": shape, "lr": lr, "seed": 0, "loss": loss} for (shape, lr), loss in losses.items()]
    record = Record("own", "B", "own", "adam", 10, [], {"grid": grid}, {}, {})
    found = level_error.excesses(record, np.array([1.0, 10.0, 10**0.5, 0.1, 1e-6, 1e6]))
    assert np.exp(found) == pytest.approx([2, 8, 4, 4, 4, 8])  # beyond the grid as at its edge


def test_what_is_said_of_lion_is_what_the_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    first_screen = importlib.import_module("first_screen")
    records = [record for record in first_screen.load(first_screen.BENCH) if record.optimizer == "lion"]
    tasks = [task for record in records if (task := summarize(record)) is not None]
    line = over_tasks(tasks, "autolr")
    assert line is not None
    assert len(tasks) == 8
    least = min(task.share("autolr") for task in tasks)
    assert f"between {least:.0%} and {line.worst:.0%} above" in LION
    assert f"{line.mean:.0%} in the mean" in LION
