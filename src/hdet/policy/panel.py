"""The knobs beside the learning rates, as numbers, and what controllers saw of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hdet.controllers.base import Controller


@dataclass(frozen=True)
class Panel:
    """The knobs beside the learning rates, as numbers.

    Their scales are exponentials of positions: a knob's position is the logarithm of its scale.

    Attributes:
        names: of the knobs.
        spreads: how far the outermost replicas are from each base position.
        bounds: lowest and highest position of each.
        adapted: which of them the controller may move.
        controller: decides how they move; it sees the learning rates' multipliers first, then the knobs'. None to hold.
        moves_lrs: whether it moves the learning rates too, instead of a controller of their own.
        balanced: whether assignments are made as orthogonal as possible, or permuted independently.
    """

    names: tuple[str, ...]
    spreads: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    adapted: tuple[bool, ...]
    controller: Controller | None = None
    moves_lrs: bool = False
    balanced: bool = True

    def __len__(self) -> int:
        return len(self.names)


NO_PANEL = Panel((), (), (), ())


class KnobEvidence(NamedTuple):
    """What a controller saw of a knob beside the learning rates; NaN while it cannot be told from others."""

    slope: float = math.nan
    standard_error: float = math.nan
    z: float = math.nan


class Looked(NamedTuple):
    """What controllers looked at in a round; nothing while none is acting.

    Attributes:
        lrs: named numbers of the controller that moves the learning rates.
        knobs: of each knob of the panel.
    """

    lrs: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    knobs: tuple[KnobEvidence, ...] = ()
