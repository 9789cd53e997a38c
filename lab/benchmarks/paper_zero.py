"""The picture of docs/paper.md: Eq. 7 near zero, with its velocity absolute as printed, and relative to the base value.

python lab/benchmarks/paper_zero.py                # writes docs/figures/near-zero.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from hdet.controllers.base import Evidence
from hdet.ensemble.controllers import PaperController
from hdet.policy.spread import multipliers
from hdet_lab.recipes import schedule_table

PICTURE = Path(__file__).parents[2] / "docs" / "figures" / "near-zero.svg"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 60, 40, 44
ROUNDS, FROM, LOW, HIGH = 60, 20, -7.0, 0.0  # rounds; the first one shown; powers of ten
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11.5px; fill: #57606a }
  .back { fill: #ffffff } .grid { stroke: #d8dee4 } polyline { fill: none; stroke: #57606a; stroke-width: 2 }
  .absolute { stroke: #bc4c00 } circle { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #a5afba } .back { fill: #0d1117 } .grid { stroke: #30363d }
    polyline { stroke: #a5afba } .absolute { stroke: #ffa657 } circle { fill: #ffa657 }
  }
"""


def learned(velocity: str, preferred: int) -> list[float]:
    """Learning rate over the peak after each round of one-cycle, replicas preferring one direction all along."""
    controller = PaperController(0.002, velocity=velocity)  # type: ignore[arg-type]
    rho = multipliers(8, 1 / 9)[None]
    state, scale, found = controller.init(1), 1.0, []
    for eta in schedule_table("one-cycle", ROUNDS)[FROM:]:
        evidence = Evidence(-0.01 * preferred * rho[0], rho, values=np.array([eta * scale]))
        try:
            state, decision = controller.update(state, evidence)
        except RuntimeError:
            break
        scale *= float(decision.factors[0])
        found.append(float(eta) * scale)
    return found


def draw() -> str:
    bottom = HEIGHT - BOTTOM

    def place(index: float, value: float) -> tuple[float, float]:
        y = (min(max(float(np.log10(value)), LOW), HIGH) - LOW) / (HIGH - LOW)
        return LEFT + (WIDTH - LEFT - 20) * index / (ROUNDS - FROM - 1), bottom - (bottom - TOP) * y

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Eq. 7 near zero: with an absolute velocity the learning rate turns up, or would pass zero</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="22">learning rate over its peak, along the decay of one-cycle</text>',
    ]
    for power in range(int(LOW), int(HIGH) + 1):
        y = place(0, 10.0**power)[1]
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index in range(FROM, ROUNDS + 1, 10):
        x = place(min(index, ROUNDS - 1) - FROM, 1)[0]
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{index}</text>')
    lines.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 8}">round</text>')
    for velocity in ("relative", "absolute"):
        for preferred in (1, -1):
            values = learned(velocity, preferred)
            points = [place(k, value) for k, value in enumerate(values)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dash = "none" if preferred > 0 else "6 3"
            lines.append(f'<polyline class="{velocity}" points="{path}" stroke-dasharray="{dash}"/>')
            if len(values) < ROUNDS - FROM:
                x, y = points[-1]
                lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
    x = LEFT + 16
    labels = ("orange: absolute, as printed; grey: relative", "solid: higher is better all along; dashed: lower is",
              "dot: the next update would pass zero, and is an error")  # fmt: skip
    lines += [f'<text class="small" x="{x}" y="{bottom - 48 + 17 * k}">{text}</text>' for k, text in enumerate(labels)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    args.out.write_text(draw())
    for velocity in ("relative", "absolute"):
        for preferred in (1, -1):
            values = learned(velocity, preferred)
            print(velocity, "up" if preferred > 0 else "down", f"{len(values)} rounds, ends at {values[-1]:.3g}")


if __name__ == "__main__":
    main()
