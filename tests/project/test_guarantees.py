"""Every promise of docs/guarantees.md names a test, and the test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


def test_the_named_tests_exist() -> None:
    assert len(NAMED) > 20
    for file, test in NAMED:
        tree = ast.parse(next((ROOT / "tests").rglob(file)).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_every_promise_names_one() -> None:
    rows = [line for line in PAGE.split("## Faults")[1].split("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows[1:] if "::test_" not in row] == []
