"""The benchmark's statistics, each a pure function of numbers. A loss that is not finite counts as infinite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Condition = TypeVar("Condition")
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
NUM_DRAWS = 2000
"""Of a bootstrap."""
LARGEST = 1e300
"""What an infinite loss counts as in a mean."""
# 97.5% quantiles of Student's t by degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
      2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860)  # fmt: skip


def mean(values: Sequence[float]) -> float:
    """Infinite where one is not finite."""
    finite = values and all(map(math.isfinite, values))
    return math.fsum(values) / len(values) if finite else math.inf


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95% interval over repetitions; infinite where there are fewer than two."""
    center, degrees = mean(values), len(values) - 1
    if degrees < 1 or not math.isfinite(center):
        return center, math.inf
    deviation = math.sqrt(math.fsum((value - center) ** 2 for value in values) / degrees)
    return center, _T[min(degrees, len(_T)) - 1] * deviation / math.sqrt(len(values))


def best_condition(losses: Mapping[Condition, Sequence[float]]) -> Condition:
    """The condition with the lowest mean over seeds."""
    return min(losses, key=lambda condition: mean(losses[condition]))


def excess(losses: Sequence[float], best: Sequence[float]) -> list[float]:
    """By which share each seed's loss is above the best condition's of the same seed."""
    return [mine / other - 1 if math.isfinite(mine) else math.inf for mine, other in zip(losses, best, strict=True)]


def geometric_mean(shares: Sequence[float]) -> float:
    """Of ratios, as shares above 1: -1 < share. Infinite where one is not finite."""
    center = mean([math.log1p(share) for share in shares])
    return math.expm1(center) if math.isfinite(center) else math.inf


def bootstrap(
    statistics: Sequence[Callable[[Indices], Floats]], num_seeds: Sequence[int], combine: Callable[[Floats], Floats]
) -> tuple[float, float]:
    """95% interval of a statistic over tasks: tasks are drawn with replacement, and seeds anew for each task drawn.

    Args:
        statistics: of each task, a function of seeds, shape (..., seeds), to one number for each draw, shape (...).
        num_seeds: of each task.
        combine: numbers of the tasks, shape (draws, tasks), to one for each draw.
    """
    num = len(statistics)
    tasks = _draws(NUM_DRAWS * num, num, 0).reshape(NUM_DRAWS, num)
    columns = [
        statistic(_draws(NUM_DRAWS * num * seeds, seeds, 1 + place).reshape(NUM_DRAWS, num, seeds))
        for place, (statistic, seeds) in enumerate(zip(statistics, num_seeds, strict=True))
    ]
    found = combine(np.take_along_axis(np.stack(columns), tasks[None], axis=0)[0])
    return float(np.quantile(found, 0.025, method="lower")), float(np.quantile(found, 0.975, method="higher"))


@functools.lru_cache(maxsize=256)
def _draws(size: int, num: int, stream: int) -> Indices:
    """Indices below ``num``. Raw words, because NumPy guarantees those across versions."""
    return (np.random.PCG64(stream).random_raw(size) % num).astype(np.int64)


def geometric_interval(tasks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% bootstrap interval of the geometric mean over tasks; ``tasks`` has the shares of each, by seed."""
    if not all(math.isfinite(share) for shares in tasks for share in shares):
        return math.inf, math.inf

    def of(shares: Sequence[float]) -> Callable[[Indices], Floats]:
        logs = np.log1p(np.array(shares))
        return lambda seeds: np.asarray(logs[seeds].mean(axis=-1))

    low, high = bootstrap([of(shares) for shares in tasks], [len(s) for s in tasks], lambda found: found.mean(axis=1))
    return math.expm1(low), math.expm1(high)


def lower_median(values: Any) -> Any:
    """Along the last axis; of an even number the lower of the two in the middle, so that infinite ones may be among."""
    ranked = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    return ranked[..., (ranked.shape[-1] - 1) // 2]


def runs_interval(tasks: Sequence[tuple[Sequence[Sequence[float]], Sequence[float]]]) -> tuple[float, float]:
    """95% bootstrap interval of the median over tasks of :func:`equivalent_runs`, whose arguments ``tasks`` has."""

    def of(grids: Sequence[Sequence[float]], losses: Sequence[float]) -> Callable[[Indices], Floats]:
        sizes = range(1, max(map(len, grids)) + 1)
        # A run that broke is worse than any other, and weighs nothing in a draw without it.
        expected = np.minimum([[expected_best(grid, size) for size in sizes] for grid in grids], LARGEST)
        reached = np.minimum(losses, LARGEST)

        def statistic(seeds: Indices) -> Floats:
            weights = (seeds[..., None] == np.arange(len(reached))).mean(axis=-2)  # of each seed in the draw
            found = weights @ expected <= (weights @ reached)[..., None]
            return np.where(found.any(axis=-1), found.argmax(axis=-1) + 1.0, math.inf)

        return statistic

    return bootstrap([of(*task) for task in tasks], [len(losses) for _, losses in tasks], lower_median)


def expected_best(losses: Sequence[float], num: int) -> float:
    """Exact expectation of the lowest of ``num`` different runs drawn at random.

    A broken run counts as the worst that is not broken: a search would have seen it, and not chosen it.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    ranked = sorted(loss if math.isfinite(loss) else max(finite, default=math.inf) for loss in losses)
    num = min(num, len(ranked))
    ways = math.comb(len(ranked), num)
    return math.fsum(loss * math.comb(len(ranked) - 1 - place, num - 1) / ways for place, loss in enumerate(ranked))


def equivalent_runs(grids: Sequence[Sequence[float]], losses: Sequence[float]) -> int | None:
    """The fewest runs of a random search whose expected best is at or below ``losses``, on the mean over seeds.

    None where the best of all runs is above. ``grids`` has the losses that each seed's search draws from.
    """
    for num in range(1, max(map(len, grids)) + 1):
        if mean([expected_best(grid, num) for grid in grids]) <= mean(losses):
            return num
    return None


def steps_to_target(curve: Sequence[tuple[int, float]], target: float) -> float:
    """The first step of the curve at or below the target; infinite where there is none."""
    return next((float(step) for step, loss in curve if loss <= target), math.inf)


def profile(times: Mapping[str, Sequence[float]], factors: Sequence[float]) -> dict[str, list[float]]:
    """Performance profiles (Dolan and More 2002).

    The share of tasks on which a method's time is within each factor of the fastest method's. A task that no method
    finishes counts against all.
    """
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    return {
        method: [
            sum(math.isfinite(t) and t <= factor * best for t, best in zip(row, fastest, strict=True)) / len(fastest)
            for factor in factors
        ]
        for method, row in times.items()
    }


def choose_default(tasks: Sequence[Mapping[Condition, float]]) -> Condition:
    """Of the conditions that all tasks have: the lowest mean share above each task's best."""
    common = [condition for condition in tasks[0] if all(condition in losses for losses in tasks)]

    def score(condition: Condition) -> float:
        return mean([losses[condition] / min(losses.values()) - 1 for losses in tasks])

    return min(common, key=score)
