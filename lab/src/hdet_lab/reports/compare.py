"""Tables and chart of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes

from hdet_lab.reports.drawing import MARKERS, STYLES, Chart, colour, draw
from hdet_lab.reports.page import Table, number


class Record(Protocol):
    """What is shown of a result."""

    method: str
    start: float | None
    seed: int
    compute: int

    @property
    def loss(self) -> float: ...


def run_table(records: Sequence[Record], starts: Sequence[float]) -> Table:
    """Validation loss of every seed from every start; of a method without a start once, in front."""
    table = Table("Validation loss, every run", ["method", "seed", "no start", *(f"{start:g}" for start in starts)])
    by_run = {(r.method, r.seed, r.start): r.loss for r in records}
    for method, seed in dict.fromkeys((r.method, r.seed) for r in records):
        cells = []
        for start in (None, *starts):
            loss = by_run.get((method, seed, start))
            cells.append("" if loss is None else number(loss) if math.isfinite(loss) else "broke")
        table.rows.append([method, str(seed), *cells])
    return table


def excesses(records: Sequence[Record]) -> dict[str, list[float]]:
    """Method to the share by which each of its runs is above the best fixed learning rate of its seed.

    Infinity where a run broke. Empty where there are no fixed runs to compare with.
    """
    best: dict[int, float] = {}
    for r in records:
        if r.method == "fixed" and math.isfinite(r.loss):
            best[r.seed] = min(best.get(r.seed, math.inf), r.loss)
    found: dict[str, list[float]] = {}
    for r in records:
        if r.seed in best:
            share = (r.loss - best[r.seed]) / abs(best[r.seed]) if best[r.seed] else math.nan
            found.setdefault(r.method, []).append(share if math.isfinite(r.loss) else math.inf)
    return found


def summary_table(records: Sequence[Record], seconds: Mapping[str, float]) -> Table:
    """By method, over starts and seeds, against the best fixed learning rate of the same seed."""
    table = Table(
        "Against the best fixed learning rate of the same seed, over all starts and seeds",
        ["method", "runs", "best", "median", "worst", "at or below", "broke", "compute of a result", "s of a result"],
    )
    against = excesses(records)
    for method in dict.fromkeys(r.method for r in records):
        mine = [r for r in records if r.method == method]
        shares = sorted(against.get(method, []))
        # One of them, not a mean of two: half of infinity says nothing.
        ends = [shares[0], statistics.median_high(shares), shares[-1]] if shares else [math.nan] * 3
        table.rows.append(
            [
                method,
                str(len(mine)),
                *(_percent(share) for share in ends),
                f"{sum(share <= 0 for share in shares)} of {len(shares)}" if shares else "-",
                str(sum(not math.isfinite(r.loss) for r in mine)),
                "1 run" if mine[0].compute == 1 else f"{mine[0].compute} runs",
                f"{seconds[method] / len(mine):.1f}",
            ]
        )
    return table


def _percent(share: float) -> str:
    return "broke" if share == math.inf else f"{share:+.1%}" if math.isfinite(share) else "-"


def chart(records: Sequence[Record], starts: Sequence[float]) -> Chart:
    """Validation loss over the starting learning rate: a line for each method, at the median of the seeds."""
    losses = sorted(r.loss for r in records if math.isfinite(r.loss))
    # What is far above the rest stands at the upper edge, instead of pressing all others into one line.
    low, upper = (losses[0], losses[(3 * len(losses)) // 4]) if losses else (0.0, 1.0)
    top = min(losses[-1] if losses else 1.0, low + 3.0 * (upper - low)) or 1.0
    margin = 0.05 * (top - low) or 0.05

    def inside(loss: float) -> float:
        return min(loss, top) if math.isfinite(loss) else top

    def fill(axes: Axes) -> None:
        axes.set_xscale("log")
        for index, method in enumerate(dict.fromkeys(r.method for r in records)):
            style, marker = STYLES[index % len(STYLES)], MARKERS[index % len(MARKERS)]
            mine = [r for r in records if r.method == method]
            label = method if mine[0].compute == 1 else f"{method} ({mine[0].compute} times the compute)"
            if mine[0].start is None:
                level = statistics.median_high([inside(r.loss) for r in mine])
                axes.axhline(level, color=colour(index), ls=style, lw=1.2)
                axes.plot(math.sqrt(min(starts) * max(starts)), level, marker=marker, ls=style, ms=3.5,
                          color=colour(index), label=label)  # fmt: skip
                continue
            points = {s: [inside(r.loss) for r in mine if r.start == s] for s in starts}
            medians = [statistics.median_high(points[s]) for s in starts]
            axes.plot(starts, medians, color=colour(index), ls=style, marker=marker, ms=3.5, lw=1.2, label=label)
            spots = [(s, loss) for s in starts for loss in points[s]]
            axes.plot(*zip(*spots, strict=True), ls="", marker=marker, ms=2, alpha=0.6, color=colour(index))
        axes.set_ylim(low - margin, top + margin)
        axes.set_ylabel("validation loss")

    caption = (
        "A line is the median over seeds, small marks are the seeds; level lines are methods without a starting "
        "learning rate. Marks at the upper edge are at or above it, or broke."
    )
    return draw("starts", "Validation loss by starting learning rate", caption, fill, xlabel="starting learning rate")
