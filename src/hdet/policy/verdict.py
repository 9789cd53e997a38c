"""What a round has shown, and what follows from it: the two sides of the decision at its end."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import BoolArray, FloatArray
from hdet.policy.level import Sizes
from hdet.policy.panel import Looked


@dataclass(frozen=True)
class Observed:
    """What a round has shown by its end.

    Attributes:
        step: optimizer steps taken.
        losses: mean loss of each replica over the round; NaN where it has none.
        rate: the first param group's base learning rate in the round's last step.
        scheduled: what the schedule alone gave it.
        sizes: of weights and update in the round's last step, where they were measured.
        finite: which replicas' weights are finite.
        losses_given: whether any replica was given a loss.
        compared: what replicas are compared by, where it is not ``losses``: their losses on held-out data.
        trained: mean training loss of each replica late in the round, where they are compared by another.
        slopes: of the loss over each learning rate's logarithm, and their standard errors, where they are measured.
        whole: the same of all learning rates at once.
        last: whether training ends here.
    """

    step: int
    losses: FloatArray
    finite: BoolArray
    rate: float = 1.0
    scheduled: float = 1.0
    sizes: Sizes | None = None
    losses_given: bool = True
    compared: FloatArray | None = None
    trained: FloatArray | None = None
    slopes: tuple[FloatArray, FloatArray] | None = None
    whole: tuple[float, float] | None = None
    last: bool = False


@dataclass(frozen=True)
class Verdict:
    """What follows from a round.

    Attributes:
        index: number of the round that has ended.
        go_back: whether it has to be undone.
        finite: which replicas' weights are finite.
        quarantined: which are left out although their weights are finite, because their loss has exploded.
        losses: what replicas were compared by; NaN for those that are left out.
        new_anchor: whether the anchor moves to the new centre.
        held: whether base values held still because the rollbacks are spent.
        num_rollbacks: rounds undone so far.
        scales, multipliers, positions: where learning rates and knobs stood during the round; positions by replica.
        looked: what the controllers looked at.
        phase: what the learning rate was doing: in its ``warm-up``, finding its ``level``, on ``hold``, or nothing.
        events: what was done to the run, in plain English.
        messages: what the user should be told now.
        keep: whether to keep a copy of the weights, to go back to.
    """

    index: int
    go_back: bool
    finite: BoolArray
    quarantined: BoolArray
    losses: FloatArray
    new_anchor: bool
    held: bool
    num_rollbacks: int
    scales: FloatArray
    multipliers: FloatArray
    positions: tuple[FloatArray, ...]
    looked: Looked
    phase: str
    events: tuple[str, ...]
    messages: tuple[str, ...]
    keep: bool

    @property
    def healthy(self) -> BoolArray:
        """Who counts in the mean."""
        return self.finite & ~self.quarantined
