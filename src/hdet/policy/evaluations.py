"""What validation losses say: how far the fall of the training loss is confirmed, and when the model overfits.

Numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.checks import flag_of, mapping_of, number, numbers_of, shown, whole_of

SURE, SURER = 2.0, 3.0
"""Standard errors by which the last evaluations are above the best ones; where they are not above the training loss."""
WINDOW_SHARE, LATE_SHARE, MIN_WINDOW = 4, 8, 2
"""The last quarter of the evaluations is compared with the best of as many in a row; in a decay, where they are more
exact, the last eighth; of two at least."""
STRETCH = 0.6
"""Of the warm-up, which is 6% of a run: evaluations within as many steps count as one."""
FEW, FAR_ABOVE, FAR_APART = 3.0, 0.1, 2.0
"""Evaluations are few where two are more than so many of those steps apart, 11% of a run. How far the last one is above
the lowest of them where they have turned, as a share of it, and how many times the training loss it is."""
SMALLEST_NOISE = 0.005
"""Of the best mean: no evaluation is taken to be more exact."""
LARGEST = 1e100
"""Losses above count as not finite: sums of them would not be."""
MAX_KEPT = 512
"""Evaluations; of a longer run every second one is forgotten."""
DECAY_SHARE = 0.3
"""Of the steps so far: the length of a decay that begins early."""
BEST_SHARE, BEST_RATE = 0.6, 0.25
"""The same of one from the best weights so far; and the share of the learning rate that it starts from."""
ROOM = 1.25
"""How far a validation loss may be above the training loss before the learning rate follows their ratio."""
ALIKE = 2.0
"""The first validation loss is within this factor of the training loss; another metric is not."""
FALLEN = 0.9
"""Of the training loss at the last evaluation: from there on its fall is large enough to compare."""
EARLY = 0.2
"""Of the time in which the learning rate may move: later, one evaluation alone lowers nothing."""
DOWN, UP, LOWEST, UNKNOWN = 0.2, 0.3, 0.03, 0.5
"""Of the logarithm of the share of the learning rate, in one round; the lowest share; and that of one evaluation."""


class Evaluations:
    """Validation losses of a run, and whether they have turned.

    Attributes:
        steps, losses: of each evaluation so far; those of one stretch are one, with the mean, at the first step.
        counts: how many each of these stands for.
        lowest, best_step: the lowest loss of all, and where it was.
        trained: the training loss before each; NaN where it was unknown.
        turned_at: the step at which they had turned; None before.
        confirmed: what they have confirmed.
        mode_given: whether it is sure that lower is better; else values that only rise are of a metric that should.
    """

    def __init__(self, *, mode_given: bool = False) -> None:
        self.mode_given = mode_given
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.trained: list[float] = []
        self.counts: list[int] = []
        self.lowest = math.inf
        self.best_step = 0
        self.turned_at: int | None = None
        self.confirmed = Confirmed()

    def add(self, step: int, loss: float, *, decays: float = math.inf, stretch: float = 0.0) -> bool:
        """Take one in; True once, when they turn. One that is not finite tells nothing.

        Args:
            step: of the evaluation.
            loss: what it gave.
            decays: the step from which on the learning rate decays, where the best weights are kept.
            stretch: evaluations within as many steps count as one: what they differ by is no noise of its own.
        """
        if not abs(loss) <= LARGEST:
            return False
        if loss < self.lowest:
            self.lowest, self.best_step = loss, step
        if self.steps and step - self.steps[-1] < stretch:
            self.counts[-1] += 1
            self.losses[-1] += (loss - self.losses[-1]) / self.counts[-1]
            self.trained[-1] += (self.confirmed.now - self.trained[-1]) / self.counts[-1]
        else:
            self.steps.append(step)
            self.losses.append(loss)
            self.trained.append(self.confirmed.now)
            self.counts.append(1)
        if len(self.steps) > MAX_KEPT:
            self.steps, self.losses = self.steps[1::2], self.losses[1::2]
            self.trained, self.counts = self.trained[1::2], self.counts[1::2]
        is_full = self.counts[-1] >= self.counts[-2:][0]  # it has as many as the one before
        if self.turned_at is not None or not is_full:
            return False
        in_decay = len(self.steps) >= MIN_WINDOW and self.steps[-MIN_WINDOW] > decays
        if len(self.steps) > 1 and step - self.steps[-2] > FEW * stretch > 0:
            turned = last_is_far_above(self.losses, self.trained, mode_given=self.mode_given)
        else:
            turned = have_turned(self.losses, self.trained, in_decay=in_decay, mode_given=self.mode_given)
        if turned:
            self.turned_at = step
        return turned

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "losses": list(self.losses),
            "trained": [loss if math.isfinite(loss) else None for loss in self.trained],
            "turned_at": self.turned_at,
            "mode_given": self.mode_given,
            "counts": list(self.counts),
            "lowest": self.lowest if self.losses else None,
            "best_step": self.best_step,
            "confirmed": self.confirmed.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Evaluations:
        """A new one out of a state; ValueError or KeyError where it cannot be."""
        found = cls()
        if not state:  # of a version that had none
            return found
        found.steps = [whole_of(step, "steps") for step in state["steps"]]
        found.losses = numbers_of(state["losses"], "losses", len(found.steps), low=-LARGEST, high=LARGEST).tolist()
        found.mode_given = flag_of(state.get("mode_given", False), "mode_given")  # an earlier version had none
        if state["turned_at"] is not None:
            found.turned_at = whole_of(state["turned_at"], "turned_at")
        if len(found.steps) > MAX_KEPT:
            raise ValueError(f"evaluations must be at most {MAX_KEPT}, but got {len(found.steps)}")
        trained = [math.nan if loss is None else number(loss) for loss in state.get("trained", [])]
        found.trained = trained or [math.nan] * len(found.steps)  # an earlier version had none
        if len(found.trained) != len(found.steps):
            raise ValueError(f"trained must have {len(found.steps)} losses, but got {len(found.trained)}")
        found.counts = [whole_of(num, "counts", 1) for num in state.get("counts", [1] * len(found.steps))]
        if len(found.counts) != len(found.steps):
            raise ValueError(f"counts must have {len(found.steps)} entries, but got {len(found.counts)}")
        if found.losses:
            lowest = min(found.losses)
            found.lowest = number(state.get("lowest", lowest))
            found.best_step = whole_of(state.get("best_step", found.steps[found.losses.index(lowest)]), "best_step")
        if "confirmed" in state:  # an earlier version had none
            found.confirmed = Confirmed.from_state(mapping_of(state["confirmed"], "confirmed"))
        return found


class Confirmed:
    """How far validation has confirmed the fall of the training loss, which the learning rate goes by.

    A training loss that falls below the validation loss is memorised, and what a high learning rate does then stays. So
    where the latter is more than ``ROOM`` times as high, the learning rate falls by the rest, and does not rise.
    Between two evaluations the validation loss counts as following the training loss as far as it did between the last
    two, and as standing still before the second. Values that are no loss of the same kind do nothing: the first is not
    within a factor of two of the training loss, or the second is not below it where the training loss has fallen, or
    both are nearer to its square root.

    Attributes:
        share: of the learning rate.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.num = 0
        """Evaluations that could be compared; -1 where they are of another kind."""
        self.last = self.trained = 1.0
        self.follows = 0.0
        self.squared = 0.0
        """Below zero where the first two are nearer to the square root of the training loss."""
        self.recent: list[float] = []
        self.ratio = 0.0
        """The last evaluation over the training loss; below zero where it is of another kind."""

    @property
    def now(self) -> float:
        """The training loss of the last rounds; NaN where it is unknown."""
        return math.fsum(self.recent) / len(self.recent) if self.recent else math.nan

    @property
    def is_low(self) -> bool:
        """Whether the learning rate is to be no higher."""
        return self.share < 0.95

    def add(self, evaluation: float, loss: float, *, moves: bool, mode_given: bool = False) -> bool:
        """Take in a round: its training loss, and a validation loss of before it. NaN where there is none.

        True once, when the share begins to fall. ``mode_given``: whether it is sure that lower is better.
        """
        if abs(evaluation) <= LARGEST and self.recent:
            self._compare(evaluation, self.now, may_rise=mode_given)
        if not abs(loss) <= LARGEST:
            return False
        self.recent = [*self.recent, loss][-2:]
        now = self.now
        if not moves or not self.num:
            return False
        wanted, before = 1.0, self.share
        if self.num > 0 and now > 0:
            validation = self.last * min(now / self.trained, 1.0) ** self.follows
            wanted = min(max(ROOM * (now / validation), LOWEST if self.num > 1 else UNKNOWN), 1.0)
        self.share = min(max(wanted, before * math.exp(-DOWN)), before * math.exp(UP))
        return self.share < before == 1.0

    def _compare(self, value: float, trained: float, *, may_rise: bool) -> None:
        first = not self.num
        if not (value > 0 and trained > 0) or (first and value > ALIKE * trained) or self.ratio < 0:
            self.num, self.ratio = -1, -1.0
            return
        self.ratio = min(value / trained, LARGEST)
        log_value, log_trained = math.log(value), math.log(trained)
        if self.num < 2:
            self.squared += 2 * abs(log_trained - 2 * log_value) - abs(log_trained - log_value)
        if self.num < 0 or (first and self.ratio < 1 / ALIKE):
            self.num, self.ratio = -1, self.ratio if self.squared >= 0 else -1.0
            return
        if not first and trained < FALLEN * self.trained:
            fall = math.log(self.last) - log_value
            if self.num == 1 and ((fall <= 0 and not may_rise) or self.squared < 0):
                self.num, self.ratio = -1, self.ratio if self.squared >= 0 else -1.0
                return
            self.follows = min(max(fall / (math.log(self.trained) - log_trained), 0.0), 1.0)
            self.num = 2
        self.last, self.trained, self.num = value, trained, max(self.num, 1)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "recent": list(self.recent)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Confirmed:
        """A new one out of a state; ValueError or KeyError where it cannot be."""
        found = cls()
        bounds = {"share": (LOWEST / 2, 1.0), "last": (1e-320, LARGEST), "trained": (1e-320, LARGEST)}
        bounds |= {"follows": (0.0, 1.0), "squared": (-LARGEST, LARGEST), "ratio": (-1.0, LARGEST)}
        state = {"ratio": 0.0, **state}  # an earlier version had none
        for name, (low, high) in bounds.items():
            if not low <= number(state[name]) <= high:
                raise ValueError(f"{name} of confirmed must be in [{low:g}, {high:g}], but got {shown(state[name])}")
            setattr(found, name, number(state[name]))
        if state["num"] not in (-1, 0, 1, 2):
            raise ValueError(f"num of confirmed must be -1, 0, 1 or 2, but got {shown(state['num'])}")
        found.num = int(state["num"])
        found.recent = numbers_of(state["recent"], "recent", None, low=-LARGEST, high=LARGEST).tolist()[-2:]
        return found


