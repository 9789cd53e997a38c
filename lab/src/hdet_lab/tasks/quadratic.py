"""A noisy quadratic bowl: known optimum, known curvature, known noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdet_lab.tasks.base import Batch, random_rows


class Point(nn.Module):
    """A model that is its weights."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)

    def forward(self) -> Tensor:
        return self.theta


class QuadraticTask:
    """Excess loss 0.5 sum_i h_i (theta_i - theta*_i)^2, its gradient seen through noise.

    The eigenvalues h_i are evenly spaced in the logarithm from 1 / ``condition`` to 1. A row is one normal draw xi of
    the noise: its loss is the excess loss plus <xi, theta - theta*>, so its gradient is off by xi. Draws are a pure
    function of (``seed``, row); over all rows their mean is 0 and their standard deviation ``noise``. The seed of a run
    decides where it starts, a normal(0, 1) draw like theta*, and which rows it sees.

    Args:
        dimension: of theta.
        condition: largest over smallest eigenvalue.
        noise: standard deviation of each component of a row's gradient.
        total_steps: default length of a run.
        batch_rows: rows of a global batch, whose gradient is off by ``noise / sqrt(batch_rows)``.
        num_rows: how many draws there are to sample from, with replacement.
        seed: of the optimum and the draws.
    """

    def __init__(
        self,
        *,
        dimension: int = 100,
        condition: float = 100.0,
        noise: float = 1.0,
        total_steps: int = 1000,
        batch_rows: int = 32,
        num_rows: int = 2**16,
        seed: int = 0,
    ) -> None:
        if dimension < 1 or num_rows < 2:
            raise ValueError(
                f"dimension must be at least 1 and num_rows at least 2, but got {dimension=} and {num_rows=}"
            )
        if condition < 1 or noise < 0:
            raise ValueError(f"condition must be at least 1 and noise at least 0, but got {condition=} and {noise=}")
        self.name = "quadratic"
        self.total_steps = total_steps
        self.batch_rows = batch_rows
        self.num_rows = num_rows
        self.eigenvalues = condition ** torch.linspace(-1.0, 0.0, dimension, dtype=torch.float64).float()
        # Away from the seeds of runs, or a run would start at the optimum. The generator uses 32 bits of a seed.
        generator = torch.Generator().manual_seed(2**31 + seed)
        self.optimum = torch.randn(dimension, generator=generator)
        draws = torch.randn(num_rows, dimension, generator=generator)
        draws -= draws.mean(0)
        draws *= noise / draws.std(0, correction=0)
        # The row after the last has no noise: its loss is the excess loss, which is what validates.
        self.draws = torch.cat([draws, torch.zeros(1, dimension)])
        self.validation_rows = torch.tensor([num_rows])

    def to(self, device: torch.device | str) -> QuadraticTask:
        self.eigenvalues, self.optimum = self.eigenvalues.to(device), self.optimum.to(device)
        self.draws = self.draws.to(device)
        return self

    def build(self, seed: int = 0) -> nn.Module:
        return Point(torch.randn(len(self.optimum), generator=torch.Generator().manual_seed(seed)))

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        return {"weights": ["theta"]}

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        return random_rows(self.num_rows, self.batch_rows, seed=seed, step=step)

    def gather(self, rows: Tensor) -> Batch:
        return (self.draws[rows.to(self.draws.device)],)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        offset = model() - self.optimum
        noise = batch[0].to(offset.dtype).mean(0)
        loss: Tensor = (offset * (0.5 * self.eigenvalues * offset + noise)).sum()
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss``, in excess of the optimum's, and ``distance`` from the optimum."""
        offset = model() - self.optimum
        loss = self.loss(model, self.gather(self.validation_rows))
        return {"loss": loss.item(), "distance": torch.linalg.vector_norm(offset).item()}
