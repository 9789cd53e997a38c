"""The OneCycleLR inside a OneCycleAutoLR as a saved state in plain types, and torch's own form of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import mapping_of
from hdet.schedulers._saved import STATE_VERSION

_KEYS = ("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "base_lrs")


def is_torchs_own(state: Any) -> bool:
    """Whether a state is that of a OneCycleLR without hdet."""
    return isinstance(state, Mapping) and "version" not in state and "total_steps" in state


def save_schedule(schedule: OneCycleLR) -> dict[str, Any]:
    return {
        "last_epoch": schedule.last_epoch,
        "step_count": schedule._step_count,
        "schedule": {key: _plain(getattr(schedule, key)) for key in _KEYS if hasattr(schedule, key)},
    }


def from_torch(schedule: OneCycleLR, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of torch's OneCycleLR in our form. As in torch, what it does not have stays as it is."""
    state = {**vars(schedule), **state}
    return {
        **{key: state[key] for key in ("last_epoch", "anneal_func") if key in state},
        "version": STATE_VERSION,
        "step_count": state["_step_count"],
        "schedule": {key: state[key] for key in _KEYS if key in state},
        "rounds": None,
    }


def remember(schedule: OneCycleLR) -> dict[str, Any]:
    """The attributes that :func:`load_schedule` changes."""
    keys = (*_KEYS, "last_epoch", "_step_count")
    return {key: getattr(schedule, key) for key in keys if hasattr(schedule, key)}


def load_schedule(schedule: OneCycleLR, state: Mapping[str, Any]) -> None:
    """Write a state into the schedule's attributes, as they come; nothing is checked but that they are there."""
    schedule.last_epoch, schedule._step_count = state["last_epoch"], state["step_count"]
    saved = {**mapping_of(state["schedule"], "schedule")}
    if "_anneal_func_type" not in saved and "anneal_func" in state:
        old = getattr(state["anneal_func"], "__name__", "")
        saved["_anneal_func_type"] = getattr(schedule, "_anneal_func_type", old.removeprefix("_annealing_"))
    schedule.__dict__.update({key: copy.deepcopy(saved[key]) for key in _KEYS})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return dict(value) if isinstance(value, Mapping) else value
