"""The joint controller against a slow, obvious oracle: a weighted least squares over the list of all past rounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from hdet.checks import FloatArray
from hdet.controllers import Evidence
from hdet.controllers.base import pack_state, unpack_state
from hdet.ensemble.controllers import JointController
from hdet.policy.spread import assign
from hdet.testing import check_controller
from pairwise import pairwise
from tiers import slow

SPREAD = 0.1


class Fit(NamedTuple):
    slope: FloatArray
    error: FloatArray


def oracle(rounds: list[Evidence], smoothing: float) -> Fit:
    """Slopes with one intercept a round, and the sandwich's standard errors; NaN where there are none."""
    num_knobs = len(rounds[0].multipliers)
    counted = [e for e in rounds if np.isfinite(e.losses).sum() > 1]
    sizes: list[float] = []
    for evidence in counted:
        variance = float(evidence.losses[np.isfinite(evidence.losses)].var(ddof=1))
        before = sizes[-1] if sizes else variance
        sizes.append((before + variance) / 2 if variance > before else max(variance, before / 4))
    rows, targets, weights = [], [], []
    for age, (evidence, size) in enumerate(zip(reversed(counted), reversed(sizes), strict=True)):
        finite = np.isfinite(evidence.losses)
        x = evidence.multipliers[:, finite].T
        rows.append(x - x.mean(axis=0))
        targets.append((evidence.losses[finite] - evidence.losses[finite].mean()) / math.sqrt(size))
        weights.append(np.full(finite.sum(), smoothing**age))
    nan = np.full(num_knobs, math.nan)
    if not rows:
        return Fit(nan, nan)
    x, y, w = np.concatenate(rows), np.concatenate(targets), np.concatenate(weights)
    root = np.sqrt(w)[:, None]
    slope = np.linalg.lstsq(root * x, root[:, 0] * y, rcond=1e-5)[0]
    # Separated: no direction that the data leave open has a part in the knob.
    _, singular, directions = np.linalg.svd(root * x / np.maximum(np.linalg.norm(root * x, axis=0), 1e-300))
    rank = int((singular > 1e-5).sum())
    separated = (directions[:rank] ** 2).sum(axis=0) > 1 - 1e-6
    inverse = np.linalg.pinv(x.T @ (w[:, None] * x), rcond=1e-10)
    meat = x.T @ (w[:, None] ** 2 * x)
    # The expectation of the weighted squares of residuals, in units of the noise's variance: row by row.
    hat = x @ inverse @ (x * w[:, None]).T
    centred = np.zeros((len(y), len(y)))
    start = 0
    for part in targets:
        n = len(part)
        centred[start : start + n, start : start + n] = np.eye(n) - 1 / n
        start += n
    residual = (np.eye(len(y)) - hat) @ centred
    freedom = float((w[:, None] * residual**2).sum())
    prior = max(1 - freedom / 4, 0.0)  # as if some of the noise had been seen at variance 1
    variance = (float((w * (y - x @ slope) ** 2).sum()) + prior) / (freedom + prior)
    error = np.sqrt(variance * np.diag(inverse @ meat @ inverse))
    return Fit(np.where(separated, slope, math.nan), np.where(separated, error, math.nan))


def simulate(
    slopes: list[float], num_replicas: int, num_rounds: int, *, noise: float = 0.01, seed: int = 0, missing: float = 0.0
) -> list[Evidence]:
    rng = np.random.default_rng(seed)
    rounds = []
    for index in range(num_rounds):
        places = assign(num_replicas, len(slopes), seed=seed, round_index=index, balanced=True)
        x = SPREAD * places
        losses = 3 - 0.1 * index + np.array(slopes) @ x + noise * rng.normal(size=num_replicas)
        losses[rng.uniform(size=num_replicas) < missing] = math.nan
        rounds.append(Evidence(losses, 1 + x))
    return rounds


def walk(controller: JointController, rounds: list[Evidence]) -> list[tuple[Fit, FloatArray, FloatArray]]:
    """Slopes with their errors, z, and moves, round by round."""
    state = controller.init(len(rounds[0].multipliers))
    found = []
    for evidence in rounds:
        state, decision = controller.update(state, evidence)
        fit = Fit(np.array(decision.info["slope"]), np.array(decision.info["standard_error"]))
        found.append((fit, np.array(decision.info["z"]), np.log(decision.factors)))
    return found


