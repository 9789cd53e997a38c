"""Run folders that were cut, tampered with or filled with something else: one line that says what, or a report."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.commands.report import group_runs, write_report
from hdet_lab.commands.watch import view
from hdet_lab.reports.compose import seed_table, summary_table
from hdet_lab.reports.page import facts_table, page
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.settings import from_dict
from run_folders import NUM_STEPS, entries, facts, write

pytestmark = pytest.mark.slow

WRONG: list[Any] = [
    *(None, True, "", "text", 0, -1, 2.5, 1e308, 10**30, 10**400, float("nan"), float("inf")),
    *([], {}, [[]], [None], ["text"], {"a": None}, {"a": {}}, {"z": [[1]]}),
]
FILES: dict[str, bytes] = {
    "empty": b"",
    "newlines": b"\n\n",
    "binary": bytes(range(256)) * 4,
    "latin-1": '{"config": "\xfc"}\n'.encode("latin-1"),
    "a list": b"[]\n",
    "null": b"null\n",
    "a number": b"1e999\n",
    "deep": b"[" * 100_000 + b"\n",
    "long": b"9" * 10_000 + b"\n",
    "a zip": b"PK\x03\x04" + bytes(100) + b"\n",
}


def run(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> int:
    """A command in this process, which may not raise; what it refuses it refuses on one line."""
    status = cli.main(arguments)
    err = capfd.readouterr().err
    if status == 2:
        assert err.startswith(f"hdet {arguments[0]}: ")
        assert err.count("\n") == 1
        assert len(err) < 2000
    else:
        assert status == 0
        assert err == ""
    return status


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything in ``value`` is; of a list, the first entry stands for all."""
    if here:
        yield here
    for key in value if isinstance(value, dict) else range(len(value[:1])) if isinstance(value, list) else ():
        yield from paths(value[key], (*here, key))


def changed(value: Any, path: tuple[Any, ...], *new: Any) -> Any:
    """A copy with something new at a place, or without it."""
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if new:
        place[path[-1]] = new[0]
    else:
        del place[path[-1]]
    return value


def mutants(value: Any) -> Iterator[tuple[str, Any]]:
    """``value`` with each thing in it once taken out, and once each wrong thing in its place."""
    for path in paths(value):
        yield f"{path} missing", changed(value, path)
        for wrong in WRONG:
            yield f"{path} = {str(wrong)[:20]}", changed(value, path, wrong)


def accepted(folder: Path, config: Any, lines: list[Any], what: str) -> run_folder.RunRecord | None:
    """The record, shown as watch does; None where it is refused on one line that names the file."""
    write(folder, config, lines)
    said = ""
    try:
        record = run_folder.read(folder)
    except UsageError as error:
        said = str(error)
    if said:
        assert re.search(rf"{folder}/(config.json|metrics.jsonl) cannot be used: .* must ", said), what
        assert len(said) < 1000, what
        return None
    try:
        Console(file=io.StringIO(), width=200).print(view(record))
    except Exception as error:
        raise AssertionError(f"{what}: watch") from error
    return record


def test_metrics_with_anything_anywhere_are_refused_or_shown(tmp_path: Path) -> None:
    good = entries()
    kept: dict[int, list[Any]] = {1: [], 3: []}  # a round, and the end
    for line, found in kept.items():
        # The index of a round and its converge_s are for nobody here.
        for what, mutant in mutants({k: v for k, v in good[line].items() if k not in ("index", "converge_s")}):
            folder = tmp_path / "run"
            if accepted(folder, facts(), [*good[:line], mutant, *good[line + 1 :]], f"line {line}: {what}"):
                found.append(mutant)
            shutil.rmtree(folder)
    assert 50 < len(kept[1]) < 200
    assert 20 < len(kept[3]) < 100
    # All that are accepted become one report: the rounds one long run, and each end a run of its own.
    runs = [[good[0], *kept[1], *good[2:]], *([good[0], end] for end in kept[3])]
    for seed, lines in enumerate(runs):
        config = facts()
        config["config"]["seed"] = seed
        write(tmp_path / f"run-{seed}", config, lines)
    assert write_report([tmp_path], tmp_path / "report").stat().st_size > 10_000


