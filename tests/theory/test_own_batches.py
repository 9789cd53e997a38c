"""docs/theory.md, "Losses of own batches": the paper's Delta (Eq. 4 to 6) where each loss has its own noise."""

from __future__ import annotations

import numpy as np
import pytest

from hdet.checks import FloatArray
from hdet.ensemble.controllers.paper import softmax_weights
from hdet.policy.spread import multipliers

N, DRAWS = 8, 100_000
RHO = multipliers(N, 1 / 9)
LARGEST = 1.4236  # the expected largest of eight standard normal numbers


def delta(losses: FloatArray, temperature: float, noise: FloatArray | float) -> tuple[float, float]:
    """Mean of Delta over draws of the noise, and its standard error."""
    drawn = losses + noise * np.random.default_rng(0).standard_normal((DRAWS, N))
    scores = np.exp((drawn.min(1, keepdims=True) - drawn) / temperature)
    found = (scores / scores.sum(1, keepdims=True)) @ (RHO - RHO.mean())
    return float(found.mean()), float(found.std() / np.sqrt(DRAWS))


def covariance(losses: FloatArray) -> float:
    return float((RHO - RHO.mean()) @ losses / N)


def test_the_vector_form_is_the_controllers() -> None:
    losses = np.linspace(1.0, 1.01, N)
    assert delta(losses, 0.01, 0.0)[0] == pytest.approx(softmax_weights(losses, 0.01) @ (RHO - RHO.mean()))


def test_noise_that_is_alike_moves_nothing_on_average() -> None:
    for temperature in (0.002, 0.1):
        mean, error = delta(np.full(N, 2.0), temperature, 0.05)
        assert abs(mean) < 4 * error


def test_small_noise_adds_half_its_covariance_with_the_multiplier() -> None:
    losses, noise = 0.003 * (RHO - 1), 0.02 * (1 + 3 * (RHO - 1))
    mean, error = delta(losses, 0.1, noise)
    expected = -covariance(losses) / 0.1 + (1 - 2 / N) * covariance(noise**2) / (2 * 0.1**2)
    assert mean == pytest.approx(expected, abs=4 * error, rel=0.05)
    assert expected > 0 > -covariance(losses)  # what is noisier is preferred, against the slope


def test_noise_above_the_temperature_takes_its_place() -> None:
    losses, noise = 0.05 * (RHO - 1), 0.1
    mean, error = delta(losses, 0.002, noise)
    assert mean == pytest.approx(-N / (N - 1) * LARGEST * covariance(losses) / noise, abs=4 * error)
    assert abs(mean) < 0.05 * covariance(losses) / 0.002
