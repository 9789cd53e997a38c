"""In every framework a run finds its first level, whatever learning rate it is given, and trains."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

import framework_task as task
from frameworks import lightning_module
from hdet import AutoLR

STEPS = 200
Schedule = Callable[[Optimizer], LRScheduler]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.usefixtures("_alone"),
]


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of a cluster, whatever the tests before have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def _optimizer(lr: float) -> Callable[[torch.nn.Module], Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


def _auto(optimizer: Optimizer) -> AutoLR:
    return AutoLR(optimizer, total_steps=STEPS)


def _constant(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def _batches() -> DataLoader[Any]:
    return DataLoader(task.Samples(STEPS * 16), batch_size=16)


def _lightning(folder: str, lr: float, schedule: Schedule) -> tuple[task.Model, Any]:
    import lightning.pytorch as pl

    from hdet.integrations.lightning import HDETCallback

    module, callback = lightning_module(_optimizer(lr), schedule), HDETCallback()
    pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(module, _batches())  # fmt: skip
    return module.inner, callback.scheduler


def _transformers(folder: str, lr: float, schedule: Schedule) -> tuple[task.Model, Any]:
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETTrainerCallback

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=16, dataloader_pin_memory=False,
    )  # fmt: skip
    model = task.Model()
    optimizer = _optimizer(lr)(model)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=task.Samples(STEPS * 16), optimizers=(optimizer, schedule(optimizer))
    )
    callback = HDETTrainerCallback.attach(trainer)
    trainer.train()
    return model, callback.scheduler


def _accelerate(folder: str, lr: float, schedule: Schedule) -> tuple[task.Model, Any]:
    from accelerate import Accelerator

    from hdet.integrations.accelerate import HDETScheduler

    accelerator, inner = Accelerator(cpu=True), task.Model()
    plain = _optimizer(lr)(inner)
    made = schedule(plain)
    model, optimizer, loader = accelerator.prepare(inner, plain, _batches())
    settings: dict[str, Any] = {} if isinstance(made, AutoLR) else {"total_steps": STEPS}
    scheduler = HDETScheduler(accelerator, made, **settings)
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return inner, scheduler.scheduler


FRAMEWORKS: dict[str, Any] = {"lightning": _lightning, "transformers": _transformers, "accelerate": _accelerate}


def _check(model: task.Model, scheduler: Any) -> None:
    assert isinstance(scheduler, AutoLR)
    assert len(model.losses) == scheduler.last_epoch == STEPS
    assert [record.step for record in scheduler.history[:4]] == [1, 2, 3, 4]
    assert scheduler.history[0].phase == "warm-up"
    assert any("learning rate" in event for record in scheduler.history for event in record.events)
    assert scheduler.found().peak_lrs[0] > 1e-3
    assert statistics.fmean(model.losses[-20:]) < 0.2 * statistics.fmean(model.losses[:10])


def test_without_a_schedule_every_learning_rate_given_is_the_same_run(framework: str, tmp_path: Any) -> None:
    found = [FRAMEWORKS[framework](str(tmp_path / str(lr)), lr, _auto) for lr in (1e-8, 100.0)]
    _check(*found[0])
    assert found[0][0].losses == found[1][0].losses
    assert found[0][0].flat() == found[1][0].flat()


def test_a_schedule_that_is_far_off_is_followed_from_the_level(framework: str, tmp_path: Any) -> None:
    _check(*FRAMEWORKS[framework](str(tmp_path), 1e-8, _constant))
