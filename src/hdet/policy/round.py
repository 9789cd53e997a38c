"""The end of a round, decided from numbers alone: what was observed in, one verdict out.

The round loop calls it for real processes; a simulation can call it for runs side by side. It owns everything
that such a decision needs: when rounds end, the steering, what undoes a round, and who is left out of the mean.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hdet.checks import BoolArray, FloatArray, flag_of, mapping_of, number, numbers_of, shown, whole_of
from hdet.policy.evaluations import BEST_SHARE, DECAY_SHARE, EARLY, STRETCH, Evaluations
from hdet.policy.level import NUM_FIRST, Level, Sizes, beside_weights
from hdet.policy.quarantine import Quarantine, QuarantineState, pack_quarantine, unpack_quarantine
from hdet.policy.rollback import CUT, NO_ROLLBACK, BrokenError, Rollback
from hdet.policy.steering import KnobEvidence, Steering

NO_LOSS = (
    "no loss was given to step() so far: the learning rate stays near its first level, and broken rounds go unnoticed "
    "unless weights are not finite. Write scheduler.step(loss); in a framework, use its callback in hdet.integrations"
)
LARGEST_LOSS = 1e100
"""A larger one is taken for infinite: its square would be."""
FEW = 2.0
"""What the noise of so few first losses is multiplied by where a mistake would be dear."""
CHOSEN = 3.0
"""Times a schedule that somebody has chosen: up to here progress leads to the first level where that is higher."""
MAX_ELAPSED = 0.7
"""Of the logarithm of the time, in one round: the first ones would count for too much."""


@dataclass(frozen=True)
class Seen:
    """What a round has shown by its end.

    Attributes:
        step: optimizer steps taken.
        losses: mean loss of each replica over the round; NaN where it has none.
        rate: the first param group's base learning rate in the round's last step.
        rates: the same of each learning rate, shape (K,).
        scheduled: what the schedule alone gave it.
        sizes: of weights and update in the round's last step, where they were measured.
        finite: which replicas' weights are finite.
        losses_given: whether any replica was given a loss.
        of_one_model: which replicas were given losses of the one model that all of them hold; None where they differ.
        compared: what replicas are compared by, where it is not ``losses``: their losses on held-out data.
        trained: mean training loss of each replica late in the round, where they are compared by another.
        slopes: of the loss over each learning rate's logarithm, and their standard errors, where they are measured.
        total_slope: the same of all learning rates at once.
        frozen: whether the scale is to hold still from here on.
        evaluation: a validation loss; NaN where there is none since the last round.
        mode_given: whether it is sure that lower is better.
        left: steps of the run after this one.
        last: whether training ends here.
    """

    step: int
    losses: FloatArray
    finite: BoolArray
    rate: float = 1.0
    scheduled: float = 1.0
    sizes: Sizes | None = None
    losses_given: bool = True
    of_one_model: BoolArray | None = None
    compared: FloatArray | None = None
    trained: FloatArray | None = None
    slopes: tuple[FloatArray, FloatArray] | None = None
    total_slope: tuple[float, float] | None = None
    frozen: bool = False
    evaluation: float = math.nan
    mode_given: bool = False
    left: float = math.inf
    last: bool = False
    rates: FloatArray | None = None


@dataclass(frozen=True)
class Verdict:
    """What follows from a round.

    Attributes:
        index: number of the round that has ended.
        go_back: whether it has to be undone.
        finite: which replicas' weights are finite.
        quarantined: which are left out although their weights are finite, because their loss has exploded.
        healthy: who counts in the mean: finite, and not left out.
        losses: what replicas were compared by; NaN for those that are left out.
        new_anchor: whether the anchor moves to the new centre.
        held: whether base values held still because the rollbacks are spent.
        num_rollbacks: rounds undone so far.
        scales, multipliers, positions: where learning rates and knobs stood during the round; positions by replica.
        control: named numbers of the controller that moves the learning rates; empty while none is acting.
        knobs: what was seen of each knob beside them; empty likewise.
        phase: what the learning rate was doing: in its ``warm-up``, finding its ``level``, on ``hold``, or nothing.
        events: what was done to the run, in plain English.
        messages: what the user should be told now.
        keep: whether to keep a copy of the weights, to go back to.
        decay_steps: of a final decay that begins here because validation losses have turned; 0 for none.
        restart: whether training starts again from its first weights.
    """

    index: int
    go_back: bool
    finite: BoolArray
    quarantined: BoolArray
    healthy: BoolArray
    losses: FloatArray
    new_anchor: bool
    held: bool
    num_rollbacks: int
    scales: FloatArray
    multipliers: FloatArray
    positions: tuple[FloatArray, ...]
    control: Mapping[str, tuple[float, ...]]
    knobs: tuple[KnobEvidence, ...]
    phase: str
    events: tuple[str, ...]
    messages: tuple[str, ...]
    keep: bool
    decay_steps: int = 0
    restart: bool = False


class RoundPolicy:
    """Decides when a round ends and what follows from it.

    Args:
        steering: multipliers, scales and controllers.
        interval: T, the optimizer steps of a round.
        acting: the controllers act at rounds that end after the first of these steps, and up to the second.
        rollback: what calls a round broken; None to undo nothing.
        level: how the first learning rate is found; None to start from where it is.
        quarantine: robust standard deviations above the median at which a replica's loss has exploded; None for never.
        anchored: whether effects are measured from an anchor.
        anchor_rounds: renew the anchor every so many rounds; None for never.
        repairable: whether a replica that is left out can be given the others' weights; another shard's cannot.
        acts: whether anything is done about what is decided. If not, nothing is undone, and nothing raises.
    """

    def __init__(
        self,
        steering: Steering,
        *,
        interval: int,
        acting: tuple[float, float],
        rollback: Rollback | None = None,
        level: Level | None = None,
        quarantine: float | None = None,
        anchored: bool = False,
        anchor_rounds: int | None = None,
        repairable: bool = True,
        acts: bool = True,
    ) -> None:
        self.steering = steering
        self.acts = acts
        self.frozen = False
        """Whether the scale holds still for good."""
        self.evaluations = Evaluations()
        self.keeps_best = False
        """Whether a final decay that begins early starts from the best weights so far."""
        self.has_first = False
        """Whether training may start again: somebody has asked for it, and the anchor holds the first weights."""
        self.interval = interval
        self.acting = acting
        self.rollback = rollback
        self.level = level
        self.first_losses: list[float] = []
        """Of the first rounds: what the loss is before training, and how far batches are apart."""
        self._scheduled = 0.0
        self._told_of_data = False
        self.searching, self.searched = level is not None, 0
        """Whether every step is a round of its own, since the first learning rate is unknown; the last that was."""
        if level is not None:
            steering.set_level(level.scale)
        self.quarantine = Quarantine(quarantine) if quarantine is not None and repairable else None
        self.quarantine_state = QuarantineState()
        self.anchored = anchored
        self.anchor_rounds = anchor_rounds
        self.repairable = repairable

    # -- when ---------------------------------------------------------------------------------------------------

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether a round ends with this step."""
        return last or self.searching or step % self.interval == 0

    def num_steps(self, step: int) -> int:
        """How many steps the round that ``step`` belongs to has taken by then."""
        begun = max(step - 1, 0) // self.interval * self.interval
        return 1 if self.searching else step - max(begun, min(self.searched, step - 1))

    def is_acting(self, step: int) -> bool:
        """Whether a controller will act on a round that ends here."""
        return self._may_act(step) and not self._is_held()

    def _may_act(self, step: int) -> bool:
        steering = self.steering
        has_controller = steering.controller is not None or steering.panel.controller is not None
        in_time = self.acting[0] < step <= self.acting[1]
        return has_controller and in_time and not self.searching and not self.frozen

    def _is_held(self) -> bool:
        return self.rollback is not None and self.rollback.budget.spent

    # -- what ---------------------------------------------------------------------------------------------------

    def end_round(self, seen: Seen) -> Verdict:
        """The verdict on the round that ends; the next one begins. Raises where training cannot go on."""
        steering, level, held, searching = self.steering, self.level, self._is_held(), self.searching
        frozen = self._freeze(seen)
        acting, num_steps = self._may_act(seen.step) and not held, self.num_steps(seen.step)
        given = np.where(np.abs(seen.losses) <= LARGEST_LOSS, seen.losses, np.nan)
        quarantined = self._exploded(np.where(seen.finite, given, np.nan))
        healthy = seen.finite & ~quarantined
        losses = np.where(healthy, given, np.nan)
        compared = losses if seen.compared is None else np.where(healthy, seen.compared, np.nan)
        index, (scales, multipliers, positions) = steering.round_index, steering.standing()
        control: Mapping[str, tuple[float, ...]] = {}
        knobs: tuple[KnobEvidence, ...] = ()
        fallen = False
        messages: tuple[str, ...] = ()
        was_done = self.level is None or self.level.done
        events = frozen + self._find_level(seen)
        decay_steps = self._decay_steps(seen)
        if decay_steps:
            begins = "begins" if self.acts else "would begin"
            events += (
                f"validation has not improved since step {self.evaluations.best_step}: the final decay {begins} here"
                f"{', from the best weights so far' if self.keeps_best else ''}, and training may end at step "
                f"{seen.step + decay_steps}",
            )
        if not was_done and self.level is not None and self.level.done and not self.first_losses:
            messages = (NO_LOSS,)
        go_back = self._is_broken(seen, losses, healthy, searching=searching)
        confirmed, finite = self.evaluations.confirmed, losses[np.isfinite(losses)]
        share = confirmed.share
        begun = 0 if level is None else level.started
        known = confirmed.num > 1 or seen.step - begun <= EARLY * self.acting[1]
        loss = float(finite.mean()) if len(finite) else math.nan
        moves = acting and known and not (go_back or self.keeps_best)
        if confirmed.add(seen.evaluation, loss, moves=moves, mode_given=self.evaluations.mode_given):
            follows = "follows" if self.acts else "would follow"
            events += (f"the training loss falls below the validation loss: the learning rate {follows} their ratio",)
        num_in_vain = 0 if self.rollback is None else self.rollback.num_in_vain
        restart = self._restart(seen) if acting and not (go_back or num_in_vain or decay_steps) else ""
        if restart:
            events += (restart,)
        if num_in_vain:
            steering.multiply(CUT**-num_in_vain)
            steering.forget()
            were = "were" if self.acts else "would have been"
            events += (
                f"the loss stays at {loss:.4g}, although {num_in_vain} rounds {were} undone and learning rates "
                "lowered: the data have changed. Learning rates are what they were, and progress is measured from here",
            )
            messages += events[-1:] if not self._told_of_data else ()
            self._told_of_data = True
        if go_back and not self.acts:
            go_back, events = False, (*events, "this round would have been undone")
            steering.cut(CUT)
        elif go_back:
            assert self.rollback is not None
            before = steering.scales
            if not searching:  # what breaks at a negligible rate says nothing of the rates
                steering.cut(CUT)
            done, told = self.rollback.take(seen.step, is_cut=bool((steering.scales < before).any()))
            events, messages = (*events, done), (*messages, *told)
        elif acting and not num_in_vain and not restart:
            end = self.acting[1]
            update, ease = (None, 1.0) if seen.sizes is None else beside_weights(seen.sizes, self.level)
            control, knobs = steering.decide(
                compared,
                seen.slopes,
                whole=seen.total_slope,
                progress=None if math.isinf(end) else seen.step / end,
                trained=seen.trained,
                in_warmup=self._in_warmup(seen) or confirmed.is_low or begun > 0,
                elapsed=min(math.log((seen.step - begun) / max(seen.step - begun - num_steps, 1)), MAX_ELAPSED),
                start=self._start(num_steps),
                update=None if update is None else update / share,
                ease=ease,
                given=self._given(),
                usual=self._usual(),
                further=1.0 if seen.sizes is None else seen.sizes.further,
                shrinks=1.0 if self.level is None else 1 - self.level.steadiness,
                decay=self._decay(seen, num_steps),
                values=seen.rates,
                last=seen.last,
            )
            if confirmed.share != share:
                steering.multiply(confirmed.share / share)
            fallen = self.anchored and steering.wants_new_anchor()
        self._note_first(losses)
        self._scheduled = seen.scheduled
        if seen.last and self.rollback is not None and self.rollback.num_rollbacks > 1:
            messages += (f"{self.rollback.num_rollbacks} rounds of this run were undone; scheduler.history says why",)
        renewed = self.anchored and self.anchor_rounds is not None and (index + 1) % self.anchor_rounds == 0
        steering.next_round()
        new_anchor = fallen or (self.anchored and bool(num_in_vain or restart)) or (renewed and not seen.last)
        if new_anchor and self.level is not None:
            self.level.restarts = False  # the anchor holds the first weights no longer
        return Verdict(
            index=index,
            go_back=go_back,
            finite=seen.finite,
            quarantined=quarantined,
            healthy=healthy,
            losses=compared,
            new_anchor=new_anchor,
            held=held,
            num_rollbacks=0 if self.rollback is None else self.rollback.num_rollbacks,
            scales=scales,
            multipliers=multipliers,
            positions=positions,
            control=control,
            knobs=knobs,
            phase=self._phase(seen.step, acting=acting),
            events=events,
            messages=messages,
            keep=not searching and self.rollback is not None and not self.rollback.doubtful,
            decay_steps=decay_steps if self.acts else 0,
            restart=bool(restart),
        )

    def _freeze(self, seen: Seen) -> tuple[str, ...]:
        if self.frozen or not seen.frozen:
            return ()
        self.frozen = True
        return ("the scale is frozen from here on",)

    def _decay_steps(self, seen: Seen) -> int:
        """Take in a validation loss; how long a final decay should be that begins now, before its time."""
        decays, evaluations = self.acting[1] if self.keeps_best else math.inf, self.evaluations
        evaluations.mode_given = evaluations.mode_given or seen.mode_given
        stretch = 0.0 if self.level is None else STRETCH * self.level.warm_steps
        turned = not math.isnan(seen.evaluation) and evaluations.add(
            seen.step, seen.evaluation, decays=decays, stretch=stretch
        )
        steps = max(math.ceil((BEST_SHARE if self.keeps_best else DECAY_SHARE) * seen.step), 1)
        in_time = self.keeps_best or (seen.step <= self.acting[1] and steps < seen.left)
        if not turned or not in_time or seen.last or self.frozen or self.searching:
            return 0
        return int(min(steps, seen.left))

    def _restart(self, seen: Seen) -> str:
        """Begin again, at a lower level, where validation asks for it; why, or nothing."""
        level, steering, evaluations = self.level, self.steering, self.evaluations
        may = self.has_first and level is not None and level.restarts and self.acts
        if level is None or not may or seen.last or math.isnan(seen.evaluation):
            return ""
        losses = evaluations.losses
        is_loss = evaluations.mode_given or min(losses, default=0.0) < max(losses[:1], default=0.0)
        why = level.start_again(seen.step, evaluations.confirmed.ratio if is_loss else 0.0)
        if why:
            steering.start_over(level.scale)
            steering.warmup = level.share(seen.step - 1)
            self.evaluations = Evaluations(mode_given=evaluations.mode_given)
        return why

    def _phase(self, step: int, *, acting: bool) -> str:
        if self.level is not None and not self.level.done:
            return "warm-up"
        return "level" if acting else "hold" if step > self.acting[1] else ""

    def _find_level(self, seen: Seen) -> tuple[str, ...]:
        """Take in what the round has shown of the first learning rate; what was done, in plain English."""
        level, steering = self.level, self.steering
        if level is None or (level.done and not self.searching and steering.warmup == 1):
            return ()
        if self.searching:
            self.searched = seen.step
        said = ""
        if not level.done:
            said = level.update(seen.step, seen.sizes, seen.rate, seen.scheduled)
            steering.set_level(level.scale)
        self.searching = level.is_searching(seen.step)
        steering.warmup = level.share(seen.step - 1)  # of the step that was taken
        return (said,) if said else ()

    def _given(self) -> float:
        """The scale that progress leads up to, where that of 1 is a schedule which is not far below the level."""
        level = self.level
        if level is None or not level.hint or (level.lr >= level.peak and not level.follows_hint):
            return math.inf
        return min(max(level.lr / level.peak, 1.0), CHOSEN)

    def _usual(self) -> float:
        """The scale at which models of this size usually train best, where nobody has chosen a schedule."""
        return math.inf if self.level is None or self.level.hint else self.level.usual / self.level.peak

    def _decay(self, seen: Seen, num_steps: int) -> float:
        """What a line to zero at the end of the run would have taken off the logarithm of the rate in this round."""
        if self.level is None or self.level.hint or not 0 < seen.left < math.inf:
            return 0.0
        return math.log(seen.left / (seen.left + num_steps))

    def _in_warmup(self, seen: Seen) -> bool:
        """Whether the learning rate rises by itself: along a warm-up of ours, or of the schedule."""
        if self.level is not None and not self.level.follows_hint:
            # A peak that is not followed has no warm-up that means anything.
            return not self.level.done or self.steering.warmup < 1
        return seen.scheduled > self._scheduled * (1 + 1e-6) > 0 or (self.level is not None and not self.level.done)

    def _note_first(self, losses: FloatArray) -> None:
        known = losses[np.isfinite(losses)]
        if len(self.first_losses) >= NUM_FIRST or not len(known):
            return
        self.first_losses.append(float(known.mean()))
        if len(self.first_losses) == NUM_FIRST and self.rollback is not None and self.level is not None:
            mean, noise = self._first()
            self.rollback.expect(mean, FEW * noise)

    def _first(self) -> tuple[float, float]:
        """Mean and standard deviation of the first losses."""
        first = np.array(self.first_losses)
        mean = float(first.mean())
        return mean, max(float(first.std(ddof=1)), 1e-3 * abs(mean))

    def _start(self, num_steps: int) -> tuple[float, float] | None:
        """The loss before training, and the standard error of how far it is from that of a round."""
        if len(self.first_losses) < NUM_FIRST:
            return None
        mean, noise = self._first()
        return mean, noise * math.sqrt(1 / NUM_FIRST + 1 / num_steps)

    def require_mean(self, healthy: BoolArray, step: int) -> None:
        """Raise where there is nothing to average: no replica is healthy, or those that are not cannot be repaired."""
        if not self._has_mean(healthy):
            broken = np.flatnonzero(~healthy).tolist()
            who = f"all {len(healthy)} replicas" if not healthy.any() else f"ranks {broken}, which nobody else has,"
            raise BrokenError(
                f"the weights of {who} are not finite at the converge of step {step}; "
                "there is nothing to average: resume from a checkpoint with a lower learning rate, or pass "
                "faults=Faults(max_rollbacks=20), or faults=Faults(skip_nonfinite=True)"
            )

    def _has_mean(self, healthy: BoolArray) -> bool:
        return bool(healthy.any() if self.repairable else healthy.all())

    def _is_broken(self, seen: Seen, losses: FloatArray, healthy: BoolArray, *, searching: bool) -> bool:
        if searching and self._has_mean(healthy):
            return False  # nothing has moved
        if seen.of_one_model is not None and (seen.of_one_model & healthy & np.isnan(losses)).any():
            losses = np.full(len(losses), np.nan)  # its loss is the mean over ranks, as it would be on one process
        if not self.acts:
            return self._would_be_broken(seen, losses, healthy)
        if self.rollback is None:
            self.require_mean(healthy, seen.step)
            return False
        return self.rollback.is_broken(
            losses, weights_fine=self._has_mean(healthy), losses_given=seen.losses_given, step=seen.step
        )

    def _would_be_broken(self, seen: Seen, losses: FloatArray, healthy: BoolArray) -> bool:
        if self.rollback is None:
            return False
        try:
            fine = self._has_mean(healthy)
            return self.rollback.is_broken(losses, weights_fine=fine, losses_given=seen.losses_given, step=seen.step)
        except BrokenError:
            return True

    def counted(self, losses: FloatArray, finite: BoolArray) -> BoolArray:
        """Who will not be left out of a round with these losses. Changes nothing."""
        if self.quarantine is None:
            return finite
        given = np.where(finite & (np.abs(losses) <= LARGEST_LOSS), losses, np.nan)
        return finite & ~self.quarantine.update(self.quarantine_state, given)[1]

    def _exploded(self, losses: FloatArray) -> BoolArray:
        if self.quarantine is None:
            return np.zeros(len(losses), dtype=bool)
        self.quarantine_state, exploded = self.quarantine.update(self.quarantine_state, losses)
        return exploded

    def digest(self) -> int:
        """A number that differs between replicas which do not continue from the same state."""
        numbers = [
            self.steering.seed,
            self.steering.level,
            self.steering.round_index,
            self.acting[1],
            self.frozen,
            *self.steering.scales.tolist(),
        ]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    def follow(self, step: int) -> bool:
        """After each step: the next one of a warm-up. Whether learning rates have to be written."""
        if self.level is None:
            return False
        before, self.steering.warmup = self.steering.warmup, self.level.share(step)
        return before != self.steering.warmup

    def hold_from(self, step: float) -> None:
        """No controller acts on rounds that end later."""
        self.acting = (self.acting[0], step)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.steering.state_dict(),
            **(self.rollback.state_dict() if self.rollback is not None else NO_ROLLBACK),
            "quarantine": pack_quarantine(self.quarantine_state),
            "level": None if self.level is None else self.level.state_dict(),
            "first_losses": list(self.first_losses),
            "scheduled": self._scheduled,
            "searching": self.searching,
            "searched": self.searched,
            "frozen": self.frozen,
            "evaluations": self.evaluations.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state that cannot be used raises ValueError or KeyError and changes nothing."""
        quarantine_state = unpack_quarantine(state["quarantine"])
        Rollback.check_state(state)
        if "climb" in state and "level" not in state:
            raise ValueError(
                "the state is of a version of hdet whose runs began with a climb, which this one cannot continue; "
                "start from its weights with a new scheduler"
            )
        level = Level.from_state(state["level"])
        if level is None and number(state["warmup"]) != 1:
            raise ValueError(f"warmup must be 1 in a state without a level, but got {shown(state['warmup'])}")
        first = numbers_of(state["first_losses"], "first_losses", None, low=-LARGEST_LOSS, high=LARGEST_LOSS).tolist()
        scheduled, searched = number(state["scheduled"]), whole_of(state["searched"], "searched")
        searching = flag_of(state["searching"], "searching") and level is not None
        if len(first) > NUM_FIRST or math.isnan(scheduled):
            raise ValueError(
                f"first_losses must be at most {NUM_FIRST} and scheduled a finite number, but got {len(first)} and "
                f"{shown(state['scheduled'])}"
            )
        frozen = flag_of(state.get("frozen", False), "frozen")  # older states have neither
        evaluations = Evaluations.from_state(mapping_of(state.get("evaluations", {}), "evaluations"))
        self.steering.load_state_dict(state)  # checks everything before it changes anything
        self.frozen, self.evaluations = frozen, evaluations
        self.quarantine_state = quarantine_state
        if self.rollback is not None:
            self.rollback.load_state_dict(state)
        self.first_losses, self._scheduled = first, scheduled
        self.searching, self.searched, self.level = searching, searched, level
