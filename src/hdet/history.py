"""One record a round: what every replica did, what it showed, what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Numbers = tuple[float, ...]


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
        distance: largest Euclidean distance between a healthy replica's weights and their mean.
        converge_s: seconds this replica spent in the converge.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return asdict(self)
