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
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet.launch import launch

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


def _lines_of_diff(number: int, without: str) -> str:
    diff = _blocks("diff")[number]
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(without))


@pytest.mark.parametrize(("without", "name"), [("-", "scheduler"), ("+", "schedule")])
def test_the_diff_goes_from_a_loop_that_trains_to_one(without: str, name: str) -> None:
    model = Net()
    batches = [torch.randn(8, 4) for _ in range(60)]
    names: dict[str, Any] = {"torch": torch, "model": model, "loader": batches}
    exec(compile(_lines_of_diff(0, without), "README.md", "exec"), names)
    assert names[name].last_epoch == len(batches)
    assert names["optimizer"].state[model.inner.weight]["step"] > 0
    if name == "scheduler":
        assert names[name].history[0].phase == "warm-up"


def _train_replica(code: str) -> int:
    names: dict[str, Any] = {"torch": torch, "model": Net(), "loader": [torch.randn(8, 4) for _ in range(100)]}
    names |= {"DistributedDataParallel": DistributedDataParallel, "OneCycleLR": OneCycleLR}
    exec(compile(code, "README.md", "exec"), names)
    scheduler = names["scheduler"]
    assert scheduler.last_epoch == 100
    return len(getattr(scheduler, "history", ()))


@pytest.mark.parametrize(("without", "num_rounds"), [("-", 1), ("+", 0)])
def test_the_diff_of_the_papers_method_runs_on_two_processes(without: str, num_rounds: int) -> None:
    assert launch(_train_replica, 2, _lines_of_diff(1, without), timeout_s=150) == [num_rounds] * 2


@pytest.mark.parametrize(
    "name",
    [
        *("hdet.policy.spread", "hdet.launch", "hdet.testing.controllers", "hdet.ensemble.explorer"),
        *("hdet.auto_lr", "hdet.ensemble.one_cycle", "hdet.options", "hdet.found"),
    ],
)
def test_docstring_examples(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
