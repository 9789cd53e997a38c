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
from hdet import Adapt, AutoLR, Copies
from hdet.ensemble import Ensemble
from hdet.replicas.sharding import local_tensor
from hdet.weights.anchor import Anchor
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
        self.overfits, self.turns = 0.04, 60
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
                self.auto.evaluated(4 / (1 + step / 20) + self.overfits * max(step - self.turns, 0))

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


def test_nothing_changes_where_validation_still_falls() -> None:
    runs = Run(), Run(copies=Copies())
    for run in runs:
        run.overfits = 0.0
        run.train(STEPS)
    assert runs[0].lrs == runs[1].lrs
    assert _equal(runs[0].weights(), runs[1].weights())


# -- a small model that memorises its data at once ------------------------------------------------------------------


class Memorising:
    """Twelve rows of noise to learn, forty to validate on; an evaluation every tenth step."""

    def __init__(self, *, wrap: Any = None, momentum: bool = False, capturable: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        x, y = torch.randn(52, 10), torch.randn(52, 1)
        self.rows, self.held_out = (x[:12], y[:12]), (x[12:], y[12:])
        self.model: nn.Module = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
        self.model = self.model if wrap is None else wrap(self.model)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters)
        self.optimizer.param_groups[0]["capturable"] = capturable
        if momentum:
            self.optimizer = torch.optim.SGD(parameters, momentum=0.9)
        settings = {"copies": BEST, **settings}
        self.auto = AutoLR(self.optimizer, total_steps=STEPS, model=self.model, **settings)
        self.optimizer.param_groups[0]["capturable"] = False  # which takes an accelerator
        self.batches = torch.Generator().manual_seed(1)
        self.metric: Any = lambda loss: loss
        self.mode: Any = None
        self.evaluates = True
        self.lrs: list[float] = []
        self.seen: list[list[Tensor]] = []
        """Weights before each step."""

    def loss(self, rows: tuple[Tensor, Tensor], chosen: Any = slice(None)) -> Tensor:
        return nn.functional.mse_loss(self.model(rows[0][chosen]), rows[1][chosen])

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.seen.append([local_tensor(p).detach().clone() for p in self.model.parameters()])
            loss = self.loss(self.rows, torch.randint(12, (8,), generator=self.batches))
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.lrs.append(float(self.optimizer.param_groups[0]["lr"]))
            self.optimizer.step()
            self.auto.step(loss)
            if self.auto.last_epoch % 10 == 0 and self.evaluates:
                with torch.no_grad():
                    self.auto.evaluated(self.metric(float(self.loss(self.held_out))), mode=self.mode)

    @property
    def restarts(self) -> list[int]:
        return [r.step for r in self.auto.history if any("starts again" in event for event in r.events)]


def _falls_a_little(first: float = 1.0) -> Any:
    """Validation that falls by a hundredth once, and then stands still."""
    values = iter([first])
    return lambda loss: next(values, 0.99 * first)


@pytest.mark.parametrize("momentum", [False, True])
def test_a_small_model_that_memorises_starts_again(momentum: bool) -> None:
    run = Memorising(momentum=momentum)
    run.metric = _falls_a_little()
    run.train(100)
    (at,) = run.restarts
    assert 20 < at <= 60
    assert _equal(run.seen[at], run.seen[0])
    assert not _equal(run.seen[at + 1], run.seen[0])
    before, after = max(run.lrs[:at]), max(run.lrs[at : at + 12])
    assert after < 0.7 * before
    assert run.lrs[at] < 0.2 * after  # along a warm-up
    if not momentum:
        assert {int(run.optimizer.state[p]["step"]) for p in run.model.parameters()} == {100 - at}
    assert run.auto.restore_best() == 20  # the lowest of all
    assert run.auto.history[-1].num_rollbacks == 0


def test_values_that_only_rise_start_nothing_again() -> None:
    """An accuracy, say. Unless it is said that they should not."""
    for mode, is_loss in ((None, False), ("min", True)):
        run = Memorising()
        run.mode = mode
        values = iter([0.7 + 0.01 * k for k in range(20)])
        run.metric = lambda loss, values=values: next(values)
        run.train(STEPS)
        assert len(run.restarts) == is_loss
        assert (run.auto.total_steps < STEPS) == is_loss


