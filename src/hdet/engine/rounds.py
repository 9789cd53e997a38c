"""The round loop: the one place where losses become a decision and weights become their mean.

``loss -> signal -> controller -> scales`` and ``weights -> converge -> weights`` meet here, in the order of the paper:
after the optimizer step that ends a round, converge (Eq. 3), controller (Eq. 4 to 7, or 12), new permutation (Eq. 9),
and where there is an anchor, the replicas' new places on the line through it (Eq. 11).
The schedulers are faces of this loop: they supply a schedule and multiply it by :attr:`RoundLoop.factors`.
"""

from __future__ import annotations

import math
import struct
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.engine.averaging import Together
from hdet.engine.rollback import Fallback
from hdet.engine.state import joined_of, pack_signal, read_round
from hdet.history import RoundRecord
from hdet.knobs.knob_set import Board
from hdet.operations import PLAIN, Operations
from hdet.policy.round import Observed, RoundPolicy, Verdict
from hdet.replicas.agreement import Note, compare_notes
from hdet.replicas.average import mean_
from hdet.replicas.group import Replicas, shape_digest
from hdet.replicas.sharding import as_saved, local_tensor
from hdet.signals.base import Signal, merged
from hdet.signals.gradient import drop_nonfinite
from hdet.signals.loss import Loss, LossMeter
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights
from hdet.weights.outer import OuterStep, StatePolicy, state_tensors

HISTORY_ROUNDS = 1000


