"""The round loop: the one place where losses become a decision and weights become their mean.

``loss -> signal -> controller -> scales`` and ``weights -> converge -> weights`` meet here, in the order of the paper:
after the optimizer step that ends a round, converge (Eq. 3), controller (Eq. 4 to 7), new permutation (Eq. 9).
The schedulers are faces of this loop: they supply a schedule and multiply it by :attr:`RoundLoop.factors`.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers.base import Controller, Evidence, pack_state, unpack_state
from hdet.converge import Buffers, is_healthy, mean_
from hdet.history import RoundRecord
from hdet.replicas import Replicas, local_tensor, shape_digest, trained_parameters
from hdet.signal import Loss, LossMeter
from hdet.spread import FloatArray, fan_out

HISTORY_ROUNDS = 1000


class RoundLoop:
    """Fan-out, signal, controller and converge for ``num_knobs`` scalars of one model.

    Args:
        optimizer: its parameters are averaged.
        model: its other trainable parameters and its buffers are averaged too.
        replicas: who takes part. With one replica, or spread 0, the loop does nothing.
        num_knobs: how many scalars are explored; each has its own permutation and its own scale.
        spread: alpha of Eq. 1.
        interval: T, the optimizer steps of a round.
        controller: decides how the scales move.
        controller_start: steps before the controller may act.
        scale_bounds: the scales stay inside.
        seed: of the permutations.
        step: optimizer steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        replicas: Replicas,
        *,
        num_knobs: int,
        spread: float,
        interval: int,
        controller: Controller | None,
        controller_start: int,
        scale_bounds: tuple[float, float],
        seed: int,
        step: int,
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.replicas = replicas
        self.spread = spread
        self.interval = interval
        self.controller = controller
        self.controller_start = controller_start
        self.scale_bounds = scale_bounds
        self.seed = seed
        self.active = spread > 0 and replicas.count > 1

        self.round_index = step // interval
        self.scales = np.ones(num_knobs)
        self.controller_state = controller.init(num_knobs) if controller is not None else None
        self.meter = LossMeter()
        self._history: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self._converged_step = step
        self._shared_signal: FloatArray | None = None
        self._inside_converged = False
        self._buffers: Buffers = {}
        self._trainable = self._requiring_grad()
        self._fan_out()

    # -- fan-out ------------------------------------------------------------------------------------------------

    def _fan_out(self) -> None:
        """Eq. 1 and 9: this round's multipliers, and what they and the scales make of this replica's values."""
        self.multipliers = fan_out(
            self.replicas.count if self.active else 1,
            self.spread,
            seed=self.seed,
            round_index=self.round_index,
            num_knobs=len(self.scales),
        )
        mine = self.multipliers[:, self.replicas.index if self.active else 0]
        self.factors: list[float] = (self.scales * mine).tolist()

    # -- signal -------------------------------------------------------------------------------------------------

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        self.meter.observe(loss, weight)
        self._shared_signal = None

    # -- rounds -------------------------------------------------------------------------------------------------

    def end_step(self, step: int, schedule: Sequence[float | Tensor], *, last: bool) -> None:
        """To be called after each optimizer step. Ends the round when it is due.

        Args:
            step: optimizer steps taken so far.
            schedule: what the schedule alone gave each knob in that step.
            last: whether training ends here, so that the round ends too, full or not.
        """
        if self._inside_converged:
            raise RuntimeError("step() must not be called inside `with converged():`; leave the block first")
        if not self.active:
            return
        if last or step % self.interval == 0:
            self._end_round(step, schedule)

    def _end_round(self, step: int, schedule: Sequence[float | Tensor]) -> None:
        acting = self.controller is not None and step > self.controller_start
        losses, unhealthy, distance, seconds = self._converge(step, losses_required=acting)
        before, info = self.scales, {}
        if self.controller is not None and acting:
            counted = np.where(unhealthy, np.nan, losses)
            self.controller_state, decision = self.controller.update(
                self.controller_state, Evidence(counted, self.multipliers)
            )
            self.scales = np.clip(self.scales * decision.factors, *self.scale_bounds)
            info = dict(decision.info)
        base = np.array([float(value) for value in schedule])
        self._history.append(
            RoundRecord(
                index=self.round_index,
                step=step,
                losses=tuple(losses.tolist()),
                values=tuple(tuple(row) for row in ((base * before)[:, None] * self.multipliers).tolist()),
                base_values=tuple((base * self.scales).tolist()),
                scales=tuple(self.scales.tolist()),
                control=info,
                unhealthy=tuple(np.flatnonzero(unhealthy).tolist()),
                distance=distance,
                converge_s=seconds,
            )
        )
        self.meter.reset()
        self._shared_signal = None
        self.round_index += 1
        self._fan_out()

    def converge(self, step: int) -> None:
        """Eq. 3 now, in the middle of a round: the round, its signal and its multipliers go on."""
        if self.active and not self._inside_converged:
            self._converge(step, losses_required=False)

    @contextmanager
    def converged(self, step: int) -> Iterator[None]:
        """The mean weights for the length of a block; then this replica's own again. Needs a second copy of them."""
        if not self.active or self._inside_converged:
            yield
            return
        tensors = self._tensors()
        own = [t.clone() for t in tensors]
        converged_step = self._converged_step
        self._converge(step, losses_required=False)
        self._inside_converged = True
        try:
            yield
        finally:
            self._inside_converged = False
            self._converged_step = converged_step
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    @property
    def history(self) -> list[RoundRecord]:
        return list(self._history)

    # -- converge -----------------------------------------------------------------------------------------------

    def _converge(
        self, step: int, *, losses_required: bool
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]], float, float]:
        """Compare notes with the other replicas, then average. Nothing is changed unless all of them can."""
        started = time.perf_counter()
        tensors = self._tensors()
        total, weight = self.meter.drain()
        facts = [step, total, weight, is_healthy(tensors), shape_digest(tensors), self._digest()]
        table = self.replicas.gather([float(f) for f in facts], step=step)
        steps, totals, weights, healthy, shapes, digests = table.T
        if len(set(steps)) > 1:
            listing = ", ".join(f"replica {r}: {int(s)}" for r, s in enumerate(steps))
            raise RuntimeError(
                f"replicas must take the same number of steps between converges, but got {listing}; "
                "check for uneven data or steps skipped on some ranks. No weights were averaged"
            )
        if len(set(shapes)) > 1:
            raise RuntimeError(
                f"replicas must hold the same parameters, but their shapes differ at step {step} (digest by replica: "
                f"{[int(s) for s in shapes]}); add param groups and freeze parameters on all ranks alike"
            )
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"replicas must continue from the same scheduler state, but at step {step} theirs differ (digest by "
                f"replica: {[int(d) for d in digests]}); load the same state_dict on every rank"
            )
        if losses_required and not weights.all():
            raise RuntimeError(
                f"auto-LR needs a loss from every replica in every round, but replicas "
                f"{np.flatnonzero(weights == 0).tolist()} gave none up to step {step}; "
                "call step(loss), or observe(loss) before a bare step()"
            )
        if not healthy.any():
            raise RuntimeError(
                f"the weights of all {self.replicas.count} replicas are not finite at the converge of step {step}; "
                "there is nothing to average: resume from a checkpoint with a lower learning rate"
            )
        self._shared_signal = np.stack([totals, weights])
        distance = mean_(tensors, self.replicas, healthy.astype(bool).tolist(), self._buffers).item()
        distances = self.replicas.gather([distance], step=step)[:, 0]
        self._converged_step = step
        self._trainable = self._requiring_grad()
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = totals / weights
        largest = float(distances[healthy.astype(bool)].max())
        return losses, healthy == 0, largest, time.perf_counter() - started

    def _tensors(self) -> list[Tensor]:
        """This rank's part of all that is averaged: what trains or has trained in this round, and the buffers."""
        parameters = [
            p for p in trained_parameters(self.optimizer, self.model) if p.requires_grad or id(p) in self._trainable
        ]
        buffers = {id(b): b for b in self.model.buffers()} if self.model is not None else {}
        return [local_tensor(t) for t in (*parameters, *buffers.values())]

    def _requiring_grad(self) -> set[int]:
        # A parameter frozen in mid-round still has to be averaged at its end; one frozen all along must not be
        # touched, since a mean of equal numbers can differ from them in the last bit.
        return {id(p) for p in trained_parameters(self.optimizer, self.model) if p.requires_grad}

    def _digest(self) -> int:
        numbers = [self.seed, self.round_index, *self.scales.tolist()]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    # -- state --------------------------------------------------------------------------------------------------

    def mid_round(self, step: int) -> bool:
        """Whether replicas have trained apart since the last converge."""
        return self.active and step != self._converged_step

    def state_dict(self) -> dict[str, Any]:
        """Plain types, the same on every replica."""
        shared = self._shared_signal
        return {
            "seed": self.seed,
            "round": self.round_index,
            "num_replicas": self.replicas.count,
            "scales": self.scales.tolist(),
            "controller": pack_state(self.controller_state) if self.controller is not None else {},
            "signal": None if shared is None else {"totals": shared[0].tolist(), "weights": shared[1].tolist()},
        }

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Continue from ``state``; on another number of replicas with a new spread around the same base values."""
        scales = np.asarray(state["scales"], dtype=np.float64)
        if scales.shape != self.scales.shape or not (np.isfinite(scales) & (scales > 0)).all():
            raise ValueError(
                f"state must hold {len(self.scales)} positive scales, one for each param group, "
                f"but got {state['scales']!r}"
            )
        controller_state = self.controller_state
        if self.controller is not None:
            fresh = self.controller.init(len(self.scales))
            # A checkpoint of a run without auto-LR has nothing for the controller, which then starts fresh.
            controller_state = unpack_state(state["controller"], fresh) if state["controller"] else fresh
        seed, round_index, num_replicas = (int(state[name]) for name in ("seed", "round", "num_replicas"))
        signal = state["signal"]
        mine = (0.0, 0.0)
        shared = None
        if signal is not None and num_replicas == self.replicas.count:
            shared = np.array([signal["totals"], signal["weights"]], dtype=np.float64)
            if shared.shape != (2, num_replicas):
                raise ValueError(f"state must hold one signal for each of {num_replicas} replicas, but got {signal!r}")
            mine = (float(shared[0, self.replicas.index]), float(shared[1, self.replicas.index]))
        # Nothing above changes self: a state that is refused leaves the loop as it was.
        self.seed, self.round_index = seed, round_index
        self.scales, self.controller_state = scales, controller_state
        self.meter.reset(*mine)
        self._shared_signal = shared
        self._converged_step = step
        self._fan_out()
