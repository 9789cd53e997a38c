"""Weight decay, learned to first order: <gradient of the probe's loss, D>, with D its derivative over the whole run.

No replicas, and nothing apart: the same probes that correct the learning rate say where more, or less, would lead.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from hdet.checks import FloatArray, mapping_of, numbers_of, shown
from hdet.history import KnobRecord
from hdet.notices import tell
from hdet.policy.decayed_mean import DecayedMean
from hdet.replicas.sharding import as_saved, local_tensor
from hdet.signals.dot_products import dot
from hdet.weights.anchor import Anchor, tensors_of

FADE = 0.85
"""Of one probe to the next, as for the learning rate."""
GAIN, LIMIT, DOUBT = 0.1, 0.3, 1.0
"""Of a probe: how far log(weight decay) goes for a significant standard error, how far at most, and what doubt is."""
MAX_SHRINK = 0.1
"""Of the weights in one step: beyond, they are forgotten within ten."""
DECOUPLED, COUPLED = (1e-4, 10.0, 0.1), (1e-6, 1.0, 1e-3)
"""Lowest, highest and lowest first weight decay, beside the gradient (AdamW) and inside it (SGD)."""


class DecayLearner:
    """One factor on the weight decay of all param groups that have one.

    Args:
        optimizer: whose param groups are written to.
        bounds: lowest and highest value of the largest group; default by the optimizer.
        stride, every: of :class:`DecayPath`.
    """

    def __init__(
        self, optimizer: Optimizer, *, bounds: tuple[float, float] | None = None, stride: int = 1, every: int = 1
    ) -> None:
        low, high, first = COUPLED if is_coupled(optimizer) else DECOUPLED
        self.low, self.high = bounds or (low, high)
        self.path = DecayPath(stride=stride, every=every)
        self.slope = DecayedMean(1, FADE)
        self.position = 0.0
        """Of the logarithm, from where it starts."""
        self._optimizer = weakref.ref(optimizer)  # not to keep its memory
        self.starts = [float(group["weight_decay"]) for group in optimizer.param_groups]
        given, first = max(self.starts), min(max(first, self.low), self.high)
        if given == 0:
            self.starts = [first] * len(self.starts)
            tell(f"weight decay is 0 and to be learned: it starts at {first:g}, in every param group")
        elif bounds is None and given < first:  # what it does goes with its size: of a low one little can be told
            self.starts = [start * first / given for start in self.starts]
            tell(f"weight decay is {given:g} and to be learned: it starts at {first:g}, where more can be seen of it")
        if not self.low <= max(self.starts) <= self.high:
            raise ValueError(
                f"weight_decay must start inside [{self.low:g}, {self.high:g}] to be learned, but got {self.starts}; "
                "pass weight_decay=(low, high) with other bounds, or another start"
            )
        self.write()

    @property
    def value(self) -> float:
        """The largest group's."""
        return max(self.starts) * math.exp(self.position)

    def write(self) -> None:
        """Into the param groups; those that joined later have what they were given."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for group, start in zip(optimizer.param_groups, self.starts, strict=False):
            group["weight_decay"] = start * math.exp(self.position)

    def add_step(self, optimizer: Optimizer) -> None:
        self.path.add_step(optimizer)

    def sample(self, optimizer: Optimizer, gradients: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor:
        """<g, D>, this rank's share of it."""
        self.path.settle(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [
            dot(derivative, gradient, self.path.columns[index], shares[index])
            for index, derivative in self.path.displacements(parameters)
            if (gradient := gradients[index]) is not None
        ]
        if not found:
            return torch.zeros(())
        return torch.stack([each.to(found[0].device) for each in found]).sum()

    def learn(self, samples: FloatArray, *, acting: bool) -> None:
        """Move as far as the round's samples are certain; without ``acting`` only remember them."""
        if not np.isfinite(samples).all():  # weights that were not are back by now
            self.path.restart()
            self.slope.forget()
            return
        for sample in samples:
            self.slope.add(np.array([sample]))
            if acting:
                z = float(self.slope.z[0])
                certain = math.copysign(max(abs(z) - DOUBT, 0.0), z)
                self._move(min(max(-GAIN * certain, -LIMIT), LIMIT))
        self.write()

    def _move(self, by: float) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        high = self.high
        for group, start, lag in zip(optimizer.param_groups, self.starts, self.path.lags, strict=False):
            if not isinstance(lr := group["lr"], Tensor) and lr > 0 and start > 0:
                high = min(high, MAX_SHRINK / (lr * lag) * max(self.starts) / start)
        low = math.log(self.low / max(self.starts))
        self.position = max(min(self.position + by, math.log(high / max(self.starts))), low)

    def record(self) -> KnobRecord:
        slope, error = float(self.slope.mean[0]), float(self.slope.error[0])
        return KnobRecord((self.value,), self.value, slope, error, float(self.slope.z[0]))

    # -- state --------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return [p for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The same names and shapes at any time, so that a checkpoint can be read into a run that has not begun."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self.path.settle(optimizer)
        return {
            "starts": list(self.starts),
            "position": self.position,
            "slope": self.slope.state_dict(),
            "path": self.path.state_dict(self._parameters()),
        }

    def check_state(self, state: Any) -> None:
        """ValueError or KeyError where it cannot be used."""
        state = mapping_of(state, "the learned weight decay")
        numbers_of(state["starts"], "starts", len(self.starts), low=0)
        numbers_of([state["position"]], "position", 1, low=-100, high=100)
        self.slope.check_state(state["slope"])
        self.path.check_state(mapping_of(state["path"], "path"), self._parameters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        self.starts, self.position = [float(start) for start in state["starts"]], float(state["position"])
        self.slope.load_state_dict(state["slope"])
        self.path.load_state_dict(state["path"], self._parameters())
        self.write()


def is_coupled(optimizer: Optimizer) -> bool:
    """Whether weight decay is part of the gradient; ValueError where its derivative is not known.

    An optimizer that is not torch's is taken to decay weights beside the gradient.
    """
    if any("weight_decay" not in group for group in optimizer.param_groups):
        raise ValueError(
            'weight_decay="learn" needs an optimizer with weight decay, but the param groups of '
            f"{type(optimizer).__name__} have {shown(sorted(optimizer.param_groups[0]))}"
        )
    if isinstance(optimizer, SGD):
        return True
    beside = isinstance(optimizer, (AdamW, getattr(torch.optim, "Muon", AdamW))) or all(
        group.get("decoupled_weight_decay", False) for group in optimizer.param_groups
    )
    if not beside and type(optimizer).__module__.startswith("torch.optim"):
        raise ValueError(
            'weight_decay="learn" needs a decay beside the gradient (AdamW, or decoupled_weight_decay=True), or SGD: '
            f"inside the gradient of {type(optimizer).__name__} it is divided by the gradient's size, and has another "
            "derivative"
        )
    return False


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
