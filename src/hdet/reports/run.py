"""A run as its records tell it, and the figures that every view of it shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdet.checks import whole
from hdet.history import RoundRecord
from hdet.sinks import as_json

HUGE = 1e100  # matplotlib's arithmetic overflows where numbers are near the largest there is,
TINY = 1e-100  # and underflows where they are near the smallest
SAME = 1e-3  # relative; learning rates this close are one line of a chart
FINISHED = ("done", "diverged")


@dataclass
class Run:
    """A run.

    Attributes:
        name: of its folder, its file or its scheduler.
        rounds: records in JSON's types, the oldest first; null where a number is not finite.
        groups: names of the param groups.
        method: what has set its learning rate, as the subject of a sentence.
        facts: how it was made, for a table.
        seed: None where it is not known.
        num_steps: planned length; 0 where it is not known.
        status: ``done``, ``diverged``, ``unfinished``, or empty where it is not known.
        validation: figures at the end; ``loss`` among them.
        time_s: seconds it took; None where they are not known.
    """

    name: str
    rounds: list[dict[str, Any]]
    groups: Sequence[str]
    method: str = "the run"
    facts: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    num_steps: int = 0
    status: str = ""
    validation: Mapping[str, float | None] = field(default_factory=dict)
    time_s: float | None = None

    @property
    def steps(self) -> list[int]:
        return [entry["step"] for entry in self.rounds]

    @property
    def num_replicas(self) -> int:
        return len(self.rounds[-1]["losses"])

    @property
    def num_missing(self) -> int:
        """Rounds before the first of these records."""
        return max(0, whole(self.rounds[0].get("index")))

    @property
    def learns(self) -> bool:
        """Whether it has moved a learning rate away from its schedule."""
        return any(abs(scale - 1) > SAME for entry in self.rounds for scale in numbers(entry["scales"]))

    @property
    def peak(self) -> float:
        """The highest learning rate at the end of a round; NaN where there is none."""
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

    @property
    def final_loss(self) -> float:
        """On the validation set, or of the last round where there was none; NaN where it is not finite."""
        [loss] = numbers([self.validation["loss"]] if "loss" in self.validation else [mean_loss(self.rounds[-1])])
        return loss

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


def run_of(history: Sequence[RoundRecord], names: Sequence[str], **about: Any) -> Run:
    """The run that a scheduler's history tells; ``about`` are the other attributes."""
    rounds = [as_json(record.as_dict()) for record in history]
    return Run(rounds=rounds, groups=list(names), **about)


def mean_loss(entry: Mapping[str, Any]) -> float:
    """Mean over the replicas that have a finite loss; NaN where none has."""
    seen = [loss for loss in entry["losses"] if loss is not None]
    return sum(seen) / len(seen) if seen else math.nan


def breaks(run: Run) -> list[int]:
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


def events(run: Run) -> list[tuple[int, str]]:
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


def thinned(run: Run, most: int) -> Run:
    """About ``most`` of its rounds, evenly, for a chart; the highest learning rate and all that happened are kept."""
    every = math.ceil(len(run.rounds) / most)
    happened = {step for step, _ in events(run)}
    peaks = [max((v for v in numbers(e["base_values"]) if v > 0), default=0.0) for e in run.rounds]
    kept = {*breaks(run), *range(0, len(run.rounds), every), len(run.rounds) - 1, peaks.index(max(peaks))}
    kept |= {at for at, step in enumerate(run.steps) if step in happened}
    return replace(run, rounds=[run.rounds[at] for at in sorted(kept)]) if every > 1 else run


def of_groups(run: Run, most: int) -> Run:
    """With no more than the first ``most`` of its param groups."""
    rows = ("values", "base_values", "scales")
    if len(run.groups) <= most and all(len(entry[name]) <= most for entry in run.rounds for name in rows):
        return run
    rounds = []
    for entry in run.rounds:
        control = {key: numbers[:most] for key, numbers in entry["control"].items()}
        rounds.append({**entry, **{name: entry[name][:most] for name in rows}, "control": control})
    return replace(run, rounds=rounds, groups=run.groups[:most])


def phases(run: Run) -> list[tuple[int, int, str]]:
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
