"""One level for all param groups, and groups that part from it: against a slow version, round by round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hdet.checks import FloatArray
from hdet.controllers import Controller, EvidenceController, Hold, LevelController
from hdet.controllers.base import Decision, Evidence, grown, pack_state, unpack_state
from hdet.controllers.groups import FURTHEST, GroupController, GroupState

ONE = np.ones((3, 1))


def _evidence(slopes: FloatArray, scales: FloatArray, error: float = 0.3, loss: float = 1.0, **more: Any) -> Evidence:
    return Evidence(
        np.array([loss]),
        np.ones((len(slopes), 1)),
        (slopes, np.full(len(slopes), error)),
        whole=(float(slopes.sum()), error),
        scales=scales,
        progress=0.4,
        elapsed=0.1,
        **more,
    )


def _slow_moves(rounds: list[FloatArray], logs: list[float]) -> list[float]:
    """What is added to each group's logarithm, from all rounds so far, written out."""
    num, ages = len(logs), range(len(rounds) - 1, -1, -1)
    counts = [0.9**age for age in ages]
    total, squares = sum(counts), sum(c * c for c in counts)
    worth = total**2 / squares
    centre = sum(logs) / num
    apart = [each - centre if abs(each - centre) > 1e-9 else 0.0 for each in logs]
    z = [0.0] * num
    if worth >= 1.5:
        mean = [sum(c * r[g] for c, r in zip(counts, rounds, strict=True)) / total for g in range(num)]
        own = [sum(c * (r[g] - mean[g]) ** 2 for c, r in zip(counts, rounds, strict=True)) for g in range(num)]
        for g in range(num):
            share = own[g] / sum(own)
            series = [r[g] - share * sum(r) for r in rounds]
            middle = sum(c * x for c, x in zip(counts, series, strict=True)) / total
            scatter = sum(c * (x - middle) ** 2 for c, x in zip(counts, series, strict=True)) / total
            z[g] = middle / math.sqrt(scatter / (worth - 1))
    after = []
    for g in range(num):
        move = -math.copysign(min(0.3 * (abs(z[g]) - 2) / 2, 0.2), z[g]) if abs(z[g]) > 2 else -0.02 * apart[g]
        after.append(min(max(apart[g] + move, -math.log(30)), math.log(30)))
    if not any(after):
        return [0.0] * num
    return [a - sum(after) / num - b for a, b in zip(after, apart, strict=True)]


