"""Training for the benchmark: runs on the stacked engine, as many at once as memory allows, with validation curves."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdet_lab.bench.suite import Entry
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.optim import StackedOptimizer
from hdet_lab.stacked.rivals import Rule
from hdet_lab.stacked.run import Result, Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks.base import Batch, Task

NUM_POINTS = 20
"""Of a validation curve."""
NUM_LRS = 32
"""Learning rates kept of a run of AutoLR."""
MIN_WATCHED, MAX_WATCHED = 64, 512


@dataclass
class Bench:
    """One entry, opened.

    Attributes:
        entry: of the suite.
        task: what is trained.
        seeds: of weights and data order.
        steps: of a run.
        device: where to train.
        defaults: method to schedule and learning rate, chosen on half A.
        earlier: the method's records of other seeds.
    """

    entry: Entry
    task: Task
    seeds: Sequence[int]
    steps: int
    device: str = "cpu"
    defaults: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    earlier: Sequence[dict[str, Any]] = ()

    @property
    def has_statistics(self) -> bool:
        """Whether the model has BatchNorm."""
        return any(buffer.is_floating_point() for buffer in self.task.build(0).buffers())

    def train(
        self,
        runs: Sequence[Run],
        optimizer: str | StackedOptimizer | Rule,
        *,
        steps: int | None = None,
        spent: int = 0,
        watched: bool = True,
    ) -> list[dict[str, Any]]:
        """Records of all runs, in their order; ``spent``: steps that a search has cost before."""
        watch = Watch(self, steps or self.steps, spent) if watched else None
        results = self.sweep(runs, optimizer, steps or self.steps, watch)
        return [_record(result, watch) for result in results]

    def sweep(
        self,
        runs: Sequence[Run],
        optimizer: str | StackedOptimizer | Rule,
        steps: int,
        watch: Watch | None = None,
    ) -> list[Result]:
        """A sweep in parts, and in smaller ones where memory ends."""
        found: list[Result] = []
        size = self.entry.stacked
        while len(found) < len(runs):
            part = runs[len(found) : len(found) + size]
            try:
                given = {} if watch is None else {"watch": watch}
                found += sweep(
                    self.task, part, optimizer=optimizer, num_steps=steps, device=self.device, **given  # type: ignore[arg-type]
                )  # fmt: skip
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = (min(size, len(part)) + 1) // 2
            gc.collect()  # an engine refers to itself, and its memory on the device must not wait
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()
        return found


class Watch:
    """Validation loss during a sweep, on a part of the validation set that is the same for all runs."""

    def __init__(self, bench: Bench, steps: int, spent: int) -> None:
        rows = bench.task.validation_rows
        num = min(max(2 * bench.task.batch_rows, MIN_WATCHED), MAX_WATCHED, len(rows))
        self._rows = rows[torch.linspace(0, len(rows) - 1, num).long()]
        self._task = bench.task
        self._spent = spent
        self._steps = {max(1, round(steps * point / NUM_POINTS)) for point in range(1, NUM_POINTS + 1)}
        self.curves: dict[int, list[tuple[int, float]]] = {}

    def is_due(self, step: int) -> bool:
        """Whether the curve has a point here."""
        return step in self._steps

    def batches(self) -> list[Batch]:
        """Of the part of the validation set."""
        return [self._task.gather(rows) for rows in torch.split(self._rows, 128)]

    def __call__(self, step: int, engine: StackedModels, runs: Sequence[Run]) -> None:
        """As ``sweep`` calls it."""
        if self.is_due(step):
            for run, loss in zip(runs, engine.evaluate(self.batches()).tolist(), strict=True):
                curve = self.curves.setdefault(id(run), [])
                if curve and curve[-1][0] >= step + self._spent:
                    curve.clear()  # a part that did not fit into memory begins again
                curve.append((step + self._spent, loss))


def _record(result: Result, watch: Watch | None) -> dict[str, Any]:
    run = result.run
    record: dict[str, Any] = {"lr": run.lr, "schedule": run.schedule, "seed": run.seed}
    record["loss"] = result.validation["loss"]
    others = {name: value for name, value in result.validation.items() if name != "loss"}
    if others:
        record["others"] = others
    if watch is not None:
        record["curve"] = watch.curves.get(id(run), [])
    if run.is_auto:
        record["lrs"] = thinned(list(zip(result.steps, result.base_lr, strict=True)), NUM_LRS)
        record["rollbacks"] = result.num_rollbacks
    if result.error:
        record["error"] = result.error
    return record


def thinned(points: Sequence[Any], num: int) -> list[Any]:
    """At most ``num`` of the points, evenly, the first and the last included."""
    if len(points) <= num:
        return list(points)
    places = [math.floor(place * (len(points) - 1) / (num - 1) + 0.5) for place in range(num)]
    return [points[place] for place in places]
