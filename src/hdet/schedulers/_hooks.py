"""What a scheduler hangs on its optimizer: hooks around steps and loads, and that there is one scheduler for each."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hdet.engine.rounds import RoundLoop

if TYPE_CHECKING:
    from hdet.schedulers._base import RoundScheduler

_schedulers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[RoundScheduler]] = weakref.WeakKeyDictionary()


def attach(scheduler: RoundScheduler, optimizer: Optimizer, loop: RoundLoop) -> None:
    """Let the scheduler hear of the optimizer's steps and loads, for as long as it lives; they do not keep it alive."""
    this = weakref.ref(scheduler)
    _schedulers[optimizer] = this

    in_charge = False

    def look(_: Optimizer, state: Any) -> None:
        # Inside SequentialLR it may be another scheduler's turn; then its learning rates stand.
        nonlocal in_charge
        if (scheduler := this()) is not None:
            scheduler._take_up_new_groups()  # with what they were given, which the load replaces
            in_charge = scheduler._in_charge()

    def restore_own_lr(_: Optimizer) -> None:
        # torch has restored param_groups from one rank's checkpoint, that rank's learning rate included.
        if (scheduler := this()) is not None:
            if in_charge:
                scheduler._refresh()
            scheduler._rounds.values.write_knobs()

    def before_step(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if (scheduler := this()) is None:
            return None
        scheduler._habits.num_updates += 1
        # With a closure, gradients are there only after its first call; Lightning always passes one. The first
        # argument may be the optimizer itself.
        at = next((i for i, a in enumerate(args) if callable(a) and not isinstance(a, Optimizer)), None)
        closure = kwargs.get("closure") if at is None else args[at]
        if closure is None:
            scheduler._rounds.before_optimizer_step()
            return None
        called = False

        def closure_then_sample() -> Any:
            nonlocal called
            loss = closure()
            if not called:
                called = True
                scheduler._rounds.before_optimizer_step()
            return loss

        if at is None:
            return args, {**kwargs, "closure": closure_then_sample}
        return (*args[:at], closure_then_sample, *args[at + 1 :]), kwargs

    def after_step(*_: Any) -> None:
        if (scheduler := this()) is not None:
            scheduler._rounds.after_optimizer_step()

    optimizer.register_load_state_dict_pre_hook(look)
    optimizer.register_load_state_dict_post_hook(restore_own_lr)
    averager = loop.averager
    watches = averager.anchor is not None or averager.fallback is not None or loop.skip_nonfinite or loop.active
    # A compiled step must not trace these: what they count would be compiled again in every step.
    if watches or loop.apart:
        scheduler._habits.counts_updates = True
        optimizer.register_step_pre_hook(torch.compiler.disable(before_step))  # type: ignore[no-untyped-call]
    if loop.counts_updates:
        optimizer.register_step_post_hook(torch.compiler.disable(after_step))  # type: ignore[no-untyped-call]


def refuse_second(optimizer: Optimizer) -> None:
    """Raise where this optimizer has a scheduler of ours already: both would converge, and write learning rates."""
    if _working_on(optimizer) is not None:
        gc.collect()  # it may be garbage already
    if (other := _working_on(optimizer)) is not None:
        name = type(other).__name__
        raise ValueError(
            f"optimizer must have one scheduler of hdet, but it has {name} already, at step {other.last_epoch}; pass "
            f"knobs= to that one to explore more, call its finish() to end it, or drop it first (`del`) to replace it"
        )


def _working_on(optimizer: Optimizer) -> Any:
    other: Any = _schedulers.get(optimizer, lambda: None)()
    if other is None or other._loop.finished or other.last_epoch == other.total_steps:
        return None
    return other
