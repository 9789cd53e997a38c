"""Every Python block in the documentation runs, and the site builds without a warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
# Run by the tests of what they document, which set the scene: processes, models, trainers.
ELSEWHERE = {"docs/tasks.md", "docs/frameworks.md", "docs/frameworks_core.md"}


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and _blocks(page)])
def test_the_python_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*there is one: training continues")
        for block in _blocks(page):
            exec(compile(block, page, "exec"), names)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f": {page.removeprefix('docs/')}\n" not in navigation] == []


@pytest.mark.skipif(shutil.which("mkdocs", path=Path(sys.executable).parent) is None, reason="pip install 'hdet[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "api" / "index.html").exists()
