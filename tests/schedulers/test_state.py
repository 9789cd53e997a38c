"""Saving and resuming: save on one rank, load on all, *continue*, and compare with the run that was not interrupted."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from hdet import OneCycleAutoLR
from hdet.policy.spread import multipliers
from job import Training, launch

TOTAL_STEPS = 22
INTERVAL = 4
SPREAD = 0.5


class _Run(Training):
    """A model, its optimizer and its scheduler, all of them functions of the step and the replica."""

    def __init__(self, *, total_steps: int = TOTAL_STEPS, weight_free_loss: bool = False, **options: Any) -> None:
        g = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=g))
        self.weight_free_loss = weight_free_loss
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}]
        self.optimizer = torch.optim.Adam(groups, lr=0.1)
        options = {
            "ensemble_lr_spread_ratio": SPREAD,
            "model_sync_interval": INTERVAL,
            "enable_auto_lr": True,
            "auto_lr_warmup_steps": 3,
            "loss_scale": 0.1,
            **options,
        }
        self.scheduler = OneCycleAutoLR(
            self.optimizer, max_lr=[0.1, 0.03], total_steps=total_steps, model=self.model, **options
        )

    def step(self) -> None:
        """A gradient shared by all replicas, and a loss of this one's own weights."""
        step = self.scheduler.last_epoch + 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        g = torch.Generator().manual_seed(step)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        self.optimizer.step()
        self.model.get_buffer("1.running_mean").add_(0.1 * step * (rank + 1))
        own = sum(p.detach().square().mean() for p in self.model.parameters())
        assert isinstance(own, Tensor)
        loss = own * 0 if self.weight_free_loss else own
        self.scheduler.step(loss + 0.1 * rank * math.sin(step))

    def row(self) -> tuple[Any, ...]:
        betas = [group["betas"] for group in self.optimizer.param_groups]
        return self.scheduler.last_epoch, self.lrs(), betas, self.weights()

    def weights(self) -> list[list[float]]:
        return [t.detach().flatten().tolist() for t in self.model.state_dict().values()]

    def save(self, path: str) -> None:
        """Where the replicas are, apart or not."""
        if dist.get_rank() == 0:
            torch.save(self.states(), path)
        dist.barrier()


def _resume(folder: str) -> dict[str, bool]:
    warnings.simplefilter("error")
    out = {}

    def save_at_converge(run: _Run, path: str) -> None:
        run.advance(8)
        run.save(path)

    def save_inside_converged(run: _Run, path: str) -> None:
        run.advance(8)
        with run.scheduler.converged():
            run.save(path)

    def save_after_converge(run: _Run, path: str) -> None:
        run.advance(10)
        run.scheduler.converge()
        run.save(path)

    def save_after_two_converges(run: _Run, path: str) -> None:
        run.advance(9)
        run.scheduler.converge()
        run.advance(11)
        run.scheduler.converge()
        run.save(path)

    def save_before_the_first_step(run: _Run, path: str) -> None:
        run.save(path)

    def save_before_the_controller_acts(run: _Run, path: str) -> None:
        run.advance(2)
        run.scheduler.converge()
        run.save(path)

    def save_at_the_last_round(run: _Run, path: str) -> None:
        run.advance(20)
        run.save(path)

    saves: list[Callable[[_Run, str], None]] = [
        save_at_converge,
        save_inside_converged,
        save_after_converge,
        save_after_two_converges,
        save_before_the_first_step,
        save_before_the_controller_acts,
        save_at_the_last_round,
    ]
    for save in saves:
        path = f"{folder}/{save.__name__}.pt"
        whole = _Run()
        save(whole, path)
        num_records = len(whole.scheduler.history)
        expected = whole.advance(TOTAL_STEPS)
        for scheduler_first in (False, True):
            resumed = _Run()
            if not scheduler_first:
                resumed.advance(5)  # the state must replace what is there, whatever it is
            resumed.load(path, scheduler_first=scheduler_first)
            new = len(resumed.scheduler.history)
            label = f"{save.__name__}, {'scheduler' if scheduler_first else 'optimizer'} first"
            out[f"{label}: trajectory"] = resumed.advance(TOTAL_STEPS) == expected
            out[f"{label}: history"] = resumed.told()[new:] == whole.told()[num_records:]
        out[f"{save.__name__}: the controller has moved"] = whole.told()[-1]["scales"] != (1.0, 1.0)
    return out


