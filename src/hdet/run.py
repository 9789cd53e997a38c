"""The round loop: the one place where losses become a decision and weights become their mean.

``loss -> signal -> controller -> scales`` and ``weights -> converge -> weights`` meet here. After the optimizer step
that ends a round: replicas exchange what they have seen, the policy decides (Eq. 4 to 7, 12 or 17), and the replication
does to the weights what follows from it (Eq. 3 and 11). The loop only orders: it reads top to bottom in
:meth:`Run.end_round`. Schedulers multiply their schedule by :attr:`LearningRates.factors`.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import LARGEST, BoolArray, FloatArray, flag_of, mapping_of, numbers_of, shown, whole_of
from hdet.history import History, RoundRecord
from hdet.options import OnFork
from hdet.policy.quarantine import QuarantineState, pack_quarantine
from hdet.policy.rollback import NO_ROLLBACK
from hdet.policy.round import RoundPolicy, Seen
from hdet.policy.steering import Steering
from hdet.replicas.fork import Checksum, Fork, WeightsSum, described
from hdet.replicas.group import Replicas, Report, Reports
from hdet.replication import Equal
from hdet.signals.base import Reading, Signal
from hdet.signals.gradient import drop_nonfinite
from hdet.signals.loss import Loss, LossMeter
from hdet.signals.update_size import UpdateSize
from hdet.weights.anchor import Anchor, tensors_of
from hdet.weights.averaged import Weights
from hdet.weights.snapshot import Best, Undo

SLOW_S, NUM_SLOW = 1.0, 3
"""A converge shorter than this is not worth a warning; and how many slow ones in a row are."""


class Run:
    """Fan-out, signals, policy and converge for the param groups of one optimizer.

    Args:
        optimizer: whose learning rates are steered.
        replication: what becomes of the weights.
        policy: when rounds end, and what follows from them.
        signals: what rounds show; of two that show the same, the first counts.
        lrs: what every learning rate is on this replica.
        anchor: where effects are measured from; None for the last converge.
        undo: where rounds that are undone go back to; None where none is.
        best: the weights of the lowest validation loss; None where they are not kept.
        slow_share: of a round, above which a converge is slow.
        step: optimizer steps already taken.
        skip_nonfinite: take gradients that are not finite out of a step.
        freeze_file: once it exists, the scale holds still.
        on_fork: what is done where replicas should be equal and are not.

    The policy's ``acts`` says whether any of this touches weights, gradients and learning rates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replication: Equal,
        policy: RoundPolicy,
        signals: Sequence[Signal],
        lrs: LearningRates,
        *,
        anchor: Anchor | None,
        undo: Undo | None,
        slow_share: float,
        step: int,
        skip_nonfinite: bool = False,
        freeze_file: str | os.PathLike[str] | None = None,
        on_fork: OnFork = "raise",
        best: Best | None = None,
    ) -> None:
        self.lock = threading.RLock()
        """Held by whatever changes the state, so that another thread may save it in the meantime."""
        self.optimizer = optimizer
        self.replication = replication
        self.weights = replication.weights
        self.replicas = replication.replicas
        self.policy = policy
        self.steering = policy.steering
        self.signals = tuple(signals)
        self.observers = tuple(s for s in signals if type(s).observe is not Signal.observe)
        """Signals that want to see losses one by one."""
        self.measuring = tuple(s for s in signals if type(s).measure is not Signal.measure)
        """Signals that measure when a round ends."""
        self.lrs = lrs
        self.anchor = anchor
        self.undo = undo
        self.best = best
        self.starting_over = False
        """Whether the weights are on their way back to the first ones, or were interrupted there."""
        policy.keeps_best = best is not None
        self.skip_nonfinite = skip_nonfinite
        self.active = replication.differs or any(not signal.compares for signal in signals)
        self.counts_updates = self.active and self.replicas.group is not None
        self.losses = RoundLosses(self.replicas, updates_alike=replication.shared_gradients)
        self.forks: Forks | None = None
        if self.replicas.group is not None and not replication.differs:
            self.forks = Forks(self.weights, on_fork)
        self.history = History()
        self.acts = policy.acts
        self.freeze_file = freeze_file
        self.asked_to_freeze = False
        """On this rank, since the last round ended."""
        self.evaluation = LossMeter()
        """Validation losses that this rank was given since."""
        self.mode_given = False
        """And whether it was told which way they are better."""
        self._clock = Clock(slow_share if self.replicas.count > 1 else math.inf)  # no other rank to wait for
        self.decay_steps = 0
        """Of a final decay that begins before its time, with the round that ended last; 0 for none."""
        self.upcoming = step + 1
        """The step that the next optimizer step is part of."""

    @property
    def finished(self) -> bool:
        """Whether training has ended, and every knob is at its base value."""
        return self.replication.finished

    @property
    def at_base(self) -> bool:
        """Whether the model at hand is the shared one, so that learning rates should be the base values too."""
        return self.replication.finished or self.replication.is_set_aside

    def update(self) -> None:
        """The steering has moved: write what follows from it."""
        self.lrs.update()
        if self.replication.knob_values:
            self.replication.write_knobs()

    def add_groups(self) -> None:
        """Take up param groups that were added to the optimizer: they train along from here."""
        joined = self.optimizer.param_groups[len(self.lrs.knob_of_group) :]
        for knob in self.lrs.add_groups():
            for signal in self.signals:
                signal.add_group(knob)
        parameters = [p for group in joined for p in group["params"]]
        self.replication.add(parameters)
        if self.anchor is not None and self.anchor.copies:
            self.anchor.add(parameters)
        if self.undo is not None:
            self.undo.add()

    def remember_groups(self) -> Callable[[], None]:
        """Returns what takes :meth:`add_groups` and :meth:`follow` back where they are interrupted."""
        parts = (self.lrs, self.steering, self.replication, self.weights, self.anchor, *self.signals)
        found = [vars(part) for part in parts if part is not None]
        before = [(dict(each), {name: list(v) for name, v in each.items() if type(v) is list}) for each in found]

        def put_back() -> None:
            for each, (values, lists) in zip(found, before, strict=True):
                each.update(values)
                for name, entries in lists.items():
                    each[name][:] = entries

        return put_back

    def follow(self, share: float) -> None:
        """The schedule of the next param group that it does not know is ``share`` of the first one's."""
        self.lrs.joined.append(share)
        self.lrs.joined_alike = not self.replication.differs

    # -- steps --------------------------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Set the anchor in the first step, when the weights are what training starts from; show signals the step."""
        if _moves_nothing(self.optimizer):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._refuse_capture()
        ends = self.policy.is_due(self.upcoming)
        with self.lock:
            self._begin()
            if self.undo is not None:
                self.undo.before_step()
            for signal in self.signals:
                signal.ends_round = ends
                signal.before_step(self.optimizer)
        if self.skip_nonfinite:
            drop_nonfinite(self.optimizer, self.replicas if self.replication.shared_gradients else None)

    def _begin(self) -> None:
        """Remember where training starts, unless it is known."""
        if self.anchor is not None and not self.anchor.copies:
            self.anchor.renew(self.weights.anchored())
        if self.undo is not None:
            self.undo.before_first_step()
        if self.replication.differs:
            self.replication.begin()

    def _refuse_capture(self) -> None:
        """Raise where what this does before a step would be part of a CUDA graph, and be repeated with every replay."""
        for signal in self.signals:
            signal.refuse_capture()
        anchored = self.anchor is None or bool(self.anchor.copies)
        if not anchored or (self.undo is not None and not self.undo.snapshot.taken):
            raise RuntimeError(
                "optimizer.step() must be called once, after the scheduler was constructed, before it is captured in a "
                "CUDA graph: the first step sets the anchor"
            )

    def after_optimizer_step(self) -> None:
        """Count it: replicas that share gradients must take the same steps."""
        if not _moves_nothing(self.optimizer):
            self.losses.num_updates += 1

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        with self.lock:
            self.losses.observe(loss, weight)
            for signal in self.observers:
                signal.observe(loss, weight)

    def is_due(self, step: int) -> bool:
        """Whether :meth:`end_round` may have anything to do in a step that is not the last."""
        policy = self.policy
        replication = self.replication
        set_aside = replication.differs and replication.is_set_aside
        return policy.searching or step % policy.interval == 0 or set_aside

    # -- the end of a round -------------------------------------------------------------------------------------

    def end_round(self, step: int, scheduled: Sequence[float | Tensor], *, last: bool, left: float = math.inf) -> bool:
        """After the optimizer step that ends a round; False where there is no round to end.

        Args:
            step: optimizer steps taken so far.
            scheduled: what the schedule alone gave each param group in that step.
            last: whether training ends here, so that the round ends too, full or not.
            left: steps of the run that are left.
        """
        if self.replication.is_set_aside:
            self.replication.refuse_inside("step()")
        if not self.active:
            if last:
                self.replication.end()
            return False
        with self.replicas.telling_others(step):
            self._clock.start()
            self._begin()  # a GradScaler may have skipped every step so far
            reports, fork = self._meet(step, acting=self.policy.is_acting(step))
            reading = merged([signal.drain() for signal in self.signals])
            schedule = np.array([float(value) for value in self.lrs.of_all(scheduled)])
            verdict = self.policy.end_round(self._seen(step, reports, reading, schedule, last=last, left=left))
            distance, averaged = 0.0, "none"
            if not self.acts:
                pass
            elif verdict.go_back:
                assert self.undo is not None
                self.undo.restore()
                self.replication.restart(step, last=last)
            else:
                if fork is not None and self.forks is not None:
                    self.forks.repair(fork)
                distance, averaged = self.replication.end_round(step, verdict, last=last)
                if verdict.keep and self.undo is not None:
                    self.undo.keep()
            if verdict.restart:
                self.start_over()
            if verdict.decay_steps and self.best is not None and self.best.step >= 0:
                self.restore_best(self.best)
            if verdict.new_anchor:
                assert self.anchor is not None
                self.anchor.renew(self.weights.anchored())
                self.anchor.differ_from = None
            if not last and self.replication.differs:
                self.replication.next_round(self.lrs.multipliers())
            self.history.say(verdict, stacklevel=4)
            if last:
                self.replication.end()
            self.update()
            if self.forks is not None and self.forks.event:
                verdict = replace(verdict, events=(*verdict.events, self.forks.event))
            record = RoundRecord.of(
                verdict,
                scales=self.lrs.scales,
                schedule=schedule,
                knob_of_group=self.lrs.knob_of_group,
                positions=self.steering.positions() if self.replication.knob_values else np.empty(0),
                knobs=self.replication.knob_values,
                learned=reading.learned,
                step=step,
                losses=tuple(reports.losses.tolist()),
                distance=distance,
                converge_s=self._clock.stop(step, self.policy.interval),
                probes=tuple(reading.losses.tolist()) if reading.held_out and reading.losses is not None else (),
                averaged=averaged,
                num_updates=tuple(int(n) for n in reports.num_updates) if self.counts_updates else (),
                resumed_from=self.history.resumed_from,
                held_out=reading.probed,
                evaluation=None if math.isnan(reports.evaluation) else reports.evaluation,
            )
            self.losses.reset()
            self.evaluation.reset()
            self.mode_given = False
            self.asked_to_freeze, self.decay_steps = False, verdict.decay_steps
            self.history.write(record)
        return True

    def start_over(self) -> None:
        """Back to the first weights, which the anchor holds, and to an optimizer without state. Buffers stay."""
        assert self.anchor is not None
        self.starting_over = True
        parameters = self.weights.anchored()
        self.anchor.place_(parameters, [0.0] * len(parameters))
        for p in parameters:
            self.optimizer.state.pop(p, None)
        self.starting_over = False
        self._forget_past()

    def restore_best(self, best: Best) -> None:
        """Back to the weights of the lowest validation loss."""
        best.restore()
        self._forget_past()

    def _forget_past(self) -> None:
        """The weights were replaced. What the loss is there nobody knows."""
        if self.undo is not None:
            self.undo.restart(None)
        if self.policy.rollback is not None:
            self.policy.rollback.start_over()

    def remember(self) -> tuple[Any, ...]:
        """What the end of a round replaces, to go back to where that is interrupted."""
        policy = self.policy
        facts = self.replication.finished, self.asked_to_freeze, self.decay_steps
        return policy.state_dict(), policy.acting, self.history.remember(), facts

    def put_back(self, before: tuple[Any, ...]) -> None:
        """The round has not ended. What it has shown may be lost in part; weights are healthy ones as a whole."""
        state, acting, history, facts = before
        if self.undo is not None and self.undo.restoring:
            self.undo.restore()
        if self.best is not None and self.best.restoring:
            self.best.restore()
        if self.starting_over:
            self.start_over()
        self.policy.load_state_dict(state)
        self.policy.acting = acting
        self.history.put_back(history)
        self.replication.finished, self.asked_to_freeze, self.decay_steps = facts
        self.update()

    def _seen(
        self, step: int, reports: Reports, reading: Reading, schedule: FloatArray, *, last: bool, left: float
    ) -> Seen:
        """What the round has shown, as numbers."""
        scheduled = float(schedule[0]) if len(schedule) else math.nan
        rates = dict(zip(reversed(self.lrs.knob_of_group), reversed(schedule * self.lrs.base_factors), strict=True))
        return Seen(
            step=step,
            losses=reports.losses,
            finite=reports.finite,
            rate=scheduled * (self.lrs.base_factors[0] if self.acts else 1.0) if len(schedule) else math.nan,
            scheduled=scheduled,
            sizes=reading.sizes,
            losses_given=bool(reports.weights.any()),
            of_one_model=None if self.replication.differs else reports.weights > 0,
            compared=reading.losses,
            trained=reading.trained,
            slopes=reading.slopes,
            total_slope=reading.total_slope,
            frozen=reports.frozen,
            evaluation=reports.evaluation,
            mode_given=reports.mode_given,
            left=left,
            last=last,
            rates=np.array([rates[knob] for knob in sorted(rates)]),
        )

    def _meet(self, step: int, *, acting: bool = False, asked: bool = False) -> tuple[Reports, Fork | None]:
        """Find out whether replicas can go on together, and bring to all what each has seen. Collectives.

        Also returns which of them have to be repaired, because their weights differ from the others'.

        ``acting``: whether a controller is going to act on it. ``asked``: whether it is in the middle of a round.
        """
        for signal in self.measuring if acting else ():
            signal.measure(self.replication.training_at_base())
        # All that devices have to do is started before anything waits for them: they are idle from then on.
        sharing = [signal for signal in self.signals if not (asked and signal.only_at_end)]
        for signal in sharing:
            signal.launch()
        if self.forks is not None:
            self.forks.sums.start()
        inspected, state = self.weights.inspect(step), self.policy.digest()
        total, weight = self.losses.meter.drain()
        if self.freeze_file is not None and not self.policy.frozen:
            self.asked_to_freeze = self.asked_to_freeze or os.path.exists(self.freeze_file)
        shapes, finite = inspected()
        if self.replication.differs:
            shapes = self.replication.digest(shapes)
        checksum = Checksum() if self.forks is None else self.forks.sums.read()
        updates, told = self.losses.num_updates, (self.asked_to_freeze, *self.evaluation.drain(), self.mode_given)
        reports = self.replicas.exchange(
            Report(step, total, weight, finite, shapes, state, updates, asked, *told, *checksum),
            losses_required=acting and any(signal.needs_losses for signal in self.signals),
            updates_alike=self.losses.updates_alike,
            num_steps=self.policy.num_steps(step),
            evaluations_alike=self.best is not None,
        )
        fork = None
        if self.forks is not None:
            counted = self.policy.counted(reports.losses, reports.finite)
            fork = self.forks.find(reports, counted, step)
        self.losses.share(reports)
        if not self.lrs.joined_alike:
            # Each has taken up new param groups by its own learning rates, which differ.
            shares = self.replicas.gather(self.lrs.joined, step=step).mean(axis=(0, 1)).tolist()
            self.lrs.set_joined(shares)
        for signal in sharing:
            signal.share(self.replicas, reports.losses)
        return reports, fork

    # -- a mean in mid-round ------------------------------------------------------------------------------------

    def converge(self, step: int) -> None:
        """Eq. 3 now, in the middle of a round: the round, its signal and its multipliers go on."""
        with self.lock:
            if self.active and not self.replication.is_set_aside:
                self._converge(step)

    def _converge(self, step: int) -> None:
        with self.replicas.telling_others(step):
            reports, fork = self._meet(step, asked=True)
            if fork is not None and self.forks is not None:
                self.forks.repair(fork)
            if self.replication.differs:
                self.policy.require_mean(reports.finite, step)
                self.replication.converge(step, reports.finite, self.signals)

    @contextmanager
    def converged(self, step: int) -> Iterator[None]:
        """The mean weights for the length of a block; then this replica's own again. Needs a second copy of them."""
        if not self.replication.differs or self.replication.is_set_aside:
            self.converge(step)  # weights are equal already; what the round has shown so far is shared for saving
            yield
            return
        with self.replication.set_aside():
            with self.lock:
                self._converge(step)
            self.replication.write_knobs(at_base=True)
            yield
        self.replication.write_knobs()

    def finish(self, step: int) -> None:
        """End the training: average the weights, and leave every knob at its base value."""
        if self.replication.is_set_aside:
            self.replication.refuse_inside("finish()")
        if self.finished:
            return
        if self.replication.needs_mean(step):
            self.converge(step)
        self.replication.end()
        self.replication.write_knobs(at_base=True)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain types, and the anchor's tensors, sharded as the weights are; the same on every replica.

        And the same names at any time, so that a checkpoint can be read into the state of a run that has not begun.
        """
        if self.replicas.count == 1:
            self.converge(-1)  # alone there is no other rank to wait for, so a state is complete at any time
        return {
            **self.policy.state_dict(),
            **self.replication.state_dict(),
            "anchor": [] if self.anchor is None else self.anchor.saved(self.weights.anchored()),
            "anchor_stride": 1 if self.anchor is None else self.anchor.stride,
            **self.history.state_dict(),
            "losses": self.losses.state_dict(),
            "evaluation": list(self.evaluation.drain()),
            "mode_given": self.mode_given,
            "num_ranks": self.replicas.count,
            "signals": {s.name: s.state_dict() | self.replication.own_state(s) for s in self.signals},
            "joined": list(self.lrs.joined),
            **({} if self.best is None else {"best": self.best.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from ``state``; on another number of replicas with a new spread around the same base values.

        A state that cannot be used raises ValueError or KeyError and changes nothing.
        """
        # All is checked here, before anything has changed; nothing below may fail.
        self.weights.reshard()
        state = mapping_of(state, "rounds")
        num_ranks = whole_of(state["num_ranks"], "num_ranks", 1)
        whole_of(state["num_replicas"], "num_replicas", 1)
        losses = self.losses.read_state(state["losses"], num_ranks)
        anchor = self._read_anchor(state)
        signals = self._read_signals(state["signals"])
        joined = joined_of(state)
        evaluation = numbers_of(state.get("evaluation", [0.0, 0.0]), "evaluation", 2, finite=False)
        mode_given = flag_of(state.get("mode_given", False), "mode_given")
        best = None if self.best is None else self.best.read_state(mapping_of(state.get("best", {}), "best"))
        self.replication.check_state(state)
        history = History.from_state(state)
        self.policy.load_state_dict(state)  # checks everything before it changes anything
        if self.policy.level is not None and not any(isinstance(signal, UpdateSize) for signal in self.signals):
            # Made around a schedule that had been loaded already, or without a level: the state has one.
            self.signals += (UpdateSize.of(self.weights),)
        self.steering.set_bounds(self.replication.restart_knobs(state))
        self.replication.load_state_dict(state, step=step)
        if self.undo is not None:
            self.undo.restart(self.weights.local() if self.replication.differs else None)
        if self.best is not None and best is not None:
            self.best.load(best)
        self._place_anchor(anchor)
        if anchor and not state["left_at_mean"]:
            self.replication.next_round(self.lrs.multipliers())
        self.upcoming = step + 1
        alike = num_ranks == self.replicas.count
        self.history.go_on_from(history, None if alike else num_ranks)
        self.lrs.set_joined(joined)
        self.losses.load(losses)
        self.evaluation.reset(*evaluation.tolist())
        self.mode_given = mode_given
        for signal in self.signals:
            signal.forget()
            if signal.name in signals:  # what a replica had alone is of another one where their number has changed
                own: dict[str, Any] = {} if alike else {"own": {}}
                signal.load_state_dict({**signals[signal.name], **own})
        self.update()

    def _read_anchor(self, state: Mapping[str, Any]) -> list[Tensor]:
        """A whole anchor serves every run, one of a share of the entries only runs with the same share."""
        parameters, anchor = self.weights.anchored(), self.anchor
        stride = whole_of(state.get("anchor_stride", 1), "anchor_stride", 1)  # older states have whole ones
        columns = Anchor(stride=stride).columns_of(parameters)
        found = tensors_of(state["anchor"], parameters, "anchor", "the shapes of the optimizer's parameters", columns)
        if anchor is None or not found or stride == anchor.stride:
            return found
        if stride > 1:
            mine = "all of them" if anchor.stride == 1 else f"1 in {anchor.stride}"
            raise ValueError(
                f"the anchor was saved with 1 in {stride} of its entries, and this run needs {mine}: construct the "
                f"scheduler with copies=Copies(anchor_share=1 / {stride}), or start from the weights without its state"
            )
        return anchor.kept(found, anchor.columns_of(parameters))

    def _place_anchor(self, saved: Sequence[Tensor]) -> None:
        if self.anchor is None:
            return
        self.anchor.copies = []
        if saved:
            self.anchor.renew(self.weights.anchored())
            for copy, value in zip(self.anchor.copies, saved, strict=True):
                copy.copy_(value)
            self.anchor.differ_from = None

    def _read_signals(self, saved: Any) -> dict[str, Mapping[str, Any]]:
        """Of each signal that a state has something for; the others of this run start afresh."""
        found = mapping_of(saved, "signals")
        states = {s.name: mapping_of(found[s.name], f"signals[{s.name!r}]") for s in self.signals if s.name in found}
        for signal in self.signals:
            if signal.name in states:
                signal.check_state(states[signal.name])
        return states


