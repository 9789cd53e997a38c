"""The first sentence of a report: what was found, against what, and by how much."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from hdet_lab.reports.charts import Group
from hdet_lab.reports.run import FINISHED, Run

SAME_LENGTH = 0.02  # a share: the last round of a run may be cut


def differ_in_length(groups: Sequence[Group]) -> bool:
    """Whether some runs are longer than others, so that their losses at the end say little about each other."""
    lengths = [run.length for group in groups for run in group.runs]
    return min(lengths) < (1 - SAME_LENGTH) * max(lengths)


def headline(groups: Sequence[Group]) -> str:
    """One sentence about all runs of a report, or two; another where they differ in length."""
    if not differ_in_length(groups):
        return _headline(groups)
    return f"{_headline(groups)} These runs differ in length."


def _headline(groups: Sequence[Group]) -> str:
    learned = [group for group in groups if not group.fixed]
    fixed = [group for group in groups if group.fixed]
    if len(groups) == 1:
        return _about_one(groups[0])
    if learned and fixed:
        among = f" It is the best of {len(learned)} configurations that learn." if len(learned) > 1 else ""
        return _against_fixed(min(learned, key=_order), fixed) + among
    best, *others = sorted(groups, key=_order)
    loss, second = _loss(best), _loss(others[0])
    if not math.isfinite(loss):
        return f"None of the {len(groups)} configurations has a finite loss."
    after = f", ahead of {others[0].label} ({_short(second)})" if math.isfinite(second) else ""
    return f"Of {len(groups)} configurations {best.label} has the lowest {_kind(groups)}: {_short(loss)}{after}."


def _about_one(group: Group) -> str:
    run = group.runs[0]
    loss = _loss(group)
    ended = run.status in FINISHED or len(group.runs) > 1
    end = f"the {_kind([group])} {'ended at' if ended else 'is'} {_short(loss, 3)}"
    end = f"{end}{'' if ended else f' at step {run.steps[-1]:,}'}" if math.isfinite(loss) else "the loss is not finite"
    mean = f" (mean over {len(group.runs)} runs)" if len(group.runs) > 1 else ""
    return f"{_found(group)}; {end}{mean}.{_undone(group.runs)}"


def _found(group: Group) -> str:
    """What the runs have found, as a main clause."""
    run = group.runs[0]
    name = run.method[:1].upper() + run.method[1:]
    peak, start = _peak(group), _mean([run.start for run in group.runs])
    if any(run.learns for run in group.runs) and peak > 0:
        return f"{name} found a peak learning rate of {_short(peak, 2)}{_from(peak, start)}"
    first, last = run.rounds[0].get("knobs", {}), run.rounds[-1].get("knobs", {})
    both = [(knob, first[knob]["base"], last[knob]["base"]) for knob in first if knob in last]
    moved = [f"{knob} from {_short(a, 2)} to {_short(b, 2)}" for knob, a, b in both if a is not None and b is not None]
    if moved:
        return f"{name} took {', '.join(moved)}"
    if peak > 0:
        return f"{name} trained at learning rates up to {_short(peak, 2)}, as scheduled"
    return f"{name} trained for {run.steps[-1]:,} steps"


def _from(peak: float, start: float) -> str:
    if not start > 0:
        return ""
    ratio = peak / start
    if 0.95 < ratio < 1.05:
        return ", the schedule's own"
    size = f"{_times(ratio)} times" if ratio > 1 else f"1/{_times(1 / ratio)} of"
    return f", {size} the {_short(start, 2)} it was given"


def _against_fixed(best: Group, fixed: Sequence[Group]) -> str:
    start = _mean([run.start for run in best.runs])
    same = [group for group in fixed if math.isclose(_mean([run.start for run in group.runs]), start, rel_tol=0.02)]
    other = same[0] if same else min(fixed, key=_order)
    where = "the same schedule left as it is" if same else f"the best fixed learning rate ({other.label})"
    # Seeds differ by more than methods do: only those that both have are compared.
    shared = {run.seed for run in best.runs} & {run.seed for run in other.runs}
    if shared:
        best, other = (replace(g, runs=[run for run in g.runs if run.seed in shared]) for g in (best, other))
    kind, loss, against = _kind([best, other]), _loss(best), _loss(other)
    if not math.isfinite(loss):
        return f"{_found(best)}, but has no finite {kind}.{_undone(best.runs)}"
    if not math.isfinite(against):
        return f"{_found(best)}, and ended at a {kind} of {_short(loss)}; {where} broke.{_undone(best.runs)}"
    share = (loss - against) / abs(against) if against else math.nan
    by = f"{_percent(share)} than with" if abs(share) >= 0.0005 else "the same as with"
    many = f" (means over {len(shared)} seeds)" if len(shared) > 1 else "" if shared else " (of other seeds)"
    return (
        f"{_found(best)}. Its {kind} is {by} {where}: {_short(loss)} against {_short(against)}{many}."
        f"{_undone(best.runs)}"
    )


def _percent(share: float) -> str:
    digits = 0 if abs(share) >= 0.1 else 1
    return f"{abs(share):.{digits}%} {'lower' if share < 0 else 'higher'}"


def _undone(runs: Sequence[Run]) -> str:
    count = sum(run.rounds[-1]["num_rollbacks"] for run in runs)
    return "" if not count else " One round was undone." if count == 1 else f" {count} rounds were undone."


def _kind(groups: Sequence[Group]) -> str:
    own = all("loss" in run.validation for group in groups for run in group.runs)
    return "validation loss" if own else "training loss"


def _loss(group: Group) -> float:
    return _mean([run.final_loss for run in group.runs])


def _peak(group: Group) -> float:
    return _mean([run.peak for run in group.runs])


def _order(group: Group) -> float:
    loss = _loss(group)
    return loss if math.isfinite(loss) else math.inf


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 9.95 else f"{ratio:,.0f}"


def _short(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}"
