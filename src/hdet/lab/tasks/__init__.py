"""Tasks to train: a model, deterministic batches and a fixed validation set, by name."""

from __future__ import annotations

from pathlib import Path

from hdet.lab.tasks.base import Batch, Task, split_rows
from hdet.lab.tasks.feed import FeedTask
from hdet.lab.tasks.text import TextTask, shakespeare_gpt, stdlib_gpt

__all__ = ["TASKS", "Batch", "FeedTask", "Task", "TextTask", "load_task", "shakespeare_gpt", "split_rows", "stdlib_gpt"]

TASKS = ("stdlib-gpt", "shakespeare-gpt", "feed")


def load_task(name: str, data: str | Path = "data") -> Task:
    """The task called ``name``, with its default sizes.

    Args:
        name: one of :data:`TASKS`.
        data: folder that holds ``tinyshakespeare/`` and ``kuairand-pure/``.
    """
    if name == "stdlib-gpt":
        return stdlib_gpt()
    if name == "shakespeare-gpt":
        return shakespeare_gpt(data)
    if name == "feed":
        return FeedTask(data)
    raise ValueError(f"task must be one of {', '.join(TASKS)}, but got {name!r}")
