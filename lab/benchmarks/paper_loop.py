"""The paper's method on the lab's stacked engine, with the choices that its text leaves open as settings.

The lab's own ``sweep`` has the method as it should be. Here are the variants that only a test of the paper needs: fixed
multipliers, Eq. 8 as printed, other means of replicas that train apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hdet.checks import FloatArray
from hdet.controllers.base import Evidence
from hdet.ensemble.controllers import PaperController
from hdet.policy.spread import assign, multipliers
from hdet_lab.recipes import PEAK_SHARE, make_optimizer, schedule_table
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.inputs import row_table, warm_noise
from hdet_lab.tasks.base import Task
from paper_means import Mean, make_mean

Assignment = Literal["fixed", "permuted", "balanced"]
Decay = Literal["one-cycle", "floor", "printed"]
ASSIGNMENTS: tuple[Assignment, ...] = ("fixed", "permuted", "balanced")
DIV_FACTOR, FINAL_DIV_FACTOR = 25.0, 1e4
"""torch's defaults."""


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        label: to tell variants apart.
        lr: peak of the schedule.
        seed: of weights, data order and permutations.
        spread: alpha.
        temperature: sigma of the paper's controller; None for no controller.
        assignment: which replica holds which multiplier: the same all along, a permutation for each group (Eq. 9), or
            permutations that are as orthogonal as N allows.
        decay: of the base value (Eq. 8).
        factors: f_div and f_final of Eq. 8 as printed.
        offsets: what the learning rate of each group is multiplied by, to begin with; all 1 where empty.
        mean: with local gradients, how replicas come together.
        velocity: of Eq. 7, relative to the base value, or absolute as it is printed.
        rate, momentum: lambda and beta of Eq. 7.
        warm_noise: nu of Eq. 10, around the checkpoint of the seed; None for freshly built weights.
    """

    label: str
    lr: float
    seed: int = 0
    spread: float = 1 / 9
    temperature: float | None = None
    assignment: Assignment = "permuted"
    decay: Decay = "one-cycle"
    factors: tuple[float, float] = (9.0, 0.5)
    offsets: tuple[float, ...] = ()
    mean: str = "mean"
    velocity: Literal["relative", "absolute"] = "relative"
    rate: float = 0.5
    momentum: float = 0.9
    warm_noise: float | None = None


@dataclass
class Outcome:
    """What came of it: figures at the final mean, the mean weights, each group's scale and the loss, round by round.

    ``error``: why Eq. 7 has ended the run; its weights are those of that round.
    """

    setting: Setting
    validation: dict[str, float] = field(default_factory=dict)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    scales: list[list[float]] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    bytes_sent: float = 0.0
    error: str = ""


def printed_gamma(f_div: float, f_final: float, num_rounds: float) -> float:
    """Eq. 8 as printed; below 0 the learning rate grows."""
    return 1 - math.exp(-math.log(f_div / f_final) / num_rounds)


def decay_table(setting: Setting, num_steps: int, interval: int) -> FloatArray:
    """The schedule's value in each step, for a peak of 1; after the peak of it Eq. 8, step by step."""
    table = schedule_table("one-cycle", num_steps)
    if setting.decay == "one-cycle":
        return table
    peak = math.ceil(PEAK_SHARE * num_steps)
    num_rounds = (num_steps - peak) / interval
    floor = (DIV_FACTOR * FINAL_DIV_FACTOR, 1.0)
    gamma = printed_gamma(*(floor if setting.decay == "floor" else setting.factors), num_rounds)
    rounds = np.arange(num_steps - peak) / interval
    return np.concatenate([table[:peak], np.power(1 - gamma, rounds)])


