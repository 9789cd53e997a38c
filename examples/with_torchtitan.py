"""torchtitan, in a checkout of it with two GPUs: torchrun --nproc-per-node 2 examples/with_torchtitan.py."""

from typing import Any

from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from hdet import AutoLR


def attach(trainer: Any, **settings: Any) -> AutoLR:
    """Put AutoLR around the Trainer's schedule, and the mean weights into its checkpoints and validations."""
    (model,), container, checkpointer = trainer.model_parts, trainer.lr_schedulers, trainer.checkpointer
    (schedule,) = container.schedulers  # one part of the model, one optimizer
    scheduler = AutoLR(schedule, model=model, total_steps=trainer.config.training.steps, **settings)
    container.schedulers = [scheduler]
    # The container's own methods save the number of steps only; torchtitan's schedules have no other state.
    container.state_dict, container.load_state_dict = scheduler.state_dict, scheduler.load_state_dict
    step, save, validator = trainer.forward_backward_step, checkpointer.save, getattr(trainer, "validator", None)

    def observed(*, labels: Tensor, global_valid_tokens: Tensor, **inputs: Any) -> Tensor:
        loss: Tensor = step(labels=labels, global_valid_tokens=global_valid_tokens, **inputs)
        # This rank's sum divided by all ranks' tokens, so a rank with fewer tokens would look better than it is.
        tokens = labels.ne(IGNORE_INDEX).sum()
        scheduler.observe(loss.detach() * global_valid_tokens / tokens.clamp(min=1), weight=tokens.float())
        return loss

    def saved(curr_step: int, last_step: bool = False) -> Any:  # called after every step
        if not checkpointer.enable or not checkpointer._should_save(curr_step, last_step):
            return save(curr_step, last_step)
        with scheduler.converged():
            found = save(curr_step, last_step)
            checkpointer.maybe_wait_for_staging()  # copies may be made in the background
            return found

    trainer.forward_backward_step, checkpointer.save = observed, saved
    if validator is not None:
        validate = validator.validate

        def validated(*args: Any, **kwargs: Any) -> Any:
            with scheduler.converged():
                return validate(*args, **kwargs)

        validator.validate = validated
    return scheduler


config = llama3_debugmodel()  # reads tests/assets of the checkout
config.training.steps = 200
config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree = 2, 1
trainer = Trainer(config)
scheduler = attach(trainer, interval=10)
trainer.train()
print(f"learned scale {scheduler.history[-1].scales[0]:.2f}")
trainer.close()
