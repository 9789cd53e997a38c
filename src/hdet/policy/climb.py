"""The climb (Eq. 14): a range test within the run, after which the first weights come back. Numbers only.

Every step of it is sampled. Slopes are divided by the path, the sum of learning rates since the weights were put back:
while the loss is linear along the way their ratio stays the same, whatever the learning rates were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from hdet.checks import flag_of, mapping_of, number, numbers_of, shown, whole_of

Ending = Literal["turned", "broken", "limit", "flat", "blind"]
Then = Literal["go on", "begin again", "over"]

FIRST_SCALE = 0.01
BLIND_SCALE = 0.03
"""Where a run goes on that cannot climb: low enough that a schedule 30 times too high does no harm at first."""
RISE, FAST_RISE = 0.7, 1.4
"""Of the logarithm of the scale: where the evidence is in favour, and where nothing speaks against it yet."""
FAR = 0.1
"""Slopes below this share of the noise of the loss say that the weights have not moved."""
MIN_SAMPLES, MAX_SAMPLES = 4, 16
BACK: dict[Ending, float] = {"turned": 2.0, "broken": 4.0, "limit": 2.5}
"""What the last supported scale is divided by, by how the climb ended."""
ENOUGH_BENDS = 4
"""From so many on they tell the noise by themselves."""
BROKEN_NOISE = 8.0
"""How many standard deviations above the loss before training a single loss has to be."""
EXPLAINED = 0.1
"""Of a rise of the loss, that the slope must show where training is to blame for it: it would be all, on a line."""
FAR_BELOW = 100.0
MAX_STARTS = 6
MAX_BLIND = 3
"""Steps in a row without a loss."""
WARM_SHARE, MAX_WARM, UNKNOWN_WARM = 0.06, 500, 50
"""Of the run: the steps in which the learning rate then rises from zero; at most, and in a run of unknown length."""

WHY: dict[Ending, str] = {
    "turned": "a higher one no longer lowered the loss",
    "broken": "the loss went up",
    "limit": "the climb had reached its last step or its bound",
    "flat": "the loss did not respond to any learning rate; the schedule is followed as it is",
    "blind": "no loss was given to step()",
}


class Climb:
    """Raises a learning rate from far below until the loss no longer wants more.

    Args:
        total_steps: length of the run; None where nobody knows.
        step: optimizer steps taken before.
    """

    def __init__(self, total_steps: int | None = None, *, step: int = 0) -> None:
        share = math.inf if total_steps is None else min(max(total_steps / 10, 24), total_steps / 4)
        self.max_steps = int(min(share, 200))
        self.far_steps = 200 if total_steps is None else int(min(total_steps / 4, 200))
        """As long as it rises and nothing has moved: what it would go on with is no learning rate."""
        self.warm_steps = UNKNOWN_WARM if total_steps is None else min(max(int(WARM_SHARE * total_steps), 1), MAX_WARM)
        self.begun = step
        self.ended: int | None = None
        """After how many optimizer steps it was over."""
        self.ending: Ending | None = None
        self.scale = self.supported = FIRST_SCALE
        """What the first learning rate is multiplied by, and the last such that the evidence has raised."""
        self.num_starts = 0
        self._begin()
        self.still: list[float] = []
        """Losses before anything had moved: what the loss is at first, and how far batches are apart."""
        self.tail: list[float] = []
        self.bends: list[float] = []
        """Squares that add to what is known of the noise, where few losses were still."""
        self.num_blind = 0

    def _begin(self) -> None:
        self.path = 0.0
        self.is_far = True
        self.num_raised = 0
        self.steepest = 0.0
        self.lowest = math.inf
        self._forget()

    def _forget(self) -> None:
        self.slopes: list[float] = []
        self.losses: list[float] = []
        self.fresh: list[float] = []
        self.raw_slopes: list[float] = []
        """At this learning rate: slopes over the path; losses, and those that are not among the still ones; slopes."""

    @property
    def is_over(self) -> bool:
        return self.ending is not None

    def update(
        self, step: int, loss: float, slope: float, rate: float, *, fine: bool = True, top: bool = False
    ) -> Then:
        """Take in one step; what follows. After "begin again" and "over" the first weights have to come back.

        Args:
            step: optimizer steps taken, this one included.
            loss: before the step; NaN where none was given.
            slope: of the loss over log(learning rate), before the step; NaN where no sample could be taken.
            rate: the learning rate of the step.
            fine: whether weights and loss are finite.
            top: whether the scale is at its upper bound.
        """
        why = self._judge(loss, slope, fine=fine, top=top)
        blameless = why == "broken" and self.path == 0  # not of our doing: nothing had moved
        if (why is None or blameless) and self._is_late(step):
            # What had to begin again has responded.
            why = "flat" if self.is_far and self.num_starts == 0 else "limit"
        elif blameless:
            self._forget()
            return "begin again"
        if why is None:
            if not math.isnan(slope):  # else the step was skipped, or had no gradients
                self.path += abs(rate)  # a schedule may pass below 0
            return "go on"
        if why in ("turned", "broken") and self.num_raised <= 1 and self.num_starts < MAX_STARTS:
            self.scale = self.supported = self.scale / (FAR_BELOW * math.exp(RISE * self.num_raised))
            self.num_starts += 1
            self.still = self.still[:1]
            self._begin()
            return "begin again"
        self.ending, self.ended = why, step
        given = {"flat": 1.0, "blind": BLIND_SCALE}
        self.scale = given[why] if why in given else self.supported / BACK[why]
        return "over"

    def _is_late(self, step: int) -> bool:
        rises = self.is_far and self.num_raised > 0
        return step - self.begun >= (self.far_steps if rises else self.max_steps)

    def _judge(self, loss: float, slope: float, *, fine: bool, top: bool) -> Ending | None:
        if not fine:
            return "broken"
        if math.isnan(loss):
            self.num_blind += 1
            return "blind" if self.num_blind >= MAX_BLIND else None
        self.num_blind = 0
        if math.isnan(slope):
            return None
        if self._has_moved(loss):
            self.is_far = False
        if self.is_far or len(self.still) < 2:
            self.still.append(loss)
        else:
            self.fresh.append(loss)
        self.losses.append(loss)
        self.raw_slopes.append(slope)
        if self.path == 0:
            return None
        self.slopes.append(slope / self.path)
        found = self._decide(slope)
        if found == "raise":
            if not top:
                return None
            # Far at a bound below the rate that was given is a user's ceiling; above it, nothing has responded.
            return "flat" if self.is_far and self.supported > 1 else "limit"
        return found

    def _decide(self, slope: float) -> Ending | Literal["raise"] | None:
        start, noise = self.start_and_noise()
        if self.is_far and len(self.still) >= 3 and abs(slope) < FAR * noise:
            return self._raise(FAST_RISE)
        if len(self.still) >= 3:
            self.is_far = False
        if self._was_noise():
            self.still += self.fresh
            self.is_far = True
            return self._raise(FAST_RISE)
        above = self.losses[-1] - start
        if above > BROKEN_NOISE * self.doubt * noise and slope > EXPLAINED * above:
            return "broken"  # worse than before training, beyond doubt, and by training
        found = np.array(self.slopes)
        down = -float(found.mean())
        if len(self.losses) >= MIN_SAMPLES and self._falls():
            return self._support(down)
        if len(found) == 2 and self.steepest > 0 and found.max() < -0.5 * self.steepest:
            return self._support(down)
        if len(found) < MIN_SAMPLES:
            return None
        recent = statistics.median(self.losses[-MIN_SAMPLES:])  # of a few batches one may be an outlier
        progress = max(start - self.lowest, 0.0)
        limit = min(self.lowest, start) + max(0.35 * progress, 5 * self.doubt * noise / math.sqrt(MIN_SAMPLES))
        if recent > limit and (recent < start or sum(self.raw_slopes[-MIN_SAMPLES:]) > 0):
            return "broken"
        # From successive differences: a trend is no noise.
        error = math.sqrt(float((np.diff(found) ** 2).sum()) / (2 * (len(found) - 1) * len(found)))
        z = -down / (error + 1e-300)
        if z < -2:
            return self._support(down)
        return "turned" if z > 2 or len(found) >= MAX_SAMPLES else None

    def _has_moved(self, loss: float) -> bool:
        """Whether a loss is off those before anything had moved: slopes of clipped gradients are small all the time."""
        if not self.is_far or len(self.still) < 2:
            return False
        start, noise = self.start_and_noise()
        return abs(loss - start) > 4 * self.doubt * noise

    def _was_noise(self) -> bool:
        """Whether weights that seemed to have moved have not: a few more steps show it neither in slopes nor in losses.

        Few losses before may have been close to each other by chance, or those of a long tail may come late.
        """
        num = len(self.fresh)
        if num < MIN_SAMPLES:
            return False
        start, noise = self.start_and_noise()
        share = math.sqrt(1 / num + 1 / len(self.still))
        bends = np.diff(self.fresh, 2) ** 2 / 6
        known = self._num_known + len(bends)
        pooled = math.sqrt((noise**2 * self._num_known + float(bends.sum())) / known)
        slopes = self.raw_slopes[-num:]
        if not any(slopes):
            return True  # the weights are where they were
        if max(map(abs, slopes)) >= FAR * pooled:
            return False
        if min(self.fresh) < start - BROKEN_NOISE * self.doubt * noise:
            return False  # long tails of losses reach upwards
        if sum(slopes) > 0:
            # Training may have raised the loss, and with it the noise. Clipped gradients have small slopes then, too.
            return abs(statistics.median(self.fresh) - start) <= 4 * self.doubt * noise * share
        # Slopes in favour of training: it can only have lowered the loss.
        return statistics.fmean(self.fresh) - start >= -4 * doubt_of(known) * pooled * share

    def _falls(self) -> bool:
        """Whether the loss falls, beyond doubt, at this learning rate, whatever the slope says.

        A large model learns the frequencies of its tokens first, and goes past them: seen from the first weights, each
        further step is then one too many, while the loss goes on to fall.
        """
        losses = np.array(self.losses)
        half = len(losses) // 2
        early, late = losses[:half], float(losses[-half:].mean())
        start, noise = self.start_and_noise()
        if late >= min(start, self.lowest, float(early.min())):
            return False  # it comes back from a jump
        noise = max(noise, math.sqrt(float((np.diff(losses) ** 2).mean()) / 2))
        return float(early.mean()) - late > 3 * noise * math.sqrt(2 / half)

    def start_and_noise(self) -> tuple[float, float]:
        """The loss before anything had moved, and the standard deviation of a single one."""
        start = statistics.fmean(self.still)
        squares = sum((loss - start) ** 2 for loss in self.still)
        pooled = (squares + sum(self.bends)) / self._num_known
        later = statistics.fmean(self.bends) if len(self.bends) >= ENOUGH_BENDS else 0.0
        return start, max(math.sqrt(max(pooled, later)), 1e-3 * abs(start), 1e-30)

    @property
    def _num_known(self) -> int:
        """Degrees of freedom of the noise."""
        return max(len(self.still) - 1 + len(self.bends), 1)

    @property
    def doubt(self) -> float:
        return doubt_of(self._num_known)

    def _support(self, down: float) -> Literal["raise"]:
        self.lowest = min(self.lowest, statistics.fmean(self.losses))
        is_linear = self.steepest > 0 and down > 0.8 * self.steepest
        self.steepest = max(self.steepest, down)
        return self._raise(FAST_RISE if is_linear else RISE)

    def _raise(self, rise: float) -> Literal["raise"]:
        if not self.is_far:
            # Of three losses in a row, what a trend does not explain.
            row = self.tail + self.losses
            self.bends += (np.diff(row, 2) ** 2 / 6).tolist()
            self.tail = row[-2:]
        self.supported = self.scale
        self.scale *= math.exp(rise)
        self.num_raised += 1
        self._forget()
        return "raise"

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self)) | {name: list(getattr(self, name)) for name in _LISTS}

    @staticmethod
    def check_state(state: Any) -> Mapping[str, Any] | None:
        """A state that can be used, or None: of a run that did not climb; ValueError or KeyError otherwise."""
        if state is None:
            return None
        found: Mapping[str, Any] = mapping_of(state, "climb")
        for name in ("max_steps", "far_steps", "warm_steps", "begun", "num_starts", "num_raised", "num_blind"):
            whole_of(found[name], name)
        for name in ("scale", "supported"):
            if not number(found[name]) > 0:
                raise ValueError(f"{name} of the climb must be a finite number > 0, but got {shown(found[name])}")
        for name in ("path", "steepest"):
            if not number(found[name]) >= 0:
                raise ValueError(f"{name} of the climb must be a finite number >= 0, but got {shown(found[name])}")
        lowest = found["lowest"]
        if lowest != math.inf and math.isnan(number(lowest)):
            raise ValueError(f"lowest of the climb must be a number, but got {shown(lowest)}")
        flag_of(found["is_far"], "is_far")
        for name in _LISTS:
            numbers_of(found[name], name, None, low=-1e150, high=1e150)
        ended, ending = found["ended"], found["ending"]
        if (ended is None) != (ending is None) or ending not in (None, *get_args(Ending)):
            raise ValueError(f"ending of the climb must be one of {get_args(Ending)}, but got {shown(ending)}")
        if ended is not None:
            whole_of(ended, "ended")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        for name in vars(self):
            setattr(self, name, list(state[name]) if name in _LISTS else state[name])


def doubt_of(num_known: int) -> float:
    """What a noise is multiplied by where a mistake would be dear: few losses tell little, two next to nothing.

    About how much further out the 99% quantile of Student's t is than that of a normal distribution.
    """
    return 1 + 2 / num_known + 20 / num_known**3


_LISTS = ("still", "tail", "bends", "slopes", "losses", "fresh", "raw_slopes")
