"""The first learning rate from the size of the updates (Eq. 16), against a slow version of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hdet.policy.level import (
    MAX_PROBE,
    MAX_TRIES,
    MAX_WARM,
    MEASURABLE,
    NUM_FIRST,
    PROBE_LR,
    PROBE_SIZE,
    SETTLED,
    SHARE,
    TRUST,
    UNKNOWN_WARM,
    Level,
    Sizes,
    beside_weights,
)  # fmt: skip

Unit = Callable[[int], float]
"""The size of the update of a step, per unit of learning rate."""
KINDS: dict[str, Unit] = {
    "Adam": lambda step: 30.0,
    "SGD with momentum": lambda step: 5 * (1 - 0.9**step) / 0.1,
    "noise that averages out": lambda step: 30 / math.sqrt(step),
    "uneven": lambda step: 2.0 + step % 3,
}
ANY = st.floats() | st.sampled_from([0.0, 1e-320, 5e-324, 1e-30, 1.0, 1e30, 1.7e308, math.inf, math.nan])


def trained(
    level: Level, unit: Unit, num_steps: int, *, weights: float = 10.0, gradient: float = 0.07, first: int = 1,
    num: float = 2e5, schedule: Callable[[int], float] = lambda step: 1.0,
) -> Iterator[tuple[float, str]]:  # fmt: skip
    """Steps as a scheduler takes them; the learning rate of each, and what was said after it."""
    for step in range(first, num_steps + 1):
        scheduled = level.peak * schedule(step - 1)
        rate = scheduled * level.scale * level.share(step - 1)
        sizes = Sizes(weights, rate * unit(step), gradient, num)
        yield rate, level.update(step, sizes, rate, scheduled)


def allowed(weights: float, num: float = 2e5) -> float:
    """What a step may do by the model's size and that of its weights, 1 at 3M entries of 0.06; a third to 6."""
    size = max(weights / math.sqrt(num), 1e-3)
    exponent = 0.4 if num <= 3e6 else 0.8
    return min(max(math.pow(0.06 / size, 0.75) * math.pow(3e6 / num, exponent), 1 / 3), 6.0)


ADAM = SHARE * allowed(10.0) * 10 / 90 / 2.5
"""The level of updates that all have a size of 30, with weights of 10."""


def slow_level(rows: Sequence[tuple[float, float, float]], total: int | None) -> float:
    """Eq. 16, from (weights, update, rate) of all steps: 0.02 |w| / (largest u + 2 u of the last one).

    In runs of fewer than 200 steps more, as their square root goes, and twice that at most. Times what the model
    allows, and 2.5 times less where all updates have about one size.
    """
    short = 1.0 if total is None or total >= 200 else min(math.sqrt(200 / total), 2.0)
    measured = [(w, du / rate) for w, du, rate in rows if du > MEASURABLE * w]
    sizes = [u for _, u in measured]
    steady = min(max((min(sizes) / max(sizes) - 0.75) / 0.15, 0.0), 1.0)
    weights = measured[-1][0]
    return short * SHARE * allowed(weights) * weights / (max(sizes) + SETTLED * sizes[-1]) * math.pow(0.4, steady)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "warm"), [(100, 6), (1000, 60), (20_000, MAX_WARM), (3, 1), (None, UNKNOWN_WARM)])
def test_the_level_is_that_of_all_updates_until_the_warm_up_is_over(kind: str, total: int | None, warm: int) -> None:
    level, rows, unit = Level(total), [], KINDS[kind]
    assert level.warm_steps == warm
    last = max(warm, NUM_FIRST)
    for step, (rate, said) in enumerate(trained(level, unit, last + 30, weights=3.0), start=1):
        assert level.done == (step >= last)
        assert bool(said) == (step == last)
        if step <= last:
            rows.append((3.0, rate * unit(step), rate))
        if level.found:
            assert level.scale == pytest.approx(slow_level(rows, total), rel=1e-12)
    assert level.lr == level.scale


