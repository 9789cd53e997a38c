"""Accelerate: ``scheduler = HDETScheduler(accelerator, AutoLR(schedule))`` instead of ``accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch.optim import Optimizer

from hdet.auto_lr import AutoLR
from hdet.history import RoundRecord
from hdet.integrations.common import Make, RecordSink, Setup, missing
from hdet.scheduler import Scheduler
from hdet.signals.loss import Loss

try:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    raise missing("accelerate") from error


class HDETScheduler:
    """Steps a scheduler of HDET once for each optimizer step, inside and outside ``accelerator.accumulate``.

    Accelerate's own wrapper steps a schedule once for each process. If ``prepare`` has put it on, it is taken off.

    Args:
        accelerator: of the run.
        scheduler: AutoLR, OneCycleAutoLR or Explorer; or any schedule, which AutoLR is put around. Made from the
            optimizer before or after ``prepare``. Beside an Explorer, step your schedule yourself.
        make: builds the scheduler around a schedule; default AutoLR with ``settings``.
        sinks: each gets the record of every round.
        settings: arguments of AutoLR, if it is made here.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from hdet.integrations.accelerate import HDETScheduler
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        >>> scheduler = HDETScheduler(accelerator, schedule)
        >>> loss = model(torch.ones(2, 4)).square().mean()
        >>> accelerator.backward(loss)
        >>> optimizer.step(); scheduler.step(loss); optimizer.zero_grad()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        scheduler: Any,
        make: Make | None = None,
        *,
        sinks: Sequence[RecordSink] = (),
        **settings: Any,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"accelerator must be an Accelerator, but got {type(accelerator).__name__}")
        self._accelerator = accelerator
        setup = Setup(make, sinks, settings)
        if isinstance(scheduler, AcceleratedScheduler):
            # Its state would be saved, and loaded, twice: replicas would take their places twice.
            accelerator._schedulers = [s for s in accelerator._schedulers if s is not scheduler]
            scheduler = scheduler.scheduler
        if isinstance(scheduler, HDETScheduler):
            raise TypeError("scheduler must be a schedule or a scheduler of hdet, but it is an HDETScheduler already")
        if any(isinstance(each, HDETScheduler) and each.scheduler is scheduler for each in accelerator._custom_objects):
            raise ValueError(
                f"{type(scheduler).__name__} must have one HDETScheduler, but this accelerator has one for it already: "
                "its state would be saved, and loaded, twice"
            )
        self.scheduler: Scheduler = setup.scheduler_or_explorer(scheduler, model=None, total_steps=None)
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._check_save)

    def step(self, loss: Loss | None = None) -> None:
        """To be called after ``optimizer.step()`` with each micro-batch's own loss; counts optimizer steps only."""
        if loss is not None:
            self.scheduler.observe(loss)
        if self._accelerator.sync_gradients and not self._accelerator.optimizer_step_was_skipped:
            self.scheduler.step()

    def evaluated(self, loss: Loss, *, mode: Literal["min", "max"] | None = None) -> None:
        """A validation loss, on any rank or all; see :meth:`hdet.AutoLR.evaluated`."""
        if not isinstance(self.scheduler, AutoLR):
            raise TypeError(f"evaluated() needs AutoLR, but the scheduler is {type(self.scheduler).__name__}")
        self.scheduler.evaluated(loss, mode=mode)

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> Any:
        """``accelerator.save_state`` with the mean weights in place. A collective."""
        with self.scheduler.converged():
            return self._accelerator.save_state(output_dir, **kwargs)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """``accelerator.load_state``, which loads this scheduler too."""
        self._accelerator.load_state(input_dir, **kwargs)

    def converged(self) -> AbstractContextManager[None]:
        """The mean weights for the length of a block, to evaluate or to ``save_model``. A collective."""
        return self.scheduler.converged()

    def converge(self) -> None:
        """Average the weights now. A collective."""
        self.scheduler.converge()

    def finish(self) -> None:
        """End the training: average the weights, and leave every knob at its base value. A collective."""
        self.scheduler.finish()

    @property
    def history(self) -> list[RoundRecord]:
        """One record per finished round."""
        return self.scheduler.history

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside Accelerate's."""
        return self.scheduler.optimizer

    def get_last_lr(self) -> list[Any]:
        """This replica's learning rates."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def _check_save(self, models: Any, weights: Any, output_dir: str) -> None:
        # Weights have been collected by now, so it is too late to average them.
        if self.scheduler.weights_apart:
            raise RuntimeError(
                "accelerator.save_state() must not be called while replicas are apart: it would save one of them; "
                "call scheduler.save_state(), which saves their mean"
            )
