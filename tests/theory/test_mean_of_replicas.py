"""docs/theory.md, "The line" and "How far apart": where replicas are, and what their mean is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hdet.policy.spread import multipliers

Loss = Callable[[Tensor], Tensor]
LR, NUM_REPLICAS = 0.05, 4


def _gradient(loss: Loss, at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at)
    return gradient


def quartic(theta: Tensor) -> Tensor:
    return (theta.square() * torch.tensor([1.0, 3.0, 0.3], dtype=torch.float64) + theta**4).sum()


def quadratic(theta: Tensor) -> Tensor:
    return (theta.square() * torch.tensor([1.0, 3.0, 0.3], dtype=torch.float64)).sum()


START = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


def _round(loss: Loss, spread: float, num_steps: int, make: Callable[[list[Tensor], float], Any]) -> Tensor:
    """(N, d): replicas after one round on their mean gradient."""
    rho = multipliers(NUM_REPLICAS, spread)
    replicas = [START.clone() for _ in rho]
    optimizers = [make([theta], LR * float(each)) for theta, each in zip(replicas, rho, strict=True)]
    for _ in range(num_steps):
        gradient = torch.stack([_gradient(loss, theta) for theta in replicas]).mean(0)
        for theta, optimizer in zip(replicas, optimizers, strict=True):
            theta.grad = gradient.clone()
            optimizer.step()
    return torch.stack(replicas)


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], Any]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_lie_on_a_line_through_their_start_and_their_mean_has_multiplier_1(name: str) -> None:
    spread = 0.5
    replicas = _round(quartic, spread, 10, OPTIMIZERS[name])
    rho = torch.from_numpy(multipliers(NUM_REPLICAS, spread))
    mean = replicas.mean(0)
    assert (mean - START).norm() > 0.1
    torch.testing.assert_close(replicas, START + rho[:, None] * (mean - START), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_on_a_quadratic_the_mean_is_the_plain_run(name: str) -> None:
    plain = _round(quadratic, 0.0, 10, OPTIMIZERS[name])[0]
    torch.testing.assert_close(_round(quadratic, 0.5, 10, OPTIMIZERS[name]).mean(0), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elsewhere_the_mean_leaves_the_plain_run_by_the_square_of_the_spread(name: str) -> None:
    plain = _round(quartic, 0.0, 10, OPTIMIZERS[name])[0]
    off = [float((_round(quartic, a, 10, OPTIMIZERS[name]).mean(0) - plain).norm()) for a in (0.02, 0.04)]
    assert off[1] / off[0] == pytest.approx(4, rel=0.05)


def test_with_local_gradients_replicas_stay_within_the_bound_and_so_does_the_mean_gradient() -> None:
    """|theta_r - mean| <= 2 (1 - 1/N) (1 + alpha) eta T G; |mean of gradients - gradient of mean| <= L times that."""
    generator = np.random.default_rng(0)
    eigenvalues = np.array([1.0, 0.3, 0.1])
    num_steps, spread, lr = 20, 0.2, 0.05
    rho = multipliers(NUM_REPLICAS, spread)[:, None]
    theta = np.tile([1.0, -1.0, 2.0], (NUM_REPLICAS, 1))
    largest = 0.0
    for _ in range(num_steps):
        gradients = np.tanh(theta) * eigenvalues + 0.3 * generator.uniform(-1, 1, theta.shape)
        largest = max(largest, float(np.linalg.norm(gradients, axis=1).max()))
        theta = theta - lr * rho * gradients
    bound = 2 * (1 - 1 / NUM_REPLICAS) * (1 + spread) * lr * num_steps * largest
    apart = np.linalg.norm(theta - theta.mean(0), axis=1)
    assert 0.01 * bound < apart.max() <= bound
    slope = np.linalg.norm((np.tanh(theta) * eigenvalues).mean(0) - np.tanh(theta.mean(0)) * eigenvalues)
    assert 0 < slope <= eigenvalues.max() * apart.mean()


@pytest.mark.parametrize("num_steps", [1, 10, 100])
def test_with_local_gradients_on_a_noisy_quadratic_their_variance_is_known(num_steps: int) -> None:
    """Of one replica around the mean of N: (1 - 1/N) eta^2 s^2 (1 - q^(2T)) / (1 - q^2), q = 1 - eta h."""
    lr, curvature, noise, num_runs = 0.1, 0.5, 1.0, 4000
    generator = np.random.default_rng(1)
    theta = np.zeros((num_runs, NUM_REPLICAS))
    for _ in range(num_steps):
        theta -= lr * (curvature * theta + noise * generator.standard_normal(theta.shape))
    q = 1 - lr * curvature
    expected = (1 - 1 / NUM_REPLICAS) * lr**2 * noise**2 * (1 - q ** (2 * num_steps)) / (1 - q**2)
    measured = np.square(theta - theta.mean(1, keepdims=True)).mean()
    assert measured == pytest.approx(expected, rel=0.05)
