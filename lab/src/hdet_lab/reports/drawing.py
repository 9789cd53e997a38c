"""From a drawing to a file: a PNG for print, and an SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import math
import re
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
from matplotlib.ticker import Formatter, LogFormatterSciNotation

from hdet.checks import printable
from hdet_lab.files import replace_file

# Okabe and Ito's colours, safe for the colour-blind, without the yellow, which is lost on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, SOFT, GRID = "#1a1a1b", "#6b7077", "#d0d2d4"
VARIABLES = {
    INK: "currentColor",
    SOFT: "var(--soft)",
    GRID: "var(--grid)",
    **{c: f"var(--c{i})" for i, c in enumerate(PALETTE)},
}
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
MAX_LABEL = 80  # characters; longer ones leave no room for the curves
LONG_LABEL = 28  # characters; two of them have no room beside each other
WIDTH, HEIGHT = 4.4, 3.05  # inches; small on purpose: readable at the width of a phone, and on a desk magnified
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
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


def line(
    axes: Axes, steps: Sequence[float], values: Sequence[float], index: int, *, label: str | None, marked: bool = True
) -> None:
    """A curve of configuration ``index``: a colour and a line style of its own, and a marker unless it is alone."""
    every = max(1, len(steps) // 7)
    axes.plot(
        steps,
        values,
        color=colour(index),
        ls=STYLES[index % len(STYLES)],
        marker=MARKERS[index % len(MARKERS)] if marked else None,
        # Each configuration marks other rounds, or markers would hide each other.
        markevery=(index * every // 3 % every, every),
        ms=3.5,
        lw=1.2 if marked else 1.6,
        label=label,
    )


def colour(index: int) -> str:
    """Of configuration ``index``."""
    return PALETTE[index % len(PALETTE)]


def draw(name: str, title: str, caption: str, fill: Callable[[Axes], None], *, xlabel: str = "step") -> Chart:
    """A chart whose axes ``fill`` draws into."""
    with mpl.rc_context({**RC, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a box for an unknown character, a log axis without numbers
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        fill(axes)
        axes.set_xlabel(xlabel)
        axes.set_title(plain_label(title))
        axes.grid(visible=True, lw=0.5)
        axes.set_axisbelow(True)
        _simplify_ticks(axes)
        legend = _add_legend(figure, axes)
        for text in (axes.yaxis.label, axes.title, *legend):
            text.set_parse_math(False)  # a $ or a backslash in a name is not a formula
            text.set_text(plain_label(text.get_text()))
        # Laid out once for both files, which takes as long as to draw one of them.
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.execute(figure)
        figure.set_layout_engine(None)
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(pixels, format="png", dpi="figure", facecolor="white", metadata={"Software": None})
        heading = figure.get_size_inches()[1] - axes.title.get_window_extent().y0 / figure.dpi
        axes.title.set_visible(False)  # the page has it already
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None})
    svg = _inline(vector.getvalue(), name, title, top=max(0.0, round(72 * heading, 2)))
    return Chart(name, title, caption, svg, pixels.getvalue())


class _Characters(Formatter):
    """Tick labels of a logarithmic axis in characters: to set a formula takes longer than to draw a chart."""

    def __init__(self, formulas: LogFormatterSciNotation) -> None:
        self.formulas = formulas

    def set_locs(self, locs: Any) -> None:
        self.formulas.set_locs(locs)  # which of them get a label

    def __call__(self, x: float, pos: int | None = None) -> str:
        text = self.formulas(x, pos).removeprefix(r"$\mathdefault{").removesuffix("}$")
        text, _, power = text.partition("^")
        text = text.replace("-", "\N{MINUS SIGN}").replace(r"\times", "\N{MULTIPLICATION SIGN}")
        return text + power.strip("{}").translate(RAISED)


def _simplify_ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        major, minor = axis.get_major_formatter(), axis.get_minor_formatter()
        if isinstance(major, LogFormatterSciNotation):
            axis.set_major_formatter(_Characters(major))
        if isinstance(minor, LogFormatterSciNotation):
            axis.set_minor_formatter(_Characters(minor))


def _add_legend(figure: Figure, axes: Axes) -> list[Text]:
    """Below the chart, where it covers no curve."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return []
    ncols = 1 if max(map(len, labels)) > LONG_LABEL else 2
    figure.set_size_inches(WIDTH, HEIGHT + 0.14 * math.ceil(len(labels) / ncols))
    return figure.legend(loc="outside lower center", ncols=ncols).get_texts()


def plain_label(text: str) -> str:
    """On one line, without what an SVG may not hold, and not too long."""
    text = printable(text)
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _inline(svg: str, name: str, title: str, *, top: float = 0.0) -> str:
    """An SVG document as an element of a page: no size, nothing of its ``top``, no names that clash, own colours."""
    root = ET.fromstring(svg)
    for parent in root.iter():
        for child in parent.findall("{*}metadata"):
            parent.remove(child)
        parent.tag = _local(parent.tag)
        parent.attrib = {_local(key): _adapt(_local(key), value, name) for key, value in parent.attrib.items()}
    left, upper, width, height = map(float, root.attrib["viewBox"].split())
    view = f"{left:g} {upper + top:g} {width:g} {height - top:g}"
    root.attrib = {"viewBox": view, "role": "img", "aria-label": printable(title)}
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
        replace_file(folder / f"{chart.name}.png", lambda file, png=chart.png: file.write(png))  # type: ignore[misc]
