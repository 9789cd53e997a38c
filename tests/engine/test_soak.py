"""A few scenarios of the soak, and proof that it would notice if something went wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hdet.testing import Fault
from soak import judge, soak, summary
from soak_scenarios import INTERVAL, NUM_STEPS, OPTIONS, STORIES, Scenario, draw

SHORT = (
    *("NaN weights once", "NaN gradient once", "explosion", "skipped step", "error", "kill and restart"),
    *("resume on another number", "several"),
)


@pytest.mark.slow
def test_eight_scenarios() -> None:
    found = list(soak(draw(7, STORIES.index(story)) for story in SHORT))
    assert [f"{scenario}: {text}" for scenario, _, text in found if text] == []
    assert summary(found).row_count == len(STORIES) + 1


def test_scenarios_are_drawn_from_their_seed_and_cover_everything() -> None:
    drawn = [draw(0, index) for index in range(200)]
    assert drawn == [draw(0, index) for index in range(200)]
    assert {scenario.story for scenario in drawn} == set(STORIES)
    assert {scenario.num_replicas for scenario in drawn} == {2, 3, 4}
    assert {scenario.face for scenario in drawn} == {"paper", "loss", "gradient", "explorer", "local sgd"}
    assert {(scenario.gradients, scenario.adam) for scenario in drawn} == {
        (gradients, adam) for gradients in ("shared", "local") for adam in (False, True)
    }
    assert {scenario.options for scenario in drawn} == set(OPTIONS)
    assert all(fault.replica < s.num_replicas and fault.step <= NUM_STEPS for s in drawn for fault in s.faults)


FAULTY = Scenario(0, "NaN weights once", 2, "local", "paper", False, (Fault("nan_weights", 1, 6),))
LOST = Scenario(0, "error", 2, "local", "paper", False, (Fault("error", 1, 6),))
CALM = Scenario(0, "nothing", 2, "shared", "paper", False)


def _results(scenario: Scenario) -> list[dict[str, Any]]:
    """What a good run of a scenario tells, by replica."""
    if scenario is LOST:
        text = "RuntimeError: replica 0 lost the others at the converge of step 8; last converge reached by x: {1: 4}"
        error = {"error": "InjectedError: injected into replica 1 in step 6", "rounds": [4]}
        return [{"error": text, "rounds": [4]}, error]
    faulty = {8: (1,)} if scenario is FAULTY else {}
    records = [(step, (1.0, 1.0), faulty.get(step, ()), 0, ()) for step in range(INTERVAL, NUM_STEPS + 1, INTERVAL)]
    result = {"weights": {"w": torch.ones(2)}, "step": NUM_STEPS, "records": records}
    return [copy.deepcopy({**result, "undisturbed": result}) for _ in range(2)]


@pytest.mark.parametrize("scenario", [FAULTY, LOST, CALM], ids=lambda s: s.story)
def test_a_good_run_is_good(scenario: Scenario) -> None:
    expected = {"NaN weights once": "one model", "error": "error, as promised", "nothing": "as undisturbed"}
    assert judge(scenario, _results(scenario)) == expected[scenario.story]


def _set(key: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda results: results[1].update({key: value})


def _all(key: str, value: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda results: [result.update({key: value}) for result in results]


BAD: list[tuple[Scenario, Callable[[list[dict[str, Any]]], Any], str]] = [
    (FAULTY, _set("weights", {"w": torch.full((2,), 1.5)}), "w differs between replicas 0 and 1, by up to 0.5"),
    (FAULTY, _all("weights", {"w": torch.tensor([1.0, math.inf])}), "weights must be finite"),
    (FAULTY, _all("step", NUM_STEPS - 1), r"replicas took \[27, 27\] steps"),
    (FAULTY, _all("records", []), r"rounds ended at \[\]"),
    (FAULTY, _all("records", _results(CALM)[0]["records"]), r"unhealthy replicas on record: \[\(\)\]"),
    (FAULTY, _set("records", _results(CALM)[0]["records"]), "replicas must keep the same record"),
    (FAULTY, _all("error", "RuntimeError: training broke again at step 8 after 20 rollbacks"), "nothing here is worth"),
    (LOST, _set("error", "KeyError: 'w'"), "KeyError"),
    (LOST, lambda results: results[1].pop("error"), "1 of 2 replicas know of it"),
    (LOST, _all("rounds", [4, 8]), r"unequal steps were averaged at steps \[8, 8\]"),
    (CALM, _all("undisturbed", {"weights": {"w": torch.zeros(2)}}), "w differs between replicas 0 and 1"),
    (CALM, _all("records", _results(FAULTY)[0]["records"]), "nobody was faulty"),
]


@pytest.mark.parametrize(("scenario", "spoil", "text"), BAD)
def test_a_bad_one_is_not(scenario: Scenario, spoil: Callable[[list[dict[str, Any]]], Any], text: str) -> None:
    results = _results(scenario)
    spoil(results)
    with pytest.raises(AssertionError, match=text):
        judge(scenario, results)
