"""When validation losses count as having turned, and what they confirm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.policy.evaluations import DOWN, LOWEST, MAX_KEPT, ROOM, UP, Confirmed, Evaluations, have_turned


def slow_turned(losses: list[float], trained: list[float], *, in_decay: bool = False, mode_given: bool = False) -> bool:
    """The rule, read from its description."""
    num = len(losses)
    length = max(num // (8 if in_decay else 4), 2)
    if num < 2 * length + 1:
        return False
    means = [fmean(losses[i : i + length]) for i in range(num - length + 1)]
    best, last = min(means[: num - 2 * length + 1]), means[-1]
    at = means.index(best)
    memorises = not fmean(trained[-length:]) > fmean(trained[at : at + length])
    sure = 2 if last > 1.25 * fmean(trained[-length:]) else 3
    second = np.diff(losses[num // (2 if in_decay else 4) :], 2)
    noise = max(math.sqrt(np.mean(second**2) / 6), 0.005 * abs(best))
    lowest = min(losses[: num - length])
    has_risen = (mode_given or lowest < losses[0]) and min(losses[num - length :]) > lowest
    return memorises and has_risen and last - best > sure * noise * (2 / length) ** 0.5


def turned_at(losses: list[float]) -> int | None:
    run = Evaluations()
    told = [step for step, loss in enumerate(losses, 1) if run.add(step, loss)]
    assert told == ([] if run.turned_at is None else [run.turned_at])  # once
    return run.turned_at


@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), max_size=40), st.booleans(), st.booleans())
def test_it_is_the_slow_version(rows: list[tuple[float, float]], in_decay: bool, mode_given: bool) -> None:
    losses, trained = ([row[i] for row in rows] for i in (0, 1))
    kind = {"in_decay": in_decay, "mode_given": mode_given}
    assert have_turned(losses, trained, **kind) == slow_turned(losses, trained, **kind)


@pytest.mark.parametrize("in_decay", [False, True])
def test_it_is_the_slow_version_where_losses_fall_and_rise(in_decay: bool) -> None:
    rng = np.random.default_rng(0)
    found = []
    for num in rng.integers(5, 40, 400):
        losses = (1 + rng.uniform(0, 0.2) * np.linspace(-1, 1, num) ** 2 + 0.05 * rng.normal(size=num)).tolist()
        trained = np.linspace(1, rng.uniform(0.2, 1.1), num).tolist()
        found.append(have_turned(losses, trained, in_decay=in_decay))
        assert found[-1] == slow_turned(losses, trained, in_decay=in_decay)
    assert 0.15 < fmean(found) < 0.8


def test_losses_that_rise_with_the_training_loss_have_not_turned() -> None:
    losses, up, down = [1.0, 0.5, 0.5, 0.5, 0.9, 0.95], [1, 0.4, 0.4, 0.4, 0.8, 0.8], [1, 0.4, 0.4, 0.4, 0.3, 0.2]
    assert not have_turned(losses, up)
    assert have_turned(losses, down)
    assert not have_turned(losses, up, in_decay=True)
    assert have_turned(losses, [math.nan] * 6)  # nobody knows


def test_it_takes_more_where_validation_is_not_above_training() -> None:
    """A simulated pendulum, of new data in every step: what looks like a turn is noise."""
    losses = [1.35, 0.336, 0.213, 0.155, 0.118, 0.11, 0.117, 0.15]
    assert not have_turned(losses, [1.2 * loss for loss in (*losses[:6], 0.1, 0.1)])
    assert have_turned(losses, [0.5 * loss for loss in (*losses[:6], 0.1, 0.1)])
    assert have_turned([*losses[:6], 0.3, 0.3], [1.0] * 8)


def test_a_decay_has_begun_when_two_evaluations_are_in_it() -> None:
    """So that the quarter of them is not waited for. The training loss is that of the rounds before each."""
    losses = [*(2.0 / (step + 1) for step in range(16)), 0.2, 0.21, 0.22, 0.23]
    found = {}
    for decays in (math.inf, 16, 17, 18):
        run = Evaluations()
        run.confirmed.recent = [1.0]
        told = [step for step, loss in enumerate(losses, 1) if run.add(step, loss, decays=decays)]
        found[decays] = told
        assert run.trained == [1.0] * 20
    assert found == {math.inf: [], 16: [18], 17: [19], 18: [20]}


def test_losses_that_overfit_have_turned() -> None:
    """A table of 442 rows, every 25 steps."""
    losses = [0.584, 0.521, 0.537, 0.546, 0.543, 0.596, 0.561, 0.704, 0.643, 0.884]
    assert turned_at(losses) == 5
    assert turned_at([0.584, 0.521, 0.537, 0.53, 0.517, 0.525, 0.53, 0.51, 0.52]) is None


def test_noise_rarely_turns() -> None:
    """Of losses that stand still, where the decay may as well begin; and hardly ever where they fall."""
    rng = np.random.default_rng(0)
    steps = np.arange(1, 31)
    rates = [
        fmean(turned_at((trend + 0.03 * rng.normal(size=30)).tolist()) is not None for _ in range(200))
        for trend in (1 + 1 / steps, 1 + 1 / steps - 0.01 * steps)
    ]
    assert rates[0] < 0.25
    assert rates[1] < 0.02


def test_losses_that_never_fell_have_not_turned() -> None:
    """An accuracy, say: lower is not better. Unless it is said that it is."""
    losses = [0.1 + 0.04 * i for i in range(20)]
    assert turned_at(losses) is None
    run = Evaluations(mode_given=True)
    assert [step for step, loss in enumerate(losses, 1) if run.add(step, loss)] == [5]


def test_three_evaluations_are_too_few() -> None:
    assert turned_at([1.0, 0.5, 2.0]) is None
    assert turned_at([1.0, 0.5, 0.52, 2.0, 2.1]) is None  # which could be as noisy as that
    assert turned_at([1.0, 0.5, 0.52, 0.6, 0.7]) == 5


@pytest.mark.parametrize(
    ("losses", "trained", "mode_given", "turns"),
    [
        ([0.5, 0.6], [0.4, 0.2], True, [40]),
        ([0.5, 0.6], [0.4, 0.2], False, []),  # an accuracy could rise so
        ([0.9, 0.5, 0.6], [0.8, 0.4, 0.2], False, [60]),
        ([0.5, 0.54], [0.4, 0.2], True, []),  # by less than a tenth
        ([0.5, 0.6], [0.4, 0.3], True, []),  # not more than twice the training loss
        ([0.5, 0.6], [0.1, 0.2], True, []),  # which has risen too
        ([0.5, 0.6], [math.nan, math.nan], True, []),
        ([-0.5, -0.4], [-0.6, -0.8], True, [40]),
    ],
)
def test_of_few_evaluations_one_is_enough(
    losses: list[float], trained: list[float], mode_given: bool, turns: list[int]
) -> None:
    """Where they are more than three stretches apart."""
    for every, stretch, found in ((20, 5, turns), (20, 8, []), (20, 0, [])):
        run = Evaluations(mode_given=mode_given)
        told = []
        for index, loss in enumerate(losses, 1):
            run.confirmed.recent = [trained[index - 1]]
            told += [every * index] if run.add(every * index, loss, stretch=stretch) else []
        assert told == found


@given(st.lists(st.integers(2, 48).map(lambda n: n / 16), min_size=1, max_size=20))
def test_evaluations_of_one_stretch_are_one(losses: list[float]) -> None:
    """A decision is made when a stretch has as many as the one before."""
    few, many = Evaluations(), Evaluations()
    for index, loss in enumerate(losses):
        for part, share in ((0, 0.75), (3, 1.25)):
            few.confirmed.recent = many.confirmed.recent = [1 / (1 + index)]
            told = many.add(10 * index + part, share * loss, stretch=8)
            many = Evaluations.from_state(json.loads(json.dumps(many.state_dict())))
        assert told == few.add(10 * index, loss)
    assert many.losses == pytest.approx(few.losses)
    assert (many.steps, many.trained) == (few.steps, few.trained)
    assert many.lowest == 0.75 * min(losses)
    assert many.best_step == few.best_step
    assert many.counts == [2] * len(losses)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_every_float(losses: list[float]) -> None:
    run = Evaluations()
    for step, loss in enumerate(losses):
        run.add(step, loss)
    assert all(math.isfinite(loss) for loss in run.losses)


def test_a_long_run_is_thinned() -> None:
    run = Evaluations()
    for step in range(5 * MAX_KEPT):
        run.add(step, 1 + 1 / (step + 1))
    assert len(run.steps) == len(run.losses) <= MAX_KEPT
    assert run.best_step == 5 * MAX_KEPT - 1


def test_it_continues_from_its_state() -> None:
    losses = [0.584, 0.521, 0.537, 0.546, 0.543, 0.596, 0.561, 0.704]
    whole, run = Evaluations(), Evaluations()
    for step, loss in enumerate(losses):
        run = Evaluations.from_state(json.loads(json.dumps(run.state_dict())))
        assert run.add(step, loss) == whole.add(step, loss)
    assert run.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": [1]}, "losses must be 1 finite numbers"),
        ({"losses": [1.0, math.nan]}, "losses must be 2 finite numbers"),
        ({"turned_at": -1}, "turned_at must be an integer >= 0"),
        ({"trained": [1.0]}, "trained must have 2 losses, but got 1"),
        ({"counts": [1]}, "counts must have 2 entries, but got 1"),
        ({"counts": [1, 0]}, "counts must be an integer >= 1"),
        ({"mode_given": "min"}, "mode_given must be"),
        ({"steps": [0] * 600, "losses": [0.0] * 600}, "evaluations must be at most 512"),
    ],
)
def test_a_bad_state(change: dict[str, object], said: str) -> None:
    run = Evaluations()
    run.add(1, 1.0)
    run.add(2, 0.5)
    with pytest.raises(ValueError, match=said):
        Evaluations.from_state({**run.state_dict(), **change})


# -- what validation has confirmed ----------------------------------------------------------------------------------


def shares(
    train: Callable[[int], float], value: Callable[[int], float], *, num_rounds: int = 200, every: int = 10
) -> list[float]:
    """Of each round; ``train`` and ``value``: losses in a round, the latter evaluated in every tenth."""
    confirmed, found = Confirmed(), []
    for index in range(num_rounds):
        evaluation = value(index - 1) if index and index % every == 0 else math.nan
        confirmed.add(evaluation, train(index), moves=True)
        confirmed = Confirmed.from_state(json.loads(json.dumps(confirmed.state_dict())))
        found.append(confirmed.share)
    return found


def falling(index: int) -> float:
    return 2.0 / (1 + index / 10)


def test_a_validation_loss_that_follows_leaves_the_learning_rate_as_it_is() -> None:
    """Until the second evaluation it counts as standing still."""
    for gap in (0.9, 1.0, 1.15):
        found = shares(falling, lambda index, gap=gap: gap * falling(index))  # type: ignore[misc]
        assert found[:11] == [1.0] * 11
        assert min(found) > 0.6
        assert found[25:] == [1.0] * 175


def test_where_training_memorises_the_learning_rate_follows_the_ratio() -> None:
    found = shares(falling, lambda index: max(falling(index), 0.5))
    for index in (99, 149, 199):
        mean = (falling(index) + falling(index - 1)) / 2
        assert found[index] == pytest.approx(ROOM * mean / 0.5, rel=0.02)
    assert min(b / a for a, b in pairwise(found)) >= math.exp(-DOWN) - 1e-12
    assert max(b / a for a, b in pairwise(found)) <= math.exp(UP) + 1e-12


def test_it_is_never_below_its_least() -> None:
    assert min(shares(lambda index: 2.0 * 0.9**index, lambda index: max(2.0 * 0.9**index, 0.5))) == LOWEST


@pytest.mark.parametrize(
    "metric",
    [
        lambda loss: math.exp(6 * loss),  # a perplexity
        lambda loss: 1 - 0.4 * loss,  # an accuracy
        lambda loss: -loss,
        lambda loss: math.sqrt(loss),
        lambda loss: 100 * loss,
        lambda loss: 0.0,
        lambda loss: math.nan,
    ],
)
def test_what_is_no_loss_of_the_same_kind_does_nothing(metric: Callable[[float], float]) -> None:
    found = shares(falling, lambda index: metric(falling(index)))
    assert found[40:] == [1.0] * 160
    assert min(found) > 0.5


def test_the_ratio_is_that_of_the_last_evaluation() -> None:
    """Also where the first was far below the training loss, which falls fast at first."""
    confirmed = Confirmed()
    for evaluation, loss, ratio in ((math.nan, 1.0, 0.0), (0.3, 0.1, 0.3), (0.2, 0.05, 0.2 / 0.55), (0.15, 0.05, 2.0)):
        confirmed.add(evaluation, loss, moves=True)
        confirmed = Confirmed.from_state(json.loads(json.dumps(confirmed.state_dict())))
        assert confirmed.ratio == pytest.approx(ratio)


@pytest.mark.parametrize("metric", [lambda loss: -loss, lambda loss: 3 * loss, math.sqrt])
def test_what_is_no_loss_of_the_same_kind_has_no_ratio(metric: Callable[[float], float]) -> None:
    """A root mean square is above the mean square late in a run."""
    for first in (0.3, 0.8, 3.0, 100.0):
        confirmed = Confirmed()
        for index in range(200):
            evaluation = metric(first * falling(index)) if index and index % 10 == 0 else math.nan
            confirmed.add(evaluation, first * falling(index), moves=True)
        assert confirmed.ratio == -1


@given(
    rows=st.lists(
        st.tuples(st.floats(allow_nan=True), st.one_of(st.just(math.nan), st.floats())), min_size=1, max_size=30
    )
)
def test_no_numbers_do_harm(rows: list[tuple[float, float]]) -> None:
    confirmed = Confirmed()
    for loss, evaluation in rows:
        confirmed.add(evaluation, loss, moves=True)
        confirmed = Confirmed.from_state(confirmed.state_dict())
        assert LOWEST * (1 - 1e-12) <= confirmed.share <= 1.0


def test_the_fall_is_told_once_and_only_where_it_moves() -> None:
    confirmed = Confirmed()
    confirmed.add(math.nan, 1.0, moves=True)
    confirmed.add(1.0, 0.5, moves=False)
    assert [confirmed.add(math.nan, loss, moves=True) for loss in (0.4, 0.3, 0.2)] == [True, False, False]
    assert confirmed.is_low


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"share": 0.0}, "share of confirmed must be in"),
        ({"share": 1.5}, "share of confirmed must be in"),
        ({"last": 0.0}, "last of confirmed must be in"),
        ({"trained": math.inf}, "trained of confirmed must be in"),
        ({"follows": "x"}, "follows of confirmed must be in"),
        ({"num": 3}, "num of confirmed must be -1, 0, 1 or 2, but got 3"),
        ({"recent": [math.nan]}, "recent must be"),
        ({"ratio": -2.0}, "ratio of confirmed must be in"),
    ],
)
def test_a_bad_state_of_what_is_confirmed(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Confirmed.from_state({**Confirmed().state_dict(), **change})


def test_a_state_without_it_is_of_an_earlier_version() -> None:
    run = Evaluations()
    run.add(1, 1.0)
    state = run.state_dict()
    del state["confirmed"], state["trained"], state["counts"], state["mode_given"], state["lowest"], state["best_step"]
    loaded = Evaluations.from_state(state)
    assert loaded.confirmed.state_dict() == Confirmed().state_dict()
    assert len(loaded.trained) == 1
    assert (loaded.lowest, loaded.best_step) == (1.0, 1)
    assert math.isnan(loaded.trained[0])
    confirmed = Confirmed().state_dict()
    del confirmed["ratio"]
    assert Confirmed.from_state(confirmed).ratio == 0