def merged(readings: list[Reading]) -> Reading:
    """One reading of several signals, of which the first that shows something counts."""
    losses = next((r for r in readings if r.losses is not None), Reading())
    slopes = next((r for r in readings if r.slopes is not None), Reading())
    return losses._replace(
        slopes=slopes.slopes,
        total_slope=slopes.total_slope,
        probed=next((r.probed for r in readings if r.probed is not None), None),
        sizes=next((r.sizes for r in readings if r.sizes is not None), None),
        learned={name: record for r in readings for name, record in r.learned.items()},
    )


def adopted(state: Mapping[str, Any], *, round_index: int, scale: float = 1.0) -> dict[str, Any]:
    """The state of a run that was trained without hdet so far, nothing known yet.

    ``state``: of the loop that is to continue it. ``scale``: of its learning rates.
    """
    zeros = [0.0] * len(state["scales"])
    num_knobs = len(state["panel"]["names"])
    return {
        **state,
        **NO_ROLLBACK,
        "round": round_index,
        "scales": [scale] * (len(zeros) - num_knobs) + [1.0] * num_knobs,
        "fallen": zeros, "first_level": scale, "warmup": 1.0, "level": None, "first_losses": [], "scheduled": 0.0,
        "searching": False, "searched": 0,
        "controller": {}, "panel": {**state["panel"], "controller": {}},
        "quarantine": pack_quarantine(QuarantineState()),
        "left_at_mean": False, "anchor": [],
        "curve": {"steps": [], "values": []},
        "losses": None, "signals": {},
    }  # fmt: skip


