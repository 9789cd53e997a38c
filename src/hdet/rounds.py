"""The round loop: the one place where losses become a decision and weights become their mean.

``loss -> signal -> controller -> scales`` and ``weights -> converge -> weights`` meet here, in the order of the paper:
after the optimizer step that ends a round, converge (Eq. 3), controller (Eq. 4 to 7, or 12), new permutation (Eq. 9),
and where there is an anchor, the replicas' new places on the line through it (Eq. 11).
The schedulers are faces of this loop: they supply a schedule and multiply it by :attr:`RoundLoop.factors`.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.anchor import Anchor
from hdet.converge import Buffers, is_healthy, mean_, memory_view
from hdet.gradient_signal import GradientSignal
from hdet.guard import Guard, GuardState, pack_guard, unpack_guard
from hdet.history import RoundRecord
from hdet.replicas import Replicas, local_tensor, shape_digest, trained_parameters
from hdet.signal import Loss, LossMeter
from hdet.snapshot import Snapshot
from hdet.spread import FloatArray
from hdet.steering import Steering

BoolArray = NDArray[np.bool_]

HISTORY_ROUNDS = 1000
ROLLBACK_CUT = 0.5


class RoundLoop:
    """Fan-out, signal, controller and converge for the param groups of one optimizer.

    Args:
        optimizer: its parameters are averaged.
        model: its other trainable parameters and its buffers are averaged too.
        replicas: who takes part.
        steering: multipliers, scales and controller.
        knob_of_group: which of the steering's knobs each param group belongs to.
        interval: T, the optimizer steps of a round.
        acting: the controller acts at rounds that end after the first of these steps, and up to the second.
        anchor: where effects are measured from; None for the last converge.
        anchor_rounds: renew the anchor every so many rounds; None for never.
        gradient: the first-order signal; None for the loss signal.
        rollback: where to go back to when a round breaks; None for nowhere.
        max_rollbacks: how often, before it is an error.
        step: optimizer steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        replicas: Replicas,
        steering: Steering,
        *,
        knob_of_group: list[int],
        interval: int,
        acting: tuple[float, float],
        anchor: Anchor | None = None,
        anchor_rounds: int | None = None,
        gradient: GradientSignal | None = None,
        rollback: Snapshot | None = None,
        max_rollbacks: int = 20,
        step: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.replicas = replicas
        self.steering = steering
        self.knob_of_group = knob_of_group
        self.interval = interval
        self.acting = acting
        self.anchor = anchor
        self.anchor_rounds = anchor_rounds
        self.gradient = gradient
        self.rollback = rollback
        self.max_rollbacks = max_rollbacks
        self.apart = steering.spread > 0 and replicas.count > 1
        self.active = self.apart or gradient is not None

        self.meter = LossMeter()
        self.guard, self.guard_state, self.num_rollbacks = Guard(), GuardState(), 0
        self._anchor_shared = not self.apart
        self._history: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self._converged_step = step
        self._shared_signal: FloatArray | None = None
        self._inside_converged = False
        self._buffers: Buffers = {}
        self._left_at_mean = False
        self._loaded_centre: dict[int, Tensor] | None = None
        self._trainable = self._requiring_grad()
        self._update_factors()

    def _update_factors(self) -> None:
        mine = self.steering.multipliers[:, self.replicas.index if self.apart else 0]
        by_knob = (self.steering.scales * mine).tolist()
        self.factors: list[float] = [by_knob[knob] for knob in self.knob_of_group]
        """What the schedule's value of each param group is multiplied by on this replica."""
        self.gated = bool(self.steering.rising.any())
        """Whether :meth:`schedule_moved` wants to be told."""

    def before_optimizer_step(self) -> None:
        """Set the anchor in the first step, when the weights are what training starts from; sample the gradient."""
        if self.anchor is not None and not self.anchor.copies:
            self.anchor.renew(self._anchored())
        if self.rollback is not None and not self.rollback.taken:
            self.rollback.take(self._loaded_centre or self._by_id(), self.optimizer)
            self._loaded_centre = None
        if self.gradient is not None:
            self.gradient.sample(self.optimizer)

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        self.meter.observe(loss, weight)
        self._shared_signal = None

    def schedule_moved(self, old: Sequence[float | Tensor], new: Sequence[float | Tensor]) -> None:
        """Eq. 13: tell the gate that the schedule alone went from ``old`` to ``new``, by param group."""
        ratios = np.zeros(len(self.steering.scales))
        for knob, before, after in zip(self.knob_of_group, old, new, strict=True):
            ratios[knob] = math.log(float(after) / float(before)) if before > 0 and after > 0 else 0.0
        self.steering.rise(ratios)
        self._update_factors()

    # -- rounds -------------------------------------------------------------------------------------------------

    def end_step(self, step: int, schedule: Sequence[float | Tensor], *, last: bool) -> bool:
        """To be called after each optimizer step. Ends the round when it is due; True if it did.

        Args:
            step: optimizer steps taken so far.
            schedule: what the schedule alone gave each param group in that step.
            last: whether training ends here, so that the round ends too, full or not.
        """
        if self._inside_converged:
            raise RuntimeError("step() must not be called inside `with converged():`; leave the block first")
        if not self.active or not (last or step % self.interval == 0):
            return False
        self._end_round(step, np.array([float(value) for value in schedule]), last=last)
        return True

    def _end_round(self, step: int, schedule: FloatArray, *, last: bool) -> None:
        started = time.perf_counter()
        steering = self.steering
        acting = steering.controller is not None and self.acting[0] < step <= self.acting[1]
        table = self._compare_notes(step, losses_required=acting and self.gradient is None)
        slopes = self.gradient.drain(self.replicas.group, self.replicas.device) if self.gradient is not None else None
        healthy = table["healthy"] > 0
        losses = np.where(healthy, table["losses"], np.nan)
        before, multipliers = steering.scales, steering.multipliers
        info: dict[str, Any] = {}
        distance = 0.0
        if self._went_wrong(step, losses, healthy, losses_given=bool(table["weights"].any())):
            self._go_back(step)
        else:
            if self.apart:
                distance = self._average(step, healthy)
            if acting:
                info = steering.decide(losses, slopes)
                if self.anchor is not None and steering.wants_new_anchor():
                    self.anchor.renew(self._anchored())
                    self._anchor_shared = True
            self._keep_centre()
        steering.next_round()
        if not last:
            self._renew_anchor()
            self._place()
        self._left_at_mean = last
        self._update_factors()
        self._history.append(
            RoundRecord(
                index=steering.round_index - 1,
                step=step,
                losses=tuple(table["losses"].tolist()),
                values=tuple(
                    tuple((value * before[k] * multipliers[k]).tolist())
                    for value, k in zip(schedule, self.knob_of_group, strict=True)
                ),
                base_values=tuple((schedule * steering.scales[self.knob_of_group]).tolist()),
                scales=tuple(steering.scales.tolist()),
                control=info,
                unhealthy=tuple(np.flatnonzero(~healthy).tolist()),
                num_rollbacks=self.num_rollbacks,
                distance=distance,
                converge_s=time.perf_counter() - started,
            )
        )
        self.meter.reset()
        self._shared_signal = None

    def _went_wrong(self, step: int, losses: FloatArray, healthy: BoolArray, *, losses_given: bool) -> bool:
        """Whether this round has to be undone. Raises where it would have to be and cannot."""
        if self.rollback is None:
            if not healthy.any():
                raise RuntimeError(
                    f"the weights of all {self.replicas.count} replicas are not finite at the converge of step {step}; "
                    "there is nothing to average: resume from a checkpoint with a lower learning rate"
                )
            return False
        finite = losses[np.isfinite(losses)]
        if not healthy.any() or not (self.apart or healthy.all()):
            fine = False  # replicas that are never averaged would keep, and remember, what is broken
        elif not losses_given:
            fine = True  # only the weights can tell
        else:
            loss = float(finite.mean()) if len(finite) else math.nan
            self.guard_state, fine = self.guard.update(self.guard_state, loss)
        if not fine and self.num_rollbacks == self.max_rollbacks:
            raise RuntimeError(
                f"training broke again at step {step} after {self.max_rollbacks} rollbacks, the last to a scale of "
                f"{self.steering.scales.tolist()}; lower the learning rate, look for bad data, or raise max_rollbacks"
            )
        return not fine

    def _go_back(self, step: int) -> None:
        assert self.rollback is not None
        self._converged_step = step
        self.rollback.restore(self._by_id(), self.optimizer)
        self.steering.cut(ROLLBACK_CUT)
        self.num_rollbacks += 1

    def _keep_centre(self) -> None:
        if self.rollback is not None:
            self.rollback.take(self._by_id(), self.optimizer)

    def _renew_anchor(self) -> None:
        if self.anchor is None:
            return
        if self.anchor_rounds is not None and self.steering.round_index % self.anchor_rounds == 0:
            self.anchor.renew(self._anchored())
            self._anchor_shared = True
        elif not self._anchor_shared:
            # Replicas may have started apart (a warm noisy start): the line needs one anchor for all.
            mean_(self.anchor.copies, self.replicas, [True] * self.replicas.count)
            self._anchor_shared = True

    def _place(self) -> None:
        """Eq. 11. The weights are at the centre when this is called."""
        if self.anchor is not None and self.apart:
            mine = self.steering.multipliers[:, self.replicas.index].tolist()
            groups = zip(self.optimizer.param_groups, self.knob_of_group, strict=True)
            self.anchor.place_(self._anchored(), [mine[knob] for group, knob in groups for _ in group["params"]])

    def _anchored(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    # -- converge -----------------------------------------------------------------------------------------------

    def converge(self, step: int) -> None:
        """Eq. 3 now, in the middle of a round: the round, its signal and its multipliers go on."""
        if not self.active or self._inside_converged:
            return
        healthy = self._compare_notes(step, losses_required=False)["healthy"] > 0
        if self.gradient is not None:
            self.gradient.collect(self.replicas.group, self.replicas.device)
        if self.apart:
            if not healthy.any():
                raise RuntimeError(f"no replica's weights are finite at step {step}; there is nothing to average")
            self._average(step, healthy)
            self._left_at_mean = True

    @contextmanager
    def converged(self, step: int) -> Iterator[None]:
        """The mean weights for the length of a block; then this replica's own again. Needs a second copy of them."""
        if not self.apart or self._inside_converged:
            self.converge(step)  # weights are equal already; what the round has shown so far is shared for saving
            yield
            return
        tensors = self._tensors()
        own = [t.clone() for t in tensors]
        before = self._converged_step, self._left_at_mean, self._trainable
        self.converge(step)
        self._inside_converged = True
        try:
            yield
        finally:
            self._inside_converged = False
            self._converged_step, self._left_at_mean, self._trainable = before
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    def _compare_notes(self, step: int, *, losses_required: bool) -> dict[str, FloatArray]:
        """What every replica has to say, one array a fact; an error on all of them where they cannot go on together."""
        tensors = self._tensors()
        total, weight = self.meter.drain()
        facts = {
            "steps": float(step),
            "totals": total,
            "weights": weight,
            "healthy": float(is_healthy(tensors)),
            # Of whole parameters: the shards of one need not be of equal size.
            "shapes": float(shape_digest(self._averaged())),
            "digests": float(self._digest()),
        }
        table = dict(zip(facts, self.replicas.gather(list(facts.values()), step=step).T, strict=True))
        if len(set(table["steps"])) > 1:
            listing = ", ".join(f"replica {r}: {int(s)}" for r, s in enumerate(table["steps"]))
            raise RuntimeError(
                f"replicas must take the same number of steps between converges, but got {listing}; "
                "check for uneven data or steps skipped on some ranks. No weights were averaged"
            )
        if len(set(table["shapes"])) > 1:
            raise RuntimeError(
                f"replicas must hold the same parameters, but their shapes differ at step {step} (digest by replica: "
                f"{[int(s) for s in table['shapes']]}); add param groups and freeze parameters on all ranks alike"
            )
        if len(set(table["digests"])) > 1:
            raise RuntimeError(
                f"replicas must continue from the same scheduler state, but at step {step} theirs differ (digest by "
                f"replica: {[int(d) for d in table['digests']]}); load the same state_dict on every rank"
            )
        if losses_required and not table["weights"].all():
            raise RuntimeError(
                f"auto-LR needs a loss from every replica in every round, but replicas "
                f"{np.flatnonzero(table['weights'] == 0).tolist()} gave none up to step {step}; "
                "call step(loss), or observe(loss) before a bare step()"
            )
        self._shared_signal = np.stack([table["totals"], table["weights"]])
        with np.errstate(invalid="ignore", divide="ignore"):
            table["losses"] = table["totals"] / table["weights"]
        return table

    def _average(self, step: int, healthy: BoolArray) -> float:
        """Eq. 3. Returns the largest distance of a healthy replica from the mean."""
        distance = mean_(self._tensors(), self.replicas, healthy.tolist(), self._buffers).item()
        distances = self.replicas.gather([distance], step=step)[:, 0]
        self._converged_step = step
        self._trainable = self._requiring_grad()
        return float(distances[healthy].max())

    def _averaged(self) -> list[Tensor]:
        """All that is averaged: what trains or has trained in this round, and the buffers."""
        parameters = [
            p for p in trained_parameters(self.optimizer, self.model) if p.requires_grad or id(p) in self._trainable
        ]
        buffers = {id(b): b for b in self.model.buffers()} if self.model is not None else {}
        return [*parameters, *buffers.values()]

    def _tensors(self) -> list[Tensor]:
        """This rank's part of it, every element of memory once."""
        return [memory_view(local_tensor(t)) for t in self._averaged()]

    def _by_id(self) -> dict[int, Tensor]:
        return {id(t): memory_view(local_tensor(t)) for t in self._averaged()}

    def _requiring_grad(self) -> set[int]:
        # A parameter frozen in mid-round still has to be averaged at its end; one frozen all along must not be
        # touched, since a mean of equal numbers can differ from them in the last bit.
        return {id(p) for p in trained_parameters(self.optimizer, self.model) if p.requires_grad}

    def _digest(self) -> int:
        numbers = [self.steering.seed, self.steering.round_index, *self.steering.scales.tolist()]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def history(self) -> list[RoundRecord]:
        return list(self._history)

    def weights_apart(self, step: int) -> bool:
        """Whether this replica's weights are not the mean: it has trained since, or been placed on the line."""
        placed = self.anchor is not None and not self._left_at_mean
        return self.apart and (step != self._converged_step or placed)

    def state_dict(self) -> dict[str, Any]:
        """Plain types, and the anchor's tensors; the same on every replica."""
        if self.replicas.count == 1:
            self.converge(-1)  # alone there is nobody to wait for, so a state is complete at any time
        shared = self._shared_signal
        return {
            **self.steering.state_dict(),
            "signal": None if shared is None else {"totals": shared[0].tolist(), "weights": shared[1].tolist()},
            "left_at_mean": self._left_at_mean and not self._inside_converged,
            "guard": pack_guard(self.guard_state),
            "num_rollbacks": self.num_rollbacks,
            "num_ranks": self.replicas.count,
            "num_calls": self.gradient.num_calls if self.gradient is not None else 0,
            "samples": self.gradient.samples.tolist() if self.gradient is not None else [],
            "anchor": [copy.clone() for copy in self.anchor.copies] if self.anchor is not None else [],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from ``state``; on another number of replicas with a new spread around the same base values."""
        num_ranks, signal = state["num_ranks"], state["signal"]
        mine, shared = (0.0, 0.0), None
        if signal is not None and num_ranks == self.replicas.count:
            shared = np.array([signal["totals"], signal["weights"]], dtype=np.float64)
            if shared.shape != (2, num_ranks):
                raise ValueError(f"signal must hold one entry for each of {num_ranks} replicas, but got {signal!r}")
            mine = (float(shared[0, self.replicas.index]), float(shared[1, self.replicas.index]))
        guard_state = unpack_guard(state["guard"])
        num_rollbacks, num_calls = int(state["num_rollbacks"]), int(state["num_calls"])
        num_knobs = len(self.steering.scales)
        samples = np.array(state["samples"], dtype=np.float64).reshape(-1, num_knobs)
        anchor = state["anchor"]
        shapes = [local_tensor(p).shape for p in self._anchored()]
        if anchor and [a.shape for a in anchor] != shapes:
            raise ValueError("anchor must have the shapes of the optimizer's parameters; it is of another model")
        left_at_mean = bool(state["left_at_mean"])
        self.steering.load_state_dict(state)  # checks everything before it changes anything
        self.meter.reset(*mine)
        self._shared_signal = shared
        self._converged_step = step
        self.guard_state, self.num_rollbacks = guard_state, num_rollbacks
        if self.gradient is not None:
            self.gradient.forget()
            self.gradient.num_calls, self.gradient.samples = num_calls, samples
        if self.rollback is not None:
            self.rollback.forget()
            self._loaded_centre = {key: t.clone() for key, t in self._by_id().items()} if self.apart else None
        if self.anchor is not None:
            self.anchor.copies = []
            if anchor:
                self.anchor.renew(self._anchored())
                for copy, value in zip(self.anchor.copies, anchor, strict=True):
                    copy.copy_(value)
                self._anchor_shared = True
                if not left_at_mean:
                    self._place()
        self._left_at_mean = left_at_mean
        self._update_factors()
