"""Runs that somebody else has made: whatever their files are, a command says one line or shows them, and soon."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_own_runs import NAMES, record

from hdet.sinks import JsonLinesSink, TensorBoardSink
from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.commands.watch import sparkline
from hdet_lab.files import read_text, replace_file
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs import rules
from run_folders import entries, facts, write

pytestmark = pytest.mark.slow


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What a command says, on one line, where it refuses."""
    assert cli.main(arguments) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.strip("\n").isprintable()
    return err


# -- event files --------------------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return tmp_path / "board"


def events(board: Path, **scalars: float) -> Path:
    """A TensorBoardSink's, and scalars of your choice in the last round."""
    sink = TensorBoardSink(board)
    for index in range(3):
        sink(record(index), NAMES)
    for name, value in scalars.items():
        sink._writer.add_scalar(f"hdet/{name}", value, record(2).step)
    sink.close()
    return board


@pytest.mark.parametrize(
    ("scalar", "value", "rule"),
    [
        ("round", float("nan"), "round must be an integer from 0 to 9007199254740992, but got nan"),
        ("round", -1.0, "round must be an integer from 0 to 9007199254740992, but got -1.0"),
        ("rollbacks", float("inf"), "rollbacks must be an integer from 0 to 9007199254740992, but got inf"),
        ("rollbacks", 0.5, "rollbacks must be an integer from 0 to 9007199254740992, but got 0.5"),
        ("unhealthy", 3e8, "unhealthy must be an integer from 0 to 2, but got 300000000.0"),
        ("quarantined", 3.0, "quarantined must be an integer from 0 to 2, but got 3.0"),
    ],
)
def test_counts_of_events_are_checked(
    scalar: str, value: float, rule: str, board: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    err = refused(["report", str(events(board, **{scalar: value}))], capfd)
    assert f"board cannot be used: step 30: {rule}; it must be what a TensorBoardSink writes" in err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_of_events_that_are_not_finite_are_left_out(
    value: float, board: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scalars = {"loss/replica0": value, "lr/body/base": value, "distance": value, "control/z/0": value}
    events(board, **scalars)
    assert cli.main(["report", str(board), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "it must be a regular file, but is a pipe"), ("device", "but is a device")]
)
@pytest.mark.parametrize("named", ["board", "."])
def test_event_files_that_are_none(
    kind: str, said: str, named: str, board: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = events(board) / "events.out.tfevents.2.host"
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    err = refused(["report", str(tmp_path / named), "--out", str(tmp_path / "out")], capfd)
    assert f"{place} cannot be used" in err
    assert said in err


# -- run folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint.pt"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_links_to_devices_and_pipes(name: str, target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", facts(), entries()[:-1])
    (folder / "checkpoint.pt").write_bytes(b"")
    (folder / name).unlink()
    if target == "pipe":
        os.mkfifo(tmp_path / "pipe")
        target = str(tmp_path / "pipe")
    (folder / name).symlink_to(target)
    refused(["train", "--resume", str(folder), "--yes"], capfd)
    if name != "checkpoint.pt":
        for command in (["report", str(folder)], ["watch", "--once", str(folder)]):
            err = refused(command, capfd)
            assert f"{name} cannot be read (it must be a regular file, but is a " in err


def test_files_have_a_size_that_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", facts(), entries())
    for name in ("config.json", "metrics.jsonl"):
        path = folder / name
        content = path.read_bytes()
        os.truncate(path, 2**42)  # a sparse file: it takes no room
        assert "it must have at most" in refused(["report", str(folder)], capfd)
        path.write_bytes(content)
    log = tmp_path / "log.jsonl"
    JsonLinesSink(log)(record(0), NAMES)
    os.truncate(log, 2**42)
    assert "it must have at most 1,073,741,824 bytes, but has" in refused(["report", str(log)], capfd)


def test_a_checkpoint_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="it must be a regular file, but is a pipe"):
        run_folder.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [("17e307", 1.7e308), ("1" + "0" * 308, 1e308), ("9007199254740993", 2.0**53), ("-12", -12)],
)
def test_large_integers_are_floats(text: str, found: float) -> None:
    value = rules.parse(f"[{text}]")[0]
    assert value == found
    assert isinstance(value, int) == (text == "-12")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "9" * 10_000])
