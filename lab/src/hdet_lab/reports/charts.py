"""The charts of a report: losses and learning rates of all runs over each other, then what else they recorded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes

from hdet.plot import alike, breaks, columns, distinct, events, numbers, phases, scale_losses, top_of
from hdet_lab.reports.drawing import INK, SOFT, STYLES, Chart, colour, draw, line, plain_label
from hdet_lab.reports.run import Run, of_groups, thinned

SHADES = {"warm-up": 0.05, "level": 0.0, "hold": 0.025}
MAX_ROUNDS = 1000  # of a run in a chart: more than it has pixels
MAX_GROUPS = 20  # param groups of a run in a chart: more lines cannot be told apart
NOISE = 2  # standard errors within which evidence may be noise
TICKS = (-1000, -300, -100, -30, -10, -5, -2, 0, 2, 5, 10, 30, 100, 300, 1000)  # of evidence over several powers of ten


@dataclass
class Group:
    """Runs of one configuration, one for each seed.

    Attributes:
        label: tells it from the others on the page.
        runs: of this configuration.
        fixed: whether the schedule alone sets its learning rate: what the others are measured against.
    """

    label: str
    runs: list[Run]
    fixed: bool = False


def draw_all(groups: Sequence[Group]) -> list[Chart]:
    """Every chart the runs have numbers for; losses and learning rates are the first two."""
    most = max((len(run.groups) for group in groups for run in group.runs), default=0)
    groups = [
        replace(group, runs=[of_groups(thinned(run, MAX_ROUNDS), MAX_GROUPS) for run in group.runs]) for group in groups
    ]
    runs = [run for group in groups for run in group.runs]
    marks = " Cross: the round was undone, or not finite." if any(map(breaks, runs)) else ""
    marks += " Ring: an event, listed below." if any(map(_rings, runs)) else ""
    star = " Star: the validation loss at the end." if any("loss" in run.validation for run in runs) else ""
    dashed = " Dashed, grey: the schedule alone, as it was given." if _beside(groups) else ""
    dashed += f" The first {MAX_GROUPS} of {most:,} param groups." if most > MAX_GROUPS else ""
    band = " Shaded: from the lowest to the highest replica." if any(map(_spreads, runs)) else ""
    charts = [
        draw(
            "loss",
            "Training loss",
            f"Mean over replicas, round by round{', one line a seed' if len(runs) > len(groups) else ''}.{star}{marks}",
            lambda axes: _draw_losses(axes, groups),
        ),
        draw(
            "lr",
            "Learning rate",
            f"What was used, on a logarithmic axis, in the colours of the loss.{dashed}{band}",
            lambda axes: _draw_lrs(axes, groups),
        ),
    ]
    for index, group in enumerate(groups):
        charts += _knob_charts(group, "" if len(groups) == 1 else f"-{index + 1}")
    for name, title, key, caption in (
        (
            "evidence",
            "Is the learning rate too high or too low?",
            "z",
            "Slope of the loss over the log of the learning rate, in standard errors (z in the records). Shaded: "
            "may be noise.",
        ),
        ("velocity", "Velocity of the paper's controller", "velocity", "Eq. 7, relative to the base value."),
    ):
        if any(entry["control"].get(key) for run in runs for entry in run.rounds):
            charts.append(draw(name, title, caption, lambda axes, k=key: _draw_control(axes, groups, k)))  # type: ignore[misc]
    if any(entry["distance"] for run in runs for entry in run.rounds):
        caption = "Largest distance of a replica's weights from their mean at the end of a round, where they differ."
        charts.append(draw("distance", "Distance of replicas", caption, lambda axes: _draw_distance(axes, groups)))
    return charts


def _knob_charts(group: Group, suffix: str) -> list[Chart]:
    """One for each knob that the runs explored."""
    caption = "The base value, and a shaded band over all replicas; line styles tell seeds apart."
    found = dict.fromkeys(name for run in group.runs for entry in run.rounds for name in entry.get("knobs", {}))
    about = f": {group.label}" if suffix else ""
    return [
        draw(f"knob-{k}{suffix}", f"{name}{about}", caption, lambda axes, n=name: _draw_knob(axes, group, n))  # type: ignore[misc]
        for k, name in enumerate(found, 1)
    ]


def _draw_losses(axes: Axes, groups: Sequence[Group]) -> None:
    curves = {id(run): run.losses() for group in groups for run in group.runs}
    top, crossed = top_of(list(curves.values())), False
    for index, group in enumerate(groups):
        for seed, run in enumerate(group.runs):
            curve = curves[id(run)]
            label = group.label if seed == 0 and len(groups) > 1 else None
            line(axes, run.steps, curve, index, label=label, marked=len(groups) > 1)
            crossed |= _mark(axes, run, [min(loss, top - 0.03 * abs(top)) for loss in curve], index)
            [final] = numbers([run.validation.get("loss")])
            if final < top:
                star: dict[str, Any] = {"ms": 8, "mec": INK, "mew": 0.5, "clip_on": False}
                axes.plot(run.steps[-1], final, "*", color=colour(index), zorder=4, **star)
    ends = [numbers([run.validation.get("loss")]) for group in groups for run in group.runs]
    scale_losses(axes, [*curves.values(), *(end for end in ends if end[0] < top)])
    axes.set_ylabel("loss")
    if crossed:
        axes.plot([], [], "x", ms=6, mew=1.6, color=INK, label="not finite, or undone")


def _draw_lrs(axes: Axes, groups: Sequence[Group]) -> None:
    for index, group in enumerate(groups):
        peak = group.runs[0].peak
        label: str | None = f"{group.label}: peak {peak:.2g}" if peak > 0 and not group.fixed else group.label
        label = label if len(groups) > 1 else None
        for run in group.runs:
            bases = run.bases()
            for place, (k, same) in enumerate(distinct(bases).items()):
                # In a report about one configuration colours tell param groups apart.
                hue = index + place if len(groups) == 1 else index
                if len(groups) == 1 and run is group.runs[0] and len(bases) > len(same):
                    label = ", ".join(run.groups[other] for other in same)
                line(axes, run.steps, bases[k], hue, label=label, marked=len(groups) > 1)
                label = None
                _band(axes, run.steps, [entry["values"][k] for entry in run.rounds if k < len(entry["values"])], hue)
                _mark(axes, run, list(bases[k]), hue)
    for place, (steps, row) in enumerate(_beside(groups)):
        label = None if place else "the schedule alone"
        axes.plot(steps, row, color=SOFT, ls=(0, (2, 1.5)), lw=1.1, zorder=1.9, label=label)
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        for first, last, phase in phases(runs[0]):
            axes.axvspan(first, last, color=INK, alpha=SHADES.get(phase, 0.0), lw=0)
            # The first phase is short: its name goes on to the right of it.
            at, ha = (first, "left") if first == 0 else ((first + last) / 2, "center")
            text = axes.text(at, 0.99, plain_label(phase), ha=ha, va="top", fontsize=6.5, color=SOFT)
            text.set_transform(axes.get_xaxis_transform())
            text.set_parse_math(False)
    axes.set_yscale("log")
    if (low := 0.6 * min(run.lowest for run in runs)) < math.inf:
        high = max([value for run in runs for row in (*run.bases(), *run.schedules()) for value in row if value > 0])
        axes.set_ylim(low, high * (high / low) ** 0.2)  # room for names above the curves
    if len(groups) == 1:
        _name_peak(axes, groups[0].runs[0])
    axes.set_ylabel("learning rate")


def _beside(groups: Sequence[Group]) -> list[tuple[list[int], tuple[float, ...]]]:
    """Steps and learning rates of each schedule that no run has followed as it is: such a run is drawn anyway."""
    runs = [run for group in groups for run in group.runs]
    drawn, found = [row for run in runs for row in run.bases()], []
    for run in runs:
        for row in run.schedules():
            if any(value > 0 for value in row) and not any(alike(row, other) for other in drawn):
                drawn.append(row)
                found.append((run.steps, row))
    return found


def _spreads(run: Run) -> bool:
    """Whether its replicas have learning rates of their own."""
    rows = (numbers(row) for entry in run.rounds for row in entry["values"] if row)
    return any(not alike(row, row[:1] * len(row)) for row in rows)


def _name_peak(axes: Axes, run: Run) -> None:
    """The highest learning rate, as a number."""
    points = [(value, step) for row in run.bases() for step, value in zip(run.steps, row, strict=True) if value > 0]
    if points:
        value, step = max(points)
        share = (step - run.steps[0]) / max(run.steps[-1] - run.steps[0], 1)
        side = "left" if share < 0.1 else "right" if share > 0.9 else "center"
        place: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": side, "va": "bottom"}
        axes.annotate(f"{value:.2g}", (step, value), color=colour(0), weight="bold", fontsize=8, **place)


def _draw_knob(axes: Axes, group: Group, name: str) -> None:
    for seed, run in enumerate(group.runs):
        explored = [entry for entry in run.rounds if name in entry.get("knobs", {})]
        steps, style = [entry["step"] for entry in explored], STYLES[seed % len(STYLES)]
        base = numbers([entry["knobs"][name]["base"] for entry in explored])
        label = None if len(group.runs) == 1 else f"seed {run.seed}"
        axes.plot(steps, base, color=colour(0), ls=style, lw=1.5, label=label)
        _band(axes, steps, [entry["knobs"][name]["values"] for entry in explored], 0)
    if name in ("weight_decay", "eps"):  # explored by their logarithm
        axes.set_yscale("log")
    axes.set_ylabel(name)


def _draw_control(axes: Axes, groups: Sequence[Group], key: str) -> None:
    found: list[float] = []
    for index, group in enumerate(groups):
        label: str | None = group.label if len(groups) > 1 else None
        for run in group.runs:
            rounds = [entry for entry in run.rounds if entry["control"].get(key)]
            for values in columns([entry["control"][key] for entry in rounds]):
                found += [value for value in values if math.isfinite(value)]
                steps = [entry["step"] for entry in rounds]
                line(axes, steps, values, index, label=label, marked=len(groups) > 1)
                label = None
    axes.axhline(0.0, color=INK, lw=0.8)
    if key != "z":
        axes.set_ylabel(key)
        return
    axes.axhspan(-NOISE, NOISE, color=INK, alpha=0.05, lw=0)
    low, high = min(found, default=0.0), max(found, default=0.0)
    if max(-low, high) > 15:
        axes.set_yscale("symlog", linthresh=NOISE)
        axes.set_yticks([tick for tick in TICKS if 1.2 * low <= tick <= 1.2 * high], minor=False)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("\N{LEFTWARDS ARROW} raise the rate \N{MIDDLE DOT} lower it \N{RIGHTWARDS ARROW}")


def _draw_distance(axes: Axes, groups: Sequence[Group]) -> None:
    found = []
    for index, group in enumerate(groups):
        for seed, run in enumerate(group.runs):
            values = numbers([entry["distance"] for entry in run.rounds])
            if any(value > 0 for value in values):
                found += [value for value in values if value > 0]
                label = group.label if seed == 0 and len(groups) > 1 else None
                line(axes, run.steps, values, index, label=label, marked=len(groups) > 1)
    if found and max(found) > 50 * statistics.median(found):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_ylabel("distance")


def _band(axes: Axes, steps: Sequence[int], rows: Sequence[Sequence[float | None]], index: int) -> None:
    """From the lowest to the highest replica, where they differ."""
    seen = [[value for value in numbers(row) if math.isfinite(value)] or [math.nan] for row in rows]
    low, high = [min(row) for row in seen], [max(row) for row in seen]
    if len(steps) == len(rows) and not alike(low, high):
        axes.fill_between(steps, low, high, color=colour(index), alpha=0.18, lw=0)


def _mark(axes: Axes, run: Run, values: Sequence[float], index: int) -> bool:
    """A cross at broken rounds and a ring at events, at the last value before them where they have none.

    Returns whether there was a cross.
    """
    broken, steps = breaks(run), run.steps
    for places, marker, fill in ((broken, "x", colour(index)), (_rings(run), "o", "none")):
        for at in places:
            known = [value for value in values[: at + 1] if math.isfinite(value)]
            if known:
                axes.plot(steps[at], known[-1], marker, ms=6, mew=1.4, mec=colour(index), mfc=fill, zorder=5)
    return bool(broken)


def _rings(run: Run) -> list[int]:
    """Indices of rounds with an event that are not marked as broken."""
    broken, happened = breaks(run), {step for step, _ in events(run)}
    return [at for at, step in enumerate(run.steps) if step in happened and at not in broken]