@given(
    kind=st.sampled_from(sorted(KINDS)), size=st.floats(1e-6, 1e6), weights=st.floats(1.0, 1e6),
    peak=st.floats(1e-9, 1e3), gradient=st.floats(1e-9, 1e9),
)  # fmt: skip
def test_the_peak_does_not_enter(kind: str, size: float, weights: float, peak: float, gradient: float) -> None:
    def run(peak: float) -> list[float]:
        level = Level(200, peak=peak)
        rates = [
            rate
            for rate, _ in trained(level, lambda step: size * KINDS[kind](step), 40, weights=weights, gradient=gradient)
        ]
        assume(not level.gave_up)  # without an update there is nothing but the peak to go by
        return [*rates, level.scale * peak]

    assert run(peak) == pytest.approx(run(1.0), rel=1e-9)


@given(
    st.lists(st.tuples(ANY, ANY, ANY, st.floats(1, 1e12), ANY), max_size=60),
    st.booleans(),
    st.tuples(ANY, st.sampled_from([0.0, 1.0, 1e12])),
)
@example([(0.0, 0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0, 1.0)], False, (math.nan, 1.0))
@example([(0.0, 0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0, 1.0)], False, (math.inf, 1.0))
def test_no_size_does_harm(
    rows: list[tuple[float, float, float, float, float]], hint: bool, beside: tuple[float, float]
) -> None:
    level = Level(300, peak=0.1, hint=hint)
    others = math.sqrt(abs(beside[0])), beside[1]  # a norm is the root of a number
    for step, (weights, update, gradient, num, scheduled) in enumerate(rows, start=1):
        scheduled = scheduled if 0 <= scheduled <= 1e3 else 0.1
        rate = scheduled * level.scale * level.share(step - 1)
        said = level.update(step, Sizes(abs(weights), abs(update), abs(gradient), num, *others), rate, scheduled)
        assert isinstance(said, str)
        assert 0 < level.scale < math.inf
        assert 0 <= level.share(step) <= 1
        assert Level.from_state(level.state_dict()) is not None


@pytest.mark.parametrize(
    "sizes", [None, Sizes(0.0, 0.0, 0.0, 0.0), Sizes(1.0, 0.0, 0.0, 4.0), Sizes(1.0, math.nan, math.inf, 4.0)]
)
@pytest.mark.parametrize("hint", [False, True])
def test_without_an_update_to_measure_it_gives_up(sizes: Sizes | None, hint: bool) -> None:
    level = Level(1000, peak=0.5, given=0.25, hint=hint)
    for step in range(1, MAX_TRIES + 1):
        assert level.is_searching(step - 1)
        assert level.scale * level.peak == pytest.approx(PROBE_LR)  # nothing says that it could be higher
        said = level.update(step, sizes, 0.5 * level.scale, 0.5)
        assert level.gave_up == (step == MAX_TRIES)
    assert said == (
        "no update of the weights could be measured in 20 steps: training goes on at the learning rate that was "
        "given, 0.125"
    )
    assert not level.is_searching(MAX_TRIES)
    for step in range(MAX_TRIES + 1, 80):
        assert (level.share(step - 1), level.scale) == (1.0, 0.25)
        assert level.update(step, Sizes(1.0, 1e-2, 1.0, 4.0), 0.125, 0.5) == ""  # too late
    assert level.done


def test_a_schedule_is_followed_as_it_is_where_nothing_can_be_measured() -> None:
    level = Level(1000, peak=0.5, hint=True)
    for step in range(1, MAX_TRIES + 1):
        level.update(step, None, 0.5 * level.scale, 0.5)
    assert (level.scale, level.share(MAX_TRIES), level.follows_hint) == (1.0, 1.0, True)


