"""Rules that set their own step size, for the stacked engine: Prodigy, D-Adaptation, Mechanic, DoG, Schedule-Free.

Each is written from its paper, with the constants of its authors' package. Unlike a
:class:`~hdet_lab.stacked.optim.StackedOptimizer` a rule is told the learning rate, and says how far the weights move.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hdet_lab.stacked.optim import Adam, Layout, State

TORCH_BETAS = (0.9, 0.999)


@runtime_checkable
class Rule(Protocol):
    """Turns gradient and learning rate (R, N, 1) into theta <- theta - move; state as in a StackedOptimizer."""

    decoupled_decay: float

    @property
    def needs_weights(self) -> bool: ...

    def init(self, like: Tensor, layout: Layout) -> State: ...

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor: ...

    def final(self, state: State, weights: Tensor) -> Tensor:
        """The weights to evaluate: those that were trained, or an average."""
        ...


class _Rule:
    """What most rules share."""

    decoupled_decay = 0.0

    @property
    def needs_weights(self) -> bool:
        return True

    def final(self, state: State, weights: Tensor) -> Tensor:
        return weights


def _numbers(like: Tensor, value: float = 0.0, num: int = 1) -> Tensor:
    """One number, or ``num``, for each run and replica."""
    return torch.full((*like.shape[:2], num), value, dtype=torch.float64, device=like.device)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True).double()


class NAdamW(_Rule):
    """AdamW with Nesterov's momentum in Adam's form, without NAdam's schedule of beta1 (Dozat 2016; AlgoPerf)."""

    def __init__(self, betas: tuple[float, float] = TORCH_BETAS, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def init(self, like: Tensor, layout: Layout) -> State:
        return {"first": torch.zeros_like(like), "second": torch.zeros_like(like), "steps": _numbers(like)}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias, next_bias = ((1 - beta1**count).to(first.dtype) for count in (steps, steps + 1))
        ahead = beta1 * first / next_bias + (1 - beta1) * gradient / bias
        root = (second / (1 - beta2**steps).to(first.dtype)).sqrt()
        return lr * (ahead / (root + self.eps) + self.weight_decay * weights)


class RangeTest(_Rule):
    """Adam while the learning rate grows from ``low`` to ``high`` in ``num_steps`` steps, for a learning-rate finder.

    The ``lr`` it is told only multiplies this.
    """

    def __init__(self, low: float, high: float, num_steps: int, betas: tuple[float, float]) -> None:
        self.low, self.high, self.num_steps = low, high, num_steps
        self._adam = Adam(betas)

    def init(self, like: Tensor, layout: Layout) -> State:
        return self._adam.init(like, layout)

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        share = state["steps"] / max(self.num_steps - 1, 1)
        grown = (self.low * (self.high / self.low) ** share).to(weights.dtype)
        return lr * grown * self._adam.update(state, gradient, weights, [])


class Prodigy(_Rule):
    """Mishchenko and Defazio 2023, Adam's form, with the safeguard for warm-ups."""

    def __init__(self, betas: tuple[float, float] = TORCH_BETAS, eps: float = 1e-8, first: float = 1e-6) -> None:
        self.betas, self.eps, self.first = betas, eps, first

    def init(self, like: Tensor, layout: Layout) -> State:
        zeros = {name: torch.zeros_like(like) for name in ("first", "second", "sum")}
        distances = {"d": _numbers(like, self.first), "d_max": _numbers(like, self.first)}
        return {**zeros, **distances, "numerator": _numbers(like), "start": like.clone()}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        beta3 = math.sqrt(beta2)
        d, kind = state["d"].clone(), weights.dtype
        relative = d / self.first  # instead of d, which would be too small to add up
        dot = _dot(gradient, state["start"] - weights)
        numerator = state["numerator"].mul_(beta3).add_(relative * d * lr * dot)
        first = state["first"].mul_(beta1).add_(((1 - beta1) * d).to(kind) * gradient)
        second = state["second"].mul_(beta2).add_(((1 - beta2) * d**2).to(kind) * gradient**2)
        total = state["sum"].mul_(beta3).add_((relative * d).to(kind) * gradient)
        denominator = total.abs().sum(-1, keepdim=True).double()
        estimate = numerator / denominator
        state["d_max"].copy_(torch.maximum(torch.maximum(state["d_max"], estimate), d))
        state["d"].copy_(state["d_max"])
        return (d * lr).to(kind) * first / (second.sqrt() + (state["d"] * self.eps).to(kind))


class DAdaptAdam(_Rule):
    """D-Adaptation, Adam's form (Defazio and Mishchenko 2023)."""

    def __init__(self, betas: tuple[float, float] = TORCH_BETAS, eps: float = 1e-8, first: float = 1e-6) -> None:
        self.betas, self.eps, self.first = betas, eps, first

    def init(self, like: Tensor, layout: Layout) -> State:
        zeros = {name: torch.zeros_like(like) for name in ("first", "second", "sum")}
        return {**zeros, "d": _numbers(like, self.first), "numerator": _numbers(like)}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        root2 = math.sqrt(beta2)
        rate = state["d"] * lr
        small = rate.to(weights.dtype)
        gained = rate * _dot(gradient, state["sum"] / (state["second"].sqrt() + self.eps))
        first = state["first"].mul_(beta1).add_(small * (1 - beta1) * gradient)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        total = state["sum"].mul_(root2).add_(small * (1 - root2) * gradient)
        numerator = state["numerator"].mul_(root2).add_((1 - root2) * gained)
        estimate = numerator / ((1 - root2) * total.abs().sum(-1, keepdim=True).double())
        state["d"].copy_(torch.maximum(state["d"], estimate))
        return first / (second.sqrt() + self.eps)


class Mechanic(_Rule):
    """A learned scale around Adam's updates (Cutkosky, Defazio and Mehta 2023)."""

    num_horizons = 6  # 0.9, 0.99, ...

    def __init__(
        self, betas: tuple[float, float] = TORCH_BETAS, *, decay: float = 0.01, first: float = 1e-8, eps: float = 1e-8
    ) -> None:
        self.decay, self.first, self.eps = decay, first, eps
        self._adam = Adam(betas)

    def init(self, like: Tensor, layout: Layout) -> State:
        num = self.num_horizons
        own = {name: _numbers(like, num=num) for name in ("scales", "reward", "squares")}
        own["horizons"] = 1 - 0.1 ** _numbers(like, num=num).add_(1).cumsum(-1)
        own["largest"] = _numbers(like, 1e-6, num)
        moved = {"start": like.clone(), "moved": torch.zeros_like(like)}
        return {**self._adam.init(like, layout), **own, **moved}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        update = -lr * self._adam.update(state, gradient, weights, [])
        stepped, scale = weights + update, state["scales"].sum(-1, keepdim=True)
        norms = [torch.linalg.vector_norm(t, dim=-1, keepdim=True).double() for t in (gradient, stepped)]
        pull = (self.decay * scale * norms[0] / (norms[1] + self.eps)).to(weights.dtype)
        product = _dot(state["moved"], gradient + pull * stepped)
        moved = state["moved"].add_(update)
        beta = state["horizons"]
        state["largest"].copy_(torch.maximum(beta * state["largest"], product.abs()))
        state["squares"].mul_(beta**2).add_(product**2)
        state["reward"].mul_(beta).sub_(state["scales"] * product).clamp_(min=0)
        wealth = state["largest"] * self.first / self.num_horizons + state["reward"]
        state["scales"].copy_(wealth / (state["squares"].sqrt() + self.eps))
        target = state["start"] + state["scales"].sum(-1, keepdim=True).clamp(min=0).to(weights.dtype) * moved
        return weights - target


class DoG(_Rule):
    """Distance over gradients (Ivgi, Hinder and Carmon 2023), with its polynomial average of the iterates.

    Args:
        first: the first distance, as a share of 1 + |start|; its authors advise 1e-4 for models with BatchNorm.
        power: gamma of the average.
    """

    def __init__(self, first: float = 1e-6, power: float = 8.0, eps: float = 1e-8) -> None:
        self.first, self.power, self.eps = first, power, eps

    def init(self, like: Tensor, layout: Layout) -> State:
        distance = self.first * (1 + torch.linalg.vector_norm(like, dim=-1, keepdim=True).double())
        numbers = {"distance": distance, "squares": _numbers(like, self.eps), "steps": _numbers(like)}
        return {**numbers, "start": like.clone(), "average": like.clone()}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        away = torch.linalg.vector_norm(weights - state["start"], dim=-1, keepdim=True).double()
        distance = state["distance"].copy_(torch.maximum(state["distance"], away))
        squares = state["squares"].add_(_dot(gradient, gradient))
        move = lr * (distance / squares.sqrt()).to(weights.dtype) * gradient
        steps = state["steps"].add_(1)
        share = ((self.power + 1) / (self.power + steps)).to(weights.dtype)
        state["average"].add_(share * (weights - move - state["average"]))
        return move

    def final(self, state: State, weights: Tensor) -> Tensor:
        return state["average"]


class ScheduleFree(_Rule):
    """Schedule-Free AdamW (Defazio et al. 2024): gradients are taken between the base iterate and its average.

    Args:
        betas, eps: Adam's; the first says how near the average gradients are taken.
        num_warm: steps of its own warm-up.
    """

    def __init__(self, num_warm: int = 0, betas: tuple[float, float] = TORCH_BETAS, eps: float = 1e-8) -> None:
        self.num_warm, self.betas, self.eps = num_warm, betas, eps

    def init(self, like: Tensor, layout: Layout) -> State:
        numbers = {name: _numbers(like) for name in ("steps", "lr_max", "weight_sum")}
        return {**numbers, "base": like.clone(), "second": torch.zeros_like(like)}

    def move(self, state: State, gradient: Tensor, weights: Tensor, lr: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        steps = state["steps"].add_(1)
        rate = lr * (steps / self.num_warm).clamp(max=1.0) if self.num_warm else lr.double()
        state["lr_max"].copy_(torch.maximum(state["lr_max"], rate))
        total = state["weight_sum"].add_(state["lr_max"] ** 2)
        # A learning rate of 0 weighs nothing.
        share = (state["lr_max"] ** 2 / total.clamp(min=1e-300)).to(weights.dtype)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**steps).to(weights.dtype)).sqrt()
        step = rate.to(weights.dtype) * gradient / (root + self.eps)
        move = share * (weights - state["base"]) + (1 - beta1 * (1 - share)) * step
        state["base"].sub_(step)
        return move

    def final(self, state: State, weights: Tensor) -> Tensor:
        beta1 = self.betas[0]
        return (weights - (1 - beta1) * state["base"]) / beta1
