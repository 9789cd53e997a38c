"""Checks of constructors' arguments: ValueError with the rule, the value and, where it helps, the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_flag, number, require, shown, whole

MAX_LR = 1e30
"""Above all learning rates, and far enough below infinity to be multiplied by any scale."""


class Arguments:
    """Checks of a constructor's arguments: the rule, the value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def require(self, name: str, rule: str, ok: bool) -> None:
        require(ok, name, rule, self.values[name])

    def number(self, name: str) -> float:
        """The value, or NaN, with which every comparison fails, where it is not a finite number."""
        return number(self.values[name])

    def whole(self, name: str) -> int:
        """The value, or -2 where it is not an integer."""
        return whole(self.values[name])

    def flags(self, *names: str) -> None:
        for name in names:
            self.require(name, "True or False", is_flag(self.values[name]))

    def one_of(self, name: str, *choices: str) -> None:
        listing = ", ".join(f'"{choice}"' for choice in choices)
        value = self.values[name]
        self.require(name, f"one of {listing}", isinstance(value, str) and value in choices)

    def bounds(self, name: str) -> None:
        pair = self.values[name]
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        ok = is_pair and 0 < number(pair[0]) <= 1 <= number(pair[1])
        self.require(name, "a pair (low, high) with 0 < low <= 1 <= high < inf", ok)


def check_one_cycle(a: Mapping[str, Any]) -> None:
    """OneCycleAutoLR's arguments, before torch sees them."""
    check = Arguments(a)
    check.flags("enable_auto_lr", "cycle_momentum", "three_phase")
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
    _check_schedule(check)
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
    total = _total_steps(a)
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


def _total_steps(a: Mapping[str, Any]) -> int:
    return int(a["total_steps"] or (a["epochs"] or 0) * (a["steps_per_epoch"] or 0))


def _check_schedule(check: Arguments) -> None:
    """What OneCycleLR does not check, or checks after it has begun to write into the optimizer."""
    a = check.values
    for name in ("total_steps", "epochs", "steps_per_epoch"):
        check.require(name, "None or an integer >= 1", a[name] is None or check.whole(name) != -2)
    total = _total_steps(a)
    lrs = _each(a["max_lr"])
    check.require("max_lr", f"numbers in [0, {MAX_LR:g}], one or one a group", all(0 <= lr <= MAX_LR for lr in lrs))
    check.require("pct_start", "a float in [0, 1]", not math.isnan(check.number("pct_start")))
    check.require("anneal_strategy", '"cos" or "linear"', isinstance(a["anneal_strategy"], str))
    # OneCycleLR divides by the length of a phase.
    rise = float(a["pct_start"]) * total
    if total > 0 and (rise == 1 or total in (rise, 2 * rise - 1 if a["three_phase"] else rise)):
        raise ValueError(
            f"pct_start must leave each phase of OneCycleLR some length, but got pct_start={a['pct_start']} of {total} "
            "steps; raise or lower it a little"
        )
    if a["cycle_momentum"]:
        for name in ("base_momentum", "max_momentum"):
            momenta = _each(a[name])
            # Any that torch takes: an optimizer of the user's own may mean something else by it.
            check.require(name, "finite numbers, one or one a group", not any(math.isnan(m) for m in momenta))
    firsts = [lr / float(a["div_factor"]) for lr in lrs]
    if any(lr > MAX_LR for lr in (*firsts, *(lr / float(a["final_div_factor"]) for lr in firsts))):
        raise ValueError(
            f"div_factor and final_div_factor must keep learning rates below {MAX_LR:g}, but got "
            f"div_factor={a['div_factor']!r} and final_div_factor={a['final_div_factor']!r}"
        )
    if a["decay"] == "floor" and any(lr / float(a["final_div_factor"]) == 0 for lr in firsts):
        raise ValueError(
            'decay="floor" needs a schedule that ends above 0, but got '
            f"final_div_factor={a['final_div_factor']!r} and max_lr={shown(a['max_lr'])}"
        )
    last = check.whole("last_epoch")
    check.require("last_epoch", "-1, or a step before the last", last == -1 or 0 <= last < max(total, 1))


def _each(value: Any) -> list[float]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [number(v.item() if isinstance(v, Tensor) and v.numel() == 1 else v) for v in values]


def check_last_epoch(last_epoch: int, optimizer: Optimizer, cycle_momentum: bool) -> None:
    """A schedule that goes on needs what it wrote into the optimizer's groups when it began."""
    needed = {"initial_lr", "max_lr", "min_lr", *(("base_momentum", "max_momentum") if cycle_momentum else ())}
    missing = sorted({name for group in optimizer.param_groups for name in needed - set(group)})
    if last_epoch >= 0 and missing and "initial_lr" not in missing:  # without that, torch says so itself
        raise ValueError(
            f"last_epoch must be -1 for an optimizer that no OneCycleLR has set up, but got last_epoch={last_epoch}, "
            f"and its param groups have no {missing}; load the optimizer's state first"
        )


def check_parts(
    *, knobs: Any = (), model: Any = None, controller: Any = None, process_group: Any = None, **devices: Any
) -> None:
    """What a scheduler is put together from: TypeError, or ValueError for a device that is not there."""
    if not isinstance(knobs, Sequence) or isinstance(knobs, (str, bytes)):
        raise TypeError(f"knobs must be a list of hdet.knobs, but got {shown(knobs)}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but got {type(model).__name__}")
    methods = [callable(getattr(controller, name, None)) for name in ("init", "update")]
    if controller is not None and (not all(methods) or isinstance(controller, type)):
        raise TypeError(f"controller must have the methods init and update, but got {shown(controller)}")
    if process_group is not None and dist.is_available() and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, but got {shown(process_group)}")
    dtype = devices.pop("anchor_dtype", None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            f"anchor_dtype must be a floating-point torch.dtype of 16 bits or more, but got {shown(dtype)}"
        )
    for name, device in devices.items():
        if device is None:
            continue
        try:
            fine = isinstance(device, (str, torch.device)) and torch.empty(1, device=device).item() is not None
        except Exception:
            fine = False
        if not fine:
            raise ValueError(f"{name} must be a device of this machine, but got {name}={shown(device)}")


def check_total_steps(total_steps: Any) -> None:
    """Before anything is derived from it."""
    check = Arguments({"total_steps": total_steps})
    check.require("total_steps", "an integer >= 1", total_steps is None or check.whole("total_steps") >= 1)


def check_auto_lr(a: Mapping[str, Any]) -> None:
    """AutoLR's arguments."""
    check = Arguments(a)
    check.flags("together", "rollback", *(("gated",) if a["gated"] is not None else ()))
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
    check.flags("rollback")
    check.require("interval", "an integer >= 1", check.whole("interval") >= 1)
    total = a["total_steps"]
    check.require("total_steps", "an integer >= 1", total is None or check.whole("total_steps") >= 1)
    check.one_of("assignment", "balanced", "permutation")
    check.one_of("optimizer_state", "average", "keep", "reset")
    anchor = a["anchor"]
    check.require(
        "anchor",
        '"start", "round" or a number of rounds >= 1',
        anchor in ("start", "round") if isinstance(anchor, str) else check.whole("anchor") >= 1,
    )
    check.require("start_steps", "an integer >= 0", check.whole("start_steps") >= 0)
    check.require("max_rollbacks", "an integer >= 0", check.whole("max_rollbacks") >= 0)
    check.require("seed", "an integer >= 0", check.whole("seed") >= 0)
