"""Two tiers of tests: ``make test`` leaves what is marked slow to ``make test-all``."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, when: bool = True) -> Any:
    """Parameters of a case that takes long, and seldom fails where the others pass."""
    return pytest.param(*values, marks=[pytest.mark.slow] if when else [])
