"""The figures of docs/held_out.md are those of its records."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    return importlib.import_module("held_out_pages")


def test_tables_and_picture_are_those_of_the_records(pages: Any) -> None:
    again = "is out of date: python lab/benchmarks/held_out_pages.py"
    text = pages.PAGE.read_text()
    assert pages.page(text, pages.RECORDS) == text, f"docs/held_out.md {again}"
    figure = pages.held_out_figure
    drawn = figure.draw(json.loads((pages.RECORDS / "images.json").read_text()), 0)
    assert figure.PICTURE.read_text() == drawn, f"{figure.PICTURE.name} {again}"


def test_the_tables_are_counted_by_hand(pages: Any) -> None:
    def run(kind: str, lr: float, decay: float, test: float, held_out: float, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "lr": lr, "weight_decay": decay, "seed": 0, "test": test, "held_out": held_out, **more}

    runs = [
        run("fixed", 1e-3, 0.0, 2.4, 1.9),
        run("fixed", 1e-3, 1.0, 2.0, 2.1),
        run("plain", 1e-3, 0.01, 3.0, 3.0),
        run("probe", 1e-3, 0.01, 2.5, 2.5),
        run("learn", 1e-8, 0.0, 2.01, 1.9),
        run("learn", 1e-3, 0.01, 2.1, 2.09),
        run("learn", 1.0, 1.0, 1.9, 1.8),
    ]
    tasks = {"table": pages.Task(runs)}
    cells = [line.split(" | ")[1].removesuffix(" |") for line in pages.test_table(tasks).splitlines()[2:]]
    assert cells[:5] == ["2.000", "+20.0%", "+20.0%", "+50.0%", "+25.0%"]
    assert cells[6:] == ["+0.5%", "+5.0%", "-5.0%", "2 of 3 runs", "+0.5%"]
