"""The derivative of the weights over log(weight decay), along the whole run and to first order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hdet.checks import numbers_of
from hdet.replicas.sharding import as_saved, local_tensor
from hdet.weights.anchor import Anchor
from hdet.weights.saved import tensors_of


class DecayPath:
    """D <- (1 - lr wd) D - lr wd theta in every step: how far the weights go where the weight decay is e times higher.

    To first order: what the way so far has changed in later gradients is left out, as it is for the learning rate. With
    momentum, a decay that is part of the gradient acts for 1 / (1 - momentum) steps; D has all of it at once.

    Args:
        stride: keep one entry in so many, as an anchor does.
        every: steps between two updates, each of which takes the learning rates since the last together.
    """

    def __init__(self, *, stride: int = 1, every: int = 1) -> None:
        self._kept = Anchor(stride=stride)
        self.every = every
        self.lags: list[float] = []
        """By param group: what momentum makes of a decay that has acted so long."""
        self.num_steps = 0
        self._shrinks: list[float | Tensor] = []

    @property
    def copies(self) -> list[Tensor]:
        """What is kept of D, by parameter; nothing where it is 0."""
        return self._kept.copies

    def restart(self) -> None:
        """D = 0: what there was is no longer the way to these weights."""
        self._kept = Anchor(stride=self._kept.stride)
        self.lags, self.num_steps, self._shrinks = [], 0, []

    @torch.no_grad()
    def add_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to take a step. On the device; nothing waits."""
        groups = optimizer.param_groups
        self._make_room_for(groups)
        for k, group in enumerate(groups):
            self.lags[k] = lag_after(self.lags[k], group, coupled=isinstance(optimizer, SGD))
            self._shrinks[k] = self._shrinks[k] + group["lr"] * group["weight_decay"] * self.lags[k]
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.settle(optimizer)

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Bring D up to the steps that are not in it yet."""
        groups = optimizer.param_groups
        self._make_room_for(groups)
        parameters = [p for group in groups for p in group["params"]]
        self._make_room(parameters)
        kept = self._kept.kept(map(local_tensor, parameters), self._kept.columns)
        start = 0
        for group, shrink in zip(groups, self._shrinks, strict=True):
            rows = slice(start, start + len(group["params"]))
            start = rows.stop
            if rows.stop > rows.start and not (isinstance(shrink, float) and shrink == 0):
                # D - s (D + theta)
                moved = torch._foreach_add(
                    self.copies[rows], [p.to(d.dtype) for p, d in zip(kept[rows], self.copies[rows], strict=True)]
                )
                torch._foreach_mul_(moved, shrink)
                torch._foreach_sub_(self.copies[rows], moved)
        self._shrinks = [0.0] * len(groups)

    def _make_room_for(self, groups: Sequence[Any]) -> None:
        self.lags += [0.0] * (len(groups) - len(self.lags))
        self._shrinks += [0.0] * (len(groups) - len(self._shrinks))

    def _make_room(self, parameters: Sequence[Tensor]) -> None:
        have = len(self.copies)
        if have < len(parameters):
            self._kept.add(parameters[have:])
            for copy in self.copies[have:]:
                copy.zero_()

    def displacements(self, parameters: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """(index, D) of each parameter, as far as there is one."""
        return list(enumerate(self.copies[: len(parameters)]))

    @property
    def columns(self) -> list[Any]:
        """What each copy holds; None for all of its parameter."""
        return self._kept.columns

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Of a path that has been settled; tensors as they are sharded."""
        columns = self._kept.columns_of(parameters)
        found = zip(self.copies, parameters, columns, strict=False)
        copies = [as_saved(copy, p, None if c is None else c.shape) for copy, p, c in found]
        return {"copies": copies, "lags": list(self.lags), "num_steps": self.num_steps}

    def check_state(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part; ValueError or KeyError where it cannot be used."""
        numbers_of(state["lags"], "lags", None, low=0)
        columns = self._kept.columns_of(parameters)
        return tensors_of(state["copies"], parameters, "copies of the decay path", columns=columns)

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Continue from a state that has been checked."""
        found = self.check_state(state, parameters)
        self.restart()
        if found:
            self._make_room(parameters)
            for copy, value in zip(self.copies, found, strict=True):
                copy.copy_(value)
        self.lags, self.num_steps = [float(lag) for lag in state["lags"]], int(state["num_steps"])


def lag_after(lag: float, group: Mapping[str, Any], *, coupled: bool) -> float:
    """How many steps' worth of decay one step applies: momentum repeats a decay that is part of the gradient."""
    momentum = float(group.get("momentum", 0.0)) if coupled else 0.0
    if momentum == 0:
        return 1.0
    fresh = 1 - float(group.get("dampening", 0.0))
    nesterov = bool(group.get("nesterov", False))
    if nesterov:  # its step is fresh + momentum * buffer; `lag` is of the whole step
        buffer = (lag - 1) / momentum if lag else 0.0
        return 1 + momentum * (momentum * buffer + 1)
    return momentum * lag + fresh if lag else 1.0