def test_a_step_that_shows_nothing_in_between_is_left_out() -> None:
    level = Level(1000)
    runs = trained(level, KINDS["Adam"], 60)
    for _ in range(10):
        next(runs)
    before = level.lr
    for sizes, rate in ((None, 1e-3), (Sizes(10.0, math.nan, 7.0, 100.0), 1e-3), (Sizes(10.0, 1e-2, 7.0, 100.0), 0.0)):
        assert not level.update(11, sizes, rate, 1.0)
        assert level.lr == before


@given(unit=st.floats(1e-3, 1e3), gradient=st.floats(1e-3, 1e3))
def test_the_search_takes_few_steps_that_move_little(unit: float, gradient: float) -> None:
    """Whether updates are like a sign, like the gradient, or a thousand times smaller."""
    level = Level(1000)
    moved = []
    for rate, _ in trained(level, lambda _: unit, 10, weights=10.0, gradient=gradient):
        moved.append(rate * unit / 10)
        if level.found:
            break
    assert len(moved) <= 6
    assert moved[0] <= 1e-9
    if unit <= max(gradient, 10.0):
        assert moved[-1] <= 100 * PROBE_SIZE


@pytest.mark.parametrize("weights", [0.5, 10.0, 300.0])
def test_before_an_update_was_seen_rates_follow_two_guesses_and_stay_near_them(weights: float) -> None:
    """The second step would move weights by 1e-4 if it were like a sign, the third if it were like the gradient."""
    rates = [rate for rate, _ in trained(Level(1000), lambda _: 0.0, MAX_TRIES, weights=weights, gradient=0.5)]
    sign, gradient = PROBE_SIZE * weights / math.sqrt(2e5), PROBE_SIZE * weights / 0.5
    assert rates[:4] == pytest.approx([PROBE_LR, sign, gradient, 100 * gradient])
    assert rates[4:] == pytest.approx([MAX_PROBE * gradient] * (MAX_TRIES - 4))


@pytest.mark.parametrize(
    ("num", "size", "share"),
    [
        (3e6, 0.06, 1.0),
        (3e6, 0.06 * 2**-0.4, 2**0.3),
        (3e6, 0.06 * 2**0.4, 2**-0.3),
        (3e6 / 32, 0.06, 4.0),
        (3e6 * 2, 0.06, 2**-0.8),
        (3e6 / 32, 0.06 * 16, 0.5),
        (200, 0.06, 6.0),
        (3e6, 1.0, 1 / 3),
        (10**12, 0.06, 1 / 3),
    ],
)
def test_steps_begin_larger_in_small_models_and_with_small_weights(num: float, size: float, share: float) -> None:
    """As number of entries and size of the weights go, and between a third and six times.

    A schedule is followed that is near this, or near what a model of the usual size would begin with.
    """
    levels, weights = [Level(1000), Level(1000, peak=1.0, hint=True)], size * math.sqrt(num)
    for level in levels:
        for step in range(1, 100):
            rate = level.scale * level.share(step - 1)
            level.update(step, Sizes(weights, weights * rate * (0.5 if step == 9 else 1.0), 1e-9, num), rate, 1.0)
        assert level.lr == pytest.approx(share * SHARE / 3)
        assert [level.allowance, allowed(weights, num)] == pytest.approx([share, share])
    low, high = sorted([levels[1].lr, levels[1].lr / share])
    for peak, follows in ((7.9 * high, True), (8.1 * high, False), (low / 7.9, True), (low / 8.1, False)):
        levels[1].peak = peak
        assert levels[1].follows_hint is follows


@pytest.mark.parametrize(("smallest", "less"), [(0.5, 1.0), (0.74, 1.0), (0.825, 2.5**0.5), (0.91, 2.5), (1.0, 2.5)])
def test_updates_that_never_shrink_begin_smaller(smallest: float, less: float) -> None:
    level = Level(1000)
    for _ in trained(level, lambda step: 30 * (smallest if step == 7 else 1.0), 100):
        pass
    assert level.lr == pytest.approx(2.5 * ADAM / less)