def joined_of(state: Any) -> list[float]:
    """For each param group of a saved state that had joined in mid-run, its share of the first one's learning rate."""
    saved = mapping_of(state, "rounds").get("joined", [])  # older states have none
    joined: list[float] = numbers_of(saved, "joined", None, low=0, high=1e100).tolist()
    return joined


def _moves_nothing(optimizer: Optimizer) -> bool:
    """Whether a step is none of training: torch.distributed.checkpoint takes one to have optimizer state to read into.

    All its learning rates are 0.
    """
    lrs = [group["lr"] for group in optimizer.param_groups]
    # One on an accelerator is not worth waiting for: checkpoint's are on the host.
    return all(not (isinstance(lr, Tensor) and lr.device.type != "cpu") and float(lr) == 0 for lr in lrs)


class LearningRates:
    """The steering's learning rates as one replica has them: schedule x learned scale x multiplier.

    Args:
        optimizer: whose learning rates are steered.
        steering: scales and multipliers.
        index: of this replica.
        knob_of_group: which of the steering's learning rates each param group has.
        one_scale: whether param groups that join later have the first of them, or new ones.
        acts: whether scales and multipliers are applied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steering: Steering,
        *,
        index: int,
        knob_of_group: list[int],
        one_scale: bool,
        acts: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.acts = acts
        self.steering = steering
        self.index = index
        self.knob_of_group = knob_of_group
        self._one_scale = one_scale
        self.joined: list[float] = []
        """Of each param group that joined after the schedule was made, its share of the first one's."""
        self.joined_alike = True
        """Whether all replicas have the same there."""
        self.update()

    def update(self) -> None:
        """The steering has moved."""
        scales = self.steering.effective
        by_knob = (scales * self.steering.multipliers[:, self.index]).tolist()
        if not self.acts:
            by_knob = [1.0] * len(by_knob)
        self.factors: list[float] = [by_knob[knob] for knob in self.knob_of_group]
        """What the schedule's value of each param group is multiplied by."""
        self.scales: FloatArray = scales[: self.steering.num_lrs]
        """Of the steering's learning rates."""
        self.base_factors: list[float] = scales[self.knob_of_group].tolist()
        """The same at the shared centre."""

    def multipliers(self) -> list[float]:
        """This replica's multiplier of each param group."""
        mine = self.steering.multipliers[:, self.index].tolist()
        return [mine[knob] for knob in self.knob_of_group]

    def add_groups(self) -> list[int]:
        """Take up param groups that were added to the optimizer; returns the learning rate that each has."""
        new = []
        for _ in self.optimizer.param_groups[len(self.knob_of_group) :]:
            new.append(0 if self._one_scale else self.steering.add_lr())
            self.knob_of_group.append(new[-1])
        self.update()
        return new

    def set_joined(self, shares: list[float]) -> None:
        """What all replicas have from here on."""
        self.joined, self.joined_alike = shares, True

    def of_all(self, schedule: Sequence[float | Tensor]) -> list[float | Tensor]:
        """The schedule's values of all param groups, from those of the groups it knows."""
        if not self.joined:
            return list(schedule)
        return [*schedule, *(share * schedule[0] for share in self.joined)][: len(self.knob_of_group)]

    def scaled(self, schedule: Sequence[float | Tensor]) -> list[float | Tensor]:
        """This replica's learning rate of each param group, where the schedule gives these to those it knows."""
        return [lr * factor for lr, factor in zip(self.of_all(schedule), self.factors, strict=True)]

    def num_scheduled(self, state: Any) -> int:
        """How many of the param groups, the first ones, the schedule of a saved state knows."""
        num_groups, num_joined = len(self.knob_of_group), len(joined_of(state))
        if num_joined >= num_groups:
            raise ValueError(f"joined must leave out the first of {num_groups} param groups, but got {num_joined}")
        return num_groups - num_joined


