"""When a round has to be undone, and how often that may happen before the base values hold still."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hdet.checks import FloatArray, mapping_of, number, shown, whole_of

NUM_RECENT = 16
EARLY_SHARE, EARLY_NOISE = 0.35, 2.5
"""Of the progress, and of the noise of a single loss, that may be lost within the first rounds, where that is known."""
LOST_SHARE, LOST_NOISE = 0.9, 10.0
"""Of the progress: what is lost where a model is back at the start; and how much noise it must exceed."""
LOST_STEPS = 16
"""A loss that is up for fewer may come down by itself: momentum carries a model up the other side of a valley, and one
batch of outliers moves it away."""


class GuardState(NamedTuple):
    """Mean loss of the first round, those of the last healthy ones, and how many in a row have been broken.

    Where the loss before training is known from single steps, ``noise`` is how far batches are apart in it; then also
    ``lowest``, of the medians so far. ``lost``: for how many rounds in a row the loss has been up.
    """

    first: float = math.nan
    recent: tuple[float, ...] = ()
    num_strikes: int = 0
    noise: float = math.nan
    lowest: float = math.inf
    lost: int = 0


class Guard:
    """Tells a healthy round from a broken one by its mean loss.

    A round is broken when its loss is not finite, or has jumped and stayed up. A loss has jumped that is above the
    median of the last five rounds by more than a share of all progress made, and by many times the usual difference
    between rounds. Until five rounds have shown what is usual, only a loss above them by twice their size counts; where
    the noise is known, one that loses a third of the progress. Where the learning rate is at the edge of what training
    bears, jumps are usual, and one of them may be for good: a loss near that of the start counts at any time.

    It has stayed up in the last of several rounds in a row, at least two and 16 steps. The others are doubtful: a batch
    of outliers raises the loss, too, and training recovers from it by itself, at any learning rate. They are no place
    to go back to.

    A loss that stays up although training has gone back several times has not been broken by training: the data have
    changed. The guard then accepts the new level.

    Args:
        share: of the progress since the first round that may be lost.
        noise: how many standard deviations of the difference between rounds count as a jump.
        max_strikes: broken rounds in a row before a finite loss is accepted.
        interval: optimizer steps of a round.
    """

    def __init__(
        self, *, share: float = 0.1, noise: float = 5.0, max_strikes: int = 3, interval: int = LOST_STEPS
    ) -> None:
        self.share = share
        self.noise = noise
        self.max_strikes = max_strikes
        self.max_lost = max(math.ceil(LOST_STEPS / interval), 2)

    def update(self, state: GuardState, loss: float) -> tuple[GuardState, bool]:
        """The next state, and whether the round was healthy."""
        if not math.isfinite(loss):
            return state._replace(num_strikes=state.num_strikes + 1), False
        if not state.recent:
            first = loss if math.isnan(state.first) else state.first
            return state._replace(first=first, recent=(loss,), num_strikes=0), True
        if loss > self._limit(state) or self._is_lost(state, loss):
            if state.lost + 1 < self.max_lost:
                return state._replace(lost=state.lost + 1), True
            if state.num_strikes < self.max_strikes:
                return state._replace(num_strikes=state.num_strikes + 1), False
            return GuardState(loss, (loss,)), True
        recent = (*state.recent, loss)[-NUM_RECENT:]
        lowest = min(state.lowest, statistics.median(recent[-5:]))
        return state._replace(recent=recent, num_strikes=0, lowest=lowest, lost=0), True

    def _is_lost(self, state: GuardState, loss: float) -> bool:
        progress = state.first - state.lowest
        return progress > LOST_NOISE * state.noise and loss > state.first - (1 - LOST_SHARE) * progress

    def _limit(self, state: GuardState) -> float:
        usual = statistics.median(state.recent[-5:])
        size = max(abs(usual), abs(state.first))
        if len(state.recent) < 5 and not math.isnan(state.noise):
            lowest = min(state.recent)
            return lowest + max(EARLY_SHARE * (state.first - lowest), EARLY_NOISE * state.noise)
        if len(state.recent) < 5:
            return usual + 2 * size if size > 0 else math.inf
        # What is usual is a spread around the trend: a loss that falls fast must not hide one that jumps.
        steps = [b - a for a, b in zip(state.recent, state.recent[1:], strict=False)]
        trend = statistics.median(steps)
        sigma = math.sqrt(sum((step - trend) ** 2 for step in steps) / (len(steps) - 1))
        noise = self.noise * (1 + 4 / len(steps)) * sigma  # few steps tell little about what is usual
        return usual + max(self.share * (state.first - usual), noise, 1e-3 * size)


def pack_guard(state: GuardState) -> dict[str, Any]:
    """A guard's state as plain types."""
    return {
        **state._asdict(),
        "recent": list(state.recent),
        "noise": None if math.isnan(state.noise) else state.noise,
        "lowest": None if math.isinf(state.lowest) else state.lowest,
    }


