"""Controllers: factors whatever the losses are, then the paper's own (Eq. 4 to 7). The contract: test_testing.py."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hdet.checks import FloatArray
from hdet.controllers import Controller, Evidence, EvidenceController, Hold
from hdet.controllers.base import unpack_state
from hdet.ensemble.controllers import PaperController
from hdet.ensemble.controllers.paper import PaperState, softmax_weights
from hdet.policy.spread import fan_out

finite_losses = st.floats(-1e4, 1e4)
any_losses = st.one_of(finite_losses, st.sampled_from([math.nan, math.inf, -math.inf]))
temperatures = st.floats(1e-3, 1e3)
smoothings = st.floats(0, 0.99)


class Case(NamedTuple):
    """A round of K knobs on N replicas, and the velocity it starts with."""

    losses: FloatArray
    multipliers: FloatArray
    velocity: FloatArray
    spread: float

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.losses, self.multipliers)

    @property
    def state(self) -> PaperState:
        return PaperState(self.velocity)


@st.composite
def cases(draw: st.DrawFn, losses: st.SearchStrategy[float] = finite_losses) -> Case:
    num_replicas, num_knobs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    spread = draw(st.floats(0.001, 0.95))
    rho = fan_out(
        num_replicas, spread, seed=draw(st.integers(0, 99)), round_index=draw(st.integers(0, 99)), num_knobs=num_knobs
    )
    drawn = draw(st.lists(losses, min_size=num_replicas, max_size=num_replicas))
    fractions = draw(st.lists(st.floats(-1, 1), min_size=num_knobs, max_size=num_knobs))
    return Case(np.array(drawn), rho, spread * np.array(fractions), spread)


# -- every controller -----------------------------------------------------------------------------------------------

every_controller = pytest.mark.parametrize(
    "controller",
    [
        Hold(),
        PaperController(),
        PaperController(0.1, 2.0, 0.5),
        PaperController(0.05, 1000.0, 0.0),
        PaperController(0.1, velocity="absolute"),
    ],
    ids=["hold", "paper", "paper, quick", "paper, far too quick", "paper, absolute"],
)


@every_controller
@given(rounds=st.lists(cases(any_losses), min_size=1, max_size=4))
def test_factors_are_positive_and_finite(controller: Controller, rounds: list[Case]) -> None:
    num_knobs = len(rounds[0].multipliers)
    state = controller.init(num_knobs)
    for case in rounds:
        if len(case.multipliers) != num_knobs:
            continue
        state, decision = controller.update(state, case.evidence)
        assert decision.factors.shape == (num_knobs,)
        assert np.isfinite(decision.factors).all()
        assert (decision.factors > 0).all()


# -- the paper's ----------------------------------------------------------------------------------------------------


@given(cases(), temperatures, st.floats(0, 5), smoothings)
def test_the_formulas(case: Case, temperature: float, rate: float, smoothing: float) -> None:
    state, decision = PaperController(temperature, rate, smoothing).update(case.state, case.evidence)
    score = (case.losses.mean() - case.losses) / temperature
    weights = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
    delta = [float(np.dot(weights, rho) - rho.mean()) for rho in case.multipliers]
    velocity = [smoothing * v + (1 - smoothing) * d for v, d in zip(case.velocity, delta, strict=True)]
    # The score loses digits when the losses are large against the temperature.
    close = 1e-12 * (1 + float(np.abs(case.losses).max()) / temperature)
    assert_allclose(decision.info["weights"], weights, atol=close)
    assert_allclose(decision.info["delta"], delta, atol=close)
    assert_allclose(decision.info["velocity"], velocity, atol=close)
    assert_allclose(state.velocity, velocity, atol=close)
    assert_allclose(decision.factors, [max(1 + rate * v, 0.1) for v in velocity], atol=rate * close + 1e-15)


def test_a_round_by_hand() -> None:
    # s = (log 3, 0) after shifting, so the weights are 3/4 and 1/4.
    losses, rho = np.array([1.0, 1.0 + 0.1 * math.log(3)]), np.array([[0.8, 1.2], [1.2, 0.8]])
    controller = PaperController(temperature=0.1, rate=0.5, momentum=0.9)
    state, decision = controller.update(controller.init(2), Evidence(losses, rho))
    assert_allclose(decision.info["weights"], [0.75, 0.25])
    assert_allclose(decision.info["delta"], [-0.1, 0.1])
    assert_allclose(decision.info["velocity"], [-0.01, 0.01])
    assert_allclose(decision.factors, [0.995, 1.005])
    state, decision = controller.update(state, Evidence(losses, rho))
    assert_allclose(state.velocity, [-0.019, 0.019])
    assert_allclose(decision.factors, [1 - 0.5 * 0.019, 1 + 0.5 * 0.019])


@given(cases(any_losses), st.floats(-1e4, 1e4), st.floats(0.01, 100))
def test_only_loss_differences_count(case: Case, shift: float, temperature: float) -> None:
    controller = PaperController(temperature)
    _, one = controller.update(case.state, case.evidence)
    _, other = controller.update(case.state, Evidence(case.losses + shift, case.multipliers))
    assert_allclose(other.factors, one.factors, atol=1e-8)
    assert set(other.info) == set(one.info)
    for name in one.info:
        assert_allclose(other.info[name], one.info[name], atol=1e-8)


@given(cases(), st.floats(0.01, 100), st.sampled_from([2.0, 0.5, 1024.0]))
def test_losses_are_measured_in_temperatures(case: Case, temperature: float, unit: float) -> None:
    _, one = PaperController(temperature).update(case.state, case.evidence)
    _, other = PaperController(temperature * unit).update(case.state, Evidence(case.losses * unit, case.multipliers))
    assert_allclose(other.factors, one.factors, rtol=1e-12)


@given(cases(), st.floats(0, 10), st.floats(0, 10))
def test_delta_points_to_the_better_side(case: Case, slope: float, curve: float) -> None:
    assume(len(case.losses) > 1 and slope + curve > 0.01)
    for rho in case.multipliers:
        rises = slope * (rho - 1) + curve * (rho - 1) ** 3  # lower is better
        for sign in (1, -1):
            _, decision = PaperController(0.1).update(PaperState(np.zeros(1)), Evidence(sign * rises, rho[None]))
            delta = decision.info["delta"][0]
            assert sign * delta <= 1e-15
            if np.ptp(rises) > 1e-12:
                assert sign * delta < 0


@given(cases(), finite_losses)
def test_equal_losses_say_nothing(case: Case, loss: float) -> None:
    _, decision = PaperController().update(
        PaperState(np.zeros(len(case.multipliers))), Evidence(np.full_like(case.losses, loss), case.multipliers)
    )
    assert_allclose(decision.info["delta"], 0, atol=1e-14)
    assert_allclose(decision.factors, 1, atol=1e-14)


@given(cases(any_losses), temperatures, st.floats(0, 1), smoothings)
def test_a_round_moves_a_base_value_by_at_most_the_spread_times_the_rate(
    case: Case, temperature: float, rate: float, smoothing: float
) -> None:
    state, decision = PaperController(temperature, rate, smoothing).update(case.state, case.evidence)
    rounding = 1e-14
    assert np.abs(decision.info.get("delta", (0.0,))).max() <= case.spread + rounding
    assert np.abs(state.velocity).max() <= case.spread + rounding
    assert np.abs(decision.factors - 1).max() <= rate * case.spread + rounding


@given(cases(), st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_replica_without_a_finite_loss_has_weight_0(case: Case, data: st.DataObject, bad: float) -> None:
    num_replicas = len(case.losses)
    assume(num_replicas > 1)
    broken = data.draw(st.lists(st.integers(0, num_replicas - 1), min_size=1, max_size=num_replicas - 1, unique=True))
    losses = case.losses.copy()
    losses[broken] = bad
    _, decision = PaperController(1.0).update(case.state, Evidence(losses, case.multipliers))
    weights = np.array(decision.info["weights"])
    assert (weights[broken] == 0).all()
    assert weights.sum() == pytest.approx(1)
    # As if its loss were far worse than any other.
    losses[broken] = case.losses.max() + 1e6
    _, worse = PaperController(1.0).update(case.state, Evidence(losses, case.multipliers))
    assert_allclose(decision.factors, worse.factors, rtol=1e-12)


@given(cases(any_losses), temperatures)
def test_weights_are_a_distribution_ordered_by_loss(case: Case, temperature: float) -> None:
    assume(np.isfinite(case.losses).any())
    weights = softmax_weights(case.losses, temperature)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    finite = np.isfinite(case.losses)
    order = np.argsort(case.losses[finite])
    assert (np.diff(weights[finite][order]) <= 0).all()


def test_losses_far_apart_do_not_overflow() -> None:
    assert softmax_weights(np.array([1.0, 3e38, -2e38]), 0.002).tolist() == [0.0, 0.0, 1.0]
    assert softmax_weights(np.array([1.0, 1e308]), 0.002).tolist() == [1.0, 0.0]


def test_velocity_keeps_its_direction_over_a_silent_round() -> None:
    controller = PaperController(0.1, 0.5, 0.9)
    rho = np.array([[0.5, 1.5]])
    state, _ = controller.update(controller.init(1), Evidence(np.array([2.0, 1.0]), rho))
    silent, decision = controller.update(state, Evidence(np.array([math.nan, math.inf]), rho))
    assert silent.velocity.tolist() == state.velocity.tolist()
    assert decision.info == {"velocity": tuple(state.velocity.tolist())}


def test_a_steady_preference_reaches_the_full_velocity_and_no_more() -> None:
    controller = PaperController(temperature=1e-3, rate=0.5, momentum=0.9)
    rho, state, scale = np.array([[0.9, 1.1]]), controller.init(1), 1.0
    for _ in range(200):
        state, decision = controller.update(state, Evidence(np.array([1.0, 0.0]), rho))
        scale *= decision.factors[0]
        assert 1 < decision.factors[0] <= 1.05 + 1e-12 or decision.factors[0] == pytest.approx(1.05)
    assert state.velocity[0] == pytest.approx(0.1, rel=1e-6)
    assert scale > 1000


# -- Eq. 7 as printed -----------------------------------------------------------------------------------------------

PREFERS = {"lower": np.array([0.0, 1.0]), "higher": np.array([1.0, 0.0])}
"""Losses of two replicas, of which the first has the lower learning rate."""


def _rounds(velocity: Literal["relative", "absolute"], preferred: str, schedule: list[float]) -> list[float]:
    """Base values after each round, of a learning rate that replicas always prefer higher or lower."""
    controller = PaperController(temperature=0.01, rate=0.5, momentum=0.9, velocity=velocity)
    state, scale, values = controller.init(1), 1.0, []
    for eta in schedule:
        evidence = Evidence(PREFERS[preferred], np.array([[0.9, 1.1]]), values=np.array([eta * scale]))
        state, decision = controller.update(state, evidence)
        scale *= float(decision.factors[0])
        values.append(eta * scale)
    return values


def test_an_absolute_velocity_is_that_of_the_paper() -> None:
    schedule = [0.02 * 0.97**index for index in range(30)]
    base, velocity, expected = schedule[0], 0.0, []
    for index, eta in enumerate(schedule):
        base *= eta / schedule[max(index - 1, 0)]  # 1 - gamma, during the round
        rates = [0.9 * base, 1.1 * base]
        velocity = 0.9 * velocity + 0.1 * (rates[1] - sum(rates) / 2)  # all of the weight is on the second
        base += 0.5 * velocity
        expected.append(base)
    assert_allclose(_rounds("absolute", "higher", schedule), expected, rtol=1e-12)


@given(cases(), temperatures, st.floats(0, 0.5), smoothings, st.floats(1e-9, 1e3))
def test_where_the_base_stands_still_a_velocity_is_the_same_in_units_of_it(
    case: Case, temperature: float, rate: float, smoothing: float, value: float
) -> None:
    relative = PaperController(temperature, rate, smoothing)
    absolute = PaperController(temperature, rate, smoothing, velocity="absolute")
    seen = case.evidence._replace(values=np.full(len(case.velocity), value))
    state, decision = absolute.update(PaperState(value * case.velocity), seen)
    expected_state, expected = relative.update(case.state, seen)
    assert_allclose(decision.factors, expected.factors, rtol=1e-9)
    assert_allclose(state.velocity, value * expected_state.velocity, rtol=1e-9, atol=1e-12 * value)


def test_near_zero_an_absolute_velocity_moves_by_any_factor_and_a_relative_one_does_not() -> None:
    """The schedule falls by a half in each of the last rounds, the memory of the velocity by a tenth."""
    steady, falling = [0.01] * 20, [0.01 * 0.5**index for index in range(1, 11)]
    relative = _rounds("relative", "lower", steady + falling)
    assert min(relative) > 0
    assert all(after > before * 0.5 * 0.949 for before, after in pairwise(relative[20:]))
    with pytest.raises(
        RuntimeError,
        match=r"learning rates must stay above 0, but Eq\. 7 with velocity=\"absolute\" moves that of number 0 from "
        r"[\d.e-]+ to -[\d.e-]+: its velocity of -[\d.e-]+ is of rounds with higher ones, and training would ascend\. "
        r"Use PaperController\(velocity=\"relative\"\), a smaller rate or momentum, or a schedule that ends higher",
    ):
        _rounds("absolute", "lower", steady + falling)
    raised = _rounds("absolute", "higher", steady + falling)
    factors = [b / a / 0.5 for a, b in pairwise(raised[20:])]
    assert max(factors) > 1.5  # where a relative velocity moves by at most 1.05


def test_in_the_last_round_nothing_would_ascend() -> None:
    controller = PaperController(temperature=0.01, velocity="absolute")
    seen = Evidence(PREFERS["lower"], np.array([[0.9, 1.1]]), values=np.array([1e-6]), last=True)
    _, decision = controller.update(PaperState(np.array([-1e-3])), seen)
    assert decision.factors.tolist() == [1.0]


def test_a_schedule_at_zero_stays_there() -> None:
    controller = PaperController(temperature=0.01, velocity="absolute")
    seen = Evidence(PREFERS["lower"], np.array([[0.9, 1.1]]), values=np.zeros(1))
    assert controller.update(PaperState(np.array([-1e-3])), seen)[1].factors.tolist() == [1.0]


def test_a_velocity_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="temperature must be a finite number > 0, but got"):
        PaperController(temperature=0.0)
    with pytest.raises(ValueError, match=r'velocity must be one of "relative", "absolute", but got velocity=.fast.'):
        PaperController(velocity="fast")  # type: ignore[arg-type]


# -- Eq. 12 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "move"),
    [
        (0.75, 0.0),  # as much against a higher value as optimism outweighs
        (4.75, -0.2), (100.0, -1.0),
        (-1.25, 0.1), (-5.0, 0.2), (-9.0, 0.2), (-35.0, 0.35), (-60.0, 0.5), (-1000.0, 0.5),
    ],
)  # fmt: skip
def test_a_rise_is_limited_and_less_so_where_the_slope_is_very_sure(z: float, move: float) -> None:
    controller = EvidenceController(smoothing=0.0)
    evidence = Evidence(np.ones(1), np.ones((1, 1)), (np.array([0.1 * z]), np.array([0.1])))
    _, decision = controller.update(controller.init(1), evidence)
    assert_allclose(np.log(decision.factors), move, atol=1e-12)
    _, decision = controller.update(controller.init(1), evidence._replace(in_warmup=True))
    assert_allclose(np.log(decision.factors), min(move, 0.0), atol=1e-12)


# -- the state ------------------------------------------------------------------------------------------------------


def test_a_state_of_another_controller_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"controller state must have the fields \['velocity'\], but got \['speed'\]; the checkpoint"
    ):
        unpack_state({"speed": [0.0]}, PaperController().init(1))


@pytest.mark.parametrize("bad", [[0.0], [0.0, 0.0, 0.0], [0.0, math.nan], [math.inf, 0.0], []])
def test_a_state_of_the_wrong_size_or_not_finite_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"controller state 'velocity' must be finite numbers of shape"):
        unpack_state({"velocity": bad}, PaperController().init(2))


def test_a_round_that_almost_broke_does_not_hide_what_follows() -> None:
    """Its standard error is counted as three times the usual one at most: rounds after it are heard."""
    controller = EvidenceController()

    def feed(rounds: list[tuple[float, float]]) -> float:
        state = controller.init(1)
        for slope, error in rounds:
            evidence = Evidence(np.ones(1), np.ones((1, 1)), (np.array([slope]), np.array([error])), progress=0.5)
            state, decision = controller.update(state, evidence)
        return float(decision.info["z"][0])

    calm = [(-0.6, 0.05)] * 6
    assert feed([*calm, (0.9, 0.1), (0.4, 0.1)]) > 4
    assert feed([*calm, (4.4, 2.9), (0.9, 0.1), (0.4, 0.1)]) > 4  # and not 0.6, as an error of 2.9 would make it
    grown = [*calm, *[(0.0, 1.0)] * 8]
    assert abs(feed(grown)) < 1  # noise that has grown for good is believed
