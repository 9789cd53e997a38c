"""The paper's method, slow and in one file: N replicas in one process (Eq. 1 to 9).

Replicas train with different learning rates (*fan-out*) and one gradient for all. At the end of each round of T steps
their weights become the mean (*converge*), their losses are compared, and the shared learning rate of each param group
moves towards what worked. Tests hold ``hdet.OneCycleAutoLR`` on N processes equal to this, step by step.

    replicas = [Replica(model, optimizer, lambda step: ...), ...]  # the same first weights, batches of their own
    for lrs in train(replicas, [one_cycle(9e-4, 10_000)], 10_000, interval=100, spread=1 / 9):
        ...  # after each step

Left out: processes, checkpoints, buffers, momentum that is cycled, replicas that break, bounds of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Schedule = Callable[[float], float]
"""The base learning rate of a param group in a step, before anything was learned."""


class Replica(NamedTuple):
    """One copy of the model; ``loss`` gives the loss of its own batch in a step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], Tensor]


def shuffled(num_replicas: int, round_index: int, group: int) -> list[int]:
    """A permutation, the same on every replica; the global random state is not touched."""
    generator = torch.Generator().manual_seed(1_000_003 * round_index + group)
    drawn: list[int] = torch.randperm(num_replicas, generator=generator).tolist()
    return drawn


def train(
    replicas: list[Replica],
    schedules: list[Schedule],
    total_steps: int,  # S
    *,
    interval: int,  # T
    spread: float,  # alpha
    warmup_steps: int = 0,  # S_warm
    temperature: float = 0.1,  # sigma
    rate: float = 0.5,  # lambda
    momentum: float = 0.9,  # beta
    absolute: bool = False,  # Eq. 7 as it is printed
    permutation: Callable[[int, int, int], list[int]] = shuffled,
) -> Iterator[Tensor]:
    """Train; after each step, yields the learning rates it has used: of param groups (rows) and replicas (columns)."""
    num_replicas, num_groups = len(replicas), len(schedules)
    rho = multipliers(num_replicas, spread).repeat(num_groups, 1)
    scale = torch.ones(num_groups, dtype=torch.float64)  # what the controller has learned, of each param group
    velocity = torch.zeros(num_groups, dtype=torch.float64)
    losses: list[Tensor] = []  # of the steps of this round
    num_rounds = 0
    for step in range(total_steps):
        base = scale * torch.tensor([schedule(step) for schedule in schedules], dtype=torch.float64)
        lrs = base[:, None] * rho
        losses.append(take_step(replicas, step, lrs))
        if (step + 1) % interval == 0 or step + 1 == total_steps:  # all end with the same weights
            converge(replicas)
            if step + 1 > warmup_steps:
                # Eq. 7. The paper's Delta and velocity are learning rates, and push one that has become small below
                # zero. Here they are fractions of the base value, of which a round takes at most lambda alpha away,
                # unless they are to be absolute. The decay by 1 - gamma is the schedule's, during the round.
                unit = base if absolute else torch.ones_like(base)
                delta = unit * preference(torch.stack(losses).mean(0), rho, temperature)
                velocity = momentum * velocity + (1 - momentum) * delta
                scale = scale * (1 + rate * velocity / unit)
            num_rounds, losses = num_rounds + 1, []
            places = [permutation(num_replicas, num_rounds, group) for group in range(num_groups)]
            rho = torch.stack([multipliers(num_replicas, spread)[pi] for pi in places])  # Eq. 9
        yield lrs


def multipliers(num_replicas: int, spread: float) -> Tensor:
    """Eq. 1: evenly spaced around 1, inside [1 - alpha, 1 + alpha]. A single replica has 1."""
    delta = max((num_replicas - 1) / 2, 1 / 2)
    return 1 + spread * (torch.arange(num_replicas, dtype=torch.float64) - (num_replicas - 1) / 2) / delta


def take_step(replicas: list[Replica], step: int, lrs: Tensor) -> Tensor:
    """Eq. 2: one gradient for all, a learning rate for each. Returns the replicas' losses."""
    losses = [replica.loss(step) for replica in replicas]
    gradients = [torch.autograd.grad(loss, [*r.model.parameters()]) for r, loss in zip(replicas, losses, strict=True)]
    shared = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]  # DDP's all-reduce
    for r, replica in enumerate(replicas):
        for group, lr in zip(replica.optimizer.param_groups, lrs[:, r].tolist(), strict=True):
            group["lr"] = lr
        for p, gradient in zip(replica.model.parameters(), shared, strict=True):
            p.grad = gradient.clone()
        replica.optimizer.step()
    return torch.stack(losses).detach().double()


@torch.no_grad()
def converge(replicas: list[Replica]) -> None:
    """Eq. 3: weights become their mean. Each optimizer keeps its state, which one gradient for all keeps alike."""
    for copies in zip(*(replica.model.parameters() for replica in replicas), strict=True):
        mean = torch.stack(copies).mean(0)
        for p in copies:
            p.copy_(mean)


def preference(losses: Tensor, rho: Tensor, temperature: float) -> Tensor:
    """Eq. 4 to 6: Delta of each param group, over its base value: towards replicas with a lower loss."""
    weights = torch.softmax((losses.mean() - losses) / temperature, dim=0)
    return rho @ weights - rho.mean(1)


def one_cycle(
    max_lr: float, total_steps: int, *, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Schedule:
    """Torch's OneCycleLR: from max_lr / f_div to max_lr, and down to max_lr / (f_div f_final), along cosines."""
    peak, end = pct_start * total_steps - 1, total_steps - 1
    low, floor = max_lr / div_factor, max_lr / div_factor / final_div_factor

    def at(step: float) -> float:
        start, stop, share = low, max_lr, step / peak
        if step > peak:
            start, stop, share = max_lr, floor, (step - peak) / (end - peak)
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * share))

    return at


def geometric(schedule: Schedule, begins: float, total_steps: int, ratio: float) -> Schedule:
    """Eq. 8: the same factor 1 - gamma = exp(-log(ratio) / K) a round, spread over its steps, from ``begins`` on.

    As printed the ratio is f_div / f_final: with torch's factors 1/400, and the learning rate grows. To match the floor
    of OneCycleLR it has to be f_div f_final, from the peak.
    """

    def at(step: float) -> float:
        progress = max(step - begins, 0.0) / (total_steps - begins)
        return schedule(min(step, begins)) * math.exp(-math.log(ratio) * progress)

    return at
