"""One record a round: what every replica did, what it showed, what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Numbers = tuple[float, ...]


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
            ``delta`` (Eq. 6) and ``velocity`` (Eq. 7), both relative to the base value. Empty while it is not acting.
        unhealthy: replicas whose weights were not finite and were left out of the mean.
        num_rollbacks: how often the run has been set back to its last healthy centre, this round included.
        held: whether base values held still in this round because ``max_rollbacks`` were spent.
        probes: loss of each replica on the probe; empty without one, or while no controller is acting.
        knobs: the knobs beside the learning rate, by name.
        distance: largest Euclidean distance between a healthy replica's weights and their mean; NaN where the mean was
            still on its way.
        converge_s: seconds this replica spent in the converge, waiting for others included.
        quarantined: replicas left out because their loss had exploded.
        averaged: whose mean was taken: ``"all"`` replicas', the ``"node"``'s, or ``"none"``: they are equal, or the
            round was undone.
        num_updates: calls of each replica's optimizer in the round; a step that a GradScaler skips is none. Empty in a
            run without a process group.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return asdict(self)
