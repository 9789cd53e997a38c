"""docs/theory.md, "The slope" and "What it leaves out": the first-order signal, and the derivative of the whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

EIGENVALUES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
START = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def _loss(theta: Tensor) -> Tensor:
    return 0.5 * (EIGENVALUES * theta.square()).sum() + 0.1 * (theta**4).sum()


def _run(log_lr: Tensor, num_steps: int, loss_of: object = _loss) -> Tensor:
    """Gradient descent that can be differentiated by the logarithm of its learning rate."""
    theta = START.clone().requires_grad_()
    for _ in range(num_steps):
        (gradient,) = torch.autograd.grad(loss_of(theta), theta, create_graph=True)  # type: ignore[operator]
        theta = theta - log_lr.exp() * gradient
    return theta


def test_the_slope_is_the_derivative_along_the_line_by_the_log_of_the_learning_rate() -> None:
    end = _run(torch.tensor(-3.0, dtype=torch.float64), 20).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(end), end)
    way = end.detach() - START
    log_rho = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(_loss(START + log_rho.exp() * way), log_rho)
    assert derivative.item() != 0
    assert torch.isclose(gradient @ way, derivative, rtol=1e-12)


def test_losses_on_the_line_give_the_same_number_as_the_spread_goes_to_zero() -> None:
    end = _run(torch.tensor(-3.0, dtype=torch.float64), 20).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(end), end)
    way = end.detach() - START
    exact = (gradient @ way).item()
    errors = []
    for spread in (0.2, 0.1):
        rho = 1 + spread * torch.linspace(-1, 1, 5, dtype=torch.float64)
        losses = torch.stack([_loss(START + r * way) for r in rho])
        slope = ((rho - 1) @ losses / ((rho - 1) ** 2).sum()).item()
        errors.append(abs(slope - exact))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)


def _both(curvature: float, lr: float, num_steps: int) -> tuple[float, float]:
    """On h x^2 / 2 from x = 1: the first-order signal, and the derivative through the whole run."""
    log_lr = torch.tensor(np.log(lr), dtype=torch.float64, requires_grad=True)
    x = torch.ones((), dtype=torch.float64)
    for _ in range(num_steps):
        x = x - log_lr.exp() * curvature * x
    (whole,) = torch.autograd.grad(0.5 * curvature * x**2, log_lr)
    return (curvature * x * (x - 1)).item(), whole.item()


@pytest.mark.parametrize("num_steps", [1, 7, 50])
@pytest.mark.parametrize("lr", [0.001, 0.05, 0.9])
def test_what_it_leaves_out_on_a_quadratic(lr: float, num_steps: int) -> None:
    """First order: h q^T (q^T - 1). Whole: -h (eta h T) q^(2T - 1). Their quotient is eta h T q^(T-1) / (1 - q^T)."""
    curvature = 1.0
    q = 1 - lr * curvature
    first, whole = _both(curvature, lr, num_steps)
    assert first == pytest.approx(curvature * q**num_steps * (q**num_steps - 1), abs=1e-14)
    assert whole == pytest.approx(-curvature * lr * curvature * num_steps * q ** (2 * num_steps - 1), abs=1e-14)


def test_it_is_right_while_the_way_is_short_and_too_strong_once_the_direction_has_converged() -> None:
    first, whole = _both(1.0, 1e-4, 10)
    assert whole / first == pytest.approx(1, abs=1e-3)
    first, whole = _both(1.0, 0.1, 50)
    assert 0 < whole / first < 0.05  # of the same sign


def test_between_1_and_2_over_the_curvature_it_alternates_and_above_it_is_right_again() -> None:
    for lr in (1.2, 1.9):
        (even, whole), (odd, _) = _both(1.0, lr, 10), _both(1.0, lr, 11)
        assert whole > 0
        assert even < 0 < odd
    for num_steps in (10, 11):
        first, whole = _both(1.0, 2.5, num_steps)
        assert first > 0
        assert whole > 0


def _stationary(lr: float, curvature: float, noise: float) -> float:
    """Variance of x under x <- x - lr (h x + noise)."""
    return lr * noise**2 / (curvature * (2 - lr * curvature))


@pytest.mark.parametrize("lr", [0.01, 0.5, 1.5])
def test_at_rest_it_counts_noise_up_to_twice(lr: float) -> None:
    """First order: h Var. Whole, by the log of the learning rate: h Var / (2 - eta h)."""
    curvature, noise = 1.0, 0.7
    variance = _stationary(lr, curvature, noise)
    step = 1e-6
    losses = [0.5 * curvature * _stationary(lr * np.exp(sign * step), curvature, noise) for sign in (-1, 1)]
    whole = (losses[1] - losses[0]) / (2 * step)
    first = curvature * variance
    assert first / whole == pytest.approx(2 - lr * curvature, rel=1e-6)
    mean, square = 1.0, 1.0  # from x = 1, exactly
    for _ in range(3000):
        q = 1 - lr * curvature
        mean, square = q * mean, q**2 * square + (lr * noise) ** 2
    assert curvature * (square - mean) == pytest.approx(first, rel=1e-9)
