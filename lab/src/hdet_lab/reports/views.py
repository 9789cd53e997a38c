"""A report about the run of a scheduler, from its own history."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hdet.plot import curves_of, require_rounds
from hdet_lab.reports.run import Run

NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "name")


def report(scheduler: Any, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page about the rounds in ``scheduler.history``, and return its path. Only rank 0 writes.

    Args:
        scheduler: ``AutoLR``, ``OneCycleAutoLR`` or ``Explorer``, at any time after its first round.
        path: of the page; folders that are missing are made.
    """
    from hdet_lab.reports.charts import Group  # matplotlib takes a second to import
    from hdet_lab.reports.compose import compose

    require_rounds(scheduler, "report")
    path, run = Path(path), _run(scheduler)
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        text, _ = compose(run.name, [Group(run.name, [run])])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _run(scheduler: Any) -> Run:
    curves, loop, groups = curves_of(scheduler), scheduler._run, scheduler.optimizer.param_groups
    settings = {key: value for key, value in groups[0].items() if key not in NOT_SETTINGS and value is not None}
    schedule, total = getattr(scheduler, "schedule", None), scheduler.total_steps
    config = {
        "scheduler": curves.name,
        "schedule": type(schedule).__name__ if schedule is not None and getattr(scheduler, "_lr_given", True) else None,
        "signals": [signal.name for signal in loop.signals],
        "steps of a round": loop.policy.interval,
        "total steps": None if total is None or math.isinf(total) else total,
        "replicas": loop.replicas.count,
        "knobs": list(scheduler.history[-1].knobs) if scheduler.history else [],
        "optimizer": type(scheduler.optimizer).__name__,
        "settings of the optimizer": ", ".join(f"{key} {value}" for key, value in settings.items()),
        "param groups": curves.groups,
        "parameters": f"{sum(p.numel() for group in groups for p in group['params']):,}",
        "device": str(groups[0]["params"][0].device) if groups[0]["params"] else None,
    }
    versions = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    return Run(**vars(curves), method=curves.name, facts={"config": config, **versions})
