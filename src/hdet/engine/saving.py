"""A round loop as a state that can be saved, and continued from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdet.checks import numbers_of, whole_of
from hdet.engine.curve import Curve
from hdet.engine.rounds import RoundLoop
from hdet.engine.state import read_round
from hdet.signals.base import Signal
from hdet.signals.update_size import UpdateSize
from hdet.weights.columns import stride_of


def save_rounds(loop: RoundLoop) -> dict[str, Any]:
    """Plain types, and the anchor's tensors, sharded as the weights are; the same on every replica.

    And the same names at any time, so that a checkpoint can be read into the state of a run that has not begun.
    """
    if loop.replicas.count == 1:
        loop.converge(-1)  # alone there is nobody to wait for, so a state is complete at any time
    return {
        **loop.policy.state_dict(),
        **loop.averager.state_dict(),
        "curve": loop.journal.curve.state_dict(),
        "worse_since": loop.journal.worse_since,
        "lowest": list(loop.journal.lowest or ()),
        "losses": loop.tally.state_dict(),
        "num_ranks": loop.replicas.count,
        "signals": {signal.name: signal.state_dict() | _own(loop, signal) for signal in loop.signals},
        "joined": list(loop.values.joined),
        "knobs": loop.knobs.starts(),
    }


def _own(loop: RoundLoop, signal: Signal) -> dict[str, Any]:
    own = signal.own_state() if loop.apart and loop.place.has_own else {}
    return {"own": own} if own else {}


def load_rounds(loop: RoundLoop, state: Mapping[str, Any], *, step: int) -> None:
    """Continue from ``state``; on another number of replicas with a new spread around the same base values."""
    # All is checked here, before anything has changed; nothing below may fail.
    loop.weights.reshard()
    parameters = loop.weights.anchored()
    saved = read_round(state, parameters, loop.averager.anchor, loop.signals, loop.tally)
    loop.averager.outer.check_state(state["outer"], parameters)
    starts = loop.knobs.check_starts(state["knobs"])
    curve = Curve.check_state(state["curve"])
    worse = state.get("worse_since")  # older states have none
    worse = None if worse is None else whole_of(worse, "worse_since")
    lowest = numbers_of(state["lowest"], "lowest", 3).tolist() if state.get("lowest") else []
    loop.policy.load_state_dict(state)  # checks everything before it changes anything
    if loop.policy.level is not None and not any(isinstance(signal, UpdateSize) for signal in loop.signals):
        # Made around a schedule that had been loaded already, or without a level: the state has one.
        num_ranks = loop.replicas.count * loop.replicas.num_parts
        loop.signals += (UpdateSize(num_ranks=num_ranks, stride=stride_of(None, loop.optimizer)),)
    loop.knobs.restart(starts)
    loop.steering.set_bounds(loop.knobs.bounds())
    loop.reopen()
    loop.averager.load_state_dict(state, saved.anchor, loop.values.multipliers(), step=step)
    loop.upcoming = step + 1
    loop.journal.curve.load(curve)
    loop.journal.worse_since = worse
    loop.journal.lowest = (int(lowest[0]), lowest[1], lowest[2]) if lowest else None
    loop.values.set_joined(saved.joined)
    loop.tally.load(saved.losses)
    loop.journal.resumed_from = saved.num_ranks if saved.num_ranks != loop.replicas.count else None
    for signal in loop.signals:
        signal.forget()
        if signal.name in saved.signals:
            alike = saved.num_ranks == loop.replicas.count  # or its values were others
            own: dict[str, Any] = {} if alike else {"own": {}}
            signal.load_state_dict({**saved.signals[signal.name], **own})
    loop.values.update()
