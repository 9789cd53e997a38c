"""Figures as SVG: how near methods come to the best of the grid, and the learning rates of AutoLR with all seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hdet_lab.bench.summary import TaskSummary
from hdet_lab.recipes import schedule_table

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 58, 16, 40, 34
NUM_POINTS = 60
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f } .back { fill: #ffffff } .grid { stroke: #d8dee4 }
  polyline { fill: none; stroke-width: 1.4; opacity: .8 } .fixed { stroke: #24292f; stroke-dasharray: 6 4; opacity: 1 }
  .auto { stroke: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d } .fixed { stroke: #e6edf3 }
    .auto { stroke: #ffa657 }
  }
"""


def lr_figure(task: TaskSummary) -> str:
    """One picture."""
    record = task.record
    shape, peak = record.best()
    heights = schedule_table(shape, record.steps)
    places = sorted({round(place * (record.steps - 1) / (NUM_POINTS - 1)) for place in range(NUM_POINTS)})
    fixed = [(place + 1, peak * float(heights[place])) for place in places]
    curves = [run["lrs"] for run in record.methods["autolr"] if run.get("lrs")]
    # The first steps, and what falls to nothing at the end, would press everything else together.
    top = max(lr for _, lr in [*fixed, *(point for curve in curves for point in curve)] if lr)
    decades = range(math.floor(math.log10(top * 1e-4)), math.ceil(math.log10(top)) + 1)
    span = decades[-1] - decades[0]

    def place(step: float, lr: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / record.steps
        share = (math.log10(max(lr, 10.0 ** decades[0])) - decades[0]) / span
        return f"{x:.1f},{HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}"

    def line(kind: str, points: Sequence[tuple[float, float]]) -> str:
        return f'<polyline class="{kind}" points="{" ".join(place(*point) for point in points if point[1])}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="18">{record.name}: best fixed {shape}, {peak:g} (dashed); AutoLR</text>',
    ]
    for decade in decades:
        y = place(0, 10.0**decade).partition(",")[2]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">1e{decade}</text>')
    parts += [line("auto", curve) for curve in curves]
    parts += [
        line("fixed", fixed),
        f'<text x="{LEFT}" y="{HEIGHT - 10}">step 0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{record.steps}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


SHARE_RANGE = (0.005, 1.0)
SHARE_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
COLOURS = ("#bc4c00", "#0072b2", "#009e73", "#8250df", "#56a0d3", "#9a6700", "#808890", "#cf222e")
LEGEND = 210
"""Width of the names beside the curves."""


def near_figure(shares: Mapping[str, Sequence[float]], title: str) -> str:
    """For each method: the share of tasks (upwards) that are within a share of the best of the grid (to the right).

    Args:
        shares: label to how far it is above the best of the grid, task by task; the first one is drawn bold.
        title: above the picture.
    """
    right, bottom = WIDTH - LEGEND, HEIGHT - BOTTOM
    low, high = (math.log(limit) for limit in SHARE_RANGE)

    def x_of(share: float) -> float:
        inside = min(max(share, SHARE_RANGE[0]), SHARE_RANGE[1])
        return LEFT + (right - LEFT) * (math.log(inside) - low) / (high - low)

    def y_of(part: float) -> float:
        return bottom - part * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="18">{title}</text>',
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y_of(part):.1f}" y2="{y_of(part):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y_of(part) + 4:.1f}" text-anchor="end">{part:.0%}</text>')
    for tick in SHARE_TICKS:
        x = x_of(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{tick:.0%}</text>')
    for place, (label, found) in reversed(list(enumerate(shares.items()))):  # the first on top
        points, reached = [(x_of(0), 0.0)], 0
        for share in sorted(found):
            if share <= SHARE_RANGE[1]:
                points.append((x_of(share), reached / len(found)))
                reached += 1
                points.append((x_of(share), reached / len(found)))
        points.append((x_of(SHARE_RANGE[1]), reached / len(found)))
        line = " ".join(f"{x:.1f},{y_of(part):.1f}" for x, part in points)
        colour, width = COLOURS[place % len(COLOURS)], 3 if place == 0 else 1.6
        parts.append(f'<polyline points="{line}" style="stroke: {colour}; stroke-width: {width}"/>')
        y = TOP + 8 + 22 * place
        parts.append(f'<line x1="{right + 14}" x2="{right + 34}" y1="{y}" y2="{y}" '
                     f'style="stroke: {colour}; stroke-width: {width}"/>')  # fmt: skip
        parts.append(f'<text x="{right + 40}" y="{y + 4}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
