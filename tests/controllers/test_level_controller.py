"""The level controller (Eq. 17): against a slow version, and what it does in runs whose losses and slopes are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hdet.controllers import Evidence, LevelController
from hdet.controllers.base import pack_state, unpack_state
from hdet.controllers.level import LOWEST, LOWEST_RISING, NUM_ROWS, LevelState, Smoothed, loss_slopes
from hdet.policy.level import Level, Sizes
from hdet.policy.rollback import BrokenError, Rollback
from hdet.policy.round import RoundPolicy, Seen
from hdet.policy.steering import Steering

# -- a slow version -------------------------------------------------------------------------------------------------


def clip(x: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(max(x, low), high)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


class SlowKnob:
    """One knob, from all of its rounds, kept one by one."""

    def __init__(self, controller: LevelController) -> None:
        self.controller = controller
        self.rounds: list[tuple[float, float]] = []  # slope and variance, those of outliers damped
        self.trail: list[tuple[float, float]] = []  # slope and loss

    def smoothed(self, column: int) -> float:
        known = self.rounds[-60:]  # older ones count for nothing
        counts = [0.5 ** (len(known) - k) for k in range(len(known))]
        return sum(c * row[column] for c, row in zip(counts, known, strict=True)) / sum(counts)

    def move(self, slope: float, error: float, evidence: Evidence, scale: float) -> float:
        losses = [loss for loss in evidence.losses.tolist() if math.isfinite(loss)]
        if math.isnan(slope):
            return 0.0
        self._see(slope, error)
        if losses:
            self.trail.append((self.rounds[-1][0], mean(losses)))
        b = self.smoothed(0)
        error_of_b = math.sqrt(self.smoothed(1) / 3)
        z = b / error_of_b if error_of_b > 0 else math.copysign(1e6, b) if b else 0.0
        e = self._elasticity(b, losses, evidence)
        q, cost, most, late, z_late, jump, enough = self._look_back()
        first, last = self.controller.optimism
        z0 = (first + last) / 2 if evidence.progress is None else first + (last - first) * min(evidence.progress, 1)
        doubted = clip((z0 - z) / z0)
        done = 0.5 if evidence.progress is None else min(evidence.progress, 1.0)
        doubted = max(doubted, clip((done - 0.2) / 0.3) * clip((0.3 - cost) / 0.2))
        has_learned = losses and evidence.start and evidence.start[0] - mean(losses) > 10 * evidence.start[1]
        chosen = evidence.given < math.inf
        asked = (
            0.0
            if chosen or evidence.progress is None
            else clip(-most / 0.3) * evidence.shrinks * clip((-z - 10) / 10) * clip((done - 0.2) / 0.3)
        )
        faster = 3**asked
        if evidence.update is not None and self.controller.max_update is not None and has_learned:
            times = self.controller.max_update[0] / max(evidence.update, 1e-300)
            times /= evidence.ease ** clip(-most / 0.05)
            faster = max(faster, 1 if times < 4 else 3 if times > 64 else math.log(times, 4))
            doubted = max(doubted, clip(math.log2(times) - 1))
        rise = self.controller.pace * faster * evidence.elapsed * doubted * clip((q - 3) / 7)
        usual = evidence.usual * 4**asked * evidence.further ** clip((0.05 - most) / 0.05)
        if evidence.update is not None and self.controller.max_update is not None:
            usual = max(usual, usual * self.controller.max_update[0] / evidence.update / 2)
        highest = min(evidence.given, usual)  # what somebody has chosen, or what models of this size do best with
        if scale * math.exp(rise) > highest:
            rise = max(math.log(highest) - math.log(scale), 0.0)
        asks = z < -2 and e < 0
        if asks and (z < -4 or q >= 3):
            rise += 2 * evidence.elapsed * math.log((1 + e / 2) / (1 + e))
            if e < -0.8:
                rise = max(rise, 0.3 * clip((-z - 4) / 6))
        if evidence.update is not None and self.controller.max_update is not None and e >= -0.8:
            bounds = np.log(self.controller.max_update)
            widest = math.exp(np.interp(done, [0.1, 0.7], bounds))
            widest *= 4 ** (clip(-most / 0.3) if chosen and scale < 1 else asked)  # below what somebody has chosen
            rise *= clip((1 - evidence.update * evidence.ease ** clip((0.1 - most) / 0.05) / widest) / 0.3)
        rise *= 1 - clip((cost - 0.3) / 0.3)
        moves = [0.0 if evidence.in_warmup or jump > 2 else min(rise, 0.3)]
        if not evidence.in_warmup:  # along a line to the end of the run, where noise costs much of the gain
            moves[0] += clip((cost - 0.3) / 0.3) * clip((done - 0.2) / 0.3) * evidence.decay
        above = scale > (0.03 if q < -3 else 1.0) * evidence.level
        flat = q < -3 or (q < 1 and z_late >= -0.5)  # with a slope that leans to more it may be a plateau
        if enough and flat and not asks and not evidence.in_warmup and above:
            moves.append(-0.1 * min(1 - q, 1))
        e_late = self._elasticity(late, losses, evidence)
        for elasticity, sure in ((e, z > 4), (e_late, z_late > 2)):
            if sure and elasticity > 0.25:
                moves.append(-min(2 * evidence.elapsed * math.log((1 + elasticity) / (1 + elasticity / 2)), 0.2))
        if (least := 2 * cost - most) > 2:
            moves.append(-min(2 * evidence.elapsed * min(least - 2, 1), 0.2))
        return min(moves)

    def _see(self, slope: float, error: float) -> None:
        before = self.smoothed(0) if self.rounds else 0.0
        variance = (slope - before if math.isnan(error) else error) ** 2
        if self.rounds and not math.isnan(error) and 0 < (usual := 9 * self.smoothed(1)) < variance:
            slope = before + (slope - before) * math.sqrt(usual / variance)
            variance = usual
        self.rounds.append((slope, variance))

    @staticmethod
    def _elasticity(slope: float, losses: list[float], evidence: Evidence) -> float:
        if evidence.start is None or not losses:
            return 0.0
        first, noise = evidence.start
        fall = first - mean(losses)
        if slope < 0:
            return max(slope / max(fall - 2 * noise, -slope), -0.98)
        return min(slope / max(fall, noise), 10.0)

    def _look_back(self) -> tuple[float, float, float, float, float, float, bool]:
        stride = 1
        while len(self.trail) // stride >= NUM_ROWS:
            stride *= 2
        blocks = [self.trail[k * stride : (k + 1) * stride] for k in range(len(self.trail) // stride)]
        num = len(blocks)
        if num < 8:
            return 0.0, 0.0, math.inf, 0.0, 0.0, 0.0, False
        slopes, losses = ([mean([row[column] for row in block]) for block in blocks] for column in (0, 1))
        turns = sorted(abs(losses[i] - 2 * losses[i + 1] + losses[i + 2]) for i in range(num // 2, num - 2))
        room = (3 + 12 / len(turns)) * median(turns)
        starts = [min(max(i - 2, 0), num - 5) for i in range(num)]
        losses = [min(losses[i], median(losses[at : at + 5]) + room) for i, at in enumerate(starts)]
        half, late = losses[3 * num // 8 : num // 2], losses[3 * num // 4 :]
        end = losses[num // 2 :]
        bends = [(a - 2 * b + c) ** 2 / 6 for a, b, c in zip(end, end[1:], end[2:], strict=False)]
        deviation = math.sqrt(mean(bends)) * (1 + 2 / len(bends))
        noise = deviation * math.sqrt(1 / len(late) + 1 / len(half))
        drop = mean(half) - mean(late)
        gain = max(drop, noise) / math.log(2)
        last = slopes[3 * num // 4 :]
        b = mean(last)
        error = math.sqrt(mean([(y - x) ** 2 for x, y in pairwise(last)]) / 2 / len(last))
        cost, most, jump = b / gain, (b + 2 * error) / gain, (losses[-1] - losses[-2]) / (math.sqrt(2) * deviation)
        return drop / noise, cost, most, b, b / error, jump, True


def compare(
    controller: LevelController, seed: int, num_rounds: int, num_knobs: int, *, bias: float, fall: float, noise: float,
    known: bool,
) -> LevelState:  # fmt: skip
    """Rounds with outliers and gaps, of which both say the same; the last state."""
    rng = np.random.default_rng(seed)
    state, slow = controller.init(num_knobs), [SlowKnob(controller) for _ in range(num_knobs)]
    for index in range(num_rounds):
        slopes = 0.2 * (bias + rng.normal(size=num_knobs)) * (10.0 if rng.random() < 0.05 else 1.0)
        errors = rng.uniform(0.02, 0.3, num_knobs) * (10.0 if rng.random() < 0.05 else 1.0)
        losses = 2 - fall * math.log1p(index) / 5 + noise * rng.normal(size=2)
        losses *= 10.0 if rng.random() < 0.05 else 1.0
        for numbers in (slopes, errors, losses):
            numbers[rng.random(len(numbers)) < 0.05] = math.nan
        scales = np.exp(rng.normal(-1, 1, num_knobs))
        evidence = Evidence(
            losses, np.ones((num_knobs, 2)), (slopes, errors), in_warmup=index < 3, elapsed=min(1 / (index + 1), 0.7),
            start=(2.0, noise) if known else None, update=0.02 * 10 ** -rng.uniform(0, 3) if known else None, level=1.3,
            progress=index / 60 if known else None, scales=scales, given=rng.choice([1.0, 2.0, math.inf]),
            usual=rng.choice([0.3, 1.0, math.inf]),
            decay=rng.choice([0.0, -0.1]), ease=rng.choice([0.25, 1.0]), further=rng.choice([1.0, 2.0]),
            shrinks=rng.choice([0.5, 1.0]),
        )  # fmt: skip
        state, decision = controller.update(state, evidence)
        rows = zip(slow, slopes.tolist(), errors.tolist(), scales.tolist(), strict=True)
        expected = [knob.move(slope, error, evidence, scale) for knob, slope, error, scale in rows]
        assert_allclose(np.log(decision.factors), expected, rtol=1e-7, atol=1e-9)
    return state


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6), num_rounds=st.integers(1, 50), num_knobs=st.integers(1, 3), bias=st.floats(-12, 3),
    fall=st.floats(-0.3, 1.5), noise=st.floats(1e-3, 0.3), known=st.booleans(),
    controller=st.sampled_from([LevelController(), LevelController(pace=5.0, optimism=(1, 3), max_update=None)]),
)  # fmt: skip
def test_it_is_the_slow_version(
    seed: int, num_rounds: int, num_knobs: int, bias: float, fall: float, noise: float, known: bool,
    controller: LevelController,
) -> None:  # fmt: skip
    compare(controller, seed, num_rounds, num_knobs, bias=bias, fall=fall, noise=noise, known=known)


@pytest.mark.parametrize("bias", [-9.0, -0.5, 0.5])
def test_a_long_run_is_the_slow_version_in_rows_of_several_rounds(bias: float) -> None:
    state = compare(LevelController(), 0, 300, 1, bias=bias, fall=0.5, noise=0.1, known=True)
    assert state.stride.tolist() == [4.0]


def test_where_updates_are_small_it_is_the_slow_version() -> None:
    """Clear progress, a slope that says nothing: what moves the rate is its pace."""
    compare(LevelController(), 2, 60, 1, bias=0.0, fall=1.5, noise=0.003, known=True)


def test_its_state_is_saved_and_checked() -> None:
    controller = LevelController()
    state = compare(controller, 1, 30, 2, bias=-1.0, fall=1.0, noise=0.1, known=True)
    again = unpack_state(pack_state(state), controller.init(2))
    controller.check_state(again)
    controller.check_state(controller.init(2))  # before the first round
    assert pack_state(again) == pack_state(state)
    forgotten = controller.forget(state)
    assert not forgotten.weight.any()
    assert forgotten.trail.tolist() == state.trail.tolist()  # what the run has gained stays known
    for broken in (
        {"filled": np.array([0.0, NUM_ROWS])},
        {"stride": np.array([1.0, 0.0])},
        {"filled": np.full(2, 0.5)},
    ):
        with pytest.raises(ValueError, match="filled must be below 128 and stride >= 1, whole numbers, but got"):
            controller.check_state(state._replace(**broken))
    with pytest.raises(ValueError, match="variance must be >= 0 and weight in"):
        controller.check_state(state._replace(variance=np.array([0.0, -1.0])))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pace": -1.0}, "pace must be a finite number >= 0, but got"),
        ({"optimism": 1.0}, "optimism must be a pair of finite numbers > 0, but got"),
        ({"optimism": (1.0, 0.0)}, "optimism must be a pair of finite numbers > 0, but got"),
        ({"max_update": 0.0}, "max_update must be None or a pair of finite numbers > 0, but got"),
        ({"max_update": (0.01, math.nan)}, "max_update must be None or a pair of finite numbers > 0, but got"),
    ],
)
def test_other_settings_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LevelController(**options)


def test_without_gradients_slopes_are_least_squares_of_the_losses() -> None:
    rng = np.random.default_rng(0)
    multipliers, losses = 1 + rng.uniform(-0.1, 0.1, (2, 6)), rng.normal(2.0, 0.1, 6)
    losses[4], multipliers[1] = math.nan, 1.0  # one has no loss; a knob that does not differ tells nothing
    slopes, errors = loss_slopes(Evidence(losses, multipliers))
    seen = np.isfinite(losses)
    design = np.stack([np.ones(5), multipliers[0, seen] - 1], axis=1)
    (_, slope), rest, _, _ = np.linalg.lstsq(design, losses[seen], rcond=None)
    assert slopes[0] == pytest.approx(slope)
    assert errors[0] == pytest.approx(math.sqrt(rest[0] / 3 * np.linalg.inv(design.T @ design)[1, 1]))
    assert np.isnan([slopes[1], errors[1]]).all()
    two = loss_slopes(Evidence(np.array([2.0, 1.9]), np.array([[0.9, 1.1]])))
    assert two[0][0] == pytest.approx(-0.5)
    assert math.isnan(two[1][0])  # no residual is left


def test_a_slope_without_an_error_is_certain() -> None:
    found = Smoothed(*np.zeros((3, 3))).updated(np.array([1.0, -1.0, 0.0]), np.zeros(3), 0.5)
    assert found.estimate(0.5)[2].tolist() == [1e6, -1e6, 0.0]


# -- runs whose losses and slopes are given -------------------------------------------------------------------------

T, FIRST = 10, 0.02 / 3 / 2.5
"""Steps of a round; and the update at the first level, as all have one size."""


class Run:
    """Rounds of a run whose first level is found as it should be; ``loss`` and ``slope`` are those of a step.

    Attributes:
        scales: after each round, relative to the first level.
        progress: q, as it was seen in each round.
        update: the last one, relative to the weights and over what a step of such a model may do.

    Args:
        unit: size of an update per unit of learning rate, relative to the weights.
        ends: whether progress alone ends at what is usual for models of this size.
        given: the peak of a schedule of the user's own, beside the first level.
        shrinks: whether updates have not been of one size, as Lion's are.
    """

    def __init__(
        self, loss: Callable[[int], float], slope: Callable[[int], float] = lambda step: 0.0, num_rounds: int = 100, *,
        error: float = 0.05, noise: float = 0.05, seed: int = 0, unit: float = 1.0, shrink: float = 1.0,
        num: float = 2e5, given: float | None = None, ends: bool = False, shrinks: bool = True, **controller: Any,
    ) -> None:  # fmt: skip
        rng, total = np.random.default_rng(seed), T * num_rounds
        steering = Steering(
            num_knobs=1, num_replicas=1, spread=0.0, controller=LevelController(**controller), scale_bounds=(1e-9, 1e9)
        )
        weights, allowed = 0.06 * math.sqrt(num), float(np.clip((3e6 / num) ** (0.4 if num < 3e6 else 0.8), 1 / 3, 6))
        level = Level(total) if given is None else Level(total, peak=given * FIRST * allowed / unit, hint=True)
        policy = RoundPolicy(steering, interval=T, acting=(0, total), level=level)
        scales, self.progress = [], []
        for step in range(1, total + 1):
            if not level.done:
                policy.follow(step - 1)
            if shrinks and level.done:
                level.smallest = 0.0
            if not ends:
                level.usual = math.inf
            if not policy.is_due(step):
                continue
            rate = float(steering.effective[0]) * level.peak
            seen = Seen(
                step, np.array([loss(step) + noise * rng.normal() / math.sqrt(policy.num_steps(step))]),
                np.ones(1, dtype=bool), rate=rate,
                sizes=(sizes := Sizes(weights, weights * unit * rate * (shrink if level.done else 1.0), 1.0, num)),
                slopes=(np.array([slope(step) + error * rng.normal()]), np.array([error])),
                left=total / 0.7 - step,
            )  # fmt: skip
            if "progress" in (looked := policy.end_round(seen).control):
                self.update = sizes.update / sizes.weights / allowed
                scales.append(steering.scales[0] / steering.level)
                self.progress.append(looked["progress"][0])
        self.scales = np.array(scales)

    @property
    def end(self) -> float:
        return float(self.scales[-1])


def steady(step: int) -> float:
    """A loss whose gain is 0.3."""
    return 2 - 0.3 * math.log(step)


@pytest.mark.parametrize("given", [None, 1.0])
def test_the_final_decay_begins_early_where_noise_costs_much(given: float | None) -> None:
    """Along a line to the end of the run, of which a schedule of the user's own has one already."""
    costly, cheap = (Run(steady, lambda step, cost=cost: 0.3 * cost, given=given) for cost in (0.8, 0.1))  # type: ignore[misc]
    assert cheap.end >= cheap.scales[60]
    fall = costly.end / costly.scales[60]
    left = np.linspace(1, 0.3, len(costly.scales))
    assert fall == pytest.approx(left[-1] / left[60] if given is None else 1.0, rel=0.02)


