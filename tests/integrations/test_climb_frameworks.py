"""In every framework a run that starts from 1e-8 climbs, finds its learning rate and trains."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import framework_task as task
from frameworks import lightning_module

STEPS, LOW = 300, 1e-8

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.usefixtures("_alone"),
]


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of a cluster, whatever the tests before have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def _optimizer(model: torch.nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LOW)


def _constant(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def _batches() -> DataLoader[Any]:
    return DataLoader(task.Samples(STEPS * 16), batch_size=16)


def _lightning(folder: str) -> tuple[task.Model, Any]:
    import lightning.pytorch as pl

    from hdet.integrations.lightning import HDETCallback

    module, callback = lightning_module(_optimizer, _constant), HDETCallback()
    pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(module, _batches())  # fmt: skip
    return module.inner, callback.scheduler


def _transformers(folder: str) -> tuple[task.Model, Any]:
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETTrainerCallback

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=16, dataloader_pin_memory=False,
    )  # fmt: skip
    model = task.Model()
    optimizer = _optimizer(model)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=task.Samples(STEPS * 16),
        optimizers=(optimizer, _constant(optimizer)),
    )  # fmt: skip
    callback = HDETTrainerCallback.attach(trainer)
    trainer.train()
    return model, callback.scheduler


def _accelerate(folder: str) -> tuple[task.Model, Any]:
    from accelerate import Accelerator

    from hdet.integrations.accelerate import HDETScheduler

    accelerator, inner = Accelerator(cpu=True), task.Model()
    model, optimizer, loader = accelerator.prepare(inner, _optimizer(inner), _batches())
    scheduler = HDETScheduler(accelerator, _constant(optimizer), total_steps=STEPS)
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return inner, scheduler.scheduler


FRAMEWORKS: dict[str, Any] = {
    "lightning": _lightning,
    "transformers": _transformers,
    "accelerate": _accelerate,
}


def test_a_run_from_far_below_finds_its_learning_rate(framework: str, tmp_path: Any) -> None:
    model, scheduler = FRAMEWORKS[framework](str(tmp_path))
    found = scheduler.found()
    assert 10 < found.climb_steps <= STEPS // 10
    assert scheduler.history[0].phase == "climb"
    assert found.peak_lrs[0] > 1e-4
    assert len(model.losses) == STEPS
    assert statistics.fmean(model.losses[-20:]) < 0.1 * statistics.fmean(model.losses[:10])
