"""The README's code runs, and so do the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

README = (Path(__file__).parents[2] / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_diff_is_a_loop_that_trains() -> None:
    (diff,) = _blocks("diff")
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    module = torch.nn.Linear(4, 1)
    batches = [torch.randn(8, 4) for _ in range(3)]
    names: dict[str, Any] = {
        "torch": torch,
        "optimizer": torch.optim.Adam(module.parameters()),
        "model": lambda batch: module(batch).square().mean(),
        "loader": batches,
    }
    exec(compile("\n".join(lines), "README.md", "exec"), names)
    assert names["scheduler"].last_epoch == len(batches)
    assert names["optimizer"].state[module.weight]["step"] == len(batches)


def test_the_python_blocks_run_in_order() -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ensemble_lr_spread_ratio=.* has no effect with one replica")
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        for block in _blocks("python"):
            exec(compile(block, "README.md", "exec"), names)
    assert names["scheduler"].last_epoch == names["total_steps"]
    assert set(names["checkpoint"]) == {"model", "optimizer", "scheduler"}


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[2]
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (root / link).exists()] == []


@pytest.mark.parametrize(
    "name",
    [
        *("hdet.policy.spread", "hdet.launch", "hdet.testing.controllers", "hdet.schedulers.explorer"),
        *("hdet.schedulers.auto_lr", "hdet.schedulers.one_cycle", "hdet.options"),
    ],
)
def test_docstring_examples(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