def last_is_far_above(losses: Sequence[float], trained: Sequence[float], *, mode_given: bool) -> bool:
    """Whether the last one alone is far above the lowest, and above a training loss that has fallen since.

    The rule for few evaluations, whose noise nobody knows; arguments as of :func:`have_turned`.
    """
    lowest = min(losses[:-1])
    at, last = losses.index(lowest), losses[-1]
    far = last - lowest > FAR_ABOVE * abs(lowest) and last > FAR_APART * trained[-1] and trained[-1] < trained[at]
    return far and (mode_given or lowest < losses[0])


def have_turned(
    losses: Sequence[float],
    trained: Sequence[float],
    *,
    in_decay: bool = False,
    mode_given: bool = False,
) -> bool:
    """Whether the last quarter is above the best stretch of the same length, beyond the noise of evaluations.

    Losses that were never below the first one have not turned, unless the mode was given: they are of a metric that
    should rise, or too few. Nor have those that rise with the training loss: that is no overfitting. Where they are not
    ``ROOM`` times as high as the training loss it takes more to be sure: what looks like a turn is noise there.

    Args:
        losses: of evaluations.
        trained: the training loss before each; NaN where it is unknown.
        in_decay: whether the last ones are of a decay.
        mode_given: whether it is sure that lower is better.
    """
    num = len(losses)
    window = max(num // (LATE_SHARE if in_decay else WINDOW_SHARE), MIN_WINDOW)
    if num < 2 * window + 1:
        return False
    earlier, late = losses[:-window], losses[-window:]
    lowest = min(earlier)
    if (lowest >= losses[0] and not mode_given) or min(late) <= lowest:
        return False
    sums = [math.fsum(earlier[i : i + window]) for i in range(len(earlier) - window + 1)]
    best = min(sums) / window
    at = sums.index(min(sums))
    trained_late = math.fsum(trained[-window:])
    if trained_late > math.fsum(trained[at : at + window]):
        return False
    sure = SURE if math.fsum(late) > ROOM * trained_late else SURER
    # Of three in a row, what a trend does not explain.
    tail = losses[num // (2 if in_decay else 4) :]
    bends = [(a - b) - (b - c) for a, b, c in zip(tail, tail[1:], tail[2:], strict=False)]
    noise = math.hypot(*bends) / math.sqrt(6 * len(bends))
    error = max(noise, SMALLEST_NOISE * abs(best)) * math.sqrt(2 / window)
    return math.fsum(late) / window - best > sure * error
