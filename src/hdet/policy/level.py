"""The first learning rate, from the size of the updates (Eq. 16). Numbers only.

A step that changes the weights by a hundredth of their size, in large models by a third of a hundredth and in tiny ones
by several, is a sensible first one for every optimizer; the learning rate that does so follows from one measured
update. So the first steps are taken at a negligible rate, which tells the size of an update per unit of learning rate,
and the rate then rises along the warm-up.
Every step trains, and none is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hdet.checks import flag_of, mapping_of, number, shown, whole_of

SHARE = 0.02
"""delta of Eq. 16, of a model whose allowance is 1. Adam's updates shrink as noise averages out: at the level they
change the weights by 0.7% to 2% then."""
SHORT_RUN, MOST = 200, 2.0
"""Steps of a run below which each has to do more, by the square root; and at most so many times more."""
LARGE_MODEL, SIZE_POWER, BEYOND = 3e6, -0.4, 2.0
"""Entries of a model whose allowance is 1, the power of their number that it goes with, and how many times as fast it
falls beyond. The best learning rate falls about as a model's width grows, and their number grows as its square."""
USUAL_WEIGHTS, WEIGHTS_POWER = 0.06, -0.75
"""Root mean square of weights of the same, and the power of theirs. The best learning rate depends on the size of the
weights much less than in proportion: embeddings that start at 1 do not bear steps 16 times as large."""
LEAST, MOST_ROOM, MOST_WARY, LEAST_SIZE = 1 / 3, 6.0, 2.0, 0.3
"""Bounds of the allowance, the third where held-out data have a say or updates follow the gradient; and what the number
of entries takes off the bound on updates at most."""
OF_GRADIENT, OF_SIGN = (0.3, 8.0), (0.3, 1.05)
"""The first update per unit of learning rate follows the gradient, as SGD's do, where its size over the gradient's is
between the first two, and its root mean square is not between the others, as that of Adam's. In small batches such
updates are of very different sizes."""
STEADY, IS_STEADY, IS_STEADY_SIGN = 2.5, (0.75, 0.9), (0.95, 0.99)
"""What the level of updates that never shrink, as Lion's and Muon's, is divided by; and of their smallest size over the
largest one: between the two this comes to count. Adam's begin as signs as Lion's do, and where gradients agree they
stay near."""
USUAL, USUAL_SIZE_POWER, USUAL_WEIGHTS_POWER = 1.6, -0.55, -0.87
USUAL_STEADY, USUAL_STEADY_SIGN, FURTHER = 8.0, 13.0, 2.0
"""Where progress alone leads to: times the share of the weights that the best learning rate's first updates are of, in
models of the same size, with these powers of theirs; what that is divided by where updates never shrink, and are like
Muon's or Lion's; and how many times further it leads at most in large models, where noise costs nothing."""
SETTLED = 2.0
"""What the last update counts beside the largest one: updates of a fixed size, as Lion's, add up to more than those
that shrink as noise averages out, as Adam's."""
PROBE_LR, PROBE_SIZE = 1e-12, 1e-4
"""The learning rate of the first step; and the relative size that the next one aims at, before an update was seen."""
MAX_PROBE = 1e4
"""Times the larger of the two guesses, and times the step before: no step before an update was seen has a higher
learning rate."""
MEASURABLE = 1e-6
"""Relative updates below are lost in rounding."""
SMALLEST = 1e-3
"""Root mean square that weights count with at least: those that start from zero have no size of their own."""
BOUNDS = (1e-30, 1e30)
"""Of the level, as a learning rate and as a scale: numbers stay finite whatever was measured."""
MAX_TRIES = 20
"""Steps without a measurable update, before the learning rate that was given is used instead."""
TRUST = 8.0
"""A schedule is followed as it is where its peak is within this factor of the first level, or of that of a model whose
allowance is 1."""
APPROACH = 3.0
"""Warm-ups after which a schedule is followed as it is where its peak is above the first level; and after which a small
model has its allowance where held-out data have a say. A few steps at a high rate before that would cost more than the
whole approach."""
WARM_SHARE, MAX_WARM, UNKNOWN_WARM = 0.06, 500, 50
"""Of the run: the steps in which the learning rate rises from zero; at most, and in a run of unknown length."""
NUM_FIRST = 4
"""Rounds of one step at the beginning."""
APART, FOR, PATIENCE = 1.25, 0.6, 5.0
"""Of validation over training: above, in evaluations in a row over so many warm-ups, a small model starts again at the
level of one whose allowance is 1; and the warm-ups after which it does not any more."""


