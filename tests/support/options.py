"""Options of schedulers by their own names, as tests that vary them one by one write them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hdet import Adapt, Averaging, Copies, Faults

GROUPS: dict[str, Any] = {"adapt": Adapt, "copies": Copies, "faults": Faults, "averaging": Averaging}
GROUP_OF = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}


def grouped(**flat: Any) -> dict[str, Any]:
    """Arguments of a scheduler, with the options among them in the groups they belong to."""
    chosen: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {}
    for name, value in flat.items():
        if name in GROUP_OF:
            chosen.setdefault(GROUP_OF[name], {})[name] = value
        else:
            arguments[name] = value
    return arguments | {group: GROUPS[group](**options) for group, options in chosen.items()}
