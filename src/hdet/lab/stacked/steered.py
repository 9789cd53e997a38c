"""One run of a sweep as numbers: what its steps have shown goes in, the policy's verdict comes out."""

from __future__ import annotations

import math

import numpy as np

from hdet.checks import BoolArray, FloatArray
from hdet.lab.stacked.run import Result, Run
from hdet.options import Adapt
from hdet.policy.rollback import BrokenError, Rollback
from hdet.policy.round import RoundPolicy
from hdet.policy.steering import Steering
from hdet.policy.verdict import Observed, Verdict
from hdet.signals.gradient import mean_and_error

MAX_ROLLBACKS = 20
"""AutoLR's default."""


class Steered:
    """One run's numbers: policy and record.

    Args:
        run: its configuration.
        table: the schedule's value in each step, for a peak of 1.
        num_groups: param groups. The paper has a learning rate for each, AutoLR one for all.
        lr_given: whether learning rate and schedule mean anything to AutoLR.
    """

    def __init__(self, run: Run, table: FloatArray, num_groups: int = 1, *, lr_given: bool = True) -> None:
        self.run, self.table = run, table
        climb = run.make_climb(len(table), lr_given=lr_given)
        self.knob_of_group = list(range(num_groups)) if run.method in ("spread", "paper") else [0] * num_groups
        self.steering = Steering(
            num_knobs=max(self.knob_of_group) + 1,
            num_replicas=run.num_replicas,
            spread=run.spread if run.method in ("spread", "anchored", "paper", "loss") else 0.0,
            controller=run.make_controller(),
            scale_bounds=Adapt().bounds,
            gated=run.is_gated(len(table), climbs=climb is not None),
            seed=run.seed,
            first_scale=run.make_first_scale(len(table)),
        )
        self.policy = RoundPolicy(
            self.steering,
            interval=run.interval,
            acting=run.acting(table, climbs=climb is not None),
            rollback=Rollback(MAX_ROLLBACKS, interval=run.interval) if run.is_auto and run.rollback else None,
            climb=climb,
            quarantine=run.quarantine,
            anchored=run.is_auto,
        )
        self.result = Result(run)
        self._losses: list[FloatArray] = []
        self._slopes: list[float] = []

    def take(self, losses: FloatArray, slope: float) -> None:
        """What one step has shown: the loss of each replica, and <g, theta - A>."""
        self._losses.append(losses)
        self._slopes.append(slope)

    def rise(self, step: int) -> None:
        """Tell the steering by how much the schedule moved."""
        moved = math.log(self.table[step] / self.table[step - 1])
        self.steering.rise(np.full(len(self.steering.scales), moved))

    @property
    def anchored(self) -> bool:
        return self.run.method in ("loss", "anchored")

    def lrs(self, scheduled: float) -> FloatArray:
        """The learning rate of each replica (row) and param group (column)."""
        base = scheduled * self.run.lr * self.steering.scales
        lrs: FloatArray = (base[:, None] * self.steering.multipliers)[self.knob_of_group].T
        return lrs

    def end_round(self, step: int, finite: BoolArray, scheduled: float, *, last: bool) -> Verdict | None:
        """End the round with what :meth:`take` has taken. None where the run cannot go on."""
        verdict = None
        losses, samples = np.mean(self._losses, axis=0), np.array(self._slopes)[:, None]
        self._losses, self._slopes = [], []
        if not self.result.error:
            slopes = mean_and_error(samples) if self.run.method == "gradient" else None
            rate = scheduled * self.run.lr * float(self.steering.scales[0])
            seen = Observed(step, losses, finite, rate, losses_given=True, slopes=slopes, last=last)
            try:
                verdict = self.policy.end_round(seen)
            except BrokenError as error:
                self.result.error = str(error)
        seen = losses[np.isfinite(losses)]
        self.result.steps.append(step)
        self.result.train_loss.append(float(seen.mean()) if len(seen) else math.nan)
        self.result.base_lr.append(scheduled * self.run.lr * float(self.steering.scales[0]))
        self.result.z.append(verdict.looked.lrs.get("z", (math.nan,))[0] if verdict is not None else math.nan)
        if verdict is not None and verdict.phase == "climb" and not self.policy.climbing:
            assert self.policy.climb is not None
            self.result.climb_steps, self.result.climb_ending = step, self.policy.climb.ending or ""
        self.result.num_rollbacks = verdict.num_rollbacks if verdict is not None else self.result.num_rollbacks
        return verdict
