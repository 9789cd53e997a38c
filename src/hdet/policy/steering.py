"""The numbers of a run: who holds which multiplier, and where the learned scales stand. No tensors, no processes.

The round loop drives it for real processes, the lab's stacked engine for runs simulated side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hdet.checks import LARGEST, FloatArray, flag_of, flags_of, mapping_of, numbers_of, shown, whole_of
from hdet.controllers.base import Controller, Evidence, grown, pack_state, unpack_state
from hdet.policy.panel import NO_PANEL, KnobEvidence, Looked, Panel
from hdet.policy.spread import assign, fan_out, inside_bounds

MAX_FALL = 2.0
"""How far the logarithm of a scale may fall before the anchor is renewed."""


class Steering:
    """Fan-out and scales of ``num_knobs`` learning rates, and of a panel of other knobs, over the replicas.

    Args:
        num_knobs: how many learning rates are explored; each has its own permutation and its own scale.
        num_replicas: N.
        spread: alpha of Eq. 1.
        controller: decides how the scales move; None to hold them.
        scale_bounds: the scales stay inside.
        gated: whether a schedule's own first rise needs evidence (Eq. 13).
        seed: of the permutations.
        round_index: number of the round that begins.
        first_scale: where the scales start.
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
        gated: bool = False,
        seed: int = 0,
        round_index: int = 0,
        first_scale: float = 1.0,
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
        self.scales = np.full(num_knobs + len(panel), first_scale)
        self.scales[num_knobs:] = 1.0
        self.is_lr = np.arange(len(self.scales)) < num_knobs
        self._set_limits(panel.bounds)
        self.scales = np.clip(self.scales, self.low, self.high)
        self.openness = np.zeros(len(self.scales))
        self.rising = np.full(len(self.scales), gated) & self.is_lr
        self.risen = np.zeros(len(self.scales))
        self.fallen = np.zeros(len(self.scales))
        self.flat = False
        """Whether a schedule's own warm-up is taken out: a climb has taken its place."""
        self.ramp_at = self.ramp_steps = 0
        self.state: Any = None
        self.panel_state: Any = None
        self._init_controllers()
        self._fan_out()

    def _set_limits(self, bounds: Sequence[tuple[float, float]]) -> None:
        limits = [self.scale_bounds] * self.num_lrs + [(math.exp(low), math.exp(high)) for low, high in bounds]
        self.low, self.high = (np.array(side) for side in zip(*limits, strict=True))

    def set_bounds(self, bounds: Sequence[tuple[float, float]]) -> None:
        """Bounds of the panel's positions, where knobs start from another value than was thought."""
        self._set_limits(bounds)
        self.scales = self._inside(self.scales)
        self._fan_out()

    def limit(self, highest: Sequence[float]) -> bool:
        """Keep each learning rate's scale at or below this, too; True where one had to come down."""
        self.high[: self.num_lrs] = np.minimum(highest, self.scale_bounds[1])
        before, self.scales = self.scales, np.minimum(self.scales, self.high)
        return bool((self.scales < before).any())

    @property
    def _ramp_share(self) -> float:
        """Of what a ramp goes up to."""
        return self.ramp_at / self.ramp_steps if self.on_ramp else 1.0

    def _inside(self, scales: FloatArray) -> FloatArray:
        """Within the bounds; on the ramp within those of what it goes up to."""
        share = np.where(self.is_lr, self._ramp_share, 1.0)
        return np.clip(scales, self.low * share, self.high * share)

    def _init_controllers(self) -> None:
        if self.controller is not None:
            self.state = self.controller.init(self.num_lrs)
        if self.panel.controller is not None:
            self.panel_state = self.panel.controller.init(len(self.scales))

    def _fan_out(self) -> None:
        if not len(self.panel):
            self.multipliers: FloatArray = fan_out(
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
        self.low = np.insert(self.low, row, self.scale_bounds[0])
        self.high = np.insert(self.high, row, self.scale_bounds[1])
        self.is_lr = np.insert(self.is_lr, row, True)
        self.openness = np.insert(self.openness, row, self.openness[before].mean())
        self.rising = np.insert(self.rising, row, self.rising[before].any())
        self.risen = np.insert(self.risen, row, 0.0)
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

    def decide(self, losses: FloatArray, slopes: tuple[FloatArray, FloatArray] | None = None, **seen: Any) -> Looked:
        """Let the controllers move the scales; returns what they looked at.

        ``seen``: slope of the whole, progress and training losses, where they are known, as :class:`Evidence` has them.
        """
        looked = Looked()
        factors = np.ones_like(self.scales)
        lrs = slice(0, self.num_lrs)
        # A controller without an opinion on the warm-up lets it through.
        self.openness = np.ones_like(self.scales)
        if self.controller is not None:
            shown_to_it = Evidence(
                losses, self.multipliers[lrs], slopes, self.risen[lrs], scales=self.scales[lrs], **seen
            )
            self.state, decision = self.controller.update(self.state, shown_to_it)
            factors[lrs] = decision.factors
            if decision.openness is not None:
                self.openness[lrs] = 0.0 if self.flat else decision.openness
            looked = looked._replace(lrs=dict(decision.info))
        if self.panel.controller is not None:
            self.panel_state, decision = self.panel.controller.update(
                self.panel_state,
                Evidence(losses, self.multipliers, progress=seen.get("progress"), trained=seen.get("trained")),
            )
            moved = np.array([*[self.panel.moves_lrs] * self.num_lrs, *self.panel.adapted])
            factors[moved] = decision.factors[moved]
            looked = self._looked_by_panel(looked, decision.info)
        self.scales = self._inside(self.scales * factors)
        self.fallen = np.where(self.is_lr, np.maximum(self.fallen - np.log(factors), 0.0), 0.0)
        return looked

    def _looked_by_panel(self, looked: Looked, info: Mapping[str, tuple[float, ...]]) -> Looked:
        known = {name: info[name] for name in KnobEvidence._fields if name in info}
        knobs = tuple(
            KnobEvidence(**{name: float(row[self.num_lrs + i]) for name, row in known.items()})
            if adapted
            else KnobEvidence()
            for i, adapted in enumerate(self.panel.adapted)
        )
        lrs = {name: row[: self.num_lrs] for name, row in known.items()} if self.panel.moves_lrs else looked.lrs
        return Looked(lrs, knobs)

    def rise(self, log_ratios: Sequence[float] | FloatArray) -> None:
        """Eq. 13, step by step: the schedule moves by exp(log_ratios); take back what the evidence does not support.

        Only a schedule's first rise is a warm-up. The gate of a knob is gone once its schedule has fallen. The ramp
        after a climb goes up here too.
        """
        # Number by number: this runs in every step of a warm-up, where arrays of a few entries take ten times as long.
        scales, risen, rising = self.scales.tolist(), self.risen.tolist(), self.rising.tolist()
        openness, low, high = self.openness.tolist(), self.low.tolist(), self.high.tolist()
        share, ramp = self._ramp_share, 0.0
        if self.on_ramp:
            ramp = math.log((self.ramp_at + 1) / self.ramp_at)
            self.ramp_at += 1
        after = self._ramp_share
        for k in range(self.num_lrs):
            ratio = float(log_ratios[k])
            rising[k] = rising[k] and ratio >= 0
            if rising[k]:
                unsupported = ratio * (1 - openness[k])
                scales[k] = min(max(scales[k] * math.exp(-unsupported), low[k] * share), high[k] * share)
                risen[k] += ratio - unsupported
            if ramp:
                scales[k] = min(max(scales[k] * math.exp(ramp), low[k] * after), high[k] * after)
                risen[k] += ramp
        # New arrays: records keep those of their rounds.
        self.scales, self.risen, self.rising = np.array(scales), np.array(risen), np.array(rising)

    @property
    def on_ramp(self) -> bool:
        return self.ramp_at < self.ramp_steps

    @property
    def follows_schedule(self) -> bool:
        """Whether :meth:`rise` wants to know how the schedule moves."""
        return self.on_ramp or True in self.rising.tolist()

    def multiply(self, factor: float) -> None:
        """Move all learning rates."""
        self.scales = self._inside(np.where(self.is_lr, self.scales * factor, self.scales))

    @property
    def at_top(self) -> bool:
        """Whether no learning rate may rise any further."""
        return bool((self.scales >= self.high)[self.is_lr].all())

    def begin_ramp(self, num_steps: int) -> None:
        """Rise to where the learning rates are now within so many steps, from zero, along a line."""
        self.ramp_at, self.ramp_steps = 1, num_steps
        self.multiply(1 / num_steps)

    def wants_new_anchor(self) -> bool:
        """Whether the scales have fallen so far that the way since the anchor says nothing about the present.

        What an overshoot has displaced, a smaller learning rate cannot bring back: seen from the old anchor it would
        look too large for ever. True once for each fall; the evidence is forgotten with the anchor.
        """
        if (self.fallen < MAX_FALL).all():
            return False
        self.fallen = np.zeros_like(self.fallen)
        self.openness = np.zeros_like(self.openness)
        self._init_controllers()
        return True

    def cut(self, factor: float) -> None:
        """After a rollback: lower all learning rates, and forget the evidence that led there."""
        self.multiply(factor)
        self.openness = np.zeros_like(self.openness)
        state = self.state
        self._init_controllers()
        forget: Any = getattr(self.controller, "forget", None)
        if forget is not None:
            self.state = forget(state)

    def next_round(self) -> None:
        self.round_index += 1
        self.risen = np.zeros_like(self.risen)
        self._fan_out()

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "round": self.round_index,
            "num_replicas": self.num_replicas,
            "scales": self.scales.tolist(),
            "openness": self.openness.tolist(),
            "rising": self.rising.tolist(),
            "risen": self.risen.tolist(),
            "fallen": self.fallen.tolist(),
            "flat": self.flat,
            "ramp": [self.ramp_at, self.ramp_steps],
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
        openness = numbers_of(state["openness"], "openness", num_knobs, low=0, high=1)
        rising = flags_of(state["rising"], "rising", num_knobs)
        if not (scales > 0).all():
            raise ValueError(f"scales must be positive, but got {shown(state['scales'])}")
        risen = numbers_of(state["risen"], "risen", num_knobs, low=0)
        fallen = numbers_of(state["fallen"], "fallen", num_knobs, low=0)
        flat, ramp = flag_of(state["flat"], "flat"), numbers_of(state["ramp"], "ramp", 2, low=0, high=LARGEST)
        if (ramp % 1).any() or 0 == ramp[0] < ramp[1]:
            raise ValueError(
                f"ramp must be whole numbers, the first of them at least 1, but got {shown(state['ramp'])}"
            )
        controller_state = _controller_state(self.controller, state["controller"], self.num_lrs)
        panel_state = _controller_state(self.panel.controller, panel["controller"], num_knobs)
        seed, round_index = whole_of(state["seed"], "seed"), whole_of(state["round"], "round")
        self.seed, self.round_index = seed, round_index
        self.flat, (self.ramp_at, self.ramp_steps) = flat, map(int, ramp)
        # Other bounds than those it was saved with hold from now on; the panel's are set after this.
        self.scales = np.where(self.is_lr, self._inside(scales), scales)
        self.openness, self.rising = openness, rising
        self.risen, self.fallen = risen, fallen
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