@pytest.mark.parametrize(("smallest", "less"), [(0.5, 1.0), (0.94, 1.0), (0.97, 2.5**0.5), (0.995, 2.5), (1.0, 2.5)])
def test_signs_that_nearly_agree_are_not_taken_for_updates_of_one_size(smallest: float, less: float) -> None:
    """Adam's first update is a sign, and stays near one while gradients agree."""
    level, root = Level(1000), math.sqrt(2e5)
    for _ in trained(level, lambda step: root * (smallest if step == 7 else 1.0), 100):
        pass
    assert level.lr == pytest.approx(SHARE * allowed(10.0) * 10 / root / 3 / less)


@pytest.mark.parametrize(("num", "size", "beside"), [
    (3e6, 0.06, 1.0), (3e4, 0.06, 100**0.55), (3e8, 0.06, 1.0), (3e6, 0.6, 10**0.13),
    (3e4, 0.006, 100**0.55 / 10**0.13),
])  # fmt: skip
@pytest.mark.parametrize(("unit", "less"), [
    (lambda step: 1.0 if step < 9 else 0.5, 1.0),  # signs, then noise that averages out
    (lambda step: 1.0 if step < 9 else 3.0, 1.0),  # gradients have grown
    (lambda step: 1.0, 13.0),  # all of one size, as Lion's
    (lambda step: 0.03, 0.03 * 8.0),  # as Muon's
    (lambda step: 0.2 if step < 9 else 0.1, 0.2),
])  # fmt: skip
def test_progress_leads_to_what_is_usual_for_models_of_this_size(
    num: float, size: float, beside: float, unit: Unit, less: float
) -> None:
    """1.6 times 0.0012, which is a first update of 2% of weights of 0.06, of 3M of them; more where they are fewer."""
    level, root = Level(1000), math.sqrt(num)
    assert level.usual == 1e30
    for _ in trained(level, lambda step: root * unit(step), 100, weights=size * root, gradient=1e-9, num=num):
        pass
    assert level.usual == pytest.approx(1.6 * 0.0012 * beside / less)


@pytest.mark.parametrize(("weights", "spectral", "allowance"), [
    (0.02, True, 1.0), (0.12, True, 2**-0.75), (0.02, False, 1 / 3),
])  # fmt: skip
def test_the_size_of_the_model_does_not_take_muons_level_down(weights: float, spectral: bool, allowance: float) -> None:
    level, root = Level(1000, spectral=spectral), math.sqrt(3e8)
    for _ in trained(level, lambda step: 0.03 * root, 100, weights=weights * root, gradient=1e-9, num=3e8):
        pass
    assert level.allowance == pytest.approx(allowance)


@pytest.mark.parametrize(("own", "others", "allowance"), [
    ((3e4, 0.06), (2.97e6, 0.06), 1.0),  # as of 3M parameters
    ((1e5, 0.5), (2.9e6, 0.02), (math.sqrt((1 * 0.25 + 29 * 0.0004) / 30) / 0.06) ** -0.75),  # gains of 1 among them
    ((1e5, 0.06), (2e5, 0.06), 10**0.4),
    ((1e5, 0.06), (3e8, 0.06), 1.0),  # the size takes nothing off, as with Muon
    ((1e5, 0.12), (3e8, 0.12), 2**-0.75),
])  # fmt: skip
def test_beside_muon_the_level_is_that_of_the_whole_model(
    own: tuple[float, float], others: tuple[float, float], allowance: float
) -> None:
    (num, size), (num_others, size_others) = own, others
    whole = num + num_others
    size_of_all = math.sqrt((num * size**2 + num_others * size_others**2) / whole)
    level = Level(1000)
    for step in range(1, 101):
        rate = level.scale * level.share(step - 1)
        unit = math.sqrt(num) * (1.0 if step < 9 else 0.5)  # signs, then noise that averages out
        found = (size * math.sqrt(num), rate * unit, 1e-9, num, size_others * math.sqrt(num_others), num_others)
        level.update(step, Sizes(*found), rate, 1.0)
    assert level.allowance == pytest.approx(allowance)
    assert level.lr == pytest.approx(SHARE * allowance * size_of_all / (1 + 2 * 0.5))
    beside = (size_of_all / 0.06) ** -0.87 * max((whole / 3e6) ** -0.55, 1.0)
    assert level.usual == pytest.approx(1.6 * 0.02 * beside * size_of_all)
    update = beside_weights(Sizes(*found), level)[0]
    assert update == pytest.approx(rate * 0.5 / size_of_all / max(Sizes(*found).allowance(6.0, 0.3), 1 / 3))