class RoundLoop:
    """Fan-out, signal, controller and converge for the param groups of one optimizer.

    Args:
        optimizer: whose learning rates are steered.
        weights: what is averaged.
        replicas: who takes part.
        policy: when rounds end, and what follows from them.
        knob_of_group: which of the steering's knobs each param group belongs to.
        one_scale: whether param groups that join later belong to the first of them, or to new ones.
        anchor: where effects are measured from; None for the last converge.
        signals: what rounds show; of two that show the same, the first counts.
        fallback: what undone rounds go back to; None where none is.
        step: optimizer steps already taken.
        apart: whether replicas may differ between converges.
        board: the knobs of the steering's panel, and the probe.
        outer: where the shared weights go at a converge.
        optimizer_state: what becomes of the optimizers' state at a converge.
        local: what keeps gradients from being averaged, to be closed in the end; None where they are shared.
        operations: what is done about faults, and how replicas meet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Weights,
        replicas: Replicas,
        policy: RoundPolicy,
        *,
        knob_of_group: list[int],
        one_scale: bool,
        anchor: Anchor | None = None,
        signals: Sequence[Signal],
        fallback: Fallback | None = None,
        step: int = 0,
        apart: bool,
        board: Board,
        outer: OuterStep | None = None,
        optimizer_state: StatePolicy = "keep",
        local: Callable[[], ExitStack] | None = None,
        operations: Operations = PLAIN,
    ) -> None:
        self.lock = threading.RLock()
        """Held by whatever changes the state, so that another thread may save it in the meantime."""
        self.optimizer = optimizer
        self.weights = weights
        self.replicas = replicas
        self.policy = policy
        self.steering = policy.steering
        self.knob_of_group = knob_of_group
        self._one_scale = one_scale
        self.joined: list[float] = []
        """Of each param group that joined after the schedule was made, its share of the first one's."""
        self._joined_shared = True
        self.anchor = anchor
        self.signals = tuple(signals)
        self.fallback = fallback
        self.apart = apart
        self.active = apart or any(not signal.compares for signal in signals)
        self.counts_updates = self.active and replicas.group is not None
        self.board = board
        self.outer = outer or OuterStep()
        self.operations = operations
        self.together = Together(
            optimizer,
            weights,
            replicas,
            outer=self.outer,
            optimizer_state=optimizer_state,
            operations=operations,
            apart=apart,
            shared_gradients=local is None,
        )
        self._make_local = local or ExitStack
        self._local = self._make_local()
        self._index = replicas.index if apart else 0
        self._on_line = anchor is not None and apart and self.steering.spread > 0

        self.meter = LossMeter()
        # From which copy on replicas may differ: they may have started apart. None: they are the same.
        self._anchor_apart_from: int | None = 0 if apart else None
        self._centre_apart_from = self._anchor_apart_from
        self._history: deque[RoundRecord] = deque(maxlen=HISTORY_ROUNDS)
        self.sinks: list[Callable[[RoundRecord], object]] = []
        self._converged_step = step
        self._shared_signal: FloatArray | None = None
        self._inside_converged = False
        self._pending = False  # whether a step in mid-round has something to do: raise, or let a mean land
        self._left_at_mean = False
        self._resumed_from: int | None = None
        self.finished = False
        self.num_updates = 0
        self._update_factors()

    def _update_factors(self) -> None:
        by_knob = (self.steering.scales * self.steering.multipliers[:, self._index]).tolist()
        self.factors: list[float] = [by_knob[knob] for knob in self.knob_of_group]
        """What the schedule's value of each param group is multiplied by on this replica."""
        self.gated = bool(self.steering.rising.any())
        """Whether :meth:`schedule_moved` wants to be told."""
        self.write_knobs(at_base=self.finished)

    def add_groups(self) -> None:
        """Take up param groups that were added to the optimizer: they train along from here."""
        known, num_copies = len(self.knob_of_group), len(self.anchor.copies) if self.anchor is not None else 0
        for _ in self.optimizer.param_groups[known:]:
            knob = 0 if self._one_scale else self.steering.add_lr()
            self.knob_of_group.append(knob)
            for signal in self.signals:
                signal.add_group(knob)
        joined = [p for group in self.optimizer.param_groups[known:] for p in group["params"]]
        if self.anchor is not None and num_copies:
            self.anchor.add(joined)
            if self.apart and self._anchor_apart_from is None:
                self._anchor_apart_from = num_copies
        if self.apart and self._centre_apart_from is None:
            self._centre_apart_from = len(self.outer.centre.copies)
        self.outer.add(joined)
        if self.fallback is not None:
            self.fallback.add(self.weights)
        for each in self.board:
            each.add_groups()
        if self._make_local is ExitStack:
            self.weights.warn_if_not_shared()
        self._update_factors()
        self._land()  # a mean on its way has no part of theirs

    def follow(self, share: float) -> None:
        """The schedule of the next param group that it does not know is ``share`` of the first one's."""
        self.joined.append(share)
        self._joined_shared = not self.apart

    def of_all(self, schedule: Sequence[float | Tensor]) -> list[float | Tensor]:
        """The schedule's values of all param groups, from those of the groups it knows."""
        return [*schedule, *(share * schedule[0] for share in self.joined)][: len(self.knob_of_group)]

    def write_knobs(self, *, at_base: bool) -> None:
        """Give the knobs beside the learning rate their values, this replica's or the shared ones."""
        if len(self.board):
            self.board.write(self.steering.positions(None if at_base else self._index))

    def before_optimizer_step(self) -> None:
        """Set the anchor in the first step, when the weights are what training starts from; sample the gradient."""
        if _is_rehearsal(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._check_capture()
        with self.lock:
            self._begin()
            for signal in self.signals:
                signal.before_step(self.optimizer)
        if self.operations.skip_nonfinite:
            drop_nonfinite(self.optimizer)

    def after_optimizer_step(self) -> None:
        """Count it: replicas that share gradients must take the same steps."""
        if not _is_rehearsal(self.optimizer):
            self.num_updates += 1

    def _check_capture(self) -> None:
        """Raise where what this does before a step would be part of a CUDA graph, and be repeated with every replay."""
        for signal in self.signals:
            signal.refuse_capture()
        has_anchor = self.anchor is None or bool(self.anchor.copies)
        if not has_anchor or (self.fallback is not None and not self.fallback.snapshot.taken):
            raise RuntimeError(
                "optimizer.step() must be called once, after the scheduler was constructed, before it is captured in a "
                "CUDA graph: the first step sets the anchor"
            )

    def _begin(self) -> None:
        """Remember where training starts, unless it is known."""
        if self.anchor is not None and not self.anchor.copies:
            self.anchor.renew(self.weights.anchored())
        if self.fallback is not None:
            self.fallback.before_first_step(self.weights, self.optimizer)
        if self.apart:
            self.outer.begin(self.weights.anchored())

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        with self.lock:
            self.meter.observe(loss, weight)
            self._shared_signal = None

    def schedule_moved(self, old: Sequence[float | Tensor], new: Sequence[float | Tensor]) -> None:
        """Eq. 13: tell the gate that the schedule alone went from ``old`` to ``new``, by param group."""
        ratios = np.zeros(len(self.steering.scales))
        for knob, before, after in zip(self.knob_of_group, self.of_all(old), self.of_all(new), strict=True):
            if before > 0 and after > 0:
                ratios[knob] = math.log(float(after) / float(before))
        self.steering.rise(ratios)
        self._update_factors()

    # -- rounds -------------------------------------------------------------------------------------------------

    def needs_end_step(self, step: int) -> bool:
        """Whether :meth:`end_step` would do anything in a step that is not the last; the cheap half of it."""
        return self.policy.is_due(step) or self._pending

    def end_step(self, step: int, schedule: Sequence[float | Tensor], *, last: bool) -> bool:
        """To be called after each optimizer step. Ends the round when it is due; True if it did.

        Args:
            step: optimizer steps taken so far.
            schedule: what the schedule alone gave each param group in that step.
            last: whether training ends here, so that the round ends too, full or not.
        """
        if self._inside_converged:
            raise RuntimeError("step() must not be called inside `with converged():`; leave the block first")
        self._land()
        if not self.active or not self.policy.is_due(step, last=last):
            return False
        with self.replicas.meeting(step):
            self._end_round(step, schedule, last=last)
        return True

    def _end_round(self, step: int, scheduled: Sequence[float | Tensor], *, last: bool) -> None:
        started = time.perf_counter()
        self._begin()  # a GradScaler may have skipped every step so far
        steering, acting = self.steering, self.policy.is_acting(step)
        if acting:
            for signal in self.signals:
                own, base = steering.positions(self._index), steering.positions()
                signal.measure(self.board.training_at_base(own, base))
        table = self._compare_notes(step, losses_required=acting and any(s.needs_losses for s in self.signals))
        schedule = np.array([float(value) for value in self.of_all(scheduled)])
        reading = merged([signal.drain() for signal in self.signals])
        verdict = self.policy.end_round(
            Observed(
                step=step,
                losses=table["losses"],
                finite=table["healthy"] > 0,
                losses_given=bool(table["weights"].any()),
                compared=reading.losses,
                slopes=reading.slopes,
                last=last,
            )
        )
        distance, averaged = self._move_weights(step, verdict, last=last)
        for message in verdict.messages:
            warnings.warn(message, stacklevel=5)
        self._left_at_mean = last
        if last:
            self._end()
        self._update_factors()
        self._history.append(
            RoundRecord.of(
                verdict,
                steering,
                schedule=schedule,
                knob_of_group=self.knob_of_group,
                knobs={knob.name: knob.value_at for knob in self.board},
                step=step,
                losses=tuple(table["losses"].tolist()),
                distance=distance,
                converge_s=self.together.clock(started, step, self.policy.interval),
                probes=tuple(reading.losses.tolist()) if reading.held_out and reading.losses is not None else (),
                averaged=averaged,
                num_updates=tuple(int(n) for n in table["num_updates"]) if self.counts_updates else (),
                resumed_from=self._resumed_from,
            )
        )
        self._resumed_from = None
        self.meter.reset()
        self.num_updates = 0
        self._shared_signal = None
        for sink in self.sinks:
            sink(self._history[-1])

    def _move_weights(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        """Where the verdict sends the weights. Returns the replicas' distance from their mean, and whose mean it is."""
        distance, averaged, healthy = 0.0, "none", verdict.healthy
        if verdict.go_back:
            assert self.fallback is not None
            self.fallback.snapshot.restore(self.weights.local(), self.optimizer)
            self.outer.restart(self.weights.anchored())
            self._converged_step = step
        else:
            if not healthy.all():
                self.together.mend_state(step, healthy, verdict.quarantined)
            if self.apart:
                distance, averaged = self._bring_together(step, verdict, last=last)
            elif not healthy.all():
                self.weights.mend(self.weights.local().values(), healthy, alike=True)
            if self.fallback is not None and self.together.flight is None:
                self.fallback.snapshot.take(self.weights.local(), self.optimizer)
        if self.together.flight is None:
            if verdict.new_anchor:
                assert self.anchor is not None
                self.anchor.renew(self.weights.anchored())
                self._anchor_apart_from = None
            if not last:
                self._share_anchor()
                self._place()
        return distance, averaged

    def _bring_together(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        """Eq. 3 at the end of a round. Returns the replicas' distance from their mean, and whose mean it is."""
        begun = self._centre_apart_from is None and (self.anchor is None or self._anchor_apart_from is None)
        at_once = last or verdict.new_anchor or not begun or not verdict.healthy.all()
        distance, averaged = self.together.meet(
            step, verdict.healthy, verdict.losses, round_index=verdict.index, at_once=at_once
        )
        if self.together.flight is not None:
            self._pending = True
            return distance, averaged
        if averaged == "all":
            self._converged_step = step
        if self._centre_apart_from is not None:
            # They go on from one place.
            mean_(self.outer.centre.copies[self._centre_apart_from :], self.replicas, [True] * self.replicas.count)
            self._centre_apart_from = None
        self.outer.apply_(self.weights.anchored())
        return distance, averaged

    def _land(self) -> None:
        """Apply a mean that has been on its way, if there is one. Not a collective: nobody has to take part."""
        flight, self.together.flight = self.together.flight, None
        if flight is None:
            return
        self._pending = False

        def settle() -> None:
            if self.fallback is not None:
                self.fallback.snapshot.take(self.weights.local(), self.optimizer)
            self._place()

        self.weights.reshard()
        flight.land(settle)
        self.write_knobs(at_base=self.finished)  # one that is a buffer was averaged too

    def _share_anchor(self) -> None:
        if self.anchor is not None and self._anchor_apart_from is not None:
            # Replicas may have started apart (a warm noisy start): the line needs one anchor for all.
            mean_(self.anchor.copies[self._anchor_apart_from :], self.replicas, [True] * self.replicas.count)
            self._anchor_apart_from = None

    def _place(self) -> None:
        """Eq. 11. The weights are at the centre when this is called."""
        if self._on_line:
            assert self.anchor is not None
            mine = self.steering.multipliers[:, self.replicas.index].tolist()
            groups = zip(self.optimizer.param_groups, self.knob_of_group, strict=True)
            self.anchor.place_(self.weights.anchored(), [mine[knob] for group, knob in groups for _ in group["params"]])

    # -- converge -----------------------------------------------------------------------------------------------

    def converge(self, step: int) -> None:
        """Eq. 3 now, in the middle of a round: the round, its signal and its multipliers go on."""
        with self.lock:
            if not self.active or self._inside_converged:
                return
            self._land()
            with self.replicas.meeting(step):
                self._converge(step)

    def _converge(self, step: int) -> None:
        healthy = self._compare_notes(step, losses_required=False, asked=True)["healthy"] > 0
        if self.apart:
            self.policy.require_mean(healthy, step)
            self.weights.average(healthy, step=step)
            self._converged_step = step
            self.write_knobs(at_base=self.finished)  # one that is a buffer was averaged too
            self._left_at_mean = True

    def finish(self, step: int) -> None:
        """End the training: average the weights, and leave every knob at its base value."""
        if self._inside_converged:
            raise RuntimeError("finish() must not be called inside `with converged():`; leave the block first")
        if self.finished:
            return
        if step != self._converged_step or self._on_line:
            self.converge(step)
        self._end()
        self.write_knobs(at_base=True)

    def _end(self) -> None:
        self.finished = True
        self._local.close()

    @contextmanager
    def converged(self, step: int) -> Iterator[None]:
        """The mean weights for the length of a block; then this replica's own again. Needs a second copy of them."""
        if not self.apart or self._inside_converged:
            self.converge(step)  # weights are equal already; what the round has shown so far is shared for saving
            yield
            return
        self._land()
        before = self._converged_step, self._left_at_mean
        with self.weights.set_aside():
            self.converge(step)
            self._inside_converged = self._pending = True
            self.write_knobs(at_base=True)
            try:
                yield
            finally:
                self._inside_converged = self._pending = False
                self._converged_step, self._left_at_mean = before
        self.write_knobs(at_base=self.finished)

    def _compare_notes(self, step: int, *, losses_required: bool, asked: bool = False) -> dict[str, FloatArray]:
        self.weights.refuse_join(step)
        total, weight = self.meter.drain()
        digest = self.weights.digest()
        if self.together.optimizer_state == "average":
            digest = zlib.crc32(struct.pack("2I", digest, shape_digest(state_tensors(self.optimizer))))
        healthy = self.weights.is_healthy()
        note = Note(step, total, weight, healthy, digest, self._digest(), self.num_updates, asked)
        alike = self.together.shared_gradients
        num_steps = self.policy.num_steps(step)
        table = compare_notes(
            self.replicas, note, losses_required=losses_required, updates_alike=alike, num_steps=num_steps
        )
        self._shared_signal = np.stack([table["totals"], table["weights"], table["num_updates"]])
        if not self._joined_shared:
            # Each has taken up new param groups by its own learning rates, which differ.
            self.joined = self.replicas.gather(self.joined, step=step).mean(axis=(0, 1)).tolist()
            self._joined_shared = True
        for signal in self.signals:
            signal.share(self.replicas, table["losses"])
        return table

    def _digest(self) -> int:
        numbers = [self.steering.seed, self.steering.round_index, *self.steering.scales.tolist()]
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))

    # -- state --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For a copy with the optimizer and the model, where all that belongs to them is within reach."""
        outside = {
            "is one of several processes'": self.replicas.group is not None or bool(self.replicas.parts),
            "writes knobs into a model": len(self.board) > 0,
            "calls a probe": self.board.probe is not None,
            'has gradients="local"': self._make_local is not ExitStack,
            "has sinks": bool(self.sinks),
        }
        why = [reason for reason, holds in outside.items() if holds]
        if why:
            raise TypeError(
                f"a scheduler that {' and '.join(why)} must not be copied or pickled: the copy would reach into the "
                "model of the original; make a new one, and give it the state: load_state_dict(old.state_dict())"
            )
        return {key: value for key, value in vars(self).items() if key != "lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()
        self.weights.recount()
        if self.fallback is not None:
            self.fallback.snapshot.forget()  # as after a resume: it names tensors by their identities

    @property
    def history(self) -> list[RoundRecord]:
        return list(self._history)

    def weights_apart(self, step: int) -> bool:
        """Whether this replica's weights are not the mean: it has trained since, or been placed on the line."""
        begun = self.anchor is not None and bool(self.anchor.copies)
        placed = self._on_line and begun and not self._left_at_mean
        return self.apart and (step != self._converged_step or placed)

    def state_dict(self) -> dict[str, Any]:
        """Plain types, and the anchor's tensors, sharded as the weights are; the same on every replica.

        And the same names at any time, so that a checkpoint can be read into the state of a run that has not begun.
        """
        if self.replicas.count == 1:
            self.converge(-1)  # alone there is nobody to wait for, so a state is complete at any time
        parameters = self.weights.anchored()
        anchor = [] if self.anchor is None else self.anchor.copies or [local_tensor(p) for p in parameters]
        return {
            **self.policy.state_dict(),
            "losses": pack_signal(self._shared_signal),
            "left_at_mean": self._left_at_mean and not self._inside_converged,
            "num_ranks": self.replicas.count,
            "signals": {signal.name: signal.state_dict() for signal in self.signals},
            "anchor": [as_saved(copy, p) for copy, p in zip(anchor, parameters, strict=bool(anchor))],
            "joined": list(self.joined),
            "knobs": self.board.starts(),
            "outer": self.outer.state_dict(parameters),
        }

    def num_scheduled(self, state: Any) -> int:
        """How many of the param groups, the first ones, the schedule of a saved state knows."""
        num_groups, num_joined = len(self.knob_of_group), len(joined_of(state))
        if num_joined >= num_groups:
            raise ValueError(f"joined must leave out the first of {num_groups} param groups, but got {num_joined}")
        return num_groups - num_joined

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from ``state``; on another number of replicas with a new spread around the same base values."""
        # All is checked here, before anything has changed; nothing below may fail.
        self.weights.reshard()
        parameters = self.weights.anchored()
        alike = self.together.shared_gradients
        saved = read_round(state, self.replicas, parameters, self.signals, updates_alike=alike)
        self.outer.check_state(state["outer"], parameters)
        starts = self.board.check_starts(state["knobs"])
        self.policy.load_state_dict(state)  # checks everything before it changes anything
        self.board.restart(starts)
        self.steering.set_bounds(self.board.bounds())
        self.outer.load_state_dict(state["outer"], parameters)
        # A checkpoint is one model: what follows need not bring replicas together first.
        if self.outer.kind != "nesterov" or self.outer.centre.copies:
            self._centre_apart_from = None
        self.joined, self._joined_shared = saved.joined, True
        if self.finished:
            self._local = self._make_local()
        self.finished = False
        self.meter.reset(saved.total, saved.weight)
        self.num_updates = saved.num_updates
        self._shared_signal = saved.signal
        self._converged_step = step
        self._resumed_from = saved.num_ranks if saved.num_ranks != self.replicas.count else None
        self.together.forget_flight()
        self._pending = self._inside_converged
        for signal in self.signals:
            signal.forget()
            if signal.name in saved.signals:
                signal.load_state_dict(saved.signals[signal.name])
        if self.fallback is not None:
            self.fallback.restart(self.weights.local() if self.apart else None)
        if self.anchor is not None:
            self.anchor.copies = []
            if saved.anchor:
                self.anchor.renew(parameters)
                for copy, value in zip(self.anchor.copies, saved.anchor, strict=True):
                    copy.copy_(value)
                self._anchor_apart_from = None
                if not saved.left_at_mean:
                    self._place()
        self._left_at_mean = saved.left_at_mean
        self._update_factors()


def _is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether a step moves nothing: torch.distributed.checkpoint takes one to have optimizer state to read into."""
    lrs = [group["lr"] for group in optimizer.param_groups]
    # One on an accelerator is not worth waiting for: checkpoint's are on the host.
    return all(not (isinstance(lr, Tensor) and lr.device.type != "cpu") and float(lr) == 0 for lr in lrs)
