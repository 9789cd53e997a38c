"""The README's table of rivals is that of the records."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    first_screen = importlib.import_module("first_screen")
    records, readme = first_screen.load(first_screen.BENCH), first_screen.README.read_text()
    rivals = first_screen.rivals(records, first_screen.equivalent(first_screen.BENCH))
    assert first_screen.filled(readme, "rivals", rivals) == readme, "run python lab/benchmarks/first_screen.py"