def test_a_resumed_run_continues_as_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    for result in launch(_resume, 2, str(tmp_path)):
        assert all(result.values()), [name for name, ok in result.items() if not ok]


def _inside_mid_round(folder: str) -> dict[str, bool]:
    """In mid-round, inside `converged()`: replicas go on from the mean, and meet the uninterrupted ones at its end."""
    warnings.simplefilter("error")
    whole = _Run(weight_free_loss=True)
    whole.advance(10)
    with whole.scheduler.converged():
        whole.save(f"{folder}/inside.pt")
    expected = whole.advance(TOTAL_STEPS)
    resumed = _Run(weight_free_loss=True)
    resumed.load(f"{folder}/inside.pt")
    got = resumed.advance(TOTAL_STEPS)
    by_step = {row[0]: np.concatenate(row[3]) for row in expected}
    met = [np.allclose(np.concatenate(row[3]), by_step[row[0]], rtol=1e-4, atol=1e-5) for row in got if row[0] % 4 == 0]
    return {
        "learning rates": [row[:3] for row in got] == [row[:3] for row in expected],
        "weights at converges": all(met) and len(met) == 3,
    }


def _same_everywhere_and_plain() -> dict[str, Any]:
    warnings.simplefilter("error")
    out: dict[str, Any] = {}
    run = _Run()
    run.advance(8)
    states = [run.scheduler.state_dict()]
    run.advance(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.scheduler.state_dict()
    out["warning"] = [str(w.message) for w in caught]
    with run.scheduler.converged():
        states.append(run.scheduler.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.scheduler.state_dict()
    out["warns again after the block"] = len(caught) == 1
    run.scheduler.converge()
    states.append(run.scheduler.state_dict())
    run.advance(TOTAL_STEPS)
    states.append(run.scheduler.state_dict())
    out["states"] = states
    return out


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("states"))
    return launch(_several, 2, folder)


def _several(folder: str) -> dict[str, Any]:
    return {"inside": _inside_mid_round(folder), **_same_everywhere_and_plain()}


def test_saved_inside_converged_in_mid_round(states: list[dict[str, Any]]) -> None:
    for result in states:
        assert all(result["inside"].values()), result["inside"]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(k) is str and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (int, float, str, bool)


def test_the_state_is_plain_explicit_and_the_same_on_every_rank(states: list[dict[str, Any]]) -> None:
    assert repr(states[0]["states"]) == repr(states[1]["states"])  # equal, NaN too
    for state in states[0]["states"]:
        assert _is_plain(state)
        assert repr(json.loads(json.dumps(state))) == repr(state)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert repr(torch.load(file, weights_only=True)) == repr(state)
        assert set(state) == {"version", "last_epoch", "step_count", "schedule", "rounds"}
        assert set(state["rounds"]) >= {"seed", "round", "num_replicas", "scales", "controller", "losses", "signals"}
        assert state["version"] == 1


def test_a_state_in_mid_round_warns_with_the_remedy(states: list[dict[str, Any]]) -> None:
    for result in states:
        [message] = result["warning"]
        assert "state_dict() at step 10," in message
        assert "scheduler.converged()" in message
        assert result["warns again after the block"]


# -- another number of replicas -----------------------------------------------------------------------------------


def _start(path: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    run = _Run()
    run.advance(10)
    run.scheduler.converge()
    run.save(path)
    state: dict[str, Any] = run.scheduler.state_dict()
    return state


def _go_on(path: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    run = _Run()
    run.load(path)
    out: dict[str, Any] = {"rounds": run.scheduler.state_dict()["rounds"]}
    out["lrs"] = [group["lr"] for group in run.optimizer.param_groups]
    out["schedule"] = run.scheduler._schedule_lrs
    run.advance(TOTAL_STEPS)
    out["history"] = run.told()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, run.weights())
    out["same"] = all(row == rows[0] for row in rows)
    return out


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_another_number_of_replicas_gets_a_new_spread_around_the_same_base(
    tmp_path: Path, before: int, after: int
) -> None:
    path = str(tmp_path / "state.pt")
    state = launch(_start, before, path)[0]
    results = launch(_go_on, after, path)
    assert state["rounds"]["num_replicas"] == before
    scales = state["rounds"]["scales"]
    assert scales != [1.0, 1.0]
    for result in results:
        assert result["rounds"]["scales"] == scales
        assert result["rounds"]["controller"] == state["rounds"]["controller"]
        assert result["rounds"]["num_replicas"] == after
        assert result["rounds"]["round"] == state["rounds"]["round"]
        assert result["same"]
        assert [record["step"] for record in result["history"]] == [12, 16, 20, 22]
        assert all(len(record["losses"]) == after for record in result["history"])
    for knob in range(2):
        base = results[0]["schedule"][knob] * scales[knob]
        ratios = sorted(result["lrs"][knob] / base for result in results)
        np.testing.assert_allclose(ratios, multipliers(after, SPREAD), rtol=1e-12)


# -- states of others, and states that are broken -------------------------------------------------------------------


def _alone(**options: Any) -> _Run:
    return _Run(**{"ensemble_lr_spread_ratio": 0.0, **options})


def test_a_state_of_torchs_onecyclelr_is_accepted() -> None:
    theirs = _alone().optimizer
    reference = OneCycleLR(theirs, [0.1, 0.03], 40)
    mine = _alone(total_steps=40)
    for _ in range(10):
        theirs.step()
        reference.step()
    mine.optimizer.load_state_dict(theirs.state_dict())
    mine.scheduler.load_state_dict(reference.state_dict())
    for _ in range(30):
        assert mine.scheduler.last_epoch == reference.last_epoch
        assert mine.scheduler.get_last_lr() == reference.get_last_lr()
        assert [g["betas"] for g in mine.optimizer.param_groups] == [g["betas"] for g in theirs.param_groups]
        theirs.step()
        reference.step()
        mine.step()


def test_the_schedule_comes_from_the_state_as_in_torch() -> None:
    for options in ({}, {"decay": "floor"}, {"decay": "floor", "auto_lr_warmup_steps": 30}):
        whole = _alone(total_steps=50, **options)
        whole.advance(12)
        state = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict(), whole.scheduler.state_dict()))
        resumed = _alone(total_steps=200, **options)
        resumed.model.load_state_dict(state[0])
        resumed.optimizer.load_state_dict(state[1])
        resumed.scheduler.load_state_dict(state[2])
        assert resumed.advance(50) == whole.advance(50), options


