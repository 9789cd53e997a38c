"""torchtitan: ``scheduler = attach(trainer)`` between ``Trainer(config)`` and ``trainer.train()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hdet.integrations.common import Make, RecordSink, Scheduler, Setup, missing, refuse_twice, run_converged

try:
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise missing("torchtitan", "torchtitan") from error


def attach(trainer: Any, make: Make | None = None, *, sinks: Sequence[RecordSink] = (), **settings: Any) -> Scheduler:
    """Put AutoLR around the Trainer's schedule, and the mean weights into its checkpoints and validations.

    One optimizer step is one step, whatever the number of micro-batches is. The loss is the mean over this rank's own
    tokens, and is not read before a round ends. Replicas are the mesh dimension ``dp_replicate``. The scheduler's state
    takes the place of the schedule's in checkpoints.

    Args:
        trainer: of one model part and one optimizer.
        make: builds the scheduler around the Trainer's schedule; default AutoLR with ``settings``.
        sinks: each gets the record of every round.
        settings: arguments of AutoLR. ``total_steps`` comes from the Trainer, ``model`` is its model.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a torchtitan Trainer, but got {type(trainer).__name__}")
    container = trainer.lr_schedulers
    if len(trainer.model_parts) != 1 or len(container.schedulers) != 1:
        raise ValueError(
            f"trainer must have one model part and one optimizer, but got {len(trainer.model_parts)} and "
            f"{len(container.schedulers)}; pipeline stages, and groups with optimizers of their own, are untried"
        )
    scheduler = Setup(make, sinks, settings).scheduler(
        container.schedulers[0], model=trainer.model_parts[0], total_steps=trainer.config.training.steps
    )
    refuse_twice(trainer, "a Trainer")
    container.schedulers = [scheduler]
    # The container's own methods save the number of steps only; torchtitan's schedules have no other state.
    container.state_dict, container.load_state_dict = scheduler.state_dict, scheduler.load_state_dict
    _observe_losses(trainer, scheduler)
    _save_at_mean(trainer.checkpointer, scheduler)
    if getattr(trainer, "validator", None) is not None:
        run_converged(trainer.validator, "validate", lambda: scheduler)
    return scheduler


def _observe_losses(trainer: Any, scheduler: Scheduler) -> None:
    step = trainer.forward_backward_step

    def observed(*, labels: Tensor, global_valid_tokens: Tensor, **inputs: Any) -> Tensor:
        loss: Tensor = step(labels=labels, global_valid_tokens=global_valid_tokens, **inputs)
        # This rank's sum divided by all ranks' tokens, so a rank with fewer tokens would look better than it is.
        tokens = labels.ne(IGNORE_INDEX).sum()
        scheduler.observe(loss.detach() * global_valid_tokens / tokens.clamp(min=1), weight=tokens.float())
        return loss

    trainer.forward_backward_step = observed


def _save_at_mean(checkpointer: Any, scheduler: Scheduler) -> None:
    save = checkpointer.save

    def at_mean(curr_step: int, last_step: bool = False) -> Any:  # called after every step
        if not checkpointer.enable or not checkpointer._should_save(curr_step, last_step):
            return save(curr_step, last_step)
        with scheduler.converged():
            saved = save(curr_step, last_step)
            checkpointer.maybe_wait_for_staging()  # copies may be made in the background
            return saved

    checkpointer.save = at_mean
