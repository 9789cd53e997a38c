"""``hdet report`` and ``hdet watch``, on run folders with known numbers, and in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.plot import breaks
from hdet_lab import cli
from hdet_lab.commands.report import find_runs, group_runs, write_report
from hdet_lab.commands.watch import sparkline
from hdet_lab.reports.charts import Group
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.settings import Settings

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)
STEPS = 40


def write_run(
    folder: Path, method: Any, seed: int = 0, *, lr: float = 1e-3, breaks_at: int | None = None, ends: bool = True
) -> Path:
    """A run folder as hdet train writes it: ten rounds, two replicas, two param groups."""
    settings = Settings("small-gpt", method=method, lr=lr, seed=seed, steps=STEPS, interval=4, replicas=2)
    hardware = {"cpu": "<b>fast & loose</b>", "gpus": []}
    facts = {"config": settings.as_dict(), "groups": ["decay", "no_decay"], "hdet": "0", "hardware": hardware}
    run_folder.create(folder, facts)
    for index in range(10):
        broken = breaks_at is not None and index >= breaks_at
        base = lr * (10 - index) / 10
        entry = {
            "event": "round",
            "step": 4 * index + 4,
            "index": index,
            "losses": [float("nan")] * 2 if broken else [5 - 0.3 * index + 0.1 * seed, 5.1 - 0.3 * index],
            "values": [[0.9 * base, 1.1 * base], [1.8 * base, 2.2 * base]],
            "base_values": [base, 2 * base],
            "scales": [1.0, 2.0],
            "control": {} if method == "fixed" else {"z": [-20.0 + 3 * index + seed]},
            "unhealthy": [],
            "num_rollbacks": int(method == "loss" and index >= 6),
            "distance": 0.0 if method == "fixed" else 0.01 * (index + 1),
            "converge_s": 0.001,
            "time_s": float(index),
        }
        run_folder.append(folder, entry)
    if ends:
        loss = float("nan") if breaks_at is not None else 2.0 + 0.1234 * (seed + 1)
        status = "done" if breaks_at is None else "diverged"
        end = {"event": "end", "status": status, "step": STEPS, "validation": {"loss": loss}, "time_s": 12.0}
        run_folder.append(folder, end)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        write_run(folder / f"fixed-{seed}", "fixed", seed)
    for seed in (0, 1):
        write_run(folder / f"loss-{seed}", "loss", seed)
    write_run(folder / "high", "fixed", lr=30.0, breaks_at=3)
    return folder


def read_groups(*folders: Path) -> list[Group]:
    return group_runs([run_folder.read(folder) for folder in find_runs(folders)])


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    assert cli.main(["report", str(runs)]) == 0
    return runs / "report" / "report.html"


def test_a_report_is_one_file_with_every_seed(report: Path) -> None:
    html = report.read_text()
    # Nothing is fetched: no address, no source, no style sheet but the one inside.
    assert not re.search(r"https?://|\bsrc=|@import|url\((?!#)", html)
    assert re.findall(r'href="([^"#]*)"', html) == ["data:,"]
    for seed, loss in enumerate(("2.1234", "2.2468", "2.3702")):
        assert f"<td>fixed schedule, lr 0.001</td><td>{seed}</td><td>{loss}</td><td>0.002</td>" in html
    figures = ("-", "60", "30", "40", "2", "0", "diverged", "12")  # loss, peak, given, steps, replicas, rollbacks
    assert f"<td>fixed schedule, lr 30</td><td>0</td>{''.join(f'<td>{f}</td>' for f in figures)}" in html
    assert "<td>3</td><td>2.2468</td><td>0.1234</td><td>2.1234</td><td>2.3702</td>" in html
    assert "&lt;b&gt;fast &amp; loose&lt;/b&gt;" in html
    names = ["distance", "evidence", "loss", "lr"]
    assert sorted(file.stem for file in report.parent.glob("*.png")) == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in report.parent.glob("*.png"))
    assert html.count("<svg") == len(names)
    assert len(re.findall(r'\bid="', html)) == len(set(re.findall(r'\bid="([^"]+)"', html)))


def test_runs_that_differ_in_their_seed_are_one_configuration(runs: Path) -> None:
    assert [(group.label, len(group.runs)) for group in read_groups(runs)] == [
        *(("fixed schedule, lr 0.001", 3), ("fixed schedule, lr 30", 1), ("AutoLR (loss signal), lr 0.001", 2))
    ]


def test_broken_and_undone_rounds_are_marked(runs: Path) -> None:
    found = {run.name: breaks(run) for group in read_groups(runs) for run in group.runs}
    assert (found["high"], found["loss-0"], found["fixed-0"]) == ([3], [6], [])


def test_charts_take_their_colours_from_the_page(report: Path) -> None:
    charts = re.findall(r"<svg.*?</svg>", report.read_text(), re.DOTALL)
    assert len(charts) == 4
    for svg in charts:
        assert "var(--c" in svg
        assert "currentColor" in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg)


@pytest.mark.slow
def test_a_run_that_goes_on_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "gradient", ends=False)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/run-report/report.html\n"
    assert find_runs([tmp_path / "run", tmp_path / "run-report"]) == [tmp_path / "run"]
    assert "<td>unfinished</td>" in (tmp_path / "run-report" / "report.html").read_text()


@pytest.mark.slow
def test_a_report_says_what_was_found_against_what(runs: Path, tmp_path: Path) -> None:
    html = write_report([runs / "fixed-0", runs / "loss-0"], tmp_path).read_text()
    [headline] = re.findall("<h1>(.*?)</h1>", html)
    assert headline == (
        "AutoLR with the loss signal found a peak learning rate of 0.002, 2 times the 0.001 it was given. Its "
        "validation loss is the same as with the same schedule left as it is: 2.123 against 2.123. One round was "
        "undone."
    )
    assert f"{date.today():%B %Y}" in html
    assert f"hdet {hdet.__version__}" in html
    assert "<b>AutoLR (loss signal), lr 0.001, step 28</b> The round was undone" in html
    assert "How they were made" in html
    assert "<td>None</td>" not in html
    assert "<td></td>" not in html


@pytest.mark.slow
def test_runs_with_the_same_seed_are_told_apart(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        write_run(tmp_path / name, "fixed", 0)
    write_run(tmp_path / "other", "fixed", 1)
    html = write_report([tmp_path]).read_text()
    assert "<td>0 (monday)</td>" in html
    assert "<td>0 (tuesday)</td>" in html
    assert "<td>1</td>" in html


def test_learning_rates_are_one_chart_in_the_colours_of_the_loss(report: Path) -> None:
    loss, lr = re.findall(r"<svg.*?</svg>", report.read_text(), re.DOTALL)[:2]
    for colour in ("var(--c0)", "var(--c1)", "var(--c2)"):
        assert colour in loss
        assert colour in lr
    assert "var(--c3)" not in lr


# From outside: the page runs no scripts.
MEASURE = """<script>document.querySelector("iframe").addEventListener("load", event => {
  const page = event.target.contentDocument, root = page.documentElement, said = document.documentElement.dataset;
  const charts = [...page.querySelectorAll("svg")];
  said.width = root.clientWidth;
  said.overflow = root.scrollWidth - root.clientWidth;
  said.charts = charts.filter(chart => chart.getBoundingClientRect().height > 150).length;
  said.rows = page.querySelector("tbody")?.children.length;
  said.ink = getComputedStyle(page.querySelector("svg text")).fill;
})</script>"""


def browse(html: str, folder: Path, *, width: int) -> tuple[dict[str, str], str]:
    """What a page measures when it is ``width`` wide, and what the browser said on its console."""
    assert BROWSER is not None
    # A frame, because a window cannot be as narrow as a phone.
    page = folder / "page.html"
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(html)}"></iframe>'
    page.write_text(f'<meta charset="utf-8">{frame}{MEASURE}')
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    opening = done.stdout[: done.stdout.index("<head>")]
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return dict(re.findall(r'data-([a-z]+)="([^"]*)"', opening)), said


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(width: int, report: Path, tmp_path: Path) -> None:
    found, console = browse(report.read_text(), tmp_path, width=width)
    assert console == ""
    assert abs(int(found.pop("width")) - width) <= 20  # a scroll bar
    assert found == {"overflow": "0", "charts": "4", "rows": "6", "ink": "rgb(26, 26, 27)"}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium")
def test_the_browser_refuses_scripts_in_the_page(report: Path, tmp_path: Path) -> None:
    html = report.read_text().replace(
        "</body>", "<script>parent.document.documentElement.dataset.ran = 1</script></body>"
    )
    found, console = browse(html, tmp_path, width=1280)
    assert "Content Security Policy" in console
    assert found["charts"] == "4"
    assert "ran" not in found


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here; apt-get install chromium")
def test_the_browser_would_tell(tmp_path: Path) -> None:
    html = "<body><svg><text>x</text></svg><p style='width:999px'>x<script>nope()</script></body>"
    found, console = browse(html, tmp_path, width=390)
    assert "nope is not defined" in console
    assert int(found["overflow"]) > 500


def test_watch_shows_how_a_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "loss", ends=False)
    assert cli.main(["watch", str(tmp_path / "run"), "--once"]) == 0
    out = capsys.readouterr().out
    assert "small-gpt, loss, lr 0.001, seed 0: step 40 of 40, unfinished" in out
    assert re.search(r"loss +2\.3500 +█▇.*▁", out)
    assert re.search(r"lr no_decay +0\.00018 0\.00022", out)
    assert re.search(r"z +7\.00 +▁", out)
    assert re.search(r"rollbacks +1", out)


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "fixed")
    assert cli.main(["watch", str(tmp_path / "run")]) == 0
    assert "validation: loss 2.1234" in capsys.readouterr().out


def test_a_sparkline_has_a_bar_for_each_of_the_last_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([1.0, float("nan"), 2.0]) == "▁x█"
    assert sparkline([float("nan")]) == "x"
    assert len(sparkline(list(range(100)), width=40)) == 40
