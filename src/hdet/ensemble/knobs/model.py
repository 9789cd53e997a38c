"""Knobs of the model and of the loss: dropout, label smoothing, temperature, any attribute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hdet.checks import require, shown
from hdet.ensemble.knobs.base import Acts, Knob, Space, write_attribute


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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, but got {type(model).__name__}")
        if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
            raise TypeError(f"names must be a list of strings, but got names={shown(names)}")
        require(names is None or len(names) > 0, "names", "None, or at least one name", names)
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
        require(isinstance(attribute, str), "attribute", "a string", attribute)
        require(name is None or isinstance(name, str), "name", "a string", name)
        value = getattr(owner, attribute, None)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()):
            raise ValueError(
                f"{attribute} of {type(owner).__name__} must be a number or a one-element float tensor, "
                f"but got {shown(value)}"
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