def test_loading_writes_the_learning_rate_into_the_optimizer_and_keeps_the_controller() -> None:
    run = _alone()
    run.advance(9)
    state = run.scheduler.state_dict()
    lrs = [group["lr"] for group in run.optimizer.param_groups]
    fresh = _alone()
    fresh.scheduler.load_state_dict(state)
    assert [group["lr"] for group in fresh.optimizer.param_groups] == lrs
    assert fresh.scheduler.get_last_lr() == lrs
    assert repr(fresh.scheduler.state_dict()) == repr(state)


def test_a_state_without_auto_lr_starts_the_controller_fresh_and_the_other_way_round() -> None:
    off = _alone(enable_auto_lr=False).scheduler.state_dict()
    run = _alone()
    run.scheduler.load_state_dict(off)
    assert run.scheduler.state_dict()["rounds"]["controller"] == {"velocity": [0.0, 0.0]}
    on = run.scheduler.state_dict()
    _alone(enable_auto_lr=False).scheduler.load_state_dict(on)


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return edit


def _with(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return edit


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer version": (_with(2, "version"), "must have version 1, but got version 2"),
    "no version": (_without("version"), "must have version 1, but got version None"),
    "no last_epoch": (_without("last_epoch"), "cannot be loaded: KeyError: 'last_epoch'"),
    "no step_count": (_without("step_count"), "cannot be loaded: KeyError: 'step_count'"),
    "no schedule": (_without("schedule"), "cannot be loaded: KeyError: 'schedule'"),
    "no total_steps": (_without("schedule", "total_steps"), "cannot be loaded: KeyError: 'total_steps'"),
    "no rounds": (_without("rounds"), "cannot be loaded: KeyError: 'rounds'"),
    "no scales": (_without("rounds", "scales"), "cannot be loaded: KeyError: 'scales'"),
    "no seed": (_without("rounds", "seed"), "cannot be loaded: KeyError: 'seed'"),
    "no losses": (_without("rounds", "losses"), "cannot be loaded: KeyError: 'losses'"),
    "no controller": (_without("rounds", "controller"), "cannot be loaded: KeyError: 'controller'"),
    "three groups": (_with([0.1] * 3, "schedule", "base_lrs"), "has 2 param groups, but got a state with 3"),
    "three scales": (_with([1.0] * 3, "rounds", "scales"), "scales"),
    "nan scale": (_with([1.0, math.nan], "rounds", "scales"), "scales"),
    "infinite scale": (_with([1.0, math.inf], "rounds", "scales"), "scales"),
    "negative scale": (_with([1.0, -1.0], "rounds", "scales"), "scales"),
    "scales of text": (_with(["a", "b"], "rounds", "scales"), "cannot be loaded"),
    "scales of nothing": (_with(None, "rounds", "scales"), "cannot be loaded"),
    "nan velocity": (_with({"velocity": [math.nan, 0.0]}, "rounds", "controller"), "must be finite numbers of shape"),
    "short velocity": (_with({"velocity": [0.0]}, "rounds", "controller"), "must be finite numbers of shape"),
    "other controller": (_with({"slope": [0.0, 0.0]}, "rounds", "controller"), "made with another controller"),
    "past the end": (_with(TOTAL_STEPS + 1, "last_epoch"), rf"last_epoch must be in \[.*{TOTAL_STEPS}\], but got"),
    "last_epoch of nothing": (_with(None, "last_epoch"), "cannot be loaded"),
    "last_epoch of text": (_with("eight", "last_epoch"), "cannot be loaded"),
    "rounds of text": (_with("rounds", "rounds"), "cannot be loaded"),
    "negative round": (_with(-1, "rounds", "round"), "cannot be loaded"),
    "negative seed": (_with(-1, "rounds", "seed"), "cannot be loaded"),
    "total_steps of text": (_with("many", "schedule", "total_steps"), "cannot be loaded"),
    "phases of nothing": (_with(None, "schedule", "_schedule_phases"), "cannot be loaded"),
    "no phases": (_with([], "schedule", "_schedule_phases"), "cannot be loaded"),
    "phases of text": (_with(["rise", "fall"], "schedule", "_schedule_phases"), "cannot be loaded"),
    "unknown annealing": (_with("steps", "schedule", "_anneal_func_type"), "cannot be loaded"),
    "base_lrs of nothing": (_with(None, "schedule", "base_lrs"), "cannot be loaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name: str) -> None:
    edit, text = BROKEN[name]
    run = _alone()
    run.advance(5)
    other = _alone()
    other.advance(9)
    broken = copy.deepcopy(other.scheduler.state_dict())
    edit(broken)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups])
    state = copy.deepcopy(run.scheduler.state_dict())
    factors = list(run.scheduler._run.lrs.factors)
    last = list(run.scheduler.get_last_lr())
    try:
        with pytest.raises(ValueError, match=text):
            run.scheduler.load_state_dict(broken)
    finally:
        assert [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups] == groups
        assert repr(run.scheduler.state_dict()) == repr(state)
        assert run.scheduler._run.lrs.factors == factors
        assert run.scheduler.get_last_lr() == last
    twin = _alone()
    twin.advance(5)
    assert run.advance(8) == twin.advance(8)


def test_a_broken_state_of_torch_is_refused() -> None:
    run = _alone()
    theirs = OneCycleLR(_alone().optimizer, 0.1, 40).state_dict()
    theirs["_step_count"] = "many"
    with pytest.raises(ValueError, match="step_count must be an integer >= 0, but got 'many'"):
        run.scheduler.load_state_dict(theirs)


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_at_all_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="state"):
        _alone().scheduler.load_state_dict(state)
