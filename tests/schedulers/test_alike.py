"""Ranks that would train apart, because something in their optimizers differs, find out at construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR

from hdet import AutoLR, Ensemble, Explorer, OneCycleAutoLR
from hdet.ensemble.knobs import LearningRate
from job import error, launch


def _model() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))


def _in_two(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, **second}]


def _adamw(**options: Any) -> Callable[[], AutoLR]:
    return lambda: AutoLR(torch.optim.AdamW(_model().parameters(), **{"lr": 0.1, **options}), total_steps=100)


def _second_group(**second: Any) -> Callable[[], AutoLR]:
    return lambda: AutoLR(torch.optim.SGD(_in_two(_model(), **second), lr=0.1), total_steps=100)


def _cut_at(where: int) -> AutoLR:
    parameters = list(_model().parameters())
    groups = [{"params": parameters[:where]}, {"params": parameters[where:]}]
    return AutoLR(torch.optim.SGD(groups, lr=0.1), total_steps=100)


def _many(decay: float) -> AutoLR:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(50)]
    groups = [{"params": [p], "weight_decay": decay if k == 31 else 0.0} for k, p in enumerate(parameters)]
    return AutoLR(torch.optim.SGD(groups, lr=0.1), total_steps=100)


def _scheduled(gamma: float) -> AutoLR:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    parts = [LinearLR(optimizer, total_iters=5), ExponentialLR(optimizer, gamma)]
    return AutoLR(SequentialLR(optimizer, parts, milestones=[5]), total_steps=100)


def _one_cycle(lr: float = 0.1, decay: float = 0.0, momentum: float = 0.9) -> OneCycleAutoLR:
    optimizer = torch.optim.SGD(_model().parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    return OneCycleAutoLR(optimizer, 0.1, 40, ensemble_lr_spread_ratio=0.2, model_sync_interval=4)


def _explorer(lr: float) -> Explorer:
    model = _model()
    return Explorer(model, torch.optim.SGD(model.parameters(), lr=lr), knobs=[LearningRate()], interval=4)


def _with_a_loaded_lr(odd: bool) -> str:
    """A run that went on apart, whose ranks have loaded checkpoints of their own before they construct."""
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    first = AutoLR(CosineAnnealingLR(optimizer, 100), ensemble=Ensemble(spread=0.1))
    state, saved = optimizer.state_dict(), first.state_dict()
    del first
    state["param_groups"][0]["lr"] = 0.09 if odd else 0.11
    other = torch.optim.SGD(_model().parameters(), lr=0.1)
    other.load_state_dict(state)
    return error(lambda: AutoLR(CosineAnnealingLR(other, 100), ensemble=Ensemble(spread=0.1)).load_state_dict(saved))


def _differing() -> dict[str, str]:
    odd = dist.get_rank() == 1
    calls: dict[str, Callable[[], Any]] = {
        "nothing": _adamw(),
        "lr": _adamw(lr=0.2 if odd else 0.1),
        "tensor lr": _adamw(lr=torch.tensor(0.25 if odd else 0.5)),
        "weight_decay": _adamw(weight_decay=0.02 if odd else 0.01),
        "betas": _adamw(betas=(0.9, 0.95 if odd else 0.999)),
        "eps": _adamw(eps=1e-6 if odd else 1e-8),
        "amsgrad": _adamw(amsgrad=odd),
        "second group": _second_group(**({"lr": 0.25} if odd else {})),
        "momentum of the second group": _second_group(momentum=0.5 if odd else 0.0),
        "a key of one rank": _second_group(**({"depth": 3} if odd else {})),
        "cuts": lambda: _cut_at(2 if odd else 1),
        "one of many": lambda: _many(0.5 if odd else 0.25),
        "schedule": lambda: _scheduled(0.9 if odd else 0.95),
        "one cycle, what it overwrites": lambda: _one_cycle(lr=0.7 if odd else 0.1, momentum=0.5 if odd else 0.9),
        "one cycle": lambda: _one_cycle(decay=0.1 if odd else 0.0),
        "explorer": lambda: _explorer(0.3 if odd else 0.1),
    }
    found = {name: error(call) for name, call in calls.items()}
    return {**found, "loaded": _with_a_loaded_lr(odd)}


@pytest.fixture(scope="module")
def differing() -> list[dict[str, str]]:
    return launch(_differing, 2)


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("weight_decay", "weight_decay of param group 0=0.01 on replicas [0], 0.02 on replicas [1]"),
        ("betas", "betas[1] of param group 0=0.999 on replicas [0], 0.95 on replicas [1]"),
        ("eps", "eps of param group 0=1e-08 on replicas [0], 1e-06 on replicas [1]"),
        ("amsgrad", "amsgrad of param group 0=False on replicas [0], True on replicas [1]"),
        ("second group", "lr of param group 1=1.0 on replicas [0], 2.5 on replicas [1]"),
        ("momentum of the second group", "momentum of param group 1=0.0 on replicas [0], 0.5 on replicas [1]"),
        ("a key of one rank", "depth of param group 1=absent on replicas [0], 3 on replicas [1]"),
        ("cuts", "parameters of param group 0=1 tensors"),
        ("one of many", "weight_decay of param group 31=0.25 on replicas [0], 0.5 on replicas [1]"),
        ("schedule", "ExponentialLR 2.gamma=0.95 on replicas [0], 0.9 on replicas [1]"),
        ("one cycle", "weight_decay of param group 0=0.0 on replicas [0], 0.1 on replicas [1]"),
        ("explorer", "lr of param group 0=0.1 on replicas [0], 0.3 on replicas [1]"),
    ],
)
def test_ranks_that_differ_raise_on_every_rank(differing: list[dict[str, str]], label: str, named: str) -> None:
    for result in differing:
        assert result[label].startswith("ValueError: replicas must agree about their arguments and parameters, but got")
        assert named in result[label]


def test_only_what_differs_is_named(differing: list[dict[str, str]]) -> None:
    for result in differing:
        for label in ("one of many", "weight_decay", "a key of one rank"):
            assert ";" not in result[label]


@pytest.mark.parametrize("label", ["nothing", "lr", "tensor lr", "one cycle, what it overwrites", "loaded"])
def test_ranks_that_train_alike_are_let_through(differing: list[dict[str, str]], label: str) -> None:
    assert [result[label] for result in differing] == ["", ""]
