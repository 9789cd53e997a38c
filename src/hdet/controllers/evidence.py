"""The evidence controller (Eq. 12): move as far as the slope of the loss is certain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence

LARGEST_SLOPE = 1e70
"""A larger one, or one with a larger error, is none: their squares have to stay finite."""
OUTLIER = 3.0
"""A standard error of so many times the usual one is that of an outlier."""


class Smoothed(NamedTuple):
    """Slopes smoothed over rounds: sums of slopes and of their variances, and the weight that both have gathered.

    Attributes:
        last: the round's slope as it counts: that of an outlier is damped; NaN where there is none.
    """

    slope: FloatArray
    variance: FloatArray
    weight: FloatArray
    last: FloatArray = np.zeros(0)

    def updated(self, slope: FloatArray, error: FloatArray, smoothing: float) -> Smoothed:
        """With one more round, where it has a slope."""
        seen = (np.abs(slope) <= LARGEST_SLOPE) & ~(error > LARGEST_SLOPE)
        slope, error = np.where(seen, slope, np.nan), np.where(seen, error, np.nan)
        keep = np.where(seen, smoothing, 1.0)
        gain = 1 - keep
        previous = self.slope / np.maximum(self.weight, 1e-300)
        # Where one round cannot tell its own error (two replicas, one sample), successive rounds do: their
        # difference from the smoothed slope, which is the slope itself in the first round.
        variance = np.where(np.isfinite(error), error, slope - np.where(self.weight > 0, previous, 0.0)) ** 2
        # A round in which training has almost broken has slopes of any size. It must not hide, by its standard error,
        # what the rounds after it show.
        usual = OUTLIER**2 * self.variance / np.maximum(self.weight, 1e-300)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            is_outlier = np.isfinite(error) & (usual > 0) & (variance > usual)
            slope = np.where(is_outlier, previous + (slope - previous) * np.sqrt(usual / variance), slope)
        variance = np.where(is_outlier, usual, variance)
        return Smoothed(
            keep * self.slope + gain * np.where(seen, slope, 0.0),
            keep * self.variance + gain * np.where(seen, variance, 0.0),
            keep * self.weight + gain,
            slope,
        )

    def estimate(self, smoothing: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The mean, its standard error, and their ratio.

        Independent rounds with weights (1-s) s^k: their weighted mean has (1-s)/(1+s) of one round's variance.
        """
        weight = np.maximum(self.weight, 1e-300)
        mean = self.slope / weight
        error = np.sqrt(self.variance / weight * (1 - smoothing) / (1 + smoothing))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return mean, error, np.nan_to_num(mean / error, nan=0.0, posinf=1e6, neginf=-1e6)

    @staticmethod
    def check(variance: FloatArray, weight: FloatArray) -> None:
        """ValueError where a loaded state could not have been made here."""
        if (variance < 0).any() or (weight < 0).any() or (weight > 1 + 1e-9).any():
            raise ValueError(
                f"variance must be >= 0 and weight in [0, 1], but got {variance.tolist()} and {weight.tolist()}"
            )


class EvidenceState(NamedTuple):
    """Smoothed slope of the loss over each knob, its smoothed variance, and the weight both have gathered."""

    slope: FloatArray
    variance: FloatArray
    weight: FloatArray


class EvidenceController:
    r"""Raises a knob while a higher value lowers the loss, in units of its standard error.

    With b the slope of the loss over :math:`\log` of the knob, smoothed over rounds, and z = b / its standard error:

    .. math:: \log s \leftarrow \log s + \mathrm{clip}(-\kappa (z - z_0) / 2, -\text{down}, +\text{up}) \quad (12)

    There is no temperature to tune, and the scale is positive by construction. A very sure slope lifts the limit of a
    rise from ``up`` to ``sprint``, as |z| goes from 10 to 60.

    Args:
        gain: kappa > 0.
        optimism: z0 >= 0, how many standard errors of evidence against it a higher value needs. Noise counts as a cost
            that annealing will remove later, so 0 settles several times too low.
        smoothing: share of the past in the smoothed slope, in [0, 1).
        up, down: largest rise and fall of log s in one round, > 0.
        sprint: largest rise where the slope is very sure, at least ``up``.
    """

    def __init__(
        self,
        *,
        gain: float = 0.1,
        optimism: float = 0.75,
        smoothing: float = 0.5,
        up: float = 0.2,
        sprint: float = 0.5,
        down: float = 1.0,
    ) -> None:
        for name, value in (("gain", gain), ("up", up), ("down", down)):
            require(number(value) > 0, name, "a finite number > 0", value)
        require(number(optimism) >= 0, "optimism", "a finite number >= 0", optimism)
        require(0 <= number(smoothing) < 1, "smoothing", "in [0, 1)", smoothing)
        if not up <= number(sprint):
            raise ValueError(f"sprint must be at least up={up!r}, but got sprint={shown(sprint)}")
        self.gain, self.optimism, self.smoothing = gain, float(optimism), smoothing
        self.up, self.sprint, self.down = up, sprint, down

    def init(self, num_knobs: int) -> EvidenceState:
        return EvidenceState(*(np.zeros(num_knobs) for _ in range(3)))

    def check_state(self, state: EvidenceState) -> None:
        Smoothed.check(state.variance, state.weight)

    def update(self, state: EvidenceState, evidence: Evidence) -> tuple[EvidenceState, Decision]:
        slope, error = evidence.slopes if evidence.slopes is not None else loss_slopes(evidence)
        found = Smoothed(*state).updated(slope, error, self.smoothing)
        mean, standard_error, z = found.estimate(self.smoothing)
        limit = self.up + (self.sprint - self.up) * np.clip((-z - 10) / 50, 0.0, 1.0)
        move = np.clip(self.gain * (self.optimism - z) / 2, -self.down, 0.0 if evidence.in_warmup else limit)
        info = {
            "slope": tuple(mean.tolist()),
            "standard_error": tuple(standard_error.tolist()),
            "z": tuple(z.tolist()),
        }
        # A round that shows nothing moves nothing, optimism or not.
        factors = np.exp(np.where(np.isfinite(found.last), move, 0.0))
        return EvidenceState(found.slope, found.variance, found.weight), Decision(factors, info)


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
