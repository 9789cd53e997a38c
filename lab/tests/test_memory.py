"""A long run takes no more memory than a short one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hdet.launch import launch

pytestmark = pytest.mark.slow

ROUNDS = 46


def _production() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "production.py"
    spec = importlib.util.spec_from_file_location("production", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _curves(device: str, width: int) -> dict[str, list[float]]:
    faces = ("gradient", "loss", "mean", "nesterov")
    return {face: _production().memory_curve(face, device, ROUNDS, width) for face in faces}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read as Linux tells it")
def test_resident_memory_does_not_grow_over_many_rounds() -> None:
    """A model of 0.6 MB: one copy lost a round would be 18 MB from round 16 on."""
    for face, curve in launch(_curves, 2, "cpu", 200, timeout_s=150)[0].items():
        assert curve[-1] - curve[15] < 9, (face, curve)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_the_gpu_does_not_grow_at_all() -> None:
    for face, curve in launch(_curves, 2, "cuda", 500, timeout_s=150)[0].items():
        assert max(curve[10:]) <= max(curve[:10]), (face, curve)
