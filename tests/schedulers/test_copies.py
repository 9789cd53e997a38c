"""Copies of a scheduler, by deepcopy and by pickle: they act on their own optimizer, or are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs
from hdet.launch import launch

Run = tuple[nn.Module, torch.optim.Optimizer, Any]
KINDS = ("AutoLR", "OneCycleAutoLR", "Explorer")
WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}


def _make(kind: str, **adapt: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "AutoLR":
            return (
                model,
                optimizer,
                AutoLR(CosineAnnealingLR(optimizer, 200), interval=2, model=model, adapt=Adapt(**adapt)),
            )
        if kind == "OneCycleAutoLR":
            return model, optimizer, OneCycleAutoLR(
                optimizer, 0.01, 200, model_sync_interval=2, model=model, adapt=Adapt(**adapt)
            )  # fmt: skip
        return model, optimizer, Explorer(model, optimizer, knobs=[knobs.LearningRate()], interval=2)


def _train(run: Run, first: int, steps: int, *, broken_at: int = -1) -> list[tuple[float, ...]]:
    model, optimizer, scheduler = run
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if step == broken_at:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        scheduler.step(loss)
        seen.append((float(loss.detach()), *(float(group["lr"]) for group in optimizer.param_groups)))
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("climb", [None, False])
@pytest.mark.parametrize("kind", ["AutoLR", "Explorer"])
def test_a_copy_of_all_three_goes_on_as_the_original_does(kind: str, climb: bool | None, way: str) -> None:
    """In the middle of a climb, too, which then goes back to the first weights, not to those of the copy."""
    run = _make(kind, climb=climb)
    _train(run, 0, 7)
    again = WAYS[way](run)
    gc.collect()
    found = _train(again, 7, 20)
    assert found == _train(run, 7, 20)  # after the copy: neither has touched the other
    scales = [record.scales for record in again[2].history]
    assert scales == [record.scales for record in run[2].history]
    if kind == "AutoLR":  # the others have nothing to learn on one process
        assert len(set(scales)) > 3  # it lives
    assert again[2].state_dict()["rounds"]["scales"] == run[2].state_dict()["rounds"]["scales"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["AutoLR"])
def test_a_copy_of_the_scheduler_alone_brings_its_optimizer(kind: str, way: str) -> None:
    run = _make(kind, climb=False)
    _train(run, 0, 5)
    again = WAYS[way](run[2])
    assert again.optimizer is not run[1]
    assert again._rounds.optimizer is again.optimizer
    assert len(again.optimizer._optimizer_step_pre_hooks) == 1
    before = _weights(run)
    for _ in range(10):
        for group in again.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        again.optimizer.step()
        again.step(1.0)
    assert _weights(run) == before
    assert len(again._rounds.history) == len(run[2].history) + 5


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_undoes_a_broken_round(way: str) -> None:
    run = _make("AutoLR", climb=False)
    _train(run, 0, 7)
    again = WAYS[way](run)
    with pytest.warns(UserWarning, match="the round that ended at step 10 was undone") as told:
        _train(again, 7, 6, broken_at=9)
    assert [warning.filename for warning in told if "was undone" in str(warning.message)] == [__file__]
    assert again[2].history[-1].num_rollbacks == 1
    assert all(torch.isfinite(p).all() for p in again[0].parameters())


def _weights(run: Run) -> list[float]:
    return [x for p in run[0].parameters() for x in p.flatten().tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_the_optimizer_has_no_scheduler(kind: str) -> None:
    run = _make(kind)
    _train(run, 0, 5)
    lrs = [group["lr"] for group in run[1].param_groups]
    optimizer = copy.deepcopy(run[1])
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    before = run[2].state_dict()["rounds"]["signals"]
    optimizer.step()
    assert run[2].state_dict()["rounds"]["signals"] == before
    assert [group["lr"] for group in optimizer.param_groups] == lrs


@pytest.mark.parametrize("kind", KINDS)
def test_two_schedulers_on_one_optimizer_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^{kind} must not be copied by copy.copy\(\): two would act on one optimi"):
        copy.copy(_make(kind)[2])


@pytest.mark.parametrize("way", WAYS)
def test_what_reaches_outside_is_refused_and_says_what_to_do(way: str) -> None:
    model, optimizer, scheduler = _make("AutoLR")
    scheduler.add_sink(lambda record, names: None)
    with pytest.raises(
        TypeError, match=r"^a scheduler that has sinks must not be copied or pickled: .*load_state_dict\(old.state_di"
    ):
        WAYS[way]((model, optimizer, scheduler))
    del scheduler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explorer = Explorer(
            model, optimizer, knobs=[knobs.WeightDecay()], interval=2, gradients="local", probe=lambda: torch.ones(())
        )
    why = 'writes knobs into a model and calls a probe and has gradients="local"'
    with pytest.raises(TypeError, match=f"^a scheduler that {why} must not be copied or pickled"):
        WAYS[way]((model, optimizer, explorer))


def _copy_in_a_group() -> str:
    run = _make("AutoLR")
    try:
        copy.deepcopy(run)
    except TypeError as error:
        return str(error)
    return ""


def test_one_of_several_processes_is_refused() -> None:
    for said in launch(_copy_in_a_group, 2, timeout_s=60):
        assert said.startswith("a scheduler that is one of several processes' must not be copied or pickled")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_keeps_a_scheduler_alive(kind: str) -> None:
    """Without the help of the garbage collector: there are no circles."""
    gc.collect()
    gc.disable()
    try:
        run = _make(kind)
        _train(run, 0, 5)
        refs = [weakref.ref(run[2]), weakref.ref(run[1])]
        del run
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