@pytest.mark.parametrize("trend", [(-1.0, 0.2, 0.5), (0.0, 0.0, 0.0), (-0.1, -0.2, 3.0)])
@pytest.mark.parametrize("alone", [LevelController(), EvidenceController()], ids=["level", "evidence"])
def test_it_is_the_slow_version(alone: Controller, trend: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    controller = GroupController(alone)
    state, lonely = controller.init(3), alone.init(1)
    scales, rounds = np.full(3, 0.1), []
    for index in range(60):
        slopes = np.array(trend) + rng.normal(size=3) * (0.2, 1.0, 0.4)
        rounds.append(slopes)
        seen = _evidence(slopes, scales, loss=3.0 - 0.01 * index, start=(3.1, 0.02), update=0.003, level=0.05)
        state, decision = controller.update(state, seen)
        whole = seen._replace(
            multipliers=ONE[:1],
            slopes=(slopes.sum(keepdims=True), np.array([0.3])),
            scales=np.array([math.exp(np.log(scales).mean())]),
        )
        lonely, level = alone.update(lonely, whole)
        expected = [level.factors[0] * math.exp(m) for m in _slow_moves(rounds, np.log(scales).tolist())]
        assert_allclose(decision.factors, expected, rtol=1e-9)
        assert decision.info["z"] == level.info["z"] * 3
        scales = scales * decision.factors


def test_groups_that_differ_part_and_the_others_do_not() -> None:
    rng = np.random.default_rng(1)
    far = []
    for trend in ((-1.0, 1.0), (0.0, 0.0)):
        controller = GroupController(Hold())
        state, scales = controller.init(2), np.ones(2)
        for _ in range(200):
            state, decision = controller.update(state, _evidence(trend + rng.normal(size=2), scales))
            scales = scales * decision.factors
        assert np.log(scales).sum() == pytest.approx(0, abs=1e-9)
        far.append(math.log(scales[0] / scales[1]))
    assert far[0] == pytest.approx(2 * FURTHEST)
    assert abs(far[1]) < 1


def test_without_evidence_it_is_one_scale_for_all_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet.controllers.groups.DOUBT", math.inf)
    rng = np.random.default_rng(2)
    controller, alone = GroupController(EvidenceController()), EvidenceController()
    state, lonely, scales = controller.init(3), alone.init(1), np.full(3, 0.03)
    for _ in range(50):
        seen = _evidence(rng.normal(-0.5, size=3), scales)
        assert seen.whole is not None
        state, decision = controller.update(state, seen)
        lonely, level = alone.update(
            lonely,
            seen._replace(multipliers=ONE[:1], slopes=(np.array([seen.whole[0]]), np.array([seen.whole[1]]))),
        )
        assert decision.factors.tolist() == [level.factors[0]] * 3
        scales = scales * decision.factors


def test_what_shows_nothing_moves_nothing() -> None:
    controller = GroupController(EvidenceController())
    state = controller.init(2)
    blind = Evidence(np.ones(1), np.ones((2, 1)))
    assert controller.update(state, blind)[1].factors.tolist() == [1.0, 1.0]
    nothing = np.full(2, math.nan)
    silent = _evidence(nothing, np.array([1.0, 1.0]))
    after, decision = controller.update(state, silent)
    assert decision.factors.tolist() == [1.0, 1.0]
    assert after.weights.tolist() == [0.0, 0.0]
    for slopes in ([1e300, -1.0], [math.nan, -1.0]):  # one that overflows, and a group without a gradient
        for _ in range(5):
            state, decision = controller.update(
                state, _evidence(np.array(slopes), np.ones(2))._replace(whole=(-1.0, 0.1))
            )
            assert np.isfinite(decision.factors).all()
            assert np.isfinite(np.concatenate([part.ravel() for part in state])).all()


class _Spy(EvidenceController):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen = evidence
        return super().update(state, evidence)


def test_what_steers_the_level_sees_one_learning_rate() -> None:
    alone = _Spy()
    controller = GroupController(alone)
    controller.update(controller.init(3), _evidence(np.array([1.0, 2.0, -4.0]), np.array([1.0, 2.0, 4.0])))
    seen = alone.seen
    assert seen.slopes is not None
    assert seen.scales is not None
    assert (len(seen.multipliers), seen.whole) == (1, None)
    assert [row.tolist() for row in seen.slopes] == [[-1.0], [0.3]]
    assert_allclose(seen.scales, [2.0])


def test_its_state_is_saved_checked_grown_and_forgotten() -> None:
    rng = np.random.default_rng(3)
    controller = GroupController(LevelController())
    state: GroupState = controller.init(2)
    controller.check_state(state)  # a run may be saved before its first round has ended
    for _ in range(12):
        state, _ = controller.update(state, _evidence(rng.normal(size=2), np.ones(2)))
    loaded = unpack_state(pack_state(state), controller.init(2))
    controller.check_state(loaded)
    seen = _evidence(rng.normal(size=2), np.array([1.0, 2.0]))
    assert controller.update(loaded, seen)[1].factors.tolist() == controller.update(state, seen)[1].factors.tolist()
    with pytest.raises(ValueError, match="weights and the squares of slopes must be >= 0, but got"):
        controller.check_state(state._replace(weights=-state.weights))
    with pytest.raises(ValueError, match="variance must be >= 0 and weight"):
        controller.check_state(state._replace(level=-np.abs(state.level) - 1))
    more = grown(controller, state, 3, 2)
    assert more.slopes.tolist() == [*state.slopes, 0.0]
    assert more.level.tolist() == state.level.tolist()
    assert controller.update(more, _evidence(rng.normal(size=3), np.ones(3)))[1].factors.shape == (3,)
    forgotten = controller.forget(state)
    assert not forgotten.weights.any()
    assert forgotten.level.any()  # what the run has gained stays known
    assert not GroupController(Hold()).forget(GroupController(Hold()).init(2)).weights.any()
