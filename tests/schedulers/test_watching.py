"""Runs that only watch, scales that are frozen, and validation losses that end a run early."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

import job
from hdet import Adapt, AutoLR, Faults
from hdet.ensemble import Ensemble

STEPS = 200
WATCH = Adapt(act=False)
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "one cycle": lambda o: OneCycleLR(o, 3e-3, STEPS),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "steps": lambda o: StepLR(o, 50),
}


class Loop:
    """A small regression, the same batches in every run."""

    def __init__(self, optimizer: str = "AdamW", lr: float = 3e-3, *, easy: bool = False) -> None:
        torch.manual_seed(0)
        self.easy = easy  # it makes progress from the first step on
        self.model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer: Optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=lr)
        self.batches = torch.Generator().manual_seed(1)
        self.lrs: list[float] = []

    def train(self, step: Callable[[Tensor], Any], num_steps: int = STEPS, break_at: int = -1) -> None:
        for index in range(num_steps):
            x = torch.randn(16, 20, generator=self.batches)
            y = x[:, :1] * (1 + 0.3 * x[:, 1:2] if self.easy else x[:, 1:2])
            loss = (self.model(x) - y).square().mean() * (math.nan if index == break_at else 1.0)
            self.optimizer.zero_grad()
            loss.backward()
            self.lrs.append(float(self.optimizer.param_groups[0]["lr"]))
            self.optimizer.step()
            step(loss)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@functools.cache
def _undisturbed() -> list[float]:
    """Learning rates of a run that nobody tells anything."""
    loop = Loop()
    loop.train(AutoLR(loop.optimizer, total_steps=STEPS).step)
    return loop.lrs


# -- Adapt(act=False) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "optimizer"), [("one cycle", "AdamW"), ("cosine", "SGD"), ("steps", "AdamW")])
def test_one_that_only_watches_changes_nothing(name: str, optimizer: str) -> None:
    plain, watched = Loop(optimizer), Loop(optimizer)
    schedule = SCHEDULES[name](plain.optimizer)
    plain.train(lambda loss: schedule.step())
    auto = AutoLR(
        SCHEDULES[name](watched.optimizer), total_steps=STEPS, adapt=WATCH, faults=Faults(skip_nonfinite=True)
    )
    watched.train(auto.step)
    assert watched.lrs == plain.lrs
    assert all(torch.equal(a, b) for a, b in zip(watched.weights, plain.weights, strict=True))
    assert {record.phase for record in auto.history} >= {"warm-up", "level", "hold"}
    assert len({record.scales for record in auto.history}) > 1  # what it would have done


def test_without_a_schedule_the_optimizer_keeps_its_learning_rate() -> None:
    plain, watched = Loop(), Loop()
    plain.train(lambda loss: None)
    auto = AutoLR(watched.optimizer, total_steps=STEPS, adapt=WATCH)
    watched.train(auto.step)
    assert set(watched.lrs) == {3e-3}
    assert all(torch.equal(a, b) for a, b in zip(watched.weights, plain.weights, strict=True))


def test_a_broken_run_is_watched_to_its_end() -> None:
    """Where AutoLR would go back, and at last raise."""
    plain, watched = Loop(), Loop()
    plain.train(lambda loss: None, break_at=60)
    auto = AutoLR(watched.optimizer, total_steps=STEPS, adapt=WATCH, faults=Faults(max_rollbacks=2))
    watched.train(auto.step, break_at=60)
    assert all(not w.isfinite().any() for w in watched.weights)
    events = [event for record in auto.history for event in record.events]
    assert "this round would have been undone" in events
    assert auto.history[-1].step == STEPS


def test_a_resumed_run_only_watches_too() -> None:
    whole, first, second = Loop(), Loop(), Loop()
    whole.train(lambda loss: None)
    before = AutoLR(first.optimizer, total_steps=STEPS, adapt=WATCH)
    first.train(before.step, 77)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    after = AutoLR(second.optimizer, total_steps=STEPS, adapt=WATCH)
    after.load_state_dict(before.state_dict())
    second.batches.set_state(first.batches.get_state())
    second.train(after.step, STEPS - 77)
    assert all(torch.equal(a, b) for a, b in zip(second.weights, whole.weights, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"adapt": WATCH, "weight_decay": "learn"}, "weight_decay= must be left out with act=False"),
        ({"adapt": WATCH, "ensemble": Ensemble()}, "ensemble= must be left out with act=False"),
    ],
)
def test_what_does_not_go_with_it(arguments: dict[str, Any], said: str) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match=said):
        AutoLR(loop.optimizer, total_steps=STEPS, model=loop.model, probe=lambda: loop.model(torch.ones(2, 20)).mean(),
               **arguments)  # fmt: skip
    assert loop.optimizer.param_groups[0]["lr"] == 3e-3


# -- freeze ---------------------------------------------------------------------------------------------------------


def _frozen(auto: AutoLR) -> list[float]:
    """Scales of the rounds since it was frozen."""
    at = next(i for i, r in enumerate(auto.history) if "the scale is frozen from here on" in r.events)
    return [record.scales[0] for record in auto.history[at:]]


def test_a_scale_that_is_frozen_stays() -> None:
    loop, free = Loop(easy=True), Loop(easy=True)
    free.train(AutoLR(free.optimizer, total_steps=STEPS).step)
    auto = AutoLR(loop.optimizer, total_steps=STEPS)
    loop.train(auto.step, 60)
    auto.freeze()
    loop.train(auto.step, STEPS - 60)
    assert len(set(_frozen(auto))) == 1
    assert loop.lrs[:64] == free.lrs[:64]
    assert loop.lrs[70:] != free.lrs[70:]


def test_it_stays_after_a_resume() -> None:
    first, second = Loop(), Loop()
    auto = AutoLR(first.optimizer, total_steps=STEPS)
    first.train(auto.step, 60)
    auto.freeze()
    first.train(auto.step, 20)
    again = AutoLR(second.optimizer, total_steps=STEPS)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    again.load_state_dict(auto.state_dict())
    second.train(again.step, STEPS - 80)
    assert len({record.scales for record in again.history if record.step > 80}) == 1


def test_a_file_freezes_it(tmp_path: Path) -> None:
    loop = Loop()
    auto = AutoLR(loop.optimizer, total_steps=STEPS, faults=Faults(freeze_file=tmp_path / "freeze"))
    loop.train(auto.step, 60)
    assert not any(record.events for record in auto.history if record.step > 20)
    (tmp_path / "freeze").touch()
    loop.train(auto.step, STEPS - 60)
    assert len(set(_frozen(auto))) == 1
    assert sum("frozen" in event for record in auto.history for event in record.events) == 1


def test_a_freeze_file_that_is_none() -> None:
    with pytest.raises(ValueError, match="freeze_file must be None or a path, but got freeze_file=3"):
        Faults(freeze_file=3)  # type: ignore[arg-type]


# -- evaluated ------------------------------------------------------------------------------------------------------


def _overfits(step: int) -> float:
    return 4 / (1 + step / 20) + 0.04 * max(step - 60, 0)


def _evaluated(auto: AutoLR, loss: Callable[[int], Any], **mode: Any) -> Callable[[Tensor], None]:
    def step(training_loss: Tensor) -> None:
        auto.step(training_loss)
        if auto.last_epoch % 10 == 0:
            auto.evaluated(loss(auto.last_epoch), **mode)

    return step


@pytest.mark.parametrize(
    ("loss", "mode", "best"),
    [
        (_overfits, "min", 64),
        (lambda step: torch.tensor(4 - _overfits(step + 20)), "max", 44),
    ],
)
def test_the_decay_begins_where_validation_has_turned(
    loss: Callable[[int], Any], mode: str, best: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    auto = AutoLR(loop.optimizer, total_steps=STEPS)
    with caplog.at_level(logging.INFO, logger="hdet"):
        loop.train(_evaluated(auto, loss, mode=mode))  # beyond the end, and without a warning
    turned = next(record.step for record in auto.history if any("validation" in event for event in record.events))
    assert 60 < turned < 120
    end = turned + math.ceil(0.3 * turned)
    said = f"validation has not improved since step {best}: the final decay begins here, and training may end at step"
    assert [text for text in caplog.messages if "validation" in text] == [f"{said} {end}"]
    assert auto.total_steps == end
    assert auto.finished
    expected = [loop.lrs[turned] * (end - step) / (end - turned) for step in range(turned, end)]
    assert loop.lrs[turned:end] == pytest.approx(expected)
    assert set(loop.lrs[end:]) == {0.0}


@pytest.mark.parametrize(
    "loss",
    [
        lambda step: 1 / (1 + step / 20),  # still falls
        lambda step: 1 - 1 / (1 + step / 20),  # an accuracy, which should rise
        lambda step: math.nan,
        lambda step: 1e300 * step,
        lambda step: math.sin(step),
    ],
)
def test_nothing_happens_otherwise(loss: Callable[[int], float]) -> None:
    loop = Loop()
    auto = AutoLR(loop.optimizer, total_steps=STEPS)
    loop.train(_evaluated(auto, loss))
    assert loop.lrs == _undisturbed()


@pytest.mark.parametrize("acts", [True, False])
def test_what_validation_does_not_confirm_lowers_the_learning_rate(acts: bool) -> None:
    """Values that follow the training loss at first, and then stand still: the rest is memorised."""
    loop = Loop()
    auto = AutoLR(loop.optimizer, total_steps=STEPS, adapt=Adapt(act=acts))

    def step(_: Tensor) -> None:
        training = 2 * 0.97**auto.last_epoch
        auto.step(torch.tensor(training))
        if auto.last_epoch % 10 == 0:
            auto.evaluated(max(training, 0.8))

    loop.train(step)
    assert acts or len(set(loop.lrs)) == 1
    verb = "follows" if acts else "would follow"
    said = f"the training loss falls below the validation loss: the learning rate {verb} their ratio"
    assert [event for record in auto.history for event in record.events].count(said) == 1
    scales = [record.scales[0] for record in auto.history]
    assert scales[-1] < 0.2 * max(scales)


@pytest.mark.parametrize("stop", [85, 92])
def test_a_resumed_run_goes_on_with_its_evaluations(stop: int) -> None:
    """In mid-round and with one that was not taken in yet; and in the middle of the decay."""
    whole, first, second = Loop(), Loop(), Loop()
    whole.train(_evaluated(AutoLR(whole.optimizer, total_steps=STEPS), _overfits), 110)
    before = AutoLR(first.optimizer, total_steps=STEPS)
    first.train(_evaluated(before, _overfits), stop)
    after = AutoLR(second.optimizer, total_steps=STEPS)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    after.load_state_dict(before.state_dict())
    second.batches.set_state(first.batches.get_state())
    second.train(_evaluated(after, _overfits), 110 - stop)
    assert second.lrs == whole.lrs[stop:]


@pytest.mark.parametrize("loss", ["low", [1.0], torch.ones(2)])
def test_a_validation_loss_that_is_none(loss: Any) -> None:
    auto = AutoLR(Loop().optimizer, total_steps=STEPS)
    with pytest.raises((TypeError, ValueError), match="loss must"):
        auto.evaluated(loss)


def test_a_mode_that_is_none() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        AutoLR(Loop().optimizer, total_steps=STEPS).evaluated(1.0, mode="maximum")  # type: ignore[arg-type]


def test_it_is_said_of_a_run_that_is_watched() -> None:
    loop = Loop()
    auto = AutoLR(loop.optimizer, total_steps=STEPS, adapt=WATCH)
    loop.train(_evaluated(auto, _overfits))
    assert set(loop.lrs) == {3e-3}
    assert any("the final decay would begin here" in event for record in auto.history for event in record.events)


# -- several ranks --------------------------------------------------------------------------------------------------


def _told_on_one_rank(what: str) -> tuple[list[float], list[str]]:
    loop = Loop()
    model = nn.parallel.DistributedDataParallel(loop.model)
    loop.model, rank = model, dist.get_rank()  # type: ignore[assignment]
    auto = AutoLR(loop.optimizer, total_steps=STEPS)

    def step(loss: Tensor) -> None:
        auto.step(loss)
        if rank == 0 and what == "evaluated" and auto.last_epoch % 10 == 0:
            auto.evaluated(_overfits(auto.last_epoch))
        if rank == 1 and what == "rising" and auto.last_epoch % 10 == 0:
            auto.evaluated(20 + auto.last_epoch, mode="min")
        if rank == 1 and what == "freeze" and auto.last_epoch == 62:
            auto.freeze()

    loop.train(step, 105)
    return loop.lrs, [event for record in auto.history for event in record.events]


@pytest.mark.parametrize(
    ("what", "said"), [("evaluated", "validation"), ("rising", "validation"), ("freeze", "frozen")]
)
def test_ranks_are_told_of_what_one_knows(what: str, said: str) -> None:
    (first, events), (second, others) = job.launch(_told_on_one_rank, 2, what)
    assert first == second
    assert events == others
    assert sum(said in event for event in events) == 1
