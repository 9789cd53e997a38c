"""A scheduler in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hdet.engine.rounds import RoundLoop

if TYPE_CHECKING:
    from hdet.schedulers._base import RoundScheduler


def facts_of(scheduler: RoundScheduler, loop: RoundLoop) -> Iterator[str]:
    """What it is doing, from its schedule to the last thing that happened to the run."""
    schedule, total = getattr(scheduler, "schedule", None), getattr(scheduler, "total_steps", None)
    if schedule is not None:
        yield type(schedule).__name__
    yield f"step {scheduler.last_epoch}" + (f" of {total}" if total is not None and total < float("inf") else "")
    yield f"round {loop.steering.round_index}"
    records = loop.history
    phase = records[-1].phase if records else ""
    if phase := "finished" if loop.finished else phase:
        yield phase
    if not loop.active:
        yield "one replica, nothing to learn from"
    scales = loop.steering.scales[: loop.steering.num_lrs]
    yield "scale " + " ".join(f"{scale:.3g}" for scale in scales)
    lrs = dict.fromkeys(f"{float(group['lr']):.3g}" for group in scheduler.optimizer.param_groups)
    yield "lr " + " ".join(lrs)
    if records and "z" in records[-1].control:
        yield "z " + " ".join(f"{z:.2g}" for z in records[-1].control["z"])
    for knob, record in records[-1].knobs.items() if records else ():
        yield f"{knob} {record.base:.3g}"
    if event := next((record.events[-1] for record in reversed(records) if record.events), ""):
        yield f"last event: {event}"
