"""docs/theory.md, "A short horizon is greedy" and "Optimism": a noisy quadratic with a flat and a steep direction."""

from __future__ import annotations

import numpy as np
import pytest

from hdet.checks import FloatArray

STEEP, FLAT = 1.0, 0.001
NOISE, FAR = 0.3, 100.0  # of the gradient in the steep direction; distance left in the flat one


def signal(lr: float, horizon: int) -> float:
    """E <g, theta_t - theta_(t-m)>: h Var (1 - q^m) at rest in the steep direction, -h^2 x^2 eta m in the flat one."""
    q = 1 - lr * STEEP
    variance = lr * NOISE**2 / (STEEP * (2 - lr * STEEP))
    gain = (FLAT * FAR) ** 2 * lr * horizon
    return float(STEEP * variance * (1 - q**horizon) - gain)


def zero(horizon: int, level: float = 0.0) -> float:
    """The learning rate below 1 at which the signal comes to ``level`` from below; 1 where it never does."""
    lrs = np.geomspace(1e-4, 1.0, 4000)
    above = [lr for lr in lrs if signal(float(lr), horizon) >= level]
    return float(above[0]) if above else 1.0


def test_the_signal_of_a_horizon_in_closed_form() -> None:
    lr, horizon, num_runs = 0.1, 5, 50_000
    generator = np.random.default_rng(0)
    steep, flat = np.zeros(num_runs), np.full(num_runs, FAR)
    for step in range(80 + horizon):
        if step == 80:
            old = steep.copy(), flat.copy()
        steep = steep - lr * (STEEP * steep + NOISE * generator.standard_normal(num_runs))
        flat = flat - lr * FLAT * flat
    measured = (STEEP * steep * (steep - old[0])).mean() + (FLAT * flat * (flat - old[1])).mean()
    assert measured == pytest.approx(signal(lr, horizon), rel=0.1)


def test_one_step_asks_for_a_smaller_learning_rate_than_many() -> None:
    found = [zero(horizon) for horizon in (1, 3, 10, 30)]
    exact = 2 * (FLAT * FAR) ** 2 / (STEEP * (NOISE**2 + (FLAT * FAR) ** 2))
    assert found[0] == pytest.approx(exact, rel=0.01)
    assert found == sorted(found)
    assert found[-1] > 3 * found[0]


def test_from_some_horizon_on_the_gain_outweighs_the_noise_at_every_learning_rate() -> None:
    """The noise saturates at s^2 eta / (2 - eta h), the gain grows with m."""
    enough = int(np.ceil(NOISE**2 / (FLAT * FAR) ** 2)) + 1
    assert zero(enough) == 1.0
    assert zero(2) < 1.0


def final_losses(lrs: FloatArray, num_steps: int) -> FloatArray:
    """Expected loss after a linear decay to 0, both directions exactly, by their first two moments."""
    steep, flat = np.zeros_like(lrs), np.full_like(lrs, FAR)
    for step in range(num_steps):
        rates = lrs * (1 - step / num_steps)
        steep = (1 - rates * STEEP) ** 2 * steep + rates**2 * NOISE**2
        flat = (1 - rates * FLAT) * flat
    return 0.5 * STEEP * steep + 0.5 * FLAT * flat**2


def test_the_greedy_learning_rate_is_several_times_below_the_best_of_a_run_that_decays() -> None:
    lrs = np.geomspace(0.01, 1.9, 200)
    losses = final_losses(lrs, 1000)
    best = float(lrs[losses.argmin()])
    # Greedy all along: what one step asks for, at the distance that is left.
    distance, loss_of_noise = FAR, 0.0
    for _ in range(1000):
        slope = (FLAT * distance) ** 2
        lr = 2 * slope / (STEEP * (NOISE**2 + slope))
        distance *= 1 - lr * FLAT
        loss_of_noise = 0.5 * STEEP * lr * NOISE**2 / (STEEP * (2 - lr * STEEP))
    greedy = 0.5 * FLAT * distance**2 + loss_of_noise
    assert best > 5 * lr
    assert greedy > 1.5 * losses.min()


def _settled(optimism: float, error: float, horizon: int = 3) -> float:
    """Where Eq. 12 comes to rest: log s <- log s - 0.1 (z - z0) / 2 with z the signal over its standard error."""
    log_lr = np.log(0.01)
    for _ in range(3000):
        z = signal(float(np.exp(log_lr)), horizon) / error
        log_lr = min(log_lr + np.clip(-0.1 * (z - optimism) / 2, -0.5, 0.2), 0.0)
    return float(np.exp(log_lr))


def test_optimism_moves_the_rest_to_where_the_slope_is_that_many_standard_errors() -> None:
    error = 1e-3
    found = [_settled(optimism, error) for optimism in (0.0, 1.0, 2.0)]
    assert found == sorted(found)
    assert found[2] > 1.05 * found[0]
    for optimism, lr in zip((0.0, 1.0, 2.0), found, strict=True):
        assert signal(lr, 3) == pytest.approx(optimism * error, abs=1e-6)
    # With more samples the same optimism is less: it is counted in standard errors.
    assert _settled(2.0, error / 10) < found[2]
