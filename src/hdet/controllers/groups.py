"""One level for all param groups, and how far each of them is from it: apart by evidence, and by nothing else."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hdet.checks import FloatArray
from hdet.controllers.base import Controller, Decision, Evidence
from hdet.controllers.level import LARGEST_SLOPE

FADE = 0.9
"""Of the slopes, from one round to the next: a mean is over about the last twenty."""
DOUBT = 2.0
"""Standard errors of a difference that are taken for chance."""
GAIN, STEP = 0.3, 0.2
"""How far a scale moves for each significant standard error, halved; and at most in one round."""
PULL = 0.02
"""What a round without evidence takes off a group's distance from the level."""
FURTHEST = math.log(30)


class GroupState(NamedTuple):
    """The state of what steers the level, as one row of numbers; and sums over faded rounds.

    Of the slopes and of their products; and of what the rounds count, and of its square.
    """

    level: FloatArray
    slopes: FloatArray
    products: FloatArray
    weights: FloatArray


class GroupController:
    r"""The level moves by the slope of all groups at once, as one scale for all would; groups part from it by contrast.

    Optimism is counted in standard errors, and those of a part are larger than those of the whole: steered by its own
    evidence, each group would settle too high. So the *sum* of the groups' slopes is what ``level`` sees. With b_g the
    slope of group g in the mean of the last rounds, and w_g its share of their variances, a group that needs what the
    others need has b_g = w_g times the sum. The difference, in standard errors as rounds scatter, moves the group:

    .. math:: d_g = b_g - w_g \sum_h b_h, \quad \log s_g \leftarrow \log s_g - \kappa
        \,\mathrm{sign}(z_g) \max(|z_g| - 2, 0) / 2

    Moves sum to zero, distances from the level are bounded by a factor of 30, and without evidence they fade. Where
    nothing ever passes the two standard errors, it is one scale for all to the last bit.

    Args:
        level: what steers one scale for all.
    """

    def __init__(self, level: Controller) -> None:
        self.level = level

    def init(self, num_knobs: int) -> GroupState:
        level = _row(self.level.init(1))
        return GroupState(level, np.zeros(num_knobs), np.zeros((num_knobs, num_knobs)), np.zeros(2))

    def forget(self, state: GroupState) -> GroupState:
        fresh = self.init(len(state.slopes))
        forget: Any = getattr(self.level, "forget", None)
        return fresh if forget is None else fresh._replace(level=_row(forget(self._level_of(state))))

    def check_state(self, state: GroupState) -> None:
        check: Any = getattr(self.level, "check_state", None)
        if check is not None:
            check(self._level_of(state))
        if (state.weights < 0).any() or (np.diag(state.products) < 0).any():
            raise ValueError(
                f"weights and the squares of slopes must be >= 0, but got {state.weights.tolist()} and "
                f"{np.diag(state.products).tolist()}"
            )

    def _level_of(self, state: GroupState) -> Any:
        template = self.level.init(1)
        parts, at = [], 0
        for like in template:
            parts.append(state.level[at : at + like.size].reshape(like.shape))
            at += like.size
        return type(template)(*parts)

    def update(self, state: GroupState, evidence: Evidence) -> tuple[GroupState, Decision]:
        num = len(state.slopes)
        if evidence.slopes is None or evidence.whole is None or evidence.scales is None:
            return state, Decision(np.ones(num), {})
        whole, error = evidence.whole
        of_all = evidence._replace(
            multipliers=evidence.multipliers[:1],
            slopes=(np.array([whole]), np.array([error])),
            scales=np.exp(np.log(evidence.scales).mean(keepdims=True)),
            whole=None,
        )
        level, decision = self.level.update(self._level_of(state), of_all)
        state = state._replace(level=_row(level))
        moves, z = np.zeros(num), np.zeros(num)
        if math.isfinite(whole):
            state = _seen(state, evidence.slopes[0])
            z = contrasts(state)
            moves = _moves(z, np.log(evidence.scales))
        info = {name: (float(row[0]),) * num for name, row in decision.info.items()} | {"z_apart": tuple(z.tolist())}
        return state, Decision(decision.factors[0] * np.exp(moves), info)


def _row(state: Any) -> FloatArray:
    return np.concatenate([np.zeros(0), *(part.ravel() for part in state)])


def _seen(state: GroupState, slopes: FloatArray) -> GroupState:
    """The sums with one more round; a group without a gradient has a slope of 0."""
    now = np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -LARGEST_SLOPE, LARGEST_SLOPE)
    return state._replace(
        slopes=FADE * state.slopes + now,
        products=FADE * state.products + np.outer(now, now),
        weights=np.array([FADE, FADE**2]) * state.weights + 1.0,
    )


def contrasts(state: GroupState) -> FloatArray:
    """How far each group's slope is from its share of the sum, in standard errors; 0 where nothing is known."""
    weight, num_rounds = state.weights[0], state.weights[0] ** 2 / max(state.weights[1], 1e-300)
    if num_rounds < 1.5:
        return np.zeros(len(state.slopes))
    mean = state.slopes / weight
    covariance = (state.products / weight - np.outer(mean, mean)) / (num_rounds - 1)
    variances = np.maximum(np.diag(covariance), 0.0)
    if variances.sum() == 0:
        return np.zeros(len(mean))
    against = np.eye(len(mean)) - (variances / variances.sum())[:, None]
    errors = np.sqrt(np.maximum(np.diag(against @ covariance @ against.T), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        z: FloatArray = np.nan_to_num(against @ mean / errors, nan=0.0, posinf=0.0, neginf=0.0)
    return z


def _moves(z: FloatArray, logs: FloatArray) -> FloatArray:
    """What is added to the logarithms of the scales, besides the move of all."""
    apart = logs - logs.mean()
    apart = np.where(np.abs(apart) < 1e-9, 0.0, apart)  # a mean of equal numbers can differ from them
    beyond = np.maximum(np.abs(z) - DOUBT, 0.0)
    wanted = np.where(beyond > 0, np.clip(-np.sign(z) * GAIN * beyond / 2, -STEP, STEP), -PULL * apart)
    after = np.clip(apart + wanted, -FURTHEST, FURTHEST)
    if not after.any():
        return np.zeros(len(z))
    moves: FloatArray = after - after.mean() - apart
    return moves
