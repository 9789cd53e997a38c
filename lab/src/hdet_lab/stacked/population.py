"""Population-based training (Jaderberg et al. 2017) of the learning rate, on the stacked engine.

The N workers of a population train alone, each on its share of the batch. Now and then the worst quarter takes weights
and optimizer state of the best quarter, with a learning rate a little lower or higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdet.checks import FloatArray
from hdet_lab.recipes import make_optimizer, schedule_table
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.inputs import row_table
from hdet_lab.tasks.base import Task

FACTORS = (0.8, 1.25)
WORST_SHARE = 4  # one worker in so many is replaced
_FIRST_LRS, _FACTORS = 1, 2  # streams of draws


@dataclass
class Population:
    """One population and what came of it.

    Attributes:
        seed: of weights, data order and draws.
        lrs: each worker's peak of the schedule, round by round; the first are where it began.
        train_loss: each worker's mean loss, round by round.
        best: the worker with the lowest loss in the last round.
        validation: its figures.
    """

    seed: int
    lrs: list[list[float]]
    train_loss: list[list[float]] = field(default_factory=list)
    best: int = 0
    validation: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def log_uniform(low: float, high: float, num: int, *, seed: int) -> FloatArray:
    """``num`` draws between ``low`` and ``high``, uniform in the logarithm; a pure function of its arguments."""
    shares = _words(num, _FIRST_LRS, seed) / 2.0**64
    return np.asarray(low * (high / low) ** shares)


def exploit(losses: FloatArray, lrs: FloatArray, *, seed: int, round_index: int) -> tuple[npt.NDArray[Any], FloatArray]:
    """Whom each worker copies, itself where it goes on, and the new learning rates.

    The worst worker copies the best, the second worst the second best. A loss that is not finite is the worst, and is
    not copied.
    """
    num = len(losses)
    scores = np.where(np.isfinite(losses), losses, math.inf)
    order = np.argsort(scores, kind="stable")
    sources, changed = np.arange(num), lrs.copy()
    higher = _words(num, _FACTORS, seed, round_index) % 2
    for place in range(min(max(1, num // WORST_SHARE), num // 2)):
        good, bad = order[place], order[-1 - place]
        if math.isfinite(scores[good]):
            sources[bad] = good
            changed[bad] = lrs[good] * FACTORS[int(higher[bad])]
    return sources, changed


def train_populations(
    task: Task,
    seeds: Sequence[int],
    *,
    num_workers: int,
    lr_range: tuple[float, float],
    interval: int,
    optimizer: str = "adam",
    schedule: str = "one-cycle",
    num_steps: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Population]:
    """One population for each seed, side by side; ``interval`` steps are a round, after which workers copy."""
    task.to(device)
    table = schedule_table(schedule, num_steps or task.total_steps)
    models = [task.build(seed) for seed in seeds]
    groups = task.groups(models[0])
    engine = StackedModels(
        models,
        task.loss,
        groups,
        num_replicas=num_workers,
        optimizer=make_optimizer(optimizer),
        shared=False,
        device=device,
        dtype=dtype,
        graph=device.startswith("cuda"),
    )
    rows = row_table(task, seeds, len(table), num_workers).to(device)
    found = [Population(seed, [log_uniform(*lr_range, num_workers, seed=seed).tolist()]) for seed in seeds]
    total = torch.zeros(len(seeds), num_workers, dtype=torch.float64, device=device)
    num_taken = 0
    for step, height in enumerate(table.tolist()):
        lrs = torch.tensor([population.lrs[-1] for population in found], dtype=torch.float64) * height
        batch = task.gather(rows[step])
        total += engine.step(batch, lrs.to(device, dtype).unsqueeze(-1).expand(-1, -1, len(groups))).losses
        num_taken, num_left = num_taken + 1, len(table) - step - 1
        # The last round decides who is best: it is never shorter than the others.
        if num_left == 0 or min(num_taken, num_left) >= interval:
            losses = (total / num_taken).cpu().numpy()
            total.zero_()
            num_taken = 0
            for population, row in zip(found, losses, strict=True):
                population.train_loss.append(row.tolist())
            if num_left:
                engine.copy_replicas(torch.from_numpy(np.stack([_next_round(p) for p in found])))
            progress(step + 1)
    for index, population in enumerate(found):
        final = np.array(population.train_loss[-1])
        population.best = int(np.argmin(np.where(np.isfinite(final), final, math.inf)))
        population.validation = task.evaluate(engine.replica_model(index, population.best))
    return found


def _next_round(population: Population) -> npt.NDArray[Any]:
    sources, lrs = exploit(
        np.array(population.train_loss[-1]),
        np.array(population.lrs[-1]),
        seed=population.seed,
        round_index=len(population.train_loss) - 1,
    )
    population.lrs.append(lrs.tolist())
    return sources


def _words(num: int, *key: int) -> npt.NDArray[np.uint64]:
    """Raw words: NumPy guarantees those across versions."""
    return np.asarray(np.random.PCG64(np.random.SeedSequence(key)).random_raw(num), dtype=np.uint64)
