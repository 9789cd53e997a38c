from __future__ import annotations

from pathlib import Path

import pytest

from hdet_lab import cli
from hdet_lab.commands.demo import can_open
from hdet_lab.runs import folder as run_folder


def test_the_demo_trains_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert cli.main(["demo", "--replicas", "2", "--steps", "12", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 replicas train a GPT" in said
    for name in ("OneCycleLR at 0.003", "AutoLR"):
        assert f"{name}: step 12/12, loss" in said
    assert "AutoLR was given no learning rate: against OneCycleLR at 0.003, its loss is" in said
    assert f"To be opened in a browser: {out}/report/report.html" in said
    html = (out / "report" / "report.html").read_text()
    for name, schedule in (("onecyclelr-at-0.003", "one-cycle"), ("autolr", "none")):
        record = run_folder.read(out / name)
        assert record.config["schedule"] == schedule
        assert record.status == "done"
    assert "AutoLR found a peak learning rate of " in html


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
