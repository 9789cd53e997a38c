"""The end of a round from a list of losses: no tensors, no processes."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from hdet.controllers import Decision, Evidence, EvidenceController
from hdet.policy.level import NUM_FIRST, SHARE, Level, Sizes
from hdet.policy.rollback import CUT, BrokenError, Rollback
from hdet.policy.round import RoundPolicy, Seen, Verdict
from hdet.policy.steering import Steering

T, N = 5, 4


def make_policy(**options: Any) -> RoundPolicy:
    steering = Steering(
        num_knobs=1, num_replicas=N, spread=0.1, controller=EvidenceController(), scale_bounds=(1e-3, 1e3)
    )
    return RoundPolicy(steering, **{"interval": T, "acting": (T, 100), **options})


def end_round(policy: RoundPolicy, *losses: float, finite: tuple[int, ...] = (1,) * N, **seen: Any) -> Verdict:
    step = T * (policy.steering.round_index + 1)
    row = np.array(losses if len(losses) > 1 else losses * N)
    return policy.end_round(Seen(step, row, np.array(finite, dtype=bool), **seen))


def test_rounds_end_every_interval_and_with_the_last_step() -> None:
    policy = make_policy()
    assert [step for step in range(1, 13) if policy.is_due(step, last=step == 12)] == [5, 10, 12]
    assert [policy.num_steps(step) for step in (0, 1, 5, 6, 10, 12)] == [0, 1, 5, 1, 5, 2]


def test_the_controller_acts_inside_its_window() -> None:
    policy = make_policy(acting=(T, 3 * T))
    looked = [bool(end_round(policy, 1.4, 1.2, 1.1, 1.0).control) for _ in range(4)]
    assert looked == [False, True, True, False]
    assert policy.steering.round_index == 4
    assert policy.steering.scales[0] != 1


def test_the_verdict_says_where_the_round_stood() -> None:
    policy = make_policy()
    multipliers = policy.steering.multipliers
    verdict = end_round(policy, 1.0, 2.0, 3.0, 4.0, compared=np.array([4.0, 3.0, 2.0, 1.0]), finite=(1, 1, 1, 0))
    assert (verdict.index, verdict.num_rollbacks) == (0, 0)
    assert (verdict.multipliers == multipliers).all()
    assert not (policy.steering.multipliers == multipliers).all()
    assert verdict.scales.tolist() == [1.0]
    assert verdict.losses.tolist()[:3] == [4.0, 3.0, 2.0]  # what replicas are compared by
    assert math.isnan(verdict.losses[3])
    assert verdict.healthy.tolist() == [True, True, True, False]
    assert not verdict.go_back
    assert not verdict.new_anchor


def test_a_broken_round_is_undone_until_the_budget_is_spent() -> None:
    policy = make_policy(rollback=Rollback(2))
    end_round(policy, 1.0)
    first = end_round(policy, math.nan)
    assert (first.go_back, first.num_rollbacks) == (True, 1)
    (done,) = first.events
    assert done == (
        "the round that ended at step 10 was undone, because loss or weights were not finite: weights and optimizer "
        "state are those from the start of the last healthy round, and learning rates are multiplied by 0.5"
    )
    assert first.messages == (f"{done}. Later ones are in scheduler.history",)
    assert policy.steering.scales[0] == CUT
    end_round(policy, 1.0)
    second = end_round(policy, 1.0, finite=(0,) * N)
    assert second.go_back
    assert len(second.events) == 1
    assert "max_rollbacks=2 are spent" in second.messages[0]
    held = end_round(policy, 1.0, 1.1, 1.2, 1.4)
    assert (held.held, held.go_back, held.control) == (True, False, {})
    policy.rollback = Rollback(0)
    with pytest.raises(
        BrokenError, match="training broke again at step 30 after 0 rollbacks without a healthy round between them"
    ):
        end_round(policy, math.nan)


def test_who_only_watches_hears_of_every_round_that_would_have_been_undone() -> None:
    policy = make_policy(rollback=Rollback(1), acts=False)
    found = [end_round(policy, loss) for loss in (1.0, math.nan, math.nan, math.nan, 1.0)]  # more than it may undo
    assert [bool(verdict.events) for verdict in found] == [False, True, True, True, False]
    assert found[1].events == ("this round would have been undone",)
    assert not any(verdict.go_back for verdict in found)


@pytest.mark.parametrize("of_one_model", [True, False])
def test_a_model_that_ranks_share_is_broken_where_one_of_them_has_no_finite_loss(of_one_model: bool) -> None:
    policy = make_policy(rollback=Rollback(3))
    end_round(policy, 1.0)
    verdict = end_round(policy, 1.0, math.nan, 1.0, 1.0, of_one_model=np.full(N, of_one_model))
    assert verdict.go_back == of_one_model


@pytest.mark.parametrize(
    ("keeps_best", "seen", "steps"),
    [
        (False, {}, 8), (True, {}, 15),  # 0.3 and 0.6 of the 25 steps so far
        (False, {"left": 9}, 8), (False, {"left": 8}, 0), (True, {"left": 8}, 8),  # unless the end is as near anyway
        (False, {"last": True}, 0), (False, {"frozen": True}, 0),
    ],
)  # fmt: skip
def test_the_final_decay_begins_when_validation_turns(keeps_best: bool, seen: dict[str, Any], steps: int) -> None:
    policy = make_policy()
    assert not policy.keeps_best
    policy.keeps_best = keeps_best
    for loss in (1.0, 0.5, 0.52, 2.0):
        assert end_round(policy, 1.0, evaluation=loss).decay_steps == 0
    verdict = end_round(policy, 1.0, evaluation=2.1, **seen)
    assert verdict.decay_steps == steps
    assert any("validation has not improved since step 10" in event for event in verdict.events) == (steps > 0)


def test_where_a_doubtful_round_ended_is_no_place_to_go_back_to() -> None:
    rollback = Rollback(3)
    policy = make_policy(rollback=rollback)
    rollback.expect(2.3, 0.05)
    losses = (2.29, 2.1, 1.8, 1.5, 1.3, 1.9, 1.3, 2.0, 1.2, 2.4, 1.3, 2.4, 2.4, 1.3)
    found = [end_round(policy, loss) for loss in losses]
    assert [verdict.keep for verdict in found] == [True] * 9 + [False, True, False, False, True]
    assert [verdict.go_back for verdict in found] == [False] * 12 + [True, False]
    assert "because the loss jumped to 2.4 from 1.3" in found[12].events[0]


def test_nothing_to_average_is_an_error_where_nothing_is_undone() -> None:
    with pytest.raises(BrokenError, match="the weights of all 4 replicas are not finite at the converge of step 5"):
        end_round(make_policy(), 1.0, finite=(0,) * N)
    with pytest.raises(BrokenError, match=r"the weights of ranks \[2\], which nobody else has, are not finite"):
        end_round(make_policy(repairable=False), 1.0, finite=(1, 1, 0, 1))


def test_an_exploded_replica_is_left_out() -> None:
    policy = make_policy(quarantine=20.0)
    for index in range(8):
        end_round(policy, 1.0, 1.01, 0.99, 1.0 + 0.001 * index)
    verdict = end_round(policy, 1.0, 50.0, 0.99, 1.01)
    assert verdict.quarantined.tolist() == [False, True, False, False]
    assert verdict.finite.all()


def test_the_anchor_is_renewed_every_so_many_rounds_but_not_at_the_end() -> None:
    policy = make_policy(anchored=True, anchor_rounds=2)
    assert [end_round(policy, 1.0).new_anchor for _ in range(5)] == [False, True, False, True, False]
    assert not end_round(policy, 1.0, last=True).new_anchor


def test_a_policy_continues_from_its_state() -> None:
    policy, again = (make_policy(rollback=Rollback(3), quarantine=20.0) for _ in range(2))
    for losses in ((1.0, 1.1, 0.9, 1.2), (math.nan,), (0.8, 0.9, 0.7, 1.0), (0.7, 0.9, 0.6, 0.8)):
        end_round(policy, *losses)
    again.load_state_dict(copy.deepcopy(policy.state_dict()))
    for losses in ((0.6, 0.7, 0.5, 0.9), (math.nan,), (0.5, 0.6, 0.4, 0.7)):
        assert repr(end_round(policy, *losses)) == repr(end_round(again, *losses))
    assert repr(policy.state_dict()) == repr(again.state_dict())


# -- the first level ------------------------------------------------------------------------------------------------


def train(policy: RoundPolicy, first: int, last: int, unit: float = 30.0, **seen: Any) -> list[Verdict]:
    """Steps at a constant schedule of 1, whose updates have the size ``unit`` per unit of learning rate."""
    found = []
    for step in range(first, last + 1):
        rate = float(policy.steering.effective[0])
        if policy.is_due(step):
            sizes = Sizes(10.0, rate * unit, 1.0, 2e5)
            row = {"losses": np.full(N, 2 - 0.01 * step), "finite": np.ones(N, dtype=bool), "sizes": sizes, **seen}
            found.append(policy.end_round(Seen(step, rate=rate, **row)))
        policy.follow(step)
    return found


ALLOWED = 6.0  # of so few entries
LEVEL = SHARE * ALLOWED * 10 / 90 / 2.5
"""Of those updates, which all have one size."""


def test_a_run_finds_its_level_in_rounds_of_one_step_and_warms_up() -> None:
    policy = make_policy(level=Level(200), rollback=Rollback(3), acting=(0, 100))
    verdicts = train(policy, 1, 30)
    assert len(verdicts) == NUM_FIRST + 6
    assert [verdict.index for verdict in verdicts] == list(range(10))
    assert [verdict.keep for verdict in verdicts] == [False] * NUM_FIRST + [True] * 6
    assert [verdict.phase for verdict in verdicts] == ["warm-up"] * (NUM_FIRST + 2) + ["level"] * 4
    assert [bool(verdict.control) for verdict in verdicts] == [False] * NUM_FIRST + [True] * 6
    assert [event for verdict in verdicts for event in verdict.events] == [
        "the learning rate starts from 0.00533, at which a step changes the weights by about 1.6%"
    ]
    # Where the scales stood in the steps that end rounds: after two of the search, on the line of the warm-up.
    assert [verdict.scales[0] for verdict in verdicts[2:6]] == pytest.approx([LEVEL * k / 12 for k in (3, 4, 5, 10)])
    assert policy.steering.level == pytest.approx(LEVEL)
    assert policy.rollback is not None
    assert policy.rollback.guard_state.first == pytest.approx(2 - 0.025)
    assert (policy.searching, policy.searched) == (False, NUM_FIRST)
    assert [policy.num_steps(step) for step in (3, 4, 5, 6, 10)] == [1, 1, 1, 1, 5]


def test_the_round_that_finds_the_level_shows_the_share_of_the_warm_up_that_its_step_had() -> None:
    policy = make_policy(level=Level(200))
    train(policy, 1, 1)
    assert policy.level is not None
    assert not policy.level.found
    rate = float(policy.steering.effective[0])
    policy.end_round(Seen(2, np.ones(N), np.ones(N, dtype=bool), rate, sizes=Sizes(10.0, 30 * rate, 1.0, 2e5)))
    assert policy.level.found
    assert policy.steering.effective[0] == pytest.approx(LEVEL * 2 / 12)


class _Spy(EvidenceController):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen = evidence
        return super().update(state, evidence)


def test_the_controller_is_told_of_time_start_and_updates() -> None:
    controller = _Spy()
    policy = make_policy(level=Level(200), acting=(0, 100))
    policy.steering.controller = controller
    policy.steering.state = controller.init(1)
    train(policy, 1, 10)
    assert controller.seen.in_warmup
    assert controller.seen.elapsed == pytest.approx(math.log(2))
    train(policy, 11, 25)
    seen = controller.seen
    assert (seen.in_warmup, seen.progress) == (False, 0.25)
    assert seen.elapsed == pytest.approx(math.log(25 / 20))
    assert seen.start is not None
    noise = 0.01 * math.sqrt(5 / 3)  # of 1.99, 1.98, 1.97, 1.96
    assert seen.start == pytest.approx((2 - 0.025, noise * math.sqrt(1 / 4 + 1 / 5)))
    assert seen.update is not None
    assert seen.update == pytest.approx(3 * policy.steering.effective[0] / ALLOWED, rel=0.2)
    assert seen.level == policy.steering.level


def test_the_way_up_to_a_schedule_that_is_followed_is_a_warm_up() -> None:
    policy, controller = make_policy(level=Level(200, hint=True), acting=(0, 100)), _Spy()
    policy.steering.controller = controller
    policy.steering.state = controller.init(1)
    rising = []
    for step in (5, 10, 15, 20):
        train(policy, step - 4, step, unit=0.1)
        rising.append(controller.seen.in_warmup)
    assert policy.level is not None
    assert policy.level.follows_hint
    assert rising == [True, True, False, False]


def test_a_schedule_that_rises_is_a_warm_up_too() -> None:
    policy, controller = make_policy(acting=(0, 100)), _Spy()
    policy.steering.controller = controller
    policy.steering.state = controller.init(1)
    rising = []
    for scheduled in (0.0, 0.1, 0.2, 0.2, 0.2, 0.1):
        end_round(policy, 1.0, scheduled=scheduled)
        rising.append(controller.seen.in_warmup)
    assert rising == [False, False, True, False, False, False]


def test_in_the_search_only_lost_weights_are_broken() -> None:
    policy = make_policy(level=Level(200), rollback=Rollback(3), acting=(0, 100))
    assert not any(verdict.go_back for verdict in train(policy, 1, 2, losses=np.full(N, math.nan)))
    (verdict,) = train(policy, 3, 3, finite=np.zeros(N, dtype=bool))
    assert verdict.go_back
    assert policy.searched == 3


@pytest.mark.parametrize("loss", [1.1e100, -1e101, 1e308])
def test_a_loss_beyond_all_reason_counts_as_infinite(loss: float) -> None:
    policy = make_policy(rollback=Rollback(3))
    end_round(policy, 1.0)
    verdict = end_round(policy, loss)
    assert verdict.go_back
    assert np.isnan(verdict.losses).all()
    assert not end_round(policy, 0.9).go_back


@pytest.mark.parametrize("saved_at", range(1, 16))
def test_it_continues_from_its_state_at_every_step_of_the_start(saved_at: int) -> None:
    whole, policy, again = (make_policy(level=Level(150), rollback=Rollback(3), acting=(0, 100)) for _ in range(3))
    expected = train(whole, 1, 25)
    begun = train(policy, 1, saved_at)
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert [again.num_steps(step) for step in range(1, 26)] == [policy.num_steps(step) for step in range(1, 26)]
    assert repr(begun + train(again, saved_at + 1, 25)) == repr(expected)
    assert repr(again.state_dict()) == repr(whole.state_dict())


def test_a_state_of_before_freezing_and_evaluations_is_continued() -> None:
    state = make_policy().state_dict()
    del state["frozen"], state["evaluations"]
    policy = make_policy()
    policy.load_state_dict(state)
    assert not policy.frozen
    assert policy.evaluations.steps == []


def test_a_state_of_a_run_with_a_climb_is_refused() -> None:
    state = make_policy().state_dict()
    del state["level"]
    with pytest.raises(ValueError, match="whose runs began with a climb, which this one cannot continue; start from"):
        make_policy().load_state_dict({**state, "climb": None})


BROKEN: list[tuple[str, Any]] = [
    ("quarantine", [-1.0]), ("guard", {}), ("num_rollbacks", -1), ("scales", [0.0]), ("round", "no"),
    ("first_losses", [1.0] * 5), ("first_losses", [math.nan]), ("scheduled", math.inf), ("searching", 1),
    ("searched", -1), ("level", {}), ("level", [1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_a_state_that_cannot_be_used_changes_nothing(key: str, value: Any) -> None:
    policy = make_policy(rollback=Rollback(3), quarantine=20.0)
    end_round(policy, 1.0, 1.1, 0.9, 1.2)
    state = {**policy.state_dict(), "seed": 7, key: value}
    before = repr(policy.state_dict())
    with pytest.raises((ValueError, KeyError), match=r"must be|recent|warm_steps"):
        policy.load_state_dict(state)
    assert repr(policy.state_dict()) == before
