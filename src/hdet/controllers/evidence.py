"""The evidence controller (Eq. 12): move as far as the slope of the loss is certain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence
from hdet.controllers.level import Smoothed, loss_slopes


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
