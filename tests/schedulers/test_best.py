"""Copies(best=True): the weights of the lowest validation loss, on the host, restored where that is asked for."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import job
from hdet import AutoLR, Copies
from hdet.ensemble import Ensemble
from hdet.replicas.sharding import local_tensor
from hdet.weights.snapshot import Best

STEPS = 200
BEST = Copies(best=True)


class Run:
    """A small regression, an evaluation every tenth step that overfits from the sixtieth on, and copies by hand."""

    def __init__(self, wrap: Any = None, copies: Copies = BEST, width: int = 32) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(20, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.model = self.model if wrap is None else wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.auto = AutoLR(self.optimizer, total_steps=STEPS, model=self.model, copies=copies)
        self.batches = torch.Generator().manual_seed(1)
        self.lrs: list[float] = []
        self.overfits, self.turns = 0.01, 60
        self.kept: dict[int, list[Tensor]] = {}

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            x = torch.randn(16, 20, generator=self.batches)
            loss = (self.model(x) - x[:, :1] * x[:, 1:2]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.lrs.append(float(self.optimizer.param_groups[0]["lr"]))
            self.optimizer.step()
            self.auto.step(loss)
            step = self.auto.last_epoch
            if step % 10 == 0:
                self.kept[step] = self.weights()
                self.auto.evaluated(1 / (1 + step / 20) + self.overfits * max(step - self.turns, 0))

    def weights(self) -> list[Tensor]:
        return [local_tensor(t).detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]

    def turned_at(self) -> int:
        return next(r.step for r in self.auto.history if any("from the best weights" in e for e in r.events))


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_best_weights_come_back_when_asked_for() -> None:
    run = Run()
    run.train(75)
    assert not _equal(run.weights(), run.kept[60])
    assert run.auto.restore_best() == 60
    assert _equal(run.weights(), run.kept[60])


def test_the_decay_starts_from_them_at_a_quarter_of_the_learning_rate() -> None:
    run = Run()
    while run.auto.total_steps == STEPS:
        run.train(1)
    turned = run.turned_at()
    assert turned == run.auto.last_epoch
    assert _equal(run.weights(), run.kept[60])
    run.train(STEPS - turned)
    steps = math.ceil(0.6 * turned)
    first = run.lrs[turned - 1] / 4
    assert run.lrs[turned : turned + steps] == pytest.approx([first * (1 - k / steps) for k in range(steps)], rel=0.2)
    assert run.auto.total_steps == turned + steps
    assert not any("undone" in event for record in run.auto.history for event in record.events)


def test_validation_that_turns_in_the_final_decay() -> None:
    run = Run()
    run.turns = 145
    run.train(140)
    planned = run.lrs[-1]
    while not any("from the best weights" in e for record in run.auto.history for e in record.events):
        run.train(1)
    turned = run.turned_at()
    assert turned > 150
    weights = run.weights()
    assert _equal(weights, run.kept[run.auto.restore_best()])
    run.train(STEPS - turned)
    assert run.auto.total_steps == STEPS
    assert run.lrs[turned] == pytest.approx(planned * (STEPS - turned) / (0.3 * STEPS) / 4, rel=0.2)


def test_a_restore_that_is_interrupted_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, restore = Run(), Best.restore

    def interrupted(best: Best) -> None:
        monkeypatch.setattr(Best, "restore", restore)
        best.restoring = True
        with torch.no_grad():
            next(run.model.parameters()).zero_()
        raise KeyboardInterrupt

    monkeypatch.setattr(Best, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(STEPS)
    assert run.auto.total_steps == STEPS
    assert _equal(run.weights(), run.kept[60])
    run.auto.step(torch.tensor(1.0))
    assert run.auto.total_steps < STEPS
    assert _equal(run.weights(), run.kept[60])


@pytest.mark.filterwarnings("ignore:the round that ended at step")
def test_nothing_changes_where_validation_still_falls_but_in_small_models() -> None:
    """Which take longer to their first learning rate. So wide a model on so few rows has a round undone."""
    runs = Run(width=10_000), Run(width=10_000, copies=Copies())
    for run in runs:
        run.overfits = 0.0
        run.train(100)
    assert runs[0].lrs == runs[1].lrs
    assert _equal(runs[0].weights(), runs[1].weights())


STOPS = (80, 85, 98)
"""Right after an evaluation; in mid-round; and in the decay."""


@pytest.fixture(scope="module")
def saved() -> tuple[Run, dict[int, Any]]:
    """A run of 110 steps, and what was saved on the way."""
    whole, states = Run(), {}
    for stop in STOPS:
        whole.train(stop - whole.auto.last_epoch)
        parts = [part.state_dict() for part in (whole.model, whole.optimizer, whole.auto)]
        states[stop] = copy.deepcopy(parts), whole.batches.get_state()
    whole.train(110 - whole.auto.last_epoch)
    return whole, states


@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_run_has_the_best_weights_of_the_first(saved: tuple[Run, dict[int, Any]], stop: int) -> None:
    whole, second = saved[0], Run()
    (model, optimizer, auto), batches = saved[1][stop]
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.auto.load_state_dict(auto)
    second.batches.set_state(batches)
    second.train(110 - stop)
    assert second.lrs == whole.lrs[stop:]
    assert _equal(second.weights(), whole.weights())
    assert second.auto.restore_best() == 60
    assert _equal(second.weights(), whole.kept[60])


def test_states_with_and_without() -> None:
    run, other = Run(), Run()
    run.train(65)
    plain = AutoLR(copy.deepcopy(other.optimizer), total_steps=STEPS)
    plain.load_state_dict(run.auto.state_dict())
    assert "best" not in plain.state_dict()["rounds"]
    run.auto.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"restore_best\(\) needs a call of evaluated\(loss\) first"):
        run.auto.restore_best()
    broken = copy.deepcopy(run.auto.state_dict())
    broken["rounds"]["best"] = {"step": 60, "loss": 0.1, "weights": [torch.ones(3)]}
    with pytest.raises(ValueError, match="the best weights must have the shapes of the model"):
        run.auto.load_state_dict(broken)


def test_what_cannot_be_had() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="best must be True or False, but got best=1"):
        Copies(best=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="best=True needs replicas that hold the same weights"):
        AutoLR(optimizer, total_steps=9, copies=BEST, ensemble=Ensemble(spread=0.1))
    with pytest.raises(RuntimeError, match=r"restore_best\(\) needs copies=Copies\(best=True\)"):
        AutoLR(optimizer, total_steps=9).restore_best()


# -- several ranks --------------------------------------------------------------------------------------------------


def _on_ranks(kind: str) -> tuple[list[Tensor], list[float], bool]:
    rank = dist.get_rank()
    wraps = {
        "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
        "fsdp": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    }
    run = Run(wraps.get(kind, wraps["ddp"]))
    if kind == "one rank" and rank == 1:
        run.auto.evaluated = lambda loss: None  # type: ignore[assignment, misc]
    run.train(75)
    state = run.auto.state_dict()
    run.train(35)
    run.auto.load_state_dict(state)
    fine = run.auto.restore_best() == 60 and _equal(run.weights(), run.kept[60])
    return run.weights(), run.lrs, fine


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_keeps_its_own(kind: str) -> None:
    (weights, lrs, fine), (others, other_lrs, other_fine) = job.launch(_on_ranks, 2, kind)
    assert fine
    assert other_fine
    assert lrs == other_lrs
    assert _equal(weights[:4], others[:4]) == (kind == "ddp")


def test_ranks_that_pass_different_losses() -> None:
    with pytest.raises(Exception, match="every rank must pass the same validation loss"):
        job.launch(_on_ranks, 2, "one rank")