def test_nothing_is_usual_where_updates_follow_the_gradient() -> None:
    level = Level(1000)
    for _ in trained(level, KINDS["SGD with momentum"], 100, gradient=5.0):
        pass
    assert level.follows_gradient
    assert level.usual == 1e30


@pytest.mark.parametrize(
    ("unit", "num", "follows"),
    [(0.2, 2e3, False), (0.4, 2e3, True), (7.0, 2e3, True), (9.0, 2e3, False), (4.0, 4.0, True), (4.0, 2e1, False)],
)
def test_updates_that_follow_the_gradient_begin_smaller(unit: float, num: float, follows: bool) -> None:
    """The gradient has a size of 1; that of a sign is the square root of the number of entries."""
    level = Level(1000)
    for step, _ in enumerate(trained(level, lambda step: unit, 100, gradient=1.0, num=num, weights=1e-2), 1):
        sizes = Sizes(1e-2, 1.0, 1.0, num)
        assert step < 3 or (level.follows_gradient, level.most) == (follows, 2.0 if follows else 6.0)
        assert step < 3 or level.allowance == sizes.allowance(level.most) == level.most


@pytest.mark.parametrize(("parts", "allowance"), [({}, 1.0), ({"caution": 0.5, "room": 1.0}, 0.5)])
def test_a_state_of_an_earlier_version_has_no_allowance(parts: dict[str, float], allowance: float) -> None:
    state = {**Level(1000).state_dict(), **parts}
    later = ("allowance", "smallest", "watched", "follows_gradient", "started", "restarts", "apart_since")
    for name in (*later, "usual", "_usual_size", "_is_sign", "spectral", "_part"):
        del state[name]
    loaded = Level.from_state(state)
    assert loaded is not None
    assert (loaded.watched, loaded.allowance, loaded.smallest) == (False, allowance, 0.0)
    assert (loaded.restarts, loaded.started, loaded.apart_since, loaded.usual) == (False, 0, 0, 1e30)
    with pytest.raises(ValueError, match="allowance of the level must be a finite number > 0"):
        Level.from_state({**state, "caution": None})


def test_weights_that_start_from_zero_have_some_size() -> None:
    level = Level(1000)
    for step in range(1, 100):
        rate = level.scale * level.share(step - 1)
        level.update(step, Sizes(0.0 if step == 1 else 1e-9, 10 * rate, 0.03, 2e5), rate, 1.0)
    assert level.lr == pytest.approx(SHARE * allowed(0.0) * 1e-3 * math.sqrt(2e5) / 30 / 2.5)


# -- the warm-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 16, 100, 5000, None])
def test_the_warm_up_is_a_line_that_ends_at_one(total: int | None) -> None:
    level = Level(total)
    rates = [rate for rate, _ in trained(level, KINDS["Adam"], 700)]
    assert level.found
    warm = level.warm_steps
    after = range(NUM_FIRST, 700)
    assert [level.share(step) for step in after] == [min((step + 1) / warm, 1.0) for step in after]
    assert rates[NUM_FIRST:] == pytest.approx([level.lr * min((step + 1) / warm, 1.0) for step in after])
    assert rates[-1] == level.lr


