"""The end of a round, decided from numbers alone: what was observed in, one verdict out.

The round loop calls it for real processes, the lab's stacked engine for runs simulated side by side. It owns everything
that such a decision needs: when rounds end, the steering, what undoes a round, and who is left out of the mean.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.checks import BoolArray, FloatArray
from hdet.policy.climb import WHY, Climb
from hdet.policy.panel import Looked
from hdet.policy.quarantine import Quarantine, QuarantineState, pack_quarantine, unpack_quarantine
from hdet.policy.rollback import CUT, NO_ROLLBACK, BrokenError, Rollback
from hdet.policy.steering import Steering
from hdet.policy.verdict import Observed, Verdict

MIN_STEPS = 4
"""Of the first round after a climb, which ends with a whole interval."""


class RoundPolicy:
    """Decides when a round ends and what follows from it.

    Args:
        steering: multipliers, scales and controllers.
        interval: T, the optimizer steps of a round.
        acting: the controllers act at rounds that end after the first of these steps, and up to the second.
        rollback: what calls a round broken; None to undo nothing.
        climb: how the learning rates are found first; None to start from where they are.
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
        climb: Climb | None = None,
        quarantine: float | None = None,
        anchored: bool = False,
        anchor_rounds: int | None = None,
        repairable: bool = True,
    ) -> None:
        self.steering = steering
        self.interval = interval
        self.acting = acting
        self.rollback = rollback
        self.climb = climb
        if climb is not None:
            self._follow(climb, float(steering.scales[0]))
            climb.supported = climb.scale
            steering.flat = True
        self.quarantine = Quarantine(quarantine) if quarantine is not None and repairable else None
        self.quarantine_state = QuarantineState()
        self.anchored = anchored
        self.anchor_rounds = anchor_rounds
        self.repairable = repairable

    # -- when ---------------------------------------------------------------------------------------------------

    @property
    def climbing(self) -> bool:
        """Whether every step is a round of its own."""
        return self.climb is not None and not self.climb.is_over

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether a round ends with this step."""
        if last or self.climbing:
            return True
        return step % self.interval == 0 and step >= self._first_end

    @property
    def _first_end(self) -> int:
        """The first step in which a whole round may end: after a climb, not before there are samples enough."""
        if self.climb is None or self.climb.ended is None:
            return 0
        return self.climb.ended + min(MIN_STEPS, self.interval)

    def num_steps(self, step: int) -> int:
        """How many steps the round that ``step`` belongs to has taken by then."""
        if self.climbing:
            return 1
        begun = max(step - 1, 0) // self.interval * self.interval
        if self.climb is not None and self.climb.ended is not None and begun < self._first_end:
            begun = self.climb.ended
        return step - begun

    def is_acting(self, step: int) -> bool:
        """Whether a controller will act on a round that ends here."""
        steering = self.steering
        has_controller = steering.controller is not None or steering.panel.controller is not None
        in_time = self.acting[0] < step <= self.acting[1]
        return has_controller and in_time and not self._held and not self.climbing

    @property
    def _held(self) -> bool:
        return self.rollback is not None and self.rollback.budget.spent

    # -- what ---------------------------------------------------------------------------------------------------

    def end_round(self, seen: Observed) -> Verdict:
        """The verdict on the round that ends; the next one begins. Raises where training cannot go on."""
        steering, held, climbing = self.steering, self._held, self.climbing
        acting = self.is_acting(seen.step)
        quarantined = self._exploded(np.where(seen.finite, seen.losses, np.nan))
        healthy = seen.finite & ~quarantined
        losses = np.where(healthy, seen.losses, np.nan)
        compared = losses if seen.compared is None else np.where(healthy, seen.compared, np.nan)
        index, scales, multipliers = steering.round_index, steering.scales, steering.multipliers
        positions = tuple(steering.positions(r) for r in range(steering.num_replicas))
        looked, fallen = Looked(), False
        events: tuple[str, ...] = ()
        messages: tuple[str, ...] = ()
        if climbing:
            go_back, events, messages = self._climb_on(seen, losses, healthy)
            looked = Looked({"slope": tuple(seen.slopes[0].tolist())} if seen.slopes is not None else {})
        elif go_back := self._is_broken(seen, losses, healthy):
            assert self.rollback is not None
            steering.cut(CUT)
            done, messages = self.rollback.take(seen.step, is_cut=bool((steering.scales < scales).any()))
            events = (done,)
        elif acting:
            end = self.acting[1]
            progress = None if math.isinf(end) else seen.step / end
            looked = steering.decide(compared, seen.slopes, whole=seen.whole, progress=progress, trained=seen.trained)
            fallen = self.anchored and steering.wants_new_anchor()
        if seen.last and self.rollback is not None and self.rollback.num_rollbacks > 1:
            messages += (f"{self.rollback.num_rollbacks} rounds of this run were undone; scheduler.history says why",)
        renewed = self.anchored and self.anchor_rounds is not None and (index + 1) % self.anchor_rounds == 0
        steering.next_round()
        return Verdict(
            index=index,
            go_back=go_back,
            finite=seen.finite,
            quarantined=quarantined,
            losses=compared,
            new_anchor=fallen or (renewed and not seen.last and not climbing),
            held=held,
            num_rollbacks=0 if self.rollback is None else self.rollback.num_rollbacks,
            scales=scales,
            multipliers=multipliers,
            positions=positions,
            looked=looked,
            phase="climb" if climbing else "level" if acting else "hold" if seen.step > self.acting[1] else "",
            events=events,
            messages=messages,
            keep=not climbing and self.rollback is not None and not self.rollback.doubtful,
            undoes=self.climbing or self.rollback is not None,
        )

    def _climb_on(
        self, seen: Observed, losses: FloatArray, healthy: BoolArray
    ) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
        """One step of the climb: whether the first weights come back, what was done, and what to say."""
        climb, steering = self.climb, self.steering
        assert climb is not None
        known = losses[np.isfinite(losses)]
        slopes = np.array([]) if seen.slopes is None else seen.slopes[0][np.isfinite(seen.slopes[0])]
        fine = self._has_mean(healthy) and (len(known) > 0 or not seen.losses_given)
        before, starts = climb.scale, climb.num_starts
        then = climb.update(
            seen.step,
            float(known.mean()) if len(known) else math.nan,
            seen.whole[0] if seen.whole is not None else float(slopes.sum()) if len(slopes) else math.nan,
            seen.rate,
            fine=fine,
            top=steering.at_top,
        )
        self._follow(climb, before)
        if then == "go on":
            if seen.last:  # of a run that is shorter than its climb
                self.require_mean(healthy, seen.step)
            return False, (), ()
        if then == "begin again":
            why = "from a hundredth" if climb.num_starts > starts else "after a step that was not finite"
            return True, (f"the climb begins again, {why}, at the first weights",), ()
        if self.rollback is not None and climb.still:
            self.rollback.expect(*climb.start_and_noise())
        rate = seen.rate * climb.scale / before
        steering.begin_ramp(climb.warm_steps)
        assert climb.ending is not None
        said = (
            f"the climb is over after {seen.step - climb.begun} steps at a learning rate of {rate:.3g}, because "
            f"{WHY[climb.ending]}; weights and optimizer state of step {climb.begun} are back"
        )
        return True, (said,), (said,) if climb.ending in ("flat", "blind") else ()

    def _follow(self, climb: Climb, before: float) -> None:
        """Move the learning rates as the climb has; it stays inside their bounds."""
        was, wanted = float(self.steering.scales[0]), climb.scale / before
        self.steering.multiply(wanted)
        moved = float(self.steering.scales[0]) / was
        if not math.isclose(moved, wanted):
            climb.scale = before * moved

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
        numbers = [
            self.steering.seed,
            0.0 if self.climb is None else self.climb.scale,
            self.steering.round_index,
            self.acting[1],
            *self.steering.scales.tolist(),
        ]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    def climb_left(self, step: int) -> int:
        """How many steps the climb may still take."""
        return 0 if self.climb is None else max(self.climb.begun + self.climb.far_steps - step, 0)

    def hold_from(self, step: float) -> None:
        """No controller acts on rounds that end later."""
        self.acting = (self.acting[0], step)

    def climb_again(self, step: int) -> None:
        """Start the climb over from here."""
        assert self.climb is not None
        before, self.climb = self.climb, Climb(step=step)
        scale = before.scale
        for name in ("max_steps", "far_steps", "warm_steps"):
            setattr(self.climb, name, getattr(before, name))
        self._follow(self.climb, scale)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.steering.state_dict(),
            **(self.rollback.state_dict() if self.rollback is not None else NO_ROLLBACK),
            "quarantine": pack_quarantine(self.quarantine_state),
            "climb": None if self.climb is None else self.climb.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state that cannot be used raises ValueError or KeyError and changes nothing."""
        quarantine_state = unpack_quarantine(state["quarantine"])
        Rollback.check_state(state)
        climb = Climb.check_state(state["climb"])
        self.steering.load_state_dict(state)  # checks everything before it changes anything
        self.quarantine_state = quarantine_state
        if self.rollback is not None:
            self.rollback.load_state_dict(state)
        # A run that is continued is past its climb, unless its own was under way.
        self.climb = None if climb is None else Climb()
        if self.climb is not None and climb is not None:
            self.climb.load_state_dict(climb)
