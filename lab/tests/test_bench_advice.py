"""What ``hdet bench --task`` says in its last line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hdet_lab.bench.advice import advise
from hdet_lab.bench.records import Record

LRS = (1e-3, 3e-3, 1e-2)


def record(losses: dict[str, list[float]]) -> Record:
    """A grid whose best is 1, and one loss for each seed of other methods."""
    num = len(next(iter(losses.values())))
    grid = [
        {"schedule": "wsd", "lr": lr, "seed": seed, "loss": loss, "in_first_grid": True}
        for lr, loss in zip(LRS, (1.5, 1.2, 1.0), strict=True)
        for seed in range(num)
    ]
    methods: dict[str, list[dict[str, Any]]] = {"grid": grid}
    for method, found in losses.items():
        methods[method] = [
            {"schedule": "none", "lr": 1.0, "seed": seed, "loss": loss} for seed, loss in enumerate(found)
        ]
    return Record("own", "extra", "own", "adam", 100, [], methods, {}, {})


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (
            {"autolr": [1.01, 1.02, 1.0], "prodigy": [1.5, 1.6, 1.5]},
            "Use AutoLR: +1.00% against the best of 3 fixed runs (wsd, 0.01), and a random search needs 3 runs for "
            "that (100 steps, 3 seeds).",
        ),
        (  # level: AutoLR has nothing set
            {"autolr": [1.01, 1.03, 1.0], "prodigy": [1.02, 1.0, 1.01]},
            "Use AutoLR: +1.33% against the best of 3 fixed runs (wsd, 0.01), and a random search needs 3 runs for "
            "that (100 steps, 3 seeds).",
        ),
        (
            {"autolr": [1.21, 1.2, 1.2], "prodigy": [0.9, 0.91, 0.9]},
            "Use Prodigy: -9.67% against the best of 3 fixed runs (wsd, 0.01), and no random search reaches that; "
            "AutoLR is +20.33% (100 steps, 3 seeds).",
        ),
        (
            {"autolr": [1.11], "prodigy": [1.3]},
            "Search for the learning rate: the best of 3 fixed runs (wsd, 0.01) is ahead of every method with one run, "
            "of which the nearest, AutoLR, is +11.00% (100 steps, 1 seed).",
        ),
        (
            {"autolr": [math.inf, math.inf], "mechanic": [math.inf, math.inf], "prodigy": [1.0, 1.04]},
            "Use Prodigy: +1.98% against the best of 3 fixed runs (wsd, 0.01), and a random search needs 3 runs for "
            "that; AutoLR broke (100 steps, 2 seeds).",
        ),
        (
            {"autolr": [-1.0]},
            "No advice: methods are compared by ratios, for which the validation loss must be above 0.",
        ),
    ],
)
def test_the_last_line(losses: dict[str, list[float]], expected: str) -> None:
    assert advise(record(losses))[-1] == expected


def test_without_a_grid_there_is_no_advice() -> None:
    found = record({"autolr": [1.0]})
    del found.methods["grid"]
    assert advise(found) == ["No advice: the grid was not run, with which methods are compared."]


def test_the_table_is_in_order() -> None:
    lines = advise(record({"autolr": [1.01, 1.02], "prodigy": [0.9, 0.9]}))
    assert lines[1].split()[0] == "Prodigy"
    assert lines[2].startswith("best of the grid (wsd, 0.01)")
