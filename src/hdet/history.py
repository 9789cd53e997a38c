"""One record a round: what every replica did, what it showed, what was decided; and the history made of them."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hdet.checks import FloatArray, mapping_of, numbers_of
from hdet.notices import is_first_rank, tell
from hdet.policy.round import Verdict
from hdet.policy.steering import KnobEvidence

Numbers = tuple[float, ...]

HISTORY_ROUNDS = 1000
MAX_POINTS = 512
"""Of the curve of learning rates."""


class HeldOut(NamedTuple):
    """What held-out data show of the run so far, in the mean of the last samples.

    Attributes:
        loss: on held-out data, in the round's samples; NaN where there was none.
        slope: of that loss over the logarithm of all learning rates since the anchor; positive where a lower learning
            rate would have reduced the loss.
        standard_error: of the slope; NaN, like the slope, while there are fewer than three samples.
        z: their ratio; 0 while they are not known.
        mean: of the loss over about a dozen samples, the last of which count most; NaN while there are less than three.
        mean_error: the standard error of that mean.
    """

    loss: float
    slope: float
    standard_error: float
    z: float
    mean: float = math.nan
    mean_error: float = math.nan


@dataclass(frozen=True)
class KnobRecord:
    """A knob beside the learning rate, in one round.

    Attributes:
        values: what it was on each replica.
        base: the shared centre, after the controller has acted.
        slope, standard_error, z: the slope of the loss over the knob's position, how sure it is, and their ratio; NaN
            while the knob cannot be told from others, or is not adapted.
    """

    values: Numbers
    base: float
    slope: float
    standard_error: float
    z: float


@dataclass(frozen=True)
class RoundRecord:
    """One round, the same on every replica except for ``converge_s``.

    Attributes:
        index: number of the round, from 0.
        step: optimizer steps taken when it ended.
        losses: mean loss of each replica over the round; NaN where none was seen.
        values: ``values[k][r]``, what knob k (for the schedulers: the learning rate of param group k) was on replica r
            in the round's last step.
        base_values: the shared centre of each knob at that step, after the controller has acted.
        scales: the learned part of each base value: ``base value = schedule * scale``.
        control: what the controller looked at; for the paper's controller ``weights`` per replica, and per knob
            ``delta`` (Eq. 6) and ``velocity`` (Eq. 7), relative to the base value unless it is told otherwise. Empty
            while it is not acting.
        unhealthy: replicas whose weights were not finite and were left out of the mean.
        num_rollbacks: how often the run has been set back to its last healthy centre, this round included.
        held: whether base values held still in this round because ``max_rollbacks`` were spent.
        probes: loss of each replica on the probe; empty without one, or while no controller is acting.
        knobs: the knobs beside the learning rate, by name.
        distance: largest Euclidean distance between a healthy replica's weights and their mean.
        converge_s: seconds this replica spent in the converge, waiting for others included.
        quarantined: replicas left out because their loss had exploded.
        averaged: ``"all"``: replicas are at their mean; ``"pull"``: they are drawn towards it, as elastic replicas are;
            ``"none"``: they are equal, or the round was undone.
        num_updates: calls of each replica's optimizer in the round; a step that a GradScaler skips is none. Empty in a
            run without a process group.
        phase: what the learning rates were doing: in their ``"warm-up"``, finding their ``"level"``, on ``"hold"``
            for the rest of the run, or ``""``.
        events: what was done to the run in this round, in plain English, as a rollback.
        held_out: what held-out data show of the learning rate, where ``probe=`` is asked about it; None otherwise.
        evaluation: the validation loss that was given to ``evaluated`` since the round before, or the mean of several;
            None without. Negative where higher is better.
        resumed_from: in the first round after a resume with another number of replicas, how many there were before.
    """

    index: int
    step: int
    losses: Numbers
    values: tuple[Numbers, ...]
    base_values: Numbers
    scales: Numbers
    control: Mapping[str, Numbers]
    unhealthy: tuple[int, ...]
    num_rollbacks: int
    distance: float
    converge_s: float
    probes: Numbers = ()
    knobs: Mapping[str, KnobRecord] = field(default_factory=dict)
    quarantined: tuple[int, ...] = ()
    averaged: str = "all"
    num_updates: tuple[int, ...] = ()
    resumed_from: int | None = None
    held: bool = False
    phase: str = ""
    events: tuple[str, ...] = ()
    held_out: HeldOut | None = None
    evaluation: float | None = None

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        *,
        scales: FloatArray,
        schedule: FloatArray,
        knob_of_group: Sequence[int],
        positions: FloatArray,
        knobs: Mapping[str, Callable[[float], float]],
        learned: Mapping[str, KnobRecord],
        **measured: Any,
    ) -> RoundRecord:
        """The record of the round that ``verdict`` has ended.

        Args:
            verdict: on the round.
            scales: of the learning rates, as they stand since.
            schedule: what the schedule alone gave each param group.
            knob_of_group: which of the steering's learning rates each param group has.
            positions: of the knobs beside them, likewise.
            knobs: of each of these, its value at a position.
            learned: knobs that are learned to first order, by name.
            measured: the other attributes of a record.
        """
        groups = list(knob_of_group)
        return cls(
            index=verdict.index,
            values=tuple(
                tuple((value * verdict.scales[k] * verdict.multipliers[k]).tolist())
                for value, k in zip(schedule, groups, strict=True)
            ),
            base_values=tuple((schedule * scales[groups]).tolist()),
            scales=tuple(scales.tolist()),
            control=dict(verdict.control),
            unhealthy=tuple(np.flatnonzero(~verdict.finite).tolist()),
            quarantined=tuple(np.flatnonzero(verdict.quarantined).tolist()),
            num_rollbacks=verdict.num_rollbacks,
            held=verdict.held,
            phase=verdict.phase,
            events=verdict.events,
            knobs={**_knob_records(verdict, positions, knobs), **learned},
            **measured,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        held_out = None if self.held_out is None else self.held_out._asdict()
        return asdict(self) | {"held_out": held_out}


def _knob_records(
    verdict: Verdict, base: FloatArray, knobs: Mapping[str, Callable[[float], float]]
) -> dict[str, KnobRecord]:
    seen = verdict.knobs or (KnobEvidence(),) * len(knobs)
    return {
        name: KnobRecord(
            tuple(value_at(float(place[i])) for place in verdict.positions),
            value_at(float(base[i])),
            *seen[i],
        )
        for i, (name, value_at) in enumerate(knobs.items())
    }


class Curve:
    """Learning rates of each param group, and losses, at the ends of rounds. When full, every other point goes."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[list[float]] = []
        self.losses: list[float] = []

    def add(self, step: int, values: Sequence[float], loss: float) -> None:
        for row in self.values:  # param groups may have joined
            row += [math.nan] * (len(values) - len(row))
        self.steps.append(step)
        self.values.append(list(values))
        self.losses.append(loss)
        if len(self.steps) > MAX_POINTS:
            # The first and the last stay.
            self.steps, self.values, self.losses = self.steps[::2], self.values[::2], self.losses[::2]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "values": [list(row) for row in self.values],
            "losses": list(self.losses),
        }

    @staticmethod
    def from_state(state: Any) -> Curve:
        """ValueError or KeyError where the state cannot be used."""
        state = mapping_of(state, "curve")
        steps = numbers_of(state["steps"], "steps of the curve", None, low=0)
        if len(steps) > MAX_POINTS + 1 or (steps[1:] <= steps[:-1]).any():
            raise ValueError(f"steps of the curve must be at most {MAX_POINTS + 1} that rise, but got {len(steps)}")
        found = Curve()
        if len(steps):
            width = len(state["values"][0]) if state["values"] else 0
            values = numbers_of(state["values"], "values of the curve", len(steps), width, finite=False)
            found.steps, found.values = [int(step) for step in steps], values.tolist()
            losses = state.get("losses", [math.nan] * len(steps))  # older states have none
            found.losses = numbers_of(losses, "losses of the curve", len(steps), finite=False).tolist()
        return found


