"""docs/theory.md, "Convergence": what holds whatever a controller does inside its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from hdet.checks import FloatArray
from hdet.policy.spread import multipliers

NUM_REPLICAS, SPREAD = 4, 0.5
GENERATOR = np.random.default_rng(0)
FEATURES = GENERATOR.standard_normal((60, 5))
LABELS = (FEATURES @ GENERATOR.standard_normal(5) + GENERATOR.standard_normal(60) > 0).astype(float)
RIDGE = 0.05
SMOOTHNESS = float(np.linalg.eigvalsh(FEATURES.T @ FEATURES / 60).max() / 4 + RIDGE)


def loss(theta: FloatArray) -> float:
    """Ridge logistic regression: strongly convex by RIDGE, smooth by SMOOTHNESS, no quadratic."""
    scores = FEATURES @ theta
    return float(np.logaddexp(0, scores).mean() - LABELS @ scores / 60 + RIDGE / 2 * theta @ theta)


def gradient(theta: FloatArray) -> FloatArray:
    found: FloatArray = FEATURES.T @ (1 / (1 + np.exp(-FEATURES @ theta)) - LABELS) / 60 + RIDGE * theta
    return found


def bumpy(theta: FloatArray) -> float:
    """Smooth by 2 and not convex."""
    return float((1 - np.cos(theta)).sum() + 0.5 * np.square(theta - 1).sum())


def bumpy_gradient(theta: FloatArray) -> FloatArray:
    found: FloatArray = np.sin(theta) + theta - 1
    return found


def _optimum() -> float:
    theta = np.zeros(5)
    for _ in range(5000):
        theta = theta - gradient(theta) / SMOOTHNESS
    return loss(theta)


def _hdet(gradient_of: object, start: FloatArray, steps: FloatArray, interval: int) -> list[FloatArray]:
    """Means of replicas on their mean gradient, averaged every ``interval`` steps, permuted; steps as told."""
    generator = np.random.default_rng(1)
    rho = multipliers(NUM_REPLICAS, SPREAD)
    replicas = np.tile(start, (NUM_REPLICAS, 1))
    means = [start]
    for index, step in enumerate(steps):
        mean = np.mean([gradient_of(theta) for theta in replicas], axis=0)  # type: ignore[operator]
        replicas = replicas - step * rho[:, None] * mean
        means.append(replicas.mean(0))
        if (index + 1) % interval == 0:
            replicas = np.tile(replicas.mean(0), (NUM_REPLICAS, 1))
            rho = generator.permutation(rho)
    return means


def _any_controller(highest: float, num_steps: int, interval: int, seed: int) -> FloatArray:
    """The worst of controllers: a scale at random between a tenth of the bound and the bound, new in each round."""
    generator = np.random.default_rng(seed)
    scales = highest * 10 ** -generator.uniform(0, 1, num_steps // interval + 1)
    return np.repeat(scales, interval)[:num_steps]


def _largest_step(smoothness: float, interval: int, strong: float = 0.0) -> float:
    """gamma L <= 1/2 and (alpha L T gamma)^2 exp(2 mu gamma T) <= 1/2."""
    step = 0.5 / smoothness
    while (SPREAD * smoothness * interval * step) ** 2 * np.exp(2 * strong * step * interval) > 0.5:
        step *= 0.99
    return float(step)


@pytest.mark.parametrize("interval", [1, 5, 20])
def test_on_a_smooth_loss_the_gradients_vanish_at_the_promised_rate(interval: int) -> None:
    """Sum of gamma |grad f(mean)|^2 <= 2 (f(start) - f*)."""
    start = np.array([6.0, -5.0, 3.0])
    steps = _any_controller(_largest_step(2.0, interval), 400, interval, seed=2)
    means = _hdet(bumpy_gradient, start, steps, interval)
    spent = sum(s * np.square(bumpy_gradient(m)).sum() for s, m in zip(steps, means, strict=False))
    assert 0.1 * bumpy(start) < spent <= 2 * bumpy(start)  # f* >= 0
    smallest = min(np.square(bumpy_gradient(m)).sum() for m in means[:-1])
    assert smallest <= 2 * bumpy(start) / steps.sum()


@pytest.mark.parametrize("interval", [1, 5, 20])
def test_on_a_strongly_convex_loss_it_converges_linearly(interval: int) -> None:
    """F(mean) - f* <= product of (1 - mu gamma) times the same at the start, at the end of every round."""
    steps = _any_controller(_largest_step(SMOOTHNESS, interval, RIDGE), 400, interval, seed=3)
    means = _hdet(gradient, np.full(5, 2.0), steps, interval)
    optimum = _optimum()
    first = loss(means[0]) - optimum
    for end in range(interval, 401, interval):
        assert loss(means[end]) - optimum <= np.prod(1 - RIDGE * steps[:end]) * first + 1e-12
    assert loss(means[-1]) - optimum < 0.05 * first


def test_with_noise_it_converges_to_a_ball() -> None:
    """At a constant step: E f - f* <= (1 - mu gamma)^t first + gamma L s^2 / (2 mu), s^2 the variance of the mean."""
    generator = np.random.default_rng(4)
    noise, interval = 0.1, 5
    step = _largest_step(SMOOTHNESS, interval, RIDGE)

    def noisy(theta: FloatArray) -> FloatArray:
        found: FloatArray = gradient(theta) + noise * generator.standard_normal(5)
        return found

    means = _hdet(noisy, np.full(5, 2.0), np.full(1500, step), interval)
    excess = float(np.mean([loss(mean) for mean in means[1000:]])) - _optimum()
    ball = step * SMOOTHNESS * 5 * noise**2 / NUM_REPLICAS / (2 * RIDGE)
    assert 1e-3 * ball < excess <= ball


def test_without_the_bound_a_round_can_end_away_from_the_minimum() -> None:
    """The condition on alpha T is no artefact: the mean stops where the gradients of replicas far apart cancel."""

    def end(spread: float) -> float:
        rho = multipliers(2, spread)
        replicas = np.array([3.0, 3.0])
        for _ in range(1000):
            gradients = replicas + 20 * np.minimum(replicas, 0)  # steep on one side, its smoothness 21
            replicas = replicas - 0.02 * rho * gradients.mean()
        return abs(float(replicas.mean()))

    assert end(0.0) < 1e-6
    assert end(0.9) > 0.1
