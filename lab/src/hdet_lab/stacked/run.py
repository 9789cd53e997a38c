"""One run of a sweep: how it is set up, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hdet.checks import FloatArray
from hdet.controllers import Controller
from hdet.ensemble.controllers import PaperController
from hdet.plan import make_controller
from hdet.policy.level import Level
from hdet.policy.timing import hold_start
from hdet_lab.recipes import SweepMethod as Method


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        lr: peak of the schedule.
        seed: of weights, data order and permutations.
        method: ``fixed`` schedule, plain data parallel; ``local``: the same, but replicas train apart, each on its own
            gradients, and are averaged every ``interval`` steps; ``spread``: fan-out and converge without a
            controller; ``anchored``: the same, placed by Eq. 11; the ``paper``'s controller; AutoLR with the ``loss``
            or ``gradient`` signal.
        num_replicas: N; 1 for ``fixed`` and ``gradient``, where more would change nothing but BatchNorm's statistics.
        interval: T.
        spread: alpha.
        start, hold: shares of the run before and after which the scale holds still; None for AutoLR's own.
        level, rollback, quarantine: as in AutoLR.
        controller: arguments of the controller.
        warm_noise: nu of Eq. 10, per tensor: start from the checkpoint of the seed, each replica with its own noise.
            None for freshly built weights.
        schedule: its shape; empty for the sweep's.
        label: free text, to tell variants apart.
    """

    lr: float
    seed: int = 0
    method: Method = "fixed"
    num_replicas: int = 1
    interval: int = 20
    spread: float = 0.1
    start: float | None = None
    hold: float | None = None
    level: bool | None = None
    rollback: bool = True
    quarantine: float | None = None
    controller: dict[str, Any] = field(default_factory=dict)
    warm_noise: float | None = None
    schedule: str = ""
    label: str = ""

    @property
    def shared(self) -> bool:
        """Whether replicas train on their mean gradient."""
        return self.method != "local"

    @property
    def is_auto(self) -> bool:
        return self.method == "loss" or self.method == "gradient"

    def make_level(self, table: FloatArray, *, lr_given: bool) -> Level | None:
        if not self.is_auto or self.level is False:
            return None
        if not lr_given:
            return Level(len(table), peak=self.lr, given=1.0)
        peak = float(table.max())
        return Level(len(table), peak=peak * self.lr, hint=True, warms_up=bool(table[0] < peak / 2))

    def acting(self, table: FloatArray) -> tuple[float, float]:
        """Between which steps the scale moves."""
        num_steps = len(table)
        found = self.is_auto and self.level is not False
        start = num_steps * ((0.0 if found else 0.02) if self.start is None else self.start)
        if self.method != "gradient" or self.hold is not None:
            return start, (1 - (0.05 if self.hold is None else self.hold)) * num_steps
        return start, hold_start(num_steps, table.tolist())

    def make_controller(self) -> Controller | None:
        if self.method == "paper":
            return PaperController(**self.controller)
        if self.method == "loss" or self.method == "gradient":
            return make_controller(self.method, **self.controller)
        return None


@dataclass
class Result:
    """What came of a run.

    Attributes:
        run: its configuration.
        validation: figures at the final mean weights, ``loss`` first.
        steps: taken at the end of each round; each of the first ones is a round.
        train_loss: mean loss over replicas, round by round.
        base_lr: centre of the first param group's learning rate, round by round.
        z: the controller's evidence, round by round, of the first knob.
        num_rollbacks: how often it was set back.
        error: why it could not go on, where a run on real processes would have ended; its ``validation`` is then NaN.
    """

    run: Run
    validation: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    base_lr: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    num_rollbacks: int = 0
    error: str = ""

    @property
    def lengths(self) -> list[int]:
        """Steps of each round."""
        return [end - begin for begin, end in zip([0, *self.steps], self.steps, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
