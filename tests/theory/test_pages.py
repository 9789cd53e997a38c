"""Every statement of docs/theory.md and every row of docs/paper.md that names a test names one that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize(("page", "at_least"), [("theory.md", 15), ("paper.md", 26)])
def test_the_named_tests_exist(page: str, at_least: int) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(set(named)) >= at_least
    for file, test in named:
        trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob(file)]
        functions = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{file}::{test}"


def test_every_test_of_theory_is_named() -> None:
    named = {test for _, test in NAMED.findall((ROOT / "docs" / "theory.md").read_text())}
    for path in (ROOT / "tests" / "theory").glob("test_*.py"):
        if path.name != Path(__file__).name:
            tree = ast.parse(path.read_text())
            tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}
            assert tests <= named, path.name
