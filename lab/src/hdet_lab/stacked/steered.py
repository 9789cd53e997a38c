"""One run of a sweep as numbers: what its steps have shown goes in, the policy's verdict comes out."""

from __future__ import annotations

import math

import numpy as np

from hdet.checks import BoolArray, FloatArray
from hdet.options import Adapt
from hdet.policy.level import Sizes
from hdet.policy.rollback import Rollback
from hdet.policy.round import RoundPolicy, Seen, Verdict
from hdet.policy.steering import Steering
from hdet.signals.gradient import mean_and_error
from hdet_lab.stacked.run import Result, Run

MAX_ROLLBACKS = 20
"""AutoLR's default."""


class Steered:
    """One run's numbers: policy and record.

    Args:
        run: its configuration.
        table: the schedule's value in each step, for a peak of 1.
        num_groups: param groups. The paper has a learning rate for each, AutoLR one for all.
        lr_given: whether learning rate and schedule mean anything to AutoLR.
        num_parameters: of the model.
    """

    def __init__(
        self, run: Run, table: FloatArray, num_groups: int = 1, *, lr_given: bool = True, num_parameters: int = 1
    ) -> None:
        self.run, self.table = run, table
        level = run.make_level(table, lr_given=lr_given)
        self.knob_of_group = list(range(num_groups)) if run.method in ("spread", "paper") else [0] * num_groups
        self.steering = Steering(
            num_knobs=max(self.knob_of_group) + 1,
            num_replicas=run.num_replicas,
            spread=run.spread if run.method in ("spread", "anchored", "paper", "loss") else 0.0,
            controller=run.make_controller(),
            scale_bounds=Adapt().bounds,
            seed=run.seed,
        )
        self.policy = RoundPolicy(
            self.steering,
            interval=run.interval,
            acting=run.acting(table),
            rollback=Rollback(MAX_ROLLBACKS, interval=run.interval) if run.is_auto and run.rollback else None,
            level=level,
            quarantine=run.quarantine,
            anchored=run.is_auto,
        )
        self.result = Result(run)
        self._sizes = Sizes(math.nan, math.nan, math.nan, num_parameters)
        self._losses: list[FloatArray] = []
        self._slopes: list[float] = []

    def take(self, losses: FloatArray, slope: float, sizes: FloatArray) -> None:
        """What one step has shown: the loss of each replica, <g, theta - A>, and norms of weights, update, gradient."""
        self._losses.append(losses)
        self._slopes.append(slope)
        weights, update, gradient = map(float, sizes)
        self._sizes = Sizes(weights, update, gradient, self._sizes.num)

    @property
    def anchored(self) -> bool:
        return self.run.method in ("loss", "anchored")

    def lrs(self, scheduled: float) -> FloatArray:
        """The learning rate of each replica (row) and param group (column)."""
        base = scheduled * self.run.lr * self.steering.effective
        lrs: FloatArray = (base[:, None] * self.steering.multipliers)[self.knob_of_group].T
        return lrs

    def end_round(self, step: int, finite: BoolArray, scheduled: float, *, last: bool) -> Verdict | None:
        """End the round with what :meth:`take` has taken. None where the run cannot go on."""
        verdict = None
        losses, samples = np.mean(self._losses, axis=0), np.array(self._slopes)[:, None]
        self._losses, self._slopes = [], []
        if not self.result.error:
            slopes = mean_and_error(samples) if self.run.method == "gradient" else None
            given = scheduled * self.run.lr
            seen = Seen(
                step, losses, finite, given * float(self.steering.effective[0]), given, self._sizes,
                losses_given=True, slopes=slopes, left=len(self.table) - step, last=last,
                rates=given * self.steering.effective,
            )  # fmt: skip
            try:
                verdict = self.policy.end_round(seen)
            except RuntimeError as error:  # it is broken, or Eq. 7 would ascend
                self.result.error = str(error)
        seen = losses[np.isfinite(losses)]
        self.result.steps.append(step)
        self.result.train_loss.append(float(seen.mean()) if len(seen) else math.nan)
        self.result.base_lr.append(scheduled * self.run.lr * float(self.steering.effective[0]))
        self.result.z.append(verdict.control.get("z", (math.nan,))[0] if verdict is not None else math.nan)
        self.result.num_rollbacks = verdict.num_rollbacks if verdict is not None else self.result.num_rollbacks
        return verdict
