"""The numbers of a run: who holds which multiplier, and where the learned scales stand. No tensors, no processes.

The round loop drives it for real processes, the lab's stacked engine for runs simulated side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hdet.controllers.base import Controller, Evidence, pack_state, unpack_state
from hdet.spread import FloatArray, fan_out

MAX_FALL = 2.0
"""How far the logarithm of a scale may fall before the anchor is renewed."""


class Steering:
    """Fan-out and scales of ``num_knobs`` knobs over ``num_replicas`` replicas.

    Args:
        num_knobs: how many scalars are explored; each has its own permutation and its own scale.
        num_replicas: N.
        spread: alpha of Eq. 1.
        controller: decides how the scales move; None to hold them.
        scale_bounds: the scales stay inside.
        gated: whether a schedule's own first rise needs evidence (Eq. 13).
        seed: of the permutations.
        round_index: number of the round that begins.
        first_scale: where the scales start.
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
    ) -> None:
        self.num_replicas = num_replicas
        self.spread = spread
        self.controller = controller
        self.scale_bounds = scale_bounds
        self.seed = seed
        self.round_index = round_index
        self.scales = np.full(num_knobs, first_scale)
        self.openness = np.zeros(num_knobs)
        self.rising = np.full(num_knobs, gated)
        self.risen = np.zeros(num_knobs)
        self.fallen = np.zeros(num_knobs)
        self.state = controller.init(num_knobs) if controller is not None else None
        self._fan_out()

    def _fan_out(self) -> None:
        self.multipliers: FloatArray = fan_out(
            self.num_replicas,
            self.spread,
            seed=self.seed,
            round_index=self.round_index,
            num_knobs=len(self.scales),
        )

    def decide(self, losses: FloatArray, slopes: tuple[FloatArray, FloatArray] | None = None) -> dict[str, Any]:
        """Let the controller move the scales; returns what it looked at."""
        if self.controller is None:
            return {}
        self.state, decision = self.controller.update(
            self.state, Evidence(losses, self.multipliers, slopes, self.risen)
        )
        self.scales = np.clip(self.scales * decision.factors, *self.scale_bounds)
        self.fallen = np.maximum(self.fallen - np.log(decision.factors), 0.0)
        # A controller without an opinion on the warm-up lets it through.
        self.openness = np.ones_like(self.scales) if decision.openness is None else decision.openness
        return dict(decision.info)

    def rise(self, log_ratios: FloatArray) -> None:
        """Eq. 13, step by step: the schedule moves by exp(log_ratios); take back what the evidence does not support.

        Only a schedule's first rise is a warm-up. The gate of a knob is gone once its schedule has fallen.
        """
        self.rising = self.rising & (log_ratios >= 0)
        unsupported = np.where(self.rising, log_ratios * (1 - self.openness), 0.0)
        self.scales = np.clip(self.scales * np.exp(-unsupported), *self.scale_bounds)
        self.risen = self.risen + np.where(self.rising, log_ratios - unsupported, 0.0)

    def wants_new_anchor(self) -> bool:
        """Whether the scales have fallen so far that the way since the anchor says nothing about the present.

        What an overshoot has displaced, a smaller learning rate cannot bring back: seen from the old anchor it would
        look too large for ever. True once for each fall; the evidence is forgotten with the anchor.
        """
        if (self.fallen < MAX_FALL).all():
            return False
        self.fallen = np.zeros_like(self.fallen)
        self._forget()
        return True

    def cut(self, factor: float) -> None:
        """After a rollback: lower all scales, and forget the evidence that led there."""
        self.scales = np.clip(self.scales * factor, *self.scale_bounds)
        self._forget()

    def _forget(self) -> None:
        self.openness = np.zeros_like(self.openness)
        if self.controller is not None:
            self.state = self.controller.init(len(self.scales))

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
            "controller": pack_state(self.state) if self.controller is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A state that cannot be used raises ValueError and changes nothing."""
        num_knobs = len(self.scales)
        scales = _finite(state, "scales", num_knobs)
        openness = _finite(state, "openness", num_knobs)
        rising = _finite(state, "rising", num_knobs).astype(bool)
        if not (scales > 0).all():
            raise ValueError(f"scales must be positive, but got {state['scales']!r}")
        risen, fallen = _finite(state, "risen", num_knobs), _finite(state, "fallen", num_knobs)
        controller_state = self.state
        if self.controller is not None:
            fresh = self.controller.init(num_knobs)
            # A checkpoint of a run without a controller has nothing for it, so it starts fresh.
            controller_state = unpack_state(state["controller"], fresh) if state["controller"] else fresh
        seed, round_index = state["seed"], state["round"]
        for name, value in (("seed", seed), ("round", round_index)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, but got {value!r}")
        self.seed, self.round_index = seed, round_index
        self.scales, self.openness, self.rising = scales, openness, rising
        self.risen, self.fallen = risen, fallen
        self.state = controller_state
        self._fan_out()


def _finite(state: Mapping[str, Any], name: str, size: int) -> FloatArray:
    values = np.asarray(state[name], dtype=np.float64)
    if values.shape != (size,) or not all(math.isfinite(v) for v in values):
        raise ValueError(f"{name} must be {size} finite numbers, one for each knob, but got {state[name]!r}")
    return values
