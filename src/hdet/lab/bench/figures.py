"""Learning rates of AutoLR over the steps of a run, from all starts, and of the best fixed run, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.lab.bench.summary import TaskSummary, starts_of
from hdet.lab.recipes import schedule_table

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 58, 16, 40, 34
NUM_POINTS = 60
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f } .back { fill: #ffffff } .grid { stroke: #d8dee4 }
  polyline { fill: none; stroke-width: 1.4; opacity: .8 } .fixed { stroke: #24292f; stroke-dasharray: 6 4; opacity: 1 }
  .start-0 { stroke: #bc4c00 } .start-1 { stroke: #0969da } .start-2 { stroke: #1a7f37 } text.start-0 { fill: #bc4c00 }
  text.start-1 { fill: #0969da } text.start-2 { fill: #1a7f37 } text[class] { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d } .fixed { stroke: #e6edf3 }
    .start-0 { stroke: #ffa657 } .start-1 { stroke: #79c0ff } .start-2 { stroke: #7ee787 }
    text.start-0 { fill: #ffa657 } text.start-1 { fill: #79c0ff } text.start-2 { fill: #7ee787 }
  }
"""


def lr_figure(task: TaskSummary) -> str:
    """One picture."""
    record, starts = task.record, starts_of(task)
    shape, peak = record.best()
    heights = schedule_table(shape, record.steps)
    places = sorted({round(place * (record.steps - 1) / (NUM_POINTS - 1)) for place in range(NUM_POINTS)})
    fixed = [(place + 1, peak * float(heights[place])) for place in places]
    curves = [(starts.index(run["lr"]), run["lrs"]) for run in record.methods["autolr"] if run.get("lrs")]
    # What falls to nothing at the end would press everything else together.
    top = max(lr for _, lr in [*fixed, *(point for _, curve in curves for point in curve)] if lr)
    low = min([top * 1e-4, *(lr for curve in curves for _, lr in curve[1][:1] if lr)])
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
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
        f'<text x="{LEFT}" y="18">{record.name}: best fixed {shape}, {peak:g} (dashed); AutoLR from</text>',
    ]
    for index, lr in enumerate(starts):
        parts.append(f'<text class="start-{index}" x="{WIDTH - 190 + 62 * index}" y="18">{lr:g}</text>')
    for decade in decades:
        y = place(0, 10.0**decade).partition(",")[2]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">1e{decade}</text>')
    parts += [line(f"start-{index}", curve) for index, curve in curves]
    parts += [
        line("fixed", fixed),
        f'<text x="{LEFT}" y="{HEIGHT - 10}">step 0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{record.steps}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
