"""What a scheduler shows of its run: :func:`draw` in axes of matplotlib, :func:`sketch` as SVG in a notebook.

Both are drawn from ``scheduler.history`` by way of :class:`Curves`. Only :func:`draw` needs matplotlib.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdet.checks import as_int, printable
from hdet.sinks import as_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUGE = 1e100  # matplotlib's arithmetic overflows where numbers are near the largest there is,
TINY = 1e-100  # and underflows where they are near the smallest
SAME = 1e-3  # relative; learning rates this close are one line of a chart
LOG_SPAN = 3  # losses that fall further than this are drawn on a logarithmic axis: a linear one is flat after that
GREY = "0.55"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 220, 58, 58, 24, 26
RATE, LOSS, UNDONE = "#0072b2", "#d55e00", "#cc3311"


@dataclass
class Curves:
    """The records of a run, as curves over its steps.

    Attributes:
        name: of its scheduler, its file or its folder.
        rounds: records in JSON's types, the oldest first; null where a number is not finite.
        groups: names of the param groups.
        num_steps: planned length; 0 where it is not known.
        status: ``done``, ``diverged``, ``unfinished``, or empty where it is not known.
        found_peak: the highest learning rate by ``scheduler.found()``, which knows rounds that are not among these
            records; None where only the records are known.
        earlier: from before a resume, steps, the learning rate of each param group, and the loss.
    """

    name: str
    rounds: list[dict[str, Any]]
    groups: Sequence[str]
    num_steps: int = 0
    status: str = ""
    found_peak: float | None = None
    earlier: Sequence[tuple[int, Sequence[float], float]] = ()

    @property
    def steps(self) -> list[int]:
        return [entry["step"] for entry in self.rounds]

    @property
    def num_missing(self) -> int:
        """Rounds before the first of these records."""
        return max(0, as_int(self.rounds[0].get("index")))

    @property
    def learns(self) -> bool:
        """Whether it has moved a learning rate away from its schedule."""
        return any(abs(scale - 1) > SAME for entry in self.rounds for scale in numbers(entry["scales"]))

    @property
    def peak(self) -> float:
        """The highest learning rate at the end of a round; NaN where there is none."""
        if self.found_peak is not None:
            return self.found_peak
        return max((value for row in self.bases() for value in row if value > 0), default=math.nan)

    @property
    def start(self) -> float:
        """What the peak would have been by the schedule alone; NaN where that is not known."""
        return max((value for row in self.schedules() for value in row if value > 0), default=math.nan)

    @property
    def lowest(self) -> float:
        """The lowest learning rate of the first nine tenths; infinity where there is none.

        The last steps of most schedules fall by orders of magnitude, and would flatten everything before.
        """
        end = 0.9 * max(self.num_steps, self.steps[-1])
        rows = (zip(self.steps, row, strict=True) for row in (*self.bases(), *self.schedules()))
        return min((value for row in rows for step, value in row if step <= end and value > 0), default=math.inf)

    def bases(self) -> list[tuple[float, ...]]:
        """The learning rate of each param group, round by round."""
        return columns([entry["base_values"] for entry in self.rounds])

    def schedules(self) -> list[tuple[float, ...]]:
        """What the schedule alone gave each param group; NaN where records do not tell, none where it was not given."""
        found = columns([_unscaled(entry["base_values"], entry["scales"]) for entry in self.rounds])
        return [] if found and self._is_shape(found[0]) else found

    def _is_shape(self, schedule: Sequence[float]) -> bool:
        """Whether learning rates were found without a schedule: it is of ratios then, with a peak of 1."""
        peak = max((value for value in schedule if value > 0), default=math.nan)
        return any(entry.get("phase") == "warm-up" for entry in self.rounds) and math.isclose(peak, 1, rel_tol=1e-6)

    def losses(self) -> list[float]:
        """Mean over replicas, round by round."""
        return numbers([mean_loss(entry) for entry in self.rounds])


def curves_of(scheduler: Any) -> Curves:
    """The curves of a scheduler's history."""
    total = scheduler.total_steps
    found = scheduler.found() if hasattr(scheduler, "found") else None
    peaks = [peak for peak in found.peak_lrs if peak > 0] if found else []
    first, curve = scheduler.history[0].step if scheduler.history else 0, scheduler._run.history.curve
    return Curves(
        type(scheduler).__name__,
        [as_json(record.as_dict()) for record in scheduler.history],
        [str(group.get("name", f"group{k}")) for k, group in enumerate(scheduler.optimizer.param_groups)],
        num_steps=0 if total is None or math.isinf(total) else int(total),
        status="done" if scheduler.finished else "unfinished",
        found_peak=max(peaks, default=None),
        earlier=[point for point in zip(curve.steps, curve.values, curve.losses, strict=True) if point[0] < first],
    )


