"""The native PyTorch blocks of docs/frameworks.md run, in order, on four processes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hdet.launch import launch
from native import net

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def _blocks() -> list[str]:
    native = PAGE.read_text().split("\n## Native PyTorch\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", native, re.DOTALL)


def _run_blocks(path: str) -> list[str]:
    warnings.simplefilter("ignore")
    g = torch.Generator().manual_seed(dist.get_rank())
    loader = [torch.randn(4, 3, generator=g) for _ in range(8)]
    names: dict[str, Any] = {
        "make_model": lambda: net().float(),
        "loader": loader,
        "path": path,
        "backend": "eager",
        "device": torch.device("cpu"),
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    }
    for block in _blocks():
        exec(compile(block, PAGE.name, "exec"), names)
        if "model = make_model()" in block or "model = parallelize_module" in block:
            _train(names, block, [] if "loader" in block else loader[:4])
    return [type(names[name]).__name__ for name in ("ema", "state")]


def _train(names: dict[str, Any], block: str, batches: list[torch.Tensor]) -> None:
    """A round of what the block has made."""
    model = names["ddp" if "ddp = " in block else "model"]
    scheduler = names["explorer" if "explorer = " in block else "scheduler"]
    for inputs in batches:
        loss = model(inputs).square().mean()
        loss.backward()
        names["optimizer"].step()
        scheduler.step(loss)
        names["optimizer"].zero_grad()
    if batches:
        assert scheduler.history[-1].step == 4


def test_the_blocks_run_in_order(tmp_path: Path) -> None:
    assert len(_blocks()) == 9
    for result in launch(_run_blocks, 4, str(tmp_path / "checkpoint"), timeout_s=150):
        assert result == ["AveragedModel", "dict"]
