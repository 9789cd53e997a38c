"""What to use on a task of the user's own, from the runs of the benchmark on it: a table, and one sentence."""

from __future__ import annotations

import math

from hdet_lab.bench.records import Record
from hdet_lab.bench.suite import ADAM_DEFAULT, CHOSEN, NOTHING_SET
from hdet_lab.bench.summary import COMPUTE, LABELS, TaskSummary, compare, percent, runs, summarize

FAR = 0.05
"""Share above the best of the grid, beyond which a method with one run is not advised."""


def advise(record: Record) -> list[str]:
    """Lines of a table, and the sentence."""
    losses = [run["loss"] for found in record.methods.values() for run in found if math.isfinite(run["loss"])]
    if not record.methods.get("grid"):
        return ["No advice: the grid was not run, with which methods are compared."]
    if not losses or min(losses) <= 0:
        return ["No advice: methods are compared by ratios, for which the validation loss must be above 0."]
    task = summarize(record)
    if task is None or not task.seeds or not all(map(math.isfinite, task.best)):
        return ["No advice: there is no seed that all methods have, with a finite loss of the grid."]
    return [*_table(task), "", _sentence(task)]


def _table(task: TaskSummary) -> list[str]:
    shape, lr = task.record.best()
    rows = [(0.0, f"best of the grid ({shape}, {lr:g})", str(_grid_runs(task)))]
    rows += [
        (task.share(method), _label(method), COMPUTE.get(method, "1" if method in NOTHING_SET else "grid"))
        for method in LABELS
        if method in task.excess
    ]
    width = max(len(label) for _, label, _ in rows)
    head = f"{'method':{width}}  runs  validation loss above the best of the grid"
    return [head, *(f"{label:{width}}  {num:>4}  {percent(share)}" for share, label, num in sorted(rows))]


def _sentence(task: TaskSummary) -> str:
    shares = {method: task.share(method) for method in NOTHING_SET if method in task.excess}
    if not shares:
        return "No advice: no method with one run was run."
    chosen = min(shares, key=lambda method: shares[method])
    if "autolr" in shares and chosen != "autolr" and len(task.seeds) > 1 and compare(task, "autolr", chosen) == 0:
        chosen = "autolr"  # level, and nothing was chosen for it on other tasks
    shape, lr = task.record.best()
    best = f"the best of {_grid_runs(task)} fixed runs ({shape}, {lr:g})"
    where = f"{task.record.steps} steps, {len(task.seeds)} seed{'s' if len(task.seeds) > 1 else ''}"
    if not shares[chosen] <= FAR:
        return (
            f"Search for the learning rate: {best} is ahead of every method with one run, of which the nearest, "
            f"{_label(chosen)}, is {percent(shares[chosen])} ({where})."
        )
    num = task.worth(chosen)
    worth = (
        f"a random search needs {runs(num)} runs for that" if math.isfinite(num) else "no random search reaches that"
    )
    mine = shares.get("autolr", math.inf)
    other = f"AutoLR is {percent(mine)}" if math.isfinite(mine) else "AutoLR broke"
    other = "" if chosen == "autolr" or "autolr" not in shares else f"; {other}"
    return f"Use {_label(chosen)}: {percent(shares[chosen])} against {best}, and {worth}{other} ({where})."


def _label(method: str) -> str:
    at = {"adam": ADAM_DEFAULT, **CHOSEN}.get(method)
    return LABELS[method] if at is None else f"{LABELS[method]} ({at[0]}, {at[1]:g})"


def _grid_runs(task: TaskSummary) -> int:
    return len(task.record.losses("grid"))