def unpack_guard(packed: Mapping[str, Any]) -> GuardState:
    """The inverse of :func:`pack_guard`."""
    packed = mapping_of(packed, "guard")
    recent = packed["recent"]
    if not isinstance(recent, (list, tuple)) or any(math.isnan(number(v)) for v in recent):
        raise ValueError(f"recent must hold finite numbers, but got {shown(recent)}")
    # Before the first round there is no first loss, and afterwards a limit must follow from it.
    first = packed["first"]
    if math.isnan(number(first)) and (recent or not (isinstance(first, float) and math.isnan(first))):
        raise ValueError(f"first must be a finite number, but got {shown(first)}")
    noise = packed.get("noise")
    if noise is not None and not number(noise) >= 0:
        raise ValueError(f"noise must be a number >= 0, or None, but got {shown(noise)}")
    lowest = packed.get("lowest")  # older states have none
    if lowest is not None and math.isnan(number(lowest)):
        raise ValueError(f"lowest must be a finite number, or None, but got {shown(lowest)}")
    return GuardState(
        float(first),
        tuple(map(float, recent[-NUM_RECENT:])),
        whole_of(packed["num_strikes"], "num_strikes"),
        math.nan if noise is None else float(noise),
        math.inf if lowest is None else float(lowest),
        whole_of(packed.get("lost", 0), "lost"),
    )


CUT = 0.5
"""What the learning rates are multiplied by when a round is undone."""

RECOVERY = 10
"""Healthy rounds that make up for one rollback."""


class BrokenError(RuntimeError):
    """Training breaks, and undoing rounds does not help."""


class Budget:
    """How many rollbacks a run has left: each takes one, and every ``RECOVERY`` healthy rounds give one back.

    Args:
        max_rollbacks: the budget at the start, and never more.
    """

    def __init__(self, max_rollbacks: int) -> None:
        self.max_rollbacks = max_rollbacks
        self.debt = 0
        """What has been taken and not given back, in healthy rounds."""

    def take(self) -> None:
        self.debt = min(self.debt + RECOVERY, RECOVERY * self.max_rollbacks)

    def recover(self) -> None:
        self.debt = max(self.debt - 1, 0)

    @property
    def spent(self) -> bool:
        """Whether less than one rollback is left. The scale then holds still: it must not rise and break again."""
        return self.debt > RECOVERY * max(self.max_rollbacks - 1, 0)


NO_BETTER = 0.8
"""Of how far the loss was up at twice the learning rate: where it still is, the learning rate is not the cause."""