def test_where_held_out_data_have_a_say_a_tiny_model_takes_two_more_warm_ups() -> None:
    level = Level(1000, watched=True)
    rates, said = zip(*trained(level, KINDS["Adam"], 300, num=12_500), strict=True)
    room = level.allowance
    assert (allowed(10.0, 12_500), room) == (6.0, 2.0)
    warm, after = level.warm_steps, range(NUM_FIRST, 300)
    shares = [min((step + 1) / warm, 1.0) * room ** -min(max((3 - (step + 1) / warm) / 2, 0.0), 1.0) for step in after]
    assert rates[NUM_FIRST:] == pytest.approx([level.lr * share for share in shares])
    assert (rates[warm - 1], rates[3 * warm - 1]) == (pytest.approx(level.lr / room), level.lr)
    told = [text for text in said if text]
    assert told == [
        f"the learning rate starts from {level.lr / room:.3g}, at which a step changes the weights by about 0.27%, and "
        f"reaches {level.lr:.3g} at step {3 * warm}"
    ]
    far = Level(1000, peak=100 * level.lr, hint=True, watched=True)
    assert next(text for _, text in trained(far, KINDS["Adam"], 70, num=12_500) if text).endswith(
        f"{far.lr:.3g}; the schedule is rescaled to it, which is reached at step {3 * warm}"
    )
    small = Level(1000, watched=True)
    rates, _ = zip(*trained(small, KINDS["Adam"], 70, weights=1e4, num=3e7), strict=True)
    assert rates[-1] == small.lr


def memorised(ratios: dict[int, float], *, num: float = 12_500, restarts: bool = True) -> tuple[Level, list[str]]:
    """A level of 1,000 steps, its warm-up over, after evaluations at these steps."""
    level = Level(1000)
    for _ in trained(level, KINDS["Adam"], 70, num=num):
        pass
    level.restarts = restarts
    said = []
    for step, ratio in ratios.items():
        level = Level.from_state(level.state_dict()) or level
        if level.restarts:
            said += [level.start_again(step, ratio)]
    return level, [text for text in said if text]


def test_a_small_model_whose_evaluations_part_starts_again_lower() -> None:
    """At the level of a model of 3M parameters, along a warm-up of its own. Once."""
    first = memorised({})[0]
    level, said = memorised({100: 1.2, 140: 1.3, 180: 1.5, 240: 9.0})
    assert first.allowance == 6
    assert (level.allowance, level.started, level.restarts) == (1.0, 180, False)
    assert [level.lr, level.scale] == pytest.approx([first.lr / 6, first.scale / 6])
    assert [level.share(step) for step in (180, 209, 239, 500)] == pytest.approx([1 / 60, 0.5, 1.0, 1.0])
    assert said == [
        f"validation is 1.5 times the training loss: training starts again from its first weights, at a learning rate "
        f"of {level.lr:.3g}"
    ]


@pytest.mark.parametrize(
    ("ratios", "num"),
    [
        ({100: 1.3, 135: 1.5}, 12_500),  # too short a time, of a warm-up of 60 steps
        ({100: 1.3, 120: 1.2, 140: 2.0, 160: 1.0, 200: 3.0}, 12_500),  # not in a row
        ({301: 2.0, 400: 2.0, 500: 2.0}, 12_500),  # too late
        ({100: 2.0, 200: 2.0}, 3e9),  # a large model
        ({100: -1.0, 200: -1.0}, 12_500),  # of another kind
    ],
)
def test_what_starts_nothing_again(ratios: dict[int, float], num: float) -> None:
    level, said = memorised(ratios, num=num)
    assert (level.started, said) == (0, [])
    assert level.lr == memorised({}, num=num)[0].lr


def test_the_first_steps_are_rounds_of_their_own() -> None:
    level = Level(1000)
    searching = [level.is_searching(0)]
    for step, _ in enumerate(trained(level, KINDS["Adam"], 6), start=1):
        searching.append(level.is_searching(step))
    assert searching == [True] * NUM_FIRST + [False] * 3


