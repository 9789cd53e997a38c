"""The records of a run's rounds: kept, drawn as a curve, and passed on to whoever listens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from hdet.engine.curve import Curve
from hdet.history import RoundRecord
from hdet.notices import tell
from hdet.policy.verdict import Verdict

HISTORY_ROUNDS = 1000
WORSE = 2.0
"""Standard errors of the held-out slope above 0, beyond which more training makes held-out loss worse."""


class Journal:
    """What a run has written down so far.

    Attributes:
        curve: the learning rates since its climb.
        sinks: called with each record.
        worse_since: step since which held-out data have asked for less training; None where they do not.
        resumed_from: where the next round is the first after a resume on another number of replicas, that of before.
    """

    def __init__(self) -> None:
        self._records: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self.curve = Curve()
        self.sinks: list[Callable[[RoundRecord], object]] = []
        self.worse_since: int | None = None
        self.resumed_from: int | None = None

    @property
    def records(self) -> list[RoundRecord]:
        return list(self._records)

    def say(self, verdict: Verdict) -> None:
        """Tell the user what was done to the run in its climb."""
        if verdict.phase != "climb":
            return
        for event in verdict.events:
            if not self._records or event not in self._records[-1].events:  # a model may be broken for long
                tell(event)

    def write(self, record: RoundRecord, *, climbing: bool) -> None:
        """A round has ended. ``climbing``: whether the next one is of the climb, too."""
        self._records.append(record)
        if record.phase != "climb":
            self.curve.add(record.step, record.base_values)
        elif not climbing:
            self.curve.begin(record.step, record.base_values)
        if record.held_out is not None and not math.isnan(record.held_out.slope):
            worse = record.held_out.z > WORSE
            self.worse_since = (self.worse_since or record.step) if worse else None
        self.resumed_from = None
        for sink in self.sinks:
            sink(record)
