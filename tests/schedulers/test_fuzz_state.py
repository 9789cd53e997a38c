"""A few hundred of the mutations of ``fuzz_state.py``, in one process and on two replicas that are apart."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fuzz_state
from job import launch


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return fuzz_state.states_of(fuzz_state.ALONE)


@pytest.mark.slow
def test_mutated_states_are_refused_or_continued_from(alone: list[dict[str, Any]]) -> None:
    counts = fuzz_state.fuzz(fuzz_state.ALONE, [alone], 200, seed=2)
    assert counts["refused"] > 100
    assert counts["loaded"] > 20


def test_a_state_as_it_was_is_loaded(alone: list[dict[str, Any]]) -> None:
    """The fuzzer would not notice a loader that refuses everything."""
    for number, kind in enumerate(fuzz_state.ALONE):
        for state in alone[3 * number : 3 * number + 3]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                subject = fuzz_state.Subject(kind, 7)
            subject.scheduler.load_state_dict(state)
            subject.two_rounds()


@pytest.mark.slow
def test_on_replicas_that_are_apart() -> None:
    for counts in launch(fuzz_state.fuzz_apart, 2, [], 60, 3, timeout_s=150):
        assert counts["refused"] > 27
        assert counts["loaded"] > 4
