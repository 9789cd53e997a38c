"""Ctrl-C inside ``step()``, at every line of it: the step is taken as a whole or not at all, and training goes on."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import hdet
from hdet import Adapt, AutoLR, Faults, OneCycleAutoLR

HERE = (str(Path(hdet.__file__).parent), str(Path(torch.__file__).parent / "optim" / "lr_scheduler.py"))
TOTAL = 100_000


class Interrupt:
    """Raises KeyboardInterrupt at the ``at``-th line of hdet and of torch's schedules, once."""

    def __init__(self, at: int) -> None:
        self.left, self.struck = at, ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if event == "line" and not self.struck:
            self.left -= 1
            if self.left == 0:
                self.struck = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


class Setting:
    """One parameter, and a scheduler of it."""

    def __init__(self, make: Callable[[nn.Module, torch.optim.Optimizer], Any], lr: Any = 0.01) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.make = make
        self.scheduler = make(self.model, self.optimizer)

    def train(self, interrupt: Interrupt | None = None) -> None:
        """A step of the optimizer, and that of the scheduler, which may be interrupted."""
        loss = self.backward()
        self.optimizer.step()
        self.step(loss, interrupt)

    def backward(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return float(loss.item())

    def step(self, loss: float, interrupt: Interrupt | None) -> None:
        sys.settrace(interrupt)
        try:
            self.scheduler.step(loss)
        except KeyboardInterrupt:
            assert interrupt is not None
        finally:
            sys.settrace(None)

    def join(self, value: torch.Tensor) -> None:
        """One more param group."""
        self.joined = nn.Parameter(value)
        self.optimizer.add_param_group({"params": [self.joined], "lr": 0.002})

    def check(self) -> None:
        scheduler = self.scheduler
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        assert lrs == pytest.approx([float(lr) for lr in scheduler._last_lr], rel=1e-12)
        if isinstance(scheduler, AutoLR):
            assert scheduler._schedule._count() == scheduler.last_epoch
            assert lrs == pytest.approx([float(lr) for lr in scheduler.get_lr()], rel=1e-6)

    def resume(self) -> Setting:
        """From a checkpoint."""
        other = Setting(self.make)
        for group in self.optimizer.param_groups[1:]:
            other.join(group["params"][0].detach().clone())
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.scheduler.load_state_dict(self.scheduler.state_dict())
        return other


def auto(wrap: Any = None, **options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        schedule = optimizer if wrap is None else wrap(optimizer)
        settings = {"interval": 2, "total_steps": TOTAL, "model": model, **options}
        return AutoLR(schedule, **settings)

    return make


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=20), CosineAnnealingLR(optimizer, TOTAL)]
    return SequentialLR(optimizer, parts, milestones=[20])


def chain(optimizer: torch.optim.Optimizer) -> Any:
    return ChainedScheduler([ExponentialLR(optimizer, 0.99999), StepLR(optimizer, 7, 0.9999)])


STILL = Adapt(level=False, _start_steps=0)
MAKERS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "alone": auto(),
    "unknown length": auto(total_steps=None),
    "one cycle": auto(lambda o: OneCycleLR(o, 0.1, TOTAL), adapt=STILL),
    "sequence": auto(sequence, adapt=STILL),
    "chain": auto(chain, adapt=STILL, max_lr=0.02),
    "paper": lambda model, optimizer: OneCycleAutoLR(optimizer, 0.1, TOTAL, model=model, model_sync_interval=2),
}


EACH = pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
"""Lines that are left out: every line takes long."""


def _interrupt_everywhere(setting: Setting, stride: int, most: int = 20_000) -> None:
    """One line after the other, of one step after the other, until a step has fewer lines than that."""
    missed = 0
    for number, at in enumerate(range(1, most, stride), 1):
        step, num_rounds = setting.scheduler.last_epoch, len(setting.scheduler.history)
        interrupt = Interrupt(at)
        setting.train(interrupt)
        taken = setting.scheduler.last_epoch - step
        assert taken in (0, 1), interrupt.struck
        assert taken == 1 or len(setting.scheduler.history) == num_rounds, interrupt.struck
        setting.check()
        missed = 0 if interrupt.struck else missed + 1
        if missed == 4:  # steps in the middle of a round have fewer lines than those that end one
            return
        if number % 50 == 0:
            setting.resume().train()
    raise AssertionError("no step has been taken as a whole")


