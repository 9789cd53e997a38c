"""The schedule that AutoLR steps: among learning rates of its own, watched, saved and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet.engine.values import Values
from hdet.schedulers._common import MAX_LR
from hdet.schedulers._joined import follow_momentum
from hdet.schedulers._saved import lrs_of
from hdet.schedulers._torch_state import (
    all_of,
    check_lrs,
    copied,
    is_torchs,
    leave_out_joined,
    load_schedule,
    parts_of,
    plain_state,
    step_of,
)


class Wrapped:
    """A schedule, and what it alone has given the param groups that it knows.

    Args:
        schedule: any that AutoLR takes.

    Attributes:
        counter: what has the number of its steps.
        step: the steps it has taken with us.
        base_lrs, lrs: where it starts from, and what it gave last.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        self.schedule = schedule
        self.optimizer = schedule.optimizer
        parts = parts_of(schedule)
        self.counter = _counter_of(schedule)
        self.step = self._num_steps()
        self.base_lrs = [float(lr) for lr in parts[0].base_lrs]
        # Values on the host from here on: reading a learning rate that is a tensor would wait for the device.
        for part in parts:
            part.base_lrs = [float(lr) for lr in part.base_lrs]
        self.lrs = [float(group["lr"]) for group in self.optimizer.param_groups[: len(self.base_lrs)]]

    def _num_steps(self) -> int:
        return int(self.counter.last_epoch)

    def shares_of_joined(self) -> list[float]:
        """Of each param group that was added after the schedule was made, its share of the first one's."""
        first = self.lrs[0]
        joined = self.optimizer.param_groups[len(self.base_lrs) :]
        return [float(group["lr"]) / first if first > 0 else 1.0 for group in joined]

    def refuse_other_steps(self) -> None:
        """Raise where something else has stepped it."""
        found = self._num_steps()
        if found != self.step:
            name = type(self.schedule).__name__
            raise RuntimeError(
                f"AutoLR steps the {name} it wraps, but something else has taken it from step {self.step} to "
                f"{found}; delete schedule.step() from the loop, and load the state of AutoLR, not that of the {name}"
            )

    def advance(self, values: Values) -> None:
        """One step of the schedule among its own values: many compute the next learning rate from the group's last."""
        old, own, new = self.lrs, [], []
        groups = known = self.optimizer.param_groups
        if values.joined:
            self.optimizer.param_groups = known = groups[: len(old)]
        for k, group in enumerate(known):
            own.append(group["lr"])
            group["lr"] = old[k]
        try:
            self.schedule.step()
        finally:
            for k, group in enumerate(known):
                lr = group["lr"]
                new.append(lr if type(lr) is float else float(lr))
                group["lr"] = own[k]
            if values.joined:
                self.optimizer.param_groups = groups
        if values.joined:
            for part in parts_of(self.schedule):
                follow_momentum(part, groups, len(new))
        self.lrs = new
        self.step = self.counter.last_epoch

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": copied(self.schedule.state_dict()), "schedule_lrs": list(self.lrs)}

    def adopted(self, plain: Mapping[str, Any], *, step_only: bool) -> tuple[int, dict[str, Any]]:
        """How far a run without hdet is, and what :meth:`state_dict` would have given there.

        ``step_only``: whether nothing else of its state counts.
        """
        schedule = plain_state(self.schedule, plain, step_only=step_only)
        lrs = [_as_float(lr) for lr in schedule["_last_lr"]]
        return step_of(schedule), {"schedule": schedule, "schedule_lrs": lrs}

    def load(self, state: Mapping[str, Any], values: Values, *, step: int) -> None:
        """Continue from the ``state`` of an AutoLR at ``step``; what fails has to be :meth:`put_back`."""
        lrs, groups = state["schedule_lrs"], len(self.optimizer.param_groups)
        known = values.num_scheduled(state["rounds"])
        if isinstance(lrs, (list, tuple)) and len(lrs) != known:
            found = len(lrs) + groups - known
            raise ValueError(f"the optimizer has {groups} param groups, but got a state with {found}")
        lrs = lrs_of(lrs, "schedule_lrs", known, low=-MAX_LR)  # a schedule may pass 0
        leave_out_joined(all_of(self.schedule), known)
        load_schedule(self.schedule, copied(state["schedule"]), known)
        if is_torchs(self.schedule):  # a user's own may count, and keep its learning rates, as it likes
            check_lrs(self.schedule, lrs)
            steps = self._num_steps()
            if steps != step:
                raise ValueError(f"the schedule is at step {steps}, but last_epoch is {step}")
        self.lrs, self.step = lrs, self._num_steps()

    def remember(self) -> tuple[Any, ...]:
        """Everything that :meth:`load` changes."""
        insides = [(each, dict(vars(each))) for each in all_of(self.schedule)]
        return copied(self.schedule.state_dict()), insides, self.lrs, self.step

    def put_back(self, before: tuple[Any, ...]) -> None:
        """As it was at :meth:`remember`."""
        state, insides, self.lrs, self.step = before
        self.schedule.load_state_dict(state)
        for each, values in insides:
            vars(each).clear()
            vars(each).update(values)


def _counter_of(schedule: Any) -> Any:
    """What has the number of a schedule's steps: ChainedScheduler counts through its parts."""
    return schedule if hasattr(schedule, "last_epoch") else _counter_of(schedule._schedulers[-1])


def _as_float(lr: Any) -> Any:
    return float(lr) if isinstance(lr, Tensor) and lr.numel() == 1 else lr
