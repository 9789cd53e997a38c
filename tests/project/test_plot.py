"""A scheduler shows its own run: a plot in real axes, a curve in a notebook."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.launch import launch
from hdet.plot import Curves, curves_of, events, phases, scale_losses
from small_runs import make, train

mpl.use("agg")


@pytest.fixture(scope="module")
def auto() -> Any:
    return train(make("AutoLR"))


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    plt.close("all")


def test_before_the_first_round_there_is_nothing_to_plot() -> None:
    scheduler = train(make("AutoLR"), 3)
    with pytest.raises(RuntimeError, match=r"plot\(\) needs a round that has ended, but AutoLR has none at step 3: a"):
        scheduler.plot()
    assert "AutoLR: no round has ended yet." in scheduler._repr_html_()


def _show_on_ranks() -> tuple[int, int]:
    explorer = train(make("Explorer"))
    return len(explorer.plot().get_lines()), explorer._repr_html_().count("<svg")


def test_an_explorer_plots_on_every_rank() -> None:
    assert launch(_show_on_ranks, 2) == [(1, 1), (1, 1)]


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


@pytest.mark.parametrize(
    ("losses", "scale", "limits"),
    [
        ([5.0, 3.0, 1.0], "log", (1 / 1.15, 1.15 * 5)),  # flat after the first steps on a linear axis
        ([5.0, 3.0, 2.5], "linear", None),
        ([5.0, -3.0, 1.0], "linear", None),
        ([5.0, 1e30, 4.0], "linear", (4.0 - 0.35, 7.5)),  # leaves through the top
    ],
)
def test_the_axis_of_the_loss(losses: list[float], scale: str, limits: tuple[float, float] | None) -> None:
    ax = Figure().subplots()
    ax.plot(losses)
    scale_losses(ax, [losses])
    ax.figure.canvas.draw()
    assert ax.get_yscale() == scale
    assert limits is None or ax.get_ylim() == pytest.approx(limits)
    assert "$" not in "".join(label.get_text() for label in ax.get_yticklabels(which="both"))


def test_plot_draws_into_axes_of_the_users(auto: Any) -> None:
    figure, opened = Figure(), plt.get_fignums()
    left, right = figure.subplots(1, 2)
    assert auto.plot(ax=right) is right
    assert auto.plot(left) is left
    assert plt.get_fignums() == opened
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["learning rate", "the schedule alone", "loss"]


def test_rounds_that_were_undone_are_marked() -> None:
    scheduler = train(make("AutoLR"))
    history = scheduler._run.history._records
    history[5] = replace(history[5], num_rollbacks=1)
    labels = [text.get_text() for text in scheduler.plot().get_legend().get_texts()]
    assert "not finite, or undone" in labels
    assert "#cc3311" in scheduler._repr_html_()


def test_names_of_param_groups_are_not_formulas() -> None:
    ax = train(make("AutoLR", name="$\\frac{")).plot()
    ax.figure.canvas.draw()


def test_without_matplotlib_the_error_says_what_to_install(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib.*pip install matplotlib"):
        auto.plot()


def test_the_peak_is_that_of_found() -> None:
    """After a resume the history begins anew, and what was found does not."""
    whole = train(make("AutoLR"))
    first, second = train(make("AutoLR"), 20), make("AutoLR")
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    train(second, 20)
    assert len(second.history) == 5
    [peak] = second.found().peak_lrs
    assert curves_of(second).peak == peak > max(record.base_values[0] for record in second.history)
    assert curves_of(whole).peak == max(record.base_values[0] for record in whole.history)
    assert f"peak learning rate {peak:.2g}" in second._repr_html_()
    drawn = []
    for scheduler in (second, whole):
        rates = scheduler.plot()
        losses = rates.figure.axes[-1]
        drawn.append([axes.get_lines()[0].get_xydata().tolist() for axes in (rates, losses)])
    (rates, losses), (all_rates, all_losses) = drawn  # from the first step on
    assert rates == all_rates
    assert losses[:5] == all_losses[:5]  # the weights were not loaded
    assert len(losses) == 10


def test_a_state_without_losses_has_a_curve_all_the_same() -> None:
    """As older versions have saved it."""
    first, second = train(make("AutoLR"), 20), make("AutoLR")
    state = first.state_dict()
    curve = next(part["curve"] for part in [state, *state.values()] if isinstance(part, dict) and "curve" in part)
    del curve["losses"]
    second.load_state_dict(state)
    assert second.found().lrs == first.found().lrs
    curve["losses"] = [1.0]
    with pytest.raises(ValueError, match="losses of the curve must be 5 numbers, but got"):
        make("AutoLR").load_state_dict(state)


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
    monkeypatch.delitem(sys.modules, "hdet.plot", raising=False)
    assert "<svg" in auto._repr_html_()


# -- events and phases ------------------------------------------------------------------------------------------


def test_numbers_tell_what_happened_where_records_have_no_words(auto: Any) -> None:
    run = curves_of(auto)
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


def test_a_run_that_was_given_no_schedule_is_shown_without_one(auto: Any) -> None:
    """Ratios of learning rates are none, and not to be compared with."""
    scheduler = train(make("AutoLR alone"))
    run: Curves = curves_of(scheduler)
    assert run.schedules() == []
    assert len(curves_of(auto).schedules()) == 1
    [(step, said)] = events(run)
    assert step == 4
    assert said.startswith("the learning rate starts from ")
    assert phases(run)[0] == (0, 3, "warm-up")
    labels = [text.get_text() for text in scheduler.plot().get_legend().get_texts()]
    assert labels == ["learning rate", "event", "loss"]
    assert "schedule" not in scheduler._repr_html_()
