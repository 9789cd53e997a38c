"""AutoLR with ``Adapt(groups="auto")``: one level for all param groups, on processes, saved and resumed."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, Ensemble
from job import launch
from tiers import slow

STEPS, HALF, INTERVAL = 240, 120, 4
BATCHES = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Run:
    """Linear regression with three param groups, of which the first sees inputs ten times smaller."""

    def __init__(self, groups: Any, *, ddp: bool = False, probe: bool = False, **adapt: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)]).double()
        self.net.forward = self.predict
        self.model: nn.Module = DistributedDataParallel(self.net) if ddp else self.net
        self.optimizer = torch.optim.SGD([{"params": list(part.parameters())} for part in self.net], lr=0.02)
        held_out = (lambda: self.loss(BATCHES[0])) if probe else None
        self.scheduler = AutoLR(
            CosineAnnealingLR(self.optimizer, STEPS),
            interval=INTERVAL,
            total_steps=STEPS,
            model=self.model,
            probe=held_out,
            adapt=Adapt(groups=groups, **adapt),
        )
        self.step = 0
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)

    def predict(self, x: Tensor) -> Tensor:
        parts = zip(self.net, (0.1, 1.0, 1.0), torch.split(x, 2, dim=1), strict=True)
        out: Tensor = torch.stack([part(size * each) for part, size, each in parts]).sum(0)
        return out

    def loss(self, x: Tensor) -> Tensor:
        error: Tensor = self.model(x) - x.sum(1, keepdim=True) - 0.3 * (7 * x).sin().sum(1, keepdim=True)
        return error.square().mean()

    def advance(self, last: int) -> Run:
        while self.step < last:
            rows = BATCHES[self.step][self.rank :: self.count]
            self.optimizer.zero_grad()
            loss = self.loss(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step(loss.detach())
            self.step += 1
        return self

    def weights(self) -> list[float]:
        return [v for p in self.net.parameters() for v in p.detach().flatten().tolist()]

    def scales(self) -> list[list[float]]:
        return [list(record.scales) for record in self.scheduler.history]


def test_a_group_that_needs_more_gets_it() -> None:
    run, alike = Run("auto").advance(STEPS), Run("together").advance(STEPS)
    scales = run.scales()[-1]
    assert scales[0] > 3 * max(scales[1:])
    final = torch.cat(list(BATCHES))
    assert run.loss(final) < alike.loss(final)
    assert "z_apart" in next(record.control for record in reversed(run.scheduler.history) if record.control)


@pytest.mark.parametrize("probe", [False, True])
def test_without_evidence_it_is_together_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, probe: bool) -> None:
    monkeypatch.setattr("hdet.controllers.groups.DOUBT", math.inf)
    auto, together = Run("auto", probe=probe).advance(HALF), Run("together", probe=probe).advance(HALF)
    assert auto.scales() == [each * 3 for each in together.scales()]
    assert auto.weights() == together.weights()


@pytest.mark.parametrize("saved_at", [90, 110])
def test_a_resumed_run_is_the_uninterrupted_one(saved_at: int) -> None:
    whole = Run("auto").advance(saved_at)
    with whole.scheduler.converged():
        saved = copy.deepcopy([part.state_dict() for part in (whole.net, whole.optimizer, whole.scheduler)])
    whole.advance(160)
    resumed = Run("auto")
    parts: list[Any] = [resumed.net, resumed.optimizer, resumed.scheduler]
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    resumed.step = saved_at
    resumed.advance(160)
    assert resumed.weights() == whole.weights()
    assert len({round(math.log(s), 6) for s in whole.scales()[-1]}) > 1


def test_a_group_joins() -> None:
    run = Run("auto").advance(100)
    extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [extra]})
    run.advance(HALF)
    assert len(run.scales()[-1]) == 4


def _on_processes() -> tuple[list[float], list[list[float]]]:
    run = Run("auto", ddp=True).advance(HALF)
    return run.weights(), run.scales()


@pytest.fixture(scope="module")
def alone() -> list[list[float]]:
    scales = Run("auto").advance(HALF).scales()
    assert len({round(math.log(s), 6) for s in scales[-1]}) > 1  # they have come apart by then
    return scales


@pytest.mark.parametrize("num_replicas", [1, 2, slow(4)])
def test_all_ranks_agree_and_it_is_the_run_of_one_process(num_replicas: int, alone: list[list[float]]) -> None:
    found = launch(_on_processes, num_replicas, timeout_s=240)
    assert all(each == found[0] for each in found)
    torch.testing.assert_close(torch.tensor(found[0][1]), torch.tensor(alone), rtol=1e-4, atol=0)


def test_the_loss_signal_cannot_have_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r'groups="auto" needs the gradient signal: leave out the spread, or'):
        AutoLR(CosineAnnealingLR(optimizer, 10), ensemble=Ensemble(spread=0.1), adapt=Adapt(groups="auto"))
    with pytest.raises(ValueError, match='groups must be one of "together", "each", "auto", but got'):
        Adapt(groups="all")  # type: ignore[arg-type]
