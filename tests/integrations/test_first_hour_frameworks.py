"""What users of frameworks run into first: runs that began without hdet, and what Lightning's modules may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import framework_task as task
from frameworks import lightning_module
from hdet import AutoLR

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {"enable_model_summary": False, "logger": False, "accelerator": "cpu", "devices": 1}


def _module(**own: Any) -> Any:
    module = lightning_module()
    for name, value in own.items():
        setattr(module, name, value)
    return module


def _loader() -> Any:
    return torch.utils.data.DataLoader(task.Samples(64), batch_size=4)


def _fit(pl: Any, module: Any, *, callbacks: Any, steps: int = 4, path: str | None = None, bar: bool = False) -> Any:
    trainer = pl.Trainer(
        max_steps=steps, callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=bar, **QUIET
    )  # fmt: skip
    trainer.fit(module, _loader(), ckpt_path=path, **({"weights_only": False} if path else {}))
    return trainer


# -- Lightning --------------------------------------------------------------------------------------------------


def test_lightning_says_what_it_needs() -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")
    from hdet.integrations.lightning import HDETCallback

    def refused(match: str, *callbacks: Any, **own: Any) -> None:
        with pytest.raises(ValueError, match=match):
            _fit(pl, _module(**own), callbacks=list(callbacks) or [HDETCallback()])

    refused(
        "needs automatic optimization, but the module has automatic_optimization=False", automatic_optimization=False
    )
    refused("callbacks must hold one HDETCallback, but got 2; delete the others", HDETCallback(), HDETCallback())
    module = _module()
    optimizer = task.make_optimizer(module.inner)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    configured = {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
    refused(
        "must not be ReduceLROnPlateau, which .* return the optimizer alone", configure_optimizers=lambda: configured
    )


@pytest.mark.parametrize("with_schedule", [True, False])
def test_lightning_continues_a_run_without_hdet(tmp_path: Path, with_schedule: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")
    from hdet.integrations.lightning import HDETCallback

    def module() -> Any:
        found = _module()

        def configure() -> Any:
            optimizer = torch.optim.SGD(found.inner.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        if with_schedule:
            found.configure_optimizers = configure
        return found

    path = str(tmp_path / "plain.ckpt")
    trainer = _fit(pl, module(), callbacks=[])
    trainer.save_checkpoint(path)
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    callback = HDETCallback(total_steps=400, interval=50)
    resumed = _fit(pl, module(), callbacks=[callback], steps=8, path=path)
    assert isinstance(callback.scheduler, AutoLR)
    assert callback.scheduler.last_epoch == 8
    assert not callback.scheduler._run.policy.searching
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(lr, rel=1e-3)


def test_the_progress_bar_shows_small_learning_rates() -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")
    from hdet.integrations.lightning import HDETCallback

    shown: list[Any] = []

    class Bar(pl.callbacks.TQDMProgressBar):  # type: ignore[misc,name-defined]
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            return super().get_metrics(trainer, pl_module)

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            shown.append(self.get_metrics(args[0], args[1]).get("hdet/lr"))

    callback = HDETCallback(interval=2)
    _fit(pl, _module(), callbacks=[Bar(), callback], bar=True)
    assert callback.scheduler is not None
    # The bar is drawn before the round ends, and each of the first steps is one.
    assert shown == [None, *(f"{record.base_values[0]:.2e}" for record in callback.scheduler.history[:-1])]


# -- Transformers and Accelerate --------------------------------------------------------------------------------


def test_transformers_continues_a_run_without_hdet(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    from hdet.integrations.transformers import HDETTrainerCallback

    def trainer(*callbacks: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=400, report_to=[], disable_tqdm=True, save_strategy="steps",
            save_steps=4, per_device_train_batch_size=4, dataloader_pin_memory=False, learning_rate=0.01,
        )  # fmt: skip
        return transformers.Trainer(
            model=task.Model(), args=arguments, train_dataset=task.Samples(64), callbacks=[*callbacks, _Stop()]
        )

    class _Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step in (4, 8)

    plain = trainer()
    plain.train()
    lr = plain.lr_scheduler.get_last_lr()[0]
    callback = HDETTrainerCallback(interval=50)
    trainer(callback).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-4")
    assert callback.scheduler is not None
    assert callback.scheduler.last_epoch == 8
    assert not callback.scheduler._run.policy.searching
    assert callback.scheduler._last_lr[0] == pytest.approx(lr * (400 - 8) / (400 - 4))


def test_accelerate_continues_a_run_without_hdet(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")
    from hdet.integrations.accelerate import HDETScheduler

    def prepared() -> Any:
        accelerate.state.AcceleratorState._reset_state()
        net = task.Model()
        optimizer = task.make_optimizer(net)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(net, optimizer, schedule)

    def train(net: Any, optimizer: Any, scheduler: Any) -> None:
        for batch in torch.utils.data.DataLoader(task.Samples(16), batch_size=4):
            loss = net(**batch)["loss"]
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach()) if isinstance(scheduler, HDETScheduler) else scheduler.step()
            optimizer.zero_grad()

    accelerator, net, optimizer, schedule = prepared()
    train(net, optimizer, schedule)
    accelerator.save_state(str(tmp_path))
    accelerator, net, optimizer, schedule = prepared()
    accelerator.load_state(str(tmp_path))
    scheduler = HDETScheduler(accelerator, schedule, interval=50)
    assert scheduler.scheduler.last_epoch == 4
    assert scheduler.get_last_lr() == schedule.scheduler.get_last_lr()
    train(net, optimizer, scheduler)
    assert scheduler.scheduler.last_epoch == 8
    assert not scheduler.scheduler._run.policy.searching