@pytest.mark.timeout(300)
@EACH
@pytest.mark.parametrize("name", MAKERS)
def test_at_every_line(name: str, stride: int) -> None:
    setting = Setting(MAKERS[name])
    if name != "alone":  # there the first steps are interrupted too
        for _ in range(5):
            setting.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _interrupt_everywhere(setting, stride)
    resumed = setting.resume()
    for _ in range(6):
        setting.train()
        resumed.train()
    for a, b in zip(setting.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.timeout(300)
@EACH
def test_at_every_line_of_a_round_that_is_undone(stride: int) -> None:
    """Weights are the ones to go back to or the ones at hand, never some of each."""
    setting = Setting(auto(adapt=STILL, faults=Faults(max_rollbacks=1000)))
    for number, at in enumerate(range(1, 20_000, stride)):
        if number % 10 == 0:  # not all on one run: there is an end to rounds that are undone
            setting = Setting(setting.make)
            for _ in range(5):
                setting.train()
        for _ in range(4 - setting.scheduler.last_epoch % 2):
            setting.train()
        assert setting.scheduler.last_epoch % 2 == 0
        setting.train()
        with torch.no_grad():
            for p in setting.model.parameters():
                p.fill_(math.nan)
        interrupt, num_rounds = Interrupt(at), len(setting.scheduler.history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            setting.step(1.0, interrupt)
            finite = {bool(torch.isfinite(p).all()) for p in setting.model.parameters()}
            assert len(finite) == 1, interrupt.struck
            setting.check()
            if len(setting.scheduler.history) == num_rounds:
                setting.step(1.0, None)
        assert all(bool(torch.isfinite(p).all()) for p in setting.model.parameters()), interrupt.struck
        if not interrupt.struck:
            return
    raise AssertionError("no step has been taken as a whole")


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    setting = Setting(MAKERS["one cycle"], lr=torch.tensor(0.01))
    rates = [group["lr"] for group in setting.optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _interrupt_everywhere(setting, stride=7)
    assert all(group["lr"] is lr for group, lr in zip(setting.optimizer.param_groups, rates, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("joins", [False, True])
def test_at_every_line_before_an_optimizer_step(joins: bool) -> None:
    """Nothing of it has happened, and it can be taken again; the step that follows a new param group takes that up."""
    make = auto(adapt=Adapt(level=False, _start_steps=0, groups="each"), faults=Faults(skip_nonfinite=True))
    for at in range(1, 20_000):
        setting, interrupt = Setting(make), Interrupt(at)
        if joins:
            setting.train()
            setting.join(torch.ones(3))
        loss = setting.backward()
        before = [p.detach().clone() for p in setting.model.parameters()]
        with contextlib.suppress(KeyboardInterrupt):
            sys.settrace(interrupt)
            setting.optimizer.step()
        sys.settrace(None)
        if not interrupt.struck:
            return
        assert all(map(torch.equal, before, setting.model.parameters())), interrupt.struck
        setting.optimizer.step()
        setting.step(loss, None)
        for _ in range(3):
            setting.train()
        resumed = setting.resume()
        for run in (setting, resumed):
            run.train()
            run.train()
        found = list(zip(setting.model.parameters(), resumed.model.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in found), interrupt.struck
        setting.check()
    raise AssertionError("no step has been taken as a whole")


def test_a_round_reaches_a_sink_once_whatever_interrupts_it() -> None:
    setting, seen = Setting(auto(adapt=STILL)), []

    def sink(record: Any, _: Any) -> None:
        seen.append(record.index)
        if record.index in (1, 2):
            raise KeyboardInterrupt if record.index == 1 else ValueError("of the sink's own")

    setting.scheduler.add_sink(sink)
    for _ in range(3):
        setting.train()
    setting.train(Interrupt(10**9))
    setting.train()
    with pytest.raises(ValueError, match="of the sink's own"):
        setting.train()
    for _ in range(2):
        setting.train()
    assert seen == [record.index for record in setting.scheduler.history] == [0, 1, 2, 3]
    assert setting.scheduler.last_epoch == 8
