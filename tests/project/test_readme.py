"""The README's code runs, and so do the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


class Net(torch.nn.Module):
    """What the README's loop calls ``model``: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.inner(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        return loss


def _lines_of_diff(without: str) -> str:
    (diff,) = _blocks("diff")
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(without))


@pytest.mark.parametrize(("without", "name"), [("-", "scheduler"), ("+", "schedule")])
def test_the_diff_goes_from_a_loop_that_trains_to_one(without: str, name: str) -> None:
    model = Net()
    batches = [torch.randn(8, 4) for _ in range(60)]
    names: dict[str, Any] = {"torch": torch, "model": model, "loader": batches}
    exec(compile(_lines_of_diff(without), "README.md", "exec"), names)
    assert names[name].last_epoch == len(batches)
    assert names["optimizer"].state[model.inner.weight]["step"] > 0
    if name == "scheduler":
        assert names[name].found().climb_steps > 0


def test_the_line_it_shows_is_what_a_run_says(caplog: pytest.LogCaptureFixture) -> None:
    """Up to numbers and reason: the README shows the end of a climb."""
    shown = next(" ".join(block.split()) for block in _blocks("text") if block.startswith("hdet: "))
    names: dict[str, Any] = {"torch": torch, "model": Net(), "loader": [torch.randn(8, 4) for _ in range(60)]}
    with caplog.at_level("INFO", logger="hdet"):
        exec(compile(_lines_of_diff("-"), "README.md", "exec"), names)
    (said,) = [record.getMessage() for record in caplog.records if "is over" in record.getMessage()]
    varying = r"\d+ steps at a learning rate of \S+ because [^;]+"
    assert re.sub(varying, "", said) == re.sub(varying, "", shown.removeprefix("hdet: "))


def test_picture_and_table_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    first_screen = importlib.import_module("first_screen")
    records = [first_screen.Record.read(path) for path in first_screen.RECORDS]
    again = "is out of date: python benchmarks/first_screen.py"
    assert first_screen.filled(README, "figures", first_screen.table(records)) == README, f"README.md {again}"
    rivals = first_screen.rivals(first_screen.load(first_screen.BENCH))
    assert first_screen.filled(README, "rivals", rivals) == README, f"README.md {again}"
    pictured = first_screen.picture(records[: first_screen.NUM_PICTURED])
    assert first_screen.PICTURE.read_text() == pictured, f"{first_screen.PICTURE.name} {again}"
    assert f"]({first_screen.PICTURE.relative_to(ROOT).as_posix()})" in README


def test_the_table_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    first_screen = importlib.import_module("first_screen")
    fixed = [("wsd", 0.1, 0, 2.2), ("wsd", 0.2, 0, 2.0), ("wsd", 0.4, 0, math.inf), ("cosine", 0.2, 0, 2.1)]
    mine = [("auto", 1e-8, 0, 2.02), ("auto", 1.0, 0, 1.98), ("auto", 1e-2, 0, 2.2)]
    record = first_screen.Record("toy", "adam", 500, tuple(first_screen.Point(*run) for run in fixed + mine))
    row = first_screen.table([record]).splitlines()[-1]
    assert row == "| `toy`, adam, 500 steps | +10.0% | +inf% | +1.0% | +10.0% | 1 of 3 |"


def test_every_page_is_in_its_contents() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\(docs/(\w+\.md)\)", README.partition("## Contents")[2]))


def test_the_first_screen_is_one() -> None:
    """What it is, how to install it, the diff, the picture, and where it loses come before anything else."""
    first, _, _ = README.partition("\n## ")
    places = [
        first.index(part) for part in ("Stop sweeping", "pip install", "```diff", "any-start.svg", "Where it loses")
    ]
    assert places == sorted(places)


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    "name",
    [
        *("hdet.policy.spread", "hdet.launch", "hdet.testing.controllers", "hdet.schedulers.explorer"),
        *("hdet.schedulers.auto_lr", "hdet.schedulers.one_cycle", "hdet.options", "hdet.found"),
    ],
)
def test_docstring_examples(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