def test_settings_with_anything_anywhere_are_refused_or_shown(tmp_path: Path) -> None:
    seen = set()
    for number, (what, mutant) in enumerate(mutants(facts())):
        record = accepted(tmp_path / f"run-{number}", mutant, entries(), what)
        if record is not None:
            [group] = group_runs([record])
            page(group.label, [seed_table([group]), summary_table([group])], [], [facts_table("run", record.facts)])
            seen.add(what)
            with contextlib.suppress(UsageError):  # as of a run that is resumed, before anything is loaded
                from_dict(record.config).check()
    assert "('hardware',) = []" in seen
    assert "('config', 'lr') = text" not in seen


@pytest.mark.parametrize("value", [None, 1e308, -1e308, 0.0, 1e-320])
def test_extreme_numbers_are_drawn(value: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, lines = facts(), entries()
    for line in lines[:-1]:
        line |= {"losses": [value, value], "values": [[value] * 2] * 2, "base_values": [value] * 2, "scales": [value]}
        line |= {"distance": value, "control": {"z": [value]}, "knobs": {"eps": {"values": [value] * 2, "base": value}}}
    lines[-1]["validation"]["loss"] = value
    folder = write(tmp_path / "run", config, lines)
    assert run(["report", str(folder)], capfd) == 0
    assert run(["watch", "--once", str(folder)], capfd) == 0


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", [*FILES, "a folder", "a pipe", "absent", "cut"])
def test_a_file_that_is_something_else(name: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", facts(), entries()[:-1])
    (folder / "checkpoint.pt").write_bytes(b"")
    path = folder / name
    content = FILES.get(kind, path.read_bytes()[: path.stat().st_size // 2])
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "absent":
        path.write_bytes(content)
    fine = name == "metrics.jsonl" and kind == "cut"  # still being written
    empty = name == "metrics.jsonl" and kind == "empty"  # nothing has happened yet
    assert run(["watch", "--once", str(folder)], capfd) == (0 if fine or empty else 2)
    assert run(["report", str(folder)], capfd) == (0 if fine else 2)
    assert run(["train", "--resume", str(folder), "--yes"], capfd) == 2


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    lines = entries()
    lines[1]["losses"] = {"a": 1}
    with pytest.raises(UsageError, match=r"metrics.jsonl cannot be used: line 2: losses must be a list of finite num"):
        run_folder.read(write(tmp_path / "a", facts(), lines))
    lines = entries()
    lines[2]["step"] = 10**6
    with pytest.raises(UsageError, match=rf"line 3: step must be an integer from 0 to {NUM_STEPS}, but got 1000000"):
        run_folder.read(write(tmp_path / "b", facts(), lines))
    config = facts()
    del config["config"]["lr"]
    with pytest.raises(UsageError, match=r"a/config.json cannot be used: lr must be a finite number > 0, but is miss"):
        run_folder.read(write(tmp_path / "c" / "a", config, entries()))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "method",
            "guess",
            r"method among the settings of a run must be of type Literal\['fixed', .*, but got 'guess'",
        ),
        ("interval", "4", "interval among the settings of a run must be of type .*int.*, but got '4'"),
        ("interval", 0, "--interval must be an integer >= 1, but got 0"),
        ("steps", 10**12, "--steps must be at most 100,000,000, but got 1000000000000"),
        ("knobs", ["../x"], r"knobs among the settings of a run must be of type .*, but got \['../x'\]"),
        ("device", [], r"device among the settings of a run must be of type str, but got \[\]"),
        ("extra", 1, "the settings of a run must be among task, method, .*, but got 'extra'"),
        ("data", None, "data among the settings of a run must be of type Path, but got None"),
    ],
)
def test_settings_of_a_resumed_run_are_checked(name: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        from_dict({**facts()["config"], name: value}).check()


def test_reports_go_where_they_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", facts(), entries())
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "--out must be a folder that can be written, but" in capfd.readouterr().err
    monkeypatch.chdir(folder)
    assert cli.main(["report", "."]) == 0
    assert (tmp_path / "run-report" / "report.html").exists()
