"""The installed torch is the oracle: a scheduler of hdet that learns nothing is the schedule it is made from."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet import Adapt, AutoLR, OneCycleAutoLR
from hdet.controllers import Hold
from job import launch
from pairwise import pairwise
from schedules import SCHEDULES, Build, make_optimizer, take_step

STEPS = 12

STILL: dict[str, Adapt] = {
    "bounds": Adapt(bounds=(1, 1), level=False),
    "a controller that holds": Adapt(controller=Hold(), level=False),
    "each group": Adapt(bounds=(1, 1), level=False, groups="each"),
}


def _still(build: Build, adapt: Adapt = STILL["bounds"]) -> Build:
    """AutoLR around a schedule, with a scale that cannot leave 1."""
    return lambda optimizer: AutoLR(build(optimizer), interval=4, adapt=adapt)


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def _weights(optimizer: Optimizer) -> list[bytes]:
    """To the last bit, NaN too: there are momenta that no training survives."""
    return [p.detach().numpy().tobytes() for group in optimizer.param_groups for p in group["params"]]


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
        outcomes.append((found, _groups(optimizer), _weights(optimizer)))
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


@pytest.mark.parametrize(("name", "still"), list(zip(SCHEDULES, cycle(STILL), strict=False)))
def test_a_still_autolr_does_what_its_schedule_does(name: str, still: str) -> None:
    _same(SCHEDULES[name], _still(SCHEDULES[name], STILL[still]), _run)


@pytest.mark.parametrize("act", [name for name in ACTS if name != "train"])
@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "SequentialLR nested"])
def test_it_is_used_wrongly_as_its_schedule_is(name: str, act: str) -> None:
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
            lambda schedule: AutoLR(schedule, adapt=STILL["bounds"]),
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


def _groups_of_two(lr: Any) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(3))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": lr / 5}]


ONE_CYCLE_OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: torch.optim.SGD(_groups_of_two(0.1), lr=0.1, momentum=0.9),
    "sgd, tensors": lambda: torch.optim.SGD(_groups_of_two(tensor64(0.1)), lr=tensor64(0.1), momentum=0.9),
    "adam": lambda: torch.optim.Adam(_groups_of_two(0.1), lr=0.1),
    "adamw": lambda: torch.optim.AdamW(_groups_of_two(0.1), lr=0.1, betas=(0.8, 0.99)),
    "adagrad": lambda: torch.optim.Adagrad(_groups_of_two(0.1), lr=0.1),  # without a momentum to cycle
}


def tensor64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _last_epoch(optimizer: Optimizer, make: Any, arguments: dict[str, Any]) -> Any:
    """A state of 7 steps, continued by ``last_epoch``."""
    first = OneCycleLR(optimizer, **arguments)
    for _ in range(7):
        take_step(optimizer, first)
    return _run(optimizer, make(optimizer, **arguments, last_epoch=first.last_epoch))


def _from_state(*missing: str) -> Callable[[Optimizer, Any, dict[str, Any]], Any]:
    """A state of torch's after 7 steps, loaded; older versions of torch had not all of its keys."""

    def resume(optimizer: Optimizer, make: Any, arguments: dict[str, Any]) -> Any:
        first = OneCycleLR(optimizer, **arguments)
        for _ in range(7):
            take_step(optimizer, first)
        state = {key: value for key, value in first.state_dict().items() if key not in missing}
        if "_anneal_func_type" in missing:
            state["anneal_func"] = first._annealing_cos
        saved = copy.deepcopy(optimizer.state_dict())
        scheduler = make(optimizer, **arguments)
        optimizer.load_state_dict(saved)
        scheduler.load_state_dict(copy.deepcopy(state))
        return _run(optimizer, scheduler)

    return resume


def _made(act: Callable[[Optimizer, Any], Any]) -> Callable[[Optimizer, Any, dict[str, Any]], Any]:
    return lambda optimizer, make, arguments: act(optimizer, make(optimizer, **arguments))


HAND_MADE = ("_anneal_func_type", "_schedule_phases", "base_lrs", "cycle_momentum", "_get_lr_called_within_step")
ONE_CYCLE_ACTS: dict[str, Callable[[Optimizer, Any, dict[str, Any]], Any]] = {
    **{name: _made(act) for name, act in ACTS.items()},
    "look at get_lr": _made(lambda optimizer, scheduler: scheduler.get_lr()),
    "continue by last_epoch": _last_epoch,
    "continue from a state": _from_state(),
    "continue from a state before _anneal_func_type": _from_state("_anneal_func_type"),
    "continue from a state before phases": _from_state("_anneal_func_type", "_schedule_phases"),
    "continue from a state made by hand": _from_state(*HAND_MADE),
}
ONE_CYCLE = pairwise(
    {
        "act": list(ONE_CYCLE_ACTS),
        "optimizer": list(ONE_CYCLE_OPTIMIZERS),
        "max_lr": [{"max_lr": value} for value in (0.1, 25, [0.1, 0.2], torch.tensor(0.1))],
        "length": [
            {"total_steps": 20},
            {"epochs": 4, "steps_per_epoch": 5},
            {"total_steps": 20, "epochs": 9, "steps_per_epoch": 9},
        ],
        "annealing": [{}, {"anneal_strategy": "linear"}],
        "phases": [{}, {"three_phase": True}],
        "momenta": [
            {},
            {"cycle_momentum": False, "base_momentum": 7},
            {"base_momentum": 1, "max_momentum": 22},
            {"base_momentum": -0.5, "max_momentum": [0.5, 1.0]},
            {"base_momentum": [0.8, 0.7], "max_momentum": [0.9, 0.95]},
        ],
        "factors": [{}, {"div_factor": 2, "final_div_factor": 3}, {"pct_start": 0.7}, {"pct_start": 0.0}],
        "ours": [{}, {"rank": 0, "world_size": 8, "model_sync_interval": 2, "loss_scale": 0.1}],
    }
)


