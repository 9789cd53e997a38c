"""Rounds that break now and then do not end a run: the budget of rollbacks recovers, and holds the scale when spent."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

from hdet import AutoLR
from hdet.policy.rollback import CUT, RECOVERY, Budget
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.steered import MAX_ROLLBACKS, Steered
from options import with_ensemble

T = 3
STABLE = (1e-3, 1.0)
SIZES = np.array([1.0, 1e-3, 1.0])

# The first one of a run; the tests are about later ones.
pytestmark = pytest.mark.filterwarnings("ignore:the round that ended at step", "ignore:.* rounds of this run were")


class _Small:
    """A regression on one batch, which is memorised after some hundred steps."""

    def __init__(self, num_steps: int, **options: Any) -> None:
        g = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=g))
        self.x = torch.randn(16, 8, generator=g)
        self.y = torch.sin(self.x.sum(1, keepdim=True))
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        schedule = ConstantLR(self.optimizer, 1.0)
        self.scheduler = AutoLR(
            schedule, model=self.model, interval=T, total_steps=num_steps, **with_ensemble(level=False, **options)
        )

    def round(self, *, broken: bool = False) -> None:
        for _ in range(T):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(self.x), self.y)
            torch.autograd.backward(loss)
            self.optimizer.step()
            if broken:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(math.nan)
            self.scheduler.step(loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:max_rollbacks=4 are spent")
def test_a_memorised_batch_is_trained_to_the_end() -> None:
    """Near zero loss nothing but a break tells the controller that the learning rate is too high: it breaks often."""
    run = _Small(1000 * T, max_rollbacks=4)
    for _ in range(900):
        run.round()
        if run.scheduler.history[-1].num_rollbacks > 4:
            break
    for _ in range(100):
        run.round()
    history = run.scheduler.history
    assert history[-1].num_rollbacks > 4
    losses = np.nan_to_num([record.losses[0] for record in history[-100:]], nan=np.inf)
    assert np.quantile(losses, 0.25) < 5e-3 * history[0].losses[0]  # where rounds break depends on the machine


def test_ten_healthy_rounds_make_up_for_a_rollback() -> None:
    budget = Budget(2)
    budget.take()
    assert not budget.spent
    budget.take()
    assert budget.spent
    for _ in range(RECOVERY - 1):
        budget.recover()
        assert budget.spent
    budget.recover()
    assert not budget.spent
    for _ in range(5):
        budget.take()  # there is no debt beyond the budget
    for _ in range(RECOVERY):
        assert budget.spent
        budget.recover()
    assert not budget.spent


def test_breaks_that_are_rare_enough_never_hold_the_scale() -> None:
    run = _Small(1000 * T, max_rollbacks=2, bounds=STABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the round that ended at step")
        for index in range(80):
            run.round(broken=index % (RECOVERY + 1) == RECOVERY)
    assert run.scheduler.history[-1].num_rollbacks == 7
    assert not any(record.held for record in run.scheduler.history)


def test_a_spent_budget_holds_the_scale_and_says_so() -> None:
    run = _Small(1000 * T, max_rollbacks=2, bounds=STABLE)
    for _ in range(30):
        run.round()
    run.round(broken=True)
    run.round()
    with pytest.warns(UserWarning, match=r"max_rollbacks=2 are spent: .* holds still .* \(RoundRecord.held\)"):
        run.round(broken=True)
    scale = run.scheduler.history[-1].scales[0]
    for index in range(2 * RECOVERY):
        run.round(broken=index == 3)  # it is spent again, and that is not said again
    history = run.scheduler.history
    assert history[-1].num_rollbacks == 3
    held = [record.index for record in history if record.held]
    assert held == list(range(33, 33 + 4 + RECOVERY))
    assert {record.scales[0] for record in history[33:36]} == {scale}
    assert {record.scales[0] for record in history[36:47]} == {scale * CUT}  # what breaks is undone all the same
    assert not any(record.control for record in history[33:47])
    assert history[-1].control  # and then the controller acts again


@pytest.mark.filterwarnings("ignore:max_rollbacks=2 are spent")
def test_a_resumed_run_knows_what_it_has_spent() -> None:
    run = _Small(1000 * T, max_rollbacks=2)
    for broken in (True, False, True, False):
        run.round(broken=broken)
    saved = run.scheduler.state_dict()
    assert saved["rounds"]["rollback_debt"] == 2 * RECOVERY - 2
    again = _Small(1000 * T, max_rollbacks=2)
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    again.scheduler.load_state_dict(saved)
    again.round()
    assert again.scheduler.history[-1].held
    del saved["rounds"]["rollback_debt"]  # as an earlier version wrote it
    again.scheduler.load_state_dict(saved)
    again.round()
    assert not again.scheduler.history[-1].held


def test_the_stacked_engine_holds_its_scale_too() -> None:
    steered = Steered(Run(lr=0.1, method="gradient", interval=T, start=0.0, level=False), np.ones(1000 * T))

    def end_round(index: int, loss: float) -> bool:
        for step in range(T):
            steered.take(np.array([loss]), -1.0 + 0.01 * step, SIZES)
        verdict = steered.end_round(T * (index + 1), np.array([True]), 1.0, last=False)
        return verdict is None or verdict.go_back

    for index in range(40):
        assert end_round(index, math.nan if index % 3 else 1.0) == bool(index % 3)
    assert steered.policy.rollback is not None
    assert steered.policy.rollback.budget.spent
    before = float(steered.steering.scales[0])
    end_round(40, 1.0)
    assert float(steered.steering.scales[0]) == before
    for index in range(41, 41 + 2 * RECOVERY):
        end_round(index, 1.0)
    assert float(steered.steering.scales[0]) != before
    assert not steered.result.error


def test_the_stacked_engine_gives_up_where_real_processes_do() -> None:
    steered = Steered(Run(lr=0.1, method="gradient", interval=T, level=False), np.ones(1000 * T))
    for index in range(30):
        steered.take(np.array([math.nan]), math.nan, SIZES)
        verdict = steered.end_round(T * (index + 1), np.array([True]), 1.0, last=False)
        assert (verdict is None) == (index >= MAX_ROLLBACKS)
    assert steered.result.error.startswith(
        f"training broke again at step {T * 21} after 20 rollbacks without a healthy round between them"
    )
    assert steered.result.num_rollbacks == MAX_ROLLBACKS
    assert len(steered.result.base_lr) == 30
