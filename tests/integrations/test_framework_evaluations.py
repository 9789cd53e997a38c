"""Frameworks hand their evaluations to AutoLR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hdet import AutoLR

STEPS = 60


def _overfits(step: int) -> float:
    return 1 / (1 + step) + 0.02 * max(step - 20, 0)


def _events(scheduler: Any) -> list[str]:
    return [event for record in scheduler.history for event in record.events if "validation has not" in event]


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize(
    ("name", "sign", "chosen", "given"),
    [
        ("figure", 1, "monitor", True),
        ("figure", -1, "monitor", True),
        ("figure", 1, "checkpoint", False),  # whose "min" is a default
        ("val_loss", 1, "checkpoint", True),
        ("figure", -1, "checkpoint", True),
        ("figure", 1, "nothing", False),
    ],
)
def test_lightning(tmp_path: Path, name: str, sign: int, chosen: str, given: bool) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hdet.integrations.lightning import HDETCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.layer(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log(name, sign * _overfits(self.trainer.global_step))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(4 * STEPS, 4)), batch_size=4)
    mode: Any = "min" if sign > 0 else "max"
    settings = {"monitor": name, "mode": mode} if chosen == "monitor" else {}
    callback = HDETCallback(**settings)
    checkpoints = [ModelCheckpoint(tmp_path, monitor=name, mode=mode)] if chosen == "checkpoint" else []
    trainer = Trainer(
        max_epochs=1, val_check_interval=4, limit_val_batches=1, callbacks=[callback, *checkpoints], logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=bool(checkpoints),
    )  # fmt: skip
    trainer.fit(Module(), data, data)
    assert isinstance(callback.scheduler, AutoLR)
    assert len(_events(callback.scheduler)) == (chosen != "nothing")
    assert callback.scheduler.state_dict()["rounds"]["evaluations"]["mode_given"] == given


@pytest.mark.parametrize("metric", [None, "loss", "score"])
def test_transformers(tmp_path: Path, metric: str | None) -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETTrainerCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layer(x).square().mean(), "logits": self.layer(x)}

    class Scripted(Trainer):  # type: ignore[misc]
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluation_loop(*args, **kwargs)
            loss = _overfits(self.state.global_step)
            found.metrics["eval_loss"] = 1.0 if metric == "score" else loss
            found.metrics["eval_score"] = -loss
            return found

    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(16)]
    choice = {} if metric is None else {"metric_for_best_model": metric, "greater_is_better": metric == "score"}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, eval_strategy="steps", eval_steps=4,
        report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no", **choice,
    )  # fmt: skip
    callback = HDETTrainerCallback()
    Scripted(Model(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[callback]).train()
    assert len(_events(callback.scheduler)) == 1


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from hdet.integrations.accelerate import HDETScheduler

    accelerator, model = Accelerator(cpu=True), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = HDETScheduler(accelerator, schedule, total_steps=STEPS)
    for step in range(1, STEPS):
        loss = model(torch.randn(4, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        if step % 4 == 0:
            scheduler.evaluated(_overfits(step))
    assert len(_events(scheduler)) == 1