class RoundLosses:
    """Losses and optimizer steps of the round so far: this replica's, and everyone's once they are shared.

    Args:
        replicas: who takes part.
        updates_alike: whether all must take the same optimizer steps.
    """

    ROWS = ("totals", "weights", "num_updates")

    def __init__(self, replicas: Replicas, *, updates_alike: bool) -> None:
        self.replicas = replicas
        self.updates_alike = updates_alike
        self.meter = LossMeter()
        self.num_updates = 0
        self._shared: FloatArray | None = None

    def observe(self, loss: Loss, weight: Loss = 1.0) -> None:
        self.meter.observe(loss, weight)
        self._shared = None

    def share(self, reports: Reports) -> None:
        """Keep what all have seen by now: a state that is saved holds everyone's."""
        self._shared = np.stack([reports.totals, reports.weights, reports.num_updates])

    def reset(self) -> None:
        """A round begins."""
        self.meter.reset()
        self.num_updates = 0
        self._shared = None

    def state_dict(self) -> dict[str, list[float]]:
        """Each replica's entry by name; empty lists where they were not shared since."""
        rows = self._shared if self._shared is not None else np.empty((len(self.ROWS), 0))
        return dict(zip(self.ROWS, rows.tolist(), strict=True))

    def read_state(self, state: Any, num_ranks: int) -> FloatArray | None:
        """Everyone's entries, shape (3, N); None where there are none, or of another number of replicas."""
        if num_ranks != self.replicas.count or state is None:
            return None
        saved: Mapping[str, Any] = mapping_of(state, "losses")
        # A loss may have been NaN or infinite. The rest is counted.
        totals = numbers_of(saved["totals"], "totals of the losses", None, finite=False)
        weights = numbers_of(saved["weights"], "weights of the losses", None, low=0)
        num_updates = numbers_of(saved["num_updates"], "num_updates of the losses", None, low=0, high=LARGEST)
        if not len(totals):
            return None
        if {len(totals), len(weights), len(num_updates)} != {num_ranks}:
            raise ValueError(f"losses must hold one entry for each of {num_ranks} replicas, but got {shown(state)}")
        if (num_updates % 1).any():
            raise ValueError(f"num_updates of the losses must be integers, but got {shown(state)}")
        if self.updates_alike and len(set(num_updates)) > 1:
            raise ValueError(f"num_updates must be alike where gradients are shared, but got {num_updates.tolist()}")
        return np.stack([totals, weights, num_updates])

    def load(self, rows: FloatArray | None) -> None:
        """Continue from what :meth:`read_state` has found."""
        self.reset()
        self._shared = rows
        if rows is not None:
            total, weight = (rows[:2, self.replicas.index] / self.replicas.num_parts).tolist()
            self.meter.reset(total, weight)
            self.num_updates = int(rows[2, self.replicas.index])


