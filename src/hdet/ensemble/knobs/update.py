"""Knobs of the update: fields of the optimizer's param groups, and the norm to which gradients are clipped."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import is_flag, number, require, require_one_of
from hdet.ensemble.knobs.base import FROM_SPACE, TO_SPACE, Knob, replaced


class _GroupKnob(Knob):
    """A field of the optimizer's param groups. Groups keep their ratios; those where it is 0 stay at 0."""

    field: str

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, self._read, self._write, **settings)
        # Weak: a knob holds methods of its own, and would keep the optimizer and its memory until the next gc.
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._values: list[float] = []

    def bind(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        values = [self._read_group(group) for group in optimizer.param_groups]
        first = next((v for v in values if v), 0.0)
        if first == 0:
            raise ValueError(
                f"{self.name} must be above 0 in at least one param group to be explored, but got {values} in "
                f"{type(optimizer).__name__}"
            )
        self._values, self._first = values, first
        super().bind(optimizer)

    def add_groups(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        joined = optimizer.param_groups[len(self._values) :]
        self._values += [self._read_group(group) for group in joined]

    def _read_group(self, group: dict[str, Any]) -> float:
        if self.field not in group:
            raise ValueError(
                f"{self.name} must be a setting of the optimizer, but its param groups have {sorted(group)}"
            )
        return float(group[self.field])

    def _groups(self) -> list[tuple[dict[str, Any], float]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return list(zip(optimizer.param_groups, self._values, strict=False))

    def _read(self) -> float:
        return next(self._read_group(group) for group, own in self._groups() if own)

    def _write(self, value: float) -> None:
        for group, own in self._groups():
            group[self.field] = replaced(group[self.field], self._moved(own, value))

    def _moved(self, own: float, value: float) -> float:
        # As far in the knob's space as the first group, which keeps the ratios of what spreads in the log space.
        if own in (0.0, self._first) or value == self._first:
            return value if own == self._first else own
        to = TO_SPACE[self.space]
        return min(FROM_SPACE[self.space](to(own) + to(value) - to(self._first)), max(self.high, own))


class LearningRate:
    """The learning rate, as a knob of an Explorer; AutoLR and OneCycleAutoLR have it already.

    Args:
        spread: alpha of Eq. 1.
        groups: one knob for all param groups (``"together"``), or one for ``"each"``.
        adapt: whether it moves.
    """

    def __init__(
        self, *, spread: float = 0.1, groups: Literal["together", "each"] = "together", adapt: bool = True
    ) -> None:
        of = " of learning_rate"
        require(0 <= number(spread) < 1, "spread", "in [0, 1)", spread, of=of)
        require_one_of("groups", groups, "together", "each", of=of)
        require(is_flag(adapt), "adapt", "True or False", adapt, of=of)
        self.spread, self.groups, self.adapt = spread, groups, adapt


class WeightDecay(_GroupKnob):
    """``weight_decay`` of the param groups that have one. Needs a probe: the training loss prefers none."""

    field = "weight_decay"

    def __init__(
        self, *, low: float = 1e-6, high: float = 10.0, spread: float = 0.3, adapt: bool = True,
        check_signal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            "weight_decay", low=low, high=high, space="log", spread=spread, adapt=adapt, acts="update", fair=False,
            check_signal=check_signal,
        )  # fmt: skip
        self.window = 4.0  # it is known less well than other settings


class Epsilon(_GroupKnob):
    """``eps`` of Adam and its relatives."""

    field = "eps"

    def __init__(
        self, *, low: float = 1e-12, high: float = 1e-2, spread: float = 0.5, adapt: bool = True
    ) -> None:  # fmt: skip
        super().__init__("eps", low=low, high=high, space="log", spread=spread, adapt=adapt, acts="update")


class Momentum(_GroupKnob):
    """``momentum`` of SGD, or the first of Adam's ``betas``."""

    field = "momentum"
    index = 0

    def __init__(
        self, *, low: float = 0.1, high: float = 0.999, spread: float = 0.2, adapt: bool = True, name: str = "momentum"
    ) -> None:
        super().__init__(name, low=low, high=high, space="logit", spread=spread, adapt=adapt, acts="update")

    def _read_group(self, group: dict[str, Any]) -> float:
        return float(group["betas"][self.index]) if "betas" in group else super()._read_group(group)

    def _write(self, value: float) -> None:
        for group, own in self._groups():
            if "betas" in group:
                betas = list(group["betas"])
                betas[self.index] = replaced(betas[self.index], self._moved(own, value))
                group["betas"] = tuple(betas)
            else:
                group["momentum"] = replaced(group["momentum"], self._moved(own, value))


class Beta2(Momentum):
    """The second of Adam's ``betas``."""

    index = 1

    def __init__(self, *, low: float = 0.5, high: float = 0.99999, spread: float = 0.3, adapt: bool = True) -> None:
        super().__init__(low=low, high=high, spread=spread, adapt=adapt, name="beta2")

    def bind(self, optimizer: Optimizer) -> None:
        if any("betas" not in group for group in optimizer.param_groups):
            raise ValueError(f"beta2 is a setting of Adam and its relatives, but got {type(optimizer).__name__}")
        super().bind(optimizer)


class ClipNorm(Knob):
    """The norm to which gradients are clipped. Call :meth:`clip_` where ``clip_grad_norm_`` stood.

    Args:
        value: to start with.
        low, high, spread, adapt: as for every knob.
    """

    def __init__(
        self, value: float, *, low: float = 1e-3, high: float = 1e3, spread: float = 0.2, adapt: bool = True
    ) -> None:
        require(not math.isnan(number(value)), "value", "a finite number", value, of=" of clip_norm")
        self.value = float(value)

        def write(new: float) -> None:
            self.value = new

        super().__init__(
            "clip_norm", lambda: self.value, write, low=low, high=high, space="log", spread=spread, adapt=adapt,
            acts="update",
        )  # fmt: skip

    def clip_(self, parameters: Iterable[Tensor]) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` at the present value."""
        return torch.nn.utils.clip_grad_norm_(parameters, self.value)
