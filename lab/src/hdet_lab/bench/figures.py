"""Learning rates of AutoLR over the steps of a run, with all seeds, and of the best fixed run, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
