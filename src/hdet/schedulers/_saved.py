"""What the saved states of all schedulers have in common: their version, whose they are, and how they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdet.checks import numbers_of, shown, whole
from hdet.schedulers._common import MAX_LR

STATE_VERSION = 1

_KEYS = {"AutoLR": "schedule_lrs", "OneCycleAutoLR": "step_count", "Explorer": "step"}
"""What only a state of each class has."""


def check_version(state: Mapping[str, Any], kind: str) -> None:
    """Refuse a state that this version, or a scheduler of this kind, did not write."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict must be a dict that {kind} has written, but got {type(state).__name__}")
    version = state.get("version")
    if version is None and not any(key in state for key in _KEYS.values()):  # hdet did not write it
        whose = "a schedule of torch; load it into the schedule" if "_last_lr" in state else "something else"
        raise ValueError(
            f"state_dict must be one of {kind}, but it was written by {whose}; it has {shown(list(state)[:8])}"
        )
    if whole(version) != STATE_VERSION:
        raise ValueError(
            f"state_dict must have version {STATE_VERSION}, but got version {shown(version)}; "
            "load it with the version of hdet that wrote it"
        )
    others = [name for name, key in _KEYS.items() if key in state and name != kind]
    if others and _KEYS[kind] not in state:
        raise ValueError(f"state_dict must be one of {kind}, but it was written by {others[0]}; load it into one")


def cannot_load(error: Exception) -> ValueError:
    """The error for a state that cannot be used, whichever error it led to here or in torch."""
    return ValueError(f"state_dict cannot be loaded: {type(error).__name__}: {str(error)[:1000]}")


def lrs_of(saved: Any, name: str, num_groups: int, low: float = 0) -> list[float]:
    """The learning rates of a saved state, one for each param group."""
    found = numbers_of(saved, name, num_groups, low=low)
    if (found > MAX_LR).any():
        raise ValueError(f"{name} must be at most {MAX_LR:g}, but got {shown(saved)}")
    lrs: list[float] = found.tolist()
    return lrs
