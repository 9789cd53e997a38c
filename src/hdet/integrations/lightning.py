"""Lightning: ``Trainer(callbacks=[HDETCallback()])``, with the module as it is."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from hdet.auto_lr import AutoLR
from hdet.checks import require_one_of
from hdet.integrations.common import Make, RecordSink, Setup, missing, run_converged, steps_beside
from hdet.scheduler import Scheduler

try:
    # Both names of the package have a Callback of their own; the Trainer is that of the one already in use.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
        from pytorch_lightning.utilities.types import LRSchedulerConfig
    else:
        from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
        from lightning.pytorch.utilities.types import LRSchedulerConfig
except ImportError as error:
    raise missing("lightning") from error


class HDETCallback(Callback):
    """Wraps the schedule that ``configure_optimizers`` returned, with ``"interval": "step"``, in AutoLR.

    If it returned no schedule, AutoLR is given the optimizer alone: the learning rate decays to zero at the end. If it
    returned a scheduler of HDET, that one is used. One optimizer step is one step, whatever ``accumulate_grad_batches``
    is; the loss is the mean over micro-batches, and is not read before a round ends. Validation and every
    ``trainer.save_checkpoint`` see the mean weights. The scheduler's state is the checkpoint's ``lr_schedulers`` entry.

    Param groups that ``BaseFinetuning`` adds are trained too. ``StochasticWeightAveraging`` replaces the schedule: HDET
    ends there, with the mean weights and a warning.

    Args:
        make: builds the scheduler around the configured schedule; default AutoLR with ``settings``. It may return an
            Explorer, which is stepped after the schedule. ``trainer.strategy.model`` is the wrapped module by then.
        log: whether to show and log learning rate, scale and z at the end of a round.
        sinks: each gets the record of every round.
        monitor, mode: the metric of validation that is handed to :meth:`AutoLR.evaluated`, and which way is better;
            default those of the first EarlyStopping or ModelCheckpoint that has one. Their "min" is a default too: it
            counts as given for a name with "loss" in it.
        settings: arguments of AutoLR. ``total_steps`` comes from the Trainer, ``model`` is the wrapped module.

    Attributes:
        scheduler: the scheduler, from the start of fit.
    """

    def __init__(
        self,
        make: Make | None = None,
        *,
        log: bool = True,
        sinks: Sequence[RecordSink] = (),
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        **settings: Any,
    ) -> None:
        if mode is not None:
            require_one_of("mode", mode, "min", "max")
        self.scheduler: Scheduler | None = None
        self._setup = Setup(make, sinks, settings)
        self._log = log
        self._monitor = monitor, mode
        self._last_round = -1
        self._validation = ExitStack()
        self._interrupted = False
        self._replaced = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # The strategy has wrapped the module, and the state of the schedule is restored after this hook.
        self.scheduler = None  # that of another fit, which may have been interrupted
        if (num := sum(isinstance(each, HDETCallback) for each in trainer.callbacks)) > 1:
            raise ValueError(f"callbacks must hold one HDETCallback, but got {num}; delete the others")
        config, own = _config(trainer)
        steps = trainer.estimated_stepping_batches
        total_steps = int(steps) if 0 < steps < math.inf else None
        model = trainer.strategy.model
        schedule = config.scheduler if own or self._setup.makes else trainer.optimizers[0]
        built = self._setup.scheduler_or_explorer(schedule, model=model, total_steps=total_steps)
        if steps_beside(built) and own and built is not config.scheduler:
            trainer.strategy.lr_scheduler_configs.append(LRSchedulerConfig(built, interval="step"))
        else:
            config.scheduler = built
        self.scheduler = built
        self._interrupted = self._replaced = False
        # Callbacks and users save through this method, on every rank; by on_save_checkpoint weights are taken.
        trainer.__dict__.pop("save_checkpoint", None)
        run_converged(trainer, "save_checkpoint", lambda: self._hdet, when=lambda: not self._interrupted)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # By now states are restored. A checkpoint of a module without a schedule, made without hdet, has none for us.
        hdet = self._hdet
        if isinstance(hdet, AutoLR) and hdet.last_epoch == 0 < trainer.global_step:
            hdet.load_state_dict({"last_epoch": trainer.global_step})
        bar = trainer.progress_bar_callback
        if self._log and bar is not None and "get_metrics" not in vars(bar):
            _show_in_scientific_notation(bar)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        configs = trainer.strategy.lr_scheduler_configs
        hdet = self._hdet
        if self._replaced or any(config.scheduler is hdet for config in configs):
            return
        self._replaced = True
        hdet.finish()  # it is not stepped any more, so replicas would stay apart
        found = [type(config.scheduler).__name__ for config in configs]
        warnings.warn(
            f"HDETCallback ends at step {hdet.last_epoch}: the Trainer's schedule is {found or 'none'} now, no longer "
            f"{type(hdet).__name__}; StochasticWeightAveraging does that in its first epoch. From here on the learning "
            "rate is not learned; the weights are the mean of the replicas'",
            stacklevel=2,
        )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # The one hook that has the loss before the schedule is stepped. By now it is divided for accumulation, and
        # multiplied by a GradScaler, whose get_scale() would wait for the device.
        scale = getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None)
        loss = loss.detach() * trainer.accumulate_grad_batches
        self._hdet.observe(loss if scale is None else loss / scale)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        history = self._hdet.history
        if not history or history[-1].index == self._last_round:
            return
        record = history[-1]
        self._last_round = record.index
        if self._log:
            values = {"lr": record.base_values[0], "scale": record.scales[0]}
            if "z" in record.control and math.isfinite(record.control["z"][0]):
                values["z"] = record.control["z"][0]
            pl_module.log_dict(
                {f"hdet/{name}": torch.tensor(value) for name, value in values.items()},
                prog_bar=True,
                batch_size=1,  # otherwise Lightning guesses it from the batch, and may warn
            )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.scheduler is not None and trainer.state.fn == "fit":
            self._validation.enter_context(self.scheduler.converged())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation.close()
        if trainer.sanity_checking or trainer.state.fn != "fit" or not isinstance(self.scheduler, AutoLR):
            return
        monitor, mode = self._monitor
        if monitor is None:
            others = (c for c in trainer.callbacks if isinstance(c, (EarlyStopping, ModelCheckpoint)) and c.monitor)
            monitor, mode = next(((c.monitor, c.mode) for c in others), (None, None))
            mode = mode if mode == "max" else None
        if monitor is not None and (value := trainer.callback_metrics.get(monitor)) is not None:
            self.scheduler.evaluated(value.detach(), mode=mode or ("min" if "loss" in monitor else None))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._hdet.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Other ranks may not be here: a checkpoint written now must not wait for them.
        self._interrupted = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.__dict__.pop("save_checkpoint", None)

    @property
    def _hdet(self) -> Scheduler:
        assert self.scheduler is not None
        return self.scheduler


def _show_in_scientific_notation(bar: Any) -> None:
    """Lightning's bars show three or five decimals, which are all 0 in most learning rates."""
    get_metrics = bar.get_metrics

    def with_lr(*args: Any, **kwargs: Any) -> Any:
        metrics = get_metrics(*args, **kwargs)
        if isinstance(lr := metrics.get("hdet/lr"), float):
            metrics["hdet/lr"] = f"{lr:.2e}"
        return metrics

    bar.get_metrics = with_lr


