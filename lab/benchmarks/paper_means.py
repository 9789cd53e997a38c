"""How replicas that have trained apart come together: rules on (N, parameters) of one run, in place."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hdet.checks import FloatArray
from hdet.ensemble.outer import Nesterov, OuterStep, outer_step


class Mean(Protocol):
    """A rule with its own memory. ``bytes_sent``: by one replica, in a ring, so far."""

    bytes_sent: float

    def apply_(self, weights: Tensor, losses: FloatArray, norms: FloatArray, *, last: bool) -> None: ...


def ring_bytes(num_replicas: int, num_values: float) -> float:
    """What one replica of a ring sends for a sum of float32: each of N parts to the next, twice N - 1 times."""
    return 2 * (num_replicas - 1) / num_replicas * num_values * 4


class Outer:
    """The product's own outer steps: ``mean``, ``fittest``, ``grawa``, ``nesterov``."""

    def __init__(self, step: OuterStep, start: Tensor) -> None:
        self.step, self.centre, self.bytes_sent = step, start[0].clone(), 0.0
        step.begin([self.centre])

    def apply_(self, weights: Tensor, losses: FloatArray, norms: FloatArray, *, last: bool) -> None:
        shares = self.step.shares(norms if self.step.by_gradient else losses, np.ones(len(losses), dtype=bool))
        counts = np.ones(len(losses)) if shares is None else shares
        self.centre.copy_((torch.from_numpy(counts).to(weights)[:, None] * weights).mean(0))
        self.step.apply_([self.centre])
        weights.copy_(self.centre.expand_as(weights))
        self.bytes_sent += ring_bytes(len(weights), weights.shape[1])


class Elastic:
    """EASGD (Zhang, Choromanska, LeCun, 2015): replicas and centre are pulled towards each other, by rate a.

    theta_r <- theta_r - a (theta_r - c),  c <- c + a sum_r (theta_r - c); replicas stay apart until the end.
    """

    def __init__(self, rate: float, start: Tensor) -> None:
        self.rate, self.centre, self.bytes_sent = rate, start[0].clone(), 0.0

    def apply_(self, weights: Tensor, losses: FloatArray, norms: FloatArray, *, last: bool) -> None:
        pulls = self.rate * (weights - self.centre)
        weights.sub_(pulls)
        self.centre.add_(pulls.sum(0))
        if last:
            weights.copy_(self.centre.expand_as(weights))
        self.bytes_sent += ring_bytes(len(weights), weights.shape[1])


class Once:
    """Replicas train apart, and are averaged once, at the end: the last phase of SWAP (Gupta and others, 2020)."""

    bytes_sent = 0.0

    def apply_(self, weights: Tensor, losses: FloatArray, norms: FloatArray, *, last: bool) -> None:
        if last:
            weights.copy_(weights.mean(0).expand_as(weights))
            self.bytes_sent = ring_bytes(*weights.shape)


def make_mean(name: str, start: Tensor) -> Mean:
    """By name; a number after a colon is the rule's parameter."""
    kind, _, value = name.partition(":")
    if kind == "elastic":
        return Elastic(float(value or 0.9) / len(start), start)  # beta = N a = 0.9, as its authors have it
    if kind == "once":
        return Once()
    if kind == "nesterov":
        lr, momentum = (float(each) for each in (value or "0.7,0.9").split(","))
        return Outer(Nesterov(lr=lr, momentum=momentum), start)
    return Outer(outer_step(kind), start)  # type: ignore[arg-type]
