"""Runs of every kind give the learning rates, records and weights that they gave before: see ``golden.py``."""

from __future__ import annotations

import json
from typing import Any

import pytest

import golden

pytestmark = pytest.mark.timeout(600)  # all runs are made in the first test

STORED = json.loads(golden.PATH.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return golden.trajectories()


@pytest.mark.parametrize("name", [*golden.ALONE, *golden.TOGETHER])
def test_trajectory(found: dict[str, Any], name: str) -> None:
    now, before = found["trajectories"][name], STORED["trajectories"][name]
    if found["fingerprint"] == STORED["fingerprint"]:
        assert now == before
        return
    rates = [[[float.fromhex(lr) for lr in row] for row in each["sampled"]] for each in (now, before)]
    for row, expected in zip(*rates, strict=True):
        assert row == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", list(STORED["state_keys"]))
def test_names_in_a_state(found: dict[str, Any], name: str) -> None:
    assert found["state_keys"][name] == STORED["state_keys"][name]
