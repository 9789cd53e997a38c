"""The contract of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Batch: TypeAlias = tuple[Tensor, ...]


class Task(Protocol):
    """A model to train, the order of its data, and what counts as good.

    Data are addressed by *rows*: :meth:`rows` says which rows one step trains on, :meth:`gather` turns an index tensor
    of any shape into a batch with the same leading axes. So one replica, N replicas or R runs by N replicas read
    the same global batch, and the rows of a whole run can be laid out in advance.

    Attributes:
        name: of the task.
        total_steps: how long a run is, unless told otherwise.
        batch_rows: rows of a global batch.
        validation_rows: rows of the fixed validation set, on the host.
    """

    name: str
    total_steps: int
    batch_rows: int
    validation_rows: Tensor

    def to(self, device: torch.device | str) -> Task:
        """Move the data; batches are made where the data are."""
        ...

    def build(self, seed: int = 0) -> nn.Module:
        """A freshly initialised model, on the host. The global random state is not touched."""
        ...

    def groups(self, model: nn.Module) -> Mapping[str, Sequence[str]]:
        """Param groups: group name to the names of its parameters. Every parameter is in one group."""
        ...

    def rows(self, step: int, *, seed: int = 0) -> Tensor:
        """The rows of one step's global batch, on the host: a pure function of (seed, step)."""
        ...

    def gather(self, rows: Tensor) -> Batch:
        """The data of ``rows``; every tensor starts with the shape of ``rows``."""
        ...

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean training loss over the rows of ``batch``, a scalar."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on the validation set; ``"loss"`` first: what :meth:`loss` gives on all of it in evaluation mode.

        The model comes back in the mode it was in.
        """
        ...


MEMBERS = (
    *("name", "total_steps", "batch_rows", "validation_rows"),
    *("to", "build", "groups", "rows", "gather", "loss", "evaluate"),
)
"""Attributes and methods of a task."""


def split_rows(rows: Tensor, num_replicas: int) -> Tensor:
    """Deal ``rows`` (B,) out to replicas: (N, B / N).

    Dealt like cards, so that with data in time order no replica sees later rows than another.
    """
    if len(rows) % num_replicas:
        raise ValueError(f"num_replicas ({num_replicas}) must divide the {len(rows)} rows of a global batch")
    return rows.view(-1, num_replicas).T


def batch_of(task: Task, step: int, *, seed: int = 0, replica: int = 0, num_replicas: int = 1) -> Batch:
    """One replica's part of a step's global batch."""
    return task.gather(split_rows(task.rows(step, seed=seed), num_replicas)[replica])


def random_rows(num_rows: int, size: int, *, seed: int, step: int) -> Tensor:
    """``size`` rows below ``num_rows``, drawn with replacement; a pure function of (seed, step)."""
    # Raw words, because NumPy guarantees those across versions; the bias of the remainder is below 2^-40.
    words = np.random.PCG64(np.random.SeedSequence([seed, step])).random_raw(size)
    return torch.from_numpy((np.asarray(words) % np.uint64(num_rows)).astype(np.int64))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """BatchNorm uses its running statistics, and leaves them alone, inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def param_groups(task: Task, model: nn.Module) -> list[dict[str, Any]]:
    """The task's groups in the form torch optimizers take, in the task's order."""
    parameters = dict(model.named_parameters())
    return [
        {"name": group, "params": [parameters[name] for name in names]} for group, names in task.groups(model).items()
    ]


def decay_groups(model: nn.Module) -> dict[str, list[str]]:
    """``decay``: matrices and convolutions; ``no_decay``: norms and biases."""
    named = list(model.named_parameters())
    return {
        "decay": [name for name, parameter in named if parameter.dim() > 1],
        "no_decay": [name for name, parameter in named if parameter.dim() <= 1],
    }