def test_numbers_in_files_are_finite(text: str) -> None:
    with pytest.raises(ValueError, match=r"it must be JSON, but got .* \(numbers must be finite, but got "):
        rules.parse(f'{{"a": {text}}}')


@pytest.mark.parametrize(
    "losses",
    [(0.0, 4e-323), (4e-323, 4e-323), (5e-324, 0.0), (17 * 10**307, 17 * 10**307), (-(17 * 10**307), 1), (0, 0)],
)
def test_losses_at_the_ends_of_what_a_float_can_be(
    losses: tuple[float, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = entries()
    for index, line in enumerate(lines[:-1]):
        line["losses"] = [losses[index % 2]] * 2
        line["scales"], line["base_values"] = [losses[index % 2]], [losses[0], losses[1]]
        line["distance"] = losses[index % 2]
    lines[-1]["validation"]["loss"] = losses[0]
    folder = write(tmp_path / "run", facts(), lines)
    assert cli.main(["report", str(folder)]) == 0
    assert cli.main(["watch", "--once", str(folder)]) == 0


def test_a_line_of_bars_ends_at_its_top() -> None:
    assert sparkline([0.0, 4e-323]) == "▁█"
    assert len(sparkline([5e-324, 0.0, -5e-324, 1.0])) == 4


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"run-\xff\xfe", b"run-\x1b[2J\x1b]0;title\x07", b"run\nline"])
def test_folder_names_are_shown_and_not_obeyed(name: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    write(folder, facts(), entries())
    assert cli.main(["report", str(folder)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("wrote ")
    assert out.count("\n") == 1
    assert out.strip("\n").isprintable()
    assert cli.main(["watch", "--once", str(folder)]) == 0
    page = folder.with_name(f"{folder.name}-report") / "report.html"
    assert "\x1b" not in page.read_text(encoding="utf-8")


def test_names_of_records_are_shown_and_not_obeyed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"log-\xff\x1b[2J.jsonl")))
    JsonLinesSink(log)(record(0), NAMES)
    assert cli.main(["report", str(log)]) == 0
    assert capfd.readouterr().out.strip("\n").isprintable()


