"""Eq. 1 to 9 in plain NumPy: slow, obvious, one process, all replicas in one loop.

The library is compared with this step by step, so nothing is shared with it except the draw of the permutations: which
permutation comes out of a seed is a convention, what is done with it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hdet.policy.spread import permutation

Array = NDArray[np.float64]
Kind = Literal["sgd", "momentum", "adam", "adamw"]

NUM_INPUTS, NUM_HIDDEN, BATCH_SIZE = 3, 5, 6
MAX_MOMENTUM, BASE_MOMENTUM, FIXED_MOMENTUM = 0.95, 0.85, 0.9
BETA2, EPS = 0.999, 1e-8
SMALLEST_FACTOR = 0.1  # a round never multiplies a base value by less, whatever lambda is


@dataclass(frozen=True)
class Scenario:
    """One training run. Symbols as in the paper: alpha, T, S_warm, sigma, lambda, beta."""

    name: str
    optimizer: Kind
    max_lr: tuple[float, ...]  # one for each param group: one group, or one for each of the four tensors
    total_steps: int = 23
    interval: int = 4  # T
    spread: float = 0.4  # alpha
    auto_lr: bool = True
    warmup: int = 0  # S_warm
    temperature: float = 0.05  # sigma
    rate: float = 0.5  # lambda
    smoothing: float = 0.9  # beta
    scale_bounds: tuple[float, float] = (1e-4, 1e4)
    decay: Literal["schedule", "floor", "printed"] = "schedule"
    pct_start: float = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    three_phase: bool = False
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    cycle_momentum: bool = True
    weight_decay: float = 0.0
    seed: int = 0
    false_losses: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (step, replica): reported instead


@dataclass
class Round:
    """What a round showed and what was decided. ``control`` is empty while the controller is not acting."""

    step: int
    losses: Array  # (N,)
    values: Array  # (K, N)
    base_values: Array  # (K,)
    scales: Array  # (K,)
    distance: float
    control: dict[str, Array]


@dataclass
class Trajectory:
    lrs: Array  # (S, N, K), what the optimizer used in each step
    momenta: Array  # (S, K)
    losses: Array  # (S, N)
    weights: Array  # (S, N, P), after each step, converge included
    rounds: list[Round]


# -- the problem: regression with one hidden layer ------------------------------------------------------------------


def initial_weights(seed: int) -> list[Array]:
    rng = np.random.default_rng([seed, 1])
    shapes = [(NUM_HIDDEN, NUM_INPUTS), (NUM_HIDDEN,), (1, NUM_HIDDEN), (1,)]
    return [rng.normal(0.0, 0.7, shape) for shape in shapes]


def batch(seed: int, step: int, replica: int) -> tuple[Array, Array]:
    """What one replica sees in one step."""
    rng = np.random.default_rng([seed, 2, step, replica])
    x = rng.normal(size=(BATCH_SIZE, NUM_INPUTS))
    y = np.sin(x.sum(axis=1, keepdims=True)) + 0.3 * rng.normal(size=(BATCH_SIZE, 1))
    return x, y


def loss_and_gradient(weights: list[Array], x: Array, y: Array) -> tuple[float, list[Array]]:
    """Mean squared error of ``w2 tanh(w1 x + b1) + b2`` and its gradient, by hand."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1.T + b1)
    error = hidden @ w2.T + b2 - y
    d_output = 2 * error / error.size
    d_hidden = (d_output @ w2) * (1 - hidden**2)
    gradient = [d_hidden.T @ x, d_hidden.sum(axis=0), d_output.T @ hidden, d_output.sum(axis=0)]
    return float(np.mean(error**2)), gradient


def flat(weights: list[Array]) -> Array:
    return np.concatenate([w.ravel() for w in weights])


# -- the schedule ---------------------------------------------------------------------------------------------------


def between(anneal: str, start: float, end: float, fraction: float) -> float:
    if anneal == "linear":
        return start + (end - start) * fraction
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))