class _Numbers:
    """Scales and multipliers of one run."""

    def __init__(self, setting: Setting, num_groups: int, num_replicas: int) -> None:
        self.setting, self.num_groups, self.num_replicas = setting, num_groups, num_replicas
        self.controller = None
        if setting.temperature is not None:
            self.controller = PaperController(
                setting.temperature, setting.rate, setting.momentum, velocity=setting.velocity
            )
        self.state = None if self.controller is None else self.controller.init(num_groups)
        self.scales = np.array(setting.offsets or [1.0] * num_groups)
        self.rho = self.fan_out(0)
        self.error = ""

    def fan_out(self, index: int) -> FloatArray:
        rho = np.tile(multipliers(self.num_replicas, self.setting.spread), (self.num_groups, 1))
        if index == 0 or self.setting.assignment == "fixed":
            return rho
        balanced = self.setting.assignment == "balanced"
        places = assign(
            self.num_replicas, self.num_groups, seed=self.setting.seed, round_index=index, balanced=balanced
        )
        return 1 + self.setting.spread * places

    def end_round(self, losses: FloatArray, index: int, scheduled: float, *, acts: bool, last: bool) -> None:
        """``scheduled``: what the schedule alone gave in the round's last step."""
        if self.controller is not None and self.state is not None and acts:
            evidence = Evidence(losses, self.rho, last=last, values=scheduled * self.scales)
            try:
                self.state, decision = self.controller.update(self.state, evidence)
            except RuntimeError as error:  # training would ascend
                self.error, self.scales = str(error), 0 * self.scales
            else:
                self.scales = self.scales * decision.factors
        self.rho = self.fan_out(index)


def train(
    task: Task,
    settings: Sequence[Setting],
    *,
    num_replicas: int,
    interval: int,
    num_steps: int,
    optimizer: str = "adam",
    shared: bool = True,
    apart_from: float = 1.0,
    acts_from: float = 0.02,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoints: Mapping[int, Mapping[str, Tensor]] | None = None,
    watch: Callable[[int, StackedModels, FloatArray, Sequence[FloatArray]], None] = lambda *_: None,
) -> list[Outcome]:
    """All runs side by side.

    Gradients are each replica's own where not ``shared``, but only from the share ``apart_from`` of the run on if that
    is below 1. The controller acts from ``acts_from`` on. ``watch`` sees the step, the models before a converge, the
    losses of the round (R, N) and the multipliers (G, N) of each run.
    """
    task.to(device)
    models = [task.build(setting.seed) for setting in settings]
    for setting, model in zip(settings, models, strict=True):
        if setting.warm_noise is not None:
            model.load_state_dict((checkpoints or {})[setting.seed])
    groups = task.groups(models[0])
    engine = StackedModels(
        models, task.loss, groups, num_replicas=num_replicas, optimizer=make_optimizer(optimizer), shared=shared,
        device=device, dtype=dtype, noise=warm_noise(models, groups, settings, num_replicas),
        graph=device.startswith("cuda") and apart_from == 1,
    )  # fmt: skip
    rows = row_table(task, [setting.seed for setting in settings], num_steps, num_replicas).to(device)
    tables = np.stack([decay_table(setting, num_steps, interval) for setting in settings])
    numbers = [_Numbers(setting, len(groups), num_replicas) for setting in settings]
    means: list[Mean] = [make_mean(s.mean, engine.weights[i]) for i, s in enumerate(settings)]
    found = [Outcome(setting) for setting in settings]
    seen: list[Tensor] = []
    for step in range(num_steps):
        engine.shared = shared or step < apart_from * num_steps < num_steps
        lrs = np.stack(
            [
                table[step] * n.setting.lr * (n.scales[:, None] * n.rho).T
                for table, n in zip(tables, numbers, strict=True)
            ]
        )
        shown = engine.step(task.gather(rows[step]), torch.from_numpy(lrs).to(device, dtype))
        seen.append(shown.losses)
        last = step + 1 == num_steps
        if (step + 1) % interval and not last:
            continue
        losses, norms = torch.stack(seen).double().mean(0).cpu().numpy(), shown.norms.double().cpu().numpy()
        seen = []
        watch(step + 1, engine, losses, [n.rho for n in numbers])
        for i, outcome in enumerate(found):
            index = (step + 1) // interval
            with torch.no_grad():
                means[i].apply_(engine.weights[i], losses[i], norms[i], last=last)
            scheduled = float(tables[i, step]) * outcome.setting.lr
            numbers[i].end_round(losses[i], index, scheduled, acts=step >= acts_from * num_steps, last=last)
            outcome.train_loss.append(float(losses[i].mean()))
            outcome.scales.append(numbers[i].scales.tolist())
    for i, outcome in enumerate(found):
        outcome.validation = task.evaluate(engine.mean_model(i))
        outcome.weights = engine.mean()[i].cpu().clone()
        outcome.bytes_sent, outcome.error = means[i].bytes_sent, numbers[i].error
    return found
