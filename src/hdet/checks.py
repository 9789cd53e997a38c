"""Checks of what comes from outside, arguments and saved states alike: the rule, the value, and nothing changed yet."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LARGEST = 2**53
"""Integers up to here are told apart by a float64, in which replicas compare them."""

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 20
_short.maxstring = _short.maxother = _short.maxlong = 200


def shown(value: Any) -> str:
    """A value for the text of an error, shortened."""
    try:
        text = _short.repr(value)
        return text if len(text) <= 400 else f"{text[:397]}..."
    except Exception:  # Python refuses to print integers of thousands of digits
        return f"a value of type {type(value).__name__}"


def printable(text: str) -> str:
    r"""``text`` on one line, with escapes like ``\x1b`` for what a terminal or a page might obey instead of show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: Any) -> float:
    """The value, or NaN, with which every comparison fails, where it is not a finite number."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def is_whole(value: Any) -> bool:
    """Whether the value is an integer that can be counted to."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and abs(int(value)) <= LARGEST


def as_int(value: Any) -> int:
    """The value, or -2, below all that is asked for, where it is not an integer that can be counted to."""
    return int(value) if is_whole(value) else -2


def is_flag(value: Any) -> bool:
    """Whether the value is True or False, of Python or NumPy."""
    return isinstance(value, (bool, np.bool_))


def require(ok: bool, name: str, rule: str, value: Any, *, of: str = "") -> None:
    """ValueError with the rule and the value, unless ``ok``; ``of`` says what the name belongs to."""
    if not ok:
        raise ValueError(f"{name}{of} must be {rule}{_limit(value)}, but got {name}={shown(value)}")


def require_one_of(name: str, value: Any, *choices: str, of: str = "") -> None:
    """ValueError with the choices and the value, unless it is one of these words."""
    listing = ", ".join(f'"{choice}"' for choice in choices)
    require(isinstance(value, str) and value in choices, name, f"one of {listing}", value, of=of)


def _limit(value: Any) -> str:
    huge = isinstance(value, (int, np.integer)) and abs(int(value)) > LARGEST
    return " and at most 2**53" if huge else ""


# -- saved states ---------------------------------------------------------------------------------------------------


def mapping_of(value: Any, name: str) -> Mapping[str, Any]:
    """The value, a dict, or ValueError; the following likewise."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, but got {shown(value)}")
    return value


def whole_of(value: Any, name: str, low: int = 0) -> int:
    """An integer of at least ``low``."""
    if as_int(value) < low:
        raise ValueError(f"{name} must be an integer >= {low}{_limit(value)}, but got {shown(value)}")
    return as_int(value)


def flag_of(value: Any, name: str) -> bool:
    """True or False."""
    if not is_flag(value):
        raise ValueError(f"{name} must be True or False, but got {shown(value)}")
    return bool(value)


def numbers_of(
    value: Any, name: str, *shape: int | None, low: float = -math.inf, high: float = math.inf, finite: bool = True,
    each: str = "",
) -> FloatArray:  # fmt: skip
    """Nested lists as an array of this shape, None for any length, with all numbers in [low, high].

    With ``finite=False`` they may be NaN or infinite as well. ``each`` is said of them in the error.
    """
    if not _has_shape(value, shape, low, high, finite):
        size = " x ".join("any" if n is None else str(n) for n in shape)
        rule = "" if low == -math.inf else f" >= {low:g}" if high == math.inf else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {size} {'finite ' * finite}numbers{rule}{each}, but got {shown(value)}")
    array = np.array(value, dtype=np.float64)
    return array if array.size else array.reshape([n or 0 for n in shape])


def _has_shape(value: Any, shape: tuple[int | None, ...], low: float, high: float, finite: bool) -> bool:
    if not shape:
        if not finite and isinstance(value, (float, np.floating)) and not math.isfinite(value):
            return True
        return low <= number(value) <= high
    if isinstance(value, np.ndarray):
        value = value.tolist()
    is_row = isinstance(value, (list, tuple)) and shape[0] in (None, len(value))
    return is_row and all(_has_shape(entry, shape[1:], low, high, finite) for entry in cast("list[Any]", value))