class Forks:
    """Notices replicas that should hold equal weights and do not, and does what it was told to.

    Args:
        weights: that should be equal.
        choice: what is done about it.
    """

    def __init__(self, weights: Weights, choice: OnFork) -> None:
        self.weights = weights
        self.choice = choice
        self.sums = WeightsSum(weights.moved, weights.optimizer, weights.replicas)
        self._told = False
        self.event = ""
        """What was found at the end of this round, in plain English."""

    def find(self, reports: Reports, counted: BoolArray, step: int) -> Fork | None:
        """Who has to be repaired. Raises, or warns, where it was told to; nothing has changed then."""
        self.event = ""
        if self.choice == "warn" and self._told:
            return None
        fork = self.sums.find_fork(reports.checksums, np.repeat(counted, self.weights.replicas.num_parts))
        if fork is None:
            return None
        first = self.sums.compared()[fork.parameter : fork.parameter + 1]
        text = described(fork, self.weights.name_of(first[0][0]) if first else "the order of values", step)
        if self.choice == "raise":
            raise RuntimeError(
                f"ranks that share gradients must hold equal weights, but {text}. Either nobody averages the gradients "
                "of that parameter, or something has written it on some ranks alone, or the device of such a rank is "
                "faulty. Nothing was changed: resume from a checkpoint. Faults(on_fork='repair') copies from a rank "
                "that others agree with; where ranks are meant to differ, pass Faults(on_fork='warn')"
            )
        self._told = True
        self.event = text
        repaired = (
            "; copied from a rank that others agree with" if self.choice == "repair" else ". This is not repeated"
        )
        warnings.warn(text + repaired, stacklevel=6)
        return fork if self.choice == "repair" else None

    def repair(self, fork: Fork) -> None:
        self.sums.repair(fork)


class Clock:
    """Times the converges of a run, and warns where they are slow.

    Args:
        slow_share: of a round, above which a converge is slow.
    """

    def __init__(self, slow_share: float) -> None:
        self.slow_share = slow_share
        self._started = self._round_ended = math.nan
        self._num_slow = 0

    def start(self) -> None:
        """A converge begins."""
        self._started = time.perf_counter()

    def stop(self, step: int, interval: int) -> float:
        """Seconds since it began; a warning, once, where they are too many of its round's, three times in a row."""
        now = time.perf_counter()
        converge_s, round_s = now - self._started, now - self._round_ended
        self._round_ended = now
        share = converge_s / round_s if round_s > 0 else math.nan
        is_slow = converge_s > SLOW_S and share > self.slow_share
        self._num_slow = self._num_slow + 1 if is_slow or self._num_slow >= NUM_SLOW else 0
        if self._num_slow == NUM_SLOW:
            warnings.warn(
                f"the converge of step {step} took {converge_s:.1f} s, {share:.0%} of its round, and two before it as "
                f"long: a rank or the network is slow. Make rounds longer than {interval} steps, or ask `hdet doctor`. "
                "This warning is not repeated",
                stacklevel=4,
            )
        return converge_s
