"""Transformers: ``Trainer(callbacks=[HDETTrainerCallback()])``, with the Trainer and its arguments as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from hdet.auto_lr import AutoLR
from hdet.integrations.common import Make, RecordSink, Setup, missing, refuse_twice, run_converged
from hdet.scheduler import Scheduler

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers") from error


_NEEDED = ("create_scheduler", "training_step", "_maybe_log_save_evaluate", "log")


class HDETTrainerCallback(TrainerCallback):
    """Puts AutoLR around the Trainer's schedule, and the mean weights into evaluations and checkpoints.

    Evaluations are handed to :meth:`AutoLR.evaluated`: ``metric_for_best_model``, or the loss.

    One optimizer step is one step, whatever ``gradient_accumulation_steps`` is. The loss is the one ``training_step``
    returns, and is not read before a round ends. The scheduler's state is the checkpoint's ``scheduler.pt``.

    No hook of the Trainer passes the loss or the Trainer itself, comes before the schedule's state is loaded, or
    surrounds an evaluation; so four methods of the one trainer are replaced: by :meth:`attach`, or, where the callback
    is in ``callbacks=``, at the end of the Trainer's construction. One that is added later, by ``add_callback``, raises
    when training begins.

    Args:
        make: builds the scheduler around the Trainer's schedule; default AutoLR with ``settings``.
        sinks: each gets the record of every round.
        settings: arguments of AutoLR. ``total_steps`` comes from the Trainer, ``model`` is its model.

    Attributes:
        scheduler: the scheduler, from the start of training.
    """

    def __init__(self, make: Make | None = None, *, sinks: Sequence[RecordSink] = (), **settings: Any) -> None:
        self.scheduler: Scheduler | None = None
        self._taken = False
        self._setup = Setup(make, sinks, settings, shared_only="the Trainer")

    @classmethod
    def attach(
        cls, trainer: Any, make: Make | None = None, *, sinks: Sequence[RecordSink] = (), **settings: Any
    ) -> HDETTrainerCallback:
        """Make a callback, and give it to ``trainer``. Before ``trainer.train()``."""
        if absent := [name for name in _NEEDED if not hasattr(trainer, name)]:
            raise TypeError(
                f"trainer must be a transformers.Trainer with {_NEEDED}, but {type(trainer).__name__} has no {absent}"
            )
        callback = cls(make, sinks=sinks, **settings)
        callback._take(trainer)
        trainer.add_callback(callback)
        return callback

    def _take(self, trainer: Any) -> None:
        if self._taken:
            raise ValueError(
                f"{type(self).__name__} must be given to one Trainer, but it is that of another; make a new one"
            )
        refuse_twice(trainer, "a Trainer")
        self._taken = True
        self._wrap_schedule(trainer)
        self._wrap_loss(trainer)
        self._wrap_saves(trainer)
        self._wrap_log(trainer)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer does not pass itself, but it is the one that calls, a few frames up.
        frame: Any = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
            if all(hasattr(caller, name) for name in _NEEDED):
                self._take(caller)
                return
            frame = frame.f_back

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scheduler is None:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} must be there when the Trainer is made, but was added later, when it cannot replace the "
                f"schedule; write Trainer(..., callbacks=[{name}()]), or {name}.attach(trainer) before train()"
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        # The Trainer's own rule for the name and for which way is better; without a choice it is the loss.
        name = args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        if isinstance(self.scheduler, AutoLR) and metrics and name in metrics:
            higher = args.greater_is_better if args.metric_for_best_model else False
            mode: Literal["min", "max"] | None = None if higher is None else "max" if higher else "min"
            self.scheduler.evaluated(float(metrics[name]), mode=mode)

    def _wrap_schedule(self, trainer: Any) -> None:
        create = trainer.create_scheduler

        def create_scheduler(num_training_steps: int, optimizer: Any = None) -> Scheduler:
            schedule = create(num_training_steps, optimizer)
            self.scheduler = self._setup.scheduler(schedule, model=trainer.model, total_steps=num_training_steps)
            trainer.lr_scheduler = self.scheduler
            return self.scheduler

        trainer.create_scheduler = create_scheduler

    def _wrap_loss(self, trainer: Any) -> None:
        training_step = trainer.training_step

        def observed(model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
            num_items = _num_items(trainer, inputs)
            loss: Tensor = training_step(model, inputs, num_items_in_batch, **kwargs)
            if num_items is None or num_items_in_batch is None:
                self._hdet.observe(loss * trainer.current_gradient_accumulation_steps)
            else:
                # It is divided by the items of all micro-batches and ranks, so a rank with fewer items would look
                # better than it is: rescale it to a mean over its own.
                ranks = trainer.args.world_size if trainer.args.average_tokens_across_devices else 1
                items = num_items.to(loss.device).float()
                mine = loss * num_items_in_batch / (items.clamp(min=1) * ranks)
                self._hdet.observe(mine, weight=items)
            return loss

        trainer.training_step = observed

    def _wrap_saves(self, trainer: Any) -> None:
        def evaluates_or_saves() -> bool:
            return bool(trainer.control.should_evaluate or trainer.control.should_save)

        run_converged(trainer, "_maybe_log_save_evaluate", lambda: self._hdet, when=evaluates_or_saves)
        log_save_evaluate = trainer._maybe_log_save_evaluate

        def then_finish(*args: Any, **kwargs: Any) -> None:
            log_save_evaluate(*args, **kwargs)
            # Not at on_train_end: by then the best checkpoint may have been loaded.
            if trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps:
                self._hdet.finish()

        trainer._maybe_log_save_evaluate = then_finish

    def _wrap_log(self, trainer: Any) -> None:
        log = trainer.log  # by on_log the entry is in the history, and with the loggers that come first

        def with_scale(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "learning_rate" in logs and self._hdet.history:
                record = self._hdet.history[-1]
                logs = {**logs, "hdet/scale": record.scales[0]}
                if "z" in record.control:
                    logs["hdet/z"] = record.control["z"][0]
            log(logs, *args, **kwargs)

        trainer.log = with_scale

    @property
    def _hdet(self) -> Scheduler:
        assert self.scheduler is not None
        return self.scheduler


def _num_items(trainer: Any, inputs: Any) -> Tensor | None:
    """How many labels a micro-batch has on this rank; None unless the Trainer divides by their number."""
    scaled = (
        trainer.loss_is_scaled_for_ga
        if getattr(trainer, "loss_is_scaled_for_ga", None) is not None
        else (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    )
    labels = inputs.get("shift_labels", inputs.get("labels")) if scaled else None
    if not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in inputs and getattr(trainer, "_loss_shifts_labels", False):
        labels = labels[..., 1:]
    return labels.ne(-100).sum()
