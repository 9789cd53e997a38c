"""Every signal keeps the contract, and the suite finds those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.ensemble.signals import LossSignal, ProbeSignal
from hdet.policy.level import Sizes
from hdet.replicas.group import Replicas
from hdet.run import merged
from hdet.signals.base import Reading, Signal
from hdet.signals.gradient import GradientSignal
from hdet.signals.held_out import HeldOutGradient
from hdet.signals.update_size import UpdateSize
from hdet.testing import check_signal
from hdet.weights.anchor import Anchor


def _gradient(model: nn.Module, optimizer: Optimizer) -> GradientSignal:
    anchor = Anchor()
    anchor.renew([torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]])
    return GradientSignal(anchor, [0, 1], sample_every=1, num_ranks=1)


def _held_out(model: nn.Module, optimizer: Optimizer) -> HeldOutGradient:
    anchor = Anchor()
    anchor.renew([torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]])
    probe = lambda: model(torch.ones(2, 3)).square().mean()
    return HeldOutGradient(anchor, [0, 1], sample_every=1, num_ranks=1, probe=probe, model=model, probe_every=1)


def _probe(model: nn.Module, optimizer: Optimizer) -> ProbeSignal:
    return ProbeSignal(lambda: model(torch.ones(2, 3)).square().mean(), model)


@pytest.mark.parametrize(
    "make",
    [lambda model, optimizer: LossSignal(), _gradient, _held_out, _probe, lambda *_: UpdateSize(num_ranks=1)],
    ids=["loss", "gradient", "held_out", "probe", "update_size"],
)
def test_a_signal_keeps_the_contract(make: Callable[[nn.Module, Optimizer], Signal]) -> None:
    check_signal(make)


class _Steps(LossSignal):
    """Takes the optimizer's step."""

    def before_step(self, optimizer: Optimizer) -> None:
        optimizer.step()


class _Remembers(LossSignal):
    """Shows what was forgotten."""

    def forget(self) -> None:
        pass


class _Lists(LossSignal):
    """Shows lists instead of arrays."""

    def drain(self) -> Any:
        reading = super().drain()
        return reading._replace(losses=None if reading.losses is None else reading.losses.tolist())


class _Counts(GradientSignal):
    """Counts a share as a step."""

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        super().share(replicas, losses)
        self.samples = self.samples + 1


class _Forgets(GradientSignal):
    """Saves nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state(self, state: Any) -> None:
        pass

    def load_state_dict(self, state: Any) -> None:
        pass


class _Trusts(GradientSignal):
    """Loads anything."""

    def check_state(self, state: Any) -> None:
        pass


def _like_gradient(kind: type[GradientSignal]) -> Callable[[nn.Module, Optimizer], Signal]:
    return lambda model, optimizer: kind(_gradient(model, optimizer).anchor, [0, 1], sample_every=1, num_ranks=1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model, optimizer: _Steps(), "before_step must leave weights, gradients and state alone"),
        (lambda model, optimizer: _Remembers(), "a forgotten round must show nothing"),
        (lambda model, optimizer: _Lists(), "a reading must hold float64 arrays"),
        (lambda model, optimizer: Signal(), "a round of finite steps must show finite numbers"),
        (_like_gradient(_Counts), "sharing in mid-round must not change what it shows"),
        (_like_gradient(_Forgets), "a round continued from a state must show the same"),
        (_like_gradient(_Trusts), "check_state must refuse num_calls=None"),
    ],
)
def test_a_signal_that_breaks_a_rule_is_found(make: Callable[[nn.Module, Optimizer], Signal], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_signal(make)


def test_of_several_signals_the_first_that_shows_something_counts() -> None:
    losses, slopes = np.array([1.0]), (np.array([2.0]), np.array([0.1]))
    sizes = Sizes(1.0, 0.1, 2.0, 3.0)
    assert merged([]) == Reading()
    assert merged([Reading(), Reading(sizes=sizes), Reading(losses)]) == Reading(losses, sizes=sizes)
    assert merged([Reading(slopes=slopes), Reading(), Reading(losses, held_out=True), Reading(losses + 1)]) == Reading(
        losses, slopes, held_out=True
    )
