"""What a scheduler shows of itself: a page, a plot, a curve in a notebook. All of it is in ``scheduler.history``."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hdet.reports.run import Run, run_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "name")


def write_page(scheduler: Any, path: str | os.PathLike[str]) -> Path:
    """The report, written by rank 0; returns its path."""
    path, run = Path(path), _shown(scheduler, "report")
    try:
        from hdet.reports.charts import Group
        from hdet.reports.compose import compose
    except ImportError as error:
        raise _missing("report", error) from error
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        text, _ = compose(run.name, [Group(run.name, [run])])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def draw_plot(scheduler: Any, ax: Axes | None) -> Axes:
    """The learning rate, and the loss on a twin of its axes."""
    run = _shown(scheduler, "plot")
    try:
        from hdet.reports.plot import plot
    except ImportError as error:
        raise _missing("plot", error) from error
    return plot(run, ax)


def as_html(scheduler: Any) -> str:
    """For a notebook, which shows this instead of ``repr()``."""
    from hdet.reports.notebook import sketch

    return sketch(_run(scheduler))


def _shown(scheduler: Any, method: str) -> Run:
    run = _run(scheduler)
    if not run.rounds:
        loop = scheduler._rounds
        why = f"a round has {loop.policy.interval} steps" if loop.active else "one replica alone explores nothing"
        raise RuntimeError(
            f"{method}() needs a round that has ended, but {run.name} has none at step {scheduler.last_epoch}: {why}"
        )
    return run


def _missing(method: str, error: ImportError) -> ImportError:
    return ImportError(f"{method}() needs {error.name}, which is not installed; pip install 'hdet[report]'")


def _run(scheduler: Any) -> Run:
    loop, kind, groups = scheduler._rounds, type(scheduler).__name__, scheduler.optimizer.param_groups
    settings = {key: value for key, value in groups[0].items() if key not in NOT_SETTINGS and value is not None}
    total = scheduler.total_steps
    schedule = getattr(scheduler, "schedule", None)
    config = {
        "scheduler": kind,
        "schedule": None if schedule is None else type(schedule).__name__,
        "signals": [signal.name for signal in loop.signals],
        "steps of a round": loop.policy.interval,
        "total steps": None if total is None or math.isinf(total) else total,
        "replicas": loop.replicas.count,
        "knobs": list(scheduler.history[-1].knobs) if scheduler.history else [],
        "optimizer": type(scheduler.optimizer).__name__,
        "settings of the optimizer": ", ".join(f"{key} {value}" for key, value in settings.items()),
        "param groups": [_name(group, k) for k, group in enumerate(groups)],
        "parameters": f"{sum(p.numel() for group in groups for p in group['params']):,}",
        "device": str(groups[0]["params"][0].device) if groups[0]["params"] else None,
    }
    versions = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    return run_of(
        scheduler.history,
        [_name(group, k) for k, group in enumerate(groups)],
        name=kind,
        method=kind,
        facts={"config": config, **versions},
        num_steps=0 if config["total steps"] is None else int(total),
        status="done" if scheduler.finished else "unfinished",
    )


def _name(group: dict[str, Any], k: int) -> str:
    return str(group.get("name", f"group{k}"))
