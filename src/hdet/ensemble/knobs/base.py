"""What a knob is: where its value is written, and in which space it spreads and moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import is_flag, number, require, require_one_of, shown

Space = Literal["linear", "log", "logit"]
Acts = Literal["update", "forward", "training"]

TO_SPACE: dict[str, Callable[[float], float]] = {
    "linear": lambda value: value,
    "log": lambda value: math.log(value) if value > 0 else -math.inf,
    "logit": lambda value: _logit(value),
}
FROM_SPACE: dict[str, Callable[[float], float]] = {
    "linear": lambda place: place,
    "log": math.exp,
    "logit": lambda place: 1 / (1 + math.exp(-place)),
}


WINDOWS: dict[Space, float] = {"linear": 0.5, "log": 2.0, "logit": 2.0}


class Knob:
    """Any scalar, by a getter and a setter.

    Args:
        name: in the history; no two knobs of a run may share one.
        get: returns the present value, a number or a one-element tensor.
        set: takes the value a replica trains with.
        low, high: the value stays inside, the replicas' own included. Both must be finite in the linear space.
        space: ``"log"`` for what is positive and known by its order of magnitude, ``"logit"`` for what lies between 0
            and 1 and matters near either end, ``"linear"`` for the rest.
        spread: how far the outermost replicas are from the base value, as a position: 0.1 is about 10% in the log
            space, and a tenth of ``high - low`` in the linear one.
        adapt: whether the base value moves; otherwise it is only explored.
        acts: what the knob changes. ``"update"``: how a gradient moves the weights. ``"forward"``: the model's output,
            in evaluation too. ``"training"``: loss or output in training only, as regularisers do.
        fair: whether training losses of replicas that differ in the knob can be compared; default for all but
            ``acts="training"``.
        check_signal: whether to refuse gradients and signals that can tell nothing about this knob.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[], float | Tensor],
        set: Callable[[float], object],  # noqa: A002
        *,
        low: float = -math.inf,
        high: float = math.inf,
        space: Space = "linear",
        spread: float = 0.1,
        adapt: bool = True,
        acts: Acts = "training",
        fair: bool | None = None,
        check_signal: bool = True,
    ) -> None:
        require(isinstance(name, str), "name", "a string", name)
        for which, function in (("get", get), ("set", set)):
            if not callable(function):
                raise TypeError(f"{which} of {name} must be a function, but got {which}={shown(function)}")
        of = f" of {name}"
        require_one_of("space", space, "linear", "log", "logit", of=of)
        require_one_of("acts", acts, "update", "forward", "training", of=of)
        require(0 <= number(spread) < 1, "spread", "in [0, 1)", spread, of=of)
        for which, flag in (("adapt", adapt), ("check_signal", check_signal)):
            require(is_flag(flag), which, "True or False", flag, of=of)
        require(fair is None or is_flag(fair), "fair", "None, True or False", fair, of=of)
        require(_is_bound(low), "low", "a number", low, of=of)
        require(_is_bound(high), "high", "a number", high, of=of)
        if not low < high:
            raise ValueError(f"low of {name} must be below high, but got low={low!r} and high={high!r}")
        if space == "linear" and not math.isfinite(float(high) - float(low)):
            raise ValueError(
                f"low and high of {name} must be finite in the linear space, where spread and moves are shares of "
                f"their distance, but got low={low!r} and high={high!r}"
            )
        self.name = name
        self.low, self.high, self.space, self.spread, self.adapt = low, high, space, spread, adapt
        self.acts = acts
        self.fair = acts != "training" if fair is None else fair
        self.check_signal = check_signal
        self._get, self._set = get, set
        self.window = WINDOWS[space]
        """Half of what a long horizon searches at first, as a position."""
        self.start = math.nan
        """The value at position 0; known once the knob is bound."""

    def add_groups(self) -> None:
        """Take up param groups that were added to the optimizer, with what they were given as their start."""

    def read(self) -> float | Tensor:
        """The present value, as it is kept where it is written."""
        return self._get()

    def bind(self, optimizer: Optimizer) -> None:
        """Take the present value as the start."""
        found = self.read()
        value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
        start = number(value)
        if math.isnan(start) and not isinstance(value, float):
            raise ValueError(f"{self.name} must start at a number, but got {shown(found)}")
        self.check_start(start)
        self.start = start

    def check_start(self, start: float) -> None:
        """Raise ValueError where the knob could not move from ``start``."""
        if not self.low <= start <= self.high:
            raise ValueError(
                f"{self.name} must start inside [{self.low:g}, {self.high:g}], but got {start!r}; "
                "pass other bounds, or another start"
            )
        if not math.isfinite(TO_SPACE[self.space](start)):
            raise ValueError(
                f"{self.name} must start at a positive number{' below 1' if self.space == 'logit' else ''} in the "
                f'{self.space} space, but got {start!r}; start elsewhere, or pass space="linear" with low= and high='
            )

    @property
    def unit(self) -> float:
        return self.high - self.low if self.space == "linear" else 1.0

    def position_bounds(self) -> tuple[float, float]:
        """The positions of low and high."""
        here = TO_SPACE[self.space](self.start)
        low, high = (TO_SPACE[self.space](value) for value in (self.low, self.high))
        return (low - here) / self.unit, (high - here) / self.unit

    def value_at(self, position: float) -> float:
        low, high = self.position_bounds()
        position = min(max(position, low), high)
        for place, exact in ((0.0, self.start), (low, self.low), (high, self.high)):
            if abs(position - place) < 1e-12:
                return exact  # not what rounding makes of it
        value = FROM_SPACE[self.space](TO_SPACE[self.space](self.start) + self.unit * position)
        return min(max(value, self.low), self.high)

    def write(self, position: float) -> None:
        self._set(self.value_at(position))

    def facts(self) -> str:
        """What all replicas must agree about."""
        return (
            f"{type(self).__name__}(start={self.start!r}, low={self.low!r}, high={self.high!r}, space={self.space}, "
            f"spread={self.spread!r}, adapt={self.adapt})"
        )

    def check(self, *, gradients: str, has_probe: bool) -> None:
        """Refuse a combination in which no difference between replicas could be this knob's doing."""
        if not (self.check_signal and self.adapt):
            return
        need = None
        if not self.fair and not has_probe:
            need = "its training loss prefers no regularisation whatever that does to held-out data"
        elif self.acts == "training" and gradients == "shared":
            need = "with shared gradients the replicas' weights do not differ, and a probe would see no difference"
        if need is not None:
            works = 'gradients="local" and probe=' if self.acts == "training" else "probe="
            raise ValueError(
                f"{self.name} cannot be adapted with gradients={gradients!r} and "
                f"{'a probe' if has_probe else 'the training loss'}: {need}. Use {works}, pass adapt=False to explore "
                "it only, or check_signal=False to go ahead all the same"
            )


def replaced(old: Any, value: float) -> Any:
    """``value`` in the place of ``old``; a tensor keeps its identity, for compiled and captured steps."""
    if isinstance(old, Tensor):
        with torch.no_grad():
            return old.fill_(value)
    return value


def write_attribute(owner: object, attribute: str, value: float) -> None:
    """Set an attribute; a tensor is written in place."""
    old = getattr(owner, attribute)
    if isinstance(old, Tensor):
        replaced(old, value)
    else:
        setattr(owner, attribute, value)


def _is_bound(value: Any) -> bool:
    return not math.isnan(number(value)) or (isinstance(value, float) and math.isinf(value))


def _logit(value: float) -> float:
    if value <= 0:
        return -math.inf
    return math.inf if value >= 1 else math.log(value / (1 - value))
