"""Checks of constructors' arguments: ValueError with the rule, the value and, where it helps, the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


class Arguments:
    """Checks of a constructor's arguments: the rule, the value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def require(self, name: str, rule: str, ok: bool) -> None:
        if not ok:
            raise ValueError(f"{name} must be {rule}, but got {name}={self.values[name]!r}")

    def number(self, name: str) -> float:
        """The value, or NaN, with which every comparison fails, where it is not a finite number."""
        value = self.values[name]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return float(value) if is_number and math.isfinite(value) else math.nan

    def whole(self, name: str) -> int:
        """The value, or -1 where it is not an integer."""
        value = self.values[name]
        return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1

    def one_of(self, name: str, *choices: str) -> None:
        listing = ", ".join(f'"{choice}"' for choice in choices)
        value = self.values[name]
        self.require(name, f"one of {listing}", isinstance(value, str) and value in choices)

    def bounds(self, name: str) -> None:
        pair = self.values[name]
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        ok = is_pair and 0 < pair[0] <= 1 <= pair[1] < math.inf
        self.require(name, "a pair (low, high) with 0 < low <= 1 <= high < inf", ok)


def check_one_cycle(a: Mapping[str, Any]) -> None:
    """OneCycleAutoLR's arguments, before torch sees them."""
    check = Arguments(a)
    check.require("ensemble_lr_spread_ratio", "in [0, 1)", 0 <= check.number("ensemble_lr_spread_ratio") < 1)
    check.require("model_sync_interval", "an integer >= 1", check.whole("model_sync_interval") >= 1)
    check.require("auto_lr_warmup_steps", "an integer >= 0", check.whole("auto_lr_warmup_steps") >= 0)
    check.require("loss_scale", "a finite number > 0", check.number("loss_scale") > 0)
    check.require("lr_of_lr", "a finite number >= 0", check.number("lr_of_lr") >= 0)
    check.require("momentum_of_lr", "in [0, 1)", 0 <= check.number("momentum_of_lr") < 1)
    check.require("div_factor", "a finite number > 0", check.number("div_factor") > 0)
    check.require("final_div_factor", "a finite number > 0", check.number("final_div_factor") > 0)
    check.require("seed", "an integer >= 0", check.whole("seed") >= 0)
    check.require("max_rollbacks", "an integer >= 0", check.whole("max_rollbacks") >= 0)
    check.require("rollback", "None, True or False", a["rollback"] is None or isinstance(a["rollback"], bool))
    check.one_of("decay", "schedule", "floor", "printed")
    check.bounds("lr_scale_bounds")
    if a["signal"] is not None:
        check.one_of("signal", "gradient", "loss")
        if (a["ensemble_lr_spread_ratio"] > 0) != (a["signal"] == "loss"):
            raise ValueError(
                'ensemble_lr_spread_ratio must be 0 with signal="gradient", which needs no fan-out, and above 0 with '
                f'signal="loss", but got signal={a["signal"]!r} and '
                f"ensemble_lr_spread_ratio={a['ensemble_lr_spread_ratio']!r}"
            )
        if a["decay"] != "schedule":
            raise ValueError(f"decay={a['decay']!r} belongs to the paper's controller; leave it out with signal=")
        return
    total = a["total_steps"] or (a["epochs"] or 0) * (a["steps_per_epoch"] or 0)
    acts = "auto-LR" if a["enable_auto_lr"] else "knobs" if a["knobs"] else None
    if acts is not None and a["auto_lr_warmup_steps"] >= total > 0:
        raise ValueError(
            f"auto_lr_warmup_steps must be smaller than the {total} total steps for {acts} to act, but got "
            f"auto_lr_warmup_steps={a['auto_lr_warmup_steps']}; lower it, e.g. to {total // 5}"
        )
    if not a["enable_auto_lr"]:
        if a["decay"] != "schedule":
            raise ValueError(
                f"decay={a['decay']!r} is the decay of the auto-LR phase; set enable_auto_lr=True, or leave decay out"
            )
        return
    if a["decay"] == "printed" and a["div_factor"] < a["final_div_factor"]:
        raise ValueError(
            'decay="printed" must not grow the learning rate, but Eq. 8 as printed multiplies it by final_div_factor / '
            f'div_factor = {a["final_div_factor"] / a["div_factor"]:g} over the run; use decay="floor", or '
            "div_factor >= final_div_factor"
        )


def check_auto_lr(a: Mapping[str, Any]) -> None:
    """AutoLR's arguments."""
    check = Arguments(a)
    check.one_of("signal", "auto", "gradient", "loss")
    check.require("interval", "an integer >= 1", check.whole("interval") >= 1)
    check.require("total_steps", "an integer >= 1", a["total_steps"] is None or check.whole("total_steps") >= 1)
    check.require("spread", "in (0, 1)", 0 < check.number("spread") < 1)
    anchored = a["anchor"] in ("start", "round") if isinstance(a["anchor"], str) else check.whole("anchor") >= 1
    check.require("anchor", '"start", "round" or a number of rounds >= 1', anchored)
    check.require("max_rollbacks", "an integer >= 0", check.whole("max_rollbacks") >= 0)
    check.require("start_steps", "an integer >= 0", check.whole("start_steps") >= 0)
    check.require("hold_share", "in [0, 1)", 0 <= check.number("hold_share") < 1)
    check.require("seed", "an integer >= 0", check.whole("seed") >= 0)
    check.bounds("scale_bounds")
    every = a["sample_every"]
    check.require("sample_every", "an integer >= 1", every is None or check.whole("sample_every") >= 1)
    check.require("first_scale", "a finite number > 0", a["first_scale"] is None or check.number("first_scale") > 0)


def check_explorer(a: Mapping[str, Any]) -> None:
    """Explorer's arguments."""
    check = Arguments(a)
    check.require("interval", "an integer >= 1", check.whole("interval") >= 1)
    total = a["total_steps"]
    check.require("total_steps", "an integer >= 1", total is None or check.whole("total_steps") >= 1)
    check.one_of("assignment", "balanced", "permutation")
    check.one_of("optimizer_state", "average", "keep", "reset")
    anchor = a["anchor"]
    check.require(
        "anchor",
        '"start", "round" or a number of rounds >= 1',
        anchor in ("start", "round") or (check.whole("anchor") >= 1),
    )
    check.require("start_steps", "an integer >= 0", check.whole("start_steps") >= 0)
    check.require("max_rollbacks", "an integer >= 0", check.whole("max_rollbacks") >= 0)
    check.require("seed", "an integer >= 0", check.whole("seed") >= 0)
