"""Frameworks in tests: stand-ins for those that are not installed there, and one module of Lightning's.

The stand-ins have the attributes that the adapters use; tests of their own use the real ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

import framework_task as task

FRAMEWORKS = ("lightning", "transformers", "accelerate", "deepspeed", "torchtitan")
STEPS = 4


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """The framework's name, with a stand-in where it has one."""
    name = str(request.param)
    monkeypatch.chdir(tmp_path)
    if name == "deepspeed":
        monkeypatch.setitem(sys.modules, name, _module(name, DeepSpeedEngine=Engine))
    elif name == "torchtitan":
        for path in ("torchtitan", "torchtitan.components"):
            monkeypatch.setitem(sys.modules, path, _module(path))
        loss = "torchtitan.components.loss"
        monkeypatch.setitem(sys.modules, loss, _module(loss, IGNORE_INDEX=-100))
        monkeypatch.setitem(sys.modules, "torchtitan.trainer", _module("torchtitan.trainer", Trainer=Titan))
    else:
        pytest.importorskip(name, reason=f"pip install 'hdet[{name}]'")
        return name
    monkeypatch.delitem(sys.modules, f"hdet.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, f"hdet.integrations.{name}", importlib.import_module(f"hdet.integrations.{name}"))
    return name


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


class Engine:
    """Of DeepSpeed."""

    def __init__(self) -> None:
        self.module = task.Model()
        self.optimizer = self.basic_optimizer = task.make_optimizer(self.module)
        self.lr_scheduler = task.make_schedule(self.optimizer)
        self.saved = 0

    def zero_optimization_stage(self) -> int:
        return 0

    def backward(self, loss: Any) -> Any:
        return loss.backward()

    def save_checkpoint(self, folder: str) -> None:
        self.saved += 1


class Titan:
    """The Trainer of torchtitan."""

    def __init__(self) -> None:
        model = task.Model()
        self.model_parts, self.optimizer = [model], task.make_optimizer(model)
        self.lr_schedulers = SimpleNamespace(schedulers=[task.make_schedule(self.optimizer)])
        self.config = SimpleNamespace(training=SimpleNamespace(steps=STEPS))
        self.saved: list[str] = []
        self.checkpointer = SimpleNamespace(
            enable=True,
            save=lambda step, last: self.saved.append("checkpoint"),
            _should_save=lambda step, last: last,
            maybe_wait_for_staging=lambda: None,
        )
        self.validator = SimpleNamespace(validate=lambda: self.saved.append("validation"))

    def forward_backward_step(self, *, labels: Any, global_valid_tokens: Any, **inputs: Any) -> Any:
        loss = self.model_parts[0](inputs["x"], labels)["loss"]
        loss.backward()
        return loss


def lightning_module(
    make_optimizer: Callable[[nn.Module], Optimizer] = task.make_optimizer, make_schedule: Any = None
) -> Any:
    """The task as a LightningModule, with a schedule or without one."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.Model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.inner)
            if make_schedule is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_schedule(optimizer), "interval": "step"}}

    return Module()
