"""Whatever schedule AutoLR is around: its own checkpoint is never refused, and any thread may write it."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler, SequentialLR

from hdet import Adapt, AutoLR, Explorer, Faults, OneCycleAutoLR, knobs
from schedules import LEAVES, SCHEDULES, Build, OddCount, make_optimizer, take_step

STEPS = 12


def _sequential(parts: list[Build], milestones: list[int]) -> Build:
    return lambda o: SequentialLR(o, [build(o) for build in parts], milestones)


def _chained(parts: list[Build]) -> Build:
    return lambda o: ChainedScheduler([build(o) for build in parts], o)


@st.composite
def _sequentials(draw: st.DrawFn, inner: st.SearchStrategy[Build]) -> Build:
    # Torch can start a leaf in mid-run, but nothing that is made of others: those come first.
    parts = [draw(inner), *draw(st.lists(_leaves(), min_size=1, max_size=2))]
    milestones = sorted(draw(st.sets(st.integers(1, STEPS - 1), min_size=len(parts) - 1, max_size=len(parts) - 1)))
    return _sequential(parts, milestones)


def _leaves() -> st.SearchStrategy[Build]:
    return st.sampled_from(sorted(LEAVES)).map(lambda name: LEAVES[name])


def _schedules() -> st.SearchStrategy[Build]:
    def grown(inner: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
        return _sequentials(inner) | st.lists(_leaves(), min_size=1, max_size=3).map(_chained)

    return st.recursive(_leaves(), grown, max_leaves=4)


def _from_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _parameters(optimizer: Optimizer) -> nn.ParameterList:
    return nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])


def _auto(build: Build, optimizer: Optimizer) -> AutoLR:
    return AutoLR(
        build(optimizer),
        model=_parameters(optimizer),  # else every one would search the process for it
        interval=2,
        adapt=Adapt(_start_steps=0),
        faults=Faults(max_rollbacks=0),  # a resumed run has nothing older than its checkpoint to go back to
    )


def _check_resume(build: Build, every: int | None = None) -> None:
    """State of a step, from memory or a file by turns -> fresh objects -> the same learning rates from there on."""
    optimizer = make_optimizer()
    scheduler = _auto(build, optimizer)
    lrs, states = [], []
    for step in range(STEPS):
        state: dict[str, Any] = {"o": copy.deepcopy(optimizer.state_dict()), "s": scheduler.state_dict()}
        states.append(_from_file(state) if step % 2 else state)
        states[-1]["w"] = [p.detach().clone() for p in _parameters(optimizer)]
        lrs.append(take_step(optimizer, scheduler, loss=True))
    for first in (0, 1, 4, 5, 8, 11) if every is None else range(0, STEPS, every):
        state = states[first]
        again = make_optimizer(seed=1)
        resumed = _auto(build, again)
        with torch.no_grad():
            for p, value in zip(_parameters(again), state["w"], strict=True):
                p.copy_(value)
        again.load_state_dict(state["o"])
        resumed.load_state_dict(state["s"])
        for step in range(first, STEPS):
            assert take_step(again, resumed, loss=True) == lrs[step], (first, step)


@pytest.mark.parametrize("name", [*SCHEDULES, "OddCount"])
def test_a_run_resumes_from_any_of_its_own_states(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_resume(SCHEDULES.get(name, lambda o: OddCount(o, 3, gamma=0.5)))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_one_cycle_that_waits_inside_several_others_is_resumed(depth: int) -> None:
    build = _sequential([LEAVES["StepLR"], LEAVES["OneCycleLR"]], [2])
    for outer in range(1, depth):
        build = _sequential([build, LEAVES["ConstantLR"]], [8 + outer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_resume(build)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(build=_schedules())
def test_any_schedule_resumes_from_any_of_its_own_states(build: Build) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_resume(build, every=3)  # from memory and from a file by turns


class _Holding(LRScheduler):
    """What can be neither copied nor written to a file is a user's business too."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.model, self.lock, self.rows = model, threading.Lock(), [[0.0]]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.rows[0].append(1.0)
        return [base / len(self.rows[0]) for base in self.base_lrs]


def test_a_state_in_memory_keeps_a_users_objects_and_stands_still() -> None:
    optimizer, model = make_optimizer(), nn.Linear(1, 1)
    scheduler = AutoLR(_Holding(optimizer, model), adapt=Adapt(bounds=(1, 1), level=False))
    take_step(optimizer, scheduler)
    state = scheduler.state_dict()
    lrs = [take_step(optimizer, scheduler) for _ in range(3)]
    assert len(state["schedule"]["rows"][0]) == 3
    again = make_optimizer()
    fresh = AutoLR(_Holding(again, model), adapt=Adapt(bounds=(1, 1), level=False))
    fresh.load_state_dict(state)
    assert [take_step(again, fresh) for _ in range(3)] == lrs
    schedule: Any = fresh.schedule
    assert schedule.model is model


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("T_max", 0, "T_max must be above 0, as the schedule's is, but got 0"),
        ("eta_min", "low", "eta_min must be a finite number, but got 'low'"),
        ("last_epoch", -2, "last_epoch must not be negative, but got -2"),
        ("last_epoch", 2.5, "last_epoch must be a whole number, but got 2.5"),
        ("base_lrs", [0.1], r"base_lrs must be a list of 2, but got \[0.1\]"),
        ("step", 3, r"schedule must hold the state of CosineAnnealingLR, but got \['step'\]"),
    ],
)
def test_torchs_own_fields_are_still_looked_at(key: str, value: Any, text: str) -> None:
    optimizer = make_optimizer()
    scheduler = AutoLR(CosineAnnealingLR(optimizer, 9), interval=2)
    state = scheduler.state_dict()
    state["schedule"][key] = value
    with pytest.raises(ValueError, match=f"^state_dict cannot be loaded: ValueError: {text}"):
        scheduler.load_state_dict(state)


# -- from another thread --------------------------------------------------------------------------------------------


def _make(kind: str, model: nn.Module, optimizer: Optimizer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "AutoLR":
            return AutoLR(LEAVES["LambdaLR object"](optimizer), interval=2, adapt=Adapt(_start_steps=0))
        if kind == "OneCycleAutoLR":
            return OneCycleAutoLR(optimizer, 0.1, 2000, model_sync_interval=2)
        return Explorer(model, optimizer, knobs=[knobs.LearningRate()], interval=2)


def _train(kind: str, steps: int, *, watched: bool) -> tuple[list[float], list[Any], list[BaseException]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = _make(kind, model, optimizer)
    done = threading.Event()
    states: list[Any] = []
    errors: list[BaseException] = []

    def hammer() -> None:
        try:
            while not done.is_set():
                states[-20:] = [*states[-19:], scheduler.state_dict()]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=hammer, daemon=True)
    if watched:
        thread.start()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.observe(float(loss.detach()) if step % 2 else loss.detach().double(), 2.0)
        scheduler.step(loss.detach())
        if errors:
            break
    done.set()
    if watched:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return model.weight.flatten().tolist(), states, errors


@pytest.mark.filterwarnings("ignore:the round that ended at step")  # momentum carries a model past its minimum
@pytest.mark.parametrize("kind", ["AutoLR", "OneCycleAutoLR", "Explorer"])
def test_another_thread_may_write_the_state_while_training_goes_on(kind: str) -> None:
    alone, _, _ = _train(kind, 100, watched=False)
    weights, states, errors = _train(kind, 100, watched=True)
    assert errors == []
    assert weights == alone  # not a loss was counted twice, or lost
    for state in states:
        model = nn.Linear(2, 1)
        _make(kind, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)).load_state_dict(state)