class Sizes(NamedTuple):
    """Euclidean norms over all entries that a step has moved or could have moved.

    Attributes:
        weights: before the step.
        update: of what the step has added.
        gradient: before the step.
        num: of entries.
        others, num_others: of the weights that Muon trains beside this optimizer, of the same model.
    """

    weights: float
    update: float
    gradient: float
    num: float
    others: float = 0.0
    num_others: float = 0.0

    @property
    def num_model(self) -> float:
        """Entries of the whole model."""
        return max(self.num + self.num_others, 1.0)

    @property
    def like_model(self) -> float:
        """The weights, if their root mean square were that of the whole model, where the others' is known."""
        if not self.num_others or not math.isfinite(self.others):
            return self.weights
        return math.hypot(self.weights, self.others) * math.sqrt(self.num / self.num_model)

    @property
    def counted(self) -> float:
        """The size that they count with."""
        return max(self.like_model, SMALLEST * math.sqrt(self.num))

    @property
    def floored(self) -> float:
        """The same of the weights as they are."""
        return max(self.weights, SMALLEST * math.sqrt(self.num))

    @property
    def is_measurable(self) -> bool:
        """Whether the update is more than rounding, and no weights have broken."""
        return math.isfinite(self.update) and math.isfinite(self.others) and self.update > MEASURABLE * self.floored

    @property
    def usual(self) -> float:
        """What the best learning rate's first updates are usually of, beside :data:`SHARE`; no less in large models."""
        root, num = self._root, self.num_model
        by_weights = math.pow(max(root, 1e-30) / USUAL_WEIGHTS, USUAL_WEIGHTS_POWER)
        return by_weights * max(math.pow(num / LARGE_MODEL, USUAL_SIZE_POWER), 1.0)

    @property
    def further(self) -> float:
        """How many times further progress leads where noise surely costs nothing: large models are trained for long."""
        return min(math.sqrt(max(self.num_model / LARGE_MODEL, 1.0)), FURTHER)

    @property
    def _root(self) -> float:
        return self.counted / math.sqrt(max(self.num, 1.0))

    def allowance(self, most: float, least_size: float = 0.0) -> float:
        """What a step may do beside one of a model of 3M entries with weights of the usual size; at most ``most``."""
        num = self.num_model
        by_weights = math.pow(max(self._root, 1e-30) / USUAL_WEIGHTS, WEIGHTS_POWER)
        by_size = math.pow(num / LARGE_MODEL, SIZE_POWER * (BEYOND if num > LARGE_MODEL else 1.0))
        return min(max(by_weights * max(by_size, least_size), LEAST), most)


