"""The worked examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    part.splitlines()[0]: block
    for part in PAGE.split("\n## ")[1:]
    for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL)
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_runs(section: str) -> None:
    names: dict[str, Any] = {"__name__": "CONTRIBUTING"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        exec(compile(SECTIONS[section], "CONTRIBUTING.md", "exec"), names)
