"""Param groups that are added in mid-run train along: schedule, scale, anchor, outer step, rollback, state."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from hdet import AutoLR, Explorer, OneCycleAutoLR, knobs
from job import launch
from options import grouped, with_ensemble

JOIN, STEPS = 5, 16
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: CosineAnnealingLR(o, 40),
    "lambda": lambda o: LambdaLR(o, [lambda step: 1 / (1 + step)] * len(o.param_groups)),
    "one cycle": lambda o: OneCycleLR(o, 0.1, 40),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, 3),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.1, 4), ExponentialLR(o, 0.9)], optimizer=o),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


class Run:
    """A net of which the head trains first."""

    def __init__(
        self,
        make: Callable[[nn.Module, Optimizer], Any],
        *,
        ddp: bool = False,
        joined: bool = False,
        frozen: bool = False,
    ) -> None:
        self.net = Net()
        self.net.backbone.requires_grad_(not frozen)
        self.model = DistributedDataParallel(self.net, find_unused_parameters=True) if ddp else self.net
        self.net.backbone.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.net.head.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        if joined:
            self.join()
        self.scheduler = make(self.model, self.optimizer)
        self.lrs: list[list[float]] = []

    def join(self, **group: Any) -> None:
        self.net.backbone.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.net.backbone.parameters()), **group})

    def train(self, steps: int, *, broken: bool = False) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for _ in range(steps):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * len(self.lrs) + rank))
            loss = (self.model(x) - 1).square().mean() * (math.nan if broken else 1)
            self.optimizer.zero_grad()
            loss.backward()
            self.lrs.append([])
            self.optimizer.step()
            self.lrs[-1] = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.scheduler.step(loss)

    def weights(self) -> list[float]:
        return [x for p in self.net.parameters() for x in p.detach().flatten().tolist()]

    def state(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()))

    def load(self, state: Any) -> None:
        for part, saved in zip((self.net, self.optimizer, self.scheduler), copy.deepcopy(state), strict=True):
            part.load_state_dict(saved)


def _auto(name: str, **settings: Any) -> Callable[[nn.Module, Optimizer], AutoLR]:
    options = with_ensemble(**{"interval": 3, "level": False, **settings})
    return lambda model, o: AutoLR(SCHEDULES[name](o), model=model, **options)


def _cycle(**settings: Any) -> Callable[[nn.Module, Optimizer], OneCycleAutoLR]:
    return lambda model, o: OneCycleAutoLR(
        o, 0.1, 40, model=model, **{"model_sync_interval": 3, "ensemble_lr_spread_ratio": 0.1, **settings}
    )


ALONE: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    **{name: _auto(name) for name in SCHEDULES},
    "level": _auto("cosine", level=True, total_steps=400),
    "apart scales": _auto("cosine", groups="each"),
    "OneCycleLR": _cycle(ensemble_lr_spread_ratio=0.0),
    "floor": _cycle(ensemble_lr_spread_ratio=0.0, enable_auto_lr=True, auto_lr_warmup_steps=2, decay="floor"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_group_joins_at_its_own_learning_rate_and_follows_the_first(name: str) -> None:
    run = Run(ALONE[name])
    run.train(JOIN)
    # Before the first level is known, a learning rate compares with those that were given.
    given = run.scheduler.schedule.get_last_lr()[0] if name == "level" else run.optimizer.param_groups[0]["lr"]
    run.join(lr=given / 10)
    run.train(STEPS - JOIN)
    ratios = [rates[1] / rates[0] for rates in run.lrs[JOIN:]]
    if name == "apart scales":  # learned apart, from the same start
        assert ratios[0] == pytest.approx(0.1)
        assert len(run.scheduler.history[-1].scales) == 2
    else:
        assert ratios == pytest.approx([0.1] * len(ratios))
    assert len({rates[0] for rates in run.lrs[JOIN:]}) > 1
    groups = run.optimizer.param_groups
    assert groups[1]["momentum"] == groups[0]["momentum"]
    if run.scheduler.history:
        assert len(run.scheduler.history[-1].base_values) == 2
        assert len(run.scheduler.history[0].base_values) == 1


@pytest.mark.parametrize("ratio", [0.01, 0.1, 20.0, 50.0])
def test_a_ratio_that_may_not_be_meant_is_said(ratio: float, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(ALONE["cosine"])
    run.train(JOIN)
    run.join(lr=ratio * run.optimizer.param_groups[0]["lr"])
    run.train(2)
    said = [message for message in caplog.messages if f", {ratio:.2g} times the first group's, and keeps" in message]
    assert len(said) == (ratio in (0.01, 50.0))


@pytest.mark.parametrize("name", ALONE)
def test_without_a_learning_rate_of_its_own_it_has_the_first_groups(name: str) -> None:
    run = Run(ALONE[name])
    run.train(JOIN)
    run.join()
    run.train(1 if name == "apart scales" else 2)
    first_step = 1 if name in ("OneCycleLR", "floor") else 0  # which look at the optimizer in step() alone
    assert [rates[1] for rates in run.lrs[JOIN + first_step :]] == pytest.approx(
        [rates[0] for rates in run.lrs[JOIN + first_step :]]
    )


def test_learning_rates_that_are_tensors_are_not_shared_between_groups() -> None:
    run = Run(_auto("cosine", groups="each"))
    run.optimizer.defaults["lr"] = run.optimizer.param_groups[0]["lr"] = torch.tensor(
        run.optimizer.param_groups[0]["lr"]
    )
    run.scheduler._refresh()
    run.join()
    run.train(1)
    groups = run.optimizer.param_groups
    assert groups[0]["lr"] is not groups[1]["lr"]


@pytest.mark.parametrize("again", ["before", "after"])
@pytest.mark.parametrize("name", ALONE)
def test_a_state_with_the_group_resumes_wherever_it_is_added_again(name: str, again: str) -> None:
    """The group may be added again before the schedule is made, or after; always before the states are loaded."""
    run = Run(ALONE[name])
    run.train(JOIN)
    run.join(lr=0.003)
    run.train(5)
    state = run.state()
    run.train(6)
    resumed = Run(ALONE[name], joined=again == "before")
    if again == "after":
        resumed.join()
    resumed.load(state)
    resumed.lrs = run.lrs[: JOIN + 5]
    resumed.train(6)
    assert resumed.lrs == run.lrs
    assert resumed.weights() == run.weights()


def test_a_state_without_the_group_is_refused() -> None:
    run = Run(ALONE["cosine"])
    state = run.scheduler.state_dict()
    run.join()
    with pytest.raises(ValueError, match="the optimizer has 2 param groups, but got a state with 1"):
        run.scheduler.load_state_dict(state)


def test_a_group_that_was_removed_is_an_error() -> None:
    run = Run(ALONE["cosine"])
    run.join()
    run.train(1)
    del run.optimizer.param_groups[1]
    with pytest.raises(RuntimeError, match="param groups must not be removed from the optimizer, but of 2 there are 1"):
        run.scheduler.step(1.0)


@pytest.mark.filterwarnings("ignore:the round that ended at step")
def test_a_round_that_breaks_takes_newcomers_back_to_where_they_joined() -> None:
    run = Run(ALONE["cosine"])
    run.train(6)
    joined_at = [p.detach().clone() for p in run.net.backbone.parameters()]
    run.join(lr=0.01)
    run.train(3, broken=True)
    assert run.scheduler.history[-1].num_rollbacks == 1
    torch.testing.assert_close(list(run.net.backbone.parameters()), joined_at, rtol=0, atol=0, check_stride=False)


def test_the_gradient_signal_measures_newcomers_from_where_they_joined() -> None:
    run = Run(ALONE["cosine"])
    run.train(JOIN)
    joined_at = [p.detach().clone() for p in run.net.backbone.parameters()]
    run.join(lr=0.01)
    run.train(4)
    torch.testing.assert_close(run.scheduler._run.anchor.copies[2:], joined_at, rtol=0, atol=0)


# -- replicas ------------------------------------------------------------------------------------------------------


def _explorer(**settings: Any) -> Callable[[nn.Module, Optimizer], Explorer]:
    def make(model: nn.Module, optimizer: Optimizer) -> Explorer:
        options = {"interval": 3, "knobs": [knobs.LearningRate(groups="each")], **settings}
        return Explorer(model, optimizer, **grouped(**options))

    return make


DILOCO: dict[str, Any] = {"outer": "nesterov", "gradients": "local", "knobs": [knobs.LearningRate()]}
REPLICAS: dict[str, Callable[[], Callable[[nn.Module, Optimizer], Any]]] = {
    "gradient": lambda: _auto("cosine"),
    "loss": lambda: _auto("cosine", signal="loss"),
    "paper": lambda: _cycle(enable_auto_lr=True, auto_lr_warmup_steps=0),
    "knobs": lambda: _auto("cosine", groups="each", signal="loss", knobs=[knobs.Momentum()]),
    "explorer": lambda: _explorer(),
    "no lr": lambda: _explorer(knobs=[knobs.Momentum()]),
    "diloco": lambda: _explorer(**{**DILOCO, "knobs": [knobs.LearningRate()]}),
}


def _replicas(name: str) -> dict[str, Any]:
    run = Run(REPLICAS[name](), ddp=True)
    run.train(JOIN)
    run.join(lr=run.optimizer.param_groups[0]["lr"] / 10)
    run.train(4)  # to the end of a round, where replicas can be saved without loss
    with run.scheduler.converged():
        state = run.state()
    run.train(4)
    out: dict[str, Any] = {"joined": state[2]["rounds"]["joined"], "lrs": run.lrs}
    run.scheduler.finish()
    out["weights"] = run.weights()
    out["history"] = [
        {**record.as_dict(), "converge_s": 0, "losses": [], "control": {}} for record in run.scheduler.history
    ]
    resumed = Run(REPLICAS[name](), ddp=True, joined=True)
    resumed.load(state)
    resumed.lrs = run.lrs[: JOIN + 4]
    resumed.train(4)
    resumed.scheduler.finish()
    out["resumed"], out["resumed lrs"] = resumed.weights(), resumed.lrs
    return out


def _all() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: _replicas(name) for name in REPLICAS}


def _frozen_too_early() -> list[str]:
    run = Run(REPLICAS["gradient"](), ddp=True, frozen=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.join(lr=0.01)
        run.train(2)
    return [str(w.message) for w in caught if "drift apart" in str(w.message)]


def test_gradients_that_ddp_does_not_average_are_warned_of() -> None:
    for said in launch(_frozen_too_early, 2, timeout_s=150):
        assert len(said) == 1
        assert "averages the gradients of 2 tensors, but 4 are trained" in said[0]


@pytest.fixture(scope="module")
def replicas() -> list[dict[str, Any]]:
    return launch(_all, 2, timeout_s=200)


@pytest.mark.parametrize("name", REPLICAS)
def test_on_two_processes_with_ddp(replicas: list[dict[str, Any]], name: str) -> None:
    one, two = (found[name] for found in replicas)
    assert one["weights"] == two["weights"]
    assert all(map(math.isfinite, one["weights"]))
    assert one["joined"] == two["joined"]
    assert str(one["history"]) == str(two["history"])
    assert len(one["history"][-1]["base_values"]) == 2
    if name in ("gradient", "loss", "diloco"):  # one scale: a tenth all along, on every replica
        for found in (one, two):
            assert [rates[1] / rates[0] for rates in found["lrs"][JOIN:]] == pytest.approx([0.1] * 8, rel=1e-3)


@pytest.mark.parametrize("name", ["gradient", "loss", "paper", "explorer"])
def test_replicas_resume_with_the_group(replicas: list[dict[str, Any]], name: str) -> None:
    for found in replicas:
        torch.testing.assert_close(found[name]["resumed lrs"], found[name]["lrs"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(found[name]["resumed"], found[name]["weights"], rtol=1e-3, atol=1e-5)
