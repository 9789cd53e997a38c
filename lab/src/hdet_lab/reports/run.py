"""A run of a report: its curves, how it was made, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdet.history import RoundRecord
from hdet.plot import Curves, breaks, events, mean_loss, numbers
from hdet.sinks import as_json

FINISHED = ("done", "diverged")


@dataclass
class Run(Curves):
    """A run of a report.

    Attributes:
        method: what has set its learning rate, as the subject of a sentence.
        facts: how it was made, for a table.
        seed: None where it is not known.
        validation: figures at the end; ``loss`` among them.
        time_s: seconds it took; None where they are not known.
    """

    method: str = "the run"
    facts: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    validation: Mapping[str, float | None] = field(default_factory=dict)
    time_s: float | None = None

    @property
    def length(self) -> int:
        """Steps, those that are still to come included where they are known."""
        return self.num_steps or self.steps[-1]

    @property
    def num_replicas(self) -> int:
        return len(self.rounds[-1]["losses"])

    @property
    def final_loss(self) -> float:
        """On the validation set, or of the last round where there was none; NaN where it is not finite."""
        [loss] = numbers([self.validation["loss"]] if "loss" in self.validation else [mean_loss(self.rounds[-1])])
        return loss


def run_of(history: Sequence[RoundRecord], names: Sequence[str], **about: Any) -> Run:
    """The run that a scheduler's history tells; ``about`` are the other attributes."""
    rounds = [as_json(record.as_dict()) for record in history]
    return Run(rounds=rounds, groups=list(names), **about)


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