def require_rounds(scheduler: Any, function: str) -> None:
    """RuntimeError, which says when there will be one, where no round has ended yet."""
    if not scheduler.history:
        loop = scheduler._run
        why = f"a round has {loop.policy.interval} steps" if loop.active else "one replica alone explores nothing"
        raise RuntimeError(
            f"{function}() needs a round that has ended, but {type(scheduler).__name__} has none at step "
            f"{scheduler.last_epoch}: {why}"
        )


def draw(run: Curves, ax: Axes | None = None) -> Axes:
    """The learning rate over steps, and the loss on a twin of its axes; ``ax`` is where, by default a new figure."""
    if ax is None:
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise ImportError("plot() needs matplotlib, which is not installed; pip install matplotlib") from error
        ax = plt.subplots(layout="constrained")[1]
    steps, bases = run.steps, run.bases()
    for place, (k, same) in enumerate(distinct(bases).items()):
        names = "" if len(same) == len(bases) else f" ({', '.join(run.groups[other] for other in same)})"
        # Of the colours of the user's own cycle: the second is the loss's.
        colour = f"C{place if place == 0 else place + 1}"
        before = [(step, row[k]) for step, row, _ in run.earlier if k < len(row)]
        curve = [*before, *zip(steps, bases[k], strict=True)]
        ax.plot(*zip(*curve, strict=True), color=colour, label=_text(f"learning rate{names}"))
        rows = [numbers(entry["values"][k]) if k < len(entry["values"]) else [] for entry in run.rounds]
        rows = [row or [math.nan] for row in rows]
        low, high = ([pick(row) for row in rows] for pick in (min, max))
        if not alike(low, high):
            ax.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
    schedules = run.schedules()
    beside = [schedules[k] for k in distinct(schedules) if not any(alike(schedules[k], base) for base in bases)]
    for place, row in enumerate(beside):
        ax.plot(steps, row, color=GREY, ls="--", lw=1, label=None if place else "the schedule alone")
    for first, last, phase in phases(run):
        ax.axvspan(first, last, color=GREY, alpha={"warm-up": 0.15, "hold": 0.08}.get(phase, 0.0), lw=0)
    ax.set(xlabel="step", ylabel="learning rate")
    if any(value > 0 for row in bases for value in row):
        ax.set_yscale("log")
    if run.lowest < math.inf:
        ax.set_ylim(bottom=0.6 * run.lowest)

    loss = ax.twinx()
    losses = [*(value for *_, value in run.earlier), *run.losses()]
    loss.plot([*(step for step, *_ in run.earlier), *steps], losses, color="C1", lw=1, label="loss")
    loss.set_ylabel("loss")
    scale_losses(loss, [losses])
    broken = breaks(run)
    for place, at in enumerate(broken):
        label = None if place else "not finite, or undone"
        ax.axvline(steps[at], color="C3", ls=":", lw=1, label=label)
    happened = sorted({step for step, _ in events(run)} - {steps[at] for at in broken})
    for place, step in enumerate(happened):
        ax.axvline(step, color=GREY, ls=":", lw=1, label=None if place else "event")
    handles = [*ax.get_legend_handles_labels()[0], *loss.get_legend_handles_labels()[0]]
    ax.legend(handles=handles, fontsize="small", frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def top_of(curves: Sequence[Sequence[float]]) -> float:
    """Of a chart of losses. One that explodes leaves through the top instead of pressing all others into one line."""
    first = max((curve[0] for curve in curves if curve and math.isfinite(curve[0])), default=1.0)
    return first + 0.5 * abs(first)


def scale_losses(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """The axis of losses: logarithmic, with plain numbers, where a linear one would be flat after the first steps."""
    from matplotlib.ticker import Formatter, LogFormatterSciNotation

    class Plain(Formatter):
        def __init__(self) -> None:
            self.chosen = LogFormatterSciNotation(minor_thresholds=(2.5, 0.4))

        def set_axis(self, axis: Any) -> None:
            self.chosen.set_axis(axis)

        def set_locs(self, locs: Any) -> None:
            self.chosen.set_locs(locs)  # which of them get a label

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if self.chosen(x, pos) else ""

    seen, top = [loss for curve in curves for loss in curve if math.isfinite(loss)], top_of(curves)
    low, high = min(seen, default=0.0), max(seen, default=0.0)
    if low > 0 and min(high, top) > LOG_SPAN * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, min(top, 1.15 * high))
        axes.yaxis.set_major_formatter(Plain())
        axes.yaxis.set_minor_formatter(Plain())
    elif high > top:
        axes.set_ylim(low - 0.1 * (top - low), top)


def sketch(run: Curves) -> str:
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
    curve, top = run.losses(), top_of([run.losses()])
    is_log = 0 < LOG_SPAN * min((loss for loss in curve if math.isfinite(loss)), default=0.0) < top
    curve = [math.log10(min(loss, top)) if is_log and loss == loss else min(loss, top) for loss in curve]
    rates, losses = _range(body), _range(curve)
    for at in breaks(run):
        x = _place(steps[at], (0, steps[-1]), LEFT, WIDTH - RIGHT)
        _line(svg, x, TOP, x, HEIGHT - BOTTOM, UNDONE, "2 2")
    for k, row in enumerate(logs):
        if k < len(bases):
            _curve(svg, steps, row, rates, RATE, "2", "")
        else:
            _curve(svg, steps, row, rates, "#888", "1.2", "4 3")
    _curve(svg, steps, curve, losses, LOSS, "1.2", "")
    for value, y in ((rates[1], TOP + 4), (rates[0], HEIGHT - BOTTOM)):
        _label(svg, LEFT - 6, y, f"{10**value:.2g}", "end", RATE)
    for value, y in ((losses[1], TOP + 4), (losses[0], HEIGHT - BOTTOM)):
        _label(svg, WIDTH - RIGHT + 6, y, f"{10**value if is_log else value:.3g}", "start", LOSS)
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


def mean_loss(entry: Mapping[str, Any]) -> float:
    """Mean over the replicas that have a finite loss; NaN where none has."""
    seen = [loss for loss in entry["losses"] if loss is not None]
    return sum(seen) / len(seen) if seen else math.nan


def breaks(run: Curves) -> list[int]:
    """Indices of rounds that were undone, and of the first that was not finite."""
    found, undone, finite = [], run.rounds[0]["num_rollbacks"] if run.rounds and run.num_missing else 0, True
    for index, entry in enumerate(run.rounds):
        broken = None in entry["losses"] or bool(entry["unhealthy"])
        if entry["num_rollbacks"] > undone or (broken and finite):
            found.append(index)
        undone, finite = entry["num_rollbacks"], finite and not broken
    if run.status == "diverged" and not found and run.rounds:
        found.append(len(run.rounds) - 1)
    return found


def events(run: Curves) -> list[tuple[int, str]]:
    """What happened, as steps and sentences: what the records say, or what their numbers show."""
    found: list[tuple[int, str]] = []
    undone, held = run.rounds[0]["num_rollbacks"] if run.num_missing else 0, False
    for entry in run.rounds:
        said = [str(event) for event in entry.get("events") or ()]
        if not said:
            if entry.get("resumed_from") is not None:
                said.append(f"Resumed on {len(entry['losses'])} replicas instead of {entry['resumed_from']}.")
            for key, why in (("unhealthy", "weights were not finite"), ("quarantined", "loss had exploded")):
                if count := len(entry.get(key) or ()):
                    who = "One replica was" if count == 1 else f"{count} replicas were"
                    said.append(f"{who} left out of the mean: {why}.")
            if entry["num_rollbacks"] > undone:
                said.append("The round was undone, and the learning rate lowered.")
            if entry.get("held") and not held:
                said.append("Too many rounds were undone: the learning rate follows its schedule until it recovers.")
        undone, held = entry["num_rollbacks"], bool(entry.get("held"))
        found += [(entry["step"], text) for text in said]
    return found


def phases(run: Curves) -> list[tuple[int, int, str]]:
    """First step, last step and name of each phase that the records name."""
    found, first = [], 0
    for name, entries in itertools.groupby(run.rounds, lambda entry: str(entry.get("phase") or "")):
        last = list(entries)[-1]["step"]
        if name:
            found.append((first, last, name))
        first = last
    return found


def distinct(rows: Sequence[tuple[float, ...]]) -> dict[int, list[int]]:
    """Index of each curve that is not one before it, and of all that are the same."""
    found: dict[int, list[int]] = {}
    for k, row in enumerate(rows):
        same = next((first for first in found if alike(rows[first], row)), k)
        found.setdefault(same, []).append(k)
    return found


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two curves are one line in a chart."""
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=SAME) or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )


def numbers(values: Sequence[float | None]) -> list[float]:
    """For a chart: NaN where there is no number, or one that no axis reaches; 0 where one is too small for any."""
    found = []
    for value in values:
        size = math.inf if value is None else abs(value)
        found.append(math.nan if value is None or not size <= HUGE else float(value) if size > TINY else 0.0)
    return found


def columns(rows: Sequence[Sequence[float | None]]) -> list[tuple[float, ...]]:
    """Columns of rows that may have different lengths."""
    return list(itertools.zip_longest(*map(numbers, rows), fillvalue=math.nan))


def _unscaled(bases: Sequence[float | None], scales: Sequence[float | None]) -> list[float]:
    found = scales if len(scales) == len(bases) else [scales[0]] * len(bases) if len(scales) == 1 else ()
    pairs = itertools.zip_longest(numbers(bases), numbers(found), fillvalue=math.nan)
    # A scale below what any float64 can be divided by is none.
    return numbers([base / scale if scale > 1e-200 else math.nan for base, scale in pairs])


def _text(label: str) -> str:
    """A label that matplotlib neither hides nor reads as a formula."""
    return label.replace("$", r"\$")