def one_cycle(scenario: Scenario, max_lr: float, step: float) -> tuple[float, float]:
    """LR and momentum of the one-cycle policy: up and down again, the momentum the other way round."""
    low, floor = max_lr / scenario.div_factor, max_lr / scenario.div_factor / scenario.final_div_factor
    peak, end = scenario.pct_start * scenario.total_steps - 1, scenario.total_steps - 1
    corners = [(0.0, low, MAX_MOMENTUM), (peak, max_lr, BASE_MOMENTUM)]
    if scenario.three_phase:
        corners.append((2 * peak, low, MAX_MOMENTUM))
    corners.append((end, floor, MAX_MOMENTUM))
    for (start_step, lr0, m0), (end_step, lr1, m1) in pairwise(corners):
        if step <= end_step:
            fraction = (step - start_step) / (end_step - start_step)
            return between(scenario.anneal, lr0, lr1, fraction), between(scenario.anneal, m0, m1, fraction)
    raise AssertionError("the schedule has ended")


def schedule(scenario: Scenario, max_lr: float, step: int) -> tuple[float, float]:
    """The base value before anything was learned, and the momentum, in one step."""
    lr, momentum = one_cycle(scenario, max_lr, step)
    # Eq. 8. The decay sets in at the peak or at the end of the warm-up, whichever is later; what gamma does to the LR
    # in K rounds is spread evenly, in the logarithm, over the steps that are left.
    decay_from = max(float(scenario.warmup), scenario.pct_start * scenario.total_steps - 1)
    if scenario.decay != "schedule" and step > decay_from:
        start, _ = one_cycle(scenario, max_lr, decay_from)
        if scenario.decay == "floor":
            end = max_lr / scenario.div_factor / scenario.final_div_factor
        else:
            end = start * scenario.final_div_factor / scenario.div_factor
        progress = (step - decay_from) / (scenario.total_steps - decay_from)
        lr = start * (end / start) ** progress
    return lr, momentum if scenario.cycle_momentum else FIXED_MOMENTUM


# -- the optimizers -------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """What an optimizer remembers about one tensor."""

    num_steps: int = 0
    first: Array | float = 0.0
    second: Array | float = 0.0


Step = Callable[[Array, Array, Memory, float, float, float], Array]


def sgd(theta: Array, g: Array, memory: Memory, lr: float, momentum: float, weight_decay: float) -> Array:
    return theta - lr * g


def sgd_momentum(theta: Array, g: Array, memory: Memory, lr: float, momentum: float, weight_decay: float) -> Array:
    memory.first = momentum * memory.first + g
    return theta - lr * memory.first


def adam(theta: Array, g: Array, memory: Memory, lr: float, momentum: float, weight_decay: float) -> Array:
    memory.num_steps += 1
    memory.first = momentum * memory.first + (1 - momentum) * g
    memory.second = BETA2 * memory.second + (1 - BETA2) * g**2
    first = memory.first / (1 - momentum**memory.num_steps)
    second = memory.second / (1 - BETA2**memory.num_steps)
    return theta - lr * first / (np.sqrt(second) + EPS)


def adamw(theta: Array, g: Array, memory: Memory, lr: float, momentum: float, weight_decay: float) -> Array:
    return adam(theta * (1 - lr * weight_decay), g, memory, lr, momentum, 0.0)


OPTIMIZERS: dict[Kind, Step] = {"sgd": sgd, "momentum": sgd_momentum, "adam": adam, "adamw": adamw}


# -- the method -----------------------------------------------------------------------------------------------------


def multiplier(place: int, num_replicas: int, spread: float) -> float:
    """Eq. 1."""
    delta = max((num_replicas - 1) / 2, 1 / 2)
    return 1 + spread * (place - (num_replicas - 1) / 2) / delta


def fan_out(scenario: Scenario, num_replicas: int, round_index: int) -> Array:
    """Eq. 9: row k is knob k, column r is replica r. Replica r holds rho_r in round 0, rho_pi(r) later."""
    rho = np.empty((len(scenario.max_lr), num_replicas))
    for k in range(len(scenario.max_lr)):
        pi = permutation(num_replicas, seed=scenario.seed, round_index=round_index, knob=k)
        for r in range(num_replicas):
            rho[k, r] = multiplier(r if round_index == 0 else int(pi[r]), num_replicas, scenario.spread)
    return rho


