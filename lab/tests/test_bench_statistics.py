"""The benchmark's statistics against brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hdet_lab.bench import statistics as st

LOSSES = [2.0, 1.5, 3.0, 1.25, 2.5, 1.75]


@pytest.mark.parametrize("num", [1, 2, 4, 6, 9])
def test_expected_best_is_the_mean_over_all_choices(num: int) -> None:
    choices = list(itertools.combinations(LOSSES, min(num, len(LOSSES))))
    assert st.expected_best(LOSSES, num) == pytest.approx(sum(map(min, choices)) / len(choices))


def test_a_broken_run_of_a_search_counts_as_the_worst_that_is_not() -> None:
    assert st.expected_best([1.0, 3.0, math.inf, math.nan], 1) == pytest.approx((1 + 3 + 3 + 3) / 4)
    assert st.expected_best([math.inf], 1) == math.inf


def test_equivalent_runs_is_the_first_that_reaches_it() -> None:
    grids = [LOSSES, [2 * loss for loss in LOSSES]]
    for target in (2.01, 2.41, 3.11, 2.91):
        reached = [
            num
            for num in range(1, 7)
            if sum(
                sum(map(min, itertools.combinations(grid, num))) / math.comb(6, num) for grid in grids
            ) / 2 <= target
        ]  # fmt: skip
        assert st.equivalent_runs(grids, [target, target]) == (reached[0] if reached else None)
    assert st.equivalent_runs(grids, [1.0, 1.0]) is None


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 20])
def test_the_t_interval_covers_95_percent(degrees: int) -> None:
    """Student's density, integrated up to the half-width of a sample with a known deviation."""
    values = [float(value) for value in range(degrees + 1)]
    center, half_width = st.t_interval(values)
    num = degrees + 1
    deviation = math.sqrt(sum((value - center) ** 2 for value in values) / degrees)
    quantile = half_width / (deviation / math.sqrt(num))
    front = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    width = quantile / 20_000
    area = sum(front * (1 + ((k + 0.5) * width) ** 2 / degrees) ** (-(degrees + 1) / 2) * width for k in range(20_000))
    assert center == pytest.approx(sum(values) / num)
    assert 2 * area == pytest.approx(0.95, abs=1e-4)


def test_one_repetition_has_no_interval() -> None:
    assert st.t_interval([1.0]) == (1.0, math.inf)
    assert st.t_interval([1.0, math.inf]) == (math.inf, math.inf)


def test_best_condition_is_chosen_by_the_mean_over_seeds() -> None:
    losses = {"lucky once": [1.0, 4.0], "even": [2.0, 2.5], "breaks": [0.1, math.inf]}
    assert st.best_condition(losses) == "even"


def test_excess_is_by_seed() -> None:
    assert st.excess([2.2, 3.0, math.nan], [2.0, 4.0, 1.0]) == [pytest.approx(0.1), pytest.approx(-0.25), math.inf]


def test_steps_to_target() -> None:
    curve = [(10, 3.0), (20, 2.0), (30, 2.5)]
    assert st.steps_to_target(curve, 2.0) == 20
    assert st.steps_to_target(curve, 1.9) == math.inf


def test_profile_against_a_count() -> None:
    draw = random.Random(0)
    times = {name: [draw.choice([10.0, 20.0, 30.0, math.inf]) for _ in range(12)] for name in "abc"}
    times = {name: [*row, math.inf] for name, row in times.items()}  # nobody finishes the last
    found = st.profile(times, [1.0, 2.0])
    for name in "abc":
        for place, factor in enumerate([1.0, 2.0]):
            count = 0
            for task in range(13):
                best = min(times[other][task] for other in "abc")
                if times[name][task] < math.inf and times[name][task] / best <= factor:
                    count += 1
            assert found[name][place] == pytest.approx(count / 13)


def test_the_default_is_the_best_on_the_mean_over_tasks() -> None:
    tasks = [{"low": 1.0, "middle": 1.1, "high": 2.0}, {"low": 5.0, "middle": 2.2, "high": 2.0, "only here": 1.9}]
    shares = {name: sum(task[name] / min(task.values()) - 1 for task in tasks) for name in ("low", "middle", "high")}
    assert st.choose_default(tasks) == min(shares, key=lambda name: shares[name]) == "middle"


def test_the_geometric_mean_is_of_ratios() -> None:
    assert st.geometric_mean([1.0, -0.5]) == pytest.approx(0.0)
    assert st.geometric_mean([0.1, math.inf]) == math.inf


def test_the_bootstrap_draws_tasks_and_seeds() -> None:
    """Against quantiles of many draws by other means."""
    tasks = [[0.0, 0.1, 0.3], [0.5, 0.4, 0.2], [-0.1, 0.0, 0.05], [1.0, 0.8, 0.9]]
    draw = random.Random(0)
    means = []
    for _ in range(20_000):
        chosen = [draw.choices(task, k=len(task)) for task in draw.choices(tasks, k=len(tasks))]
        means.append(sum(math.log1p(x) for task in chosen for x in task) / 12)
    means.sort()
    low, high = st.geometric_interval(tasks)
    assert math.log1p(low) == pytest.approx(means[500], abs=0.02)
    assert math.log1p(high) == pytest.approx(means[19_500], abs=0.02)
    assert st.geometric_interval(tasks) == (low, high)
    assert st.geometric_interval([[0.1, math.inf]]) == (math.inf, math.inf)


def test_one_task_with_one_seed_has_no_width() -> None:
    assert st.geometric_interval([[0.25]]) == pytest.approx((0.25, 0.25))
    for loss in (1.3, 1.5, 2.1):
        assert st.runs_interval([([LOSSES], [loss])]) == (st.equivalent_runs([LOSSES], [loss]),) * 2


def test_the_interval_of_runs_is_of_the_median_over_tasks() -> None:
    tasks = [([LOSSES, LOSSES], [1.25, 3.0]), ([LOSSES], [2.0]), ([LOSSES], [0.5])]
    low, high = st.runs_interval(tasks)
    assert (low, high) == (1.0, math.inf)
    assert st.lower_median([math.inf, 3.0, 1.0, math.inf]) == 3.0