@pytest.mark.slow
def test_noise_alone_never_raises_it() -> None:
    """It comes to rest at the least that a standstill leaves; lower where chance looks like a loss that rises."""
    runs = [Run(lambda step: 2.0, num_rounds=300, seed=seed, error=(0.005, 0.1)[seed % 2]) for seed in range(12)]
    for run in runs:
        assert run.scales.max() <= 1.03
        assert run.end <= 1.03
        assert run.scales.min() > LOWEST_RISING * math.exp(-0.2)
    assert 0.3 * LOWEST * math.exp(-0.2) < min(run.end for run in runs)  # where chance looks like a cost: a decay
    assert 0.5 * LOWEST < np.median([run.end for run in runs]) < LOWEST * 1.1


@pytest.mark.parametrize(("num_rounds", "num_runs"), [(40, 20), (120, 8)])
def test_noise_does_not_raise_it_where_updates_are_small_either(num_rounds: int, num_runs: int) -> None:
    for seed in range(num_runs):
        error, num = (0.005, 0.1)[seed % 2], (100.0, 2e5, 2e7)[seed // 2 % 3]
        run = Run(lambda step: 2.0, num_rounds=num_rounds, seed=seed, error=error, shrink=0.02, num=num)
        assert run.scales.max() <= 1.1
        assert run.end <= 1.03


def test_it_rises_faster_where_updates_have_become_small() -> None:
    """As with Adam, whose second moments remember large first gradients; the bound on updates is as before."""

    usual, small, smaller = (Run(steady, num_rounds=200, noise=0.01, shrink=shrink) for shrink in (0.5, 0.1, 0.01))
    against = Run(steady, lambda step: 0.05, num_rounds=200, noise=0.01, error=0.01, shrink=0.1)
    assert usual.end < small.end < smaller.end
    assert small.end * 0.1 * 0.02 / 3 < 0.02
    assert math.log(smaller.end) < 3 * 2 * math.log(2000 / 120)
    assert against.end > 2  # where z > 0 would hold a larger update back


def test_a_sure_slope_against_it_holds_it_back_early_or_where_it_is_dear() -> None:
    """The gain is 0.3: a slope of 0.02 costs little of it, of 0.12 more; z is 4 and 24."""

    def run(slope: float) -> Run:
        return Run(steady, lambda step: slope, num_rounds=200, noise=0.01, error=0.005, max_update=None)

    free, cheap, dear = map(run, (-0.002, 0.02, 0.12))
    early = slice(0, 30)  # the first fifth, less the warm-up
    assert cheap.scales[early].max() <= 1.0 < free.scales[early].max()
    assert cheap.end > 3
    assert dear.scales.max() <= 1.0


def test_updates_are_bounded_by_what_a_model_allows_unless_they_surely_cost_little() -> None:
    """The gain is 0.3, the slope's error 0.006 after 300 rounds; 3 is what a small model allows, here 2.95."""

    def run(num: float, slope: float) -> Run:
        return Run(steady, lambda step: slope, num_rounds=300, noise=0.01, num=num, unit=100.0)

    for num, allowed in ((2e5, 15**0.4), (2e7, 1 / 3), (100.0, 6.0)):
        assert run(num, 0.04).update == pytest.approx(0.008, rel=0.1)
        assert run(num, -0.01).update == pytest.approx(0.008 * max(3 / allowed, 1.0), rel=0.2)


def test_a_large_model_rises_faster_where_more_is_surely_better() -> None:
    def run(slope: float, num: float = 2e7) -> Run:
        return Run(steady, lambda step: slope, num_rounds=200, noise=0.01, error=0.005, num=num, shrink=0.2)

    better, cheap = run(-0.03), run(-0.003)
    early = slice(0, 40)
    assert better.scales[early].max() > 1.5 * cheap.scales[early].max()


def test_batches_of_outliers_neither_lower_nor_raise_it() -> None:
    """A loss of ten times the usual one in some rounds: progress is seen past it, and noise is no progress."""

    def steady(step: int) -> float:
        return 2 - 0.2 * math.log(step)

    def rare(step: int) -> float:
        return 20.0 if step % 130 == 0 else 0.0

    plain = Run(steady, num_rounds=100, noise=0.02)
    spiked = Run(lambda step: steady(step) + rare(step), num_rounds=100, noise=0.02)
    assert spiked.end > 0.7 * plain.end
    assert np.diff(np.log(spiked.scales)).clip(max=0).sum() > -0.3  # while few rows tell what is usual
    for seed in range(6):
        noise = np.random.default_rng(seed).standard_t(2, size=1001)
        assert Run(lambda step, noise=noise: 2 + 0.1 * noise[step], seed=seed, noise=0.0).scales.max() < 1.1  # type: ignore[misc]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_loss_that_rises_lowers_it_far(noise: float) -> None:
    run = Run(lambda step: 2 + 0.001 * step, noise=noise)
    assert 0.3 * LOWEST_RISING * math.exp(-0.2) < run.end < 0.1


def test_a_slow_phase_after_a_fast_one_does_not_cut_it() -> None:
    """The slow one alone would take a run of ten times the length to show."""
    run = Run(lambda step: 2 - 0.002 * min(step, 500) - 2e-5 * max(step - 500, 0), num_rounds=300, max_update=None)
    assert (np.diff(np.log(run.scales)) > -0.05).all()
    assert run.end >= 1.0


def test_a_standstill_takes_back_rises_unless_the_slope_leans_to_more() -> None:
    """The loss falls, and stands still from the middle on."""

    def run(slope: float) -> Run:
        return Run(
            lambda step: 2 - 0.3 * math.log(min(step, 700)),
            lambda step: 0.0 if step < 700 else slope,
            num_rounds=600, noise=0.01, error=0.02, max_update=None, seed=1,
        )  # fmt: skip

    still, plateau = run(0.01), run(-0.02)
    assert max(still.scales) > 3
    assert still.end < 1.1
    assert plateau.end > 0.8 * max(plateau.scales)


def test_it_falls_for_no_other_reason_than_a_standstill_where_slopes_say_nothing() -> None:
    falls = 0
    for seed, speed in enumerate([0.0, 3e-5, 1e-4, 2e-4]):
        run = Run(lambda step, speed=speed: 2 - speed * step, num_rounds=150, error=1e-9, seed=seed)  # type: ignore[misc]
        fell = np.diff(np.log(run.scales), prepend=0.0) < 0
        assert (np.array(run.progress)[fell] < 1).all()
        falls += int(fell.sum())
    assert falls > 1


def test_a_loss_that_falls_along_a_line_raises_it_by_orders_of_magnitude() -> None:
    """Slopes of -P: nothing limits the learning rate, whatever the size of an update."""
    for unit in (10.0, 1000.0):
        run = Run(lambda step: 2 - 1e-4 * step, lambda step: -1e-4 * step, error=1e-4, noise=1e-4, unit=unit)
        assert run.end > 1e6
        assert np.diff(np.log(run.scales)).max() <= 0.3 + 1e-9


def test_steady_progress_raises_it_by_at_most_its_pace() -> None:
    for pace in (0.5, 2.0):
        run = Run(steady, num_rounds=200, noise=0.01, pace=pace, max_update=None)
        log_time = math.log(2000 / 120)  # since the warm-up
        assert 0.3 * pace * log_time < math.log(run.end) < pace * log_time
    assert Run(steady, num_rounds=200, noise=0.01, pace=0.0, max_update=None).end == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("max_update", [(0.001, 0.001), (0.008, 0.02), (0.02, 0.01), (0.05, 0.05)])
def test_rises_end_where_updates_are_as_large_as_they_may_be(max_update: tuple[float, float]) -> None:
    """The first level is that of updates of 2/3 percent, here."""
    run = Run(steady, num_rounds=200, noise=0.01, max_update=max_update)
    assert run.scales.max() <= max(max(max_update) / FIRST, 1.0) * 1.02


def test_above_a_schedule_that_was_given_only_the_slope_raises_it() -> None:
    def run(slope: float, given: float | None) -> Run:
        return Run(steady, lambda step: slope, 200, noise=0.01, error=0.02, given=given, max_update=None)

    free, near, below = run(0.0, None), run(0.0, 1.0), run(0.0, 1 / 30)
    assert free.end > 20
    assert near.end < 1.05
    assert [run(0.0, given).end for given in (1 / 2, 1 / 5)] == pytest.approx([2.0, 3.0], rel=0.05)  # to the level
    assert below.end == pytest.approx(free.end)  # far below the level nobody can have chosen it well
    assert run(-1.0, 1.0).end > 2 * near.end


def test_progress_alone_leads_to_what_is_usual_for_the_size_and_the_slope_beyond() -> None:
    def run(slope: float, **more: Any) -> Run:
        return Run(steady, lambda step: slope, 200, noise=0.01, error=0.02, ends=True, **more)

    times = (3e6 / 2e5) ** (0.55 - 0.4)  # a smaller model's best learning rate is higher than its first level
    usual = 1.6 * times * 3 * 2.5 / 8  # the first level counts three updates of one size, and is divided by 2.5, not 8
    assert run(0.0, max_update=None).end == pytest.approx(usual, rel=0.01)
    assert run(-1.0, max_update=None).end > 2 * usual
    small = run(0.0, shrink=0.2)  # updates that have become smaller than 0.25%: as many times more
    assert small.end > 1.2 * usual
    assert small.end * small.update == pytest.approx(usual * 0.0025, rel=0.05)


def test_in_large_models_progress_leads_further_where_noise_surely_costs_nothing() -> None:
    """With 20M entries twice as far."""

    def run(slope: float) -> Run:
        return Run(steady, lambda step: slope, 200, noise=0.01, error=0.005, ends=True, num=2e7, max_update=None)

    assert run(-1e-3).end / run(0.03).end == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("slope", "error", "is_asked", "is_very_sure"),
                         [(-0.2, 0.01, True, True), (-0.2, 0.06, True, False), (0.0, 0.02, False, False)])  # fmt: skip