def _config(trainer: Any) -> tuple[Any, bool]:
    """The place of the one schedule, and whether it is the module's own; a constant one if the module has none."""
    configs = trainer.strategy.lr_scheduler_configs
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "HDETCallback needs automatic optimization, but the module has automatic_optimization=False; leave the "
            "callback out, make an AutoLR for each optimizer, and call scheduler.step(loss) after each "
            "optimizer.step() in training_step, as in docs/frameworks.md"
        )
    if len(trainer.optimizers) != 1 or len(configs) > 1:
        raise ValueError(
            "HDETCallback needs one optimizer and at most one schedule, but got "
            f"{len(trainer.optimizers)} optimizers and {len(configs)} schedules; with several, optimize manually, with "
            "an AutoLR for each, as in docs/frameworks.md"
        )
    own = bool(configs)
    if not own:
        constant = torch.optim.lr_scheduler.LambdaLR(trainer.optimizers[0], lambda step: 1.0)
        configs.append(LRSchedulerConfig(constant, interval="step"))
    config = configs[0]
    if config.reduce_on_plateau:
        raise ValueError(
            "the schedule must not be ReduceLROnPlateau, which moves the learning rate by a metric; return the "
            "optimizer alone from configure_optimizers: the learning rate is learned, and falls at the end"
        )
    if config.interval != "step" or config.frequency != 1:
        raise ValueError(
            'the schedule must be stepped with every optimizer step, but got {"interval": '
            f'"{config.interval}", "frequency": {config.frequency}}}; '
            'return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}}'
        )
    return config, own