def softmax(losses: Array, temperature: float) -> Array:
    """Eq. 4. A replica without a finite loss has weight 0."""
    finite = np.isfinite(losses)
    score = (np.mean(losses[finite]) - losses[finite]) / temperature
    weights = np.zeros(len(losses))
    weights[finite] = np.exp(score - score.max()) / np.sum(np.exp(score - score.max()))
    return weights


def simulate(scenario: Scenario, num_replicas: int) -> Trajectory:
    """Train all replicas and write down everything."""
    num_groups, num_tensors = len(scenario.max_lr), 4
    group_of = [0] * num_tensors if num_groups == 1 else list(range(num_tensors))
    update = OPTIMIZERS[scenario.optimizer]
    replicas = range(num_replicas)

    theta = [initial_weights(scenario.seed) for _ in replicas]
    memory = [[Memory() for _ in range(num_tensors)] for _ in replicas]
    rho = fan_out(scenario, num_replicas, 0)
    scales, velocity = np.ones(num_groups), np.zeros(num_groups)
    reported: list[list[float]] = []  # losses of this round: one row a step
    result = Trajectory(
        lrs=np.empty((scenario.total_steps, num_replicas, num_groups)),
        momenta=np.empty((scenario.total_steps, num_groups)),
        losses=np.empty((scenario.total_steps, num_replicas)),
        weights=np.empty((scenario.total_steps, num_replicas, len(flat(theta[0])))),
        rounds=[],
    )

    for step in range(scenario.total_steps):
        eta = np.empty(num_groups)
        momentum = np.empty(num_groups)
        for k in range(num_groups):
            eta[k], momentum[k] = schedule(scenario, scenario.max_lr[k], step)

        # Eq. 2: one gradient for all, a learning rate for each.
        found = [loss_and_gradient(theta[r], *batch(scenario.seed, step, r)) for r in replicas]
        losses = [loss for loss, _ in found]
        shared = [np.mean([gradient[i] for _, gradient in found], axis=0) for i in range(num_tensors)]
        for r in replicas:
            for k in range(num_groups):
                result.lrs[step, r, k] = eta[k] * scales[k] * rho[k, r]
            for i in range(num_tensors):
                k = group_of[i]
                lr = float(result.lrs[step, r, k])
                theta[r][i] = update(
                    theta[r][i], shared[i], memory[r][i], lr, float(momentum[k]), scenario.weight_decay
                )
        result.momenta[step] = momentum
        result.losses[step] = losses
        reported.append([scenario.false_losses.get((step, r), losses[r]) for r in replicas])

        num_done = step + 1
        if num_done % scenario.interval == 0 or num_done == scenario.total_steps:
            # Eq. 3
            mean = [np.mean([theta[r][i] for r in replicas], axis=0) for i in range(num_tensors)]
            distance = max(float(np.linalg.norm(flat(theta[r]) - flat(mean))) for r in replicas)
            theta = [[m.copy() for m in mean] for _ in replicas]

            # Eq. 4 to 7, relative to the base value
            round_losses = np.mean(reported, axis=0)
            values = (eta * scales)[:, None] * rho
            control: dict[str, Array] = {}
            if scenario.auto_lr and num_done > scenario.warmup:
                if np.isfinite(round_losses).any():
                    w = softmax(round_losses, scenario.temperature)
                    delta = np.array([np.sum(w * rho[k]) - np.mean(rho[k]) for k in range(num_groups)])
                    velocity = scenario.smoothing * velocity + (1 - scenario.smoothing) * delta
                    scales = scales * np.maximum(1 + scenario.rate * velocity, SMALLEST_FACTOR)
                    scales = np.clip(scales, *scenario.scale_bounds)
                    control = {"weights": w, "delta": delta, "velocity": velocity}
                else:
                    control = {"velocity": velocity}
            result.rounds.append(Round(num_done, round_losses, values, eta * scales, scales, distance, control))

            # Eq. 9
            reported = []
            rho = fan_out(scenario, num_replicas, len(result.rounds))
        result.weights[step] = [flat(t) for t in theta]
    return result
