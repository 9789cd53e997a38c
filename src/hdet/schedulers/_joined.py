"""Param groups that join in mid-run: torch's schedules have no place for them, so they follow the first one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from hdet.engine.rounds import RoundLoop
from hdet.schedulers._torch_state import LRS, MOMENTA


def take_up(optimizer: Optimizer, loop: RoundLoop, first_lr: Callable[[], float]) -> None:
    """Take up param groups that have joined: each follows the first one's schedule from the learning rate it has.

    One that was given none has the optimizer's default, which says nothing in mid-run: it is like the first. Until the
    first level is found, learning rates compare with those that the others were given.
    ``first_lr``: what the schedule alone gives the first param group now.
    """
    groups, known = optimizer.param_groups, len(loop.values.knob_of_group)
    if len(groups) < known:
        raise RuntimeError(
            f"param groups must not be removed from the optimizer, but of {known} there are {len(groups)}; freeze "
            "their parameters instead, or make a new optimizer and a new scheduler"
        )
    loop.add_groups()
    first, level = first_lr(), loop.policy.level
    for group, factor in zip(groups[known:], loop.values.factors[known:], strict=True):
        lr = group["lr"]
        factor = factor if level is None or level.done else level.given
        given = lr is not optimizer.defaults.get("lr") and first * factor > 0
        if isinstance(lr, Tensor):
            group["lr"] = lr.clone()  # it may be the default itself, or another group's
        share = float(lr) / (first * factor) if given else 1.0
        loop.follow(share)
        # What schedules keep there: one that is made after the group is added again, for a resume, looks for it.
        kept = {key: share * float(groups[0][key]) for key in LRS if key in groups[0]}
        kept |= {key: groups[0][key] for key in MOMENTA if key in groups[0]}
        group.update({key: value for key, value in kept.items() if key not in group})


@contextmanager
def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The optimizer with these param groups alone, for the length of a block."""
    before = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        yield groups
    finally:
        optimizer.param_groups = before


def follow_momentum(schedule: LRScheduler, groups: Sequence[dict[str, Any]], num_known: int) -> None:
    """Give param groups that joined later the momentum of the first, where the schedule moves it."""
    if isinstance(schedule, (OneCycleLR, CyclicLR)) and schedule.cycle_momentum:
        for group in groups[num_known:]:
            if schedule.use_beta1:
                group["betas"] = (groups[0]["betas"][0], *group["betas"][1:])
            else:
                group["momentum"] = groups[0]["momentum"]
