"""A run in axes of the user's own."""

from __future__ import annotations

import math

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from hdet.reports.run import Run, alike, breaks, distinct, events, numbers, phases

GREY = "0.55"


def plot(run: Run, ax: Axes | None = None) -> Axes:
    """The learning rate over steps, and the loss on a twin of its axes; ``ax`` is where, by default a new figure."""
    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    steps, bases = run.steps, run.bases()
    for place, (k, same) in enumerate(distinct(bases).items()):
        names = "" if len(same) == len(bases) else f" ({', '.join(run.groups[other] for other in same)})"
        # Of the colours of the user's own cycle: the second is the loss's.
        colour = f"C{place if place == 0 else place + 1}"
        ax.plot(steps, bases[k], color=colour, label=_text(f"learning rate{names}"))
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
    loss.plot(steps, run.losses(), color="C1", lw=1, label="loss")
    loss.set_ylabel("loss")
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


def _text(label: str) -> str:
    """A label that matplotlib neither hides nor reads as a formula."""
    return label.replace("$", r"\$")
