"""The worked examples of CONTRIBUTING.md run, what it names exists, and every room is in its table."""

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


def test_there_is_an_example_of_each_kind() -> None:
    assert list(SECTIONS) == ["Add a controller", "Add a knob", "Add a signal", "Add an adapter"]
    assert "docs/lab.md#a-task-of-your-own" in PAGE


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_runs(section: str) -> None:
    names: dict[str, Any] = {"__name__": "CONTRIBUTING"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explorer compares replicas, and there is one")
        exec(compile(SECTIONS[section], "CONTRIBUTING.md", "exec"), names)


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in (ROOT / "src" / "hdet").iterdir() if (path / "__init__.py").exists()}
    assert {room for room in rooms if f"`{room}/`" not in PAGE} == set()


def test_the_files_it_names_exist() -> None:
    named = re.findall(r"`(?:src/hdet/)?((?:[\w]+/)+(?:[\w]+\.py)?)`", PAGE)
    assert len(named) > 15
    assert [name for name in named if not any((place / name).exists() for place in (ROOT, ROOT / "src" / "hdet"))] == []
