"""How replicas come together: who is left out and mended, whose mean is taken (Eq. 3), and how long it took."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
from torch.optim import Optimizer

from hdet.checks import BoolArray, FloatArray
from hdet.operations import Operations
from hdet.replicas.average import Flight, is_healthy
from hdet.replicas.group import Replicas, shape_digest
from hdet.weights.averaged import Weights
from hdet.weights.outer import OuterStep, StatePolicy, reset_state, state_tensors

SLOW_S = 1.0
"""A converge shorter than this is not worth a warning, whatever its share of the round."""


class Together:
    """The weights' side of a converge.

    Args:
        optimizer: whose state is mended, averaged or reset with the weights.
        weights: what is averaged.
        replicas: who takes part.
        outer: where the mean goes.
        optimizer_state: what becomes of the optimizers' state.
        operations: what is done about faults, and how replicas meet.
        apart: whether replicas may differ between converges.
        shared_gradients: whether their optimizers see the same gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Weights,
        replicas: Replicas,
        *,
        outer: OuterStep,
        optimizer_state: StatePolicy,
        operations: Operations,
        apart: bool,
        shared_gradients: bool,
    ) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.replicas = replicas
        self.outer = outer
        self.optimizer_state: StatePolicy = optimizer_state
        self.operations = operations
        self.shared_gradients = shared_gradients
        self._node = None
        if apart and operations.node_rounds > 1:
            assert operations.node_size is not None
            self._node = replicas.node(operations.node_size)
        self.flight: Flight | None = None
        """A mean on its way."""
        self._round_ended = math.nan
        self._warned_slow = False

    # -- who is left out ----------------------------------------------------------------------------------------

    def mend_state(self, step: int, healthy: BoolArray, exploded: BoolArray) -> None:
        """Give replicas that are left out the optimizer state of the others, where theirs would break them again."""
        if self.optimizer_state != "keep":
            return  # it is averaged or reset with the weights
        state = state_tensors(self.optimizer)
        mine = [float(shape_digest(state)), float(is_healthy(state))]
        shapes, fine = np.moveaxis(self.replicas.gather(mine, step=step), 2, 0)
        fine = (fine > 0).all(axis=1)
        sick, givers = exploded | ~fine, healthy & fine
        if not sick.any():
            return
        if givers.any() and (shapes == shapes[0]).all():
            self.weights.mend(state, givers, alike=self.shared_gradients)
        elif sick[self.replicas.index]:
            reset_state(self.optimizer)

    # -- the mean -----------------------------------------------------------------------------------------------

    def meet(
        self, step: int, healthy: BoolArray, losses: FloatArray, *, round_index: int, at_once: bool
    ) -> tuple[float, str]:
        """Eq. 3 at the end of a round. Returns the replicas' distance from their mean, and whose mean it is.

        With ``at_once`` all replicas meet now; else the mean may be a node's, or :attr:`flight`, which has to land.
        """
        wide = at_once or (round_index + 1) % self.operations.node_rounds == 0
        node, who = (None, "all") if wide else (self._node, "node")
        if self.operations.overlap and not at_once:
            self.flight = self.weights.depart(node)
            return math.nan, who
        shares = self.outer.shares(losses, healthy)
        share = 1.0 if shares is None else float(shares[self.replicas.index])
        distance = self.weights.average(healthy, step=step, share=share, node=node)
        if self.optimizer_state == "average":
            self.weights.average_also(state_tensors(self.optimizer), healthy)
        elif self.optimizer_state == "reset":
            reset_state(self.optimizer)
        return distance, who

    def forget_flight(self) -> None:
        """Drop a mean that is on its way."""
        if self.flight is not None:
            self.flight.abandon()
            self.flight = None

    # -- time ---------------------------------------------------------------------------------------------------

    def clock(self, started: float, step: int, interval: int) -> float:
        """Seconds since ``started``, when a converge began; a warning, once, where they are too many of its round's."""
        now = time.perf_counter()
        converge_s, round_s = now - started, now - self._round_ended
        self._round_ended = now
        share = converge_s / round_s if round_s > 0 else math.nan
        if not self._warned_slow and converge_s > SLOW_S and share > self.operations.slow_share:
            self._warned_slow = True
            warnings.warn(
                f"the converge of step {step} took {converge_s:.1f} s, {share:.0%} of its round: a rank or the network "
                f"is slow. Make rounds longer than {interval} steps, or ask `hdet doctor`. This is said once",
                stacklevel=5,
            )
        return converge_s
