"""Means of samples in which old ones fade, against a slow version of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hdet.checks import FloatArray
from hdet.policy.decayed_mean import DecayedMean

FADE = 0.8


def filled(num: int) -> tuple[DecayedMean, FloatArray]:
    """After so many samples of three columns, one of which never changes; and the samples."""
    samples = np.random.default_rng(0).normal(2.0, 1.0, (num, 3))
    samples[:, 2] = -1.0
    found = DecayedMean(3, FADE)
    for sample in samples:
        found.add(sample)
        found.add(np.array([1.0, math.nan, 1.0]))  # tells nothing
    return found, samples


@pytest.mark.parametrize("num", [2, 3, 30])
def test_it_is_the_slow_version(num: int) -> None:
    found, samples = filled(num)
    weights = FADE ** np.arange(num)[::-1]
    mean = np.average(samples, axis=0, weights=weights)
    worth = weights.sum() ** 2 / (weights**2).sum()
    variance = np.average((samples - mean) ** 2, axis=0, weights=weights)
    assert found.num == pytest.approx(worth)
    assert_allclose(found.mean, mean)
    assert_allclose(found.error, np.sqrt(variance / (worth - 1)), atol=1e-7)
    assert_allclose(found.z[:2], mean[:2] / found.error[:2])
    assert found.z[2] == -1e6  # as sure as a number can say


def test_one_sample_tells_no_error() -> None:
    assert filled(0)[0].num == 0
    assert np.isnan(filled(0)[0].mean).all()
    found, samples = filled(1)
    assert_allclose(found.mean, samples[0])
    assert np.isinf(found.error).all()
    assert not found.z.any()
    found, _ = filled(5)
    found.forget()
    assert found.num == 0


def test_it_continues_from_its_state() -> None:
    (found, _), again = filled(40), DecayedMean(3, FADE)
    state = json.loads(json.dumps(found.state_dict()))
    again.check_state(state)
    again.load_state_dict(state)
    for each in (found, again):
        each.add(np.ones(3))
    assert found.state_dict() == again.state_dict()
    with pytest.raises(ValueError, match="sums must be 2 x 3 finite numbers"):
        again.check_state({**state, "sums": [[0.0] * 3] * 3})
    for weights in ([-0.1, 1.0], [1.0, 1 / (1 - FADE) + 0.1], [1.0] * 3):
        with pytest.raises(ValueError, match="weights must be 2 finite numbers"):
            again.check_state({**state, "weights": weights})
