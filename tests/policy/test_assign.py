"""Assignments of several knobs: told apart by as few replicas and rounds as possible, and nobody is favoured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from hdet.checks import FloatArray
from hdet.policy.spread import assign, multipliers
from hdet.policy.steering import Panel, Steering

counts = st.integers(1, 17)
nums = st.integers(1, 9)
seeds = st.integers(0, 2**40)
rounds = st.integers(0, 10**6)


def _correlation(places: FloatArray) -> float:
    """The largest between two rows."""
    gram = places @ places.T
    size = np.sqrt(np.diag(gram))
    return float(np.abs(np.triu(gram / np.outer(size, size), 1)).max(initial=0.0))


@given(counts, nums, seeds, rounds, st.booleans())
def test_rows_have_mean_zero_and_stay_inside(n: int, k: int, seed: int, index: int, balanced: bool) -> None:
    places = assign(n, k, seed=seed, round_index=index, balanced=balanced)
    assert places.shape == (k, n)
    assert places.dtype == np.float64
    assert_allclose(places.sum(axis=1), 0, atol=1e-12)
    assert np.abs(places).max() <= 1
    assert n == 1 or (np.abs(places).max(axis=1) == 1).all()


@given(counts, nums, seeds, rounds, st.booleans())
def test_it_is_a_pure_function(n: int, k: int, seed: int, index: int, balanced: bool) -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first, again = (assign(n, k, seed=seed, round_index=index, balanced=balanced) for _ in range(2))
    assert_array_equal(first, again)
    assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("n", [4, 5, 8])
def test_every_round_and_every_seed_has_its_own_assignment(n: int, balanced: bool) -> None:
    for name in ("round_index", "seed"):
        assigned = {
            assign(n, 3, **{"seed": 0, "round_index": 0, name: i}, balanced=balanced).tobytes() for i in range(20)
        }
        assert len(assigned) > 15


@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 1), (4, 3), (8, 4), (8, 7), (16, 9), (16, 15)])
def test_knobs_are_orthogonal_where_a_power_of_two_is_above_their_number(n: int, k: int) -> None:
    for index in range(20):
        places = assign(n, k, seed=3, round_index=index, balanced=True)
        assert_array_equal(places @ places.T, n * np.eye(k))
        assert set(places.flatten()) == {-1.0, 1.0}


def test_a_learning_rate_that_is_not_explored_takes_nothing_from_the_knobs() -> None:
    """Three knobs on four replicas, orthogonal in every round, beside a learning rate with spread 0."""
    panel = Panel(("a", "b", "c"), (0.1,) * 3, ((-1.0, 1.0),) * 3, (True,) * 3)
    for index in range(20):
        steering = Steering(
            num_knobs=1, num_replicas=4, spread=0.0, controller=None, scale_bounds=(1e-6, 1e6), round_index=index,
            panel=panel,
        )  # fmt: skip
        assert_array_equal(steering.multipliers[0], np.ones(4))
        assert _correlation(steering.multipliers[1:] - 1) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("n", [3, 5, 6, 7])
@pytest.mark.parametrize("k", [2, 3])
def test_balanced_is_never_more_correlated_than_independent_permutations(n: int, k: int) -> None:
    both = [
        [_correlation(assign(n, k, seed=1, round_index=i, balanced=balanced)) for i in range(30)]
        for balanced in (True, False)
    ]
    assert (np.array(both[0]) <= np.array(both[1]) + 1e-12).all()
    assert np.mean(both[0]) < 0.8 * np.mean(both[1])


@pytest.mark.parametrize("n", [3, 4, 5, 6, 8])
def test_unbalanced_rows_are_permutations_of_equation_1(n: int) -> None:
    places = assign(n, 3, seed=0, round_index=4, balanced=False)
    for row in places:
        assert_allclose(sorted(row), multipliers(n, 1.0) - 1)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("n", "k"), [(2, 5), (3, 4), (4, 7), (8, 9)])
def test_more_knobs_than_replicas_are_separated_over_the_rounds(n: int, k: int, balanced: bool) -> None:
    assigned = [assign(n, k, seed=2, round_index=i, balanced=balanced) for i in range(40)]
    assert np.linalg.matrix_rank(assigned[0] @ assigned[0].T) < k
    total = np.sum([places @ places.T for places in assigned], axis=0)
    assert np.linalg.matrix_rank(total) == k
    assert _correlation(np.linalg.cholesky(total).astype(np.float64)) < 0.8


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 6), (5, 2)])
def test_no_replica_is_favoured(n: int, k: int, balanced: bool) -> None:
    assigned = np.stack([assign(n, k, seed=5, round_index=i, balanced=balanced) for i in range(200)])
    assert (assigned.max(axis=0) == 1).all()
    assert (assigned.min(axis=0) == -1).all()
    deviation = assigned.std(axis=0) / np.sqrt(len(assigned))
    assert np.abs(assigned.mean(axis=0) / deviation).max() < 4
