"""The level controller: a learning rate rises where the slope supports it or progress has earned it (Eq. 17)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hdet.checks import FloatArray, number, require
from hdet.controllers.base import Decision, Evidence

LARGEST_SLOPE = 1e70
"""A larger one, or one with a larger error, is none: their squares have to stay finite."""
OUTLIER = 3.0
"""A standard error of so many times the usual one is that of an outlier."""
NUM_ROWS = 128
"""Of a trail. A longer run has so many at most, each of several rounds."""
MIN_ROWS = 8
"""Before it shows progress."""
SMOOTHING = 0.5
DOUBT = 2.0
"""Standard errors by which an estimate may be wrong, where it has to be sure."""
SLOPE_GAIN = 2.0
"""How often a rescaling of the whole way would be made up for while the time since the start grows e-fold."""
LINEAR = -0.8
"""Elasticities below are those of a loss that is linear along the way: nothing limits the learning rate yet."""
EARNED = (3.0, 10.0)
"""Standard errors of progress: from the first on a rise is earned, from the second on all of it."""
SURE, VERY_SURE, CERTAIN = 2.0, 4.0, (-10.0, -20.0)
"""Standard errors of a slope that supports a move; of one that does so where progress does not; and between which a
slope comes to widen the bounds on rises."""
TOO_HIGH = 0.25
"""Elasticity above which a slope that is very sure lowers the knob."""
BRAKE, TOO_DEAR = (0.3, 0.6), 2.0
"""Of cost over gain: where rises fade out and the final decay begins early; and of what it is at least, where the knob
falls faster."""
MAX_RISE, MAX_FALL = 0.3, 0.2
"""Of the logarithm, in one round."""
STANDSTILL, STANDSTILL_FALL = 1.0, 0.1
"""Standard errors of progress below which the loss stands still; and the fall in a round then."""
FASTEST, LEARNED = 3.0, 10.0
"""Times the pace, where updates have become far smaller than the first bound on them; and the standard errors of the
fall since the start that this takes."""
CHEAP, LATE = (0.3, 0.1), (0.2, 0.5)
"""Of cost over gain: below, a slope against the knob holds no rise back, however sure. And the shares of the time in
which the knob may move between which this comes to count: the decay removes the cost of noise, damage of the first
steps stays."""
SURELY_CHEAP, SUPPORTED = (0.1, 0.05), (0.0, -0.05)
"""Of what cost over gain is at most: below, updates of a large model may grow to those of a small one; and count as
small beside those."""
FREE = (0.05, 0.0)
"""Of the same: between the two progress alone comes to lead further in large models."""
ROOM, MORE = 4.0, (0.0, -0.3)
"""How many times as wide the bounds on rises are below a schedule that somebody has chosen, or where a slope that is
certain asks for more late in the run; and of what cost over gain is at most: between the two this comes to count."""
WIDENING = (0.1, 0.7)
"""Shares of the time in which the knob may move: between them the bound on updates goes from its first value to its
last one."""
LEANS = -0.5
"""Standard errors of the late slope below which a standstill may be a plateau: it lowers nothing."""
LOWEST, LOWEST_RISING = 1.0, 0.03
"""Of the first level: how far a standstill lowers the knob, which takes back rises; and where the loss has risen."""


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


class LevelState(NamedTuple):
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


class LevelController:
    r"""Raises a learning rate where the slope supports it or progress has earned it; lowers it where the loss stands.

    With b the slope of the loss over the logarithm of the learning rate since the anchor, z = b over its standard
    error, and P the fall of the loss since then, the *elasticity* e = b / P tells how far the run is from the best
    rescaling of its whole way: on a parabola along the way that is a factor of (1 + e/2) / (1 + e). With q the fall of
    the loss between the middle and the end of the run so far, in standard errors, and :math:`d\tau = d \log t`:

    .. math:: \log s \leftarrow \log s + d\tau \left( c \,\mathrm{clip}\!\left(\frac{z_0 - z}{z_0}, 0, 1\right)
        \mathrm{clip}\!\left(\frac{q - 3}{7}, 0, 1\right) + 2 \log \frac{1 + e/2}{1 + e} [z < -2] \right) \quad (17)

    The first part is optimism, which progress has to earn; the second is the slope's. Updates may become far smaller
    than those of the first level, as where Adam remembers large first gradients for a thousand steps. With h the number
    of times that an update has to be doubled to reach the first ``max_update``, c is multiplied by h / 2, between 1 and
    3, and the clipped share of z is at least h - 1; where P is ten of its standard errors. Where e is below -0.8 with
    certainty, the loss is linear along the whole way and the logarithm of the rate may grow by up to 0.3 a round.

    The *gain* of the run is how far the loss falls while the time since the start grows e-fold. From a fifth to half of
    the time in which the rate may move, another share comes to count where it is above that of z: it goes from 1 to 0
    as b over the gain goes from 0.1 to 0.3. A cost that is sure and small is that of noise, which the decay removes.
    Rises fade out as that ratio goes on to 0.6, and as the relative size of an update reaches ``max_update``, which
    grows along the run. As it goes on to 0.6 the final decay begins early: the rate falls as a line from where it is to
    zero, at the end of the run, would; where the schedule is not somebody's.

    Optimism ends at 1.6 times the learning rate that models of this size usually train best with, or, where an update
    has become smaller than half of the first ``max_update``, at as many times more (Eq. 16). In models of more than
    3M parameters it ends at up to the root of their number over 3M times as much, at most twice, as b over the gain,
    plus two standard errors, goes from 0.05 to 0: long runs bear more than short ones.

    A slope that is certain may ask for more late in the run, as in linear models, whose best rates are a thousand times
    those of networks. As z goes from -10 to -20, b over the gain, plus two standard errors, from 0 to -0.3, and the
    time from a fifth to half of that in which the rate may move, c is multiplied by up to 3, and so are, by up to 4,
    the bound on updates and where optimism ends. Not where all updates are of one size, as Lion's, which bear less than
    such a slope asks for, nor where the length of the run is not known.

    A schedule that was given may well be the right one: optimism leads up to it, and above it only to the first level,
    at most to 3 times the schedule.

    The rate falls where the loss stands still (q < 1) and the slope does not ask for more, nor leans to it over the
    last quarter of the run (z < -0.5), by 0.1 a round and to the first level, which takes back what was earned, or to
    0.03 of it where the loss has risen (q < -3); and where the slope says that less would have been better: e > 0.25
    with z > 4, the same over the last quarter of the run with z > 2, or twice the gain and two standard errors. It does
    not rise in a round whose loss has jumped. In q and the gain no loss counts as more than some five standard
    deviations above those around it: batches of outliers are no rise.

    Args:
        pace: c >= 0, how far optimism moves the logarithm while the time since the start grows e-fold.
        optimism: z0 > 0, how many standard errors of evidence against it a higher value needs, at first and at the end
            of the time in which it may move; their mean in a run of unknown length.
        max_update: the size of an update, relative to the weights and over the allowance of the model (Eq. 16), at
            which rises end: in the first tenth of the time in which the learning rate may move, and after seven tenths
            of it; None for no bound. Updates of runs below 200 steps count as smaller. An allowance below that of a
            small model, 3, grows to it as b over the gain, plus two standard errors, goes from 0.1 to 0.05, for h from
            0 to -0.05. Below a schedule that was given, the bound widens to 4 times as that goes to -0.3.
    """

    def __init__(
        self,
        *,
        pace: float = 1.5,
        optimism: tuple[float, float] = (2.5, 1.0),
        max_update: tuple[float, float] | None = (0.005, 0.008),
    ) -> None:
        require(number(pace) >= 0, "pace", "a finite number >= 0", pace)
        require(_is_pair(optimism), "optimism", "a pair of finite numbers > 0", optimism)
        fine = max_update is None or _is_pair(max_update)
        require(fine, "max_update", "None or a pair of finite numbers > 0", max_update)
        self.pace, self.optimism, self.max_update = pace, (float(optimism[0]), float(optimism[1])), max_update

    def init(self, num_knobs: int) -> LevelState:
        slope, variance, weight, filled = (np.zeros(num_knobs) for _ in range(4))
        trail, rest = np.zeros((num_knobs, NUM_ROWS, 2)), np.zeros((num_knobs, 3))
        return LevelState(slope, variance, weight, trail, filled, np.ones(num_knobs), rest)

    def forget(self, state: LevelState) -> LevelState:
        """Without the evidence of a round that was undone and those before; what the run has gained stays known."""
        fresh = self.init(len(state.slope))
        return state._replace(slope=fresh.slope, variance=fresh.variance, weight=fresh.weight)

    def check_state(self, state: LevelState) -> None:
        Smoothed.check(state.variance, state.weight)
        counts = np.stack([state.filled, state.stride, state.open[:, 2]])
        fine = (counts >= 0).all() and (counts % 1 == 0).all()
        if not fine or (state.filled >= NUM_ROWS).any() or (state.stride < 1).any():
            raise ValueError(
                f"filled must be below {NUM_ROWS} and stride >= 1, whole numbers, but got {counts.tolist()}"
            )

    def update(self, state: LevelState, evidence: Evidence) -> tuple[LevelState, Decision]:
        slope, error = evidence.slopes if evidence.slopes is not None else loss_slopes(evidence)
        smoothed = Smoothed(state.slope, state.variance, state.weight).updated(slope, error, SMOOTHING)
        seen = np.isfinite(smoothed.last)
        state = state._replace(slope=smoothed.slope, variance=smoothed.variance, weight=smoothed.weight)
        state = _followed(state, smoothed.last, evidence.losses)
        mean, standard_error, z = smoothed.estimate(SMOOTHING)
        trails = [_look_back(state, k) for k in range(len(slope))]
        elasticity = _elasticity(mean, evidence)
        late = _elasticity(np.array([trail.slope for trail in trails]), evidence)
        moves = [self._move(z[k], elasticity[k], late[k], trails[k], evidence, k) for k in range(len(slope))]
        # A round that shows nothing moves nothing.
        move = np.where(seen, moves, 0.0)
        info = {
            "slope": tuple(mean.tolist()),
            "standard_error": tuple(standard_error.tolist()),
            "z": tuple(z.tolist()),
            "elasticity": tuple(elasticity.tolist()),
            "progress": tuple(trail.progress for trail in trails),
            "cost_over_gain": tuple(trail.cost for trail in trails),
        }
        return state, Decision(np.exp(move), info)

    def _move(self, z: float, e: float, late: float, trail: Trail, evidence: Evidence, knob: int) -> float:
        """By how much the logarithm of a scale should change; ``late``: the elasticity over the end of the trail."""
        first, last = self.optimism
        done = 0.5 if evidence.progress is None else min(evidence.progress, 1.0)
        optimism = first + (last - first) * done
        earned = _share(trail.progress, EARNED)
        is_chosen, more = evidence.given < math.inf, _share(trail.most, MORE)
        asked = evidence.shrinks * more * _share(done, LATE) * _share(z, CERTAIN)
        if is_chosen or evidence.progress is None:
            asked = 0.0
        times, is_open = FASTEST**asked, _clip((optimism - z) / optimism)
        is_open = max(is_open, _share(done, LATE) * _share(trail.cost, CHEAP))
        ceiling = evidence.usual * ROOM**asked * evidence.further ** _share(trail.most, FREE)
        if self.max_update is not None and evidence.update is not None:
            ceiling *= max(self.max_update[0] / 2 / max(evidence.update, 1e-300), 1.0)
        if self.max_update is not None and evidence.update is not None and _fall(evidence) > LEARNED:
            update = evidence.update * evidence.ease ** _share(trail.most, SUPPORTED)
            halvings = math.log2(self.max_update[0] / max(update, 1e-300))
            times = max(times, min(halvings / 2, FASTEST))
            is_open = max(is_open, _clip(halvings - 1))
        scale = 1.0 if evidence.scales is None else float(evidence.scales[knob])
        ceiling = max(min(ceiling, evidence.given) / scale, 1.0)
        rise = min(self.pace * times * evidence.elapsed * is_open * earned, math.log(ceiling))
        supported = z < -SURE and e < 0
        if supported and (z < -VERY_SURE or trail.progress >= EARNED[0]):
            rise -= SLOPE_GAIN * _excess(e) * evidence.elapsed
            if e < LINEAR:
                rise = max(rise, MAX_RISE * _clip((-z - VERY_SURE) / 6))
        if self.max_update is not None and e >= LINEAR and evidence.update is not None:
            first, last = self.max_update
            largest = first * (last / first) ** _share(done, WIDENING)
            largest *= ROOM ** (more if is_chosen and scale < 1 else asked)
            update = evidence.update * evidence.ease ** _share(trail.most, SURELY_CHEAP)
            rise *= _clip((largest - update) / (0.3 * largest))
        dear = _share(trail.cost, BRAKE)
        move = 0.0 if evidence.in_warmup or trail.jump > SURE else min((1 - dear) * rise, MAX_RISE)
        if not evidence.in_warmup:
            move += dear * _share(done, LATE) * evidence.decay
        rising = trail.progress < -EARNED[0]
        still = trail.enough and trail.progress < STANDSTILL and (rising or trail.z >= LEANS)
        if still and not supported and not evidence.in_warmup:
            lowest = LOWEST_RISING if rising else LOWEST
            if evidence.scales is None or evidence.scales[knob] > lowest * evidence.level:
                move = min(move, -STANDSTILL_FALL * min(STANDSTILL - trail.progress, 1.0))
        too_high = max(e if z > VERY_SURE else 0.0, late if trail.z > SURE else 0.0)
        if too_high > TOO_HIGH:
            move = min(move, -min(SLOPE_GAIN * _excess(too_high) * evidence.elapsed, MAX_FALL))
        if trail.least > TOO_DEAR:
            move = min(move, -min(SLOPE_GAIN * evidence.elapsed * min(trail.least - TOO_DEAR, 1.0), MAX_FALL))
        return move


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(number(each) > 0 for each in value)


def _excess(e: float) -> float:
    """The logarithm of how many times too long the whole way is, on a parabola with this elasticity."""
    return math.log((1 + e) / (1 + e / 2))


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def _share(value: float, between: tuple[float, float]) -> float:
    """Of the way from the first to the second."""
    return _clip((value - between[0]) / (between[1] - between[0]))


def _elasticity(slope: FloatArray, evidence: Evidence) -> FloatArray:
    """B / P, of which -1 is that of a loss that falls along a line; where P is lost in noise, that is not excluded."""
    losses = evidence.losses[np.isfinite(evidence.losses)]
    if evidence.start is None or not len(losses):
        return np.zeros(len(slope))
    first, noise = evidence.start
    fall, error = first - float(losses.mean()), noise
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        down = slope / np.maximum(np.maximum(fall - DOUBT * error, np.abs(slope)), 1e-300)
        up = slope / max(fall, error, 1e-300)
        return np.clip(np.where(slope < 0, down, up), -0.98, 10.0)


def _fall(evidence: Evidence) -> float:
    """Of the loss since the start, in standard errors."""
    losses = evidence.losses[np.isfinite(evidence.losses)]
    if evidence.start is None or not len(losses):
        return 0.0
    first, noise = evidence.start
    return (first - float(losses.mean())) / max(noise, 1e-300)


def _followed(state: LevelState, slope: FloatArray, losses: FloatArray) -> LevelState:
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


class Trail(NamedTuple):
    """What the trail of a knob shows.

    Attributes:
        enough: whether it is long enough for what follows.
        progress: the fall of the loss from its third eighth to its last quarter, in standard errors.
        cost: the slope over the gain.
        least, most: what that is at least and at most.
        slope: over the last quarter.
        z: that slope in its standard errors.
        jump: how far the last loss is above the one before, in standard deviations.
    """

    enough: bool = False
    progress: float = 0.0
    cost: float = 0.0
    least: float = 0.0
    most: float = math.inf
    slope: float = 0.0
    z: float = 0.0
    jump: float = 0.0


def _look_back(state: LevelState, knob: int) -> Trail:
    num = int(state.filled[knob])
    if num < MIN_ROWS:
        return Trail()
    slopes, losses = state.trail[knob, :num].T
    losses = _without_outliers(losses)
    late, half = slice(int(0.75 * num), num), slice(int(0.375 * num), num // 2)
    drop = float(losses[half].mean() - losses[late].mean())
    num_late, num_half = len(losses[late]), len(losses[half])
    # Of three losses in a row, what a trend does not explain; few of them tell little.
    bends = np.diff(losses[num // 2 :], 2) ** 2 / 6
    deviation = math.sqrt(float(bends.mean())) * (1 + 2 / len(bends))
    noise = deviation * math.sqrt(1 / num_late + 1 / num_half)
    gain = max(drop, noise, 1e-300) / math.log(2)
    slope = float(slopes[late].mean())
    error = math.sqrt(float((np.diff(slopes[late]) ** 2).mean()) / 2 / num_late)
    ratios = (
        drop / max(noise, 1e-300),
        slope / gain,
        (slope - DOUBT * error) / gain,
        (slope + DOUBT * error) / gain,
        slope / max(error, 1e-300),
        (losses[-1] - losses[-2]) / max(math.sqrt(2) * deviation, 1e-300),
    )
    progress, cost, least, most, z, jump = (float(np.clip(ratio, -1e6, 1e6)) for ratio in ratios)
    return Trail(True, progress, cost, least, most, slope, z, jump)


def _without_outliers(losses: FloatArray) -> FloatArray:
    """At most some five standard deviations above the median of the five rows around: a batch of outliers is no rise.

    The median of the second differences is 1.65 deviations, where noise is Gaussian; few of them tell little.
    """
    num = len(losses)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(losses, 5), axis=1)
    usual = medians[np.clip(np.arange(num) - 2, 0, num - 5)]
    bends = np.abs(np.diff(losses[num // 2 :], 2))
    limit: FloatArray = usual + 3 * (1 + 4 / len(bends)) * np.median(bends)
    return np.minimum(losses, limit)


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
