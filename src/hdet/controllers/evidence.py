"""The evidence controller (Eq. 12): move as far as the slope of the loss is certain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence


class EvidenceState(NamedTuple):
    """Smoothed slope of the loss over each knob, its smoothed variance, and the weight both have gathered."""

    slope: FloatArray
    variance: FloatArray
    weight: FloatArray


class EvidenceController:
    r"""Raises a knob while a higher value lowers the loss, in units of its standard error.

    With b the slope of the loss over :math:`\log` of the knob, smoothed over rounds, and z = b / its standard error:

    .. math:: \log s \leftarrow \log s + \mathrm{clip}(-\kappa (z - z_0) / 2, -\text{down}, +\text{up}) \quad (12)

    There is no temperature to tune, and the scale is positive by construction. Evidence far beyond doubt lifts the
    limit of a rise from ``up`` to ``sprint``, as |z| goes from 10 to 60: a learning rate that is hundreds of times too
    low is left behind in a few rounds.

    Args:
        gain: kappa > 0.
        optimism: z0 >= 0, how many standard errors of evidence against it a higher value needs. Noise counts as a cost
            that annealing will remove later, so 0 settles several times too low.
        smoothing: share of the past in the smoothed slope, in [0, 1).
        up, down: largest rise and fall of log s in one round, > 0.
        sprint: largest rise where the evidence is overwhelming, at least ``up``.
    """

    def __init__(
        self,
        *,
        gain: float = 0.1,
        optimism: float = 2.0,
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
        self.gain, self.optimism, self.smoothing = gain, optimism, smoothing
        self.up, self.sprint, self.down = up, sprint, down

    def init(self, num_knobs: int) -> EvidenceState:
        return EvidenceState(np.zeros(num_knobs), np.zeros(num_knobs), np.zeros(num_knobs))

    def check_state(self, state: EvidenceState) -> None:
        if (state.variance < 0).any() or (state.weight < 0).any() or (state.weight > 1 + 1e-9).any():
            raise ValueError(
                f"variance must be >= 0 and weight in [0, 1], but got {state.variance.tolist()} and "
                f"{state.weight.tolist()}"
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
        new = EvidenceState(
            keep * state.slope + gain * np.where(seen, slope, 0.0),
            keep * state.variance + gain * np.where(seen, variance, 0.0),
            keep * state.weight + gain,
        )
        weight = np.maximum(new.weight, 1e-300)
        # Independent rounds with weights (1-s) s^k: their weighted mean has (1-s)/(1+s) of one round's variance.
        standard_error = np.sqrt(new.variance / weight * (1 - self.smoothing) / (1 + self.smoothing))
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.nan_to_num((new.slope / weight) / standard_error, nan=0.0, posinf=1e6, neginf=-1e6)
        # A round that shows nothing moves nothing, optimism or not.
        limit = self.up + (self.sprint - self.up) * np.clip((-z - 10) / 50, 0.0, 1.0)
        move = np.where(seen, np.clip(-self.gain * (z - self.optimism) / 2, -self.down, limit), 0.0)
        # What the schedule's own rise has added in this round counts towards the limit.
        if evidence.risen is not None:
            move = np.minimum(move, np.maximum(limit - evidence.risen, 0.0))
        info = {
            "slope": tuple((new.slope / weight).tolist()),
            "standard_error": tuple(standard_error.tolist()),
            "z": tuple(z.tolist()),
        }
        return new, Decision(np.exp(move), info, openness=np.clip(-z / 2, 0.0, 1.0))


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
