"""The joint controller: one least squares over all knobs, which attributes the losses' differences to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, shown
from hdet.controllers.base import Decision, Evidence

SEPARATED = 1 - 1e-6
"""How much of a knob the rounds so far must determine for its slope to count."""


ENOUGH = 4.0
"""Degrees of freedom from which on the residuals alone tell the noise. With fewer, replicas that happen to agree for a
round or two would leave no residual, and look certain."""


class JointState(NamedTuple):
    """Sums over replicas and past rounds, old ones weigh less: of x x' (also by squared weight), x y, y y and 1.

    And ``size``, the recent variance of the losses between replicas.
    """

    gram: FloatArray
    gram_squared: FloatArray
    moment: FloatArray
    square: FloatArray
    freedom: FloatArray
    size: FloatArray


class JointController:
    r"""Eq. 12 for several knobs at once, on slopes from one weighted least squares over the recent rounds.

    In a round, x is how far each replica's knobs are from their mean over replicas, y its loss from the mean loss, in
    units of the recent rounds' standard deviation. Rounds are added up, an older one with ``smoothing`` times the
    weight of the next, so that knobs which few replicas cannot tell apart in one round are separated over several, as
    their assignments change. A knob that is not separated yet stays where it is. With b the slopes, z = b / standard
    error, and z' the significant part of z - z0:

    .. math:: h \leftarrow h + \mathrm{clip}(-\kappa z' / 2, -\text{step}, +\text{step}) \quad (12)

    Args:
        gain: kappa > 0.
        optimism: z0 >= 0, of each knob or of all: 0 but for the learning rate.
        doubt: standard errors, >= 0, that move nothing: noise alone would have a knob wander through its range.
        smoothing: what a round counts against the next, in [0, 1).
        step: largest move in a round, > 0, in units of the knob's space.
    """

    def __init__(
        self,
        *,
        gain: float = 0.15,
        optimism: float | Sequence[float] = 0.0,
        doubt: float = 1.0,
        smoothing: float = 0.8,
        step: float = 0.2,
    ) -> None:
        for name, value in (("gain", gain), ("step", step)):
            require(number(value) > 0, name, "a finite number > 0", value)
        require(0 <= number(smoothing) < 1, "smoothing", "in [0, 1)", smoothing)
        require(number(doubt) >= 0, "doubt", "a finite number >= 0", doubt)
        row = optimism if isinstance(optimism, (list, tuple, np.ndarray)) else [optimism]
        if not all(number(value) >= 0 for value in row):
            raise ValueError(f"optimism must be finite and >= 0, but got optimism={shown(optimism)}")
        self.gain, self.doubt, self.smoothing, self.step = gain, doubt, smoothing, step
        self.optimism = np.asarray(optimism, dtype=np.float64)

    def init(self, num_knobs: int) -> JointState:
        if self.optimism.ndim and self.optimism.shape != (num_knobs,):
            raise ValueError(
                f"optimism must be one number or one for each of {num_knobs} knobs, but got {self.optimism.size}"
            )
        square = np.zeros((num_knobs, num_knobs))
        return JointState(square, square.copy(), np.zeros(num_knobs), np.zeros(1), np.zeros(1), np.zeros(1))

    def insert(self, index: int) -> None:
        """Make room for one more knob, like the one before it."""
        if self.optimism.ndim:
            self.optimism = np.insert(self.optimism, index, self.optimism[index - 1])

    def check_state(self, state: JointState) -> None:
        for name in ("gram", "gram_squared"):
            table = getattr(state, name)
            # Sums of x x', up to rounding.
            if not np.allclose(table, table.T) or np.linalg.eigvalsh(table).min() < -1e-9 * max(
                np.trace(table), 1e-300
            ):
                raise ValueError(f"{name} must be symmetric and positive semidefinite, but got {table.tolist()}")
        for name in ("square", "freedom", "size"):
            if (getattr(state, name) < 0).any():
                raise ValueError(f"{name} must be >= 0, but got {getattr(state, name).tolist()}")

    def update(self, state: JointState, evidence: Evidence) -> tuple[JointState, Decision]:
        finite = np.isfinite(evidence.losses)
        keep = self.smoothing if finite.sum() > 1 else 1.0
        x = evidence.multipliers[:, finite]
        y = evidence.losses[finite]
        if len(y):
            x, y = x - x.mean(axis=1, keepdims=True), y - y.mean()
        # Differences shrink by orders of magnitude as training proceeds: in units of their recent size, or the first
        # rounds, which ask for speed and for nothing else, would outweigh all later ones.
        now = y @ y / max(len(y) - 1, 1)
        size = _next_size(state.size, float(now))
        if now > 0:
            y = y / np.sqrt(size)
        gram = x @ x.T
        new = JointState(
            keep * state.gram + gram,
            keep**2 * state.gram_squared + gram,
            keep * state.moment + x @ y,
            keep * state.square + y @ y,
            keep * state.freedom + max(len(y) - 1, 0),
            size,
        )
        slope, error = fit(new)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.nan_to_num(slope / error, nan=0.0, posinf=1e6, neginf=-1e6)
        known = np.isfinite(slope) & np.isfinite(error)
        z = np.where(known, z, np.nan)
        seen = known & bool(now > 0)  # losses that do not differ show nothing
        against = np.where(seen, z - self.optimism, 0.0)
        beyond = np.sign(against) * np.maximum(np.abs(against) - self.doubt, 0.0)
        move = np.clip(-self.gain * beyond / 2, -self.step, self.step)
        info = {
            "slope": tuple(slope.tolist()),
            "standard_error": tuple(error.tolist()),
            "z": tuple(z.tolist()),
        }
        return new, Decision(np.exp(move), info)


def _next_size(size: FloatArray, now: float) -> FloatArray:
    """The variance of recent rounds, after one of ``now``. A round that happens to be still lowers it by 4 at most."""
    if now == 0:
        return size
    if size[0] == 0:
        return np.array([now])
    return np.where(now > size, (size + now) / 2, np.maximum(now, size / 4))


def fit(state: JointState) -> tuple[FloatArray, FloatArray]:
    """Slopes and standard errors; both NaN for a knob that is not separated."""
    scale = np.sqrt(np.diag(state.gram))
    scale[scale == 0] = 1.0
    inverse = np.linalg.pinv(state.gram / np.outer(scale, scale), rcond=1e-9, hermitian=True) / np.outer(scale, scale)
    separated = np.diag(inverse @ state.gram) >= SEPARATED
    slope = inverse @ state.moment
    # With weights w and equal noise, the weighted residuals expect sigma^2 (sum w - tr(G^-1 sum w^2 x x')).
    freedom = max(state.freedom[0] - np.trace(inverse @ state.gram_squared), 0.0)
    residual = max(state.square[0] - state.moment @ slope, 0.0)
    # While few residuals are left to judge by, the noise is taken to be as large as y itself.
    doubt = max(1 - freedom / ENOUGH, 0.0)
    variance = (residual + doubt) / (freedom + doubt)
    error = np.sqrt(np.maximum(variance * np.diag(inverse @ state.gram_squared @ inverse), 0.0))
    return np.where(separated, slope, np.nan), np.where(separated, error, np.nan)
