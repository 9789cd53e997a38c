"""The paper's controller (Eq. 4 to 7), with a velocity relative to the base value, or absolute as it is printed."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require, require_one_of
from hdet.controllers.base import Decision, Evidence


class PaperState(NamedTuple):
    """Velocity of each knob, relative to its base value or absolute."""

    velocity: FloatArray


class PaperController:
    r"""Moves each base value towards the loss-weighted mean of what the replicas tried.

    .. math::
        s_r &= (\bar L - L_r) / \sigma, \quad w = \mathrm{softmax}(s)                    & (4) \\
        \Delta &= \textstyle\sum_r w_r \rho_r - \overline{\rho}                            & (5, 6) \\
        v &\leftarrow \beta v + (1-\beta) \Delta, \quad \eta \leftarrow \eta (1 + \lambda v) & (7)

    Delta and v are fractions of the base value, so that a velocity learned at a high learning rate cannot push a
    small one below zero; the decay of Eq. 7 and 8 belongs to the schedule. Since :math:`|v| \le \alpha`, one round
    moves a base value by at most the factor :math:`1 \pm \lambda\alpha`.

    With ``velocity="absolute"`` they are learning rates, as the paper prints Eq. 7; the schedule has taken the decay
    during the round:

    .. math::
        \Delta &= \textstyle\sum_r w_r \eta_r - \overline{\eta_r}                                  & (5, 6) \\
        v &\leftarrow \beta v + (1-\beta) \Delta, \quad \eta \leftarrow \eta (1-\gamma) + \lambda v & (7)

    A velocity remembers the learning rates of about :math:`1 / (1-\beta)` rounds. Where the schedule falls faster than
    that, the last ones move by any factor, and a learning rate that would not stay above 0 is a RuntimeError: training
    would ascend.

    A replica without a finite loss has weight 0, as if its loss were infinite. When none has one, the state is left
    alone.

    Args:
        temperature: sigma > 0, the loss difference that counts as a lot.
        rate: lambda >= 0.
        momentum: beta in [0, 1).
        velocity: ``"relative"`` to the base value, or ``"absolute"``.
    """

    def __init__(
        self,
        temperature: float = 0.002,
        rate: float = 0.5,
        momentum: float = 0.9,
        *,
        velocity: Literal["relative", "absolute"] = "relative",
    ) -> None:
        require(number(temperature) > 0, "temperature", "a finite number > 0", temperature)
        require(number(rate) >= 0, "rate", "a finite number >= 0", rate)
        require(0 <= number(momentum) < 1, "momentum", "in [0, 1)", momentum)
        require_one_of("velocity", velocity, "relative", "absolute")
        self.temperature = temperature
        self.rate = rate
        self.momentum = momentum
        self.velocity = velocity

    def init(self, num_knobs: int) -> PaperState:
        return PaperState(velocity=np.zeros(num_knobs))

    def check_state(self, state: PaperState) -> None:
        """A relative Delta, and so its velocity, is less than the distance between two multipliers: below 2."""
        if self.velocity == "relative" and (abs(state.velocity) > 2).any():
            raise ValueError(f"velocity must be in [-2, 2], but got {state.velocity.tolist()}")

    def update(self, state: PaperState, evidence: Evidence) -> tuple[PaperState, Decision]:
        rho = evidence.multipliers
        finite = np.isfinite(evidence.losses)
        if not finite.any():
            return state, Decision(np.ones(len(rho)), {"velocity": tuple(state.velocity.tolist())})
        weights = softmax_weights(evidence.losses, self.temperature)
        base = evidence.values
        if self.velocity == "relative" or base is None:
            base = np.ones(len(rho))
        delta = base * (rho @ weights - rho.mean(axis=1))
        velocity = self.momentum * state.velocity + (1 - self.momentum) * delta
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(base > 0, 1 + self.rate * velocity / base, 1.0)  # a schedule at 0 stays there
        if self.velocity == "relative":
            # A rate so large that one round could cross zero is cut to a factor that stays positive.
            factors = np.maximum(factors, 0.1)
        elif not evidence.last:
            _refuse_ascent(base, factors, velocity)
        factors = np.where(factors > 0, factors, 1.0)
        info = {
            "weights": tuple(weights.tolist()),
            "delta": tuple(delta.tolist()),
            "velocity": tuple(velocity.tolist()),
        }
        return PaperState(velocity), Decision(factors, info)


def _refuse_ascent(base: FloatArray, factors: FloatArray, velocity: FloatArray) -> None:
    """Raise where Eq. 7 moves a base value to 0 or below."""
    for k in np.flatnonzero(factors <= 0):
        raise RuntimeError(
            'learning rates must stay above 0, but Eq. 7 with velocity="absolute" moves that of number '
            f"{k} from {base[k]:.3g} to {base[k] * factors[k]:.3g}: its velocity of {velocity[k]:.3g} is of rounds "
            'with higher ones, and training would ascend. Use PaperController(velocity="relative"), a smaller rate or '
            "momentum, or a schedule that ends higher"
        )


def softmax_weights(losses: FloatArray, temperature: float) -> FloatArray:
    """Eq. 4. The best replica is subtracted first: softmax does not see it, and nothing overflows."""
    finite = np.isfinite(losses)
    score = np.zeros(len(losses))
    with np.errstate(over="ignore"):  # a difference beyond all bounds has weight 0, as it should
        score[finite] = np.exp((losses[finite].min() - losses[finite]) / temperature)
    weights: FloatArray = score / score.sum()
    return weights