def test_updates_may_be_larger_below_a_schedule_that_was_given_or_late_where_more_is_surely_better(
    slope: float, error: float, is_asked: bool, is_very_sure: bool
) -> None:
    """The gain is 0.3; the schedules are 100 and 9 times the first level."""

    def run(given: float | None) -> Run:
        return Run(steady, lambda step: slope, 200, noise=0.01, error=error, given=given)

    free, far, near = run(None), run(100.0), run(9.0)
    for found, is_wider in ((free, is_very_sure), (far, is_asked)):
        assert (0.017 if is_wider else 0.0) < found.update <= (0.034 if is_wider else 0.0088)  # four times the bound
    assert near.end <= 9 * math.exp(0.3)  # up to the schedule: one round may lead above it


def test_late_in_a_run_progress_leads_further_and_faster_where_the_slope_is_very_sure() -> None:
    """The gain is 0.3, and where a slope is not very sure, one of -0.06 does not lead as far."""
    sure, unsure = (Run(steady, lambda step: -0.06, 200, noise=0.01, error=error, ends=True, max_update=None)
                    for error in (0.004, 0.015))  # fmt: skip
    lion = Run(steady, lambda step: -0.06, 200, noise=0.01, error=0.004, ends=True, max_update=None, shrinks=False)
    begin, late = (int(share * len(sure.scales)) for share in (0.25, 0.55))
    assert sure.scales[begin] / unsure.scales[begin] == pytest.approx(1.0, rel=0.25)
    for slower in (unsure, lion):
        assert sure.scales[late] / sure.scales[begin] > 1.5 * slower.scales[late] / slower.scales[begin]


