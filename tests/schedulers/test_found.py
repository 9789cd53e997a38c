"""What a run has found, and the cooldown of a run that nobody knew the length of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hdet import Found
from level_run import TOTAL_STEPS, Run, make_optimizer, net

pytestmark = pytest.mark.filterwarnings("ignore:the round that ended at step", "ignore:.* rounds of this run were")


def test_before_the_first_round_has_ended_there_is_nothing() -> None:
    run = Run("adam")
    assert str(run.scheduler.found()) == "nothing yet: no round has ended"
    with pytest.raises(ValueError, match="there is no curve to replay: nothing yet: no round has ended"):
        run.scheduler.found().as_schedule(run.optimizer)
    run.step()
    assert run.scheduler.found().total_steps == TOTAL_STEPS
    assert run.scheduler.found().lrs


def test_a_plain_schedule_gives_the_same_learning_rates_again() -> None:
    run = Run("adam", total_steps=200)
    lrs = [run.lrs()[0], *(row[0][0] for row in run.advance(200))]
    found = run.scheduler.found()
    assert found.peak_lrs[0] == pytest.approx(max(lrs), rel=0.1)
    optimizer = make_optimizer("adam", net().parameters(), 7.0)
    schedule = found.as_schedule(optimizer)
    assert isinstance(schedule, LambdaLR)
    interval = run.scheduler._run.policy.interval
    for step in range(200 - found.steps[0]):
        at = step + found.steps[0]
        near = lrs[max(at - interval, 0) : at + interval + 1]
        assert 0.99 * min(near) <= schedule.get_last_lr()[0] <= 1.01 * max(near), step
        optimizer.step()
        schedule.step()
    other = found.as_schedule(make_optimizer("sgd", net().parameters()), total_steps=1000)
    stretched = [other.lr_lambdas[0](step) for step in range(0, 1001, 100)]
    assert max(stretched) <= 1
    assert stretched[-1] == pytest.approx(found.lrs[-1][0] / found.peak_lrs[0])


def test_learning_rates_of_the_search_are_no_part_of_it() -> None:
    """One of them may be the highest of the run, where a first guess was too low to measure."""
    run = Run("sgd")
    rates = [row[0][0] for row in run.advance(60)]
    assert run.scheduler.found().steps[0] == run.scheduler._run.policy.searched >= 4
    assert run.scheduler.found().peak_lrs[0] == pytest.approx(max(rates[4:]), rel=1e-6)


def test_a_resumed_run_has_found_the_same() -> None:
    run = Run("adam")
    run.advance(60)
    resumed = Run("adam")
    resumed.load(run.saved())
    assert resumed.scheduler.found() == run.scheduler.found()
    run.advance(100)
    resumed.advance(100)
    assert resumed.scheduler.found() == run.scheduler.found()


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    run = Run("adam")
    for until in (3, 100):
        run.advance(until)
        found = run.scheduler.found()
        found.save(tmp_path / "found.json")
        assert Found.load(tmp_path / "found.json") == found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "format must be 'hdet.Found 1', but got 'other'"),
        ({"steps": "many"}, "steps must be"),
        ({"lrs": [[-1.0], [0.1]]}, "lrs must be"),
        ({"lrs": 3}, "must be a file of Found.save"),
        ({"total_steps": -1}, "total_steps must be"),
        ({"names": None}, "must be a file of Found.save"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "found.json"
    Found(("all",), (0, 10), ((0.0,), (0.1,)), 10).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=text):
        Found.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"must be a file of Found\.save"):
        Found.load(path)


# -- cooldown -------------------------------------------------------------------------------------------------------


def test_a_cooldown_ends_a_run_of_unknown_length() -> None:
    run = Run("adam", total_steps=None)
    assert math.isinf(run.scheduler.total_steps)
    run.advance(100)
    with pytest.raises(ValueError, match="steps must be an integer >= 1, but got steps=0"):
        run.scheduler.cooldown(0)
    begun, peak = run.scheduler.last_epoch, run.lrs()[0]
    run.scheduler.cooldown(40)
    lrs = [row[0][0] for row in run.advance(begun + 20)]
    assert lrs == pytest.approx([peak * (1 - k / 40) for k in range(1, 21)])
    run.scheduler.cooldown(10)  # on the way: it goes on from there, faster
    lrs = [row[0][0] for row in run.advance(begun + 30)]
    assert lrs == pytest.approx([peak / 2 * (1 - k / 10) for k in range(1, 11)], abs=1e-15)
    assert run.scheduler._run.finished
    assert run.scheduler.found().total_steps == begun + 30
    with pytest.raises(RuntimeError, match=r"cooldown\(\) must be called before training ends, but it has ended"):
        run.scheduler.cooldown(10)
    assert run.loss().item() < 0.5


def test_a_cooldown_is_resumed_and_a_state_from_before_takes_it_back() -> None:
    run = Run("adam", total_steps=None)
    run.advance(60)
    before = run.saved()
    run.scheduler.cooldown(60)
    run.advance(80)
    state, rows = run.saved(), run.advance(120)
    resumed = Run("adam", total_steps=None)
    resumed.load(state)
    assert resumed.advance(120) == rows
    assert resumed.scheduler._run.finished
    for again in (run, resumed, Run("adam", total_steps=None)):
        again.load(before)
        assert math.isinf(again.scheduler.total_steps)
        assert again.lrs() == [before["optimizer"]["param_groups"][0]["lr"]]
        again.advance(130)
        assert again.scheduler.history[-1].phase == "level"
    assert run.lrs() == again.lrs()


def test_a_one_cycle_is_cooled_down_before_its_end() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    run = Run(model=model, optimizer=optimizer, schedule=lambda o: OneCycleLR(o, 1e-3, TOTAL_STEPS))
    run.advance(200)
    with pytest.raises(ValueError, match="steps must be at most 200, where the OneCycleLR ends, but got steps=201"):
        run.scheduler.cooldown(201)
    run.scheduler.cooldown(20)
    run.advance(220)
    assert run.lrs() == [0.0]
    assert run.scheduler._run.finished
