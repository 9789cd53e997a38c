"""The base of the schedulers: what a user calls, and how it reaches the round loop."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hdet.engine.rounds import RoundLoop
from hdet.history import RoundRecord
from hdet.schedulers._habits import Habits
from hdet.schedulers._hooks import attach
from hdet.schedulers._joined import take_up, with_groups
from hdet.schedulers._summary import facts_of
from hdet.signals.loss import Loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RoundScheduler:
    """What all schedulers offer: losses in, converges, history, and the hooks on the optimizer."""

    _loop: RoundLoop | None
    _last_lr: list[float | Tensor]
    optimizer: Optimizer
    last_epoch: int
    _knows_caller = False
    _habits: Habits

    def __repr__(self) -> str:
        """What it is doing, in one line."""
        name, loop = type(self).__name__, getattr(self, "_loop", None)
        if loop is None:
            return f"{name}(not yet constructed)"
        return f"{name}({', '.join(facts_of(self, loop))})"

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        """Add a loss to the round's mean without taking a step: micro-batches, or loops that call ``step()`` bare.

        Args:
            loss: as in :meth:`step`.
            weight: what the loss counts, e.g. the number of tokens it is a mean over.
        """
        self._rounds.observe(loss, weight)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What copy.copy, copy.deepcopy and pickle ask for."""
        raise TypeError(
            f"{type(self).__name__} must not be copied or pickled: it acts on its optimizer and model through hooks, "
            "which a copy would not have; make a new one, and give it the state: new.load_state_dict(old.state_dict())"
        )

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
        optimizer = self.optimizer  # not self, which would keep itself alive
        self._rounds.journal.sinks.append(
            lambda record: sink(record, [str(g.get("name", f"group{k}")) for k, g in enumerate(optimizer.param_groups)])
        )

    @property
    def history(self) -> list[RoundRecord]:
        """One record per finished round, the newest last; the last 1000 are kept."""
        return self._rounds.history

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the learning rate (logarithmic) and the loss (on a twin of the axes) over steps.

        Needs ``pip install 'hdet[plot]'``.

        Args:
            ax: axes of matplotlib to draw into; default those of a new figure.

        Returns:
            The axes of the learning rate.
        """
        from hdet.plot import curves_of, draw, require_rounds

        require_rounds(self, "plot")
        return draw(curves_of(self), ax)

    def _repr_html_(self) -> str:
        """The curves, for a notebook."""
        from hdet.plot import curves_of, sketch

        return sketch(curves_of(self))

    @property
    def finished(self) -> bool:
        """Whether training has ended: at ``total_steps``, or by :meth:`finish`."""
        return self._rounds.finished

    @property
    def weights_apart(self) -> bool:
        """Whether the weights on this rank are one replica's own, not the mean of all."""
        return self._rounds.weights_apart(self.last_epoch)

    @property
    def _rounds(self) -> RoundLoop:
        return self._take_up_new_groups()

    def _take_up_new_groups(self) -> RoundLoop:
        """The round loop, with param groups that have joined the optimizer since it was last asked for."""
        assert self._loop is not None
        if len(self.optimizer.param_groups) != len(self._loop.values.knob_of_group):
            take_up(self.optimizer, self._loop, self._first_lr)
            if self._in_charge():
                self._refresh()
        return self._loop

    def _first_lr(self) -> float:
        """What the schedule alone gives the first param group now."""
        raise NotImplementedError

    def _scheduled_groups(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """The optimizer with the param groups that the schedule knows: torch's have no place for more."""
        groups = self.optimizer.param_groups
        if self._loop is not None:
            values = self._loop.values
            num_known = len(values.knob_of_group) - len(values.joined)
            if num_known < len(groups):
                return with_groups(self.optimizer, groups[:num_known])
        return nullcontext(groups)

    def _warn_if_apart(self) -> None:
        if self.weights_apart:
            warnings.warn(
                f"state_dict() at step {self.last_epoch}, where replicas are apart: weights saved now are this "
                "replica's alone. Save inside `with scheduler.converged():`, or call scheduler.converge() first",
                stacklevel=3,
            )

    def _refresh(self) -> None:
        """Write the current learning rates into the optimizer."""
        raise NotImplementedError

    def _refuse_repeats(self) -> None:
        """Raise where Accelerate's wrapper calls ``step`` once for each process: rounds count optimizer steps."""
        if self._knows_caller:
            return
        self._knows_caller = True
        caller = sys._getframe(2)
        # Only there: a frame whose locals are looked at holds on to copies of them.
        if caller.f_globals.get("__name__") != "accelerate.scheduler":
            return
        loop, wrapper = self._rounds, caller.f_locals["self"]
        alone = not loop.active or loop.replicas.count * loop.replicas.num_parts == 1
        if not alone and wrapper.step_with_optimizer and not wrapper.split_batches:
            raise RuntimeError(
                f"{type(self).__name__} must be stepped once for each optimizer step, but after accelerator.prepare() "
                "it is stepped once for each process; step hdet.integrations.accelerate.HDETScheduler(accelerator, "
                "scheduler) instead, or pass step_scheduler_with_optimizer=False or split_batches=True to Accelerator"
            )

    def _in_charge(self) -> bool:
        """Whether the optimizer's learning rates are the ones this scheduler wrote."""
        groups = self.optimizer.param_groups
        lrs = zip(groups, self._last_lr, strict=False)
        return self.last_epoch >= 0 and all(float(g["lr"]) == float(lr) for g, lr in lrs)

    def _left_alone(self) -> bool:
        """Whether param groups and learning rates are those of the last step; False where that takes a closer look.

        By identity, which is all that a step has time for: a tensor never is what :meth:`_write_lrs` kept.
        """
        groups, last = self.optimizer.param_groups, self._last_lr
        if len(groups) != len(last):
            return False
        for k, group in enumerate(groups):  # noqa: SIM110 - in every step: a generator takes twice as long
            if group["lr"] is not last[k]:
                return False
        return True

    def _write_lrs(self, scheduled: Sequence[float | Tensor]) -> None:
        """Write the learning rates into the optimizer, from what the schedule gives the param groups that it knows."""
        assert self._loop is not None
        values = self._loop.values
        factors, last = values.factors, []
        if values.joined:
            scheduled = values.of_all(scheduled)
        for k, group in enumerate(self.optimizer.param_groups):
            lr = scheduled[k] * factors[k]
            if type(group["lr"]) is float:
                group["lr"] = lr
            else:
                lr = write_lr(group, lr)
            last.append(lr)
        self._last_lr = last

    def _attach(self, optimizer: Optimizer, loop: RoundLoop) -> None:
        self._loop = loop
        self._habits = Habits(type(self).__name__)
        attach(self, optimizer, loop)

    def _refuse_foreign_lr(self, *, wait: bool, advice: str) -> None:
        """Raise where somebody else has changed a learning rate. Without ``wait``, none is fetched from a device."""
        for k, (group, mine) in enumerate(zip(self.optimizer.param_groups, self._last_lr, strict=False)):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu" and not wait:
                continue
            if float(lr) != float(mine):
                name = type(self).__name__
                raise RuntimeError(
                    f"the learning rate must be left to {name}, which set it to {float(mine):g} in param group {k}, "
                    f"but found {float(lr):g}: another scheduler, or a line of the loop, has changed it. {advice}"
                )


def write_lr(group: dict[str, Any], value: float | Tensor) -> float | Tensor:
    """Set a group's learning rate; one that is a tensor keeps its identity, for compiled and captured steps.

    Returns what is there now, a copy of a tensor.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        group["lr"] = value
        return value
    lr.fill_(value.squeeze() if isinstance(value, Tensor) else value)  # a number may have been given as [0.1]
    return lr.clone()
