"""The knobs beside the learning rate, written, recorded and probed as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hdet.checks import FloatArray, mapping_of, number, shown
from hdet.controllers.base import Controller
from hdet.ensemble.knobs import Knob
from hdet.policy.steering import Panel

MAX_POSITION = 30.0
"""Beyond e^30 times its start no knob means anything, and exponentials overflow not much later."""


class KnobSet:
    """The knobs of a run, in an order that is the same everywhere.

    Args:
        knobs: what is explored.
    """

    def __init__(self, knobs: Sequence[Knob] = ()) -> None:
        self.knobs = tuple(knobs)

    def __len__(self) -> int:
        return len(self.knobs)

    def __iter__(self) -> Iterator[Knob]:
        return iter(self.knobs)

    def bind(self, optimizer: Optimizer, *, gradients: str, has_probe: bool) -> None:
        """Read where each knob starts. Raises where a knob cannot be explored, or nothing could be learned about it."""
        names = [knob.name for knob in self.knobs]
        if len(set(names)) < len(names):
            raise ValueError(f"knobs must have different names, but got {names}; pass name=")
        for knob in self.knobs:
            knob.check(gradients=gradients, has_probe=has_probe)
            knob.bind(optimizer)

    def bounds(self) -> tuple[tuple[float, float], ...]:
        pairs = [knob.position_bounds() for knob in self.knobs]
        return tuple((max(low, -MAX_POSITION), min(high, MAX_POSITION)) for low, high in pairs)

    def panel(self, controller: Controller | None, *, moves_lrs: bool = False, balanced: bool = True) -> Panel:
        """The same as numbers, for the steering."""
        return Panel(
            names=tuple(knob.name for knob in self.knobs),
            spreads=tuple(knob.spread for knob in self.knobs),
            bounds=self.bounds(),
            adapted=tuple(knob.adapt for knob in self.knobs),
            controller=controller,
            moves_lrs=moves_lrs,
            balanced=balanced,
        )

    def write(self, positions: FloatArray) -> None:
        for knob, position in zip(self.knobs, positions.tolist(), strict=True):
            knob.write(position)

    @contextmanager
    def training_at_base(self, own: FloatArray, base: FloatArray) -> Iterator[None]:
        """For a probe: this replica's positions ``own`` only for the knobs that act outside training."""
        # The others must not reach into the probe, through a criterion it shares with training: base for all replicas.
        hidden = [i for i, knob in enumerate(self.knobs) if knob.acts == "training"]
        for i in hidden:
            self.knobs[i].write(float(base[i]))
        try:
            yield
        finally:
            for i in hidden:
                self.knobs[i].write(float(own[i]))

    def starts(self) -> dict[str, float]:
        return {knob.name: knob.start for knob in self.knobs}

    def check_starts(self, starts: Mapping[str, Any]) -> dict[str, float]:
        """Raise where a loaded state does not fit the knobs."""
        starts = mapping_of(starts, "knobs")
        if set(starts) != {knob.name for knob in self.knobs}:
            raise ValueError(
                f"knobs must be those of the state, {shown(list(starts))}, but got {sorted(self.starts())}"
            )
        for knob in self.knobs:
            knob.check_start(number(starts[knob.name]))
        return {name: float(value) for name, value in starts.items()}

    def restart(self, starts: Mapping[str, float]) -> None:
        for knob in self.knobs:
            knob.start = starts[knob.name]