class Level:
    """Finds the scale at which a run starts.

    Args:
        total_steps: length of the run; None where it is unknown.
        peak: the schedule's highest learning rate for the first param group.
        given: the scale to fall back on where no update can be measured.
        hint: whether the peak is worth following where it is near what is found.
        warms_up: whether the schedule rises to its peak by itself.
        watched: whether losses on held-out data will be known.
        spectral: whether updates of matrices have one spectral norm, as Muon's: the size of the model does not take the
            allowance below 1, since their best learning rate is no lower in large models. Nor does it beside Muon.

    Attributes:
        scale: what the schedule has to be multiplied by now.
        found: whether an update has been measured.
        gave_up: whether there was none to measure.
        done: whether the level is final: the warm-up is over.
        usual: the learning rate that progress alone leads up to; 1e30 where none is known.
        restarts: whether training may still start again from its first weights.
        started: the step after which it has started, for the last time.
        apart_since: the step of the first of the evaluations in a row that say so; 0 where the last one does not.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        peak: float = 1.0,
        given: float = 1.0,
        hint: bool = False,
        warms_up: bool = False,
        watched: bool = False,
        spectral: bool = False,
    ) -> None:
        self.warm_steps = UNKNOWN_WARM if total_steps is None else min(max(int(WARM_SHARE * total_steps), 1), MAX_WARM)
        self.size = SHARE * (1.0 if total_steps is None else min(max(SHORT_RUN / total_steps, 1.0) ** 0.5, MOST))
        """Of an update, at the level."""
        self.peak, self.given, self.hint, self.warms_up, self.watched = peak, given, hint, warms_up, watched
        self.spectral = spectral
        self.scale = _bounded(PROBE_LR / peak)
        self.largest = self.smallest = self.last = self.lr = self._weights = 0.0
        self.allowance, self.usual, self._usual_size, self._part = 1.0, BOUNDS[1], BOUNDS[1], 1.0
        self.num_tries = self.started = self.apart_since = 0
        self.found = self.gave_up = self.done = self.follows_gradient = self._is_sign = False
        self.restarts = True
        self._probed = 0.0

    @property
    def follows_hint(self) -> bool:
        """Whether the schedule's own peak is the level."""
        usual = self.lr / self.allowance  # more and less than that is for a rate that nobody has chosen
        low, high = min(usual, self.lr), max(usual, self.lr)
        return self.hint and (self.gave_up or low / TRUST <= self.peak <= high * TRUST)

    @property
    def steadiness(self) -> float:
        """1 where updates never shrink, as Lion's and Muon's; 0 where they do, as Adam's, or none was measured."""
        low, high = IS_STEADY_SIGN if self._is_sign else IS_STEADY
        return min(max((self.smallest / max(self.largest, 1e-300) - low) / (high - low), 0.0), 1.0)

    @property
    def most(self) -> float:
        """The highest allowance."""
        return MOST_WARY if self.follows_gradient else MOST_ROOM

    @property
    def _unroomed(self) -> float:
        """What the warm-up ends at, of the level."""
        return 1 / max(self.allowance, 1.0) if self.watched and not self.follows_hint else 1.0

    @property
    def _until(self) -> int:
        return math.ceil(APPROACH * self.warm_steps)

    def is_searching(self, step: int) -> bool:
        """Whether the step after ``step`` is a round of its own."""
        return not (self.found or self.gave_up) or step < NUM_FIRST

    def share(self, step: int) -> float:
        """Of the level, in the step after ``step``: the warm-up, where the schedule has none of its own.

        The peak of a schedule that is followed counts as the level; where it is above the one that was found, the share
        goes on from there, and is 1 after three warm-ups. So it does from the level of a large model to that of a small
        one, where losses on held-out data will be known: they are to have a say before.
        """
        if not self.found or (self.follows_hint and self.lr >= self.peak):
            return 1.0
        warmed = (step + 1 - self.started) / self.warm_steps
        first = self.lr / self.peak if self.follows_hint else self._unroomed
        left = min(max((APPROACH - warmed) / (APPROACH - 1), 0.0), 1.0)
        return float(first**left) * (1.0 if self.warms_up else min(warmed, 1.0))

    def start_again(self, step: int, ratio: float) -> str:
        """Whether training starts again, once, at a lower level; why, in plain English, or nothing.

        A small model that memorises its data at once has no good point to go on from.

        Args:
            step: optimizer steps taken.
            ratio: validation over training, of an evaluation.
        """
        self.apart_since = (self.apart_since or step) if ratio > APART else 0
        if not self.done:
            return ""
        if self.gave_up or self.allowance <= 1 or step > PATIENCE * self.warm_steps:
            self.restarts = False
        elif self.apart_since and step - self.apart_since >= FOR * self.warm_steps:
            self.restarts, self.started = False, step
            self.lr, self.scale = self.lr / self.allowance, _bounded(self.scale / self.allowance)
            self.allowance = 1.0
            return (
                f"validation is {ratio:.2g} times the training loss: training starts again from its first "
                f"weights, at a learning rate of {self.lr:.3g}"
            )
        return ""

    def update(self, step: int, sizes: Sizes | None, rate: float, scheduled: float) -> str:
        """Take in a step; what happened, in plain English, or nothing.

        Args:
            step: optimizer steps taken, this one included.
            sizes: what was measured in it; None where nothing was.
            rate: the first param group's learning rate in it.
            scheduled: what the schedule alone gave.
        """
        said = ""
        if not (self.found or self.gave_up):
            self._search(sizes, rate, scheduled)
            if self.gave_up:
                said = (
                    f"no update of the weights could be measured in {self.num_tries} steps: training goes on at the "
                    f"learning rate that was given, {self.peak * self.scale:.3g}"
                )
        else:
            self._measure(sizes, rate)
        if self.found and not self.done and self.largest > 0:
            steady = self.steadiness
            share = self.size * self.allowance / STEADY**steady
            self.lr = _bounded(share * self._weights / (self.largest + SETTLED * self.last))
            if not self.follows_gradient:
                divided = (USUAL_STEADY_SIGN if self._is_sign else USUAL_STEADY) ** steady
                self.usual = _bounded(USUAL * self.size * self._usual_size / divided)
            self.scale = 1.0 if self.follows_hint else _bounded(self.lr / self.peak)
        if step >= max(self.warm_steps, NUM_FIRST) and (self.found or self.gave_up) and not self.done:
            self.done = True
            said = said or self._say()
        return said

    def _search(self, sizes: Sizes | None, rate: float, scheduled: float) -> None:
        self._measure(sizes, rate)
        if self.largest > 0:
            self.found = True
            return
        self.num_tries += 1
        if self.num_tries >= MAX_TRIES:
            self.gave_up, self.scale = True, self.given
            return
        weights = math.nan if sizes is None else sizes.floored
        if sizes is None or not (0 < sizes.gradient < math.inf and 0 < weights < math.inf):
            return
        # Of the two sizes that an update may have per unit of learning rate, the larger one first: at most the square
        # root of the number of entries where it is like a sign, the gradient's own where it is like SGD's.
        aims = sorted(PROBE_SIZE * weights / size for size in (math.sqrt(sizes.num), sizes.gradient))
        later = [aim for aim in aims if aim > self._probed]
        # What could not be measured was below a millionth of the weights, so that this is at most a hundredth of them.
        safe = max(MAX_PROBE * self._probed, aims[0])
        # Something else than the rate may keep an optimizer from moving for some steps: never far above both.
        self._probed = _bounded(min(later[0], safe) if later else min(100 * self._probed, MAX_PROBE * aims[-1]))
        self.scale = _bounded(self._probed / max(scheduled, 1e-3 * self.peak))

    def _measure(self, sizes: Sizes | None, rate: float) -> None:
        if sizes is None or self.done or not rate > 0:
            return
        if sizes.is_measurable:
            self.last, root = _bounded(sizes.update / rate), math.sqrt(max(sizes.num, 1.0))
            if not self.largest:
                self._is_sign = _is_between(self.last / root, OF_SIGN)
                self.follows_gradient = not self._is_sign and _is_between(
                    self.last / max(sizes.gradient, 1e-300), OF_GRADIENT
                )
            self.smallest = min(self.smallest, self.last) if self.largest else self.last
            self.largest = max(self.largest, self.last)
            self._weights, self._part = sizes.counted, sizes.num / sizes.num_model
            self.allowance = sizes.allowance(MOST_WARY if self.watched else self.most)
            if self.spectral or sizes.num_others:
                self.allowance = max(self.allowance, min(sizes.allowance(self.most, 1.0), 1.0))
            # Gradients that grow make Adam's updates up to three times as large as signs, for a while.
            self._usual_size = _bounded(sizes.usual * sizes.counted / min(self.largest, root))

    def _say(self) -> str:
        if self.gave_up:
            return ""
        if not self.hint:
            first = self.lr * self._unroomed
            change = f"at which a step changes the weights by about {100 * first * self.last / self._weights:.2g}%"
            if self._part < 1:
                change = f"as for the whole model, of which this optimizer trains {self._part:.1%}"
            return f"the learning rate starts from {first:.3g}, {change}" + (
                f", and reaches {self.lr:.3g} at step {self._until}" if first < self.lr else ""
            )
        if self.follows_hint:
            if self.lr >= self.peak:
                return ""
            return (
                f"the schedule is approached from {self.lr:.3g} instead of {self.peak:.3g}, which the size of the "
                f"updates suggests, and is followed as it is from step {self._until} on"
            )
        return (
            f"the schedule's peak of {self.peak:.3g} is {self.peak / self.lr:.2g} times the learning rate that the "
            f"size of the updates suggests, {self.lr:.3g}; the schedule is rescaled to it"
            + (f", which is reached at step {self._until}" if self._unroomed < 1 else "")
        )

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Any) -> Level | None:
        """A new one out of a state, None out of that of a run without; ValueError or KeyError where it cannot be."""
        if state is None:
            return None
        found: Mapping[str, Any] = mapping_of(state, "level")
        # States of earlier versions have none of these.
        allowance = number(found.get("caution", 1.0)) * number(found.get("room", 1.0))
        found = {"allowance": allowance, "smallest": 0.0, "watched": False, "follows_gradient": False, **found}
        found = {"started": 0, "apart_since": 0, "restarts": False, "_is_sign": False, **found}
        found = {"usual": BOUNDS[1], "_usual_size": BOUNDS[1], "spectral": False, "_part": 1.0, **found}
        for name in ("warm_steps", "num_tries", "started", "apart_since"):
            whole_of(found[name], name)
        for name in ("size", "peak", "given", "scale", "allowance", "usual", "_usual_size", "_part"):
            if not number(found[name]) > 0:
                raise ValueError(f"{name} of the level must be a finite number > 0, but got {shown(found[name])}")
        for name in ("largest", "smallest", "last", "lr", "_probed", "_weights"):
            if not number(found[name]) >= 0:
                raise ValueError(f"{name} of the level must be a finite number >= 0, but got {shown(found[name])}")
        names = ("hint", "warms_up", "watched", "spectral", "restarts", "found", "gave_up", "done", "follows_gradient")
        for name in (*names, "_is_sign"):
            flag_of(found[name], name)
        level = cls()
        vars(level).update({name: found[name] for name in vars(level)})
        return level


def beside_weights(sizes: Sizes, level: Level | None) -> tuple[float, float]:
    """Size of an update beside the weights, over the model's allowance, as of a long run; and its ease.

    That is what it is to be multiplied by where a larger one surely costs little: it has an allowance of 3 then.
    """
    most, more = (MOST_ROOM, 1.0) if level is None else (level.most, level.size / SHARE)
    allowance = sizes.allowance(most, LEAST_SIZE)
    return sizes.update / max(sizes.like_model, 1e-300) / allowance / more, min(allowance / 3, 1.0)


def _bounded(value: float) -> float:
    return min(max(value, BOUNDS[0]), BOUNDS[1])


def _is_between(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]
