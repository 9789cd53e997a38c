"""The picture of docs/held_out.md: both curves as they were learned, from a record that held_out.py has written.

python lab/benchmarks/held_out_figure.py                # of lab/benchmarks/results/held_out/images.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "lab" / "benchmarks" / "results" / "held_out" / "images.json"
PICTURE = ROOT / "docs" / "figures" / "held-out.svg"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 880, 320, 60, 56, 44, 70
PANELS = {"lrs": ("learning rate", "lr"), "decays": ("weight decay", "weight_decay")}
DASHES = ("none", "6 3", "2 3")
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11.5px; fill: #57606a }
  .back { fill: #ffffff } .grid { stroke: #d8dee4 } polyline { fill: none; stroke: #bc4c00; stroke-width: 2 }
  .best { stroke: #57606a; stroke-width: 1.6 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #a5afba } .back { fill: #0d1117 } .grid { stroke: #30363d }
    polyline { stroke: #ffa657 } .best { stroke: #a5afba }
  }
"""


def panel(runs: Sequence[dict[str, Any]], best: dict[str, Any], name: str, left: float, width: float) -> list[str]:
    title, setting = PANELS[name]
    steps = best["steps"]
    values = [math.log10(v) for run in runs for v in run[name] if v > 0]
    low, high = math.floor(max(min(values), -6)), math.ceil(max(values))
    bottom = HEIGHT - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        y = (min(max(math.log10(max(value, 1e-30)), low), high) - low) / (high - low)
        return left + width * step / steps, bottom - (bottom - TOP) * y

    lines = [f'<text x="{left}" y="{TOP - 14}">{title}</text>']
    for power in range(low, high + 1):
        y = place(0, 10.0**power)[1]
        lines.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for step in range(0, steps + 1, 500):
        x = place(step, 1)[0]
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    y = place(0, best[setting])[1]
    lines.append(f'<line class="best" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for run, dash in zip(runs, DASHES, strict=False):
        points = " ".join("{:.1f},{:.1f}".format(*place(s, v)) for s, v in zip(run["at"], run[name], strict=True))
        lines.append(f'<polyline points="{points}" stroke-dasharray="{dash}"/>')
    return lines


def draw(record: dict[str, Any], seed: int) -> str:
    mine = [run for run in record["runs"] if run["seed"] == seed]
    runs = [run for run in mine if run["kind"] == "learn"]
    best = min((run for run in mine if run["kind"] == "fixed"), key=lambda run: float(run["test"]))
    width = (WIDTH - LEFT - GAP - 16) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{STYLE}</style><rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        *panel(runs, best, "lrs", LEFT, width),
        *panel(runs, best, "decays", LEFT + width + GAP, width),
    ]
    said = "; ".join(
        f"{name}: from lr {run['lr']:g}, wd {run['weight_decay']:g}, test loss {run['test']:.3f}"
        for name, run in zip(("solid", "dashed", "dotted"), runs, strict=False)
    )
    lines.append(
        f'<text class="small" x="{LEFT}" y="{HEIGHT - 8}">{said}; grey: best of the grid, {best["test"]:.3f}</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    options.out.write_text(draw(json.loads(options.record.read_text()), options.seed))


if __name__ == "__main__":
    main()