def test_a_slope_against_it_lowers_it() -> None:
    unopposed, against = (Run(steady, lambda step, b=b: b, 200, noise=0.01) for b in (0.0, 2.0))  # type: ignore[misc]
    assert against.end < 0.1 < 1 < unopposed.end


@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_a_cost_holds_rises_back_and_lowers_only_where_it_is_sure(noise: float) -> None:
    """The mean slope is the same; where rounds are far apart around it, nothing is sure."""
    controller = LevelController()
    state = controller.init(1)
    for i in range(24):
        slopes = (np.array([1.0 + noise * (-1) ** i]), np.array([1.0 + noise]))
        seen = Evidence(np.array([1.0 - 0.01 * i + 1e-4 * (-1) ** i]), np.ones((1, 1)), slopes, elapsed=0.1)
        state, decision = controller.update(state, seen)
    assert decision.info["cost_over_gain"][0] > 2
    assert (decision.factors[0] < 1) == (noise == 0)
    assert (decision.factors[0] == 1) == (noise > 0)


def test_a_round_whose_loss_has_jumped_raises_nothing() -> None:
    controller = LevelController()
    rng, state = np.random.default_rng(0), controller.init(1)
    for i in range(40):
        jumps = i in (30, 35)
        loss = 2 - 0.3 * math.log(i + 1) + 0.01 * rng.normal() + 0.2 * jumps
        seen = Evidence(np.array([loss]), np.ones((1, 1)), (np.zeros(1), np.ones(1)), elapsed=0.05)
        state, decision = controller.update(state, seen)
        if i > 20:
            assert (decision.factors[0] > 1) == (not jumps)