class Rollback:
    """Calls rounds broken, and counts those that were undone.

    Args:
        max_rollbacks: how many, before the scale holds still; and in a row, before it is an error.
        interval: optimizer steps of a round.
    """

    def __init__(self, max_rollbacks: int, *, interval: int = LOST_STEPS) -> None:
        self.budget = Budget(max_rollbacks)
        self.guard, self.guard_state = Guard(interval=interval), GuardState()
        self.num_rollbacks = 0
        self.cause = ""
        """Of the last broken round."""
        self.jump = math.nan
        """Its loss."""
        self.num_in_vain = 0
        """Rollbacks before the round that ends, where it shows that the data were the cause, not the learning rate."""
        self._warned = False

    def is_broken(self, losses: FloatArray, *, weights_fine: bool, losses_given: bool, step: int) -> bool:
        """Whether the round that ends has to be undone. Raises where undoing rounds does not help."""
        finite = losses[np.isfinite(losses)]
        max_rollbacks = self.budget.max_rollbacks
        self.num_in_vain = 0
        if weights_fine and not losses_given:  # only the weights can tell
            self.guard_state, fine = self.guard_state._replace(num_strikes=0), True
        else:
            loss = float(finite.mean()) if weights_fine and len(finite) else math.nan
            before = self.guard_state
            usual = before.recent[-1] if before.recent else math.nan
            self.guard_state, fine = self.guard.update(before, loss)
            self.cause = "loss or weights were not finite"
            if not fine and math.isfinite(loss):
                self.cause = f"the loss jumped to {loss:.4g} from {usual:.4g} and stayed up"
            is_accepted = before.num_strikes > self.guard_state.num_strikes and len(self.guard_state.recent) == 1
            if is_accepted and loss - usual > NO_BETTER * (self.jump - usual):
                self.num_in_vain = before.num_strikes
            self.jump = math.nan if fine else loss
        if fine:
            self.budget.recover()
        elif self.guard_state.num_strikes > max_rollbacks:
            raise BrokenError(
                f"training broke again at step {step} after {max_rollbacks} rollbacks without a healthy round between "
                "them; lower the learning rate, look for bad data, or raise max_rollbacks"
            )
        return not fine

    @property
    def doubtful(self) -> bool:
        """Whether the last round may have been broken, so that its end is never a rollback target."""
        return self.guard_state.lost > 0

    def start_over(self) -> None:
        """The weights were replaced: the next loss may be any."""
        self.guard_state = GuardState(self.guard_state.first, noise=self.guard_state.noise)

    def expect(self, first: float, noise: float) -> None:
        """What the loss is before training, and how far batches are apart."""
        self.guard_state = GuardState(first, noise=noise)

    def take(self, step: int, *, is_cut: bool) -> tuple[str, tuple[str, ...]]:
        """Count a round that is undone; returns what was done, and what the user should be told now.

        That is the first one, and the first time the budget is spent. ``is_cut``: whether learning rates were lowered.
        """
        self.num_rollbacks += 1
        self.budget.take()
        done = (
            f"the round that ended at step {step} was undone, because {self.cause}: weights and optimizer state are "
            "those from the start of the last healthy round"
            + (f", and learning rates are multiplied by {CUT:g}" if is_cut else "")
        )
        messages = (f"{done}. Later ones are in scheduler.history",) if self.num_rollbacks == 1 else ()
        if not self.budget.spent or self._warned:
            return done, messages
        self._warned = True
        return done, (
            *messages,
            f"max_rollbacks={self.budget.max_rollbacks} are spent: rounds break more often than every {RECOVERY} "
            "rounds. The learned scale holds still until healthy rounds have made up for it "
            "(RoundRecord.held), and broken rounds are still undone; lower the learning rate, or look for bad "
            "data. This warning is not repeated",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "guard": pack_guard(self.guard_state),
            "num_rollbacks": self.num_rollbacks,
            "rollback_debt": self.budget.debt,
            "jump": self.jump if math.isfinite(self.jump) else None,
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> tuple[GuardState, int, int, float]:
        """Guard, rollbacks, debt and jump of a saved state; ValueError or KeyError where it cannot be used."""
        debt, jump = whole_of(state.get("rollback_debt", 0), "rollback_debt"), state.get("jump")  # older: none
        if jump is not None and math.isnan(number(jump)):
            raise ValueError(f"jump must be a finite number, or None, but got {shown(jump)}")
        count = whole_of(state["num_rollbacks"], "num_rollbacks")
        return unpack_guard(state["guard"]), count, debt, math.nan if jump is None else float(jump)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.guard_state, self.num_rollbacks, debt, self.jump = self.check_state(state)
        self.budget.debt = min(debt, RECOVERY * self.budget.max_rollbacks)


NO_ROLLBACK = Rollback(0).state_dict()
"""The state of a run that undoes nothing."""
