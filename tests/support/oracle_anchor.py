"""Eq. 11, 12, 16 and 17 and the first-order signal in plain NumPy, beside :mod:`oracle`, whose problem it uses.

The smoothed slope is written as the explicit weighted mean over all rounds rather than as a recursion, the level and
what the run has gained are looked up in lists of all rounds so far, and the line is fitted by ``lstsq``, so that little
is shared with the library but the draw of the permutations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

import oracle
from hdet.policy.spread import permutation
from oracle import Array, Scenario

MAX_FALL = 2.0  # of log s, before the anchor is renewed


@dataclass(frozen=True)
class AnchorScenario(Scenario):
    """One training run with AutoLR. Symbols: kappa (gain), z0 (optimism), c (pace)."""

    cycle_momentum: bool = False
    total_steps: int = 31
    pct_start: float = 0.4
    spread: float = 0.2
    signal: Literal["loss", "gradient"] = "loss"
    controller: Literal["evidence", "level"] = "evidence"
    anchor_rounds: int | None = None
    together: bool = True
    gain: float = 0.1
    optimism: float = 0.75
    smoothing: float = 0.5
    up: float = 0.2
    sprint: float = 0.5
    down: float = 1.0
    pace: float = 1.5
    max_update: tuple[float, float] | None = (0.005, 0.008)
    start_steps: int = 0
    hold_share: float = 0.1
    scale_bounds: tuple[float, float] = (1e-6, 1e6)
    level: bool = False  # whether the first learning rate is found
    constant: bool = False  # the learning rate of a run without a schedule: constant, then down to 0 along a line

    def eta(self, max_lr: float, step: int) -> float:
        """What the schedule alone gives."""
        if not self.constant:
            return oracle.schedule(self, max_lr, step)[0]
        ratio = max_lr / self.max_lr[0] if self.level else max_lr
        return ratio * min(1.0, (self.total_steps - step) / (0.3 * self.total_steps))


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
    elasticity: Array | None = None  # of the level controller
    progress: Array | None = None
    cost: Array | None = None
    new_anchor: bool = False
    searching: bool = False
    in_warmup: bool = False


@dataclass
class AnchorTrajectory:
    lrs: Array  # (S, N, G)
    losses: Array  # (S, N)
    weights: Array  # (S, N, P), after each step, converge and placing included
    multipliers: Array  # (S, K, N), of the round that the step belongs to
    rounds: list[AnchorRound] = field(default_factory=list)


# -- Eq. 16 ---------------------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """The step that has ended a round: norms of weights, update and gradient."""

    step: int
    rate: float  # the first group's base learning rate
    scheduled: float
    weights: float
    update: float
    gradient: float


class Found(NamedTuple):
    """The level after some rounds.

    ``scale``: of the schedule; ``rises``: whether along a warm-up of its own; ``followed``: whether the schedule is;
    ``below``, ``above``: by how much the level is below or above the peak of a schedule that is followed;
    ``usual``: the learning rate that progress leads up to where there is no schedule.
    """

    scale: float
    known: bool = False
    done: bool = False
    rises: bool = False
    followed: bool = True
    below: float = 1.0
    above: float = 1.0
    usual: float = math.inf
    of_one_size: float = 0.0

    def share(self, num_steps: int, warm: int) -> float:
        """Of the scale, in the step that makes it ``num_steps``: a line, then a constant factor a step."""
        rising = min(num_steps / warm, 1.0) if self.rises else 1.0
        return rising * math.exp(math.log(self.below) * between(-num_steps, -3 * warm, -warm))


def kind_of(updates: list[Update], num_entries: int) -> Literal["sign", "gradient", "neither"]:
    """What the first update that could be measured was like."""
    for u in updates:
        size = max(u.weights, 1e-3 * math.sqrt(num_entries))
        if u.rate > 0 and u.update > 1e-6 * size:
            unit = u.update / u.rate
            if 0.3 <= unit / math.sqrt(num_entries) <= 1.05:
                return "sign"
            return "gradient" if 0.3 <= unit / u.gradient <= 8.0 else "neither"
    return "neither"


def highest_allowance(updates: list[Update], num_entries: int) -> float:
    return 2.0 if kind_of(updates, num_entries) == "gradient" else 6.0


def allowance_of(weights: float, num_entries: int, highest: float, most_taken: float = math.inf) -> float:
    """What a step may do, by the size of the model and of its weights, the former of which takes off ``most_taken``."""
    times = num_entries / 3e6
    taken = min(times**0.4 if times <= 1 else times**0.8, most_taken)
    size = max(weights / math.sqrt(num_entries), 1e-3)
    return float(np.clip((0.06 / size) ** 0.75 / taken, 1 / 3, highest))


def share_of(s: AnchorScenario) -> float:
    """What one of a short run has to do, beside one of a long run."""
    return min(math.sqrt(max(200 / s.total_steps, 1.0)), 2.0)


def find_level(s: AnchorScenario, updates: list[Update], num_entries: int) -> Found:
    """Where the run stands, from all updates so far; those after the warm-up do not count."""
    peak = 1.0 if s.constant else max(s.eta(s.max_lr[0], step) for step in range(s.total_steps))
    warm = max(int(0.06 * s.total_steps), 1)
    ratios: list[float] = []
    weights, probe, scale = 0.0, 0.0, 1e-12 / peak
    for u in updates:
        size = max(u.weights, 1e-3 * math.sqrt(num_entries))
        if u.rate > 0 and u.update > 1e-6 * size:
            weights = size
            ratios.append(u.update / u.rate)
        elif not ratios:
            aims = [1e-4 * size / math.sqrt(num_entries), 1e-4 * size / u.gradient]
            probe = min((aim for aim in aims if aim > probe), default=100 * probe)
            scale = probe / max(u.scheduled, peak / 1000)
        if ratios and u.step >= max(warm, 4):
            break
    if not ratios:
        return Found(scale)
    done = updates[-1].step >= max(warm, 4)
    allowed = allowance_of(weights, num_entries, highest_allowance(updates, num_entries))
    kind = kind_of(updates, num_entries)
    low, high = (0.95, 0.99) if kind == "sign" else (0.75, 0.9)
    of_one_size = between(min(ratios) / max(ratios), low, high)
    lr = 0.02 * 0.4**of_one_size * allowed * share_of(s) * weights / (max(ratios) + 2 * ratios[-1])
    warms_up_itself = not s.constant and s.eta(s.max_lr[0], 0) < peak / 2
    if not s.constant and min(lr, lr / allowed) / 8 <= peak <= 8 * max(lr, lr / allowed):
        return Found(1.0, True, done, lr < peak and not warms_up_itself, below=min(lr / peak, 1.0), above=lr / peak)
    usual = math.inf
    if s.constant and kind != "gradient":
        mean = weights / math.sqrt(num_entries)
        best = (0.06 / mean) ** 0.87 * max((3e6 / num_entries) ** 0.55, 1.0)  # first updates, over 2% of the weights
        usual = 0.032 * share_of(s) * best * weights / min(max(ratios), math.sqrt(num_entries))
        usual /= (13 if kind == "sign" else 8) ** of_one_size
    return Found(lr / peak, True, done, not warms_up_itself, followed=False, usual=usual, of_one_size=of_one_size)


def norm(parts: list[Array]) -> float:
    return math.sqrt(sum(float(np.sum(part**2)) for part in parts))


# -- Eq. 12 and 17 --------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """What a round has shown beside its slopes."""

    loss: float
    start: tuple[float, float] | None  # the loss before training, and the standard error of the fall since
    update: float | None  # relative to the weights, as of a small model in a long run
    ease: float
    further: float
    shrinks: float
    in_warmup: bool
    elapsed: float
    progress: float
    relative_scale: float  # to the level
    scale: float  # to the schedule
    given: float  # what progress leads up to; infinite where nobody has chosen a schedule, or one far below the level
    usual: float  # what it leads up to where updates are of the usual size, for models of this size
    left: tuple[int, int] | None  # steps of the run after the round and before; None where the schedule is chosen


class Evidence:
    """The controllers for one knob, from the list of all rounds so far."""

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

    def move(self, z: float, shown: Shown) -> float:
        """Eq. 12. The limit of a rise goes from up to sprint as -z from 10 to 60."""
        s = self.scenario
        if s.controller == "level":
            return self.level_move(z, shown)
        limit = s.up + (s.sprint - s.up) * between(-z, 10, 60)
        return float(np.clip(s.gain * (s.optimism - z) / 2, -s.down, 0.0 if shown.in_warmup else limit))

    def rows(self) -> list[tuple[float, float]]:
        """Slope and loss: of 128 rounds or more two count as one, of 256 four; those that are left over do not."""
        stride = 1
        while len(self.slopes) // stride >= 128:
            stride *= 2
        both = np.array([self.slopes, self.losses])
        return [tuple(both[:, i : i + stride].mean(axis=1)) for i in range(0, len(self.slopes) - stride + 1, stride)]

    def looked_back(self) -> dict[str, float]:
        """The last quarter of the run so far, beside the eighth before its middle."""
        rows = self.rows()
        num = len(rows)
        if num < 8:
            return {}
        slopes, losses = ([row[i] for row in rows] for i in (0, 1))
        kinks = [abs(a - 2 * b + c) for a, b, c in zip(*(losses[num // 2 + i :] for i in range(3)), strict=False)]
        starts = [min(max(i - 2, 0), num - 5) for i in range(num)]
        room = (3 + 12 / len(kinks)) * float(np.median(kinks))
        limits = [float(np.median(losses[at : at + 5])) + room for at in starts]
        losses = [min(loss, limit) for loss, limit in zip(losses, limits, strict=True)]
        late, then = losses[int(num * 3 / 4) :], losses[int(num * 3 / 8) : int(num / 2)]
        second_half = losses[int(num / 2) :]
        bends = [
            (a - 2 * b + c) ** 2 / 6 for a, b, c in zip(second_half, second_half[1:], second_half[2:], strict=False)
        ]
        deviation = math.sqrt(sum(bends) / len(bends)) * (1 + 2 / len(bends))
        noise = math.hypot(deviation / math.sqrt(len(late)), deviation / math.sqrt(len(then)))
        drop = float(np.mean(then) - np.mean(late))
        recent = slopes[int(num * 3 / 4) :]
        turns = [(b - a) ** 2 for a, b in itertools.pairwise(recent)]
        error = math.sqrt(sum(turns) / len(turns) / 2 / len(recent))
        slope = float(np.mean(recent))
        return {
            "progress": drop / noise,
            "cost": slope / (max(drop, noise) / math.log(2)),
            "least": (slope - 2 * error) / (max(drop, noise) / math.log(2)),
            "most": (slope + 2 * error) / (max(drop, noise) / math.log(2)),
            "slope": slope,
            "z": slope / error,
            "jump": (losses[-1] - losses[-2]) / (math.sqrt(2) * deviation),
        }

    def elasticity(self, slope: float, shown: Shown) -> float:
        """B over the fall of the loss; one that falls no further than the slope says is linear."""
        if shown.start is None:
            return 0.0
        first, error = shown.start
        fall = first - shown.loss
        if slope < 0:
            return max(slope / max(fall - 2 * error, -slope), -0.98)
        return min(slope / max(fall, error), 10.0)

    def level_move(self, z: float, shown: Shown) -> float:
        """Eq. 17."""
        s, past = self.scenario, self.looked_back()
        q, cost, most = past.get("progress", 0.0), past.get("cost", 0.0), past.get("most", 1.0)
        e = self.elasticity(self.smoothed(self.slopes), shown)
        z0 = 2.5 - 1.5 * min(shown.progress, 1.0)
        cheap = between(shown.progress, 0.2, 0.5) * between(-cost, -0.3, -0.1)
        chosen = shown.given < math.inf
        wanted = between(-most, 0.0, 0.3)
        surely = 0.0 if chosen else shown.shrinks * wanted * between(-z, 10, 20) * between(shown.progress, 0.2, 0.5)
        faster, unopposed = 3.0**surely, max(between(z0 - z, 0, z0), cheap)
        has_learned = shown.start is not None and shown.start[0] - shown.loss > 10 * shown.start[1]
        if s.max_update is not None and shown.update is not None and has_learned:
            update = shown.update * shown.ease ** between(-most, 0.0, 0.05)
            doublings = math.log(s.max_update[0] / max(update, 1e-300)) / math.log(2)
            faster, unopposed = max(faster, min(doublings / 2, 3)), max(unopposed, between(doublings, 1, 2))
        moves: list[float] = [s.pace * faster * shown.elapsed * unopposed * between(q, 3, 10)]
        highest = shown.usual * math.pow(4, surely) * math.pow(shown.further, between(-most, -0.05, 0.0))
        if s.max_update is not None and shown.update is not None and shown.update < s.max_update[0] / 2:
            highest *= s.max_update[0] / 2 / max(shown.update, 1e-300)
        highest = min(highest, shown.given)  # or a schedule that somebody has chosen
        if math.exp(moves[0]) * shown.scale > highest:
            moves[0] = max(math.log(highest / shown.scale), 0.0)
        asked_for = z < -2 and e < 0
        if asked_for and (z < -4 or q >= 3):
            moves[0] += 2 * shown.elapsed * math.log((1 + e / 2) / (1 + e))
            if e < -0.8:
                moves[0] = max(moves[0], 0.3 * between(-z, 4, 10))
        if s.max_update is not None and shown.update is not None and e >= -0.8:
            early, late = s.max_update
            widest = early * (late / early) ** between(shown.progress, 0.1, 0.7)
            widest *= math.pow(4, wanted if chosen and shown.scale < 1 else surely)  # somebody has chosen a higher rate
            update = shown.update * shown.ease ** between(-most, -0.1, -0.05)
            moves[0] *= between(widest - update, 0, 0.3 * widest)
        moves[0] = min(moves[0] * between(-cost, -0.6, -0.3), 0.3)
        if shown.in_warmup or past.get("jump", 0.0) > 2:
            moves[0] = 0.0
        if not shown.in_warmup and shown.left is not None:  # the decay comes early where noise costs much of the gain
            after, before = shown.left
            moves[0] -= between(cost, 0.3, 0.6) * between(shown.progress, 0.2, 0.5) * math.log(before / after)
        lowest = 0.03 if q < -3 else 1.0
        no_plateau = q < -3 or past.get("z", 0.0) >= -0.5
        if past and q < 1 and no_plateau and not asked_for and not shown.in_warmup and shown.relative_scale > lowest:
            moves.append(-0.1 * min(1 - q, 1.0))
        for sure, over in ((z > 4, e), (past.get("z", 0.0) > 2, self.elasticity(past.get("slope", 0.0), shown))):
            if sure and over > 0.25:
                moves.append(-min(2 * shown.elapsed * math.log((1 + over) / (1 + over / 2)), 0.2))
        if (least := past.get("least", 0.0)) > 2:
            moves.append(-min(2 * shown.elapsed * min(least - 2, 1.0), 0.2))
        return min(moves)


def between(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, and along a line from one to the other."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


def fitted_line(rho: Array, losses: Array) -> tuple[float, float | None]:
    """Slope of the losses on rho - 1, and its standard error where there are residuals."""
    design = np.stack([np.ones_like(rho), rho - 1], axis=1)
    solution = np.linalg.lstsq(design, losses, rcond=None)[0]
    if len(losses) < 3:
        return float(solution[1]), None
    residuals = losses - design @ solution
    covariance = np.linalg.inv(design.T @ design) * np.sum(residuals**2) / (len(losses) - 2)
    return float(solution[1]), math.sqrt(covariance[1, 1])


# -- the method -----------------------------------------------------------------------------------------------------


def simulate(scenario: AnchorScenario, num_replicas: int) -> AnchorTrajectory:
    """Train all replicas and write down everything."""
    num_groups, num_tensors = len(scenario.max_lr), 4
    group_of = [0] * num_tensors if num_groups == 1 else list(range(num_tensors))
    num_knobs = 1 if scenario.together else num_groups
    knob_of = [0] * num_groups if scenario.together else list(range(num_groups))
    update = oracle.OPTIMIZERS[scenario.optimizer]
    replicas = range(num_replicas)
    spreads = scenario.signal == "loss"
    warm = max(int(0.06 * scenario.total_steps), 1)
    hold = (1 - scenario.hold_share) * scenario.total_steps

    theta = [oracle.initial_weights(scenario.seed) for _ in replicas]
    anchor = oracle.initial_weights(scenario.seed)
    memory = [[oracle.Memory() for _ in range(num_tensors)] for _ in replicas]
    evidence = [Evidence(scenario) for _ in range(num_knobs)]
    moved, fallen = np.ones(num_knobs), np.zeros(num_knobs)  # the scales are the level's times this
    updates: list[Update] = []
    num_entries = len(oracle.flat(anchor))
    level = find_level(scenario, updates, num_entries) if scenario.level else Found(1.0, True, True)
    searching, begun, before = scenario.level, 0, 0.0
    first_losses: list[float] = []
    rho = fan_out(scenario, num_knobs, num_replicas, 0) if spreads else np.ones((num_knobs, num_replicas))
    reported: list[list[float]] = []
    samples: list[Array] = []
    result = AnchorTrajectory(
        lrs=np.empty((scenario.total_steps, num_replicas, num_groups)),
        losses=np.empty((scenario.total_steps, num_replicas)),
        weights=np.empty((scenario.total_steps, num_replicas, num_entries)),
        multipliers=np.empty((scenario.total_steps, num_knobs, num_replicas)),
    )

    for step in range(scenario.total_steps):
        eta = np.array([scenario.eta(lr, step) for lr in scenario.max_lr])
        scales = level.scale * moved * level.share(step + 1, warm)
        result.multipliers[step] = rho
        found = [oracle.loss_and_gradient(theta[r], *oracle.batch(scenario.seed, step, r)) for r in replicas]
        shared = [np.mean([gradient[i] for _, gradient in found], axis=0) for i in range(num_tensors)]
        sample = np.zeros(num_knobs)
        for i in range(num_tensors):
            sample[knob_of[group_of[i]]] += np.sum(shared[i] * (theta[0][i] - anchor[i]))
        samples.append(sample)
        sizes = []
        for r in replicas:
            for j in range(num_groups):
                k = knob_of[j]
                result.lrs[step, r, j] = eta[j] * scales[k] * rho[k, r]
            old = theta[r]
            theta[r] = [
                update(
                    old[i], shared[i], memory[r][i], float(result.lrs[step, r, group_of[i]]), oracle.FIXED_MOMENTUM, 0.0
                )
                for i in range(num_tensors)
            ]
            sizes.append((norm(old), norm([new - was for new, was in zip(theta[r], old, strict=True)])))
        result.losses[step] = [loss for loss, _ in found]
        reported.append([loss for loss, _ in found])

        num_done = step + 1
        last = num_done == scenario.total_steps
        due = searching or num_done % scenario.interval == 0
        if due or last:
            mean = [np.mean([theta[r][i] for r in replicas], axis=0) for i in range(num_tensors)]
            distance = max(float(np.linalg.norm(oracle.flat(theta[r]) - oracle.flat(mean))) for r in replicas)
            losses = np.mean(reported, axis=0)
            told = AnchorRound(num_done, losses, eta, scales, distance, searching=searching)
            weights, change = (math.sqrt(np.mean([row[i] ** 2 for row in sizes])) for i in (0, 1))
            acting = not searching and scenario.start_steps < num_done <= hold
            if scenario.level and due:  # Eq. 16
                rate = float(eta[0] * scales[0])
                updates.append(Update(num_done, rate, float(eta[0]), weights, change, norm(shared)))
                level = find_level(scenario, updates, num_entries)
                searching = not level.known or num_done < 4
            told.in_warmup = not level.done or (level.followed and eta[0] > before * (1 + 1e-6) > 0)
            if acting:
                num_steps, start = num_done - begun, None
                allowed = allowance_of(weights, num_entries, highest_allowance(updates, num_entries), 1 / 0.3)
                if len(first_losses) == 4:
                    first = float(np.mean(first_losses))
                    noise = max(float(np.std(first_losses, ddof=1)), abs(first) / 1000)
                    start = first, noise * math.sqrt(1 / 4 + 1 / num_steps)
                moves, rows = np.zeros(num_knobs), []
                is_ours = scenario.level and scenario.constant
                chosen = scenario.level and not scenario.constant and (level.followed or level.scale < 1)
                for k in range(num_knobs):
                    shown = Shown(
                        loss=float(np.mean(losses)),
                        start=start,
                        update=change / weights / allowed / share_of(scenario) if scenario.level and due else None,
                        ease=min(allowed / 3, 1.0),
                        shrinks=1 - level.of_one_size,
                        further=float(np.clip(math.sqrt(num_entries / 3e6), 1, 2)),
                        in_warmup=told.in_warmup,
                        elapsed=min(math.log(num_done / max(begun, 1)), 0.7),
                        progress=num_done / hold,
                        relative_scale=float(moved[k]),
                        scale=float(level.scale * moved[k]),
                        given=float(np.clip(level.above, 1.0, 3.0)) if chosen else math.inf,
                        usual=level.usual,
                        left=(scenario.total_steps - num_done, scenario.total_steps - begun) if is_ours else None,
                    )
                    slope, error = fitted_line(rho[k], losses) if spreads else mean_and_error([s[k] for s in samples])
                    slope, error, z = evidence[k].add(slope, error, shown.loss)
                    past = evidence[k].looked_back()
                    e = evidence[k].elasticity(slope, shown)
                    rows.append((slope, error, z, e, past.get("progress", 0.0), past.get("cost", 0.0)))
                    moves[k] = evidence[k].move(z, shown)
                columns = [np.array(column) for column in zip(*rows, strict=True)]
                told.slope, told.standard_error, told.z = columns[:3]
                if scenario.controller == "level":
                    told.elasticity, told.progress, told.cost = columns[3:]
                moved = np.clip(moved * np.exp(moves), *scenario.scale_bounds)
                fallen = np.maximum(fallen - moves, 0)
                if (fallen >= MAX_FALL).any():  # from so far above, the way since the anchor tells nothing any more
                    anchor = [m.copy() for m in mean]
                    told.new_anchor = True
                    evidence = [Evidence(scenario) for _ in range(num_knobs)]
                    fallen = np.zeros(num_knobs)
            if len(first_losses) < 4:
                first_losses.append(float(np.mean(losses)))
            begun, before = num_done, float(eta[0])
            told.scales = level.scale * moved * level.share(num_done, warm)
            told.base_values = eta * told.scales[knob_of]
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
