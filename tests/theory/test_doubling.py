"""docs/theory.md, "The climb is a doubling search": its length grows with the logarithm of how wrong the start is."""

from __future__ import annotations

import math

from hdet.lab.stacked.run import Result, Run
from hdet.lab.stacked.sweep import sweep
from hdet.lab.tasks.quadratic import QuadraticTask

STARTS = (1e-8, 1e-6, 1e-4, 1e-2)


def _found() -> list[Result]:
    task = QuadraticTask(dimension=20, total_steps=400)
    runs = [Run(lr=lr, method="gradient", interval=4) for lr in STARTS]
    return sweep(task, runs, optimizer="sgd", schedule="none")


def test_six_decades_farther_off_cost_some_tens_of_steps_and_end_at_the_same_learning_rate() -> None:
    results = _found()
    steps = [result.climb_steps for result in results]
    assert all(0 < each <= 40 for each in steps), steps
    assert steps[0] > steps[-1]
    # At a doubling in four samples a decade would take 13; while nothing has moved it quadruples, a sample each.
    per_decade = (steps[0] - steps[-1]) / math.log10(STARTS[-1] / STARTS[0])
    assert per_decade <= 13, steps
    found = [result.base_lr[len(result.base_lr) // 2] for result in results]
    assert max(found) / min(found) < 10, found
