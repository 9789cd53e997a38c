"""Knobs: the scalars that replicas explore, where each is written, and in which space it spreads and moves.

A knob stands at a *position*, 0 where it starts, counted in units of its space: natural logarithms (``log``), log-odds
(``logit``), or widths of its range (``linear``). Spread, multipliers and controllers see positions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Space = Literal["linear", "log", "logit"]
Acts = Literal["update", "forward", "training"]

_TO_SPACE: dict[str, Callable[[float], float]] = {
    "linear": lambda value: value,
    "log": lambda value: math.log(value) if value > 0 else -math.inf,
    "logit": lambda value: _logit(value),
}
_FROM_SPACE: dict[str, Callable[[float], float]] = {
    "linear": lambda place: place,
    "log": math.exp,
    "logit": lambda place: 1 / (1 + math.exp(-place)),
}


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
        if space not in _TO_SPACE:
            raise ValueError(f'space of {name} must be one of "linear", "log", "logit", but got space={space!r}')
        if acts not in ("update", "forward", "training"):
            raise ValueError(f'acts of {name} must be one of "update", "forward", "training", but got acts={acts!r}')
        if not 0 <= spread < 1:
            raise ValueError(f"spread of {name} must be in [0, 1), but got spread={spread!r}")
        if not low < high:
            raise ValueError(f"low of {name} must be below high, but got low={low!r} and high={high!r}")
        if space == "linear" and not (math.isfinite(low) and math.isfinite(high)):
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
        self.start = math.nan
        """The value at position 0; known once the knob is bound."""

    def bind(self, optimizer: Optimizer) -> None:
        """Meet the optimizer, and take the present value as the start."""
        start = float(self._get())
        self.check_start(start)
        self.start = start

    def check_start(self, start: float) -> None:
        """Raise ValueError where the knob could not move from ``start``."""
        if not self.low <= start <= self.high:
            raise ValueError(
                f"{self.name} must start inside [{self.low:g}, {self.high:g}], but got {start!r}; "
                "pass other bounds, or another start"
            )
        if not math.isfinite(_TO_SPACE[self.space](start)):
            raise ValueError(
                f"{self.name} must start at a positive number{' below 1' if self.space == 'logit' else ''} in the "
                f'{self.space} space, but got {start!r}; start elsewhere, or pass space="linear" with low= and high='
            )

    @property
    def unit(self) -> float:
        return self.high - self.low if self.space == "linear" else 1.0

    def position_bounds(self) -> tuple[float, float]:
        """The positions of low and high."""
        here = _TO_SPACE[self.space](self.start)
        low, high = (_TO_SPACE[self.space](value) for value in (self.low, self.high))
        return (low - here) / self.unit, (high - here) / self.unit

    def value_at(self, position: float) -> float:
        low, high = self.position_bounds()
        position = min(max(position, low), high)
        for place, exact in ((0.0, self.start), (low, self.low), (high, self.high)):
            if abs(position - place) < 1e-12:
                return exact  # not what rounding makes of it
        value = _FROM_SPACE[self.space](_TO_SPACE[self.space](self.start) + self.unit * position)
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


class _GroupKnob(Knob):
    """A field of the optimizer's param groups. Groups keep their ratios; those where it is 0 stay at 0."""

    field: str

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, self._read, self._write, **settings)
        self._optimizer: Optimizer | None = None
        self._values: list[float] = []

    def bind(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        values = [self._read_group(group) for group in optimizer.param_groups]
        first = next((v for v in values if v), 0.0)
        if first == 0:
            raise ValueError(
                f"{self.name} must be above 0 in at least one param group to be explored, but got {values} in "
                f"{type(optimizer).__name__}"
            )
        self._values, self._first = values, first
        super().bind(optimizer)

    def _read_group(self, group: dict[str, Any]) -> float:
        if self.field not in group:
            raise ValueError(f"{self.name} is no setting of this optimizer: its param groups have {sorted(group)}")
        return float(group[self.field])

    def _groups(self) -> list[tuple[dict[str, Any], float]]:
        assert self._optimizer is not None
        return list(zip(self._optimizer.param_groups, self._values, strict=False))

    def _read(self) -> float:
        return next(self._read_group(group) for group, own in self._groups() if own)

    def _write(self, value: float) -> None:
        for group, own in self._groups():
            group[self.field] = replaced(group[self.field], self._moved(own, value))

    def _moved(self, own: float, value: float) -> float:
        # As far in the knob's space as the first group, which keeps the ratios of what spreads in the log space.
        if own in (0.0, self._first) or value == self._first:
            return value if own == self._first else own
        to = _TO_SPACE[self.space]
        return min(_FROM_SPACE[self.space](to(own) + to(value) - to(self._first)), max(self.high, own))


class LearningRate:
    """The learning rate, as a knob of an Explorer; AutoLR and OneCycleAutoLR have it already.

    Args:
        spread: alpha of Eq. 1.
        together: one knob for all param groups, or one for each.
        adapt: whether it moves.
    """

    def __init__(self, *, spread: float = 0.1, together: bool = True, adapt: bool = True) -> None:
        if not 0 <= spread < 1:
            raise ValueError(f"spread of learning_rate must be in [0, 1), but got spread={spread!r}")
        self.spread, self.together, self.adapt = spread, together, adapt


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


class Dropout(Knob):
    """The rate of a model's dropout, in all places or in those named.

    Needs local gradients and a probe: its own training loss always prefers none.

    Args:
        model: every ``nn.Dropout`` in it, of any kind, and the rates that attention and recurrent layers hold.
        names: of dropout modules, or of float attributes that hold a rate, as ``"blocks.0.attention.dropout_p"``.
        low, high, spread, adapt, check_signal: as for every knob.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] | None = None,
        *,
        low: float = 0.0,
        high: float = 0.9,
        spread: float = 0.1,
        adapt: bool = True,
        check_signal: bool = True,
    ) -> None:
        places = list(_dropouts(model)) if names is None else [_dropout_named(model, name) for name in names]
        if not places:
            raise ValueError(
                "model must contain dropout to explore it, but none was found; "
                "name the attributes that hold a rate with names="
            )
        rates = {float(getattr(owner, attribute)) for owner, attribute in places}
        if len(rates) > 1:
            raise ValueError(
                f"dropout must have one rate in all its places to be one knob, but got {sorted(rates)}; "
                "make a knob for each with names="
            )

        def write(value: float) -> None:
            for owner, attribute in places:
                write_attribute(owner, attribute, value)

        name = "dropout" if names is None else f"dropout({', '.join(names)})"
        super().__init__(
            name, lambda: getattr(*places[0]), write, low=low, high=high, spread=spread, adapt=adapt,
            acts="training", check_signal=check_signal,
        )  # fmt: skip


class Attribute(Knob):
    """A float attribute, 0-d tensor or buffer of any object; tensors are written in place.

    Args:
        owner: whose attribute it is.
        attribute: its name.
        low, high, space, spread, adapt, acts, fair, check_signal: as for every knob.
        name: in the history; default the attribute's.
    """

    def __init__(
        self,
        owner: object,
        attribute: str,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        space: Space = "linear",
        spread: float = 0.1,
        adapt: bool = True,
        acts: Acts = "training",
        fair: bool | None = None,
        check_signal: bool = True,
        name: str | None = None,
    ) -> None:
        value = getattr(owner, attribute, None)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()):
            raise ValueError(
                f"{attribute} of {type(owner).__name__} must be a number or a one-element float tensor, "
                f"but got {value!r}"
            )
        super().__init__(
            name or attribute, lambda: getattr(owner, attribute), lambda v: write_attribute(owner, attribute, v),
            low=low, high=high, space=space, spread=spread, adapt=adapt, acts=acts, fair=fair,
            check_signal=check_signal,
        )  # fmt: skip


class LabelSmoothing(Attribute):
    """``label_smoothing`` of a criterion such as ``nn.CrossEntropyLoss``. Needs local gradients and a probe."""

    def __init__(
        self, criterion: object, *, low: float = 0.0, high: float = 0.5, spread: float = 0.1, adapt: bool = True,
        check_signal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            criterion, "label_smoothing", low=low, high=high, spread=spread, adapt=adapt, check_signal=check_signal
        )


class Temperature(Attribute):
    """A positive factor inside the forward pass, such as the scale of attention logits. The training loss will do."""

    def __init__(
        self, owner: object, attribute: str, *, low: float = 1e-4, high: float = 1e4, spread: float = 0.1,
        adapt: bool = True, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            owner, attribute, low=low, high=high, space="log", spread=spread, adapt=adapt, acts="forward", name=name
        )


class ClipNorm(Knob):
    """The norm to which gradients are clipped. Call :meth:`clip_` where ``clip_grad_norm_`` stood.

    Args:
        value: to start with.
        low, high, spread, adapt: as for every knob.
    """

    def __init__(
        self, value: float, *, low: float = 1e-3, high: float = 1e3, spread: float = 0.2, adapt: bool = True
    ) -> None:
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


def _dropouts(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        elif isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
            yield module, "dropout"


def _dropout_named(model: nn.Module, name: str) -> tuple[Any, str]:
    owner: Any = model
    *path, last = name.split(".")
    try:
        for part in path:
            owner = getattr(owner, part)
        found = getattr(owner, last)
    except AttributeError as error:
        raise ValueError(f"names must be of dropout modules or attributes of the model, but got {name!r}") from error
    if isinstance(found, nn.modules.dropout._DropoutNd):
        return found, "p"
    if isinstance(found, float) or (isinstance(found, Tensor) and found.numel() == 1):
        return owner, last
    raise ValueError(f"{name} must be a dropout module or a float, but got {type(found).__name__}")


def _logit(value: float) -> float:
    if value <= 0:
        return -math.inf
    return math.inf if value >= 1 else math.log(value / (1 - value))