@pytest.mark.parametrize("year_s", [253_402_300_799, 253_402_300_800, 10**13, -(10**10)])
def test_a_file_from_any_year(year_s: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from hdet_lab.runs.own import _when

    assert _when(year_s) == ("9999-12-31 23:59 UTC" if year_s == 253_402_300_799 else "not known")
    log = tmp_path / "log.jsonl"
    JsonLinesSink(log)(record(0), NAMES)
    try:
        os.utime(log, (year_s, year_s))
    except (OSError, OverflowError):
        pytest.skip("this file system has no such year")
    assert cli.main(["report", str(log)]) == 0


# -- many param groups --------------------------------------------------------------------------------------------


def many_groups(count: int, index: int) -> Any:
    lrs = tuple(1e-3 * (1 + k) for k in range(count))
    return replace(
        record(index),
        values=tuple((lr, lr) for lr in lrs),
        base_values=lrs,
        scales=tuple(1 + k / count + index for k in range(count)),
        control={"z": tuple(float(k) for k in range(count))},
    )


@pytest.mark.parametrize("kind", ["lines", "events"])
def test_thousands_of_param_groups(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    count = 2000
    path = tmp_path / ("log.jsonl" if kind == "lines" else "board")
    sink = JsonLinesSink(path) if kind == "lines" else TensorBoardSink(path)
    for index in range(30 if kind == "lines" else 3):
        sink(many_groups(count, index), [f"layer {k}" for k in range(count)])
    sink.close()
    started = time.monotonic()
    assert cli.main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert time.monotonic() - started < 40
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The first 20 of 2,000 param groups." in page
    assert "layer 19" in page


def test_watch_shows_as_many_param_groups_as_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, lines = facts(), entries()
    config["groups"] = [f"layer {k}" for k in range(2000)]
    for line in lines[:-1]:
        line |= {"values": [[1e-3, 1e-3]] * 2000, "base_values": [1e-3] * 2000}
    assert cli.main(["watch", "--once", str(write(tmp_path / "run", config, lines))]) == 0
    out = capfd.readouterr().out
    assert "layer 19" in out
    assert "layer 20 " not in out
    assert "of 1,980 more param groups" in out


# -- writing ------------------------------------------------------------------------------------------------------


def test_links_in_the_folder_of_a_report_are_replaced(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "run", facts(), entries()), tmp_path / "out"
    out.mkdir()
    kept = {}
    for name in ("report.html", "loss.png", "lr.png", "report.html.new", "loss.png.new"):
        kept[name] = tmp_path / f"precious-{name}"
        kept[name].write_text("precious")
        (out / name).symlink_to(kept[name])
    assert cli.main(["report", str(folder), "--out", str(out)]) == 0
    assert {path.read_text() for path in kept.values()} == {"precious"}
    assert not (out / "report.html").is_symlink()
    assert (out / "report.html").stat().st_size > 10_000
    assert not list(out.glob("*.new"))


def test_a_link_in_the_place_of_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", facts(), entries())
    (tmp_path / "precious").mkdir()
    (tmp_path / "run-report").symlink_to(tmp_path / "precious")
    err = refused(["report", str(folder)], capfd)
    assert "--out must be given where a link is in the place of the report, but " in err
    assert not list((tmp_path / "precious").iterdir())


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file: Any) -> None:
        file.write(b"half of the ne")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        replace_file(path, fail)
    assert read_text(path) == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


# -- resuming -----------------------------------------------------------------------------------------------------


TRAIN = ["train", "small-gpt", "--method", "fixed", "--steps", "12", "--interval", "4", "--checkpoint-s", "0"]


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    assert cli.main([*TRAIN, "--out", str(folder)]) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    return folder


@pytest.fixture
def copied(unfinished: Path, tmp_path: Path) -> Path:
    """As a download is."""
    shutil.copytree(unfinished, tmp_path / "run")
    return tmp_path / "run"


def test_ones_own_run_is_resumed_without_a_question(unfinished: Path) -> None:
    kept = (unfinished / "metrics.jsonl").read_bytes()
    assert cli.main(["train", "--resume", str(unfinished)]) == 0
    (unfinished / "metrics.jsonl").write_bytes(kept)


def test_a_strangers_run_is_not_resumed_unasked(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    err = refused(["train", "--resume", str(copied)], capfd)
    assert "run was not started here by you. To resume it starts 1 processes on cpu that train small-gpt up to " in err
    assert "reads the task's data from data, downloads what is missing there, and writes into " in err
    assert "; pass --yes to go ahead" in err
    assert cli.main(["train", "--resume", str(copied), "--yes"]) == 0


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("yes", 0), ("", 2), ("no", 2)])
def test_on_a_terminal_it_is_asked(
    answer: str, status: int, copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    assert cli.main(["train", "--resume", str(copied)]) == status
    said = capfd.readouterr()
    assert "was not started here by you" in said.err
    assert "Go ahead? [y/N]" in said.out
    assert ("was left alone" in said.err) == (status == 2)


def test_a_folder_of_another_user_is_a_strangers(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_folder.read(unfinished)
    assert run_folder.is_own(found)
    monkeypatch.setattr(os, "geteuid", lambda: unfinished.stat().st_uid + 1)
    assert not run_folder.is_own(found)


def test_nothing_is_written_through_a_link_of_a_resumed_run(
    copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    shutil.copy(copied / "metrics.jsonl", precious)
    (copied / "metrics.jsonl").unlink()
    (copied / "metrics.jsonl").symlink_to(precious)
    before = precious.read_bytes()
    err = refused(["train", "--resume", str(copied), "--yes"], capfd)
    assert f"a run that is continued must not hold links, but {copied}/metrics.jsonl is one; put the file there" in err
    assert precious.read_bytes() == before


def test_the_folder_of_a_new_run_is_known_by_it(unfinished: Path) -> None:
    assert json.loads((unfinished / "config.json").read_text())["folder_id"] == str(unfinished.stat().st_ino)
