"""The round loop: the one place where losses become a decision and weights become their mean.

``loss -> signal -> controller -> scales`` and ``weights -> converge -> weights`` meet here. After the optimizer step
that ends a round: replicas compare notes, the policy decides (Eq. 4 to 7, or 12), the averager takes the mean (Eq.
3), and where there is an anchor the replicas take new places on the line through it (Eq. 11), with new multipliers
(Eq. 9). The loop only orders: the policy decides, the averager moves the weights. Schedulers multiply their schedule
by :attr:`Values.factors <hdet.engine.values.Values.factors>`.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.engine.averaging import Averager
from hdet.engine.clock import Clock
from hdet.engine.journal import Journal
from hdet.engine.rehearsal import is_rehearsal, refuse_capture
from hdet.engine.tally import Tally
from hdet.engine.values import Values
from hdet.history import RoundRecord
from hdet.policy.round import RoundPolicy
from hdet.policy.verdict import Observed
from hdet.replicas.agreement import Note, Table, compare_notes
from hdet.signals.base import Signal, merged
from hdet.signals.gradient import drop_nonfinite
from hdet.signals.loss import Loss


class RoundLoop:
    """Fan-out, signals, policy and converge for the param groups of one optimizer.

    Args:
        optimizer: whose learning rates are steered.
        averager: what moves the weights, and knows where they are.
        policy: when rounds end, and what follows from them.
        signals: what rounds show; of two that show the same, the first counts.
        values: what every learning rate and knob is on this replica.
        clock: times converges.
        local: what keeps gradients from being averaged, to be closed in the end; None where they are shared.
        skip_nonfinite: take gradients that are not finite out of a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averager: Averager,
        policy: RoundPolicy,
        signals: Sequence[Signal],
        values: Values,
        *,
        clock: Clock,
        local: Callable[[], ExitStack] | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        """Held by whatever changes the state, so that another thread may save it in the meantime."""
        self.optimizer = optimizer
        self.averager = averager
        self.place = averager.place
        self.weights = averager.weights
        self.replicas = averager.replicas
        self.apart = averager.apart
        self.policy = policy
        self.steering = policy.steering
        self.signals = tuple(signals)
        self.values = values
        self.knobs = values.knobs
        self.skip_nonfinite = skip_nonfinite
        self.active = self.apart or any(not signal.compares for signal in signals)
        self.counts_updates = self.active and self.replicas.group is not None
        self._make_local = local or ExitStack
        self._local = self._make_local()
        self._clock = clock
        self.tally = Tally(self.replicas, updates_alike=averager.shared_gradients)
        self.journal = Journal()
        self.upcoming = self.place.mean_step + 1
        """The step that the next optimizer step is part of."""

    @property
    def finished(self) -> bool:
        """Whether training has ended, and every knob is at its base value."""
        return self.place.finished

    def add_groups(self) -> None:
        """Take up param groups that were added to the optimizer: they train along from here."""
        joined = self.optimizer.param_groups[len(self.values.knob_of_group) :]
        for knob in self.values.add_groups():
            for signal in self.signals:
                signal.add_group(knob)
        self.averager.add([p for group in joined for p in group["params"]])

    def follow(self, share: float) -> None:
        """The schedule of the next param group that it does not know is ``share`` of the first one's."""
        self.values.joined.append(share)
        self.values.joined_alike = not self.apart

    # -- steps --------------------------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Set the anchor in the first step, when the weights are what training starts from; show signals the step."""
        if is_rehearsal(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            refuse_capture(self.signals, self.averager)
        ends = self.policy.is_due(self.upcoming)
        with self.lock:
            self.averager.before_step()
            for signal in self.signals:
                signal.ends_round = ends
                signal.before_step(self.optimizer)
        if self.skip_nonfinite:
            drop_nonfinite(self.optimizer, self.replicas if self.averager.shared_gradients else None)

    def after_optimizer_step(self) -> None:
        """Count it: replicas that share gradients must take the same steps."""
        if not is_rehearsal(self.optimizer):
            self.tally.num_updates += 1

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        with self.lock:
            self.tally.observe(loss, weight)
            for signal in self.signals:
                signal.observe(loss, weight)

    def needs_end_step(self, step: int) -> bool:
        """Whether :meth:`end_step` may have to do anything in a step that is not the last; the cheap half of it."""
        policy = self.policy
        return policy.searching or step % policy.interval == 0 or self.place.is_set_aside

    def end_step(self, step: int, schedule: Sequence[float | Tensor], *, last: bool) -> bool:
        """To be called after each optimizer step. Ends the round when it is due; True if it did.

        Args:
            step: optimizer steps taken so far.
            schedule: what the schedule alone gave each param group in that step.
            last: whether training ends here, so that the round ends too, full or not.
        """
        self.place.refuse_inside("step()")
        if not self.active or not self.policy.is_due(step, last=last):
            if last:
                self._end()
            return False
        with self.replicas.telling_others(step):
            self._end_round(step, schedule, last=last)
        return True

    # -- the end of a round -------------------------------------------------------------------------------------

    def _end_round(self, step: int, scheduled: Sequence[float | Tensor], *, last: bool) -> None:
        self._clock.start()
        self.averager.begin()  # a GradScaler may have skipped every step so far
        acting = self.policy.is_acting(step)
        if acting:
            for signal in self.signals:
                own, base = self.steering.positions(self.values.index), self.steering.positions()
                signal.measure(self.knobs.training_at_base(own, base))
        table = self._meet(step, losses_required=acting and any(s.needs_losses for s in self.signals))
        schedule = np.array([float(value) for value in self.values.of_all(scheduled)])
        reading = merged([signal.drain() for signal in self.signals])
        rate = float(schedule[0] * self.values.base_factors[0]) if len(schedule) else math.nan
        verdict = self.policy.end_round(
            Observed(
                step=step,
                losses=table.losses,
                finite=table.finite,
                rate=rate,
                scheduled=float(schedule[0]) if len(schedule) else math.nan,
                sizes=reading.sizes,
                losses_given=bool(table.weights.any()),
                compared=reading.losses,
                trained=reading.trained,
                slopes=reading.slopes,
                whole=reading.whole,
                last=last,
            )
        )
        distance, averaged = self.averager.end_round(step, verdict, self.values.multipliers(), last=last)
        for message in verdict.messages:
            warnings.warn(message, stacklevel=4)
        if not verdict.messages:
            self.journal.say(verdict)
        if last:
            self._end()
        self.values.update()
        record = RoundRecord.of(
            verdict,
            self.steering,
            schedule=schedule,
            knob_of_group=self.values.knob_of_group,
            knobs={knob.name: knob.value_at for knob in self.knobs},
            learned=reading.learned,
            step=step,
            losses=tuple(table.losses.tolist()),
            distance=distance,
            converge_s=self._clock.stop(step, self.policy.interval),
            probes=tuple(reading.losses.tolist()) if reading.held_out and reading.losses is not None else (),
            averaged=averaged,
            num_updates=tuple(int(n) for n in table.num_updates) if self.counts_updates else (),
            resumed_from=self.journal.resumed_from,
            held_out=reading.probed,
        )
        self.tally.reset()
        self.journal.write(record)

    def _meet(self, step: int, *, losses_required: bool, asked: bool = False) -> Table:
        """Find out whether replicas can go on together, and bring to all what each has seen. Collectives."""
        self.weights.refuse_join(step)
        total, weight = self.tally.meter.drain()
        shapes, finite, state = self.averager.digest(), self.weights.is_healthy(), self.policy.digest()
        note = Note(step, total, weight, finite, shapes, state, self.tally.num_updates, asked)
        table = compare_notes(
            self.replicas,
            note,
            losses_required=losses_required,
            updates_alike=self.tally.updates_alike,
            num_steps=self.policy.num_steps(step),
        )
        self.tally.share(table)
        if not self.values.joined_alike:
            # Each has taken up new param groups by its own learning rates, which differ.
            shares = self.replicas.gather(self.values.joined, step=step).mean(axis=(0, 1)).tolist()
            self.values.set_joined(shares)
        for signal in self.signals:
            if not (asked and signal.only_at_end):
                signal.share(self.replicas, table.losses)
        return table

    def _end(self) -> None:
        self.place.finished = True
        self._local.close()

    def reopen(self) -> None:
        """Training goes on from a state that was saved before its end."""
        if self.finished:
            self._local = self._make_local()

    # -- a mean in mid-round ------------------------------------------------------------------------------------

    def converge(self, step: int) -> None:
        """Eq. 3 now, in the middle of a round: the round, its signal and its multipliers go on."""
        with self.lock:
            if not self.active or self.place.is_set_aside:
                return
            self._converge(step)

    def _converge(self, step: int) -> None:
        with self.replicas.telling_others(step):
            finite = self._meet(step, losses_required=False, asked=True).finite
            if self.apart:
                self.policy.require_mean(finite, step)
                self.averager.converge(step, finite, self._losses_now())
                self.values.write_knobs()  # one that is a buffer was averaged too

    def _losses_now(self) -> FloatArray | None:
        """By which replicas count in a mean in mid-round; None where all count the same. A collective."""
        if self.averager.outer.kind != "fittest" or not np.ptp(self.steering.multipliers, axis=1).any():
            return None
        own, base = self.steering.positions(self.values.index), self.steering.positions()
        found = (s.look(self.knobs.training_at_base(own, base), self.replicas) for s in self.signals)
        return next((losses for losses in found if losses is not None), None)

    @contextmanager
    def converged(self, step: int) -> Iterator[None]:
        """The mean weights for the length of a block; then this replica's own again. Needs a second copy of them."""
        if not self.apart or self.place.is_set_aside:
            self.converge(step)  # weights are equal already; what the round has shown so far is shared for saving
            yield
            return
        with self.averager.set_aside():
            with self.lock:
                self._converge(step)
            self.values.write_knobs(at_base=True)
            yield
        self.values.write_knobs()

    def finish(self, step: int) -> None:
        """End the training: average the weights, and leave every knob at its base value."""
        self.place.refuse_inside("finish()")
        if self.finished:
            return
        if step != self.place.mean_step or self.averager.on_line:
            self.converge(step)
        self._end()
        self.values.write_knobs(at_base=True)

    @property
    def history(self) -> list[RoundRecord]:
        return self.journal.records

    def weights_apart(self, step: int) -> bool:
        """Whether this replica's weights are not the mean."""
        return not self.averager.is_mean(step)
