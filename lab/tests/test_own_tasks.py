"""A task of the user's own, MODULE:CLASS, without an edit of the package: the example of the docs, as a file."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from hdet_lab import cli
from hdet_lab.runs import folder as run_folder
from hdet_lab.tasks import load_task
from small_tasks import DOCS

SHORT = ["--steps", "20", "--interval", "5", "--json"]


@pytest.fixture(autouse=True)
def _beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds the example as mytasks.py."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "mytasks.py").write_text(block)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n\nhalf = dict\n")
    (tmp_path / "partial.py").write_text("class Half:\n    name = 'half'\n\n    def __init__(self, data): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mytasks", "broken", "partial"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.parametrize("spelled", [["mytasks:WaveTask"], ["--task", "mytasks:WaveTask"], ["--task=mytasks:WaveTask"]])
def test_it_trains(spelled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *SHORT, *spelled]) == 0
    end = json.loads(capsys.readouterr().out)
    assert end["validation"]["loss"] < 1.0
    assert Path(end["folder"]).name.startswith("mytasks-WaveTask-gradient-0.001-s0-")
    assert run_folder.read(Path(end["folder"])).config["task"] == "mytasks:WaveTask"


def _forget_the_end(folder: Path) -> None:
    """As if the run had stopped before it could say that it was done."""
    metrics = folder / run_folder.METRICS
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["event"] != "end"]
    metrics.write_text("\n".join(lines) + "\n")


def test_it_trains_on_processes_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    command = ["train", *SHORT, "--task", "mytasks:WaveTask", "--method", "loss", "--replicas", "2"]
    assert cli.main([*command, "--checkpoint-s", "0", "--out", str(folder)]) == 0
    first = json.loads(capsys.readouterr().out)
    _forget_the_end(folder)
    assert cli.main(["train", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["validation"] == first["validation"]


def test_a_strangers_run_says_which_module_it_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert cli.main(["train", *SHORT, "--task", "mytasks:WaveTask", "--checkpoint-s", "0", "--out", str(folder)]) == 0
    _forget_the_end(folder)
    shutil.copytree(folder, tmp_path / "elsewhere")
    del sys.modules["mytasks"]
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(tmp_path / "elsewhere")]) == 2
    assert "To resume it runs your module mytasks, starts 1 processes" in capsys.readouterr().err
    assert "mytasks" not in sys.modules


def test_it_is_compared_with_options_of_its_own(tmp_path: Path) -> None:
    options = ["--task-option", "num_points=100", "--task-option", "batch_rows=8", "--replicas", "2", "--steps", "20"]
    command = ["compare", *options, "--methods", "fixed", "gradient", "--starts", "1e-2", "1e-1"]
    assert cli.main([*command, "--task", "mytasks:WaveTask", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["batch_rows"] == 8
    assert len(found["runs"]) == 4


def test_it_is_benchmarked(tmp_path: Path) -> None:
    command = ["bench", "--tasks", "mytasks:WaveTask", "--methods", "autolr", "--steps", "60", "--seeds", "0"]
    assert cli.main([*command, "--out", str(tmp_path / "bench")]) == 0
    record = json.loads((tmp_path / "bench" / "mytasks-WaveTask" / "autolr.json").read_text())
    assert record["runs"][0]["loss"] < 1.0


def test_the_bench_says_what_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mytasks.py").rename(tmp_path / "mine" / "mytasks.py")
    command = ["bench", "--task", "mine/mytasks.py:WaveTask", "--methods", "grid", "autolr", "nadamw", "--steps", "60"]
    assert cli.main([*command, "--seeds", "0", "--out", str(tmp_path / "bench")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"(Use|Search for the learning rate).* \(60 steps, 1 seed\)\.$", lines[-1]), lines[-1]
    assert any(line.startswith("best of the grid (") for line in lines)
    assert any(line.startswith("NAdamW at one default (wsd, 0.003)") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "nowhere.py:WaveTask", "--pages"], "--task must be given without --tasks and --pages"),
        (["--task", "mytasks.py"], "--task must be MODULE:CLASS, or FILE.py:CLASS of a file that exists, but got"),
    ],
)
def test_what_the_bench_cannot_compare(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_bench_of_a_task_that_is_not_there_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--task", "nowhere.py:WaveTask", "--out", str(tmp_path / "bench")]) == 1
    said = capsys.readouterr().out
    assert "is skipped: task must be MODULE:CLASS that can be imported, but got 'nowhere.py:WaveTask'" in said
    assert said.splitlines()[-1] == "No advice: nothing was run."


def test_a_class_that_asks_for_it_gets_the_data_folder() -> None:
    with pytest.raises(ValueError, match=r"but that of 'partial:Half' has no total_steps, batch_rows, validation_rows"):
        load_task("partial:Half", "data")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'points'"):
        load_task("mytasks:WaveTask", points=3)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "nowhere:WaveTask",
            r"MODULE:CLASS that can be imported, but got 'nowhere:WaveTask': No module named",
        ),
        ("mytasks:Wave", r"but got 'mytasks:Wave': module 'mytasks' has no attribute 'Wave'"),
        ("broken:half", r"but got 'broken:half': No module named 'nothing_of_this_name'"),
        ("partial:Half", r"that of 'partial:Half' has no total_steps, .*, evaluate"),
        ("my tasks:WaveTask", r"TASK must be one of .*, or MODULE:CLASS, but got 'my tasks:WaveTask'"),
    ],
)
def test_a_mistake_is_one_line(task: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *SHORT, "--task", task]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err), err
