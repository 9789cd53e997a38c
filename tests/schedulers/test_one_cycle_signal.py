"""OneCycleAutoLR with AutoLR's controller: the same run as AutoLR around OneCycleLR."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Adapt, AutoLR, OneCycleAutoLR
from hdet.launch import launch

STEPS, INTERVAL = 100, 2


def _one_cycle(optimizer: torch.optim.Optimizer, signal: Any, spread: float) -> OneCycleAutoLR:
    return OneCycleAutoLR(
        optimizer,
        1e-3,
        STEPS,
        cycle_momentum=False,
        signal=signal,
        ensemble_lr_spread_ratio=spread,
        model_sync_interval=INTERVAL,
    )


def _train(kind: str, signal: str, spread: float, *, stop: int = STEPS) -> dict[str, Any]:
    """LRs of every step and the final weights, of one of the two ways to say the same."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    bare = torch.nn.Linear(6, 1).double()
    model = DistributedDataParallel(bare) if size > 1 else bare
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler: AutoLR | OneCycleAutoLR
    if kind == "auto":
        plain = OneCycleLR(optimizer, 1e-3, STEPS, cycle_momentum=False)
        adapt = Adapt(spread=spread or 0.1)
        scheduler = AutoLR(plain, signal=signal, interval=INTERVAL, adapt=adapt)  # type: ignore[arg-type]
    else:
        scheduler = _one_cycle(optimizer, signal, spread)
    generator = torch.Generator().manual_seed(rank)
    lrs, scales = [], []
    for step in range(stop):
        if kind == "one-cycle, resumed" and step == STEPS // 2:
            with scheduler.converged():
                state = scheduler.state_dict()
            del scheduler
            scheduler = _one_cycle(optimizer, signal, spread)
            scheduler.load_state_dict(state)
        lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        scales.append(scheduler.history[-1].scales[0] if scheduler.history else None)
    return {"lrs": lrs, "scales": scales[-1], "weights": bare.weight.tolist()}


def test_the_gradient_signal_is_that_of_auto_lr() -> None:
    ours, theirs = _train("one-cycle", "gradient", 0.0), _train("auto", "gradient", 0.0)
    assert ours == theirs
    assert ours["scales"] > 4 * 0.03  # from its cold start it has climbed by the evidence


def test_the_loss_signal_is_that_of_auto_lr() -> None:
    ours, theirs = launch(_train, 2, "one-cycle", "loss", 0.1), launch(_train, 2, "auto", "loss", 0.1)
    assert ours == theirs
    assert ours[0]["weights"] == ours[1]["weights"]
    assert ours[0]["lrs"] != ours[1]["lrs"]


def test_a_resumed_run_continues_as_the_uninterrupted_one() -> None:
    assert _train("one-cycle, resumed", "gradient", 0.0) == _train("one-cycle", "gradient", 0.0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"signal": "both"}, 'signal must be one of "gradient", "loss", but got signal=\'both\''),
        ({"signal": "gradient", "ensemble_lr_spread_ratio": 0.1}, "ensemble_lr_spread_ratio must be 0 with signal"),
        ({"signal": "loss"}, "ensemble_lr_spread_ratio must be 0 with signal"),
        ({"signal": "gradient", "decay": "floor"}, "decay='floor' belongs to the paper's controller"),
    ],
)
def test_wrong_arguments(settings: dict[str, Any], text: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=text):
        OneCycleAutoLR(optimizer, 0.1, 100, cycle_momentum=False, **settings)


def test_looking_at_learning_rates_changes_nothing() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    scheduler = OneCycleAutoLR(optimizer, 0.1, 200, model_sync_interval=2, signal="gradient", adapt=Adapt(gated=True))
    for _ in range(5):
        optimizer.zero_grad()
        loss = weights.square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)
    scheduler.last_epoch += 1  # as where a subclass asks for the learning rates of another step
    before = repr((scheduler.state_dict(), optimizer.param_groups, scheduler._schedule_lrs))
    with pytest.warns(UserWarning, match="get_last_lr"):
        looks = [scheduler.get_lr() for _ in range(3)]
    assert repr((scheduler.state_dict(), optimizer.param_groups, scheduler._schedule_lrs)) == before
    assert looks[0] == looks[1] == looks[2]
