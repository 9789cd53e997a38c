"""What the files of a run may hold. The first value that breaks its rule is named in a ValueError."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from hdet.checks import LARGEST, as_int, number, shown

Rule = tuple[str, Callable[[Any], bool]]


def parse(text: str) -> Any:
    """What a JSON text says. Every number in it is finite, and an integer one that can be counted to."""
    try:
        return json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be JSON, but got {shown(text)} ({error})") from None


def _parse_float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"numbers must be finite, but got {shown(text)}")
    return found


def _parse_int(text: str) -> float:
    found = _parse_float(text)  # first: Python refuses to read thousands of digits as an integer
    return exact if abs(exact := int(text)) <= LARGEST else found


def _is_number(value: Any) -> bool:
    return not math.isnan(number(value))


def _is_maybe(value: Any) -> bool:
    return value is None or _is_number(value)


def _all(kind: type[Any], ok: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, kind) and all(ok(v) for v in (value.values() if kind is dict else value))

    return check


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_is_row = _all(list, _is_maybe)
_TEXT: Rule = ("a string", _is_text)
_TEXTS: Rule = ("a list of strings", _all(list, _is_text))
_NUMBER: Rule = ("a finite number", _is_number)
_MAYBE: Rule = ("a finite number or null", _is_maybe)
_COUNT: Rule = ("an integer >= 0", lambda value: as_int(value) >= 0)
_ROW: Rule = ("a list of finite numbers or nulls, and not empty", lambda value: _is_row(value) and bool(value))
_KNOB = {"values": _ROW, "base": _MAYBE}

FACTS: dict[str, Rule] = {"groups": _TEXTS}
CONFIG: dict[str, Rule] = {
    "task": _TEXT,
    "method": _TEXT,
    "lr": ("a finite number > 0", lambda value: number(value) > 0),
    "seed": _COUNT,
    "steps": ("an integer >= 1", lambda value: as_int(value) >= 1),
}
END: dict[str, Rule] = {
    "status": _TEXT,
    "validation": ("an object of finite numbers or nulls", _all(dict, _is_maybe)),
    "time_s": _NUMBER,
}
ROUND: dict[str, Rule] = {
    "losses": _ROW,
    "values": ("a list of lists of finite numbers or nulls", _all(list, _is_row)),
    "base_values": ("a list of finite numbers or nulls", _is_row),
    "scales": _ROW,
    "control": ("an object of lists of finite numbers or nulls", _all(dict, _is_row)),
    "unhealthy": ("a list", lambda value: isinstance(value, list)),
    "num_rollbacks": _COUNT,
    "distance": _MAYBE,
    "time_s": _NUMBER,
}
OWN: dict[str, Rule] = {
    "step": _COUNT,
    "index": _COUNT,
    **{name: rule for name, rule in ROUND.items() if name != "time_s"},
}
"""Of a round that a sink has written."""
MAYBE: dict[str, Rule] = {
    "names": _TEXTS,
    "events": _TEXTS,
    "phase": _TEXT,
    "quarantined": ("a list", lambda value: isinstance(value, list)),
    "resumed_from": ("an integer >= 0 or null", lambda value: value is None or as_int(value) >= 0),
}
"""What a round may have; older ones have less."""


def check_facts(facts: Any) -> None:
    """``config.json``: what every reader of a run folder relies on."""
    if not isinstance(facts, dict) or not isinstance(facts.get("config"), dict):
        raise ValueError(f"it must hold the settings of a run, but got {shown(facts)}")
    _check(facts, FACTS)
    _check(facts["config"], CONFIG)
    if "knobs" in facts["config"]:  # older runs have none
        _check(facts["config"], {"knobs": _TEXTS})


def check_entry(entry: Any, facts: Mapping[str, Any]) -> None:
    """A line of ``metrics.jsonl``, of a run with these facts."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must be an object, but got {shown(entry)}")
    steps = facts["config"]["steps"]
    _check(entry, {"event": _TEXT, "step": (f"an integer from 0 to {steps}", lambda v: 0 <= as_int(v) <= steps)})
    _check(entry, {"round": ROUND, "end": END}.get(entry["event"], {}))
    if entry["event"] != "round":
        return
    count = len(facts["groups"])
    for name in ("values", "base_values"):
        if len(entry[name]) != count:
            raise ValueError(f"{name} must have an entry for each of the {count} groups, but got {shown(entry[name])}")
    _check_maybe(entry)


def check_record(entry: Any) -> None:
    """A line of a JsonLinesSink."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must be an object, but got {shown(entry)}")
    _check(entry, OWN)
    _check_maybe(entry)


def count_of(value: float | None, name: str, most: float = LARGEST) -> int:
    """A count that an event file holds as a float; 0 where it holds none."""
    found = number(0.0 if value is None else value)
    if not 0 <= found <= most or found % 1:
        raise ValueError(f"{name} must be an integer from 0 to {most}, but got {shown(value)}")
    return int(found)


def _check_maybe(entry: Mapping[str, Any]) -> None:
    _check(entry, {name: rule for name, rule in MAYBE.items() if name in entry})
    knobs = entry.get("knobs", {})
    if not isinstance(knobs, dict):
        raise ValueError(f"knobs must be an object, but got {shown(knobs)}")
    for name, knob in knobs.items():
        if not isinstance(knob, dict):
            raise ValueError(f"knob {name} must be an object, but got {shown(knob)}")
        _check(knob, _KNOB, of=f" of knob {name}")


def _check(values: Mapping[str, Any], rules: Mapping[str, Rule], of: str = "") -> None:
    for name, (rule, ok) in rules.items():
        if name not in values:
            raise ValueError(f"{name}{of} must be {rule}, but is missing")
        if not ok(values[name]):
            raise ValueError(f"{name}{of} must be {rule}, but got {shown(values[name])}")
