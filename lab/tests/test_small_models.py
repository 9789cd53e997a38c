"""The benchmark of small models: what it trains, and what it says of it."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_record_has_every_run_and_a_later_one_takes_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab" / "benchmarks"))
    benchmark = importlib.import_module("small_models")
    monkeypatch.setattr(benchmark, "PEAKS", [1e-4, 1e-2])
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["small_models.py", "--tasks", "logistic", "--seeds", "0", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", [*common, "--json", str(first)])
    benchmark.main()
    monkeypatch.setattr(sys, "argv", [*common, "--json", str(second), "--grid-of", str(first)])
    benchmark.main()
    records = [json.loads(path.read_text()) for path in (first, second)]
    grid = records[0]["grid"]["logistic"]
    assert set(grid) == {f"{schedule} {peak:.3g}" for schedule in ("one-cycle", "wsd") for peak in (1e-4, 1e-2)}
    assert grid["wsd 0.01"][0] < grid["wsd 0.0001"][0]
    assert records[0]["grid"] == records[1]["grid"]
    assert records[0]["autolr"] == records[1]["autolr"]
    (loss,) = records[0]["autolr"]["logistic"]
    assert math.isfinite(loss)
    assert loss < grid["wsd 0.0001"][0]
    more = loss / min(losses[0] for losses in grid.values()) - 1
    assert f"{more:+.1%} |" in capsys.readouterr().out
