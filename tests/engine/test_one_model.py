"""What is given on one of several ranks with one model counts as on one process; and updates inside backward."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet import Adapt, AutoLR, Ensemble
from job import launch

STEADY = Adapt(level=False, _start_steps=0)


def _given(value: float, struck: int, options: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """The last rank is given another loss than that of its gradient, in one step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 1)
    count = 1
    if dist.is_initialized():
        model, count = DistributedDataParallel(model), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = AutoLR(optimizer, total_steps=40, interval=4, model=model, **options)
    for step in range(1, 21):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        broken = step == struck and (count == 1 or dist.get_rank() == count - 1)
        scheduler.step(torch.tensor(value) if broken else loss)
    return [(record.num_rollbacks, record.unhealthy) for record in scheduler.history]


def _warned(value: float) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _given(value, 10, {"adapt": STEADY})
    return found, [str(each.message)[:46] for each in caught]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_not_finite_undoes_the_round_on_any_number_of_ranks(value: float) -> None:
    said = ["the round that ended at step 12 was undone, be"]
    undone = [(0, ()), (0, ()), (1, ()), (1, ()), (1, ())]
    assert _warned(value) == (undone, said)
    assert launch(_warned, 2, value, timeout_s=150) == [(undone, said), (undone, [])]  # once, not once for each rank


def test_replicas_that_differ_go_on_without_it() -> None:
    for found in launch(_given, 2, math.nan, 10, {"adapt": STEADY, "ensemble": Ensemble(spread=0.1)}, timeout_s=150):
        assert found == [(0, ())] * 5


# -- updates inside backward ------------------------------------------------------------------------------------------


class _InsideBackward:
    """A model some of whose parameters are updated as soon as they have their gradient, as in torch's tutorial."""

    def __init__(self, inside: slice, known: slice) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        parameters = list(self.model.parameters())
        self.inside = {p: torch.optim.AdamW([p], lr=1e-3) for p in parameters[inside]}
        for p in self.inside:
            p.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(parameters[known], lr=1e-3)
        self.scheduler = AutoLR(self.optimizer, total_steps=100, model=self.model)

    def _update(self, parameter: Tensor) -> None:
        optimizer = self.inside[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    def train(self, num_steps: int) -> list[float]:
        rates = []
        for _ in range(num_steps):
            x = torch.randn(64, 8)
            loss = (self.model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            self.optimizer.zero_grad()
            rates.append(float(self.scheduler.get_last_lr()[0]))
            for each in self.inside.values():
                each.param_groups[0]["lr"] = rates[-1]
        return rates


def test_without_any_gradient_it_says_so_once_and_keeps_the_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hdet"):
        rates = _InsideBackward(slice(None), slice(None)).train(60)
    said = [record.message for record in caplog.records]
    assert len([text for text in said if "no parameter of the optimizer had a gradient in 3 calls" in text]) == 1
    assert len([text for text in said if "no update of the weights could be measured" in text]) == 1
    assert rates[-1] == pytest.approx(1e-3)


def test_it_learns_from_those_that_have_a_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """The same run, whether AutoLR knows of the others or not."""
    with caplog.at_level(logging.INFO, "hdet"):
        some = _InsideBackward(slice(0, 2), slice(None)).train(60)
        known = _InsideBackward(slice(0, 2), slice(2, None)).train(60)
    assert some == known
    assert not [record for record in caplog.records if "no parameter of the optimizer" in record.message]
