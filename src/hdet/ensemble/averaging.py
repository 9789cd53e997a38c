"""Replicas that differ: to their mean (Eq. 3), on to where the outer step says, and along the line (Eq. 11)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import BoolArray, FloatArray, flag_of
from hdet.ensemble.knobs.knob_set import KnobSet
from hdet.ensemble.outer import Mean, OuterStep
from hdet.policy.round import Verdict
from hdet.policy.steering import Steering
from hdet.replication import Equal, reset_state, state_tensors
from hdet.signals.base import Signal
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights, shape_digest

StatePolicy = Literal["average", "keep", "reset"]


class Apart(Equal):
    """Replicas that differ between converges, by their learning rates, their knobs or their gradients.

    With one replica nothing differs, and only the knobs are written.

    Args:
        optimizer: whose state is repaired, averaged or reset with the weights.
        weights: what is averaged.
        steering: where knobs stand.
        knobs: those of the steering's panel.
        differs: whether replicas may differ between converges: there are several, and something is spread.
        shared_gradients: whether optimizers see the same gradients.
        anchor: where effects are measured from; None for the last converge.
        on_line: whether rounds start on the line through the anchor.
        outer: where the mean goes.
        optimizer_state: what becomes of the optimizers' state.
        step: optimizer steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Weights,
        steering: Steering,
        knobs: KnobSet | None = None,
        *,
        differs: bool,
        shared_gradients: bool,
        anchor: Anchor | None = None,
        on_line: bool = False,
        outer: OuterStep | None = None,
        optimizer_state: StatePolicy = "keep",
        step: int = 0,
    ) -> None:
        super().__init__(optimizer, weights)
        self.steering = steering
        self.knobs = KnobSet() if knobs is None else knobs
        self.differs = differs
        self.index = self.replicas.index if self.differs else 0
        self.shared_gradients = shared_gradients
        self.anchor = anchor
        self.on_line = on_line
        self.outer = outer or Mean()
        self.optimizer_state: StatePolicy = optimizer_state
        self.state = WeightsState(step)
        self._local = self._without_sync()
        if self.differs:  # replicas may have started apart
            for copies in self._shared_copies():
                copies.differ_from = 0

    @property
    def is_set_aside(self) -> bool:  # type: ignore[override]
        return self.state.is_set_aside

    def _shared_copies(self) -> list[Anchor]:
        return [self.outer.centre, *([self.anchor] if self.anchor is not None else [])]

    def _without_sync(self) -> ExitStack:
        """Keeps DistributedDataParallel from averaging gradients that are each replica's own, until it is closed."""
        stack = ExitStack()
        model: nn.Module | None = None if self.shared_gradients else self.weights.model
        for module in model.modules() if model is not None else ():  # it may be inside a compiled one
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        return stack

    # -- a round ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.outer.begin(self.weights.anchored())

    def end_round(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        if not self.differs:
            return super().end_round(step, verdict, last=last)
        if not verdict.healthy.all() and self.optimizer_state == "keep":  # else averaged or reset with the weights
            self._repair_state(step, verdict.healthy, verdict.quarantined)
        distance, averaged = self._average(step, verdict, last=last)
        self.state.end_round(step, shared=averaged == "all", last=last)
        return distance, averaged

    def _average(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        """Eq. 3 and the outer step."""
        healthy = verdict.healthy
        # Who is fittest is luck where all had the same values.
        differ = self.outer.by_loss and bool(np.ptp(verdict.multipliers, axis=1).any())
        share = self._share_of(verdict.losses if differ else None, healthy, step)
        pulled = self.outer.leaves_apart and not (last or verdict.new_anchor) and bool(healthy.all())
        own = [p.detach().clone() for p in self.weights.anchored()] if pulled else []
        distance = self.weights.average(healthy, step=step, share=share)
        if self.optimizer_state == "average":
            self.weights.average_also(state_tensors(self.optimizer), healthy, share=share)
        elif self.optimizer_state == "reset":
            reset_state(self.optimizer)
        self._share(self.outer.centre)  # they go on from one place
        if pulled:
            self.outer.pull_(self.weights.anchored(), own, self.replicas.count)
            return distance, "pull"
        self.outer.apply_(self.weights.anchored())
        return distance, "all"

    def _share_of(self, losses: FloatArray | None, healthy: BoolArray, step: int) -> float:
        """What this replica counts in the mean. A collective where gradients decide."""
        values = losses
        if self.outer.by_gradient:
            values = np.sqrt(self.replicas.gather([self.outer.squared_norm()], step=step)[:, :, 0].sum(axis=1))
        shares = None if values is None else self.outer.shares(values, healthy)
        return 1.0 if shares is None else float(shares[self.replicas.index])

    def _share(self, copies: Anchor) -> None:
        if copies.differ_from is not None:
            everyone = np.ones(self.replicas.count, dtype=bool)
            self.weights.average_also(copies.copies[copies.differ_from :], everyone)
            copies.differ_from = None

    def restart(self, step: int, *, last: bool) -> None:
        self.outer.restart(self.weights.anchored())
        self.state.end_round(step, shared=True, last=last)

    def next_round(self, multipliers: Sequence[float]) -> None:
        """Eq. 11: from the centre to this replica's place on the line, by each param group's multiplier."""
        if self.anchor is not None:
            self._share(self.anchor)  # the line needs one anchor for all
        if self.on_line:
            assert self.anchor is not None
            groups = zip(self.optimizer.param_groups, multipliers, strict=True)
            self.anchor.place_(self.weights.anchored(), [each for group, each in groups for _ in group["params"]])

    def end(self) -> None:
        super().end()
        self._local.close()

    # -- a mean in mid-round ------------------------------------------------------------------------------------

    def is_mean(self, step: int) -> bool:
        """Whether this replica's weights are the mean: it has not trained since, nor been placed on the line."""
        begun = self.anchor is not None and bool(self.anchor.copies)
        return not self.differs or self.state.is_mean(step, placed=self.on_line and begun)

    def needs_mean(self, step: int) -> bool:
        return step != self.state.mean_step or self.on_line

    def converge(self, step: int, healthy: BoolArray, signals: Sequence[Signal]) -> None:
        """Eq. 3 now; replicas stay at the mean, by their losses where these count, or at the elastic centre."""
        self.weights.average(healthy, step=step, share=self._share_of(self._losses_now(signals), healthy, step))
        if self.outer.leaves_apart and self.outer.centre.copies:
            self._share(self.outer.centre)
            self.outer.apply_(self.weights.anchored())
        self.state.meet(step)
        self.write_knobs()  # one that is a buffer was averaged too

    def _losses_now(self, signals: Sequence[Signal]) -> FloatArray | None:
        """By which replicas count in a mean in mid-round; None where all count the same. A collective."""
        if not self.outer.by_loss or not np.ptp(self.steering.multipliers, axis=1).any():
            return None
        found = (signal.look(self.training_at_base(), self.replicas) for signal in signals)
        return next((losses for losses in found if losses is not None), None)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        with self.weights.set_aside(), self.state.set_aside(), self.outer.set_aside():
            yield

    def refuse_inside(self, call: str) -> None:
        raise RuntimeError(f"{call} must not be called inside `with converged():`; leave the block first")

    # -- knobs --------------------------------------------------------------------------------------------------

    @property
    def knob_values(self) -> Mapping[str, Callable[[float], float]]:  # type: ignore[override]
        return {knob.name: knob.value_at for knob in self.knobs}

    def write_knobs(self, *, at_base: bool = False) -> None:
        if len(self.knobs):
            shared = at_base or self.finished
            self.knobs.write(self.steering.positions(None if shared else self.index))

    def training_at_base(self) -> AbstractContextManager[None]:
        return self.knobs.training_at_base(self.steering.positions(self.index), self.steering.positions())

    # -- what replicas compare, and what joins ------------------------------------------------------------------

    def digest(self, shapes: int) -> int:
        if self.optimizer_state == "average":
            return zlib.crc32(struct.pack("2I", shapes, shape_digest(state_tensors(self.optimizer))))
        return shapes

    def add(self, parameters: Sequence[Tensor]) -> None:
        for knob in self.knobs:
            knob.add_groups()
        self.write_knobs()
        for copies in self._shared_copies():
            if self.differs and copies.differ_from is None and (copies.copies or copies is self.outer.centre):
                copies.differ_from = len(copies.copies)
        self.outer.add(parameters)
        super().add(parameters)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_at_mean": self.state.left_at_mean,
            "outer": self.outer.state_dict(self.weights.anchored()),
            "knobs": self.knobs.starts(),
        }

    def own_state(self, signal: Signal) -> dict[str, Any]:
        own = signal.own_state() if self.differs and self.state.has_own else {}
        return {"own": own} if own else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        flag_of(state["left_at_mean"], "left_at_mean")
        self.outer.check_state(state["outer"], self.weights.anchored())
        self.knobs.check_starts(state["knobs"])

    def restart_knobs(self, state: Mapping[str, Any]) -> Sequence[tuple[float, float]]:
        self.knobs.restart(self.knobs.check_starts(state["knobs"]))
        return self.knobs.bounds()

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        if self.finished:
            self._local = self._without_sync()
        super().load_state_dict(state, step=step)
        self.outer.load_state_dict(state["outer"], self.weights.anchored())
        # A checkpoint is one model: what follows need not bring replicas together first.
        if not self.outer.keeps_centre or self.outer.centre.copies:
            self.outer.centre.differ_from = None
        self.state.resume(step, at_mean=bool(state["left_at_mean"]))


class Where(Enum):
    """Of the weights at hand."""

    OWN = "each replica has its own: where a round has started from, or led to"
    MEAN = "all were left at the mean"


class WeightsState:
    """Where a replica's weights are, and when they last were the mean of all, as a small state machine. No tensors.

    A round ends with :meth:`end_round`. :meth:`meet` is a mean in the middle of a round; within :meth:`set_aside` it
    lasts for a block.

    Args:
        step: optimizer steps taken; all replicas start from the same weights.
    """

    def __init__(self, step: int) -> None:
        self.mean_step = step
        self.where = Where.OWN
        self.is_set_aside = False

    @property
    def has_own(self) -> bool:
        """Whether the weights at hand are this replica's own."""
        return self.where is Where.OWN and not self.is_set_aside

    @property
    def left_at_mean(self) -> bool:
        """Whether a run that continues from here finds the weights at the mean, rather than in their own places."""
        return self.where is Where.MEAN and not self.is_set_aside

    def is_mean(self, step: int, *, placed: bool) -> bool:
        """Whether the weights after ``step`` are the mean; ``placed``: rounds start away from it, along the line."""
        return step == self.mean_step and (self.where is Where.MEAN or not placed)

    def end_round(self, step: int, *, shared: bool, last: bool) -> None:
        """A round has ended, from one place for all where ``shared``; ``last``: the weights stay there."""
        if shared:
            self.mean_step = step
        self.where = Where.MEAN if last else Where.OWN

    def meet(self, step: int) -> None:
        """All are at their mean, in the middle of a round, and stay there."""
        self.mean_step, self.where = step, Where.MEAN

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block with other weights in place of these."""
        assert not self.is_set_aside
        before = self.mean_step, self.where
        self.is_set_aside = True
        try:
            yield
        finally:
            self.is_set_aside = False
            self.mean_step, self.where = before

    def resume(self, step: int, *, at_mean: bool) -> None:
        """Continue from a saved state: one model for all."""
        self.mean_step, self.where = step, Where.MEAN if at_mean else Where.OWN
