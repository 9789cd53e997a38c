"""A digest of a task's data, which tells whether two runs had the same."""

from __future__ import annotations

import hashlib
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_lab.tasks.base import Task


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
