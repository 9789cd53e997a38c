"""Fan-out: which replica trains with which multiple of the base value (Eq. 1 and 9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hdet.checks import FloatArray


def multipliers(num_replicas: int, spread: float) -> FloatArray:
    r"""Eq. 1: :math:`\rho_r = 1 + \alpha (r - (N-1)/2) / \delta`, evenly spaced around 1.

    Args:
        num_replicas: N, at least 1. With one replica the only multiplier is 1.
        spread: alpha in [0, 1). All multipliers lie inside [1 - alpha, 1 + alpha].

    Example:
        >>> multipliers(4, 0.5).round(3).tolist()
        [0.5, 0.833, 1.167, 1.5]
    """
    delta = max((num_replicas - 1) / 2, 0.5)
    places = np.arange(num_replicas, dtype=np.float64) - (num_replicas - 1) / 2
    rho: FloatArray = 1.0 + spread * (places / delta)
    return rho


def permutation(num_replicas: int, *, seed: int, round_index: int, knob: int) -> NDArray[np.intp]:
    """The private permutation of Eq. 9: a pure function, so every replica computes the same one.

    Nothing is drawn from a shared stream: a resumed run needs only the seed and the round number. Raw 64-bit
    words are ranked rather than shuffled, because NumPy guarantees the words across versions but not the shuffle.
    """
    return np.argsort(_words(num_replicas, seed, round_index, knob), kind="stable")


def fan_out(num_replicas: int, spread: float, *, seed: int, round_index: int, num_knobs: int) -> FloatArray:
    """Multiplier of every knob (row) on every replica (column) in one round.

    In round 0 replica r holds rho_r; later every knob has a fresh permutation of its own (Eq. 9).
    """
    rho = multipliers(num_replicas, spread)
    if round_index == 0 or num_replicas == 1:
        return np.tile(rho, (num_knobs, 1))
    return np.stack(
        [rho[permutation(num_replicas, seed=seed, round_index=round_index, knob=knob)] for knob in range(num_knobs)]
    )


def assign(num_replicas: int, num_knobs: int, *, seed: int, round_index: int, balanced: bool) -> FloatArray:
    """Places in [-1, 1] of several knobs (rows) on the replicas (columns), to be told apart by least squares.

    Every row has mean 0. Unbalanced: the places of Eq. 1, each row in a permutation of its own (Eq. 9). Balanced, rows
    are as orthogonal as N allows, and exactly so where N is a power of two above the number of knobs: then replicas
    stand at the two ends, -1 and 1, along columns of a Hadamard matrix, which makes standard errors smaller besides.
    Otherwise the least correlated of 64 draws of permutations.

    A pure function of its arguments. Signs, columns and replicas are shuffled in every round.
    """
    if num_replicas == 1 or num_knobs == 0:
        return np.zeros((num_knobs, num_replicas))
    if not balanced:
        return _permuted(num_replicas, num_knobs, seed=seed, round_index=round_index)
    if num_replicas & (num_replicas - 1) == 0:
        hadamard = np.ones((1, 1))
        while len(hadamard) < num_replicas:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        words = _words(2 * num_knobs + num_replicas, seed, round_index)
        # More knobs than columns: they share, and the signs separate them over the rounds.
        order = np.argsort(words[:num_knobs], kind="stable")
        columns = 1 + order % (num_replicas - 1)
        signs = 1.0 - 2.0 * ((words[num_knobs : 2 * num_knobs] >> np.uint64(63)) == 1)
        rows = np.argsort(words[2 * num_knobs :], kind="stable")
        places: FloatArray = signs[:, None] * hadamard[rows][:, columns].T
        return places
    draws = list(_permuted(num_replicas, 64 * num_knobs, seed=seed, round_index=round_index).reshape(64, num_knobs, -1))
    upper = np.triu_indices(num_knobs, 1)
    return min(draws, key=lambda places: float(np.abs((places @ places.T)[upper]).max(initial=0.0)))


def inside_bounds(
    base: FloatArray, offsets: FloatArray, low: FloatArray, high: FloatArray, *, moved: bool
) -> FloatArray:
    """Positions of knobs (rows) on the replicas (columns) within their bounds; ``base``, ``low``, ``high``: columns.

    A knob near a bound is explored to one side only: what reaches beyond is cut off, or where ``moved`` the whole of it
    is moved inside, so that places stay even.
    """
    if moved:
        half = np.abs(offsets).max(axis=1, keepdims=True)
        offsets = offsets * np.minimum(1.0, (high - low) / 2 / np.where(half > 0, half, 1.0))
        half = np.minimum(half, (high - low) / 2)
        base = np.clip(base, low + half, high - half)
    positions: FloatArray = np.clip(base + offsets, low, high)
    return positions


def _permuted(num_replicas: int, num_knobs: int, *, seed: int, round_index: int) -> FloatArray:
    words = [_words(num_replicas, seed, round_index, knob) for knob in range(num_knobs)]
    rows: FloatArray = (multipliers(num_replicas, 1.0) - 1.0)[np.argsort(words, axis=1, kind="stable")]
    return rows


def _words(count: int, *key: int) -> NDArray[np.uint64]:
    # The same as of a list, which takes NumPy four times as long; a larger number is several words of an array.
    entropy = np.array(key, dtype=np.uint32) if 0 <= min(key) <= max(key) < 2**32 else key
    return np.asarray(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)
