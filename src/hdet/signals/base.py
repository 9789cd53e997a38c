"""The contract of a signal: what a round shows about the learning rates and knobs, measured along the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.history import HeldOut, KnobRecord
from hdet.policy.level import Sizes
from hdet.replicas.group import Replicas


class Reading(NamedTuple):
    """What one signal shows of a round, the same on every rank.

    Attributes:
        losses: of each replica, shape (N,), where it compares replicas; NaN for one that has none.
        slopes: of the loss over the logarithm of each learning rate, and their standard errors, shape (K,) each, where
            it measures them; NaN where it could not.
        total_slope: the same of all learning rates at once, where it is asked for that.
        held_out: whether ``losses`` are on held-out data, which a record shows apart from the training losses.
        probed: what held-out data show of the learning rate, where they are asked about it.
        learned: knobs that it has moved itself, to first order, by name.
        trained: mean training loss of each replica late in the round, beside ``losses`` on held-out data.
        sizes: of weights and update in the round's last step, where they were measured.
    """

    losses: FloatArray | None = None
    slopes: tuple[FloatArray, FloatArray] | None = None
    total_slope: tuple[float, float] | None = None
    held_out: bool = False
    probed: HeldOut | None = None
    learned: Mapping[str, KnobRecord] = MappingProxyType({})
    trained: FloatArray | None = None
    sizes: Sizes | None = None


class Signal:
    """Sees every optimizer step, and is read once a round.

    In this order: :meth:`before_step` in every step; at the end of a round :meth:`measure`, if a controller is going
    to act on it; :meth:`launch` and :meth:`share`, when ranks meet; :meth:`drain`. In the middle of a round, where a
    checkpoint is saved, :meth:`launch` and :meth:`share` alone. All of it does nothing unless a signal says otherwise.
    :func:`hdet.testing.check_signal` checks a signal of your own.
    """

    name: str
    """In a saved state."""
    compares = True
    """Whether it shows anything only where replicas are apart."""
    ends_round = False
    """Whether a round ends with the step that follows, set before each."""
    only_at_end = False
    """Whether :meth:`share` is for the ends of rounds alone: what it brings is not complete before."""
    needs_losses = False
    """Whether it shows nothing unless each replica was given a loss in every round."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are in place, and the weights have not moved. Must change neither, and wait for no device."""

    def observe(self, loss: Tensor | float, weight: Tensor | float) -> None:
        """This replica's training loss of a step. Must wait for no device."""

    def refuse_capture(self) -> None:
        """Raise where :meth:`before_step` must not become part of a CUDA graph."""

    def measure(self, training_at_base: AbstractContextManager[None]) -> None:
        """Measure on this rank, before ranks meet.

        Inside ``training_at_base``, knobs that act in training alone are the same on every replica.
        """

    def launch(self) -> None:
        """Start on the devices what :meth:`share` reads, so that they need not wait for the host. Must not wait."""

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        """Bring what ranks have seen so far to all of them; may be a collective. The round may go on afterwards.

        ``losses``: mean training loss of each replica in the round so far, which every mode observes.
        """

    def look(self, training_at_base: AbstractContextManager[None], replicas: Replicas) -> FloatArray | None:
        """A loss of each replica's weights as they are now, where their mean should go by it; may be a collective."""
        return None

    def drain(self) -> Reading:
        """What the round has shown, as it was shared; the next round begins."""
        return Reading()

    def forget(self) -> None:
        """Drop what a round has shown so far."""

    def add_group(self, knob: int) -> None:
        """One more param group, of a learning rate that may be new."""

    def state_dict(self) -> dict[str, Any]:
        """Plain types, complete and the same on every rank after :meth:`share`."""
        return {}

    def own_state(self) -> dict[str, Any]:
        """What this replica alone has seen, for a state that is saved while replicas are apart, by each for itself."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError or KeyError where :meth:`load_state_dict` could not use it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
