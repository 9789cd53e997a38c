"""The numbers of a run: who holds which multiplier, and where the learned scales stand. No tensors, no processes.

The round loop drives it for real processes; a simulation can drive it for runs that it trains side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hdet.checks import FloatArray, mapping_of, number, numbers_of, shown, whole_of
from hdet.controllers.base import Controller, Evidence, grown, pack_state, unpack_state
from hdet.policy.spread import assign, fan_out, inside_bounds

MAX_FALL = 2.0
"""How far the logarithm of a scale may fall before the anchor is renewed."""


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


Control = tuple[Mapping[str, tuple[float, ...]], tuple[KnobEvidence, ...]]
"""Named numbers of the controller that moves the learning rates, and what was seen of each knob; empty without one."""


class Steering:
    """Fan-out and scales of ``num_knobs`` learning rates, and of a panel of other knobs, over the replicas.

    Args:
        num_knobs: how many learning rates are explored; each has its own permutation and its own scale.
        num_replicas: N.
        spread: alpha of Eq. 1.
        controller: decides how the scales move; None to hold them.
        scale_bounds: the scales stay inside.
        seed: of the permutations.
        round_index: number of the round that begins.
        panel: the other knobs; their rows follow those of the learning rates everywhere.
    """

    def __init__(
        self,
        *,
        num_knobs: int,
        num_replicas: int,
        spread: float,
        controller: Controller | None,
        scale_bounds: tuple[float, float],
        seed: int = 0,
        round_index: int = 0,
        panel: Panel = NO_PANEL,
    ) -> None:
        self.num_lrs = num_knobs
        self.panel = panel
        self.num_replicas = num_replicas
        self.scale_bounds = scale_bounds
        self.spread = spread
        self.controller = controller
        self.seed = seed
        self.round_index = round_index
        self.scales = np.ones(num_knobs + len(panel))
        self.is_lr = np.arange(len(self.scales)) < num_knobs
        self.level = 1.0
        """What the scales start from, and their bounds are relative to."""
        self._set_limits(panel.bounds)
        self.warmup = 1.0
        """Share of the learning rates that a warm-up lets through in the next step."""
        self.fallen = np.zeros(len(self.scales))
        self.state: Any = None
        self.panel_state: Any = None
        self._init_controllers()
        self._fan_out()

    def _set_limits(self, bounds: Sequence[tuple[float, float]]) -> None:
        of_lrs = (self.scale_bounds[0] * self.level, self.scale_bounds[1] * self.level)
        limits = [of_lrs] * self.num_lrs + [(math.exp(low), math.exp(high)) for low, high in bounds]
        self.low, self.high = (np.array(side) for side in zip(*limits, strict=True))

    def set_bounds(self, bounds: Sequence[tuple[float, float]]) -> None:
        """Bounds of the panel's positions, where knobs start from another value than was thought."""
        self._set_limits(bounds)
        self.scales = self._inside(self.scales)
        self._fan_out()

    def limit(self, highest: Sequence[float]) -> bool:
        """Keep each learning rate's scale at or below this, too; True where one had to come down."""
        self.high[: self.num_lrs] = np.minimum(highest, self.scale_bounds[1] * self.level)
        before, self.scales = self.scales, np.minimum(self.scales, self.high)
        return bool((self.scales < before).any())

    def set_level(self, level: float) -> None:
        """All learning rates start from here; what controllers have moved since stays. A ceiling has moved nothing."""
        bounds = list(zip(np.log(self.low[self.num_lrs :]), np.log(self.high[self.num_lrs :]), strict=True))
        highest = self.high[: self.num_lrs]
        at_most = np.where(highest < self.scale_bounds[1] * self.level, highest, np.inf)  # a ceiling of the user's
        scales = self.scales[: self.num_lrs]
        moved = np.where(scales < highest, scales / self.level, np.maximum(scales / self.level, 1.0))
        self.level = level
        self._set_limits(bounds)
        self.high[: self.num_lrs] = np.minimum(self.high[: self.num_lrs], at_most)
        self.scales = self._inside(np.concatenate([moved * level, self.scales[self.num_lrs :]]))

    def _inside(self, scales: FloatArray) -> FloatArray:
        return np.clip(scales, np.minimum(self.low, self.high), self.high)

    def _init_controllers(self) -> None:
        if self.controller is not None:
            self.state = self.controller.init(self.num_lrs)
        if self.panel.controller is not None:
            self.panel_state = self.panel.controller.init(len(self.scales))

    def _fan_out(self) -> None:
        if self.num_replicas == 1 and not len(self.panel):
            self.multipliers: FloatArray = np.ones((self.num_lrs, 1))
            return
        if not len(self.panel):
            self.multipliers = fan_out(
                self.num_replicas,
                self.spread,
                seed=self.seed,
                round_index=self.round_index,
                num_knobs=self.num_lrs,
            )
            return
        spreads = np.array([*[self.spread] * self.num_lrs, *self.panel.spreads])
        if (widths := getattr(self.panel.controller, "widths", None)) is not None:
            spreads = spreads * widths(self.panel_state)
        # What does not spread takes no column: it would be one less for the others to be orthogonal in.
        places = np.zeros((len(self.scales), self.num_replicas))
        places[spreads > 0] = assign(
            self.num_replicas,
            int((spreads > 0).sum()),
            seed=self.seed,
            round_index=self.round_index,
            balanced=self.panel.balanced,
        )
        offsets = spreads[:, None] * places
        base, low, high = (np.log(row)[:, None] for row in (self.scales, self.low, self.high))
        inside = inside_bounds(base, offsets, low, high, moved=widths is not None) - base
        self.multipliers = 1.0 + np.where(self.is_lr[:, None], offsets, inside)

    def add_lr(self) -> int:
        """One more learning rate, of a param group that joins: it starts at the mean of the others. Returns its row."""
        row = self.num_lrs
        before = slice(0, row)
        self.num_lrs += 1
        self.scales = np.insert(self.scales, row, math.exp(float(np.log(self.scales[before]).mean())))
        self.low = np.insert(self.low, row, self.scale_bounds[0] * self.level)
        self.high = np.insert(self.high, row, self.scale_bounds[1] * self.level)
        self.is_lr = np.insert(self.is_lr, row, True)
        self.fallen = np.insert(self.fallen, row, 0.0)
        if self.controller is not None:
            self.state = grown(self.controller, self.state, self.num_lrs, row)
        if self.panel.controller is not None:
            self.panel_state = grown(self.panel.controller, self.panel_state, len(self.scales), row)
        if len(self.panel):
            # Others must keep theirs until the round ends, and balanced ones depend on their number.
            self.multipliers = np.insert(self.multipliers, row, 1.0, axis=0)
        else:
            self._fan_out()
        return row

    def positions(self, replica: int | None = None) -> FloatArray:
        """Where the panel's knobs stand on a replica; None for their base."""
        base: FloatArray = np.log(self.scales[self.num_lrs :])
        return base if replica is None else base + self.multipliers[self.num_lrs :, replica] - 1.0

    def standing(self) -> tuple[FloatArray, FloatArray, tuple[FloatArray, ...]]:
        """Effective scales, multipliers, and where the panel's knobs stand on each replica."""
        return self.effective, self.multipliers, tuple(self.positions(r) for r in range(self.num_replicas))

    def decide(self, losses: FloatArray, slopes: tuple[FloatArray, FloatArray] | None = None, **seen: Any) -> Control:
        """Let the controllers move the scales; returns what they looked at, of the learning rates and of each knob.

        ``seen``: what else is known of the round, as :class:`Evidence` has it.
        """
        control: Mapping[str, tuple[float, ...]] = {}
        knobs: tuple[KnobEvidence, ...] = ()
        factors = np.ones_like(self.scales)
        lrs = slice(0, self.num_lrs)
        if self.controller is not None:
            shown_to_it = Evidence(
                losses, self.multipliers[lrs], slopes, scales=self.scales[lrs], level=self.level, **seen
            )
            self.state, decision = self.controller.update(self.state, shown_to_it)
            factors[lrs] = decision.factors
            control = dict(decision.info)
        if self.panel.controller is not None:
            self.panel_state, decision = self.panel.controller.update(
                self.panel_state,
                Evidence(losses, self.multipliers, progress=seen.get("progress"), trained=seen.get("trained")),
            )
            moved = np.array([*[self.panel.moves_lrs] * self.num_lrs, *self.panel.adapted])
            factors[moved] = decision.factors[moved]
            knobs = self._evidence_of_knobs(decision.info)
            if self.panel.moves_lrs:
                known = (name for name in KnobEvidence._fields if name in decision.info)
                control = {name: decision.info[name][: self.num_lrs] for name in known}
        self.scales = self._inside(self.scales * factors)
        self.fallen = np.where(self.is_lr, np.maximum(self.fallen - np.log(factors), 0.0), 0.0)
        return control, knobs

    def _evidence_of_knobs(self, info: Mapping[str, tuple[float, ...]]) -> tuple[KnobEvidence, ...]:
        known = {name: info[name] for name in KnobEvidence._fields if name in info}
        return tuple(
            KnobEvidence(**{name: float(row[self.num_lrs + i]) for name, row in known.items()})
            if adapted
            else KnobEvidence()
            for i, adapted in enumerate(self.panel.adapted)
        )

    @property
    def effective(self) -> FloatArray:
        """The scales, the learning rates' as far as a warm-up lets them through."""
        return self.scales if self.warmup == 1 else np.where(self.is_lr, self.scales * self.warmup, self.scales)

    def multiply(self, factor: float) -> None:
        """Move all learning rates."""
        self.scales = self._inside(np.where(self.is_lr, self.scales * factor, self.scales))

    def wants_new_anchor(self) -> bool:
        """Whether the scales have fallen so far that the way since the anchor says nothing about the present.

        What an overshoot has displaced, a smaller learning rate cannot bring back: seen from the old anchor it would
        look too large for ever. True once for each fall; the evidence is forgotten with the anchor.
        """
        if (self.fallen < MAX_FALL).all():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """The evidence begins again."""
        self.fallen = np.zeros_like(self.fallen)
        self._init_controllers()

    def start_over(self, level: float) -> None:
        """All learning rates at this level, as if nothing had been seen."""
        self.set_level(level)
        self.scales[: self.num_lrs] = np.minimum(level, self.high[: self.num_lrs])
        self.forget()

    def cut(self, factor: float) -> None:
        """After a rollback: lower all learning rates, and forget the evidence that led there."""
        self.multiply(factor)
        state = self.state
        self._init_controllers()
        forget: Any = getattr(self.controller, "forget", None)
        if forget is not None:
            self.state = forget(state)

    def next_round(self) -> None:
        self.round_index += 1
        self._fan_out()

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "round": self.round_index,
            "num_replicas": self.num_replicas,
            "scales": self.scales.tolist(),
            "first_level": self.level,
            "warmup": self.warmup,
            "fallen": self.fallen.tolist(),
            "controller": pack_state(self.state) if self.controller is not None else {},
            "panel": {
                "names": list(self.panel.names),
                "controller": pack_state(self.panel_state) if self.panel.controller is not None else {},
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state that cannot be used raises ValueError and changes nothing."""
        num_knobs = len(self.scales)
        panel = mapping_of(state["panel"], "panel")
        names = panel["names"]
        if not isinstance(names, (list, tuple)) or list(names) != list(self.panel.names):
            raise ValueError(f"knobs must be those of the state, {shown(names)}, but got {list(self.panel.names)}")
        scales = numbers_of(state["scales"], "scales", num_knobs, each=", one for each knob")
        if not (scales > 0).all():
            raise ValueError(f"scales must be positive, but got {shown(state['scales'])}")
        fallen = numbers_of(state["fallen"], "fallen", num_knobs, low=0)
        level, warmup = number(state["first_level"]), number(state["warmup"])
        if not (level > 0 and 0 <= warmup <= 1):
            raise ValueError(
                f"first_level must be a finite number > 0 and warmup in [0, 1], but got {shown(state['first_level'])} "
                f"and {shown(state['warmup'])}"
            )
        controller_state = _controller_state(self.controller, state["controller"], self.num_lrs)
        panel_state = _controller_state(self.panel.controller, panel["controller"], num_knobs)
        seed, round_index = whole_of(state["seed"], "seed"), whole_of(state["round"], "round")
        self.seed, self.round_index = seed, round_index
        self.set_level(level)
        self.warmup, self.fallen = warmup, fallen
        # Other bounds than those it was saved with hold from now on; the panel's are set after this.
        self.scales = np.where(self.is_lr, self._inside(scales), scales)
        self.state, self.panel_state = controller_state, panel_state
        self._fan_out()


def _controller_state(controller: Controller | None, packed: Mapping[str, Any], num_knobs: int) -> Any:
    if controller is None:
        return None
    fresh = controller.init(num_knobs)
    # A checkpoint of a run without a controller has nothing for it, so it starts fresh.
    if not mapping_of(packed, "controller"):
        return fresh
    state = unpack_state(packed, fresh)
    check: Any = getattr(controller, "check_state", None)
    if check is not None:
        check(state)
    return state