@pytest.mark.parametrize("slope", [0.0, -1.0, 1.0])
def test_without_losses_nothing_is_earned(slope: float) -> None:
    assert Run(lambda step: math.nan, lambda step: slope, error=0.01).scales.max() == 1.0


def test_without_slopes_nothing_moves() -> None:
    run = Run(steady, lambda step: math.nan)
    assert (run.scales == 1.0).all()


# -- losses of any size ---------------------------------------------------------------------------------------------

ANY = st.floats() | st.sampled_from(
    [sign * size for sign in (1, -1) for size in (0.0, 5e-324, 1e-320, 1e-160, 1e-3, 2.0, 1e99, 1e101, 1e200, 1.7e308)]
)


@settings(max_examples=60)
@given(
    losses=st.lists(st.tuples(ANY, st.integers(1, 4)), min_size=1, max_size=10),
    slopes=st.lists(ANY, min_size=1, max_size=4), errors=st.lists(ANY.map(abs), min_size=1, max_size=3),
    level=st.booleans(),
)  # fmt: skip
@example(losses=[(0.0, 5), (1e101, 1), (1.0, 1), (1e101, 3)], slopes=[0.0], errors=[0.0], level=False)
def test_no_loss_does_harm(
    losses: list[tuple[float, int]], slopes: list[float], errors: list[float], level: bool
) -> None:
    """Alone, repeated, and in sequences: nothing is raised but that rounds break, and every number stays finite."""
    steering = Steering(num_knobs=1, num_replicas=1, spread=0.0, controller=LevelController(), scale_bounds=(1e-6, 1e6))
    policy = RoundPolicy(
        steering, interval=T, acting=(0, math.inf), rollback=(rollback := Rollback(3)), level=Level() if level else None
    )
    given_losses = [loss for loss, times in losses for _ in range(times)]
    step = in_a_row = 0
    for index, loss in enumerate(given_losses):
        step += 1 if policy.searching else T - step % T
        rate = float(steering.effective[0])
        pair = (np.array([slopes[index % len(slopes)]]), np.array([errors[index % len(errors)]]))
        seen = Seen(
            step, np.array([loss]), np.ones(1, dtype=bool), rate=rate, slopes=pair,
            sizes=Sizes(10.0, 10 * rate, 1.0, 100.0),
        )  # fmt: skip
        try:
            verdict = policy.end_round(seen)
        except BrokenError:
            assert in_a_row >= rollback.budget.max_rollbacks
            return
        if verdict.go_back:
            in_a_row += 1
        elif not rollback.doubtful:  # a round in doubt ends no row
            in_a_row = 0
        policy.follow(step)
        assert 0 < steering.scales[0] < math.inf
        packed = pack_state(steering.state)
        assert pack_state(unpack_state(packed, LevelController().init(1))) == packed
