"""Charts of runs: drawn once, as a PNG for print and as an SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from hdet.command_line import printable
from hdet.lab.runs.folder import RunRecord

# Okabe and Ito's colours, safe for the colour-blind, without the yellow, which is lost on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID = "#1a1a1b", "#d0d2d4"
VARIABLES = {INK: "currentColor", GRID: "var(--grid)", **{c: f"var(--c{i})" for i, c in enumerate(PALETTE)}}
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
HUGE = 1e100  # matplotlib's arithmetic overflows where numbers are near the largest there is
MAX_LABEL = 80  # characters; longer ones leave no room for the curves
MAX_INSIDE = 4  # more lines of a legend would cover the curves
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
}


@dataclass
class Chart:
    """A drawn chart.

    Attributes:
        name: of its file; never made of what a run folder says.
        title: what it shows.
        caption: how to read it.
        svg: to put into a page.
        png: for a file.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass
class Group:
    """Runs of one configuration, one for each seed."""

    label: str
    runs: list[RunRecord]


def draw_all(groups: Sequence[Group]) -> list[Chart]:
    """Every chart the runs have numbers for."""
    charts = [
        draw(
            "loss",
            "Training loss",
            "Mean over replicas, round by round, one line a seed; a star is the validation loss at the end, a cross a "
            "round that was not finite or was undone.",
            lambda axes: _draw_losses(axes, groups),
        )
    ]
    for index, group in enumerate(groups):
        title = "Learning rate" if len(groups) == 1 else f"Learning rate: {group.label}"
        name = "lr" if len(groups) == 1 else f"lr-{index + 1}"
        caption = "Every replica (thin) and the base (thick) of every param group; line styles tell seeds apart."
        charts.append(draw(name, title, caption, lambda axes, g=group: _draw_lrs(axes, g)))  # type: ignore[misc]
        charts += _knob_charts(group, name)
    for name, title, key, caption in (
        (
            "evidence",
            "Evidence",
            "z",
            "Slope of the loss over the log of the learning rate, in standard errors; below 0 a higher learning rate "
            "lowers the loss.",
        ),
        ("velocity", "Velocity of the paper's controller", "velocity", "Eq. 7, relative to the base value."),
    ):
        if any(entry["control"].get(key) for group in groups for run in group.runs for entry in run.rounds):
            charts.append(draw(name, title, caption, lambda axes, k=key: _draw_control(axes, groups, k)))  # type: ignore[misc]
    if any(entry["distance"] for group in groups for run in group.runs for entry in run.rounds):
        caption = "Largest distance of a replica's weights from their mean at the end of a round, where they differ."
        charts.append(draw("distance", "Distance of replicas", caption, lambda axes: _draw_distance(axes, groups)))
    return charts


def _knob_charts(group: Group, lr_name: str) -> list[Chart]:
    """One for each knob that the runs explored; numbered like the chart of their learning rates."""
    caption = "Every replica (thin) and the base (thick); line styles tell seeds apart."
    found = dict.fromkeys(name for run in group.runs for entry in run.rounds for name in entry.get("knobs", {}))
    suffix, about = lr_name.removeprefix("lr"), "" if lr_name == "lr" else f": {group.label}"
    return [
        draw(f"knob-{k}{suffix}", f"{name}{about}", caption, lambda axes, n=name: _draw_knob(axes, group, n))  # type: ignore[misc]
        for k, name in enumerate(found, 1)
    ]


def mean_loss(entry: dict[str, Any]) -> float:
    """Mean over the replicas that have a finite loss; NaN where none has."""
    seen = [loss for loss in entry["losses"] if loss is not None]
    return sum(seen) / len(seen) if seen else math.nan


def breaks(run: RunRecord) -> list[int]:
    """Indices of rounds that were undone, and of the first that was not finite."""
    found, undone, finite = [], 0, True
    for index, entry in enumerate(run.rounds):
        broken = None in entry["losses"] or bool(entry["unhealthy"])
        if entry["num_rollbacks"] > undone or (broken and finite):
            found.append(index)
        undone, finite = entry["num_rollbacks"], finite and not broken
    if run.status == "diverged" and not found and run.rounds:
        found.append(len(run.rounds) - 1)
    return found


# -- the charts -------------------------------------------------------------------------------------------------


