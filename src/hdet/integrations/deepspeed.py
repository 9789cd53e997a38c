"""DeepSpeed: ``scheduler = attach(engine)`` after ``deepspeed.initialize``, with the loop as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdet.integrations.common import Make, RecordSink, Scheduler, Setup, missing, refuse_twice, run_converged

try:
    from deepspeed import DeepSpeedEngine
except ImportError as error:
    raise missing("deepspeed", "deepspeed") from error


def attach(engine: Any, make: Make | None = None, *, sinks: Sequence[RecordSink] = (), **settings: Any) -> Scheduler:
    """Put AutoLR around the engine's schedule; to be called once, right after ``deepspeed.initialize``.

    One optimizer step is one step, whatever ``gradient_accumulation_steps`` is. The loss is what ``engine.backward`` is
    called with, each micro-batch's own, and is not read before a round ends; ``engine.step`` needs no ``lr_kwargs``.
    ``engine.save_checkpoint`` saves the mean weights and the scheduler's state, ``engine.load_checkpoint`` loads both.

    ZeRO is refused at every stage. A learning rate per rank would become one per shard, so replicas would not differ
    and nothing could be learned. The first-order signal, which needs no replicas, would act on this rank's shard of the
    optimizer's copy of the weights: a rollback would not reach the model, and a checkpoint would hold one rank's shard
    of the anchor. The same applies to the fp32 copies that ``fp16`` and ``bf16`` train; ``torch_autocast`` makes no
    copies.

    Args:
        engine: of ``deepspeed.initialize``. If it has no schedule, a constant one is used.
        make: builds the scheduler around the engine's schedule; default AutoLR with ``settings``.
        sinks: each gets the record of every round.
        settings: arguments of AutoLR. ``model`` is the engine's module.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine must be what deepspeed.initialize returns first, but got {type(engine).__name__}")
    _refuse(engine)
    setup = Setup(make, sinks, settings, shared_only="DeepSpeed")
    schedule = engine.lr_scheduler
    if schedule is None:
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
    scheduler = setup.scheduler(schedule, model=engine.module, total_steps=None)
    refuse_twice(engine, "an engine")
    engine.lr_scheduler = scheduler
    _observe_losses(engine, scheduler)
    run_converged(engine, "save_checkpoint", lambda: scheduler)
    return scheduler


def _refuse(engine: Any) -> None:
    if (stage := engine.zero_optimization_stage()) > 0:
        raise ValueError(
            f"zero_optimization must be of stage 0, but got stage {stage}: each rank updates its own shard of the "
            "weights, so there are no replicas to fan out, and no whole weights to measure a gradient against; use "
            "stage 0, or FSDP2, whose shards are known"
        )
    if engine.optimizer is not engine.basic_optimizer:
        raise ValueError(
            f"the optimizer must train the model's own weights, but got {type(engine.optimizer).__name__}, which "
            'trains copies of them, so means of replicas would not reach the model; use {"torch_autocast": {"enabled": '
            'true, "dtype": "bfloat16"}} instead of "bf16" or "fp16"'
        )


def _observe_losses(engine: Any, scheduler: Scheduler) -> None:
    backward = engine.backward

    def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.observe(loss)
        return backward(loss, *args, **kwargs)

    engine.backward = observed
