from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from hdet_lab import cli
from hdet_lab.commands.demo import can_open
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.progress import RunBar
from tiers import slow


@pytest.mark.parametrize("replicas", [1, slow(2)])
def test_the_demo_trains_compares_and_reports(
    replicas: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert cli.main(["demo", "--replicas", str(replicas), "--steps", "12", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{replicas} replicas train a GPT" in said
    for name in ("AutoLR", "OneCycleLR at 0.003", "OneCycleLR at 0.0001"):
        assert f"{name}: step 12/12, loss" in said
    assert re.search(
        r"its validation loss is \S+% against OneCycleLR at 0.003, and \S+% against OneCycleLR at 0.0", said
    )
    assert f"To be opened in a browser: {out}/report/report.html" in said
    html = (out / "report" / "report.html").read_text()
    runs = {"autolr": "none", "onecyclelr-at-0.003": "one-cycle", "onecyclelr-at-0.0001": "one-cycle"}
    for name, schedule in runs.items():
        record = run_folder.read(out / name)
        assert record.config["schedule"] == schedule
        assert record.status == "done"
    assert "AutoLR found a peak learning rate of " in html
    assert "fixed schedule, lr 0.0001" in html


def test_a_signal_at_the_end_of_a_run_does_not_start_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []

    def interrupted(bar: RunBar, news: dict[str, Any]) -> None:
        told.append(news["step"])
        if news["step"] == 8:  # the last one: the run has ended by then
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunBar, "send", interrupted)
    assert cli.main(["demo", "--replicas", "1", "--steps", "8", "--out", str(tmp_path / "demo")]) == 130
    assert told[-1] == 8
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["autolr"]


@pytest.mark.parametrize(
    ("variables", "interactive", "expected"),
    [
        ({"DISPLAY": ":0"}, True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ({"DISPLAY": ":0"}, False, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1"}, True, False),
        ({"DISPLAY": ":0", "CI": "true"}, True, False),
        ({}, True, False),
    ],
)
def test_a_browser_is_opened_only_in_front_of_a_screen(
    variables: dict[str, str], interactive: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("CI", "SSH_CONNECTION", "SSH_TTY", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_open(interactive) is expected
