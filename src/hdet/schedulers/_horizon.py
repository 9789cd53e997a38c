"""A long horizon: rounds are generations of the run, in which replicas over a wide window show what a knob does."""

from __future__ import annotations

from dataclasses import replace

from hdet.controllers.valley import ValleyController
from hdet.knobs.knob_set import KnobSet
from hdet.options import Averaging
from hdet.policy.panel import Panel
from hdet.schedulers._common import Common

PATIENCE = 0.2
"""Share of the loss that a knob may cost at most early in a run where it regularises, which pays off late."""


def long_averaging(averaging: Averaging) -> Averaging:
    """The next generation goes on from the fittest, in weights and in the optimizer's state."""
    if averaging.make_outer().kind != "mean":
        raise ValueError(
            f'outer must be left out with horizon="long", which goes on from the fittest; got outer={averaging.outer!r}'
        )
    state = "average" if averaging.optimizer_state == "keep" else averaging.optimizer_state
    return replace(averaging, outer="fittest", optimizer_state=state)


def check_long(common: Common) -> None:
    """Raise where replicas could not show over a generation what a knob does."""
    needs = {
        "exactly one knob, and no LearningRate": len(common.knobs) == 1 and hasattr(common.knobs[0], "window"),
        "adapt=True of that knob": bool(common.knobs) and common.knobs[0].adapt,
        'gradients="local"': common.gradients == "local",
        "probe=, a loss on held-out data": common.probe is not None,
        "total_steps, at least twice the interval": (common.total_steps or 0) >= 2 * common.interval,
        "no controller of yours": common.adapt.controller is None,
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        raise ValueError(f'horizon="long" needs {"; ".join(missing)}')


def last_decision(common: Common) -> int:
    """The last step in which the base value moves: a whole round before the end, or more."""
    assert common.total_steps is not None
    return (common.total_steps // common.interval - 1) * common.interval


def long_panel(knobs: KnobSet, num_lrs: int) -> Panel:
    """The knob as numbers, with a window as wide as it is to be searched, over which replicas stand evenly."""
    patience = [0.0] * num_lrs + [0.0 if knob.fair else PATIENCE for knob in knobs]
    panel = knobs.panel(ValleyController(patience=patience), balanced=False)
    return replace(panel, spreads=tuple(knob.window for knob in knobs))
