"""Eq. 1 and 9: multipliers and permutations."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from hdet.policy.spread import fan_out, inside_bounds, multipliers, permutation

counts = st.integers(1, 64)
spreads = st.floats(0, 1, exclude_max=True)
seeds = st.integers(0, 2**63)
rounds = st.integers(0, 10**6)
knobs = st.integers(0, 100)


# -- multipliers ----------------------------------------------------------------------------------------------------


@given(counts, spreads)
def test_multipliers_have_mean_one(num_replicas: int, spread: float) -> None:
    assert multipliers(num_replicas, spread).mean() == pytest.approx(1, abs=1e-14)


@given(counts, spreads)
def test_multipliers_stay_inside_the_spread_and_positive(num_replicas: int, spread: float) -> None:
    rho = multipliers(num_replicas, spread)
    assert rho.shape == (num_replicas,)
    assert (rho >= 1 - spread - 1e-15).all()
    assert (rho <= 1 + spread + 1e-15).all()
    assert (rho > 0).all() or spread > 1 - 1e-15


@given(st.integers(2, 64), spreads)
def test_multipliers_reach_both_ends_in_even_steps(num_replicas: int, spread: float) -> None:
    rho = multipliers(num_replicas, spread)
    assert rho[0] == pytest.approx(1 - spread, abs=1e-15)
    assert rho[-1] == pytest.approx(1 + spread, abs=1e-15)
    assert_allclose(np.diff(rho), 2 * spread / (num_replicas - 1), atol=1e-14)


@given(counts, spreads)
def test_multipliers_are_symmetric_around_one(num_replicas: int, spread: float) -> None:
    rho = multipliers(num_replicas, spread)
    assert_allclose(rho + rho[::-1], 2.0, rtol=1e-15)


@given(counts)
def test_no_spread_is_exactly_one(num_replicas: int) -> None:
    assert_array_equal(multipliers(num_replicas, 0.0), np.ones(num_replicas))


@given(spreads)
def test_one_replica_is_exactly_one(spread: float) -> None:
    assert multipliers(1, spread).tolist() == [1.0]


def test_multipliers_of_the_papers_setting() -> None:
    ninths = [8 / 9, 1 - 5 / 63, 1 - 3 / 63, 1 - 1 / 63, 1 + 1 / 63, 1 + 3 / 63, 1 + 5 / 63, 10 / 9]
    assert_allclose(multipliers(8, 1 / 9), ninths, rtol=1e-14)
    assert multipliers(2, 0.25).tolist() == [0.75, 1.25]
    assert multipliers(3, 0.5).tolist() == [0.5, 1.0, 1.5]


# -- permutations ---------------------------------------------------------------------------------------------------


@given(counts, seeds, rounds, knobs)
def test_a_permutation_names_every_replica_once(num_replicas: int, seed: int, round_index: int, knob: int) -> None:
    pi = permutation(num_replicas, seed=seed, round_index=round_index, knob=knob)
    assert sorted(pi.tolist()) == list(range(num_replicas))


@given(counts, seeds, rounds, knobs)
def test_a_permutation_is_a_pure_function(num_replicas: int, seed: int, round_index: int, knob: int) -> None:
    first = permutation(num_replicas, seed=seed, round_index=round_index, knob=knob)
    permutation(num_replicas, seed=seed + 1, round_index=round_index, knob=knob)
    assert_array_equal(permutation(num_replicas, seed=seed, round_index=round_index, knob=knob), first)


@pytest.mark.parametrize(
    ("num_replicas", "seed", "round_index", "knob", "expected"),
    [
        (1, 0, 1, 0, [0]),
        (2, 0, 1, 0, [1, 0]),
        (4, 0, 1, 0, [1, 2, 0, 3]),
        (4, 0, 1, 1, [2, 1, 0, 3]),
        (4, 0, 2, 0, [0, 3, 1, 2]),
        (8, 0, 1, 0, [7, 4, 5, 1, 6, 2, 0, 3]),
        (8, 1234, 57, 3, [7, 2, 3, 6, 0, 4, 5, 1]),
        (8, 2**40 + 1, 1000, 0, [7, 0, 1, 2, 4, 6, 3, 5]),
        (16, 7, 3, 2, [1, 13, 8, 9, 12, 6, 2, 4, 10, 3, 15, 14, 0, 11, 5, 7]),
    ],
)
def test_the_stream_of_permutations_does_not_change(
    num_replicas: int, seed: int, round_index: int, knob: int, expected: list[int]
) -> None:
    # A checkpoint holds only the seed and the round: another stream would resume another run.
    assert permutation(num_replicas, seed=seed, round_index=round_index, knob=knob).tolist() == expected


def test_permutations_differ_between_rounds_knobs_and_seeds() -> None:
    draws = [
        tuple(permutation(8, seed=seed, round_index=round_index, knob=knob).tolist())
        for seed in range(5)
        for round_index in range(5)
        for knob in range(5)
    ]
    assert len(set(draws)) > 115  # of 125 draws from 40320


def test_all_permutations_are_equally_likely() -> None:
    num_rounds = 6000
    seen = Counter(tuple(permutation(3, seed=11, round_index=i, knob=0).tolist()) for i in range(num_rounds))
    assert len(seen) == 6
    chi_square = sum((n - num_rounds / 6) ** 2 / (num_rounds / 6) for n in seen.values())
    assert chi_square < 20.5  # 0.1% of fair draws exceed it


def test_knobs_are_permuted_independently() -> None:
    rho = np.stack([fan_out(4, 0.5, seed=3, round_index=i, num_knobs=2) for i in range(1, 2001)])
    correlation = np.corrcoef(rho[:, 0].ravel(), rho[:, 1].ravel())[0, 1]
    assert abs(correlation) < 0.04  # three standard errors


def test_no_global_random_state_is_touched() -> None:
    before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())
    fan_out(8, 0.3, seed=0, round_index=5, num_knobs=4)
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before


# -- fan-out --------------------------------------------------------------------------------------------------------


@given(counts, spreads, seeds, st.integers(1, 5))
def test_in_round_0_replica_r_holds_rho_r(num_replicas: int, spread: float, seed: int, num_knobs: int) -> None:
    rows = fan_out(num_replicas, spread, seed=seed, round_index=0, num_knobs=num_knobs)
    assert_array_equal(rows, [multipliers(num_replicas, spread)] * num_knobs)


@given(counts, spreads, seeds, st.integers(1, 10**6), st.integers(1, 5))
def test_later_every_knob_has_a_permutation_of_its_own(
    num_replicas: int, spread: float, seed: int, round_index: int, num_knobs: int
) -> None:
    rows = fan_out(num_replicas, spread, seed=seed, round_index=round_index, num_knobs=num_knobs)
    rho = multipliers(num_replicas, spread)
    assert rows.shape == (num_knobs, num_replicas)
    for knob, row in enumerate(rows):
        pi = permutation(num_replicas, seed=seed, round_index=round_index, knob=knob)
        assert_array_equal(row, [rho[place] for place in pi])
        assert_array_equal(np.sort(row), rho)


def test_a_knob_keeps_its_permutation_when_others_are_added() -> None:
    few, many = (fan_out(8, 0.3, seed=0, round_index=4, num_knobs=n) for n in (2, 6))
    assert_array_equal(many[:2], few)


@pytest.mark.parametrize(
    ("base", "expected"),
    [(0.5, [0.3, 0.5, 0.7]), (0.1, [0.0, 0.2, 0.4]), (0.95, [0.6, 0.8, 1.0]), (3.0, [0.6, 0.8, 1.0])],
)
def test_near_a_bound_places_are_moved_inside(base: float, expected: list[float]) -> None:
    column, offsets = np.array([[base]]), np.array([[-0.2, 0.0, 0.2]])
    low, high = np.array([[0.0]]), np.array([[1.0]])
    assert inside_bounds(column, offsets, low, high, moved=True).tolist() == [pytest.approx(expected)]
    cut = np.clip(base + offsets, 0, 1)
    assert inside_bounds(column, offsets, low, high, moved=False).tolist() == cut.tolist()


def test_places_wider_than_the_bounds_are_drawn_together() -> None:
    low, high = np.array([[1.0]]), np.array([[2.0]])
    found = inside_bounds(np.array([[1.1]]), np.array([[-4.0, 0.0, 2.0, 4.0]]), low, high, moved=True)
    assert found.tolist() == [pytest.approx([1.0, 1.5, 1.75, 2.0])]
    equal = inside_bounds(np.array([[1.1]]), np.zeros((1, 2)), low, high, moved=True)
    assert equal.tolist() == [[1.1, 1.1]]