@pytest.mark.parametrize(
    ("num_knobs", "num_replicas", "smoothing", "missing"),
    [
        tuple(row.values())
        for row in pairwise(
            {"num_knobs": (1, 2, 3), "num_replicas": (2, 4, 8), "smoothing": (0.8, 0.3, 0.0), "missing": (0.0, 0.3)}
        )
    ],
)
def test_it_matches_the_oracle_in_every_round(
    num_knobs: int, num_replicas: int, smoothing: float, missing: float
) -> None:
    rounds = simulate([0.5, -1.0, 0.0][:num_knobs], num_replicas, 9, missing=missing, seed=num_knobs)
    optimism = [0.5, 0.0, 0.2][:num_knobs]
    controller = JointController(gain=0.03, optimism=optimism, doubt=0.7, smoothing=smoothing, step=0.07)
    for index, (fit, z, move) in enumerate(walk(controller, rounds)):
        expected = oracle(rounds[: index + 1], smoothing)
        assert_allclose(fit.slope, expected.slope, rtol=1e-6, atol=1e-9)
        assert_allclose(fit.error, expected.error, rtol=1e-6, atol=1e-9)
        known = np.isfinite(expected.error) & (np.isfinite(rounds[index].losses).sum() > 1)
        assert_allclose(z[known], (expected.slope / expected.error)[known], rtol=1e-5, atol=1e-7)
        against = expected.slope / expected.error - optimism
        shrunk = np.where(against > 0.7, against - 0.7, np.where(against < -0.7, against + 0.7, 0.0))
        rule = np.clip(-0.03 * shrunk / 2, -0.07, 0.07)
        assert_allclose(move, np.where(known, rule, 0.0), rtol=1e-5, atol=1e-8)


def test_infinite_losses_are_left_out_like_missing_ones() -> None:
    rounds = simulate([0.5, -1.0], 8, 5, missing=0.3)
    infinite = [e._replace(losses=np.where(np.isnan(e.losses), math.inf, e.losses)) for e in rounds]
    for one, other in zip(walk(JointController(), rounds), walk(JointController(), infinite), strict=True):
        assert_allclose(one[0].slope, other[0].slope)
        assert_allclose(one[2], other[2])


def test_a_knob_that_is_not_separated_stays_where_it_is_and_says_nothing() -> None:
    """Two knobs always move together, the third on its own; the fourth does not move at all."""
    rng = np.random.default_rng(0)
    rounds = []
    for index in range(6):
        a, c = SPREAD * assign(4, 2, seed=0, round_index=index, balanced=True)
        losses = 2 * a - 3 * c + 0.01 * rng.normal(size=4)
        rounds.append(Evidence(losses, 1 + np.stack([a, -2 * a, c, 0 * a])))
    for fit, z, move in walk(JointController(optimism=1.0), rounds)[1:]:
        assert np.isnan(fit.slope).tolist() == [True, True, False, True]
        assert np.isnan(fit.error).tolist() == [True, True, False, True]
        assert np.isnan(z).tolist() == [True, True, False, True]
        assert (move != 0).tolist() == [False, False, True, False]


@pytest.mark.parametrize(("num_knobs", "num_replicas"), [(2, 2), (4, 4), (5, 4), (9, 8)])
def test_more_knobs_than_replicas_are_separated_over_the_rounds(num_knobs: int, num_replicas: int) -> None:
    slopes = np.linspace(-1, 1, num_knobs)
    rounds = simulate(slopes.tolist(), num_replicas, 40, noise=1e-3)
    found = walk(JointController(smoothing=0.95), rounds)
    assert not np.isfinite(found[0][0].slope).all()
    assert np.isfinite(found[-1][0].error).all()
    # In standard deviations of a round's losses, so up to a common factor.
    slope = found[-1][0].slope
    cosine = slope @ slopes / np.linalg.norm(slope) / np.linalg.norm(slopes)
    assert cosine > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("num_knobs", "num_replicas"), [(1, 2), (2, 2), (1, 4), (3, 4), (3, 8), (6, 4)])
def test_knobs_without_an_effect_have_a_z_of_about_one(num_knobs: int, num_replicas: int) -> None:
    zs = [
        walk(JointController(smoothing=0.9), simulate([0.0] * num_knobs, num_replicas, 30, seed=seed))[-1][1]
        for seed in range(30)
    ]
    assert 0.7 < np.sqrt(np.mean(np.square(zs))) < 1.4


