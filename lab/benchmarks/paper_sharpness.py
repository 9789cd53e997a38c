"""How sharp a minimum is, by four measures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdet_lab.tasks.base import Task, evaluation_mode

RADIUS = 0.05


def sharpness(
    task: Task, model: nn.Module, rows: Tensor, *, num_draws: int = 4, num_iterations: int = 10
) -> dict[str, float]:
    """Of the training loss on ``rows``, in evaluation mode.

    ``trace`` of the Hessian by Hutchinson's estimator; its ``top`` eigenvalue by power iteration; ``ascent``, how much
    the loss rises along the gradient over a distance of 0.05, as SAM has it; ``gap``, validation minus training loss.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    batch = task.gather(rows)

    with evaluation_mode(model), sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        loss = task.loss(model, batch)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)

        def product(vector: list[Tensor]) -> list[Tensor]:
            dot = sum((g * v).sum() for g, v in zip(gradient, vector, strict=True))
            assert isinstance(dot, Tensor)
            return list(torch.autograd.grad(dot, parameters, retain_graph=True))

        trace = 0.0
        for _ in range(num_draws):
            signs = [torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1 for p in parameters]
            trace += _dot(signs, product(signs)) / num_draws
        vector = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
        top = 0.0
        for _ in range(num_iterations):
            norm = _dot(vector, vector) ** 0.5
            vector = [v / norm for v in vector]
            image = product(vector)
            top, vector = _dot(vector, image), image
        length = _dot(list(gradient), list(gradient)) ** 0.5
        with torch.no_grad():
            for p, g in zip(parameters, gradient, strict=True):
                p.add_(g, alpha=RADIUS / length)
            ascent = task.loss(model, batch).item() - loss.item()
            for p, g in zip(parameters, gradient, strict=True):
                p.sub_(g, alpha=RADIUS / length)
    gap = task.evaluate(model)["loss"] - loss.item()
    return {"trace": trace, "top": top, "ascent": ascent, "gap": gap, "train": loss.item()}


def _dot(first: list[Tensor], second: list[Tensor]) -> float:
    return float(sum((a.detach() * b.detach()).sum().item() for a, b in zip(first, second, strict=True)))
