"""What a run depended on besides its configuration: versions, commit, hardware, data."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hdet
from hdet.lab.tasks.base import Task


def describe(task: Task) -> dict[str, Any]:
    """Everything worth recording, in plain types."""
    return {
        "hdet": hdet.__version__,
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "hardware": hardware(),
        "data_sha256": data_sha256(task),
    }


def hardware() -> dict[str, Any]:
    """The machine, as far as it tells."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpu": models[0] if models else platform.machine(),
        "num_cores": os.cpu_count(),
        "gpus": gpus,
    }


def git_commit() -> str | None:
    """The commit of this source, where it is a checkout; ``+`` at the end where files differ from it."""
    folder = Path(hdet.__file__).parent
    if "site-packages" in folder.parts:
        return None  # git would answer for whatever repository the environment happens to lie in
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def data_sha256(task: Task) -> str:
    """Digest of every tensor that the task holds."""
    digest = hashlib.sha256()
    _feed(digest, vars(task))
    return digest.hexdigest()


def _feed(digest: Any, values: dict[str, Any]) -> None:
    for name, value in sorted(values.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif is_dataclass(value) and not isinstance(value, type):
            _feed(digest, vars(value))
