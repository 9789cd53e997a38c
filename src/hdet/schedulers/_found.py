"""What a run has found so far."""

from __future__ import annotations

import math

from hdet.engine.rounds import RoundLoop
from hdet.found import Found
from hdet.signals.held_out import HeldOutGradient


def found_by(loop: RoundLoop, total_steps: float) -> Found:
    """The learning rates of a round loop, and what held-out data have shown."""
    groups = loop.optimizer.param_groups
    learns_decay = any(isinstance(each, HeldOutGradient) and each.decay is not None for each in loop.signals)
    return Found(
        tuple(str(group.get("name", f"group{k}")) for k, group in enumerate(groups)),
        tuple(loop.journal.curve.steps),
        tuple(map(tuple, loop.journal.curve.values)),
        None if math.isinf(total_steps) else int(total_steps),
        tuple(float(group["weight_decay"]) for group in groups) if learns_decay else (),
        loop.journal.worse_since,
    )
