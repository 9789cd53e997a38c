"""A scheduler and its optimizer are freed when the last name for them is gone, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet import AutoLR, Explorer, OneCycleAutoLR, knobs
from options import with_ensemble

NUM_STEPS = 8


def _knobs(model: nn.Module) -> list[knobs.Knob]:
    return [
        knobs.WeightDecay(check_signal=False),
        knobs.Epsilon(),
        knobs.Momentum(),
        knobs.Beta2(),
        knobs.ClipNorm(1.0),
        knobs.Dropout(model, adapt=False),
        knobs.Temperature(model[0], "scale"),  # type: ignore[index]
    ]


def _auto(model: nn.Module, optimizer: Optimizer, **options: Any) -> AutoLR:
    schedule = OneCycleLR(optimizer, 0.1, NUM_STEPS, cycle_momentum=False)
    return AutoLR(schedule, model=model, **with_ensemble(interval=2, **options))


def _one_cycle(model: nn.Module, optimizer: Optimizer, **options: Any) -> OneCycleAutoLR:
    settings: dict[str, Any] = {
        "ensemble_lr_spread_ratio": 0.1,
        "model_sync_interval": 2,
        "cycle_momentum": False,
        "auto_lr_warmup_steps": 0,
    }
    return OneCycleAutoLR(optimizer, 0.1, NUM_STEPS, model=model, **with_ensemble(**settings, **options))


def _explorer(model: nn.Module, optimizer: Optimizer, **options: Any) -> Explorer:
    return Explorer(model, optimizer, **{"knobs": [knobs.LearningRate()], "interval": 2, **options})


@pytest.fixture
def no_gc() -> Iterator[None]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports torch._dynamo, whose tracebacks hold the first one
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings(
    "ignore:the round that ended",
    "ignore:knobs are explored by several",
    "ignore:Explorer compares replicas",
    "ignore:ensemble_lr_spread",
)
@pytest.mark.parametrize("with_knobs", [False, True])
@pytest.mark.parametrize("make", [_auto, _one_cycle, _explorer])
@pytest.mark.usefixtures("no_gc")
def test_both_are_freed_at_once(make: Callable[..., Any], with_knobs: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 1))
    model[0].scale = 1.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = make(model, optimizer, **({"knobs": _knobs(model)} if with_knobs else {}))
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    moments = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    held = {"scheduler": weakref.ref(scheduler), "optimizer": weakref.ref(optimizer), "moments": moments}
    if isinstance(scheduler, AutoLR):
        held["schedule"] = weakref.ref(scheduler.schedule)
    del scheduler, optimizer, loss
    assert [name for name, reference in held.items() if reference() is not None] == []


@pytest.mark.usefixtures("no_gc")
def test_so_are_torch_s_own() -> None:
    """Otherwise the test above could not hold."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=0.1)
    schedule: LRScheduler | None = OneCycleLR(optimizer, 0.1, NUM_STEPS, cycle_momentum=False)
    held = weakref.ref(optimizer), weakref.ref(schedule)
    del optimizer
    schedule = None
    assert [reference() for reference in held] == [None, None]
