"""What a run's length and its schedule's shape decide."""

from __future__ import annotations

import pytest

from hdet.policy.timing import default_interval, hold_start, keep_start


def test_a_round_is_a_hundredth_of_the_run_within_bounds() -> None:
    lengths = (None, 1, 400, 500, 4999, 5000, 10**6)
    assert [default_interval(length) for length in lengths] == [20, 4, 4, 5, 49, 50, 50]


def test_the_scale_is_kept_from_a_fifth_of_the_run_on() -> None:
    assert (keep_start(None), keep_start(1000)) == (200, 200)
    assert keep_start(100) == 20


@pytest.mark.parametrize(
    ("shape", "start"),
    [
        ((), 80),
        ((1.0,), 80),
        ((1.0,) * 11, 80),  # no decay
        ((1.0,) * 8 + (0.6, 0.3, 0.0), 70),
        ((0.5,) + (1.0,) * 6 + (0.6, 0.4, 0.2, 0.0), 60),
        (tuple(1 - k / 10 for k in range(11)), 80),  # falls all the time
        ((1.0,) * 5 + tuple(1 - k / 6 for k in range(1, 7)), 80),  # for more than 45% of it
        ((1.0,) * 10 + (1.0 - 1e-10,), 80),  # rounding is no decay
        ((1.0, 0.2, 1.0, 0.5, 0.0), 80),  # from half on, which is too early
    ],
)
def test_the_scale_holds_still_from_a_late_final_decay_on(shape: tuple[float, ...], start: float) -> None:
    assert hold_start(100, shape) == pytest.approx(start)