def _arguments(row: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for part in row.values() if isinstance(part, dict) for key, value in part.items()}
    return found | ({"cycle_momentum": False} if row["optimizer"] == "adagrad" else {})


def _both(row: dict[str, Any]) -> list[Any]:
    """What torch's does and leaves, and what ours does."""
    arguments = _arguments(row)
    found = []
    for kind in (OneCycleLR, OneCycleAutoLR):
        optimizer = ONE_CYCLE_OPTIMIZERS[row["optimizer"]]()

        def make(optimizer: Optimizer, kind: Any = kind, **given: Any) -> Any:
            left = given if kind is OneCycleAutoLR else {k: v for k, v in given.items() if k not in row["ours"]}
            return kind(optimizer, **left)

        def act(optimizer: Optimizer = optimizer, make: Any = make) -> Any:
            return ONE_CYCLE_ACTS[row["act"]](optimizer, make, arguments)

        found.append((_outcome(act), _groups(optimizer), _weights(optimizer)))
    return found


@pytest.mark.parametrize("row", ONE_CYCLE, ids=lambda row: f"{row['act']}, {row['optimizer']}")
def test_without_a_spread_onecycleautolr_is_onecyclelr(row: dict[str, Any]) -> None:
    theirs, ours = _both(row)
    assert ours == theirs


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce", "reduce_scatter", "gather", "scatter", "barrier", "monitored_barrier", "all_to_all", "send", "recv"),
)


def _in_a_group() -> tuple[list[dict[str, Any]], list[str]]:
    called: list[str] = []
    for name in COLLECTIVES:
        setattr(dist, name, lambda *_, name=name, **__: called.append(name))
    different = []
    for row in ONE_CYCLE[::3]:
        theirs, ours = _both(row)
        if ours != theirs:
            different.append(row)
    optimizer = make_optimizer()
    scheduler = OneCycleAutoLR(optimizer, 0.1, 20, enable_auto_lr=True, auto_lr_warmup_steps=2)
    for _ in range(20):
        take_step(optimizer, scheduler, loss=True)
    scheduler.converge()
    with scheduler.converged():
        scheduler.state_dict()
    return different, called


def test_without_a_spread_it_is_onecyclelr_in_a_process_group_too_and_says_nothing_to_anyone() -> None:
    assert launch(_in_a_group, 2) == [([], [])] * 2


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


@pytest.mark.parametrize("form", BAD_FORMS)
def test_what_onecyclelr_refuses_is_refused_with_an_error_of_the_same_type(form: str) -> None:
    found = [
        _outcome(lambda make=make: make(make_optimizer(), **BAD_FORMS[form]))[0]  # type: ignore[misc]
        for make in (OneCycleLR, OneCycleAutoLR)
    ]
    assert isinstance(found[0], tuple)
    assert found[0][0] is found[1][0]


def test_a_scheduler_that_was_made_before_anneal_func_type_saves_and_loads() -> None:
    def resume(optimizer: Optimizer, scheduler: Any) -> Any:
        del scheduler._anneal_func_type
        state = scheduler.state_dict()
        state["anneal_func"] = OneCycleLR._annealing_linear
        scheduler.load_state_dict(state)
        return _run(optimizer, scheduler)

    def made(kind: Any) -> Build:
        scheduler: Build = lambda o: kind(o, 25, total_steps=20, anneal_strategy="linear", three_phase=True)
        return scheduler

    assert len(_same(made(OneCycleLR), made(OneCycleAutoLR), resume)) == STEPS + 1


def test_it_is_a_onecyclelr_to_the_eye() -> None:
    ours, torchs = OneCycleAutoLR(make_optimizer(), 0.1, 20), OneCycleLR(make_optimizer(), 0.1, 20)
    assert isinstance(ours, OneCycleLR)
    for name in ("base_lrs", "total_steps", "last_epoch", "_step_count", "_schedule_phases", "_anneal_func_type"):
        assert getattr(ours, name) == getattr(torchs, name), name