def _draw_losses(axes: Axes, groups: Sequence[Group]) -> None:
    curves = {id(run): _nan([mean_loss(entry) for entry in run.rounds]) for group in groups for run in group.runs}
    # A run that explodes leaves through the top instead of pressing all others into one line.
    top = 1.5 * max((curve[0] for curve in curves.values() if math.isfinite(curve[0])), default=1.0)
    crossed = False
    for index, group in enumerate(groups):
        for seed, run in enumerate(group.runs):
            curve = curves[id(run)]
            line(axes, _steps(run), curve, index, label=group.label if seed == 0 else None)
            crossed |= _crosses(axes, run, [min(loss, 0.97 * top) for loss in curve], index)
            [final] = _nan([(run.end or {}).get("validation", {}).get("loss")])
            if final < top:
                star: dict[str, Any] = {"ms": 8, "mec": INK, "mew": 0.5, "clip_on": False}
                axes.plot(run.rounds[-1]["step"], final, "*", color=colour(index), zorder=4, **star)
    seen = [loss for curve in curves.values() for loss in curve if math.isfinite(loss)]
    if seen and max(seen) > top:
        axes.set_ylim(min(seen) - 0.1 * (top - min(seen)), top)
    axes.set_ylabel("loss")
    if crossed:
        axes.plot([], [], "x", ms=6, mew=1.6, color=INK, label="not finite, or undone")


def _draw_lrs(axes: Axes, group: Group) -> None:
    names = group.runs[0].facts["groups"]
    for seed, run in enumerate(group.runs):
        steps, style = _steps(run), STYLES[seed % len(STYLES)]
        drawn: dict[tuple[float, ...], int] = {}
        bases = _curves([entry["base_values"] for entry in run.rounds])
        for k, base in enumerate(bases):
            if base in drawn:
                continue  # groups that share one scale lie on top of each other
            drawn[base] = k
            alike = [names[other] for other in range(k, len(names)) if bases[other] == base]
            label = "all param groups" if 1 < len(alike) == len(names) else ", ".join(alike)
            several = len(group.runs) > 1
            axes.plot(
                steps,
                base,
                color=colour(k),
                ls=style,
                lw=1.5,
                label=f"{label}, seed {run.config['seed']}" if several else label,
            )
            for values in _curves([entry["values"][k] for entry in run.rounds]):
                axes.plot(steps, values, color=colour(k), ls=style, lw=0.5, alpha=0.8)
            _crosses(axes, run, list(base), k)
    axes.set_yscale("log")
    # The last steps of most schedules fall by orders of magnitude, and would flatten everything before.
    body = [
        value
        for run in group.runs
        for entry in run.rounds
        if entry["step"] <= 0.9 * run.config["steps"]
        for value in entry["base_values"]
        if value is not None and 0 < value < HUGE
    ]
    if body:
        axes.set_ylim(bottom=0.6 * min(body))
    axes.set_xlim(0, 1.02 * max(run.config["steps"] for run in group.runs))
    axes.set_ylabel("learning rate")


def _draw_knob(axes: Axes, group: Group, name: str) -> None:
    for seed, run in enumerate(group.runs):
        explored = [entry for entry in run.rounds if name in entry.get("knobs", {})]
        steps, style = [entry["step"] for entry in explored], STYLES[seed % len(STYLES)]
        base = _nan([entry["knobs"][name]["base"] for entry in explored])
        axes.plot(steps, base, color=colour(0), ls=style, lw=1.5, label=f"seed {run.config['seed']}")
        for values in _curves([entry["knobs"][name]["values"] for entry in explored]):
            axes.plot(steps, values, color=colour(0), ls=style, lw=0.5, alpha=0.8)
    if name in ("weight_decay", "eps"):  # explored by their logarithm
        axes.set_yscale("log")
    axes.set_ylabel(name)


def _draw_control(axes: Axes, groups: Sequence[Group], key: str) -> None:
    numbers: list[float] = []
    for index, group in enumerate(groups):
        label: str | None = group.label
        for run in group.runs:
            rounds = [entry for entry in run.rounds if entry["control"].get(key)]
            for values in _curves([entry["control"][key] for entry in rounds]):
                numbers += [value for value in values if math.isfinite(value)]
                line(axes, [entry["step"] for entry in rounds], values, index, label=label)
                label = None
    axes.axhline(0.0, color=INK, lw=0.8)
    if key == "z" and max((abs(number) for number in numbers), default=0.0) > 30:
        axes.set_yscale("symlog", linthresh=2.0)
    axes.set_ylabel(key)


def _draw_distance(axes: Axes, groups: Sequence[Group]) -> None:
    numbers = []
    for index, group in enumerate(groups):
        for seed, run in enumerate(group.runs):
            values = _nan([entry["distance"] for entry in run.rounds])
            if any(value > 0 for value in values):
                numbers += [value for value in values if value > 0]
                line(axes, _steps(run), values, index, label=group.label if seed == 0 else None)
    if numbers and max(numbers) > 50 * statistics.median(numbers):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_ylabel("distance")


