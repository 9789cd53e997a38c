"""What the adapters share: the scheduler of HDET in the place of a framework's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.schedulers import AutoLR, OneCycleAutoLR

Scheduler = AutoLR | OneCycleAutoLR
Make = Callable[[LRScheduler], Scheduler]


def missing(package: str, extra: str) -> ImportError:
    """The error for an optional dependency that is not installed."""
    return ImportError(f"this needs {package}, which is not installed; pip install 'hdet[{extra}]'")


def make_scheduler(
    schedule: LRScheduler,
    make: Make | None,
    settings: Mapping[str, Any],
    *,
    model: nn.Module | None,
    total_steps: int | None,
) -> Scheduler:
    """The scheduler around ``schedule``; a scheduler of HDET is taken as it is.

    Args:
        schedule: what the framework was given, or has made.
        make: builds the scheduler; default AutoLR with ``settings``.
        settings: arguments of AutoLR.
        model: what is trained, for its buffers; unless the settings name one.
        total_steps: optimizer steps of the run, where the framework knows them; unless the settings name them.
    """
    if isinstance(schedule, AutoLR | OneCycleAutoLR):
        if settings or make is not None:
            raise ValueError(
                f"the schedule is {type(schedule).__name__} already, so there is nothing to be done with "
                f"{sorted(settings) or 'make'}; pass them where it is constructed"
            )
        return schedule
    with _plain_optimizer(schedule):
        if make is not None:
            return make(schedule)
        return AutoLR(schedule, **{"model": model, "total_steps": total_steps, **settings})


@contextmanager
def _plain_optimizer(schedule: LRScheduler) -> Iterator[None]:
    """Accelerate's optimizer is a wrapper without the hooks of torch's; HDET belongs on the one inside.

    Only for the construction: the wrapper is the one whose ``step`` torch's schedules have marked, and without the
    mark they warn that the optimizer was never stepped.
    """
    outer = schedule.optimizer
    inner = getattr(outer, "optimizer", None)
    schedule.optimizer = inner if isinstance(inner, Optimizer) else outer
    try:
        yield
    finally:
        schedule.optimizer = outer
