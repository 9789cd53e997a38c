"""What Muon leaves to another optimizer starts as a part of the whole model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet import AutoLR
from hdet.launch import launch
from hdet.policy.level import Level

Made = tuple[nn.Module, list[Optimizer], list[AutoLR]]
STEPS = 16
"""A warm-up of 12 in a run of 200, and a round more."""


class NormedMuon(torch.optim.Optimizer):
    """Updates of one norm, for shards and old versions of torch too; known by its name."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-0.2 * group["lr"])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 1))


def parts_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrix, and the rest."""
    hidden = [p for name, p in model.named_parameters() if name.endswith("2.weight")]
    return hidden, [p for name, p in model.named_parameters() if not name.endswith("2.weight")]


def made(
    model: nn.Module | None = None, muon: Callable[[Any], Optimizer] = NormedMuon, *, is_given: bool = False
) -> Made:
    """The optimizer of the rest comes first: which of the two has its scheduler first makes no difference."""
    model = network() if model is None else model
    hidden, rest = parts_of(model)
    optimizers = [torch.optim.AdamW(rest), muon(hidden)]
    given = model if is_given else None
    return model, optimizers, [AutoLR(each, total_steps=200, model=given) for each in optimizers]


def train(run: Made, until: int = STEPS) -> list[float]:
    """The learning rates of the rest."""
    model, optimizers, schedulers = run
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    lrs = []
    for step in range(schedulers[0].last_epoch, until):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))[rank::num_ranks]
        model.zero_grad()
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        torch.autograd.backward(loss)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step(loss)
        lrs.append(float(optimizers[0].param_groups[0]["lr"]))
    return lrs


def level_of(scheduler: AutoLR) -> Level:
    level = scheduler._run.policy.level
    assert level is not None
    assert level.done
    return level


def share_of(run: Made) -> float:
    """Of the model's entries, what the rest is taken for."""
    train(run)
    assert level_of(run[2][-1])._part == 1  # Muon goes by its own matrices
    return level_of(run[2][0])._part


def test_the_level_is_that_of_one_optimizer_around_the_whole_model(caplog: pytest.LogCaptureFixture) -> None:
    run = made()
    hidden, rest = parts_of(run[0])
    before = math.sqrt(sum(float(p.detach().square().sum()) for p in run[0].parameters()))
    share = share_of(run)
    num, num_hidden = sum(p.numel() for p in rest), sum(p.numel() for p in hidden)
    assert share == pytest.approx(num / (num + num_hidden))
    level = level_of(run[2][0])
    assert level._weights == pytest.approx(before * math.sqrt(share), rel=0.1)  # the weights have moved since
    alone = level_of(train_alone())
    assert level.allowance == pytest.approx(alone.allowance, rel=0.1)
    assert level.lr == pytest.approx(alone.lr, rel=0.2)
    assert f"as for the whole model, of which this optimizer trains {share:.1%}" in caplog.text


def train_alone() -> AutoLR:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = AutoLR(optimizer, total_steps=200)
    train((model, [optimizer], [scheduler]))
    return scheduler


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_with_the_muon_of_torch() -> None:
    assert share_of(made(muon=lambda hidden: torch.optim.Muon(hidden))) < 0.4


def test_with_the_model_at_hand() -> None:
    assert share_of(made(is_given=True)) == share_of(made())


def test_a_model_in_another_counts() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    assert share_of(made(Outer())) == share_of(made())


@pytest.mark.parametrize("case", ["another kind", "another model", "finished", "no scheduler", "frozen"])
def test_what_else_may_be_there_does_not_count(case: str) -> None:
    if case == "another kind":  # as in a GAN, whose two optimizers train a model each, in one module or not
        assert share_of(made(muon=lambda hidden: torch.optim.Adam(hidden, lr=1e-3))) == 1
        return
    model = network()
    hidden, _ = parts_of(network() if case == "another model" else model)
    muon = NormedMuon(hidden)
    schedule = LambdaLR(muon, lambda step: 1.0)
    other = AutoLR(schedule, total_steps=STEPS) if case != "no scheduler" else None
    optimizer = torch.optim.AdamW(parts_of(model)[1])
    if case == "finished":
        train((model, [muon], [other]))  # type: ignore[list-item]
    hidden[0].requires_grad_(case != "frozen")
    scheduler = AutoLR(optimizer, total_steps=200)
    train((model, [optimizer], [scheduler]))
    assert level_of(scheduler)._part == 1


@pytest.mark.parametrize("saved_at", [2, 7, 14])
def test_a_run_that_is_resumed_goes_on_as_it_was(saved_at: int) -> None:
    whole, resumed = made(), made()
    train(whole, saved_at)
    parts: list[Any] = [whole[0], *whole[1], *whole[2]]
    fresh: list[Any] = [resumed[0], *resumed[1], *resumed[2]]
    state = copy.deepcopy([part.state_dict() for part in parts])
    expected = train(whole, 40)
    for part, saved in zip(fresh, state, strict=True):
        part.load_state_dict(saved)
    assert train(resumed, 40) == expected


def _on_ranks() -> list[tuple[float, list[float]]]:
    found = []
    for kind in ("replicated", "sharded"):
        model = network()
        if kind == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            model = nn.parallel.DistributedDataParallel(model)
        run = made(model)
        lrs = train(run)
        found.append((level_of(run[2][0])._part, lrs))
    return found


@pytest.mark.slow
def test_ranks_find_what_one_process_finds() -> None:
    run = made()
    lrs = train(run)
    for found in launch(_on_ranks, 2, timeout_s=100):
        for share, of_rank in found:
            assert share == pytest.approx(level_of(run[2][0])._part)
            assert of_rank == pytest.approx(lrs, rel=1e-4)


@pytest.mark.filterwarnings("ignore:the round that ended:UserWarning", "ignore:. rounds of this run:UserWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken_at", [2, 9])
def test_where_weights_of_muon_break_both_go_back(broken_at: int, value: float) -> None:
    run = made()
    train(run, broken_at)
    with torch.no_grad():
        parts_of(run[0])[0][0][0, 0] = value
    lrs = train(run, 60)
    assert all(0 < lr < 1 for lr in lrs)
    assert all(scheduler.history[-1].num_rollbacks > 0 for scheduler in run[2])
    assert all(bool(p.isfinite().all()) for p in run[0].parameters())
