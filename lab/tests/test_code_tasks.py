from __future__ import annotations

import hashlib
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_lab.runs import provenance
from hdet_lab.tasks import code_gpt, stdlib_gpt
from hdet_lab.tasks import text as text_tasks
from hdet_lab.tasks.code import read_code
from hdet_lab.tasks.digest import data_sha256
from small_tasks import SMALL, write_wheels


def test_the_corpus_has_every_module_but_tests(tmp_path: Path) -> None:
    text = read_code(tmp_path, wheels=write_wheels(tmp_path), sha256=None).decode()
    for package in ("north", "south"):
        assert text.count(f"def {package}") == text.count(f"import {package}") == 10
    assert "assert" not in text
    assert "nothing" not in text
    paths = ["north/__init__.py", "north/code.py", "south/__init__.py", "south/code.py"]
    first = min(paths, key=lambda path: hashlib.sha256(path.encode()).digest())
    assert text.startswith(("import " if "init" in first else "def ") + first.partition("/")[0])


def test_a_built_corpus_needs_no_wheels(tmp_path: Path) -> None:
    pins = write_wheels(tmp_path)
    text = read_code(tmp_path, wheels=pins, sha256=None)
    for name in pins:
        (tmp_path / "code" / "wheels" / name).unlink()
    assert read_code(tmp_path, wheels=pins, sha256=hashlib.sha256(text).hexdigest(), download=False) == text
    with pytest.raises(ValueError, match=r"corpus\.txt must have the SHA-256 50f3b9f9"):
        code_gpt(tmp_path, wheels=pins)


def test_wheels_are_checked(tmp_path: Path) -> None:
    pins = write_wheels(tmp_path)
    with pytest.raises(ValueError, match=r"south-1\.0-py3-none-any\.whl must have the SHA-256 abc, but got"):
        read_code(tmp_path, wheels=pins | {"south-1.0-py3-none-any.whl": "abc"}, sha256=None)
    assert not (tmp_path / "code" / "corpus.txt").exists()


def test_missing_wheels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold attrs-24.* pip download --no-deps attrs==24\.2\.0 click"):
        read_code(tmp_path, download=False)
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        return subprocess.CompletedProcess(command, 1, "", "no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(FileNotFoundError, match=r"\(pip said: no network\)"):
        read_code(tmp_path)
    assert asked[-1] == "werkzeug==3.1.3"


def write_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_tasks, "STDLIB_BYTES", 4000)
    (folder / "a.py").write_text("answer = 42\n" * 400)
    return folder


def test_stdlib_says_when_its_text_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_library(tmp_path, monkeypatch)
    task = stdlib_gpt(root, max_bytes=4000, **SMALL)
    digest = hashlib.sha256(bytes(task.text.tolist())).hexdigest()
    assert f"(SHA-256 {digest}) is not that of the published results" in task.note
    assert provenance.describe(task)["data_note"] == task.note
    with caplog.at_level(logging.INFO, logger="hdet"):
        provenance.tell_note(task)
    assert caplog.messages == [task.note]


def test_stdlib_is_quiet_about_the_published_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_library(tmp_path, monkeypatch)
    published = text_tasks.TextTask("stdlib-gpt", stdlib_gpt(root, max_bytes=4000, **SMALL).text, 256)
    monkeypatch.setattr(text_tasks, "STDLIB_DATA_SHA256", data_sha256(published))
    task = stdlib_gpt(root, max_bytes=4000, **SMALL)  # whatever the sizes of the model
    assert task.note == ""
    assert "data_note" not in provenance.describe(task)
    with caplog.at_level(logging.INFO, logger="hdet"):
        provenance.tell_note(task)
    assert caplog.messages == []


def test_the_pinned_text_is_that_of_the_records() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "climb"
    records = [json.loads(path.read_text()) for path in results.glob("stdlib-gpt-*.json")]
    assert records
    assert {record["data_sha256"] for record in records} == {text_tasks.STDLIB_DATA_SHA256}


def test_a_digest_depends_on_the_data() -> None:
    first, second = (text_tasks.TextTask("t", torch.arange(200) % size, 60, **SMALL) for size in (50, 51))
    assert data_sha256(first) != data_sha256(second)