def line(axes: Axes, steps: Sequence[float], values: Sequence[float], index: int, *, label: str | None) -> None:
    """A curve of configuration ``index``: a colour, a line style and a marker of its own."""
    every = max(1, len(steps) // 7)
    axes.plot(
        steps,
        values,
        color=colour(index),
        ls=STYLES[index % len(STYLES)],
        marker=MARKERS[index % len(MARKERS)],
        # Each configuration marks other rounds, or markers would hide each other.
        markevery=(index * every // 3 % every, every),
        ms=3.5,
        lw=1.2,
        label=label,
    )


def _crosses(axes: Axes, run: RunRecord, values: Sequence[float], index: int) -> bool:
    """Mark broken rounds, at the last value before them where they have none."""
    found = breaks(run)
    for at in found:
        known = [value for value in values[: at + 1] if math.isfinite(value)]
        if known:
            axes.plot(run.rounds[at]["step"], known[-1], "x", ms=6, mew=1.6, color=colour(index), zorder=5)
    return bool(found)


def _steps(run: RunRecord) -> list[int]:
    return [entry["step"] for entry in run.rounds]


def _nan(values: Sequence[float | None]) -> list[float]:
    """For a chart: NaN where there is no number, or one that no axis reaches."""
    return [math.nan if value is None or abs(value) > HUGE else value for value in values]


def _curves(rows: Sequence[Sequence[float | None]]) -> list[tuple[float, ...]]:
    """Columns of rows that may have different lengths."""
    return list(itertools.zip_longest(*map(_nan, rows), fillvalue=math.nan))


def colour(index: int) -> str:
    """Of configuration ``index``."""
    return PALETTE[index % len(PALETTE)]


# -- from a drawing to a file -----------------------------------------------------------------------------------


def draw(name: str, title: str, caption: str, fill: Callable[[Axes], None], *, xlabel: str = "step") -> Chart:
    """A chart whose axes ``fill`` draws into."""
    # Small on purpose: at the width of a phone its text is still readable, on a desk it is magnified.
    with mpl.rc_context({**RC, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a box for an unknown character, a log axis without numbers
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        fill(axes)
        axes.set_xlabel(xlabel)
        axes.grid(visible=True, lw=0.5)
        axes.set_axisbelow(True)
        legend = _add_legend(figure, axes)
        for text in (axes.yaxis.label, axes.title, *legend):
            text.set_parse_math(False)  # a $ or a backslash in a name is not a formula
            text.set_text(_label(text.get_text()))
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None})
        axes.set_title(_label(title))
        figure.savefig(pixels, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return Chart(name, title, caption, _inline(vector.getvalue(), name, title), pixels.getvalue())


def _add_legend(figure: Figure, axes: Axes) -> list[Text]:
    num_entries = len(axes.get_legend_handles_labels()[1])
    if num_entries == 0:
        return []
    if num_entries > MAX_INSIDE:
        figure.set_size_inches(4.4, 2.9 + 0.14 * math.ceil(num_entries / 2))
        return figure.legend(loc="outside lower center", ncols=2).get_texts()
    return axes.legend(loc="best").get_texts()  # said, or matplotlib warns where a busy machine is slow to find it


def _label(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _inline(svg: str, name: str, title: str) -> str:
    """An SVG document as an element of a page: no size, no names that clash, colours by variable."""
    root = ET.fromstring(svg)
    for parent in root.iter():
        for child in parent.findall("{*}metadata"):
            parent.remove(child)
        parent.tag = _local(parent.tag)
        parent.attrib = {_local(key): _adapt(_local(key), value, name) for key, value in parent.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": printable(title)}
    return ET.tostring(root, encoding="unicode")


def _adapt(key: str, value: str, name: str) -> str:
    """An attribute of the SVG in a page that has other charts too."""
    if key == "id":
        return f"{name}-{value}"
    value = re.sub(r"^#|(?<=url\()#", f"#{name}-", value) if key in ("href", "clip-path") else value
    for colour, variable in VARIABLES.items():
        value = value.replace(colour, variable)
    return value


def _local(tag: str) -> str:
    """Without the namespace: HTML knows SVG's names."""
    return tag.rpartition("}")[2]


def write_pngs(charts: Sequence[Chart], folder: Path) -> None:
    """One file for each chart."""
    for chart in charts:
        (folder / f"{chart.name}.png").write_bytes(chart.png)
