"""Frameworks in tests: a fixture of those with an adapter, and one module of Lightning's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

import framework_task as task

FRAMEWORKS = ("lightning", "transformers", "accelerate")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """The framework's name."""
    name = str(request.param)
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(name, reason=f"pip install 'hdet[{name}]'")
    return name


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
