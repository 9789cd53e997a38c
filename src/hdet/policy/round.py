"""The end of a round, decided from numbers alone: what was observed in, one verdict out.

The round loop calls it for real processes, the lab's stacked engine for runs simulated side by side. It owns everything
that such a decision needs: when rounds end, the steering, what undoes a round, and who is left out of the mean.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hdet.checks import BoolArray, FloatArray
from hdet.policy.panel import Looked
from hdet.policy.quarantine import Quarantine, QuarantineState, pack_quarantine, unpack_quarantine
from hdet.policy.rollback import CUT, NO_ROLLBACK, BrokenError, Rollback
from hdet.policy.steering import Steering


@dataclass(frozen=True)
class Observed:
    """What a round has shown by its end.

    Attributes:
        step: optimizer steps taken.
        losses: mean loss of each replica over the round; NaN where it has none.
        finite: which replicas' weights are finite.
        losses_given: whether any replica was given a loss.
        compared: what replicas are compared by, where it is not ``losses``: their losses on held-out data.
        slopes: of the loss over each learning rate's logarithm, and their standard errors, where they are measured.
        last: whether training ends here.
    """

    step: int
    losses: FloatArray
    finite: BoolArray
    losses_given: bool = True
    compared: FloatArray | None = None
    slopes: tuple[FloatArray, FloatArray] | None = None
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
        messages: what the user should be told.
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
    messages: tuple[str, ...]

    @property
    def healthy(self) -> BoolArray:
        """Who counts in the mean."""
        return self.finite & ~self.quarantined


class RoundPolicy:
    """Decides when a round ends and what follows from it.

    Args:
        steering: multipliers, scales and controllers.
        interval: T, the optimizer steps of a round.
        acting: the controllers act at rounds that end after the first of these steps, and up to the second.
        rollback: what calls a round broken; None to undo nothing.
        quarantine: robust standard deviations above the median at which a replica's loss has exploded; None for never.
        anchored: whether effects are measured from an anchor.
        anchor_rounds: renew the anchor every so many rounds; None for never.
        repairable: whether a replica that is left out can be given the others' weights; another shard's cannot.
    """

    def __init__(
        self,
        steering: Steering,
        *,
        interval: int,
        acting: tuple[float, float],
        rollback: Rollback | None = None,
        quarantine: float | None = None,
        anchored: bool = False,
        anchor_rounds: int | None = None,
        repairable: bool = True,
    ) -> None:
        self.steering = steering
        self.interval = interval
        self.acting = acting
        self.rollback = rollback
        self.quarantine = Quarantine(quarantine) if quarantine is not None and repairable else None
        self.quarantine_state = QuarantineState()
        self.anchored = anchored
        self.anchor_rounds = anchor_rounds
        self.repairable = repairable

    # -- when ---------------------------------------------------------------------------------------------------

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether a round ends with this step."""
        return last or step % self.interval == 0

    def num_steps(self, step: int) -> int:
        """How many steps the round that ``step`` belongs to has taken by then."""
        return step - max(step - 1, 0) // self.interval * self.interval

    def is_acting(self, step: int) -> bool:
        """Whether a controller will act on a round that ends here."""
        steering = self.steering
        has_controller = steering.controller is not None or steering.panel.controller is not None
        return has_controller and self.acting[0] < step <= self.acting[1] and not self._held

    @property
    def _held(self) -> bool:
        return self.rollback is not None and self.rollback.budget.spent

    # -- what ---------------------------------------------------------------------------------------------------

    def end_round(self, seen: Observed) -> Verdict:
        """The verdict on the round that ends; the next one begins. Raises where training cannot go on."""
        steering, held, acting = self.steering, self._held, self.is_acting(seen.step)
        quarantined = self._exploded(np.where(seen.finite, seen.losses, np.nan))
        healthy = seen.finite & ~quarantined
        losses = np.where(healthy, seen.losses, np.nan)
        compared = losses if seen.compared is None else np.where(healthy, seen.compared, np.nan)
        index, scales, multipliers = steering.round_index, steering.scales, steering.multipliers
        positions = tuple(steering.positions(r) for r in range(steering.num_replicas))
        go_back = self._is_broken(seen, losses, healthy)
        looked, fallen = Looked(), False
        messages: tuple[str, ...] = ()
        if go_back:
            assert self.rollback is not None
            steering.cut(CUT)
            messages = self.rollback.take()
        elif acting:
            looked = steering.decide(compared, seen.slopes)
            fallen = self.anchored and steering.wants_new_anchor()
        renewed = self.anchored and self.anchor_rounds is not None and (index + 1) % self.anchor_rounds == 0
        steering.next_round()
        return Verdict(
            index=index,
            go_back=go_back,
            finite=seen.finite,
            quarantined=quarantined,
            losses=compared,
            new_anchor=fallen or (renewed and not seen.last),
            held=held,
            num_rollbacks=0 if self.rollback is None else self.rollback.num_rollbacks,
            scales=scales,
            multipliers=multipliers,
            positions=positions,
            looked=looked,
            messages=messages,
        )

    def require_mean(self, healthy: BoolArray, step: int) -> None:
        """Raise where there is nothing to average: nobody is healthy, or those who are not cannot be repaired."""
        if not self._has_mean(healthy):
            broken = np.flatnonzero(~healthy).tolist()
            who = f"all {len(healthy)} replicas" if not healthy.any() else f"ranks {broken}, which nobody else has,"
            raise BrokenError(
                f"the weights of {who} are not finite at the converge of step {step}; "
                "there is nothing to average: resume from a checkpoint with a lower learning rate, or pass "
                "faults=Faults(rollback=True), or faults=Faults(skip_nonfinite=True)"
            )

    def _has_mean(self, healthy: BoolArray) -> bool:
        return bool(healthy.any() if self.repairable else healthy.all())

    def _is_broken(self, seen: Observed, losses: FloatArray, healthy: BoolArray) -> bool:
        if self.rollback is None:
            self.require_mean(healthy, seen.step)
            return False
        return self.rollback.is_broken(
            losses, weights_fine=self._has_mean(healthy), losses_given=seen.losses_given, step=seen.step
        )

    def _exploded(self, losses: FloatArray) -> BoolArray:
        if self.quarantine is None:
            return np.zeros(len(losses), dtype=bool)
        self.quarantine_state, exploded = self.quarantine.update(self.quarantine_state, losses)
        return exploded

    def digest(self) -> int:
        """A number that differs between replicas which do not continue from the same state."""
        numbers = [self.steering.seed, self.steering.round_index, *self.steering.scales.tolist()]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.steering.state_dict(),
            **(self.rollback.state_dict() if self.rollback is not None else NO_ROLLBACK),
            "quarantine": pack_quarantine(self.quarantine_state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state that cannot be used raises ValueError or KeyError and changes nothing."""
        quarantine_state = unpack_quarantine(state["quarantine"])
        Rollback.check_state(state)
        self.steering.load_state_dict(state)  # checks everything before it changes anything
        self.quarantine_state = quarantine_state
        if self.rollback is not None:
            self.rollback.load_state_dict(state)
