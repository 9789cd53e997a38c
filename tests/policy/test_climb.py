"""The climb as numbers: against an oracle, on a noisy quadratic from any start, and where there is nothing to climb."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle_climb
from hdet.policy.climb import FIRST_SCALE, MAX_STARTS, Climb


def drive(
    climb: Climb, lr: float, *, seed: int = 0, noise: float = 0.1, steps: int = 400, tail: float = 0.0
) -> list[tuple[float, float, float]]:
    """Gradient descent on an ill-conditioned quadratic with noise, which learning rates above 2 break.

    ``tail``: share of batches with ten times the loss.
    """
    random = np.random.default_rng(seed)
    curvatures = np.logspace(0, -2, 20)
    first = w = np.full(20, 3.0)
    seen = []
    for step in range(1, steps + 1):
        gradient = curvatures * w + noise * random.normal(size=20)
        loss = float((curvatures * w**2).sum() / 2 + noise * random.normal())
        if tail and random.random() < tail:
            gradient, loss = 10 * gradient, 10 * loss
        slope = float(gradient @ (w - first))
        rate = lr * climb.scale
        then = climb.update(step, loss, slope, rate, fine=bool(np.isfinite(w).all()))
        seen.append((loss, slope, rate))
        w = first if then != "go on" else w - rate * gradient
        if then == "over":
            break
    return seen


@pytest.mark.parametrize("lr", [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0, 1e4])
def test_from_any_start_it_ends_where_steps_help_most(lr: float) -> None:
    for seed in range(5):
        climb = Climb(1000)
        steps = drive(climb, lr, seed=seed)
        assert climb.ending in ("turned", "broken")
        assert climb.ended == len(steps) <= climb.max_steps == 100
        assert 0.02 < lr * climb.scale < 2.0  # at 2 it diverges


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_first_losses_that_happen_to_be_close_to_each_other_end_nothing(noise: float) -> None:
    """Two or three losses say little about their noise; what is far from them has not been moved by training."""
    for seed in range(120):
        climb = Climb(1000)
        drive(climb, 1e-8, seed=seed, noise=noise)
        assert 1e-8 * climb.scale > 0.02, seed


@pytest.mark.parametrize("lr", [1e-8, 1e-4])
def test_batches_with_ten_times_the_loss_end_nothing(lr: float) -> None:
    """What the slopes do not explain, training has not done."""
    for seed in range(60):
        climb = Climb(1000)
        drive(climb, lr, seed=seed, tail=0.1)
        assert 1e-3 < lr * climb.scale < 20.0, seed


def fed(climb: Climb, losses: list[float], slope: float, *, first: int = 1) -> str:
    """What the last of these losses leads to, with this slope in every step in which weights have moved."""
    then = ""
    for step, loss in enumerate(losses, first):
        then = climb.update(step, loss, slope if climb.path else 0.0, climb.scale)
    return then


def test_losses_off_the_first_ones_are_noise_where_weights_cannot_have_moved_them() -> None:
    climb = Climb(1000)
    fed(climb, [2.0, 2.001, 2.002], 0.0)
    assert (climb.is_far, climb.num_raised) == (True, 1)
    fed(climb, [5.0, 2.01, 4.0], -1e-12, first=4)
    assert (climb.is_far, climb.num_raised) == (False, 1)
    assert fed(climb, [2.5], -1e-12, first=7) == "go on"
    assert (climb.is_far, climb.num_raised) == (True, 2)
    assert climb.start_and_noise()[1] > 1  # what it takes the noise for now


def test_a_loss_that_explodes_ends_it_although_gradients_are_clipped() -> None:
    """Slopes are as small then as those of weights that have not moved, but they have turned."""
    climb = Climb(1000)
    fed(climb, [2.0, 2.1, 1.9, 2.0, 2.05, 1.95], -1e-6)
    assert climb.num_raised == 4
    assert fed(climb, [20.0, 80.0, 200.0, 900.0], 1e-6, first=7) == "over"
    assert climb.ending == "broken"


def test_what_had_to_begin_again_is_not_flat() -> None:
    """The first learning rate has broken it, and there is no time left: what was given is too high, too."""
    climb = Climb(100)
    losses = [1.0, 1.1, 0.9, *[5.0] * 17]
    fed(climb, losses, 1.0)
    assert climb.num_starts > 0
    step = len(losses)
    while not climb.is_over:
        step += 1
        climb.update(step, 1.0 + 0.1 * (step % 2), 0.0, climb.scale)
    assert climb.ending == "limit"
    assert climb.scale < FIRST_SCALE


@pytest.mark.parametrize("lr", [1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("tail", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_it_decides_as_the_oracle_does(lr: float, tail: float, seed: int) -> None:
    climb = Climb(400)
    steps = drive(climb, lr, seed=seed, noise=1.0, tail=tail)
    rates, endings, scale = oracle_climb.climb([(loss, slope) for loss, slope, _ in steps], lr, 400)
    assert rates == pytest.approx([rate for _, _, rate in steps], rel=1e-12)
    assert endings[-1] == climb.ending
    assert len(endings) == climb.num_starts + 1
    assert scale == pytest.approx(climb.scale, rel=1e-12)


NUMBERS = st.floats(-3, 3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 2.0) | st.just(math.nan), NUMBERS), min_size=1, max_size=60), NUMBERS)
def test_it_decides_as_the_oracle_does_on_anything(steps: list[tuple[float, float]], power: float) -> None:
    lr, climb = 10.0**power, Climb(300)
    found: list[float] = []
    # In a first step the weights cannot have broken anything, and the two count that differently.
    steps = [step for i, step in enumerate(steps) if i > 2 or math.isfinite(step[0])]
    for step, (loss, slope) in enumerate(steps, 1):
        if not math.isfinite(loss) and climb.path == 0:
            return
        found.append(lr * climb.scale)
        if climb.update(step, loss, slope, found[-1], fine=math.isfinite(loss)) == "over":
            break
    rates, endings, scale = oracle_climb.climb(steps[: len(found)], lr, 300)
    assert rates == pytest.approx(found, rel=1e-9)
    assert endings[-1] == (climb.ending or "")
    if climb.ending != "flat":
        assert scale == pytest.approx(climb.scale, rel=1e-9)


@pytest.mark.parametrize("loss", [0.0, 2.5, -1.0])
def test_a_loss_that_does_not_respond_leaves_the_schedule_as_it_is(loss: float) -> None:
    climb = Climb(1000)
    then = [climb.update(step, loss, 0.0, climb.scale) for step in range(1, 201)]
    assert then == ["go on"] * 199 + ["over"]
    assert (climb.ending, climb.scale, climb.ended) == ("flat", 1.0, 200)


def test_without_gradients_nothing_is_climbed() -> None:
    climb = Climb(1000)
    for step in range(1, 101):
        climb.update(step, 1.0 + 0.01 * step, math.nan, climb.scale)
    assert (climb.ending, climb.scale) == ("flat", 1.0)


def test_without_losses_it_gives_up_soon() -> None:
    climb = Climb(1000)
    assert [climb.update(step, math.nan, -1.0, climb.scale) for step in (1, 2, 3)] == ["go on", "go on", "over"]
    assert (climb.ending, climb.scale) == ("blind", 0.03)


def test_steps_without_a_loss_count_where_they_follow_each_other() -> None:
    climb = Climb(1000)
    for step in range(1, 51):
        assert climb.update(step, math.nan if step % 3 else 1.0, -1e-9, climb.scale) == "go on"


def test_a_step_that_was_skipped_is_no_way() -> None:
    climb = Climb(1000)
    for step in range(1, 6):
        assert climb.update(step, 1.0, math.nan, climb.scale) == "go on"
    assert (climb.path, climb.scale) == (0.0, FIRST_SCALE)


def test_a_first_step_that_is_not_finite_is_not_held_against_the_learning_rate() -> None:
    climb = Climb(1000)
    for step in (1, 2, 3):
        assert climb.update(step, math.nan, math.nan, climb.scale, fine=False) == "begin again"
    assert (climb.scale, climb.num_starts) == (FIRST_SCALE, 0)
    for step in range(4, 101):
        then = climb.update(step, math.nan, math.nan, climb.scale, fine=False)
    assert (then, climb.ending) == ("over", "flat")  # the user's model gives nothing else


def test_what_breaks_at_once_begins_again_far_below() -> None:
    climb = Climb(1000)
    for start in range(1, MAX_STARTS + 1):
        assert climb.update(2 * start - 1, 1.0, 0.0, climb.scale) == "go on"
        assert climb.update(2 * start, math.nan, 0.0, climb.scale, fine=False) == "begin again"
        assert climb.scale == pytest.approx(FIRST_SCALE / 100**start)
    climb.update(20, 1.0, 0.0, climb.scale)
    assert climb.update(21, math.nan, 0.0, climb.scale, fine=False) == "over"
    assert climb.ending == "broken"


def test_at_its_upper_bound_it_is_over() -> None:
    climb = Climb(1000)
    for step in range(1, 40):
        slope = -climb.path * (1 + 0.01 * (step % 3))
        then = climb.update(step, 1.0 + 0.01 * (step % 2), slope, climb.scale, top=climb.scale > 100)
        if then == "over":
            break
    assert (then, climb.ending, climb.scale) == ("over", "limit", climb.supported / 2.5)


def test_at_its_upper_bound_without_having_moved_anything_the_schedule_stays_as_it_is() -> None:
    """Unless the bound is a ceiling below the learning rate that was given: then it is the ceiling that ends it."""
    for bound, ending in ((100.0, "flat"), (0.1, "limit")):
        climb = Climb(1000)
        for step in range(1, 30):
            then = climb.update(step, 1.0 + 0.1 * (step % 2), 0.0, climb.scale, top=climb.scale >= bound)
            if then == "over":
                break
        assert (then, climb.ending) == ("over", ending)
        assert climb.scale == (1.0 if ending == "flat" else climb.supported / 2.5)


@pytest.mark.parametrize(("total", "most", "warm"), [(None, 200, 50), (100, 24, 6), (500, 50, 30), (10**6, 200, 500)])
def test_its_length_is_bounded(total: int | None, most: int, warm: int) -> None:
    climb = Climb(total)
    assert (climb.max_steps, climb.warm_steps) == (most, warm)


def test_it_continues_from_any_of_its_states() -> None:
    whole = Climb(1000)
    steps = drive(whole, 1e-5)
    for cut in range(len(steps)):
        climb = Climb(1000)
        for step, (loss, slope, rate) in enumerate(steps[:cut], 1):
            climb.update(step, loss, slope, rate)
        state = json.loads(json.dumps(climb.state_dict()))  # plain types
        again = Climb()
        found = Climb.check_state(state)
        assert found is not None
        again.load_state_dict(found)
        for step, (loss, slope, rate) in enumerate(steps[cut:], cut + 1):
            assert rate == pytest.approx(1e-5 * again.scale)
            again.update(step, loss, slope, rate)
        assert vars(again) == vars(whole)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": 0.0}, "scale of the climb must be a finite number > 0, but got 0.0"),
        ({"path": -1.0}, "path of the climb must be a finite number >= 0, but got -1.0"),
        ({"lowest": "low"}, "lowest of the climb must be a number, but got 'low'"),
        ({"num_starts": 1.5}, "num_starts must be an integer >= 0, but got 1.5"),
        ({"is_far": 1}, "is_far must be True or False, but got 1"),
        ({"still": [math.nan]}, "still must be"),
        ({"ending": "bored", "ended": 3}, "ending of the climb must be one of"),
        ({"ending": "turned"}, "ending of the climb must be one of"),
    ],
)
def test_a_state_that_it_cannot_have_made_is_refused(change: dict[str, Any], text: str) -> None:
    state = copy.deepcopy(Climb(100).state_dict()) | change
    with pytest.raises(ValueError, match=text):
        Climb.check_state(state)
