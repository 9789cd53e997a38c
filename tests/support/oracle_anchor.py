"""Eq. 11 to 15 and the first-order signal in plain NumPy, beside :mod:`oracle`, whose problem and schedule it uses.

The smoothed slope is written as the explicit weighted mean over all rounds rather than as a recursion, the brake looks
at the list of all rounds, the climb at that of all steps, and the line is fitted by ``lstsq``, so that little is shared
with the library but the draw of the permutations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

import oracle
import oracle_climb
from hdet.policy.spread import permutation
from oracle import Array, Scenario

MAX_FALL = 2.0  # of log s, before the anchor is renewed


@dataclass(frozen=True)
class AnchorScenario(Scenario):
    """One training run with AutoLR. Symbols: kappa (gain), z0 (optimism, at first and in the end)."""

    cycle_momentum: bool = False
    total_steps: int = 31
    pct_start: float = 0.4
    spread: float = 0.2
    signal: Literal["loss", "gradient"] = "loss"
    anchor_rounds: int | None = None
    together: bool = True
    gated: bool = True
    gain: float = 0.1
    optimism: tuple[float, float] = (2.5, 1.0)
    fall: float | None = 4.0
    brake: tuple[float, float] | None = (0.3, 0.6)
    smoothing: float = 0.5
    up: float = 0.2
    sprint: float = 0.5
    down: float = 1.0
    first_scale: float = 1.0
    start_steps: int = 0
    hold_share: float = 0.1
    scale_bounds: tuple[float, float] = (1e-6, 1e6)
    climb: bool = False
    constant: bool = False  # the learning rate of a run without a schedule: constant, then down to 0 along a line

    def eta(self, max_lr: float, step: int) -> float:
        """What the schedule alone gives."""
        if not self.constant:
            return oracle.schedule(self, max_lr, step)[0]
        return max_lr * min(1.0, (self.total_steps - step) / (0.3 * self.total_steps))


@dataclass
class AnchorRound:
    step: int
    losses: Array  # (N,)
    base_values: Array  # (G,)
    scales: Array  # (K,)
    distance: float
    slope: Array | None = None  # (K,), None while the controller is not acting
    standard_error: Array | None = None
    z: Array | None = None
    cost: Array | None = None  # of the brake
    new_anchor: bool = False
    phase: str = ""
    restart: bool = False


@dataclass
class AnchorTrajectory:
    lrs: Array  # (S, N, G)
    losses: Array  # (S, N)
    weights: Array  # (S, N, P), after each step, converge and placing included
    multipliers: Array  # (S, K, N), of the round that the step belongs to
    rounds: list[AnchorRound] = field(default_factory=list)


class Evidence:
    """Eq. 12 for one knob, from the list of all rounds so far."""

    def __init__(self, scenario: AnchorScenario) -> None:
        self.scenario = scenario
        self.slopes: list[float] = []
        self.variances: list[float] = []
        self.losses: list[float] = []

    def smoothed(self, values: list[float]) -> float:
        weights = [self.scenario.smoothing**age for age in range(len(values))][::-1]
        return float(np.average(values, weights=weights))

    def add(self, slope: float, error: float | None, loss: float) -> tuple[float, float, float]:
        """Takes in a round; returns smoothed slope, its standard error and z."""
        self.losses.append(loss)
        before = self.smoothed(self.slopes) if self.slopes else 0.0
        variance = (slope - before) ** 2 if error is None else error**2
        usual = 9 * self.smoothed(self.variances) if self.variances else 0.0
        if error is not None and 0 < usual < variance:  # an outlier: three times the usual standard error, no more
            slope, variance = before + (slope - before) * math.sqrt(usual / variance), usual
        self.slopes.append(slope)
        self.variances.append(variance)
        s = self.scenario.smoothing
        standard_error = math.sqrt(self.smoothed(self.variances) * (1 - s) / (1 + s))
        slope = self.smoothed(self.slopes)
        return slope, standard_error, slope / standard_error if slope else 0.0  # at the anchor itself: no evidence

    def cost_over_gain(self) -> float:
        """B / R: the mean slope of the last quarter, over what the loss would fall while the time grows e-fold.

        A slope above 0 counts two standard errors less. Of 128 rounds or more two count as one, of 256 four, and so on;
        those that are left over do not.
        """
        stride = 1
        while len(self.slopes) // stride >= 128:
            stride *= 2
        num = len(self.slopes) // stride
        if num < 8:
            return 0.0
        slopes = [float(np.mean(self.slopes[i * stride : (i + 1) * stride])) for i in range(num)]
        losses = [float(np.mean(self.losses[i * stride : (i + 1) * stride])) for i in range(num)]
        late, then = losses[int(num * 3 / 4) :], losses[int(num * 3 / 8) : int(num / 2)]
        steps = [b - a for a, b in itertools.pairwise(late)]
        one = sum(step**2 for step in steps) / len(steps) / 2  # the variance of one, from successive differences
        noise = math.sqrt(one / len(late) + one / len(then))
        gain = max(float(np.mean(then) - np.mean(late)), noise) / math.log(2)
        recent = slopes[int(num * 3 / 4) :]
        turns = [(b - a) ** 2 for a, b in itertools.pairwise(recent)]
        error = math.sqrt(sum(turns) / len(turns) / 2 / len(recent))
        slope = float(np.mean(recent))
        return (slope if slope < 0 else max(slope - 2 * error, 0.0)) / gain

    def move(self, z: float, risen: float, progress: float) -> float:
        """Eq. 12 and 15. The limit of a rise, the schedule's own included, goes from up to sprint as -z from 10 to 60.

        Between z0 and ``fall`` it holds still. The brake fades rises out, and then lowers.
        """
        s = self.scenario
        limit = s.up + (s.sprint - s.up) * min(max((-z - 10) / 50, 0.0), 1.0)
        optimism = (1 - progress) * s.optimism[0] + progress * s.optimism[1]
        fall = optimism if s.fall is None else s.fall
        if z < optimism:
            wanted = min(s.gain * (optimism - z) / 2, limit)
        else:
            wanted = max(-s.gain * max(z - fall, 0.0) / 2, -s.down)
        if s.brake is not None:
            cost, (low, high) = self.cost_over_gain(), s.brake
            if wanted > 0 and cost > low:
                wanted *= max((high - cost) / (high - low), 0.0)
            if cost > high:
                wanted = min(wanted, -s.down * min(cost - high, 1.0))
        return min(wanted, max(limit - risen, 0.0))


def fitted_line(rho: Array, losses: Array) -> tuple[float, float | None]:
    """Slope of the losses on rho - 1, and its standard error where there are residuals."""
    design = np.stack([np.ones_like(rho), rho - 1], axis=1)
    solution = np.linalg.lstsq(design, losses, rcond=None)[0]
    if len(losses) < 3:
        return float(solution[1]), None
    residuals = losses - design @ solution
    covariance = np.linalg.inv(design.T @ design) * np.sum(residuals**2) / (len(losses) - 2)
    return float(solution[1]), math.sqrt(covariance[1, 1])


def simulate(scenario: AnchorScenario, num_replicas: int) -> AnchorTrajectory:
    """Train all replicas and write down everything."""
    num_groups, num_tensors = len(scenario.max_lr), 4
    group_of = [0] * num_tensors if num_groups == 1 else list(range(num_tensors))
    num_knobs = 1 if scenario.together else num_groups
    knob_of = [0] * num_groups if scenario.together else list(range(num_groups))
    update = oracle.OPTIMIZERS[scenario.optimizer]
    replicas = range(num_replicas)
    spreads = scenario.signal == "loss"

    theta = [oracle.initial_weights(scenario.seed) for _ in replicas]
    anchor = oracle.initial_weights(scenario.seed)
    memory = [[oracle.Memory() for _ in range(num_tensors)] for _ in replicas]
    evidence = [Evidence(scenario) for _ in range(num_knobs)]
    scales, openness = np.full(num_knobs, scenario.first_scale), np.zeros(num_knobs)
    risen, fallen = np.zeros(num_knobs), np.zeros(num_knobs)
    rising = [scenario.gated or scenario.climb] * num_knobs
    climbed: list[tuple[float, float]] = []  # loss and slope of each step of the climb
    climbing, num_attempts, ended, warm, ramp = scenario.climb, 1, 0, 0, 0
    if climbing:
        scales = np.full(num_knobs, 0.01)
    rho = fan_out(scenario, num_knobs, num_replicas, 0) if spreads else np.ones((num_knobs, num_replicas))
    reported: list[list[float]] = []
    samples: list[Array] = []
    result = AnchorTrajectory(
        lrs=np.empty((scenario.total_steps, num_replicas, num_groups)),
        losses=np.empty((scenario.total_steps, num_replicas)),
        weights=np.empty((scenario.total_steps, num_replicas, len(oracle.flat(theta[0])))),
        multipliers=np.empty((scenario.total_steps, num_knobs, num_replicas)),
    )

    for step in range(scenario.total_steps):
        eta = np.array([scenario.eta(lr, step) for lr in scenario.max_lr])
        if step > 0:  # Eq. 13; all groups share the shape of the schedule
            before = scenario.eta(scenario.max_lr[0], step - 1)
            g = math.log(eta[0] / before)
            for k in range(num_knobs):
                rising[k] = rising[k] and g >= 0
                if rising[k]:
                    scales[k] *= math.exp(-g * (1 - openness[k]))
                    risen[k] += g * openness[k]
            scales = np.clip(scales, *scenario.scale_bounds)
            if 0 < ramp < warm:
                ramp += 1
                scales *= ramp / (ramp - 1)
                risen += math.log(ramp / (ramp - 1))

        result.multipliers[step] = rho
        found = [oracle.loss_and_gradient(theta[r], *oracle.batch(scenario.seed, step, r)) for r in replicas]
        shared = [np.mean([gradient[i] for _, gradient in found], axis=0) for i in range(num_tensors)]
        sample = np.zeros(num_knobs)
        for i in range(num_tensors):
            sample[knob_of[group_of[i]]] += np.sum(shared[i] * (theta[0][i] - anchor[i]))
        samples.append(sample)
        for r in replicas:
            for j in range(num_groups):
                k = knob_of[j]
                result.lrs[step, r, j] = eta[j] * scales[k] * rho[k, r]
            for i in range(num_tensors):
                lr = float(result.lrs[step, r, group_of[i]])
                theta[r][i] = update(theta[r][i], shared[i], memory[r][i], lr, oracle.FIXED_MOMENTUM, 0.0)
        result.losses[step] = [loss for loss, _ in found]
        reported.append([loss for loss, _ in found])

        num_done = step + 1
        last = num_done == scenario.total_steps
        if climbing:
            climbed.append((float(np.mean(reported)), float(sample.sum())))
            first_lr = scenario.eta(scenario.max_lr[0], 0)
            lrs, endings, scale = oracle_climb.climb(climbed, first_lr, scenario.total_steps)
            told = AnchorRound(num_done, np.array(reported[0]), eta, scales, 0.0, slope=sample, phase="climb")
            if len(endings) > num_attempts or endings[-1]:  # Eq. 14: all is put back
                theta = [oracle.initial_weights(scenario.seed) for _ in replicas]
                memory = [[oracle.Memory() for _ in range(num_tensors)] for _ in replicas]
                num_attempts, told.restart = len(endings), True
            scales = scales * (scale * first_lr / lrs[-1])
            if endings[-1]:
                climbing, ended, ramp = False, num_done, 1
                warm = min(max(int(0.06 * scenario.total_steps), 1), 500)
                scales = scales / warm
            told.scales, told.base_values = scales.copy(), eta * scales[knob_of]
            result.rounds.append(told)
            reported, samples = [], []
            risen = np.zeros(num_knobs)
            result.weights[step] = [oracle.flat(t) for t in theta]
            continue
        whole = num_done % scenario.interval == 0 and num_done - ended >= min(4, scenario.interval)
        if whole or last:
            mean = [np.mean([theta[r][i] for r in replicas], axis=0) for i in range(num_tensors)]
            distance = max(float(np.linalg.norm(oracle.flat(theta[r]) - oracle.flat(mean))) for r in replicas)
            losses = np.mean(reported, axis=0)
            told = AnchorRound(num_done, losses, eta, scales, distance)
            hold = (1 - scenario.hold_share) * scenario.total_steps
            if scenario.start_steps < num_done <= hold:
                rows = []
                for k in range(num_knobs):
                    slope, error = fitted_line(rho[k], losses) if spreads else mean_and_error([s[k] for s in samples])
                    rows.append(evidence[k].add(slope, error, float(np.mean(losses))))
                told.slope, told.standard_error, told.z = (np.array(column) for column in zip(*rows, strict=True))
                moves = np.array(
                    [evidence[k].move(float(told.z[k]), float(risen[k]), num_done / hold) for k in range(num_knobs)]
                )
                told.cost = np.array([evidence[k].cost_over_gain() for k in range(num_knobs)])
                scales = np.clip(scales * np.exp(moves), *scenario.scale_bounds)
                openness = np.zeros(num_knobs) if scenario.climb else np.clip(-told.z / 2, 0, 1)
                fallen = np.maximum(fallen - moves, 0)
                if (fallen >= MAX_FALL).any():  # from so far above, the way since the anchor tells nothing any more
                    anchor = [m.copy() for m in mean]
                    told.new_anchor = True
                    evidence = [Evidence(scenario) for _ in range(num_knobs)]
                    openness, fallen = np.zeros(num_knobs), np.zeros(num_knobs)
            told.scales, told.base_values = scales.copy(), eta * scales[knob_of]
            result.rounds.append(told)

            # Eq. 9 and 11
            index = len(result.rounds)
            if spreads:
                rho = fan_out(scenario, num_knobs, num_replicas, index)
            if scenario.anchor_rounds is not None and index % scenario.anchor_rounds == 0:
                anchor = [m.copy() for m in mean]
            for r in replicas:
                for i in range(num_tensors):
                    place = 1.0 if last else rho[knob_of[group_of[i]], r]
                    theta[r][i] = anchor[i] + place * (mean[i] - anchor[i])
            reported, samples = [], []
            risen = np.zeros(num_knobs)
        result.weights[step] = [oracle.flat(t) for t in theta]
    return result


def mean_and_error(samples: list[float]) -> tuple[float, float | None]:
    n = len(samples)
    mean = sum(samples) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(sum((s - mean) ** 2 for s in samples) / (n - 1) / n)


def fan_out(scenario: AnchorScenario, num_knobs: int, num_replicas: int, round_index: int) -> Array:
    rho = np.empty((num_knobs, num_replicas))
    for k in range(num_knobs):
        pi = permutation(num_replicas, seed=scenario.seed, round_index=round_index, knob=k)
        for r in range(num_replicas):
            place = r if round_index == 0 else int(pi[r])
            rho[k, r] = oracle.multiplier(place, num_replicas, scenario.spread)
    return rho
