"""The installed torch is the oracle: a scheduler of hdet that learns nothing is the schedule it is made from."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR, SequentialLR

from hdet import Adapt, AutoLR, OneCycleAutoLR
from schedules import SCHEDULES, Build, make_optimizer, take_step

STEPS = 12

STILL = Adapt(bounds=(1, 1), level=False)


def _still(build: Build) -> Build:
    """AutoLR around a schedule, with a scale that cannot leave 1."""
    return lambda optimizer: AutoLR(build(optimizer), adapt=STILL)


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def _outcome(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What comes back, or the error's type and text; and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = act()
        except Exception as error:
            found = type(error), str(error)
    return found, [str(w.message) for w in caught]


def _same(build: Build, other: Build, act: Callable[[Optimizer, Any], Any], lr: Any = 0.1) -> Any:
    """Both do the same in ``act``, which is returned, and leave the same in their optimizers."""
    outcomes = []
    for make in (build, other):
        optimizer = make_optimizer(lr=lr)
        found = _outcome(lambda o=optimizer, make=make: act(o, make(o)))  # type: ignore[misc]
        outcomes.append((found, _groups(optimizer)))
    assert outcomes[0] == outcomes[1]
    return outcomes[0][0][0]


def _run(optimizer: Optimizer, scheduler: Any, steps: int = STEPS) -> list[Any]:
    seen: list[Any] = [(_groups(optimizer), scheduler.get_last_lr())]
    for _ in range(steps):
        seen.append((take_step(optimizer, scheduler), _groups(optimizer), scheduler.get_last_lr()))
    return seen


def _old_pattern(optimizer: Optimizer, scheduler: Any) -> None:
    for _ in range(3):
        scheduler.step()
        optimizer.step()


def _overridden(optimizer: Optimizer, scheduler: Any) -> None:
    step = optimizer.step
    optimizer.step = types.MethodType(lambda _, *args: step(*args), optimizer)  # type: ignore[method-assign]
    for _ in range(3):
        optimizer.step()
        scheduler.step()


def _to_the_end(optimizer: Optimizer, scheduler: Any) -> None:
    for _ in range(42):
        take_step(optimizer, scheduler)


ACTS: dict[str, Callable[[Optimizer, Any], Any]] = {
    "train": _run,
    "step the scheduler first": _old_pattern,
    "replace optimizer.step": _overridden,
    "train past the end of OneCycleLR": _to_the_end,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_still_autolr_does_what_its_schedule_does(name: str, act: str) -> None:
    _same(SCHEDULES[name], _still(SCHEDULES[name]), ACTS[act])


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_that_are_tensors_stay_where_they_are(name: str) -> None:
    runs = []
    for make in (SCHEDULES[name], _still(SCHEDULES[name])):
        optimizer = make_optimizer(lr=torch.tensor(0.1))
        homes = [group["lr"] for group in optimizer.param_groups]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = make(optimizer)
            runs.append([take_step(optimizer, scheduler) for _ in range(STEPS)])
        assert all(group["lr"] is home for group, home in zip(optimizer.param_groups, homes, strict=True))
        for lr in scheduler.get_last_lr():
            lr.mul_(0)  # type: ignore[union-attr]
        assert [float(lr) for lr in homes] == runs[-1][-1]
    torch.testing.assert_close(runs[0], runs[1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_state_of_the_schedule_is_torchs_and_goes_both_ways(name: str) -> None:
    build = SCHEDULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare_optimizer, optimizer = make_optimizer(), make_optimizer()
        bare, still = build(bare_optimizer), _still(build)(optimizer)
        for _ in range(5):
            take_step(bare_optimizer, bare)
            take_step(optimizer, still)
        state = still.state_dict()["schedule"]
        assert state == bare.state_dict()
        rest = [take_step(bare_optimizer, bare) for _ in range(4)]
        # Out of hdet: torch's schedule goes on from the state. Into hdet: AutoLR is put around one that has loaded it.
        for wrap in (
            lambda schedule: schedule,
            lambda schedule: AutoLR(schedule, adapt=STILL),
        ):
            again = make_optimizer()
            schedule = build(again)
            again.load_state_dict(optimizer.state_dict())
            schedule.load_state_dict(copy.deepcopy(state))
            scheduler = wrap(schedule)
            assert [take_step(again, scheduler) for _ in range(4)] == rest


LATER = {name: SCHEDULES[name] for name in ("StepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "MultiStepLR")}


@pytest.mark.parametrize("name", LATER)
def test_last_epoch_continues_a_schedule(name: str) -> None:
    def later(optimizer: Optimizer) -> LRScheduler:
        first = LATER[name](optimizer)
        for _ in range(5):
            take_step(optimizer, first)
        given = {k: v for k, v in vars(first).items() if k in ("step_size", "gamma", "T_max", "eta_min", "milestones")}
        return type(first)(optimizer, **given, last_epoch=first.last_epoch)

    _same(later, _still(later), _run)


# -- OneCycleAutoLR ---------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"max_lr": 0.1, "total_steps": 20},
    "epochs": {"max_lr": [0.1, 0.2], "epochs": 4, "steps_per_epoch": 5},
    "linear, three phases": {"max_lr": 25, "total_steps": 20, "anneal_strategy": "linear", "three_phase": True},
    "momenta of 1 and more": {"max_lr": 25, "total_steps": 20, "base_momentum": 1, "max_momentum": 22},
    "momenta below 0": {"max_lr": 0.1, "total_steps": 20, "base_momentum": -0.5, "max_momentum": [0.5, 1.0]},
    "no momentum": {"max_lr": 0.1, "total_steps": 20, "cycle_momentum": False, "base_momentum": 7},
    "factors": {"max_lr": 0.1, "total_steps": 20, "div_factor": 2, "final_div_factor": 3, "pct_start": 0.7},
    "no rise": {"max_lr": 0.1, "total_steps": 20, "pct_start": 0.0},
}
BAD_FORMS: dict[str, dict[str, Any]] = {
    "no length": {"max_lr": 0.1},
    "half a length": {"max_lr": 0.1, "epochs": 3},
    "length 0": {"max_lr": 0.1, "total_steps": 0},
    "negative": {"max_lr": 0.1, "total_steps": -3},
    "a fraction": {"max_lr": 0.1, "total_steps": 2.5},
    "epochs 0": {"max_lr": 0.1, "epochs": 0, "steps_per_epoch": 3},
    "pct_start above 1": {"max_lr": 0.1, "total_steps": 20, "pct_start": 1.1},
    "pct_start an int": {"max_lr": 0.1, "total_steps": 20, "pct_start": 1},
    "annealing": {"max_lr": 0.1, "total_steps": 20, "anneal_strategy": "sine"},
    "three max_lr": {"max_lr": [0.1, 0.1, 0.1], "total_steps": 20},
    "three momenta": {"max_lr": 0.1, "total_steps": 20, "max_momentum": [0.9, 0.9, 0.9]},
    "last_epoch of nothing": {"max_lr": 0.1, "total_steps": 20, "last_epoch": 3},
}
ONE_CYCLE_ACTS: dict[str, Callable[[Optimizer, Any], Any]] = {
    **ACTS,
    "look at get_lr": lambda o, s: s.get_lr(),
    "train on": lambda o, s: _run(o, s, 24),
}


def _one_cycle(form: dict[str, Any]) -> tuple[Build, Build]:
    return (lambda o: OneCycleLR(o, **form)), (lambda o: OneCycleAutoLR(o, **form))


@pytest.mark.parametrize("act", ONE_CYCLE_ACTS)
@pytest.mark.parametrize("form", FORMS)
def test_without_a_spread_onecycleautolr_is_onecyclelr(form: str, act: str) -> None:
    _same(*_one_cycle(FORMS[form]), ONE_CYCLE_ACTS[act])


@pytest.mark.parametrize("form", BAD_FORMS)
def test_what_onecyclelr_refuses_is_refused_with_an_error_of_the_same_type(form: str) -> None:
    found = [_outcome(lambda make=make: make(make_optimizer()))[0] for make in _one_cycle(BAD_FORMS[form])]  # type: ignore[misc]
    assert isinstance(found[0], tuple)
    assert found[0][0] is found[1][0]


@pytest.mark.parametrize("form", FORMS)
def test_last_epoch_continues_onecyclelr(form: str) -> None:
    def later(make: Any) -> Build:
        def build(optimizer: Optimizer) -> LRScheduler:
            first = OneCycleLR(optimizer, **FORMS[form])
            for _ in range(7):
                take_step(optimizer, first)
            scheduler: LRScheduler = make(optimizer, **FORMS[form], last_epoch=first.last_epoch)
            return scheduler

        return build

    _same(later(OneCycleLR), later(OneCycleAutoLR), _run)


OLD = {
    "today's": (),
    "before _anneal_func_type": ("_anneal_func_type",),
    "before phases": ("_anneal_func_type", "_schedule_phases"),
    "hand-made": ("_anneal_func_type", "_schedule_phases", "base_lrs", "cycle_momentum", "_get_lr_called_within_step"),
}


@pytest.mark.parametrize("age", OLD)
@pytest.mark.parametrize("form", FORMS)
def test_states_of_onecyclelr_old_and_new_are_continued_from(form: str, age: str) -> None:
    optimizer = make_optimizer()
    reference = OneCycleLR(optimizer, **FORMS[form])
    for _ in range(7):
        take_step(optimizer, reference)
    state = {key: value for key, value in reference.state_dict().items() if key not in OLD[age]}
    if "_anneal_func_type" in OLD[age]:
        state["anneal_func"] = reference._annealing_cos
    saved = copy.deepcopy(optimizer.state_dict())

    def resume(optimizer: Optimizer, scheduler: Any) -> Any:
        optimizer.load_state_dict(saved)
        scheduler.load_state_dict(copy.deepcopy(state))
        return _run(optimizer, scheduler)

    assert len(_same(*_one_cycle(FORMS[form]), resume)) == STEPS + 1


def test_a_scheduler_that_was_made_before_anneal_func_type_saves_and_loads() -> None:
    form = FORMS["linear, three phases"]

    def resume(optimizer: Optimizer, scheduler: Any) -> Any:
        del scheduler._anneal_func_type
        state = scheduler.state_dict()
        state["anneal_func"] = OneCycleLR._annealing_linear
        scheduler.load_state_dict(state)
        return _run(optimizer, scheduler)

    assert len(_same(*_one_cycle(form), resume)) == STEPS + 1


def test_inside_sequentiallr_too() -> None:
    def inside(make: Any) -> Build:
        return lambda o: SequentialLR(o, [LinearLR(o, 0.5, total_iters=3), make(o, 0.1, 20, cycle_momentum=False)], [3])

    _same(inside(OneCycleLR), inside(OneCycleAutoLR), _run)


def test_it_is_a_onecyclelr_to_the_eye() -> None:
    ours, torchs = OneCycleAutoLR(make_optimizer(), 0.1, 20), OneCycleLR(make_optimizer(), 0.1, 20)
    assert isinstance(ours, OneCycleLR)
    for name in ("base_lrs", "total_steps", "last_epoch", "_step_count", "_schedule_phases", "_anneal_func_type"):
        assert getattr(ours, name) == getattr(torchs, name), name
