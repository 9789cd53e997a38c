"""What the user has written, by name: ``package.module:name``, on the command line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any


def is_target(text: str) -> bool:
    """Whether it reads like ``package.module:name``. Nothing is imported."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def module_target(text: str) -> str:
    """``folder/file.py:name`` as ``file:name``, with the folder on the path; other text as it is. Imports nothing."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        return text
    folder, file = os.path.split(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return f"{file.removesuffix('.py')}:{name}"


def load_target(target: str) -> Any:
    """Import ``package.module`` from the working directory or the path, and return its ``name``."""
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, and an installed program has not
    return getattr(importlib.import_module(module), name)
