"""The conformance suite: the library's controllers pass, and every way to break the contract is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hdet.checks import FloatArray
from hdet.controllers import Controller, Decision, Evidence, EvidenceController, Hold, LevelController
from hdet.ensemble.controllers import PaperController
from hdet.testing import check_controller
from tiers import slow

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "hold": Hold,
    "paper": PaperController,
    "paper, quick": lambda: PaperController(0.1, 2.0, 0.5),
    "paper, far too quick": lambda: PaperController(0.05, 1000.0, 0.0),
    "level": LevelController,
    "level, quick": lambda: LevelController(pace=20.0, optimism=(5.0, 5.0), max_update=None),
    "evidence": EvidenceController,
    "evidence, no memory": lambda: EvidenceController(smoothing=0.0),
    "evidence, long memory": lambda: EvidenceController(smoothing=0.9, gain=0.5),
    "evidence, no optimism": lambda: EvidenceController(optimism=0.0),
}


@pytest.mark.parametrize("name", [slow(name, when="," in name) for name in CONTROLLERS])
def test_the_librarys_controllers_pass(name: str) -> None:
    check_controller(CONTROLLERS[name], num_replicas=(1, 2, 8))


class _State(NamedTuple):
    velocity: FloatArray


class _Good:
    """Follows the mean loss difference between the replicas above and below the centre."""

    def init(self, num_knobs: int) -> Any:
        return _State(np.zeros(num_knobs))

    def preference(self, evidence: Evidence) -> FloatArray:
        finite = np.isfinite(evidence.losses)
        if not finite.any():
            return np.zeros(len(evidence.multipliers))
        losses = evidence.losses[finite] - evidence.losses[finite].mean()
        found: FloatArray = -np.sign(evidence.multipliers[:, finite] - 1) @ np.tanh(losses) / len(losses)
        return found

    def decide(self, preference: FloatArray) -> Decision:
        return Decision(np.exp(0.1 * preference), {"preference": tuple(preference.tolist())})

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        preference = self.preference(evidence)
        return _State(0.5 * state.velocity + preference), self.decide(preference)


class _RemembersItself(_Good):
    num_calls = 0

    def decide(self, preference: FloatArray) -> Decision:
        self.num_calls += 1
        return super().decide(preference * self.num_calls)


class _DrawsRandomNumbers(_Good):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def decide(self, preference: FloatArray) -> Decision:
        return super().decide(preference + self.rng.normal())


class _WritesIntoTheState(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        state.velocity[:] += 1
        return super().update(state, evidence)


class _WritesIntoTheLosses(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        evidence.losses[~np.isfinite(evidence.losses)] = 0.0
        return super().update(state, evidence)


class _OneFactor(_Good):
    def decide(self, preference: FloatArray) -> Decision:
        return Decision(np.exp(preference.mean(keepdims=True)), {})


class _Negative(_Good):
    def decide(self, preference: FloatArray) -> Decision:
        return Decision(-np.exp(preference), {})


class _SpreadsNan(_Good):
    def preference(self, evidence: Evidence) -> FloatArray:
        mean = evidence.losses.mean()
        with np.errstate(invalid="ignore"):
            found: FloatArray = (evidence.multipliers - 1) @ (mean - evidence.losses)
        return found


class _FollowsReplica0(_Good):
    def preference(self, evidence: Evidence) -> FloatArray:
        quiet = 0.0 if not np.isfinite(evidence.losses).any() else 1.0
        return quiet * np.sign(evidence.multipliers[:, 0] - 1)


class _ReadsTheLevel(_Good):
    def preference(self, evidence: Evidence) -> FloatArray:
        finite = evidence.losses[np.isfinite(evidence.losses)]
        return np.full(len(evidence.multipliers), np.tanh(finite.mean()) if len(finite) else 0.0)


class _PrefersKnob0(_Good):
    def preference(self, evidence: Evidence) -> FloatArray:
        return super().preference(evidence) * (1 + np.arange(len(evidence.multipliers)))


class _InfoOfArrays(_Good):
    def decide(self, preference: FloatArray) -> Decision:
        return super().decide(preference)._replace(info={"z": preference})  # type: ignore[dict-item]


class _InfoOfNumpyFloats(_Good):
    def decide(self, preference: FloatArray) -> Decision:
        return super().decide(preference)._replace(info={"z": tuple(preference)})


class _StateOfADict(_Good):
    def init(self, num_knobs: int) -> Any:
        return {"velocity": np.zeros(num_knobs)}


class _StateOfIntegers(_Good):
    def init(self, num_knobs: int) -> Any:
        return _State(np.zeros(num_knobs, dtype=int))


class _StateOfOneNumber(_Good):
    def init(self, num_knobs: int) -> Any:
        return _State(np.zeros(1 + num_knobs))


class _StateTurnsNan(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        _, decision = super().update(state, evidence)
        return _State(state.velocity + (np.nan if not np.isfinite(evidence.losses).all() else 0.0)), decision


class _Coasts(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        new, _ = super().update(state, evidence)
        return new, self.decide(new.velocity)


class _NoDecision(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Any]:
        return state, np.ones(len(evidence.multipliers))


class _TrustsSlopes(_Good):
    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        if evidence.slopes is None:
            return super().update(state, evidence)
        return state, self.decide(-evidence.slopes[0] / evidence.slopes[1])


BROKEN: dict[type[_Good], str] = {
    _RemembersItself: "update must be pure: the same state and evidence gave two different results",
    _DrawsRandomNumbers: "update must be pure",
    _WritesIntoTheState: "update must not change the state it is given",
    _WritesIntoTheLosses: "update must not change the evidence it is given",
    _OneFactor: r"factors must have shape \(3,\), but got \(1,\) \(with 3 knobs and 2 replicas\)",
    _Negative: "factors must be positive and finite, but got array",
    _SpreadsNan: "factors must be positive and finite, but got array",
    _FollowsReplica0: "permuting the replicas must change nothing, but factors",
    _ReadsTheLevel: "adding a constant to all losses must change nothing, but factors",
    _PrefersKnob0: r"permuting the knobs must permute the decision, but .* \(with 3 knobs",
    _InfoOfArrays: r"info\['z'\] must be a tuple of floats, but got array",
    _InfoOfNumpyFloats: r"info\['z'\] must be a tuple of floats, but got \(np.float64",
    _StateOfADict: "the state must be a NamedTuple, but got dict",
    _StateOfIntegers: r"state field 'velocity' must be a float64 array of 1 or 1 rows",
    _StateOfOneNumber: r"state field 'velocity' must be a float64 array of 1 or 1 rows, but got array\(\[0., 0.\]\)",
    _StateTurnsNan: "state field 'velocity' must stay finite, but got",
    _Coasts: "a round without a finite loss must move nothing, but got factors",
    _NoDecision: "update must return a Decision, but got ndarray",
    _TrustsSlopes: "factors must be positive and finite, but got",
}


def test_a_good_controller_passes() -> None:
    check_controller(_Good)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_controller_is_named(broken: type[_Good]) -> None:
    with pytest.raises(AssertionError, match=BROKEN[broken]):
        check_controller(broken)
