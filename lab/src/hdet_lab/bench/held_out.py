"""AutoLR with a probe and a learned weight decay, in a plain loop, on a task whose training rows pay for the probe."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hdet import AutoLR
from hdet.policy.rollback import BrokenError
from hdet_lab.bench.suite import START
from hdet_lab.bench.train import NUM_LRS, Bench, Watch, thinned
from hdet_lab.recipes import make_torch_optimizer
from hdet_lab.tasks.base import Task, evaluation_mode, random_rows
from hdet_lab.tasks.text import TextTask

SHARE = 0.1
"""Of the training rows, held back for the probe."""
_OTHER_SEEDS = (1_000_003, 2_000_003, 3_000_003, 4_000_003)


class HeldBack:
    """A task without a tenth of its training rows, the same tenth for all seeds.

    Rows are held back at random; pictures in all their variants; of a text its last tenth, with the sequences that
    reach into it. In a batch they are replaced by rows that other seeds have in the same step.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        num_train = int(getattr(task, "num_train", task.validation_rows.min()))
        self._num_items = len(task.images) if hasattr(task, "images") else int(task.validation_rows.max()) + 1
        self._held = torch.zeros(self._num_items, dtype=torch.bool)
        num_held = math.ceil(SHARE * num_train)
        if isinstance(task, TextTask):
            self.probe_rows = torch.arange(num_train - num_held, num_train)
            self._held[num_train - num_held - task.context : num_train] = True
        else:
            order = torch.randperm(num_train, generator=torch.Generator().manual_seed(0))
            self.probe_rows = order[:num_held]
            self._held[self.probe_rows] = True

    def is_held(self, rows: Tensor) -> Tensor:
        """Which of the rows must not be trained on."""
        return self._held[rows % self._num_items]

    def rows(self, step: int, *, seed: int) -> Tensor:
        """What the task has for this step, but for rows that are held back."""
        rows = self.task.rows(step, seed=seed)
        others = torch.cat([self.task.rows(step, seed=seed + other) for other in _OTHER_SEEDS])
        return rows.masked_scatter(self.is_held(rows), others[~self.is_held(others)])


def run_held_out(bench: Bench) -> list[dict[str, Any]]:
    """Records of all seeds, one run after the other."""
    bench.task.to(bench.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rollbacks are in the records
        return [_train(bench, HeldBack(bench.task), seed) for seed in bench.seeds]


def _train(bench: Bench, data: HeldBack, seed: int) -> dict[str, Any]:
    task = bench.task
    model = task.build(seed).to(bench.device)
    num_probes = 0

    def probe() -> Tensor:
        nonlocal num_probes
        num_probes += 1
        chosen = random_rows(len(data.probe_rows), task.batch_rows, seed=seed, step=num_probes)
        return task.loss(model, task.gather(data.probe_rows[chosen]))

    optimizer = make_torch_optimizer("adamw", START, task, model)
    scheduler = AutoLR(optimizer, total_steps=bench.steps, model=model, probe=probe, weight_decay="learn")
    watch, curve, error = Watch(bench, bench.steps, 0), [], ""
    try:
        for step in range(bench.steps):
            optimizer.zero_grad()
            loss = task.loss(model, task.gather(data.rows(step, seed=seed)))
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            if watch.is_due(step + 1):
                curve.append((step + 1, _mean_loss(task, model, watch)))
    except BrokenError as broken:
        error = str(broken)
    found = {"loss": math.nan} if error else task.evaluate(model)
    history, others = scheduler.history, {name: value for name, value in found.items() if name != "loss"}
    lrs = [(record.step, record.base_values[0]) for record in history]
    record = {
        "lr": START, "schedule": "none", "seed": seed, "loss": found["loss"], **({"others": others} if others else {}),
        "curve": curve, "lrs": thinned(lrs, NUM_LRS), "rollbacks": history[-1].num_rollbacks if history else 0,
        "weight_decay": max(scheduler.found().weight_decays), "num_held_back": len(data.probe_rows),
    }  # fmt: skip
    return {**record, "error": error} if error else record


@torch.no_grad()
def _mean_loss(task: Task, model: nn.Module, watch: Watch) -> float:
    with evaluation_mode(model):
        losses = [(float(task.loss(model, batch)), len(batch[0])) for batch in watch.batches()]
    return sum(loss * num for loss, num in losses) / sum(num for _, num in losses)
