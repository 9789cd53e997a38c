"""What goes into the stacked engine: the data order of whole runs, and Eq. 10's noise at their start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hdet.ensemble.warm_start import unit_noise
from hdet_lab.tasks.base import Task, batch_of, split_rows

NUM_STATISTICS_STEPS = 50


class Start(Protocol):
    """The seed of a run, and nu of Eq. 10, None for no noise."""

    @property
    def seed(self) -> int: ...

    @property
    def warm_noise(self) -> float | None: ...


def row_table(task: Task, seeds: Sequence[int], num_steps: int, num_replicas: int) -> Tensor:
    """(steps, R, N, rows): the data order of one run for each seed in advance, so that no step waits for the host."""
    by_seed = {
        seed: torch.stack([split_rows(task.rows(step, seed=seed), num_replicas) for step in range(num_steps)])
        for seed in dict.fromkeys(seeds)
    }
    return torch.stack([by_seed[seed] for seed in seeds], dim=1)


def warm_noise(
    models: Sequence[nn.Module], groups: Mapping[str, Sequence[str]], runs: Sequence[Start], num_replicas: int
) -> Tensor | None:
    """(R, N, parameters): noise where a run asks for it, as ``warm_noisy_init`` draws it on real processes on the host.

    Parameters are in the order of ``groups``, as in the engine. None where no run asks.
    """
    if all(run.warm_noise is None for run in runs):
        return None
    names = [name for group in groups.values() for name in group]
    noise = []
    for run, model in zip(runs, models, strict=True):
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        nu = run.warm_noise or 0.0
        for replica in range(num_replicas):
            draws = [
                nu
                * parameters[name].norm()
                / math.sqrt(parameters[name].numel())
                * unit_noise(parameters[name], name, seed=run.seed, replica=replica)
                if nu
                else torch.zeros_like(parameters[name])
                for name in names
            ]
            noise.append(torch.cat([draw.flatten() for draw in draws]))
    return torch.stack(noise).view(len(models), num_replicas, -1)


@torch.no_grad()
def renew_statistics(task: Task, model: nn.Module, seed: int, num_steps: int) -> None:
    """Renew BatchNorm's statistics from training batches: those there are belong to weights before an average."""
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        for step in range(min(NUM_STATISTICS_STEPS, num_steps)):
            task.loss(model, batch_of(task, step, seed=seed))
