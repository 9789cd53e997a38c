"""What the schedulers have in common: how a user talks to the round loop."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import numbers_of, shown, whole
from hdet.history import RoundRecord
from hdet.rounds import RoundLoop
from hdet.schedulers.arguments import MAX_LR
from hdet.signal import Loss

STATE_VERSION = 1


class RoundFace:
    """The part of a scheduler that faces the round loop."""

    _loop: RoundLoop | None
    _last_lr: list[float | Tensor]
    optimizer: Optimizer
    last_epoch: int

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add a loss to the round's mean without taking a step: micro-batches, or loops that call ``step()`` bare.

        Args:
            loss: as in :meth:`step`.
            weight: what the loss counts, e.g. the number of tokens it is a mean over.
        """
        self._rounds.observe(loss, weight)

    def converge(self) -> None:
        """Average the weights now. A collective: every replica must call it, after the same number of steps."""
        self._rounds.converge(self.last_epoch)

    def converged(self) -> AbstractContextManager[None]:
        """A block with the mean weights in place, for evaluating or saving; afterwards each replica has its own back.

        Entering is a collective. Needs a second copy of the weights while the block lasts.
        """
        return self._rounds.converged(self.last_epoch)

    def finish(self) -> None:
        """End the training here: average the weights, and leave every knob at its base value. A collective.

        Not needed where the run ends at ``total_steps``.
        """
        self._rounds.finish(self.last_epoch)

    def add_sink(self, sink: Callable[[RoundRecord, Sequence[str]], object]) -> None:
        """Call ``sink`` with the record of each round that ends from now on, and the names of the param groups.

        At the end of a round, on every replica; never inside the steps between.
        """
        groups = self.optimizer.param_groups
        names = [str(group.get("name", f"group{k}")) for k, group in enumerate(groups)]
        self._rounds.sinks.append(lambda record: sink(record, names))

    @property
    def history(self) -> list[RoundRecord]:
        """One record per finished round, the newest last; the last 1000 are kept."""
        return self._rounds.history

    @property
    def _rounds(self) -> RoundLoop:
        assert self._loop is not None
        return self._loop

    def _warn_if_apart(self) -> None:
        if self._rounds.weights_apart(self.last_epoch):
            warnings.warn(
                f"state_dict() at step {self.last_epoch}, where replicas are apart: weights saved now are this "
                "replica's alone. Save inside `with scheduler.converged():`, or call scheduler.converge() first",
                stacklevel=3,
            )

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer."""
        raise NotImplementedError

    def _in_charge(self) -> bool:
        """Whether the optimizer's learning rates are the ones this scheduler wrote."""
        groups = self.optimizer.param_groups
        lrs = zip(groups, self._last_lr, strict=False)
        return self.last_epoch >= 0 and all(float(g["lr"]) == float(lr) for g, lr in lrs)

    def _attach(self, optimizer: Optimizer, loop: RoundLoop) -> None:
        self._loop = loop
        this = weakref.ref(self)

        in_charge = False

        def look(_: Optimizer, state: Any) -> None:
            # Inside SequentialLR it may be another scheduler's turn; then its learning rates stand.
            nonlocal in_charge
            scheduler = this()
            in_charge = scheduler is not None and scheduler._in_charge()

        def restore_own_lr(_: Optimizer) -> None:
            # torch has restored param_groups from one rank's checkpoint, that rank's learning rate included.
            if (scheduler := this()) is not None:
                if in_charge:
                    scheduler._refresh()
                scheduler._rounds.write_knobs(at_base=scheduler._rounds.finished)

        def before_step(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if (scheduler := this()) is None:
                return None
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
        watches = loop.anchor is not None or loop.rollback is not None or loop.operations.skip_nonfinite
        # A compiled step must not trace these: what they count would have to be compiled anew in every step.
        if watches or loop.outer.kind == "nesterov":
            optimizer.register_step_pre_hook(torch.compiler.disable(before_step))  # type: ignore[no-untyped-call]
        if loop.counts_updates:
            optimizer.register_step_post_hook(torch.compiler.disable(after_step))  # type: ignore[no-untyped-call]


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse a state that this version did not write."""
    version = state.get("version") if isinstance(state, Mapping) else type(state).__name__
    if whole(version) != STATE_VERSION:
        raise ValueError(
            f"state_dict must have version {STATE_VERSION}, but got version {shown(version)}; "
            "load it with the version of hdet that wrote it"
        )


def cannot_load(error: Exception) -> ValueError:
    """What a state raises that cannot be used, whatever it made us or torch stumble over."""
    return ValueError(f"state_dict cannot be loaded: {type(error).__name__}: {str(error)[:1000]}")


def lrs_of(saved: Any, name: str, num_groups: int) -> list[float]:
    """The learning rates of a saved state, one for each param group."""
    found = numbers_of(saved, name, num_groups, low=0)
    if (found > MAX_LR).any():
        raise ValueError(f"{name} must be at most {MAX_LR:g}, but got {shown(saved)}")
    lrs: list[float] = found.tolist()
    return lrs


def write_lr(group: dict[str, Any], value: float) -> None:
    """Set a group's learning rate; one that is a tensor keeps its identity, for compiled and captured steps."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value
