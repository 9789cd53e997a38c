"""Where the weights go: to their mean (Eq. 3), back to the last healthy centre, or along the line (Eq. 11)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import BoolArray, FloatArray
from hdet.engine.place import Place
from hdet.engine.rollback import Fallback
from hdet.policy.verdict import Verdict
from hdet.replicas.average import is_healthy
from hdet.replicas.parameters import shape_digest
from hdet.weights.anchor import Anchor
from hdet.weights.averaged import Weights
from hdet.weights.outer import OuterStep, StatePolicy, reset_state, state_tensors


class Averager:
    """Owns the weights and every copy of them, and knows where they are: nothing else takes a mean.

    Args:
        optimizer: whose state is repaired, averaged or reset with the weights.
        weights: what is averaged.
        apart: whether replicas may differ between converges.
        shared_gradients: whether their optimizers see the same gradients.
        anchor: where effects are measured from; None for the last converge.
        on_line: whether rounds start on the line through the anchor.
        outer: where the mean goes.
        optimizer_state: what becomes of the optimizers' state.
        fallback: what undone rounds go back to.
        undoes: whether there is anything to undo.
        step: optimizer steps already taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Weights,
        *,
        apart: bool,
        shared_gradients: bool,
        anchor: Anchor | None = None,
        on_line: bool = False,
        outer: OuterStep | None = None,
        optimizer_state: StatePolicy = "keep",
        fallback: Fallback | None = None,
        undoes: bool = True,
        step: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.replicas = weights.replicas
        self.apart = apart
        self.shared_gradients = shared_gradients
        self.anchor = anchor
        self.on_line = on_line
        self.outer = outer or OuterStep()
        self.optimizer_state: StatePolicy = optimizer_state
        self.fallback = fallback if undoes else None
        self.place = Place(step)
        if apart:  # replicas may have started apart
            for copies in self._shared_copies():
                copies.differ_from = 0

    def _shared_copies(self) -> list[Anchor]:
        return [self.outer.centre, *([self.anchor] if self.anchor is not None else [])]

    # -- before a step ------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """The optimizer is about to change the weights and its state."""
        self.begin()
        if self.fallback is not None:
            self.fallback.before_step()

    def begin(self) -> None:
        """Remember where training starts, unless it is known."""
        if self.anchor is not None and not self.anchor.copies:
            self.anchor.renew(self.weights.anchored())
        if self.fallback is not None:
            self.fallback.before_first_step(self.weights, self.optimizer)
        if self.apart:
            self.outer.begin(self.weights.anchored())

    @property
    def has_begun(self) -> bool:
        """Whether all copies that a first step makes are there."""
        anchored = self.anchor is None or bool(self.anchor.copies)
        return anchored and (self.fallback is None or self.fallback.snapshot.taken)

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that join in mid-run train along from where they are."""
        for copies in self._shared_copies():
            if self.apart and copies.differ_from is None and (copies.copies or copies is self.outer.centre):
                copies.differ_from = len(copies.copies)
        if self.anchor is not None and self.anchor.copies:
            self.anchor.add(parameters)
        self.outer.add(parameters)
        if self.fallback is not None:
            self.fallback.add(self.weights)
        if self.shared_gradients:
            self.weights.warn_if_not_shared()

    # -- what replicas compare ----------------------------------------------------------------------------------

    def digest(self) -> int:
        """Of what would be averaged: a number that differs where the shapes do."""
        digest = self.weights.digest()
        if self.optimizer_state == "average":
            digest = zlib.crc32(struct.pack("2I", digest, shape_digest(state_tensors(self.optimizer))))
        return digest

    def is_mean(self, step: int) -> bool:
        """Whether this replica's weights are the mean: it has not trained since, nor been placed on the line."""
        begun = self.anchor is not None and bool(self.anchor.copies)
        return not self.apart or self.place.is_mean(step, placed=self.on_line and begun)

    # -- the end of a round -------------------------------------------------------------------------------------

    def end_round(self, step: int, verdict: Verdict, rho: Sequence[float], *, last: bool) -> tuple[float, str]:
        """Send the weights where the verdict says; ``rho``: each param group's multiplier in the next round.

        Returns the largest distance of a replica from the mean, and which mean was taken.
        """
        distance, averaged, healthy = 0.0, "none", verdict.healthy
        if verdict.go_back:
            assert self.fallback is not None
            self.fallback.restore(self.weights, self.optimizer)
            self.outer.restart(self.weights.anchored())
        else:
            if not healthy.all():
                self._repair_state(step, healthy, verdict.quarantined)
            if self.apart:
                distance, averaged = self._average(step, verdict, last=last)
            elif not healthy.all():
                self.weights.repair(self.weights.local().values(), healthy, alike=True)
            if verdict.keep and self.fallback is not None:
                self.fallback.keep(self.weights, self.optimizer)
        self.place.end_round(step, shared=verdict.go_back or averaged == "all", last=last)
        if verdict.new_anchor:
            assert self.anchor is not None
            self.anchor.renew(self.weights.anchored())
            self.anchor.differ_from = None
        if not last:
            if self.anchor is not None:
                self._share(self.anchor)  # the line needs one anchor for all
            self.spread_out(rho)
        return distance, averaged

    def _average(self, step: int, verdict: Verdict, *, last: bool) -> tuple[float, str]:
        """Eq. 3 and the outer step."""
        healthy = verdict.healthy
        # Who is fittest is luck where all had the same values.
        differ = self.outer.kind == "fittest" and bool(np.ptp(verdict.multipliers, axis=1).any())
        shares = self.outer.shares(verdict.losses, healthy) if differ else None
        share = 1.0 if shares is None else float(shares[self.replicas.index])
        pulled = self.outer.kind == "elastic" and not (last or verdict.new_anchor) and bool(healthy.all())
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

    def _repair_state(self, step: int, healthy: BoolArray, exploded: BoolArray) -> None:
        """Give replicas that are left out the optimizer state of the others, where theirs would break them again."""
        if self.optimizer_state != "keep":
            return  # it is averaged or reset with the weights
        state = state_tensors(self.optimizer)
        mine = [float(shape_digest(state)), float(is_healthy(state))]
        shapes, fine = np.moveaxis(self.replicas.gather(mine, step=step), 2, 0)
        fine = (fine > 0).all(axis=1)
        broken, givers = exploded | ~fine, healthy & fine
        if not broken.any():
            return
        if givers.any() and (shapes == shapes[0]).all():
            self.weights.repair(state, givers, alike=self.shared_gradients)
        elif broken[self.replicas.index]:
            reset_state(self.optimizer)

    def _share(self, copies: Anchor) -> None:
        if copies.differ_from is not None:
            everyone = np.ones(self.replicas.count, dtype=bool)
            self.weights.average_also(copies.copies[copies.differ_from :], everyone)
            copies.differ_from = None

    def spread_out(self, rho: Sequence[float]) -> None:
        """Eq. 11: from the centre to this replica's place on the line, by each param group's multiplier."""
        if self.on_line:
            assert self.anchor is not None
            groups = zip(self.optimizer.param_groups, rho, strict=True)
            self.anchor.place_(self.weights.anchored(), [each for group, each in groups for _ in group["params"]])

    # -- a mean in mid-round ------------------------------------------------------------------------------------

    def converge(self, step: int, healthy: BoolArray, losses: FloatArray | None = None) -> None:
        """Eq. 3 now; replicas stay at the mean, by their losses where there are any, or at the elastic centre."""
        shares = None if losses is None else self.outer.shares(losses, healthy)
        share = 1.0 if shares is None else float(shares[self.replicas.index])
        self.weights.average(healthy, step=step, share=share)
        if self.outer.kind == "elastic" and self.outer.centre.copies:
            self._share(self.outer.centre)
            self.outer.apply_(self.weights.anchored())
        self.place.meet(step)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """This replica's own weights come back after the block."""
        with self.weights.set_aside(), self.place.set_aside(), self.outer.set_aside():
            yield

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same names at any time: what a run that has not begun would start from."""
        parameters = self.weights.anchored()
        return {
            "left_at_mean": self.place.left_at_mean,
            "anchor": [] if self.anchor is None else self.anchor.saved(parameters),
            "anchor_stride": 1 if self.anchor is None else self.anchor.stride,
            "outer": self.outer.state_dict(parameters),
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        anchor: Sequence[Tensor],
        rho: Sequence[float],
        *,
        step: int,
    ) -> None:
        """Continue from a state that has been checked; ``anchor``: this rank's part of it."""
        parameters = self.weights.anchored()
        self.outer.load_state_dict(state["outer"], parameters)
        # A checkpoint is one model: what follows need not bring replicas together first.
        if not self.outer.keeps_centre or self.outer.centre.copies:
            self.outer.centre.differ_from = None
        self.place.resume(step, at_mean=bool(state["left_at_mean"]))
        if self.fallback is not None:
            self.fallback.restart(self.weights.local() if self.apart else None)
        if self.anchor is not None:
            self.anchor.copies = []
            if anchor:
                self.anchor.renew(parameters)
                for copy, value in zip(self.anchor.copies, anchor, strict=True):
                    copy.copy_(value)
                self.anchor.differ_from = None
                if not state["left_at_mean"]:
                    self.spread_out(rho)