def test_no_round_outweighs_the_others_by_the_size_of_its_losses() -> None:
    rounds = simulate([1.0, -2.0], 4, 8)
    # Ten early rounds of ten times the size, and of the opposite opinion.
    early = [e._replace(losses=-10 * e.losses) for e in simulate([1.0, -2.0], 4, 10, seed=1)]
    *_, (_, alone, _) = walk(JointController(), rounds)
    *_, (_, after, _) = walk(JointController(), early + rounds)
    assert np.sign(after).tolist() == np.sign(alone).tolist()
    assert (np.abs(after) > 1.5).all()


def test_moves_follow_the_evidence_and_are_bounded() -> None:
    controller = JointController(gain=0.1, step=0.2)
    rounds = simulate([3.0, -3.0, 0.0], 8, 12, noise=0.05)
    for _, _, move in walk(controller, rounds)[1:]:
        assert -0.2 - 1e-12 <= move[0] < 0 < move[1] <= 0.2 + 1e-12
        assert abs(move[2]) < 0.2
    exact = walk(controller, simulate([3.0, -3.0, 0.0], 8, 3, noise=0.0))
    assert exact[-1][2][:2] == pytest.approx([-0.2, 0.2])


def test_losses_that_are_all_the_same_move_nothing() -> None:
    rounds = [e._replace(losses=np.full(8, 2.0)) for e in simulate([1.0, 1.0], 8, 4)]
    for _, _, move in walk(JointController(), rounds):
        assert move.tolist() == [0.0, 0.0]


@given(st.integers(1, 4), st.sampled_from([2, 3, 4, 8]), st.floats(-10, 10), st.integers(0, 50))
def test_a_constant_added_to_a_rounds_losses_does_not_matter(k: int, n: int, constant: float, seed: int) -> None:
    rounds = simulate([1.0] * k, n, 4, seed=seed)
    shifted = [e._replace(losses=e.losses + constant * i) for i, e in enumerate(rounds)]
    for one, other in zip(walk(JointController(), rounds), walk(JointController(), shifted), strict=True):
        assert_allclose(one[2], other[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, slow({"optimism": 0.75, "smoothing": 0.0, "gain": 3.0})])
def test_it_keeps_the_contract_of_a_controller(options: dict[str, float]) -> None:
    check_controller(lambda: JointController(**options), num_replicas=(2, 8))


def test_its_state_survives_saving() -> None:
    controller, rounds = JointController(), simulate([0.5, -1.0, 0.2], 4, 8, missing=0.1)
    state = controller.init(3)
    for evidence in rounds:
        packed = pack_state(state)
        again = unpack_state(packed, controller.init(3))
        controller.check_state(again)
        assert pack_state(again) == packed
        state, decision = controller.update(state, evidence)
        resumed, other = controller.update(again, evidence)
        assert pack_state(resumed) == pack_state(state)
        assert other.factors.tolist() == decision.factors.tolist()


def test_a_state_of_another_number_of_knobs_is_refused() -> None:
    packed = pack_state(JointController().init(3))
    with pytest.raises(ValueError, match=r"controller state 'gram' must be finite numbers of shape \(2, 2\), but got"):
        unpack_state(packed, JointController().init(2))
    packed["gram"][0][0] = math.nan  # type: ignore[index]
    with pytest.raises(ValueError, match=r"controller state 'gram' must be finite numbers of shape \(3, 3\), but got"):
        unpack_state(packed, JointController().init(3))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"doubt": -1.0}, r"doubt must be a finite number >= 0, but got doubt=-1.0"),
        ({"gain": 0.0}, r"gain must be a finite number > 0, but got gain=0.0"),
        ({"gain": math.nan}, r"gain must be a finite number > 0, but got gain=nan"),
        ({"step": -1.0}, r"step must be a finite number > 0, but got step=-1.0"),
        ({"step": math.inf}, r"step must be a finite number > 0, but got step=inf"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), but got smoothing=1.0"),
        ({"smoothing": -0.1}, r"smoothing must be in \[0, 1\), but got smoothing=-0.1"),
        ({"optimism": -1.0}, r"optimism must be finite and >= 0, but got optimism=-1.0"),
        ({"optimism": [0.0, math.nan]}, r"optimism must be finite and >= 0, but got optimism=\[0.0, nan\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JointController(**arguments)


def test_optimism_for_another_number_of_knobs_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"optimism must be one number or one for each of 3 knobs, but got 2"):
        JointController(optimism=[0.1, 0.2]).init(3)
