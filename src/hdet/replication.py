"""What becomes of the replicas' weights: the seam between one model and an ensemble.

:class:`Equal` is the replication of ordinary data-parallel training: every rank holds the same weights, and all there
is to do is to repair a rank that has broken. ``hdet.ensemble`` has the other one, in which replicas differ on purpose
and are averaged; this module, and all that uses it, knows nothing of it but the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import BoolArray, flag_of, mapping_of
from hdet.policy.round import Verdict
from hdet.replicas.sharding import local_tensor
from hdet.signals.base import Signal
from hdet.weights.anchor import tensors_of
from hdet.weights.averaged import Weights, health_of, shape_digest


class Equal:
    """Replicas hold the same weights at any time. Also the base class of replications in which they do not.

    Args:
        optimizer: whose state is repaired with the weights.
        weights: of this replica.

    Attributes:
        differs: whether replicas may differ between means.
        shared_gradients: whether their optimizers see the same gradients.
        index: of this replica among those that differ.
        is_set_aside: whether a block of :meth:`set_aside` runs.
        knob_values: of each knob beside the learning rates, its value at a position.
        finished: whether training has ended, and every knob is at its base value.
    """

    differs = False
    shared_gradients = True
    index = 0
    is_set_aside = False
    knob_values: Mapping[str, Callable[[float], float]] = MappingProxyType({})

    def __init__(self, optimizer: Optimizer, weights: Weights) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.replicas = weights.replicas
        self.finished = False

    # -- a round ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An optimizer step is about to be taken, perhaps the first. Called where replicas differ."""

    def end_round(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        """The round was healthy. Returns the largest distance of a replica from the mean, and which mean was taken."""
        if not verdict.healthy.all():
            self._repair_state(step, verdict.healthy, verdict.quarantined)
            self.weights.repair(self.weights.local().values(), verdict.healthy, alike=True)
        return 0.0, "none"

    def restart(self, step: int, *, last: bool) -> None:
        """The round was undone: all replicas are at the last healthy weights."""

    def next_round(self, multipliers: Sequence[float]) -> None:
        """To the places of the next round, by the multiplier of each param group. Called where replicas differ."""

    def end(self) -> None:
        """Training ends here."""
        self.finished = True

    def _repair_state(self, step: int, healthy: BoolArray, exploded: BoolArray) -> None:
        """Give replicas that are left out the optimizer state of the others, where theirs would break them again."""
        state = state_tensors(self.optimizer)
        mine = [float(shape_digest(state)), float(health_of(state)())]
        shapes, fine = np.moveaxis(self.replicas.gather(mine, step=step), 2, 0)
        fine = (fine > 0).all(axis=1)
        broken, givers = exploded | ~fine, healthy & fine
        if not broken.any():
            return
        if givers.any() and (shapes == shapes[0]).all():
            self.weights.repair(state, givers, alike=self.shared_gradients)
        elif broken[self.replicas.index]:
            reset_state(self.optimizer)

    # -- a mean in mid-round ------------------------------------------------------------------------------------

    def is_mean(self, step: int) -> bool:
        """Whether this replica's weights after ``step`` are the mean of all."""
        return True

    def needs_mean(self, step: int) -> bool:
        """Whether replicas have to meet before training ends at ``step``."""
        return True

    def converge(self, step: int, healthy: BoolArray, signals: Sequence[Signal]) -> None:
        """All replicas go to their mean, in the middle of a round, and stay there. A collective."""

    def set_aside(self) -> AbstractContextManager[None]:
        """This replica's own weights come back after the block."""
        return nullcontext()

    def refuse_inside(self, call: str) -> None:
        """Raise: in a block of :meth:`set_aside`, weights are not those that train."""

    # -- knobs beside the learning rate -------------------------------------------------------------------------

    def write_knobs(self, *, at_base: bool = False) -> None:
        """Give knobs their values, this replica's or the shared ones."""

    def training_at_base(self) -> AbstractContextManager[None]:
        """A block in which knobs that act in training alone are the same on every replica."""
        return nullcontext()

    # -- what replicas compare, and what joins ------------------------------------------------------------------

    def digest(self, shapes: int) -> int:
        """Of what else would be averaged, beside weights of these ``shapes``. Asked for where replicas differ."""
        return shapes

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that join in mid-run train along from where they are."""
        if self.shared_gradients:
            self.weights.warn_if_not_shared()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same names at any time, and in every replication: a run may go on as one of another kind."""
        return {"left_at_mean": False, "outer": {"centre": [], "velocity": []}, "knobs": {}}

    def own_state(self, signal: Signal) -> dict[str, Any]:
        """What this replica alone has seen, for a state that each saves for itself."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError or KeyError where a state cannot be used."""
        flag_of(state["left_at_mean"], "left_at_mean")
        check_outer_state(state["outer"], self.weights.anchored())
        if knobs := mapping_of(state["knobs"], "knobs"):
            raise ValueError(f"knobs must be those of the state, {list(knobs)}, but got []")

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from a state that has been checked."""
        self.finished = False

    def restart_knobs(self, state: Mapping[str, Any]) -> Sequence[tuple[float, float]]:
        """Knobs start from where they did in the state. Returns the bounds of their positions."""
        return ()


# -- the optimizer's state ------------------------------------------------------------------------------------------


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of an optimizer's state, in the order of its parameters."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            found += [local_tensor(state[name]) for name in sorted(state) if isinstance(state[name], Tensor)]
    return found


@torch.no_grad()
def reset_state(optimizer: Optimizer) -> None:
    """As in the first step, in place: compiled and captured steps hold on to these tensors."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if group.get("dampening"):
                state.pop("momentum_buffer", None)  # the first step of SGD makes it without dampening
            for name, value in state.items():
                if isinstance(value, Tensor):
                    first = {"mu_product": 1.0, "sum": group.get("initial_accumulator_value", 0.0)}.get(name, 0.0)
                    local_tensor(value).fill_(first)


def check_outer_state(state: Any, parameters: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """This rank's part of the copies that an outer step had; ValueError or KeyError where they do not fit."""
    state = mapping_of(state, "outer")
    found = {name: tensors_of(state[name], parameters, f"the outer step's {name}") for name in ("centre", "velocity")}
    if found["velocity"] and not found["centre"]:
        raise ValueError("the outer step's centre must have the parameters' shapes; it is of another model")
    return found
