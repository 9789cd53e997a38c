"""Optimizers of the stacked engine: torch.optim's formulas on (R, replicas, parameters)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class StackedOptimizer(Protocol):
    """Turns a gradient into what the learning rate multiplies: theta <- theta (1 - lr * decoupled_decay) - lr * update.

    With shared gradients the state is the same on all replicas of a run and kept once. State tensors start with the
    run axis and are changed in place, so that runs can be restored one by one and a step can be captured.

    Attributes:
        decoupled_decay: AdamW's weight decay.
        needs_weights: whether the update depends on each replica's own weights, so that each has its own state.
    """

    decoupled_decay: float

    @property
    def needs_weights(self) -> bool: ...

    def init(self, like: Tensor) -> State: ...

    def update(self, state: State, gradient: Tensor, weights: Tensor) -> Tensor: ...


class SGD:
    """``torch.optim.SGD``, with momentum and coupled weight decay."""

    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.decoupled_decay = 0.0

    @property
    def needs_weights(self) -> bool:
        return self.weight_decay != 0

    def init(self, like: Tensor) -> State:
        return {"momentum": torch.zeros_like(like)} if self.momentum else {}

    def update(self, state: State, gradient: Tensor, weights: Tensor) -> Tensor:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if not self.momentum:
            return gradient
        return state["momentum"].mul_(self.momentum).add_(gradient)


class Adam:
    """``torch.optim.Adam`` with coupled weight decay; with ``decoupled=True`` ``torch.optim.AdamW``."""

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ) -> None:
        self.betas = betas
        self.eps = eps
        self.coupled_decay = 0.0 if decoupled else weight_decay
        self.decoupled_decay = weight_decay if decoupled else 0.0

    @property
    def needs_weights(self) -> bool:
        return self.coupled_decay != 0

    def init(self, like: Tensor) -> State:
        # Runs restored at different steps have different counts; float64, since beta^step loses digits in float32.
        steps = torch.zeros(like.shape[0], 1, 1, dtype=torch.float64, device=like.device)
        return {"first": torch.zeros_like(like), "second": torch.zeros_like(like), "steps": steps}

    def update(self, state: State, gradient: Tensor, weights: Tensor) -> Tensor:
        if self.coupled_decay:
            gradient = gradient + self.coupled_decay * weights
        beta1, beta2 = self.betas
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1 = (1 - beta1**steps).to(first.dtype)
        bias2_root = (1 - beta2**steps).sqrt().to(first.dtype)
        return first / bias1 / (second.sqrt() / bias2_root + self.eps)