def test_the_learning_rate_itself_stays_as_it_is() -> None:
    """With the best weights kept, validation above the training loss divides nothing."""
    runs = [Memorising(copies=copies, adapt=Adapt(anchor=5)) for copies in (BEST, Copies())]
    for run in runs:
        run.metric = _falls_a_little()
        run.train(60)
    alone = Memorising(copies=Copies(), adapt=Adapt(anchor=5))
    alone.evaluates = False
    alone.train(60)
    assert runs[0].lrs == alone.lrs
    assert min(runs[1].lrs[40:]) < 0.7 * min(alone.lrs[40:])


@pytest.mark.parametrize(
    "settings",
    [
        {"copies": Copies()},  # nobody has asked for it
        {"copies": Copies(best=True, anchor_dtype=torch.bfloat16)},  # nobody has the first weights
        {"copies": Copies(best=True, anchor_share=0.5)},
        {"adapt": Adapt(anchor=5)},
        {"capturable": True},
        {"adapt": Adapt(act=False)},
    ],
)
def test_where_it_does_not_start_again(settings: dict[str, Any]) -> None:
    run = Memorising(**settings)
    run.metric = _falls_a_little()
    run.train(80)
    assert run.restarts == []
    assert not any(_equal(weights, run.seen[0]) for weights in run.seen[20:])


@pytest.mark.parametrize("stop", [15, 24, 33, 64])
def test_a_run_resumed_around_it_is_the_same(stop: int) -> None:
    """Between two evaluations; at the one before, and in mid-round; and after."""
    whole, second = Memorising(), Memorising()
    whole.metric = second.metric = lambda loss: 0.99 if whole.auto.last_epoch > 10 else 1.0
    whole.train(stop)
    parts = [copy.deepcopy(part.state_dict()) for part in (whole.model, whole.optimizer, whole.auto)]
    batches = whole.batches.get_state()
    whole.train(90 - stop)
    assert whole.restarts
    second.model.load_state_dict(parts[0])
    second.optimizer.load_state_dict(parts[1])
    second.auto.load_state_dict(parts[2])
    second.batches.set_state(batches)
    second.train(90 - stop)
    assert second.lrs == whole.lrs[stop:]
    assert _equal(second.seen[-1], whole.seen[-1])


@pytest.mark.parametrize("copies", [Copies(), Copies(best=True, anchor_dtype=torch.bfloat16)])
def test_a_resumed_run_starts_nothing_again_that_it_cannot(copies: Copies) -> None:
    first, second = Memorising(), Memorising(copies=copies)
    first.metric = second.metric = _falls_a_little()
    first.train(24)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.auto.load_state_dict(copy.deepcopy(first.auto.state_dict()))
    for run in (first, second):
        run.train(46)
    assert (len(first.restarts), second.restarts) == (1, [])


def test_a_restart_that_is_interrupted_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, place = Memorising(), Anchor.place_
    run.metric = lambda loss: 0.99 if run.auto.last_epoch > 10 else 1.0

    def interrupted(anchor: Anchor, *args: Any) -> None:
        monkeypatch.setattr(Anchor, "place_", place)
        with torch.no_grad():
            next(run.model.parameters()).zero_()
        raise KeyboardInterrupt

    monkeypatch.setattr(Anchor, "place_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(STEPS)
    assert run.restarts == []
    assert _equal([p.detach() for p in run.model.parameters()], run.seen[0])
    run.auto.step(torch.tensor(1.0))
    assert len(run.restarts) == 1
    assert _equal([p.detach() for p in run.model.parameters()], run.seen[0])


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


def _restart_on_ranks(kind: str) -> tuple[list[int], list[float], bool, list[Tensor]]:
    wraps: dict[str, Any] = {
        "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
        "fsdp": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    }
    run = Memorising(wrap=wraps[kind])
    run.batches.manual_seed(1 + dist.get_rank())
    run.metric = _falls_a_little(0.5)
    run.train(70)
    (at,) = run.restarts
    return [at], run.lrs, _equal(run.seen[at], run.seen[0]), run.seen[-1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_start_again_together(kind: str) -> None:
    first, second = job.launch(_restart_on_ranks, 2, kind)
    assert first[:2] == second[:2]
    assert first[2]
    assert second[2]
    assert _equal(first[3], second[3]) == (kind == "ddp")


def test_ranks_that_pass_different_losses() -> None:
    with pytest.raises(Exception, match="every rank must pass the same validation loss"):
        job.launch(_on_ranks, 2, "one rank")
