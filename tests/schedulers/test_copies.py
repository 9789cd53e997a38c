"""Copies of a scheduler are refused; those of its optimizer have none."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import AutoLR, Explorer, OneCycleAutoLR, knobs

Run = tuple[nn.Module, torch.optim.Optimizer, Any]
KINDS = ("AutoLR", "OneCycleAutoLR", "Explorer")
WAYS: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


def _make(kind: str) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "AutoLR":
            return model, optimizer, AutoLR(CosineAnnealingLR(optimizer, 200), interval=2, model=model)
        if kind == "OneCycleAutoLR":
            return model, optimizer, OneCycleAutoLR(optimizer, 0.01, 200, model_sync_interval=2, model=model)
        return model, optimizer, Explorer(model, optimizer, knobs=[knobs.LearningRate()], interval=2)


def _train(run: Run, first: int, steps: int) -> list[tuple[float, ...]]:
    model, optimizer, scheduler = run
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        seen.append((float(loss.detach()), *(float(group["lr"]) for group in optimizer.param_groups)))
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_refused_and_says_what_to_do(kind: str, way: str) -> None:
    run = _make(kind)
    _train(run, 0, 5)
    text = rf"^{kind} must not be copied or pickled: .* make a new one, .* new\.load_state_dict\(old\.state_dict\(\)\)$"
    for what in (run[2], run) if way != "copy" else run[2:]:
        with pytest.raises(TypeError, match=text):
            WAYS[way](what)
    again = _make(kind)
    for part, old in zip(again, run, strict=True):
        part.load_state_dict(copy.deepcopy(old.state_dict()))
    assert _train(again, 5, 4) == _train(run, 5, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_the_optimizer_has_no_scheduler(kind: str) -> None:
    run = _make(kind)
    _train(run, 0, 5)
    lrs = [group["lr"] for group in run[1].param_groups]
    optimizer = copy.deepcopy(run[1])
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    before = run[2].state_dict()["rounds"]["signals"]
    optimizer.step()
    assert run[2].state_dict()["rounds"]["signals"] == before
    assert [group["lr"] for group in optimizer.param_groups] == lrs


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_keeps_a_scheduler_alive(kind: str) -> None:
    """Without the help of the garbage collector: there are no circles."""
    gc.collect()
    gc.disable()
    try:
        run = _make(kind)
        _train(run, 0, 5)
        refs = [weakref.ref(run[2]), weakref.ref(run[1])]
        del run
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
