"""What a run depended on besides its configuration: versions, commit, code, hardware, data."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hdet
import hdet_lab
from hdet.notices import tell
from hdet_lab.runs.code_hash import code_sha256
from hdet_lab.tasks.base import Task
from hdet_lab.tasks.digest import data_sha256


def describe(task: Task) -> dict[str, Any]:
    """Everything worth recording, in plain types; ``data_note`` where the task has something to say of its data."""
    note = data_note(task)
    return {
        "hdet": hdet.__version__,
        "git_commit": git_commit(),
        "code_sha256": code_sha256(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "hardware": hardware(),
        "data_sha256": data_sha256(task),
        **({"data_note": note} if note else {}),
    }


def data_note(task: Task) -> str:
    """What a reader of the results should know of the data, from the task's ``note``; empty where there is nothing."""
    return str(getattr(task, "note", ""))


def tell_note(task: Task) -> None:
    """Show :func:`data_note` on the console, where there is one."""
    if note := data_note(task):
        tell(note)


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
    folders = [Path(path).parent for path in (hdet.__file__, hdet_lab.__file__)]
    if any("site-packages" in folder.parts for folder in folders):
        return None  # git would answer for whatever repository the environment happens to lie in
    try:
        commit = _git(folders[0], "rev-parse", "HEAD")
        changed = any(_git(folder, "status", "--porcelain", "--", ".") for folder in folders)
        return commit + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
