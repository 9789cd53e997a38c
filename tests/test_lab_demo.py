from __future__ import annotations

import sys

import pytest

from hdet.lab import demo


def test_demo_runs_and_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--replicas", "2", "--steps", "24"])
    out = capsys.readouterr().out
    assert "2 replicas train a GPT" in out
    assert "HDET, the paper's step 24/24 loss" in out
    assert "AutoLR, 1/30 step 24/24 loss" in out
    assert "OneCycleLR step 24/24 loss" in out
    assert "Rounds; losses and LRs of each replica" in out
    assert "Validation loss, converged" in out


def test_demo_without_rich_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match=r"pip install 'hdet\[lab\]'"):
        demo.main([])
