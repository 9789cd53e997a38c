"""A report about a scheduler's own run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch.distributed as dist
from matplotlib.axes import Axes

from hdet.launch import launch
from hdet.plot import events, phases
from hdet_lab.reports import report
from hdet_lab.reports.drawing import HEIGHT, draw
from hdet_lab.reports.run import Run, run_of
from small_runs import make, train

mpl.use("agg")


@pytest.fixture(scope="module")
def auto() -> Any:
    return train(make("AutoLR"))


def test_report_writes_one_page(auto: Any, tmp_path: Path) -> None:
    path = report(auto, tmp_path / "new" / "out.html")
    assert path == tmp_path / "new" / "out.html"
    assert [file.name for file in path.parent.iterdir()] == ["out.html"]
    _check_page(path.read_text(), "AutoLR")


def _report_of_the_papers(folder: str) -> None:
    report(train(make("OneCycleAutoLR")), Path(folder, "out.html"))


@pytest.mark.slow
def test_report_of_the_papers_class(tmp_path: Path) -> None:
    launch(_report_of_the_papers, 2, str(tmp_path), timeout_s=150)
    _check_page((tmp_path / "out.html").read_text(), "OneCycleAutoLR")


def _check_page(html: str, kind: str) -> None:
    assert re.search(rf"<h1>{kind} .*; the training loss ended at [\d.e-]+\.</h1>", html)
    assert f"<td>scheduler</td><td>{kind}</td>" in html
    assert "<td>steps of a round</td><td>4</td>" in html
    assert "<td>optimizer</td><td>SGD</td>" in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert "not in the records" not in html


def test_a_report_says_which_learning_rate_was_found(tmp_path: Path) -> None:
    scheduler = train(make("AutoLR, level"))
    [headline] = re.findall("<h1>(.*?)</h1>", report(scheduler, tmp_path / "out.html").read_text())
    peak = max(record.base_values[0] for record in scheduler.history)
    assert f"AutoLR found a peak learning rate of {peak:.2g}, " in headline
    assert re.search(r"(times|1/[\d.]+ of) the 0\.0\d+ it was given", headline)


@pytest.mark.slow
def test_an_unfinished_run_says_where_it_stands(tmp_path: Path) -> None:
    scheduler = train(make("AutoLR"), 21)
    html = report(scheduler, tmp_path / "out.html").read_text()
    assert re.search(r"the training loss is [\d.e-]+ at step 20", html)
    assert "<td>unfinished</td>" in html


def test_before_the_first_round_there_is_nothing_to_show(tmp_path: Path) -> None:
    scheduler = train(make("AutoLR"), 3)
    with pytest.raises(RuntimeError, match=r"report\(\) needs a round that has ended, but AutoLR has none at step 3"):
        report(scheduler, tmp_path / "out.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_history_that_was_cut_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make("AutoLR")
    monkeypatch.setattr(
        scheduler._run.history, "_records", type(scheduler._run.history._records)(maxlen=3)
    )  # as after 1000 rounds, of which a test has no time
    html = report(train(scheduler), tmp_path / "out.html").read_text()
    assert "The first 7 rounds are not in the records" in html
    assert "history keeps the last 1000 rounds" in html


def _report_on_ranks(folder: str) -> bool:
    explorer = train(make("Explorer"))
    return report(explorer, f"{folder}/{dist.get_rank()}.html").exists()


@pytest.mark.slow
def test_an_explorer_shows_its_knobs_and_one_rank_writes(tmp_path: Path) -> None:
    assert launch(_report_on_ranks, 2, str(tmp_path)) == [True, False]
    html = (tmp_path / "0.html").read_text()
    assert re.search(r"<h1>Explorer took momentum from 0\.\d+ to 0\.\d+; the training loss ended at", html)
    assert 'aria-label="momentum"' in html


# -- events and phases ------------------------------------------------------------------------------------------


def with_words(auto: Any) -> Run:
    run = run_of(auto.history, ["all"], name="AutoLR", method="AutoLR", status="done")
    for index, entry in enumerate(run.rounds):
        entry["phase"] = "warm-up" if index < 4 else "hold"
    run.rounds[4]["events"] = ["The learning rate starts: <b>evidence</b> is even."]
    return run


def test_phases_and_events_of_records_are_shown(auto: Any) -> None:
    from hdet_lab.reports.charts import Group
    from hdet_lab.reports.compose import compose

    run = with_words(auto)
    assert phases(run) == [(0, 16, "warm-up"), (16, 40, "hold")]
    assert events(run) == [(20, "The learning rate starts: <b>evidence</b> is even.")]
    html, charts = compose("AutoLR", [Group("AutoLR", [run])])
    assert "<b>step 20</b> The learning rate starts: &lt;b&gt;evidence&lt;/b&gt; is even." in html
    assert "Ring: an event, listed below." in html
    assert all(word in charts[1].svg for word in ("warm-up", "hold"))


def test_a_run_that_was_given_no_schedule_is_compared_with_none(tmp_path: Path) -> None:
    page = report(train(make("AutoLR alone")), tmp_path / "out.html").read_text()
    title = re.search(r"<h1>(.*?)</h1>", page)
    assert title is not None
    assert re.fullmatch(r"AutoLR found a peak learning rate of [\d.]+; the training loss ended at [\d.]+\.", title[1])


# -- drawing ----------------------------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ET.fromstring(svg).iter("text")]


@pytest.mark.parametrize(
    ("scale", "values", "expected"),
    [
        ("log", [1e-9, 1e3], {"10⁻⁹", "10¹", "10³"}),
        ("log", [2e-3, 5e-3], {"2×10⁻³", "3×10⁻³", "4×10⁻³"}),  # noqa: RUF001
        ("symlog", [-1e12, 1e12], {"−10¹²", "0", "10¹⁰"}),  # noqa: RUF001
        ("linear", [0.0, 1.0], {"0.0", "0.2", "1.0"}),
    ],
)
def test_ticks_are_characters_and_the_heading_is_the_pages(scale: str, values: list[float], expected: set[str]) -> None:
    def fill(axes: Axes) -> None:
        axes.plot(values)
        axes.set_yscale(scale)

    svg = draw("loss", "Heading", "", fill).svg
    assert expected <= set(texts(svg))
    assert not any("$" in text or "Heading" in text for text in texts(svg))
    # What is cut off at the top is the heading's room and no more.
    [top, height] = map(float, re.findall(r'viewBox="0 (\S+) \S+ (\S+)"', svg)[0])
    assert 5 < top < 20
    assert top + height == pytest.approx(72 * HEIGHT)
