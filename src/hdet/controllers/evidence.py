"""The evidence controller (Eq. 12): move as far as the slope of the loss is certain."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence

OUTLIER = 3.0
"""A standard error of so many times the usual one is that of an outlier."""
DOUBT = 2.0
"""Of its standard errors: what the brake takes off a slope that speaks against the knob."""
NUM_ROWS = 128
"""Of a trail. A longer run has so many at most, each of several rounds."""


class EvidenceState(NamedTuple):
    """Smoothed slope of the loss over each knob, its smoothed variance, and the weight both have gathered.

    And the trail: slope and loss of all rounds since the evidence began, ``stride`` rounds a row, ``filled`` rows of
    them; ``open`` has the sums of the row that is not full, and how many rounds are in it.
    """

    slope: FloatArray
    variance: FloatArray
    weight: FloatArray
    trail: FloatArray
    filled: FloatArray
    stride: FloatArray
    open: FloatArray


class EvidenceController:
    r"""Raises a knob while a higher value lowers the loss, in units of its standard error.

    With b the slope of the loss over :math:`\log` of the knob, smoothed over rounds, and z = b / its standard error:

    .. math:: \log s \leftarrow \log s + \mathrm{clip}(-\kappa (z - z_0) / 2, -\text{down}, +\text{up}) \quad (12)

    There is no temperature to tune, and the scale is positive by construction. Evidence far beyond doubt lifts the
    limit of a rise from ``up`` to ``sprint``, as |z| goes from 10 to 60: a learning rate that is hundreds of times too
    low is left behind in a few rounds.

    Where z is blind, in front of a model that the knob has almost broken, the *brake* is not: b over R, where R is how
    far the loss falls while the time since the start grows e-fold, which is about what an e times higher learning rate
    could gain. Two standard errors are taken off b first: where a model has moved far and fits closely, as in
    regression, b is mostly noise, and of a size that has nothing to do with R.

    Args:
        gain: kappa > 0.
        optimism: z0 >= 0, how many standard errors of evidence against it a higher value needs. Noise counts as a cost
            that annealing will remove later, so 0 settles several times too low. A pair is what it is at first and what
            it fades to (Eq. 15); their mean in a run that nobody knows the length of.
        fall: z above which the knob falls, at least z0; between, it holds still. None for z0.
        brake: rises fade out as b / R goes from the first to the second of these; above, the knob falls. None for none.
        smoothing: share of the past in the smoothed slope, in [0, 1).
        up, down: largest rise and fall of log s in one round, > 0.
        sprint: largest rise where the evidence is overwhelming, at least ``up``.
    """

    def __init__(
        self,
        *,
        gain: float = 0.1,
        optimism: float | tuple[float, float] = (2.5, 1.0),
        fall: float | None = 4.0,
        brake: tuple[float, float] | None = (0.3, 0.6),
        smoothing: float = 0.5,
        up: float = 0.2,
        sprint: float = 0.5,
        down: float = 0.2,
    ) -> None:
        for name, value in (("gain", gain), ("up", up), ("down", down)):
            require(number(value) > 0, name, "a finite number > 0", value)
        pair = optimism if isinstance(optimism, (tuple, list)) else (optimism, optimism)
        fine = len(pair) == 2 and all(number(z) >= 0 for z in pair)
        require(fine, "optimism", "a finite number >= 0, or a pair of them", optimism)
        require(fall is None or number(fall) >= max(pair), "fall", f"None or at least optimism, {max(pair)!r}", fall)
        ordered = brake is None or (
            isinstance(brake, (tuple, list)) and len(brake) == 2 and 0 <= number(brake[0]) < number(brake[1])
        )
        require(ordered, "brake", "None or a pair of numbers, 0 <= low < high", brake)
        require(0 <= number(smoothing) < 1, "smoothing", "in [0, 1)", smoothing)
        if not up <= number(sprint):
            raise ValueError(f"sprint must be at least up={up!r}, but got sprint={shown(sprint)}")
        self.gain, self.optimism, self.fall, self.smoothing = gain, (float(pair[0]), float(pair[1])), fall, smoothing
        self.brake = None if brake is None else (float(brake[0]), float(brake[1]))
        self.up, self.sprint, self.down = up, sprint, down

    def init(self, num_knobs: int) -> EvidenceState:
        slope, variance, weight, filled = (np.zeros(num_knobs) for _ in range(4))
        trail, rest = np.zeros((num_knobs, NUM_ROWS, 2)), np.zeros((num_knobs, 3))
        return EvidenceState(slope, variance, weight, trail, filled, np.ones(num_knobs), rest)

    def forget(self, state: EvidenceState) -> EvidenceState:
        """Without the evidence of a round that was undone and those before; what the run has gained stays known."""
        fresh = self.init(len(state.slope))
        return state._replace(slope=fresh.slope, variance=fresh.variance, weight=fresh.weight)

    def check_state(self, state: EvidenceState) -> None:
        if (state.variance < 0).any() or (state.weight < 0).any() or (state.weight > 1 + 1e-9).any():
            raise ValueError(
                f"variance must be >= 0 and weight in [0, 1], but got {state.variance.tolist()} and "
                f"{state.weight.tolist()}"
            )
        counts = np.stack([state.filled, state.stride, state.open[:, 2]])
        fine = (counts >= 0).all() and (counts % 1 == 0).all()
        if not fine or (state.filled >= NUM_ROWS).any() or (state.stride < 1).any():
            raise ValueError(
                f"filled must be below {NUM_ROWS} and stride >= 1, whole numbers, but got {counts.tolist()}"
            )

    def update(self, state: EvidenceState, evidence: Evidence) -> tuple[EvidenceState, Decision]:
        slope, error = evidence.slopes if evidence.slopes is not None else loss_slopes(evidence)
        seen = np.isfinite(slope)
        keep = np.where(seen, self.smoothing, 1.0)
        gain = 1 - keep
        previous = state.slope / np.maximum(state.weight, 1e-300)
        # Where one round cannot tell its own error (two replicas, one sample), successive rounds do: their
        # difference from the smoothed slope, which is the slope itself in the first round.
        variance = np.where(np.isfinite(error), error, slope - np.where(state.weight > 0, previous, 0.0)) ** 2
        # A round in which training has almost broken has slopes of any size. It must not hide, by its standard error,
        # what the rounds after it show.
        usual = OUTLIER**2 * state.variance / np.maximum(state.weight, 1e-300)
        with np.errstate(divide="ignore", invalid="ignore"):
            is_outlier = np.isfinite(error) & (usual > 0) & (variance > usual)
            slope = np.where(is_outlier, previous + (slope - previous) * np.sqrt(usual / variance), slope)
        variance = np.where(is_outlier, usual, variance)
        new = state._replace(
            slope=keep * state.slope + gain * np.where(seen, slope, 0.0),
            variance=keep * state.variance + gain * np.where(seen, variance, 0.0),
            weight=keep * state.weight + gain,
        )
        if self.brake is not None:
            new = _followed(new, slope, evidence.losses)
        weight = np.maximum(new.weight, 1e-300)
        # Independent rounds with weights (1-s) s^k: their weighted mean has (1-s)/(1+s) of one round's variance.
        standard_error = np.sqrt(new.variance / weight * (1 - self.smoothing) / (1 + self.smoothing))
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.nan_to_num((new.slope / weight) / standard_error, nan=0.0, posinf=1e6, neginf=-1e6)
        cost = np.array([_cost_over_gain(new, k) for k in range(len(slope))])
        # A round that shows nothing moves nothing, optimism or not.
        move = np.where(seen, self._move(z, cost, evidence), 0.0)
        info = {
            "slope": tuple((new.slope / weight).tolist()),
            "standard_error": tuple(standard_error.tolist()),
            "z": tuple(z.tolist()),
        }
        if self.brake is not None:
            info["cost_over_gain"] = tuple(cost.tolist())
        return new, Decision(np.exp(move), info, openness=np.clip(-z / 2, 0.0, 1.0))

    def _move(self, z: FloatArray, cost: FloatArray, evidence: Evidence) -> FloatArray:
        """By how much log s should change."""
        first, last = self.optimism
        optimism = first + (last - first) * (0.5 if evidence.progress is None else min(evidence.progress, 1.0))
        fall = optimism if self.fall is None else self.fall
        limit = self.up + (self.sprint - self.up) * np.clip((-z - 10) / 50, 0.0, 1.0)
        wanted = np.where(z < optimism, optimism - z, -np.maximum(z - fall, 0.0))
        move: FloatArray = np.clip(self.gain * wanted / 2, -self.down, limit)
        if self.brake is not None:
            low, high = self.brake
            move = np.where(move > 0, move * (1 - np.clip((cost - low) / (high - low), 0.0, 1.0)), move)
            move = np.where(cost > high, np.minimum(move, -self.down * np.minimum(cost - high, 1.0)), move)
        # What the schedule's own rise has added in this round counts towards the limit.
        if evidence.risen is not None:
            move = np.minimum(move, np.maximum(limit - evidence.risen, 0.0))
        return move


def _followed(state: EvidenceState, slope: FloatArray, losses: FloatArray) -> EvidenceState:
    """The state with one more round in its trail, where slope and loss are known."""
    seen = losses[np.isfinite(losses)]
    trail, count, stride, rest = state.trail.copy(), state.filled.copy(), state.stride.copy(), state.open.copy()
    for k in np.flatnonzero(np.isfinite(slope)) if len(seen) else ():
        rest[k] += (slope[k], seen.mean(), 1.0)
        if rest[k, 2] < stride[k]:
            continue
        trail[k, int(count[k])] = rest[k, :2] / rest[k, 2]
        rest[k] = 0.0
        count[k] += 1
        if count[k] == NUM_ROWS:
            trail[k, : NUM_ROWS // 2] = trail[k].reshape(-1, 2, 2).mean(axis=1)
            count[k], stride[k] = NUM_ROWS // 2, 2 * stride[k]
    return state._replace(trail=trail, filled=count, stride=stride, open=rest)


def _cost_over_gain(state: EvidenceState, knob: int) -> float:
    """B / R over the last quarter of the trail, against the half that ends where it is half as long; 0 if too short."""
    num = int(state.filled[knob])
    if num < 8:
        return 0.0
    slopes, losses = state.trail[knob, :num].T
    late, half = slice(int(0.75 * num), num), slice(int(0.375 * num), num // 2)
    drop = float(losses[half].mean() - losses[late].mean())
    num_late, num_half = len(losses[late]), len(losses[half])
    noise = math.sqrt(float((np.diff(losses[late]) ** 2).mean()) / 2 * (1 / num_late + 1 / num_half))
    gain = max(drop, noise, 1e-300) / math.log(2)
    slope = float(slopes[late].mean())
    doubt = DOUBT * math.sqrt(float((np.diff(slopes[late]) ** 2).mean()) / 2 / num_late)
    return float(np.clip(min(slope, max(slope - doubt, 0.0)) / gain, -1e6, 1e6))


def loss_slopes(evidence: Evidence) -> tuple[FloatArray, FloatArray]:
    """Least squares of L_r on rho_r - 1, for each knob: slope and standard error.

    Replicas without a finite loss are left out. The slope is NaN where the rest do not differ, the error where there
    are too few of them (fewer than three) to leave a residual.
    """
    finite = np.isfinite(evidence.losses)
    num_knobs = len(evidence.multipliers)
    slopes, errors = np.full(num_knobs, np.nan), np.full(num_knobs, np.nan)
    losses = evidence.losses[finite]
    if len(losses) < 2:
        return slopes, errors
    for k, row in enumerate(evidence.multipliers[:, finite]):
        x = row - row.mean()
        y = losses - losses.mean()
        spread = x @ x
        if spread == 0:
            continue
        slopes[k] = x @ y / spread
        if len(losses) > 2:
            residual = y - slopes[k] * x
            errors[k] = np.sqrt(residual @ residual / (len(losses) - 2) / spread)
    return slopes, errors
