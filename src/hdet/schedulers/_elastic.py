"""What replicas that stay apart cannot have (``outer="elastic"``)."""

from __future__ import annotations

from hdet.replicas.group import Replicas
from hdet.schedulers._common import Common


def check_elastic(common: Common, replicas: Replicas, *, spread: float, compares: bool) -> None:
    """Raise where something needs all replicas at one place after every converge."""
    if common.gradients != "local":
        raise ValueError(
            'outer="elastic" needs replicas that train on gradients of their own: pass gradients="local"; '
            f"got gradients={common.gradients!r}"
        )
    if spread > 0 or compares:
        raise ValueError(
            'outer="elastic" leaves replicas apart, where their losses cannot be compared and rounds cannot start on '
            'the line through an anchor: leave out what spreads, the knobs or signal="loss", or use outer="mean"; '
            f"got spread={spread!r}, knobs={[type(knob).__name__ for knob in common.knobs]}"
        )
    if common.faults.rollback:
        raise ValueError(
            'outer="elastic" cannot undo a round: there is no one place to go back to; leave rollback out, or use '
            f'outer="mean"; got rollback={common.faults.rollback!r}'
        )
    if replicas.parts or not replicas.whole:
        raise ValueError(
            'outer="elastic" needs every replica to hold all parameters, but they are sharded: use outer="mean" or '
            '"nesterov"'
        )
