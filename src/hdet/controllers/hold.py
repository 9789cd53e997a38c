"""The controller that never moves: fan-out and converge without auto-LR."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdet.controllers.base import Decision, Evidence


class HoldState(NamedTuple):
    """Nothing to remember."""


class Hold:
    """Leaves every base value where the schedule puts it."""

    def init(self, num_knobs: int) -> HoldState:
        return HoldState()

    def update(self, state: HoldState, evidence: Evidence) -> tuple[HoldState, Decision]:
        return state, Decision(np.ones(len(evidence.multipliers)), {})
