"""Options of schedulers by their own names, as tests that vary them one by one write them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hdet import Adapt, Averaging, Copies, Ensemble, Faults

GROUPS: dict[str, Any] = {"adapt": Adapt, "copies": Copies, "faults": Faults, "averaging": Averaging}
GROUP_OF = {field.name.lstrip("_"): (group, field.name) for group, kind in GROUPS.items() for field in fields(kind)}
OF_ENSEMBLE = {field.name for field in fields(Ensemble)}


def grouped(**flat: Any) -> dict[str, Any]:
    """Arguments of an Explorer, with the options among them in the groups they belong to."""
    chosen: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {}
    for name, value in flat.items():
        if name in GROUP_OF:
            group, field = GROUP_OF[name]
            chosen.setdefault(group, {})[field] = value
        else:
            arguments[name] = value
    return arguments | {group: GROUPS[group](**options) for group, options in chosen.items()}


def with_ensemble(*, signal: str = "gradient", **flat: Any) -> dict[str, Any]:
    """Arguments of AutoLR or OneCycleAutoLR, likewise; what says how replicas differ goes into ``ensemble=``.

    ``signal``: ``"loss"`` where replicas of AutoLR are to be compared by their losses, with a spread of 0.1 or as
    given.
    """
    arguments = grouped(**flat)
    options = {name: arguments.pop(name) for name in OF_ENSEMBLE & set(arguments)}
    if signal == "loss":
        options.setdefault("spread", 0.1)
    else:
        options.pop("spread", None)
    return arguments | ({"ensemble": Ensemble(**options)} if options else {})
