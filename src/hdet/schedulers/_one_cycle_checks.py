"""Checks of OneCycleAutoLR's arguments: the rule, the value and, where it helps, the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import is_flag, is_whole, number, require, require_one_of, shown, whole
from hdet.options import Adapt
from hdet.schedulers._common import MAX_LR

AGREED = (
    "ensemble_lr_spread_ratio", "model_sync_interval", "auto_lr_warmup_steps", "enable_auto_lr", "loss_scale",
    "lr_of_lr", "momentum_of_lr", "decay",
)  # fmt: skip
"""Further arguments that all ranks must agree on, beside those that all schedulers have."""

_PAPERS = "the paper's controller, "
_UNUSED = {
    "spread": "OneCycleAutoLR has it as ensemble_lr_spread_ratio",
    "controller": "OneCycleAutoLR has the paper's; AutoLR(OneCycleLR(...)) takes any",
    "anchor": _PAPERS + "measures from the last converge",
    "groups": _PAPERS + "has a scale for each param group",
    "level": _PAPERS + "starts from the schedule as it is",
    "start_steps": _PAPERS + "starts after auto_lr_warmup_steps",
    "hold_share": _PAPERS + "acts to the end",
    "shape": _PAPERS + "acts to the end",
    "sample_every": _PAPERS + "compares losses, and samples no gradients",
}
"""Of Adapt, with the reason."""


def check_one_cycle(a: Mapping[str, Any]) -> None:
    """OneCycleAutoLR's own arguments and those of torch, before torch sees them."""
    for name in ("enable_auto_lr", "cycle_momentum", "three_phase"):
        require(is_flag(a[name]), name, "True or False", a[name])
    for name in ("ensemble_lr_spread_ratio", "momentum_of_lr"):
        require(0 <= number(a[name]) < 1, name, "in [0, 1)", a[name])
    for name in ("loss_scale", "div_factor", "final_div_factor"):
        require(number(a[name]) > 0, name, "a finite number > 0", a[name])
    require(number(a["lr_of_lr"]) >= 0, "lr_of_lr", "a finite number >= 0", a["lr_of_lr"])
    for name, low in (("model_sync_interval", 1), ("auto_lr_warmup_steps", 0)):
        require(whole(a[name]) >= low, name, f"an integer >= {low}", a[name])
    require_one_of("decay", a["decay"], "schedule", "floor", "printed")
    _check_schedule(a)
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


def check_warmup(a: Mapping[str, Any], *, knobs_adapt: bool) -> None:
    """Raise where the paper's controller, or that of the knobs, would never act."""
    total = total_steps_of(a)
    acts = "auto-LR" if a["enable_auto_lr"] else "knobs" if knobs_adapt else None
    if acts is not None and a["auto_lr_warmup_steps"] >= total > 0:
        raise ValueError(
            f"auto_lr_warmup_steps must be smaller than the {total} total steps for {acts} to act, but got "
            f"auto_lr_warmup_steps={a['auto_lr_warmup_steps']}; lower it, e.g. to {total // 5}"
        )


def refuse_unused(adapt: Adapt) -> None:
    """Raise where an option is set that the paper's controller has no use for."""
    adapt.refuse(_UNUSED)


def total_steps_of(a: Mapping[str, Any]) -> int:
    """Length of the run; 0 or less where torch will refuse what was given."""
    return int(a["total_steps"] or (a["epochs"] or 0) * (a["steps_per_epoch"] or 0))


def _check_schedule(a: Mapping[str, Any]) -> None:
    """What OneCycleLR does not check, or checks after it has begun to write into the optimizer."""
    for name in ("total_steps", "epochs", "steps_per_epoch"):  # torch says itself where one is not positive
        require(a[name] is None or is_whole(a[name]), name, "None or an integer >= 1", a[name])
    total = total_steps_of(a)
    lrs = _each(a["max_lr"])
    in_range = all(0 <= lr <= MAX_LR for lr in lrs)
    require(in_range, "max_lr", f"numbers in [0, {MAX_LR:g}], one or one a group", a["max_lr"])
    require(not math.isnan(number(a["pct_start"])), "pct_start", "a float in [0, 1]", a["pct_start"])
    require(isinstance(a["anneal_strategy"], str), "anneal_strategy", '"cos" or "linear"', a["anneal_strategy"])
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
            require(not any(map(math.isnan, momenta)), name, "finite numbers, one or one a group", a[name])
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
    last = whole(a["last_epoch"])
    fine = last == -1 or 0 <= last < max(total, 1)
    require(fine, "last_epoch", "-1, or a step before the last", a["last_epoch"])


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
