"""The benchmark's statistics, each a pure function of numbers. A loss that is not finite counts as infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

Condition = TypeVar("Condition")
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
