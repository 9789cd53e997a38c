"""docs/theory.md, "Elasticity": how far a run is from the best rescaling of its whole path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hdet.controllers.level import _excess

CURVATURE = torch.tensor([0.3, 2.0, 11.0], dtype=torch.float64)
START = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)


def _loss(theta: torch.Tensor) -> torch.Tensor:
    return 0.5 * (CURVATURE * theta**2).sum()


def _elasticity(theta: torch.Tensor) -> float:
    """Slope over the log of the learning rate, <g, theta - A>, over the fall of the loss since A."""
    theta = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(theta), theta)
    return float(gradient @ (theta.detach() - START) / (_loss(START) - _loss(theta.detach())))


def _after(lr: float, num_steps: int) -> torch.Tensor:
    return START * (1 - lr * CURVATURE) ** num_steps


@pytest.mark.parametrize(("lr", "num_steps"), [(1e-4, 3), (0.01, 5), (0.05, 20), (0.12, 50), (0.17, 7)])
def test_on_a_parabola_along_the_path_it_gives_the_best_rescaling(lr: float, num_steps: int) -> None:
    path = _after(lr, num_steps) - START
    factors = np.exp(np.linspace(-3, 9, 120_001))
    along = torch.tensor(factors, dtype=torch.float64)[:, None] * path + START
    best = factors[int((0.5 * (CURVATURE * along**2).sum(dim=1)).argmin())]
    e = _elasticity(_after(lr, num_steps))
    assert (1 + e / 2) / (1 + e) == pytest.approx(best, rel=2e-4)
    assert math.exp(-_excess(e)) == pytest.approx(best, rel=2e-4)  # as the controller has it


def test_a_linear_loss_has_minus_1_and_the_minimum_along_the_path_0() -> None:
    path = _after(0.05, 20) - START
    e = _elasticity(START + 1e-6 * path)  # so near to the start every loss is linear
    assert e == pytest.approx(-1, abs=1e-5)
    best = -((CURVATURE * START) @ path) / ((CURVATURE * path) @ path)
    assert _elasticity(START + best * path) == pytest.approx(0, abs=1e-12)
