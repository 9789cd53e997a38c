"""A mean of where a setting has been, later values counting more."""

from __future__ import annotations

import numpy as np
import pytest

from hdet.policy.settled import Settled


def test_the_weights_are_squares() -> None:
    values = np.random.default_rng(0).normal(size=(200, 2))
    settled = Settled()
    for row in values:
        settled.add(row)
    weights = np.arange(1, 201) * np.arange(2, 202) / 2  # t (t + 1) / 2: squares, but for the first ones
    found = settled.take()
    assert found is not None
    np.testing.assert_allclose(found, (weights[:, None] * values).sum(0) / weights.sum())


def test_it_is_taken_once() -> None:
    settled = Settled()
    assert settled.take() is None
    settled.add(np.array([3.0]))
    assert settled.take() == pytest.approx([3.0])
    assert settled.take() is None


def test_more_values_begin_again() -> None:
    settled = Settled()
    settled.add(np.array([3.0]))
    settled.add(np.array([1.0, 2.0]))
    assert settled.num == 1
    assert settled.take() == pytest.approx([1.0, 2.0])


def test_it_is_resumed() -> None:
    settled, other = Settled(), Settled()
    for value in (1.0, 2.0, 4.0):
        settled.add(np.array([value]))
    other.load_state_dict(settled.state_dict())
    for each in (settled, other):
        each.add(np.array([0.0]))
    assert settled.mean == other.mean
    with pytest.raises(ValueError, match="mean must"):
        Settled.check_state({"num": 1, "mean": "much"})
