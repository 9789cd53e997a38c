"""A step between rounds: what it calls and reads, and that nothing is lost by how little that is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from hdet import Adapt, AutoLR, OneCycleAutoLR
from schedules import SCHEDULES

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")

STILL = Adapt(level=False, _start_steps=0)
HOME = str(Path(hdet.__file__).parent)


def make_optimizer(num_groups: int = 1, lr: Any = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(num_groups)]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of all operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], Any]) -> list[str]:
    """The functions of hdet that ``run`` calls, without comprehensions."""
    found = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and not code.co_name.startswith("<"):
            found.append(code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def auto_lr(num_groups: int) -> AutoLR:
    return AutoLR(OneCycleLR(make_optimizer(num_groups), 0.1, 1000), interval=100, adapt=STILL)


def one_cycle(num_groups: int) -> OneCycleAutoLR:
    return OneCycleAutoLR(make_optimizer(num_groups), 0.1, 1000, model_sync_interval=100)


@pytest.mark.parametrize("make", [auto_lr, one_cycle])
def test_a_step_between_rounds_calls_little(make: Callable[[int], Any]) -> None:
    counts = []
    for num_groups in (1, 5):
        scheduler, loss = make(num_groups), nn.Parameter(torch.ones(())) * 2.0
        scheduler.step(loss)
        counts.append(len(calls_of(lambda: scheduler.step(loss))))  # noqa: B023 - called at once
    assert max(counts) <= 12
    assert counts[0] == counts[1]


@pytest.mark.parametrize("make", [auto_lr, one_cycle])
def test_a_step_between_rounds_is_one_operation(make: Callable[[int], Any]) -> None:
    scheduler, loss = make(2), nn.Parameter(torch.ones(())) * 2.0
    scheduler.step(loss)
    with Operations() as operations:
        scheduler.step(loss)
    assert operations.seen == ["aten::_local_scalar_dense"]


def test_a_loss_on_a_device_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor, let in for once, stands for it: whoever reads a value of one fails."""
    monkeypatch.setattr("hdet.signals.loss.require_scalar", lambda *_: None)
    scheduler, loss = auto_lr(1), torch.ones((), device="meta", requires_grad=True) * 2.0
    scheduler.step(loss)
    with Operations() as operations:
        scheduler.step(loss)
    assert operations.seen == ["aten::detach", "aten::add_.Tensor"]


@pytest.mark.parametrize(("name", "kind"), list(zip(SCHEDULES, cycle(["float", "tensor"]), strict=False)))
def test_learning_rates_are_the_schedules_times_the_scale(name: str, kind: str) -> None:
    theirs, ours = (make_optimizer(2, lr=torch.tensor(0.1) if kind == "tensor" else 0.1) for _ in range(2))
    plain = SCHEDULES[name](theirs)
    auto = AutoLR(SCHEDULES[name](ours), interval=10**6, adapt=STILL)
    auto._run.steering.multiply(0.5)
    auto._run.lrs.update()
    auto._refresh()
    before = [group["lr"] for group in ours.param_groups]
    for _ in range(12):
        plain.step()
        auto.step(1.0)
        for k, (mine, their) in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
            assert float(mine["lr"]) == pytest.approx(0.5 * float(their["lr"]), rel=1e-6)
            assert (mine["lr"] is before[k]) == (kind == "tensor")
            assert mine["momentum"] == pytest.approx(their["momentum"])
        assert [float(lr) for lr in auto.get_last_lr()] == [float(group["lr"]) for group in ours.param_groups]
        assert [float(lr) for lr in auto.get_lr()] == pytest.approx([float(lr) for lr in auto.get_last_lr()])


def test_a_step_of_the_schedule_that_changes_no_learning_rate_is_found_too() -> None:
    schedule = StepLR(make_optimizer(), 1000)
    auto = AutoLR(schedule, interval=100, adapt=STILL)
    auto.step(1.0)
    schedule.step()
    with pytest.raises(RuntimeError, match=r"steps the StepLR it wraps.* from step 1 to 2; delete schedule\.step"):
        auto.step(1.0)


def test_a_learning_rate_of_somebody_else_is_found_in_the_step() -> None:
    scheduler = auto_lr(3)
    scheduler.step(1.0)
    scheduler.optimizer.param_groups[2]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match=r"must be left to AutoLR, .* in param group 2"):
        scheduler.step(1.0)


def test_the_same_number_written_again_is_nobody_elses() -> None:
    scheduler = auto_lr(1)
    for _ in range(3):
        scheduler.step(1.0)
        group = scheduler.optimizer.param_groups[0]
        group["lr"] = float(str(group["lr"]))


def test_a_schedule_that_fails_leaves_the_learning_rates() -> None:
    def fail_later(step: int) -> float:
        if step == 3:
            raise OSError("no table")
        return 1.0 / (1 + step)

    optimizer = make_optimizer(2)
    auto = AutoLR(LambdaLR(optimizer, fail_later), interval=100, adapt=STILL)
    auto.step(1.0)
    auto.step(1.0)
    before = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(OSError, match="no table"):
        auto.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == before