class History:
    """What a run has written down so far.

    Attributes:
        curve: the learning rates.
        sinks: called with each record.
        resumed_from: where the next round is the first after a resume on another number of replicas, that of before.
        untold: records that are on their way to a sink each.
    """

    def __init__(self) -> None:
        self._records: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self.curve = Curve()
        self.sinks: list[Callable[[RoundRecord], object]] = []
        self.resumed_from: int | None = None
        self.untold: deque[tuple[Callable[[RoundRecord], object], RoundRecord]] = deque()

    @property
    def records(self) -> list[RoundRecord]:
        return list(self._records)

    def say(self, verdict: Verdict, *, stacklevel: int) -> None:
        """Tell the user what was done to the run, which is the same on all ranks."""
        for message in verdict.messages if verdict.messages and is_first_rank() else ():
            warnings.warn(message, stacklevel=stacklevel)
        if not verdict.messages and not verdict.go_back:  # rounds that are undone are warned of
            for event in verdict.events:
                tell(event)

    def write(self, record: RoundRecord) -> None:
        """A round has ended. Sinks learn of it by :meth:`deliver`, once it cannot be taken back any more."""
        self._records.append(record)
        finite = [loss for loss in record.losses if math.isfinite(loss)]
        self.curve.add(record.step, record.base_values, sum(finite) / len(finite) if finite else math.nan)
        self.resumed_from = None
        self.untold.extend((sink, record) for sink in self.sinks)

    def deliver(self) -> None:
        """Each record reaches each sink at most once, whatever is raised there."""
        while self.untold:
            sink, record = self.untold.popleft()
            sink(record)

    def remember(self) -> tuple[Any, ...]:
        """What :meth:`write` changes."""
        last = self._records[-1] if self._records else None
        return last, self.curve.state_dict(), self.resumed_from, self.untold.copy()

    def put_back(self, before: tuple[Any, ...]) -> None:
        """As it was at :meth:`remember`."""
        last, curve, self.resumed_from, self.untold = before
        self.curve.steps, self.curve.values, self.curve.losses = curve["steps"], curve["values"], curve["losses"]
        if self._records and self._records[-1] is not last:
            self._records.pop()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Older versions read the last two, of a flag that was up in 2 of 56 runs.
        return {"curve": self.curve.state_dict(), "worse_since": None, "lowest": []}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> History:
        """A history without records; ValueError or KeyError where the state cannot be used."""
        found = History()
        found.curve = Curve.from_state(state["curve"])
        return found

    def go_on_from(self, saved: History, resumed_from: int | None) -> None:
        """Continue from what a state held; records and sinks stay."""
        self.curve, self.resumed_from = saved.curve, resumed_from
