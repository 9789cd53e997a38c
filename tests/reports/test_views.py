"""A scheduler shows its own run: a page, a plot in real axes, a curve in a notebook."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs
from hdet.launch import launch
from hdet.reports.drawing import HEIGHT, draw
from hdet.reports.run import Run, events, phases, run_of

mpl.use("agg")
STEPS = 40


def make(kind: str, *, name: str = "all") -> Any:
    """A scheduler that has not taken a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "name": name}], lr=0.01, momentum=0.5)
    if kind in ("AutoLR", "AutoLR, level"):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return AutoLR(cosine, model=model, interval=4, adapt=Adapt(level=kind != "AutoLR"))
    if kind == "AutoLR alone":
        return AutoLR(optimizer, model=model, interval=4, total_steps=STEPS)
    if kind == "OneCycleAutoLR":
        return OneCycleAutoLR(
            optimizer, max_lr=0.01, total_steps=STEPS, ensemble_lr_spread_ratio=0.1, model_sync_interval=4,
            enable_auto_lr=True, auto_lr_warmup_steps=0, model=model,
        )  # fmt: skip
    return Explorer(model, optimizer, knobs=[knobs.Momentum()], interval=4, gradients="local", total_steps=STEPS)


def train(scheduler: Any, num_steps: int = STEPS) -> Any:
    optimizer, generator = scheduler.optimizer, torch.Generator().manual_seed(0)
    weight, bias = optimizer.param_groups[0]["params"]
    for _ in range(num_steps):
        x = torch.randn(8, 3, generator=generator)
        loss = (x @ weight.T + bias - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return scheduler


@pytest.fixture(scope="module")
def auto() -> Any:
    return train(make("AutoLR"))


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    plt.close("all")


def test_report_writes_one_page(auto: Any, tmp_path: Path) -> None:
    path = auto.report(tmp_path / "new" / "out.html")
    assert path == tmp_path / "new" / "out.html"
    assert [file.name for file in path.parent.iterdir()] == ["out.html"]
    _check_page(path.read_text(), "AutoLR")


def _report_of_the_papers(folder: str) -> None:
    train(make("OneCycleAutoLR")).report(Path(folder, "out.html"))


def test_report_of_the_papers_class(tmp_path: Path) -> None:
    launch(_report_of_the_papers, 2, str(tmp_path), timeout_s=100)
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
    [headline] = re.findall("<h1>(.*?)</h1>", scheduler.report(tmp_path / "out.html").read_text())
    peak = max(record.base_values[0] for record in scheduler.history)
    assert f"AutoLR found a peak learning rate of {peak:.2g}, " in headline
    assert re.search(r"(times|1/[\d.]+ of) the 0\.0\d+ it was given", headline)


def test_an_unfinished_run_says_where_it_stands(tmp_path: Path) -> None:
    scheduler = train(make("AutoLR"), 21)
    html = scheduler.report(tmp_path / "out.html").read_text()
    assert re.search(r"the training loss is [\d.e-]+ at step 20", html)
    assert "<td>unfinished</td>" in html


def test_before_the_first_round_there_is_nothing_to_show(tmp_path: Path) -> None:
    scheduler = train(make("AutoLR"), 3)
    for show in (lambda: scheduler.report(tmp_path / "out.html"), scheduler.plot):
        with pytest.raises(RuntimeError, match=r"needs a round that has ended, but AutoLR has none at step 3: a round"):
            show()
    assert "AutoLR: no round has ended yet." in scheduler._repr_html_()
    assert not list(tmp_path.iterdir())


def test_a_history_that_was_cut_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make("AutoLR")
    monkeypatch.setattr(
        scheduler._rounds.journal, "_records", type(scheduler._rounds.journal._records)(maxlen=3)
    )  # as after 1000 rounds, of which a test has no time
    html = train(scheduler).report(tmp_path / "out.html").read_text()
    assert "The first 7 rounds are not in the records" in html
    assert "history keeps the last 1000 rounds" in html


def _show_on_ranks(folder: str) -> tuple[bool, int, int]:
    explorer = train(make("Explorer"))
    path: Path = explorer.report(f"{folder}/{torch.distributed.get_rank()}.html")
    return path.exists(), len(explorer.plot().get_lines()), explorer._repr_html_().count("<svg")


def test_an_explorer_shows_its_knobs_and_one_rank_writes(tmp_path: Path) -> None:
    assert launch(_show_on_ranks, 2, str(tmp_path)) == [(True, 1, 1), (False, 1, 1)]
    html = (tmp_path / "0.html").read_text()
    assert re.search(r"<h1>Explorer took momentum from 0\.\d+ to 0\.\d+; the training loss ended at", html)
    assert 'aria-label="momentum"' in html


@pytest.mark.filterwarnings("ignore:Explorer compares replicas, and there is one")
def test_one_replica_alone_explores_nothing() -> None:
    explorer = train(make("Explorer"))
    with pytest.raises(RuntimeError, match=r"none at step 40: one replica alone explores nothing"):
        explorer.plot()


# -- the plot ---------------------------------------------------------------------------------------------------


def test_plot_returns_axes_with_the_learning_rate_and_the_loss(auto: Any) -> None:
    ax = auto.plot()
    assert isinstance(ax, Axes)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("step", "learning rate", "log")
    line = ax.get_lines()[0]
    assert line.get_xdata().tolist() == [record.step for record in auto.history]  # type: ignore[union-attr]
    assert list(line.get_ydata()) == [record.base_values[0] for record in auto.history]  # type: ignore[arg-type]
    [loss] = [other for other in ax.figure.axes if other is not ax]
    assert loss.get_ylabel() == "loss"
    assert loss.get_lines()[0].get_ydata()[-1] == pytest.approx(auto.history[-1].losses[0])  # type: ignore[index]
    ax.figure.canvas.draw()


def test_plot_draws_into_axes_of_the_users(auto: Any) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert auto.plot(ax=right) is right
    assert auto.plot(left) is left
    assert plt.get_fignums() == []
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["learning rate", "the schedule alone", "loss"]


def test_rounds_that_were_undone_are_marked() -> None:
    scheduler = train(make("AutoLR"))
    history = scheduler._rounds.journal._records
    history[5] = replace(history[5], num_rollbacks=1)
    labels = [text.get_text() for text in scheduler.plot().get_legend().get_texts()]
    assert "not finite, or undone" in labels
    assert "#cc3311" in scheduler._repr_html_()


def test_names_of_param_groups_are_not_formulas() -> None:
    ax = train(make("AutoLR", name="$\\frac{")).plot()
    ax.figure.canvas.draw()


@pytest.mark.parametrize(("method", "package"), [("plot", "matplotlib"), ("report", "jinja2")])
def test_a_missing_package_names_the_extra(
    method: str, package: str, auto: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(("hdet.reports.", f"{package}."))]:
        if module not in ("hdet.reports.views", "hdet.reports.run"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    argument = [str(tmp_path / "out.html")] if method == "report" else []
    with pytest.raises(ImportError, match=rf"{method}\(\) needs {package}.*pip install 'hdet\[report\]'"):
        getattr(auto, method)(*argument)


# -- the notebook -----------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_curves(auto: Any) -> None:
    html = auto._repr_html_()
    box = ET.fromstring(html)
    [svg] = box.findall("svg")
    assert len(svg.findall("path")) >= 3
    assert "AutoLR: step 40, 10 rounds, peak learning rate" in unescape(html)
    assert "<script" not in html


def test_a_notebook_needs_no_package(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "hdet.reports.notebook", raising=False)
    assert "<svg" in auto._repr_html_()


# -- events and phases ------------------------------------------------------------------------------------------


def with_words(auto: Any) -> Run:
    run = run_of(auto.history, ["all"], name="AutoLR", method="AutoLR", status="done")
    for index, entry in enumerate(run.rounds):
        entry["phase"] = "warm-up" if index < 4 else "hold"
    run.rounds[4]["events"] = ["The learning rate starts: <b>evidence</b> is even."]
    return run


def test_phases_and_events_of_records_are_shown(auto: Any) -> None:
    from hdet.reports.charts import Group
    from hdet.reports.compose import compose

    run = with_words(auto)
    assert phases(run) == [(0, 16, "warm-up"), (16, 40, "hold")]
    assert events(run) == [(20, "The learning rate starts: <b>evidence</b> is even.")]
    html, charts = compose("AutoLR", [Group("AutoLR", [run])])
    assert "<b>step 20</b> The learning rate starts: &lt;b&gt;evidence&lt;/b&gt; is even." in html
    assert "Ring: an event, listed below." in html
    assert all(word in charts[1].svg for word in ("warm-up", "hold"))


def test_a_run_that_was_given_no_schedule_is_shown_without_one(auto: Any, tmp_path: Path) -> None:
    """Ratios of learning rates are none, and not to be compared with."""
    scheduler = train(make("AutoLR alone"))
    run = run_of(scheduler.history, ["all"], name="AutoLR")
    assert run.schedules() == []
    assert len(run_of(auto.history, ["all"], name="AutoLR").schedules()) == 1
    [(step, said)] = events(run)
    assert step == 4
    assert said.startswith("the learning rate starts from ")
    assert phases(run)[0] == (0, 3, "warm-up")
    title = re.search(r"<h1>(.*?)</h1>", scheduler.report(tmp_path / "out.html").read_text())
    assert title is not None
    assert re.fullmatch(r"AutoLR found a peak learning rate of [\d.]+; the training loss ended at [\d.]+\.", title[1])
    labels = [text.get_text() for text in scheduler.plot().get_legend().get_texts()]
    assert labels == ["learning rate", "event", "loss"]
    assert "schedule" not in scheduler._repr_html_()


def test_numbers_tell_what_happened_where_records_have_no_words(auto: Any) -> None:
    run = run_of(auto.history, ["all"], name="AutoLR")
    for entry in run.rounds[3:]:
        entry["num_rollbacks"] = 1
    run.rounds[3]["unhealthy"] = [0]
    run.rounds[6] |= {"resumed_from": 4}
    run.rounds[8] |= {"held": True}
    assert events(run) == [
        (16, "One replica was left out of the mean: weights were not finite."),
        (16, "The round was undone, and the learning rate lowered."),
        (28, "Resumed on 1 replicas instead of 4."),
        (36, "Too many rounds were undone: the learning rate follows its schedule until it recovers."),
    ]


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
