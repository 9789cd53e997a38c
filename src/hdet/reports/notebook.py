"""A run as a curve in a notebook: SVG built as a tree, which needs no package."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from hdet.checks import printable
from hdet.reports.run import Run, alike, breaks, distinct

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 220, 58, 58, 24, 26
RATE, LOSS, UNDONE = "#0072b2", "#d55e00", "#cc3311"


def sketch(run: Run) -> str:
    """The learning rate (left, logarithmic) and the loss (right) over steps, and a line of text."""
    box = ET.Element("div", style="font-family: system-ui, sans-serif; font-size: 13px; max-width: 640px")
    if not run.rounds:
        box.text = f"{run.name}: no round has ended yet."
        return ET.tostring(box, encoding="unicode", method="html")
    peak, loss, count = run.peak, run.losses()[-1], run.num_missing + len(run.rounds)
    rate = f", peak learning rate {peak:.2g}" if peak > 0 else ""
    given = f" (schedule: {run.start:.2g})" if run.learns and run.start > 0 else ""
    ET.SubElement(box, "div").text = printable(
        f"{run.name}: step {run.steps[-1]:,}, {count:,} rounds{rate}{given}, loss {loss:.4g}"
    )
    svg = ET.SubElement(
        box, "svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", style="width: 100%; height: auto; display: block"
    )
    svg.set("aria-label", "learning rate and loss over steps")
    steps, bases, schedules = run.steps, run.bases(), run.schedules()
    beside = [schedules[k] for k in distinct(schedules) if not any(alike(schedules[k], base) for base in bases)]
    logs = [[math.log10(value) if value > 0 else math.nan for value in row] for row in (*bases, *beside)]
    # The last steps of most schedules fall by orders of magnitude, and would flatten everything before.
    body = [value for row in logs for value in row[: max(1, math.ceil(0.9 * len(row)))]]
    rates, losses = _range(body), _range(run.losses())
    for at in breaks(run):
        x = _place(steps[at], (0, steps[-1]), LEFT, WIDTH - RIGHT)
        _line(svg, x, TOP, x, HEIGHT - BOTTOM, UNDONE, "2 2")
    for k, row in enumerate(logs):
        if k < len(bases):
            _curve(svg, steps, row, rates, RATE, "2", "")
        else:
            _curve(svg, steps, row, rates, "#888", "1.2", "4 3")
    _curve(svg, steps, run.losses(), losses, LOSS, "1.2", "")
    for value, y in ((rates[1], TOP + 4), (rates[0], HEIGHT - BOTTOM)):
        _label(svg, LEFT - 6, y, f"{10**value:.2g}", "end", RATE)
    for value, y in ((losses[1], TOP + 4), (losses[0], HEIGHT - BOTTOM)):
        _label(svg, WIDTH - RIGHT + 6, y, f"{value:.4g}", "start", LOSS)
    _label(svg, LEFT, 12, "learning rate", "start", RATE)
    _label(svg, WIDTH - RIGHT, 12, "loss", "end", LOSS)
    if beside:
        _label(svg, LEFT + 90, 12, "the schedule alone (dashed)", "start", "#888")
    _line(svg, LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#888", "")
    _label(svg, LEFT, HEIGHT - 8, "0", "start", "#888")
    _label(svg, WIDTH - RIGHT, HEIGHT - 8, f"step {steps[-1]:,}", "end", "#888")
    return ET.tostring(box, encoding="unicode", method="html")


def _range(values: Sequence[float]) -> tuple[float, float]:
    seen = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(seen), max(seen)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _place(value: float, span: tuple[float, float], first: float, last: float) -> float:
    share = (value - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5
    return round(first + min(max(share, 0.0), 1.0) * (last - first), 1)


def _curve(
    svg: ET.Element, steps: Sequence[int], values: Sequence[float], span: tuple[float, float], colour: str, width: str,
    dashes: str,
) -> None:  # fmt: skip
    """Broken where a value is not finite."""
    path, pen = [], "M"
    for step, value in zip(steps, values, strict=False):
        if math.isfinite(value):
            x = _place(step, (0, steps[-1]), LEFT, WIDTH - RIGHT)
            path.append(f"{pen}{x} {_place(value, span, HEIGHT - BOTTOM, TOP)}")
        pen = "L" if math.isfinite(value) else "M"
    shape = ET.SubElement(svg, "path", d=" ".join(path) or "M0 0", fill="none", stroke=colour)
    shape.set("stroke-width", width)
    if dashes:
        shape.set("stroke-dasharray", dashes)


def _line(svg: ET.Element, x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str) -> None:
    shape = ET.SubElement(svg, "path", d=f"M{x1} {y1} L{x2} {y2}", stroke=colour)
    if dashes:
        shape.set("stroke-dasharray", dashes)


def _label(svg: ET.Element, x: float, y: float, text: str, anchor: str, colour: str) -> None:
    label = ET.SubElement(svg, "text", x=str(x), y=str(y), fill=colour)
    label.set("text-anchor", anchor)
    label.set("font-size", "11")
    label.text = text
