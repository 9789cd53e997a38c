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
"""Standard errors, of both together, by which held-out loss has to be above its lowest to be called worse."""


class Journal:
    """What a run has written down so far.

    Attributes:
        curve: the learning rates.
        sinks: called with each record.
        lowest: step, mean and standard error of the lowest mean held-out loss so far; None without a probe.
        worse_since: that step, where the mean is above it beyond doubt by now; None where it is not.
        resumed_from: where the next round is the first after a resume on another number of replicas, that of before.
    """

    def __init__(self) -> None:
        self._records: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self.curve = Curve()
        self.sinks: list[Callable[[RoundRecord], object]] = []
        self.lowest: tuple[int, float, float] | None = None
        self.worse_since: int | None = None
        self.resumed_from: int | None = None

    @property
    def records(self) -> list[RoundRecord]:
        return list(self._records)

    def say(self, verdict: Verdict) -> None:
        """Tell the user what was done to the run."""
        if not verdict.go_back:  # rounds that are undone are warned of
            for event in verdict.events:
                tell(event)

    def write(self, record: RoundRecord) -> None:
        """A round has ended."""
        self._records.append(record)
        self.curve.add(record.step, record.base_values)
        if record.held_out is not None and not math.isnan(record.held_out.loss + record.held_out.mean):
            self._follow(record.step, record.held_out.mean, record.held_out.mean_error)
        self.resumed_from = None
        for sink in self.sinks:
            sink(record)

    def _follow(self, step: int, mean: float, error: float) -> None:
        """A new mean of the held-out loss."""
        if self.lowest is None or mean < self.lowest[1]:
            self.lowest = (step, mean, error)
        best, lowest, its_error = self.lowest
        self.worse_since = best if mean - lowest > WORSE * math.hypot(error, its_error) else None
