"""The guard: quiet on ordinary curves, however noisy; loud when training breaks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hdet.checks import FloatArray
from hdet.policy.rollback import NUM_RECENT, RECOVERY, Guard, GuardState, Rollback, pack_guard, unpack_guard

CURVE = [3.0, 2.5, 2.2, 2.0, 1.9, 1.85, 1.8, 1.82, 1.79]


def feed(losses: FloatArray | list[float], state: GuardState | None = None) -> tuple[GuardState, list[bool]]:
    guard, verdicts = Guard(), []
    state = state or GuardState()
    for loss in losses:
        state, healthy = guard.update(state, float(loss))
        verdicts.append(healthy)
    return state, verdicts


def false_alarms(curves: FloatArray) -> int:
    return sum(not healthy for curve in curves for healthy in feed(curve)[1])


# -- quiet ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.3])
def test_stationary_noise_is_hardly_ever_a_jump(noise: float) -> None:
    """100 runs of 300 rounds that make no progress at all, the hardest case: fewer than one alarm in 10,000 rounds."""
    rng = np.random.default_rng(0)
    assert false_alarms(2.5 + noise * rng.normal(size=(100, 300))) <= 3


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("shape", ["power", "exponential", "linear"])
def test_a_decaying_noisy_curve_is_never_a_jump(shape: str, noise: float) -> None:
    rng = np.random.default_rng(1)
    t = np.linspace(0, 1, 200)
    curve = {
        "power": 1 + 3 * (1 + 50 * t) ** -0.5,
        "exponential": 1 + 3 * np.exp(-8 * t),
        "linear": 4 - 3 * t,
    }[shape]
    assert false_alarms(curve + noise * rng.normal(size=(50, 200))) == 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    level=st.floats(0.1, 100),
    progress=st.floats(1.0, 5),
    relative_noise=st.floats(0, 0.05),
)
def test_a_run_that_learns_is_never_stopped(seed: int, level: float, progress: float, relative_noise: float) -> None:
    """Any scale, any speed: noise up to a twentieth of the level, and progress of at least the level."""
    rng = np.random.default_rng(seed)
    curve = level * (1 + progress * np.exp(-np.linspace(0, 6, 100)) + relative_noise * rng.normal(size=100))
    assert false_alarms(curve[None]) == 0


@given(st.floats(0.5, 10), st.floats(1e-12, 1e-6))
@example(1.0, 1e-9)
def test_a_constant_loss_that_rises_by_a_hair_is_no_jump(level: float, hair: float) -> None:
    """Without noise the usual difference between rounds is 0; a change in the last digits must not be 8 times it."""
    assert all(feed([level] * 8 + [level * (1 + hair)])[1])


def test_a_first_loss_of_zero_does_not_make_every_rise_a_jump() -> None:
    assert all(feed([0.0, 0.01, -0.01, 0.02, 0.0])[1])


# -- loud -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    noise=st.floats(1e-4, 0.02),
    num_before=st.integers(5, 60),
    jump=st.floats(0.5, 100),
)
def test_a_jump_is_found(seed: int, noise: float, num_before: int, jump: float) -> None:
    """Half of the progress lost, and 20 times the noise."""
    rng = np.random.default_rng(seed)
    curve = 1 + 3 * np.exp(-np.linspace(0, 4, num_before)) + noise * rng.normal(size=num_before)
    state, verdicts = feed(curve)
    assert all(verdicts)
    usual = float(np.median(curve[-5:]))
    lost = max(jump * (curve[0] - usual), 30 * noise, 20 * float(np.abs(np.diff(curve[-NUM_RECENT:])).max()))
    doubtful, healthy = Guard().update(state, usual + lost)
    assert healthy
    assert doubtful == state._replace(lost=1)
    after, healthy = Guard().update(doubtful, usual + lost)
    assert not healthy
    assert after == doubtful._replace(num_strikes=1)  # a broken round teaches nothing


@pytest.mark.parametrize(("interval", "num"), [(1, 15), (5, 3), (8, 1), (50, 1)])
def test_a_loss_that_comes_down_within_sixteen_steps_has_not_jumped(interval: int, num: int) -> None:
    """One batch of outliers: any learning rate recovers from it, and what the model learns from it is not undone."""
    guard, (state, _) = Guard(interval=interval), feed(CURVE)
    for _ in range(num):
        state, healthy = guard.update(state, 400.0)
        assert healthy
    assert not guard.update(state, 400.0)[1]
    state, healthy = guard.update(state, 1.8)
    assert healthy
    assert state == feed([*CURVE, 1.8])[0]


@pytest.mark.parametrize("num_before", [0, 1, 3, 5, 30])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_always_broken(num_before: int, loss: float) -> None:
    state, _ = feed([3.0, 2.5, 2.2, 2.0, 1.9, *[1.8] * 25][:num_before])
    for strikes in range(1, 10):  # beyond max_strikes too: there is no level to accept
        state, healthy = Guard().update(state, loss)
        assert not healthy
        assert state.num_strikes == strikes


def test_until_five_rounds_are_known_only_a_huge_loss_counts() -> None:
    assert feed([3.0, 2.9, 8.9])[0].recent == (3.0, 2.9, 8.9)  # 2.95 + 2 x 3
    assert feed([3.0, 2.9, 9.0])[0].recent == (3.0, 2.9)
    assert feed([3.0, 2.9, 9.0, 9.0])[1] == [True, True, True, False]


# -- strikes --------------------------------------------------------------------------------------------------------


def test_a_level_that_stays_up_is_accepted_after_max_strikes() -> None:
    state, verdicts = feed([*CURVE, 4.0, 4.0, 4.1, 4.2])
    assert verdicts[-4:] == [True] + [False] * 3
    state, healthy = Guard().update(state, 4.0)
    assert healthy
    assert state == GuardState(4.0, (4.0,), 0)  # what was usual before says nothing about the new data
    assert all(feed([4.1, 3.9, 4.0, 3.8, 3.9, 3.85], state)[1])


@pytest.mark.parametrize(
    ("losses", "num_in_vain"),
    [
        ([4.0] * 5, 3),
        ([4.0, 4.0, 4.0, 4.0, 3.7], 3),  # nearly as high at half the learning rate
        ([4.0, 4.0, 4.0, 4.0, 3.4], 0),  # which has helped
        ([4.0, 4.0, math.nan, math.nan, 4.0], 0),  # what was not finite has no size
    ],
)
def test_where_a_lower_learning_rate_does_not_help_it_was_not_the_cause(losses: list[float], num_in_vain: int) -> None:
    rollback = Rollback(5)

    def is_broken(loss: float) -> bool:
        return rollback.is_broken(np.array([loss]), weights_fine=True, losses_given=True, step=1)

    assert not any(map(is_broken, CURVE))
    broken = [is_broken(loss) for loss in losses[:-1]]
    assert broken == [False, True, True, True]
    again = Rollback(5)
    again.load_state_dict(json.loads(json.dumps(rollback.state_dict())))
    rollback = again
    assert not is_broken(losses[-1])
    assert rollback.num_in_vain == num_in_vain
    assert not is_broken(losses[-1])
    assert rollback.num_in_vain == 0, "of that round alone"


@pytest.mark.parametrize("jump", [math.nan, math.inf, "4", True])
def test_a_jump_that_is_no_number_is_refused(jump: object) -> None:
    with pytest.raises(ValueError, match="jump must be a finite number, or None"):
        Rollback(5).load_state_dict({**Rollback(5).state_dict(), "jump": jump})


def test_a_healthy_round_clears_the_strikes() -> None:
    _, verdicts = feed([*CURVE, 4.0, 4.0, 4.0, 1.8, 4.0, 4.0, 4.0, 4.0])
    assert verdicts[-8:] == [True, False, False, True, True, False, False, False]


def test_a_doubtful_round_does_not() -> None:
    """Else NaN and jumps by turns would be undone for ever, and never be an error."""
    state, verdicts = feed([*CURVE, math.nan, 4.0, math.nan])
    assert verdicts[-3:] == [False, True, False]
    assert state.num_strikes == 2


def test_a_non_finite_round_is_a_strike_but_never_accepted() -> None:
    state, verdicts = feed([*CURVE, math.nan, math.nan, math.nan, math.nan, 4.0, 4.0])
    assert verdicts[-6:] == [False] * 4 + [True] * 2
    assert state == GuardState(4.0, (4.0,))


def test_only_the_last_rounds_are_kept() -> None:
    state, _ = feed(np.linspace(5, 1, 100))
    assert len(state.recent) == NUM_RECENT
    assert state.first == 5.0


# -- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", range(0, 14, 3))
def test_a_restored_guard_goes_on_as_before(num_before: int) -> None:
    losses = [*CURVE, 4.0, math.nan, 1.8, 1.75, 4.0, 4.0]
    state, _ = feed(losses[:num_before])
    again = unpack_guard(json.loads(json.dumps(pack_guard(state))))
    assert repr(again) == repr(state)
    assert repr(feed(losses[num_before:], again)) == repr(feed(losses[num_before:], state))


def test_a_broken_state_is_refused() -> None:
    packed = pack_guard(feed(CURVE)[0])
    with pytest.raises(ValueError, match=r"recent must hold finite numbers, but got \[1.0, nan\]"):
        unpack_guard({**packed, "recent": [1.0, math.nan]})
    with pytest.raises(ValueError, match="first must be a finite number, but got None"):
        unpack_guard({**packed, "first": None, "recent": []})
    without = {name: value for name, value in packed.items() if name not in ("lost", "lowest", "noise")}
    assert unpack_guard(without).lost == 0  # as older versions have saved it
    with pytest.raises(KeyError, match="num_strikes"):
        unpack_guard({"first": 1.0, "recent": []})


def test_where_the_loss_before_training_is_known_the_first_rounds_are_judged_too() -> None:
    """A warm-up that breaks the model is seen at once."""
    guard = Guard()
    known, unknown = GuardState(5.6, noise=0.05), GuardState()
    for loss in (5.3, 4.6, 3.8):
        known, fine = guard.update(known, loss)
        assert fine
        unknown, fine = guard.update(unknown, loss)
        assert fine
    assert not guard.update(unknown, 4.55)[0].lost
    doubtful, _ = guard.update(known, 4.55)
    assert not guard.update(doubtful, 4.55)[1]
    assert not guard.update(known, 4.3)[0].lost
    assert unpack_guard(pack_guard(known)) == known


# -- back at the start ----------------------------------------------------------------------------------------------

BOUNCES = [2.29, 2.1, 1.8, 1.5, 1.3, 1.2, 1.9, 1.3, 2.0, 1.2, 1.9, 1.3]
"""Of a learning rate at the edge of what training bears: no jump is unusual here."""


def known_start(losses: list[float], noise: float = 0.05) -> tuple[GuardState, list[bool]]:
    return feed(losses, GuardState(2.3, noise=noise))


def test_a_model_that_is_back_at_the_start_is_broken_at_the_second_look() -> None:
    state, verdicts = known_start([*BOUNCES, 2.45])
    assert all(verdicts)
    assert state.lost == 1
    assert state.recent == tuple(BOUNCES)
    assert [Guard().update(state, loss)[1] for loss in (2.35, 2.1, 1.9)] == [False, True, True]
    assert not Guard().update(state, 2.1)[0].lost


def test_short_rounds_are_looked_at_for_longer() -> None:
    state, _ = known_start(BOUNCES)
    for expected in (1, 2, 3):
        state, fine = Guard(interval=5).update(state, 2.45)
        assert (fine, state.lost) == (True, expected)
    assert not Guard(interval=5).update(state, 2.45)[1]
    assert Guard(interval=5).update(state, 1.9)[0].lost == 0


def test_where_the_start_is_unknown_nobody_knows_what_was_lost() -> None:
    assert all(feed([2.3, *BOUNCES, 2.45, 2.45])[1])


def test_progress_within_the_noise_cannot_be_lost() -> None:
    state, verdicts = known_start([*BOUNCES, 2.45, 2.45, 2.45], noise=0.15)
    assert all(verdicts)
    assert not state.lost


def test_where_data_have_changed_the_start_is_accepted_after_max_strikes() -> None:
    state, verdicts = known_start([*BOUNCES, *[2.45] * 5])
    assert verdicts[len(BOUNCES) :] == [True, False, False, False, True]
    assert repr(state) == repr(GuardState(2.45, (2.45,)))


@pytest.mark.parametrize("num_before", [3, 9, 13, 14])
def test_a_restored_guard_knows_what_was_lost(num_before: int) -> None:
    losses = [*BOUNCES, 2.45, 2.4, 1.5]
    state, _ = known_start(losses[:num_before])
    again = unpack_guard(json.loads(json.dumps(pack_guard(state))))
    assert again == state
    assert feed(losses[num_before:], again) == feed(losses[num_before:], state)
    with pytest.raises(ValueError, match="lowest must be a finite number, or None, but got nan"):
        unpack_guard({**pack_guard(state), "lowest": math.nan})


# -- rollbacks ------------------------------------------------------------------------------------------------------


def told(rollback: Rollback, loss: float) -> bool:
    return rollback.is_broken(np.array([loss]), weights_fine=True, losses_given=True, step=1)


def test_healthy_rounds_make_up_for_a_rollback() -> None:
    rollback = Rollback(1)
    assert told(rollback, math.nan)
    rollback.take(1, is_cut=True)
    assert rollback.budget.spent
    for _ in range(RECOVERY):
        assert rollback.budget.spent
        assert not told(rollback, 2.0)
    assert not rollback.budget.spent


def test_after_other_weights_were_loaded_the_next_loss_may_be_any() -> None:
    rollback = Rollback(3)
    rollback.expect(3.0, 0.1)
    for loss in CURVE:
        assert not told(rollback, loss)
    rollback.start_over()
    for loss in (40.0, 39.0, 38.0):
        assert not told(rollback, loss)
        assert not rollback.doubtful
