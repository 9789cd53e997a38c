"""The end of a round from a list of losses: no tensors, no processes."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from hdet.controllers import EvidenceController
from hdet.policy.rollback import CUT, BrokenError, Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import Steering
from hdet.policy.verdict import Observed, Verdict

T, N = 5, 4


def make_policy(**options: Any) -> RoundPolicy:
    steering = Steering(
        num_knobs=1, num_replicas=N, spread=0.1, controller=EvidenceController(), scale_bounds=(1e-3, 1e3)
    )
    return RoundPolicy(steering, **{"interval": T, "acting": (T, 100), **options})


def end_round(policy: RoundPolicy, *losses: float, finite: tuple[int, ...] = (1,) * N, **seen: Any) -> Verdict:
    step = T * (policy.steering.round_index + 1)
    row = np.array(losses if len(losses) > 1 else losses * N)
    return policy.end_round(Observed(step, row, np.array(finite, dtype=bool), **seen))


def test_rounds_end_every_interval_and_with_the_last_step() -> None:
    policy = make_policy()
    assert [step for step in range(1, 13) if policy.is_due(step, last=step == 12)] == [5, 10, 12]
    assert [policy.num_steps(step) for step in (0, 1, 5, 6, 10, 12)] == [0, 1, 5, 1, 5, 2]


def test_the_controller_acts_inside_its_window() -> None:
    policy = make_policy(acting=(T, 3 * T))
    looked = [bool(end_round(policy, 1.4, 1.2, 1.1, 1.0).looked.lrs) for _ in range(4)]
    assert looked == [False, True, True, False]
    assert policy.steering.round_index == 4
    assert policy.steering.scales[0] != 1


def test_the_verdict_says_where_the_round_stood() -> None:
    policy = make_policy()
    multipliers = policy.steering.multipliers
    verdict = end_round(policy, 1.0, 2.0, 3.0, 4.0, compared=np.array([4.0, 3.0, 2.0, 1.0]), finite=(1, 1, 1, 0))
    assert verdict.index == 0
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
        "state are those of the last healthy round, and learning rates are multiplied by 0.5"
    )
    assert first.messages == (f"{done}. Later ones are in scheduler.history",)
    assert policy.steering.scales[0] == CUT
    end_round(policy, 1.0)
    second = end_round(policy, 1.0, finite=(0,) * N)
    assert second.go_back
    assert len(second.events) == 1
    assert "max_rollbacks=2 are spent" in second.messages[0]
    held = end_round(policy, 1.0, 1.1, 1.2, 1.4)
    assert (held.held, held.go_back, held.looked.lrs) == (True, False, {})
    policy.rollback = Rollback(0)
    with pytest.raises(BrokenError, match="training broke again at step 30 after 0 rollbacks in a row"):
        end_round(policy, math.nan)


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


@pytest.mark.parametrize(
    ("key", "value"), [("quarantine", [-1.0]), ("guard", {}), ("num_rollbacks", -1), ("scales", [0.0]), ("round", "no")]
)
def test_a_state_that_cannot_be_used_changes_nothing(key: str, value: Any) -> None:
    policy = make_policy(rollback=Rollback(3), quarantine=20.0)
    end_round(policy, 1.0, 1.1, 0.9, 1.2)
    state = {**policy.state_dict(), "seed": 7, key: value}
    before = repr(policy.state_dict())
    with pytest.raises((ValueError, KeyError), match=r"must be|recent"):
        policy.load_state_dict(state)
    assert repr(policy.state_dict()) == before
