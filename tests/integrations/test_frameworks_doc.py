"""The code of docs/frameworks.md runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from framework_task import Model, Samples, make_optimizer, make_schedule, pretend_torchrun
from hdet import Adapt, AutoLR
from hdet.launch import launch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()


def _section(title: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.split(f"## {title}\n")[1].split("\n## ")[0], re.DOTALL)
    assert isinstance(block, str)
    return block


OPTIONS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
OPTIONS |= {"enable_progress_bar": False, "enable_model_summary": False}


def _module_class() -> Any:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.inner(**batch)["loss"]
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.inner)

    return Module


@pytest.mark.filterwarnings("ignore")
def test_the_lightning_block_runs() -> None:
    loader = torch.utils.data.DataLoader(Samples(64), batch_size=4)
    names: dict[str, Any] = {"module": _module_class()(), "loader": loader, "options": OPTIONS}
    exec(compile(_section("Lightning"), "frameworks.md", "exec"), names)
    assert names["trainer"].global_step == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_so_many_minutes_finds_its_learning_rate_and_anneals() -> None:
    loader = torch.utils.data.DataLoader(Samples(1600), batch_size=16)
    names: dict[str, Any] = {"Module": _module_class(), "loader": loader, "options": OPTIONS}
    names |= {"torch": torch, "AutoLR": AutoLR}
    exec(compile(_section("So many minutes in Lightning"), "frameworks.md", "exec"), names)
    trainer, scheduler = names["trainer"], names["hdet"].scheduler
    found = scheduler.found()
    assert scheduler.finished
    assert scheduler.last_epoch == trainer.global_step
    assert trainer.callbacks[1].begun
    assert scheduler.get_last_lr()[0] < 0.5 * found.peak_lrs[0]
    losses = trainer.lightning_module.losses
    assert sum(losses[-20:]) / 20 < 0.2 * losses[0]


@pytest.mark.filterwarnings("ignore")
def test_the_transformers_block_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=4, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=Samples(64))
    exec(compile(_section("Transformers"), "frameworks.md", "exec"), {"hf_trainer": trainer})
    assert trainer.lr_scheduler.last_epoch == 4


@pytest.mark.filterwarnings("ignore")
def test_the_accelerate_block_runs(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")
    accelerate.state.AcceleratorState._reset_state()
    net = Model()
    optimizer = make_optimizer(net)
    names: dict[str, Any] = {
        "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2),
        "net": net,
        "optimizer": optimizer,
        "schedule": make_schedule(optimizer),
        "batches": torch.utils.data.DataLoader(Samples(32), batch_size=4),
        "folder": str(tmp_path),
    }
    exec(compile(_section("Accelerate"), "frameworks.md", "exec"), names)
    assert names["scheduler"].scheduler.last_epoch == 4
    assert names["scheduler"].history[-1].step == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_block_without_a_schedule_runs(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    from hdet.integrations.lightning import HDETCallback
    from hdet.integrations.transformers import HDETTrainerCallback

    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=100, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    names: dict[str, Any] = {"torch": torch, "transformers": transformers, "AutoLR": AutoLR, "arguments": arguments}
    names |= {"net": Model(), "samples": Samples(64), "HDETTrainerCallback": HDETTrainerCallback}
    exec(compile(_section("Without a schedule"), "frameworks.md", "exec"), names)
    names["hf_trainer"].train()
    assert names["optimizers"][1].history[0].phase == "warm-up"

    class Module(_module_class()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    callback = HDETCallback()
    trainer = pl.Trainer(max_steps=100, callbacks=[callback], **OPTIONS)
    trainer.fit(Module(), torch.utils.data.DataLoader(Samples(400), batch_size=4))
    assert isinstance(callback.scheduler, AutoLR)
    assert callback.scheduler.history[0].phase == "warm-up"
    assert callback.scheduler.get_last_lr() == [0.0]


@pytest.mark.filterwarnings("ignore")
def test_an_auto_lr_that_was_made_before_prepare_finds_its_level() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")
    from hdet.integrations.accelerate import HDETScheduler

    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    net = Model()
    optimizer = torch.optim.AdamW(net.parameters())
    own = AutoLR(optimizer, total_steps=100)
    net, optimizer, batches = accelerator.prepare(
        net, optimizer, torch.utils.data.DataLoader(Samples(400), batch_size=4)
    )
    scheduler = HDETScheduler(accelerator, own)
    for batch in batches:
        loss = net(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    assert own.last_epoch == 100
    assert own.history[0].phase == "warm-up"


def test_the_sinks_block_runs(tmp_path: Path) -> None:
    optimizer = make_optimizer(Model())
    scheduler = AutoLR(make_schedule(optimizer), interval=2, adapt=Adapt(level=False))
    exec(compile(_section("Sinks"), "frameworks.md", "exec"), {"scheduler": scheduler, "folder": str(tmp_path)})
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2


def _names(**more: Any) -> dict[str, Any]:
    net = Model()
    batches = list(torch.utils.data.DataLoader(Samples(16), batch_size=4)) * 100
    return {"torch": torch, "AutoLR": AutoLR, "net": net, "optimizer": make_optimizer(net), "batches": batches, **more}


def test_the_block_on_a_run_without_hdet_runs() -> None:
    names = _names()
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(make_optimizer(names["net"]), 1000)
    for _ in range(100):
        plain.optimizer.step()
        plain.step()
    parts = {"model": names["net"], "optimizer": plain.optimizer, "scheduler": plain}
    names["checkpoint"] = {name: part.state_dict() for name, part in parts.items()}
    exec(compile(_section("A run that began without hdet"), "frameworks.md", "exec"), names)
    assert names["scheduler"].last_epoch == 100
    assert names["scheduler"].get_last_lr() == plain.get_last_lr()


@pytest.mark.filterwarnings("ignore:the round that ended|.* rounds of this run")
def test_the_block_on_unfreezing_runs() -> None:
    names = _names()
    before = names["net"].layers[0].weight.detach().clone()
    exec(compile(_section("Unfreezing layers"), "frameworks.md", "exec"), names)
    scheduler, (first, joined) = names["scheduler"], names["optimizer"].param_groups
    assert scheduler.finished
    assert not torch.equal(names["net"].layers[0].weight, before)
    values = [record.base_values for record in scheduler.history if len(record.base_values) == 2 and record.step < 400]
    assert [b / a for a, b in values] == pytest.approx([0.1] * len(values))
    assert len(first["params"]) == len(joined["params"]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_block_on_several_optimizers_runs() -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'hdet[lightning]'")
    names = _names()
    exec(compile(_section("Several optimizers in Lightning"), "frameworks.md", "exec"), names)
    module, points = names["GAN"](), list(torch.randn(100, 2) + 3)
    loader = torch.utils.data.DataLoader(points, batch_size=2)  # type: ignore[arg-type,var-annotated]
    pl.Trainer(max_epochs=6, **OPTIONS).fit(module, loader)
    schedulers = module.lr_schedulers()
    assert [scheduler.last_epoch for scheduler in schedulers] == [300, 300]
    assert all(scheduler.finished and len(scheduler.history) > 50 for scheduler in schedulers)


@pytest.mark.filterwarnings("ignore:the round that ended|.* rounds of this run")
def test_the_block_instead_of_reduce_on_plateau_runs() -> None:
    names = _names(validate=lambda net: 1.0)
    exec(compile(_section("Instead of ReduceLROnPlateau"), "frameworks.md", "exec"), names)
    assert names["scheduler"].finished
    assert names["step"] < 399


def _deepspeed_block(folder: str) -> tuple[int, int]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    pretend_torchrun()
    net = Model()
    names: dict[str, Any] = {
        "torch": torch,
        "AutoLR": AutoLR,
        "net": net,
        "optimizer": make_optimizer(net),
        "batches": torch.utils.data.DataLoader(Samples(32), batch_size=4),
        "folder": folder,
    }
    exec(compile(_section("DeepSpeed"), "frameworks.md", "exec"), names)
    return names["scheduler"].last_epoch, names["scheduler"].history[-1].step


def test_the_deepspeed_block_runs(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    assert launch(_deepspeed_block, 1, str(tmp_path), timeout_s=150) == [(4, 4)]
    assert (tmp_path / "latest").exists()
