"""Generations: rounds so long that replicas over a wide window of one knob show what it does, and the fittest go on.

For what regularises, which costs early in a run and pays off late. ``Explorer(horizon="long")`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdet.checks import whole_of
from hdet.ensemble.controllers.valley import ValleyController
from hdet.ensemble.knobs.knob_set import KnobSet
from hdet.ensemble.options import Averaging
from hdet.ensemble.outer import Mean
from hdet.plan import Plan
from hdet.policy.steering import Panel
from hdet.weights.anchor import tensors_of
from hdet.weights.averaged import Weights

PATIENCE = 0.2
"""Share of the loss that a knob may cost at most early in a run where it regularises, which pays off late."""
SAMPLES = 20
"""At most, of a whole round; the tail has half of them."""


def long_averaging(averaging: Averaging) -> Averaging:
    """The next generation goes on from the fittest, in weights and in the optimizer's state."""
    if type(averaging.make_outer()) is not Mean:
        raise ValueError(
            f'outer must be left out with horizon="long", which goes on from the fittest; got outer={averaging.outer!r}'
        )
    state = "average" if averaging.optimizer_state == "keep" else averaging.optimizer_state
    return replace(averaging, outer="fittest", optimizer_state=state)


def check_long(plan: Plan, knobs: Sequence[Any]) -> None:
    """Raise where replicas could not show over a generation what a knob does."""
    needs = {
        "exactly one knob, and no LearningRate": len(knobs) == 1 and hasattr(knobs[0], "window"),
        "adapt=True of that knob": bool(knobs) and knobs[0].adapt,
        'gradients="local"': plan.members.gradients == "local",
        "probe=, a loss on held-out data": plan.probe is not None,
        "total_steps, at least twice the interval": (plan.total_steps or 0) >= 2 * plan.interval,
        "no controller of yours": plan.adapt.controller is None,
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        raise ValueError(f'horizon="long" needs {"; ".join(missing)}')


def last_decision(plan: Plan) -> int:
    """The last step in which the base value moves: a whole round before the end, or more."""
    assert plan.total_steps is not None
    return (plan.total_steps // plan.interval - 1) * plan.interval


def long_panel(knobs: KnobSet, num_lrs: int) -> Panel:
    """The knob as numbers, with a window as wide as it is to be searched, over which replicas stand evenly."""
    patience = [0.0] * num_lrs + [0.0 if knob.fair else PATIENCE for knob in knobs]
    panel = knobs.panel(ValleyController(patience=patience), balanced=False)
    return replace(panel, spreads=tuple(knob.window for knob in knobs))


class Tail:
    """The mean of this replica's weights over the second half of a round, to be probed in their place.

    One copy of them in the second half of a round, and another while it is looked at.

    Args:
        weights: of this replica.
        interval: steps of a round.
    """

    def __init__(self, weights: Weights, interval: int) -> None:
        self.weights = weights
        self.interval = interval
        self.every = max(1, interval // SAMPLES)
        self.steps = 0
        self._count = 0
        self._sums: dict[int, Tensor] = {}

    @property
    def begun(self) -> bool:
        """Whether the last step was one of the second half."""
        return 2 * self.steps > self.interval

    def before_step(self) -> None:
        """The weights are those after :attr:`steps` steps of the round."""
        if self.steps % self.every == 0 and 2 * self.steps > self.interval:
            self._add()
        self.steps += 1

    @torch.no_grad()
    def _add(self) -> None:
        for key, tensor in self._floating().items():
            if key in self._sums:
                self._sums[key] += tensor
            else:
                self._sums[key] = tensor.clone()
        self._count += 1

    def _floating(self) -> dict[int, Tensor]:
        return {key: t for key, t in self.weights.local().items() if t.is_floating_point()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The mean of the tail, the present weights included, in the place of the weights for the length of a block."""
        self._add()
        with self.weights.set_aside():
            with torch.no_grad():
                for key, tensor in self._floating().items():
                    tensor.copy_(self._sums[key] / self._count)
            yield

    def restart(self, steps: int = 0, count: int = 0, sums: Sequence[Tensor] = ()) -> None:
        """A round begins, or goes on after ``steps``, of which so many are added up in ``sums``."""
        self.steps, self._count = steps, count
        homes = self._floating() if sums else {}
        self._sums = {key: torch.empty_like(t).copy_(s) for (key, t), s in zip(homes.items(), sums, strict=True)}

    def own_state(self) -> dict[str, Any]:
        """What was added up so far."""
        return {"count": self._count, "sums": [self._sums[key] for key in self._floating()]} if self._count else {}

    def check_own(self, state: Mapping[str, Any]) -> None:
        whole_of(state["count"], "count of the tail", 1)
        tensors_of(state["sums"], list(self._floating().values()), "sums of the tail", finite=False)