def test_a_schedule_that_warms_up_has_its_own_way() -> None:
    level = Level(200, peak=0.1, warms_up=True, hint=True)
    for _ in trained(level, lambda step: 1e4, 30, schedule=lambda step: min((step + 1) / 20, 1.0)):
        assert level.share(20) == 1.0
    assert level.scale == pytest.approx(ADAM * 30 / 1e4 / 0.1)


# -- a hint ---------------------------------------------------------------------------------------------------------


@given(log_off=st.floats(-6, 6))
@example(log_off=math.log10(7.9))
@example(log_off=math.log10(8.1))
@example(log_off=-math.log10(7.9 * 6))
@example(log_off=-math.log10(8.1 * 6))
def test_a_peak_is_followed_within_a_factor_of_eight(log_off: float) -> None:
    """Below the level, of that of a model of the usual size."""
    found, low = ADAM, 1 / allowed(10.0) / TRUST
    off = 10**log_off
    assume(abs(log_off) > 1e-9)
    level = Level(200, peak=found * off, hint=True)
    said = [text for _, text in trained(level, KINDS["Adam"], 50) if text]
    if low * (1 + 1e-9) <= off <= TRUST * (1 - 1e-9):
        assert (level.scale, level.follows_hint) == (1.0, True)
        bent = off > 1
        assert [text.startswith(f"the schedule is approached from {found:.3g} instead of") for text in said] == [
            True
        ] * bent
        # In the first and the last of 12 steps of warm-up, halfway from there to three warm-ups, and at their end.
        expected = [1 / off / 12, 1 / off, off**-0.5, 1.0] if bent else [1.0] * 4
        assert [level.share(step) for step in (0, 11, 23, 35)] == pytest.approx(expected)
    elif off < low * (1 - 1e-9) or off > TRUST * (1 + 1e-9):
        assert level.scale == pytest.approx(1 / off)
        assert said == [
            f"the schedule's peak of {level.peak:.3g} is {off:.2g} times the learning rate that the size of the "
            f"updates suggests, {found:.3g}; the schedule is rescaled to it"
        ]


def test_without_a_hint_the_start_is_told() -> None:
    said = [text for _, text in trained(Level(200), KINDS["Adam"], 50) if text]
    assert said == [f"the learning rate starts from {ADAM:.3g}, at which a step changes the weights by about 1.6%"]


# -- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hint", [False, True])
def test_it_continues_from_its_state_at_every_step(kind: str, hint: bool) -> None:
    level = Level(300, peak=1e-3, hint=hint)
    whole = list(trained(level, KINDS[kind], 30))
    at = Level(300, peak=1e-3, hint=hint)
    for step in range(1, 30):
        again = Level.from_state(json.loads(json.dumps(at.state_dict())))
        assert again is not None
        assert list(trained(again, KINDS[kind], 30, first=step)) == whole[step - 1 :]
        assert again.state_dict() == level.state_dict()
        next(trained(at, KINDS[kind], step, first=step))


def test_there_may_be_none() -> None:
    assert Level.from_state(None) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": 0.0}, "scale of the level must be a finite number > 0, but got 0.0"),
        ({"peak": math.nan}, "peak of the level must be a finite number > 0, but got nan"),
        ({"_weights": -1.0}, "_weights of the level must be a finite number >= 0, but got -1.0"),
        ({"lr": "1"}, "lr of the level must be a finite number >= 0, but got '1'"),
        ({"num_tries": 1.5}, "num_tries must be an integer >= 0, but got 1.5"),
        ({"done": 1}, "done must be True or False, but got 1"),
    ],
)
def test_a_broken_state_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Level.from_state({**Level().state_dict(), **change})
    with pytest.raises(KeyError, match="largest"):
        Level.from_state({name: value for name, value in Level().state_dict().items() if name != "largest"})
    with pytest.raises(ValueError, match="level must be a dict, but got"):
        Level.from_state([])
