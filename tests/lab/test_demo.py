from __future__ import annotations

from pathlib import Path

import pytest

from hdet import cli
from hdet.lab.runs import folder as run_folder


def test_the_demo_trains_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert cli.main(["demo", "--replicas", "2", "--steps", "12", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 replicas train a GPT" in said
    assert "OneCycleLR: step 12/12, loss" in said
    assert "AutoLR: step 12/12, loss" in said
    assert "validation loss" in said
    assert f"Report, to be opened in a browser: {out}/report/report.html" in said
    html = (out / "report" / "report.html").read_text()
    for method in ("fixed", "gradient"):
        record = run_folder.read(out / method)
        assert record.config["lr"] == pytest.approx(1e-4)
        assert record.status == "done"
        assert f"<td>{method}, lr 0.0001</td>" in html
