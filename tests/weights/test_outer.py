"""The outer step: the mean, the mean of the fittest, DiLoCo's Nesterov; and the optimizers' state at a converge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor, nn

from hdet.ensemble.outer import Fittest, Grawa, Mean, Nesterov, OuterStep, outer_step
from hdet.replication import reset_state, state_tensors

EVERYONE = np.ones(4, dtype=bool)


def _parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), ()]
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in shapes]


def _move(parameters: list[Tensor], seed: int) -> None:
    """What a round and its mean do."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype), alpha=0.1)


def _values(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("outer", [Nesterov(lr=1.0, momentum=0.0), Mean(), Fittest()])
def test_without_momentum_and_with_rate_1_it_is_the_mean_to_the_last_bit(outer: OuterStep, dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    for index in range(5):
        outer.begin(parameters)
        _move(parameters, index)
        mean = _values(parameters)
        outer.apply_(parameters)
        assert _values(parameters) == mean


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.0), (1.5, 0.9)])
def test_it_is_sgd_with_the_displacement_as_gradient(lr: float, momentum: float) -> None:
    outer = Nesterov(lr=lr, momentum=momentum)
    mine, theirs = _parameters(torch.float64), _parameters(torch.float64)
    reference = torch.optim.SGD(theirs, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for index in range(8):
        outer.begin(mine)
        _move(mine, index)
        moved = [t.detach().clone() for t in theirs]
        _move(moved, index)
        for p, mean in zip(theirs, moved, strict=True):
            p.grad = p.detach() - mean
        outer.apply_(mine)
        reference.step()
        assert_allclose(_values(mine), _values(theirs), rtol=1e-12, atol=1e-14)


def test_after_a_rollback_it_is_at_rest() -> None:
    outer, parameters = Nesterov(), _parameters()
    for index in range(2):
        outer.begin(parameters)
        _move(parameters, index)
        outer.apply_(parameters)
    outer.restart(parameters)
    before = _values(parameters)
    outer.apply_(parameters)
    assert _values(parameters) == before
    Mean().restart(parameters)


def test_its_state_survives_saving() -> None:
    def trained(rounds: range, outer: OuterStep, parameters: list[Tensor]) -> list[float]:
        for index in rounds:
            outer.begin(parameters)
            _move(parameters, index)
            outer.apply_(parameters)
        return _values(parameters)

    whole, outer = _parameters(), Nesterov()
    trained(range(3), outer, whole)
    state, at = outer.state_dict(whole), [p.detach().clone() for p in whole]
    expected = trained(range(3, 6), outer, whole)
    resumed = Nesterov()
    resumed.begin([torch.zeros_like(p) for p in at])
    resumed.check_state(state, at)
    resumed.load_state_dict(state, at)
    assert trained(range(3, 6), resumed, at) == expected
    for other in (Mean(), Fittest()):
        other.load_state_dict(state, at)
        assert other.state_dict(at) == {"centre": [], "velocity": []}
    fresh = Nesterov()
    fresh.load_state_dict(Mean().state_dict(at), at)
    assert fresh.centre.copies == fresh.velocity == []


def test_a_state_of_another_model_is_refused() -> None:
    outer, parameters = Nesterov(), _parameters()
    outer.begin(parameters)
    state = outer.state_dict(parameters)
    for name in ("centre", "velocity"):
        for broken in (state[name][:-1], [torch.zeros(2)] * 3, []):
            with pytest.raises(
                ValueError, match=r"the outer step's \w+ must have the parameters' shapes; it is of ano"
            ):
                Nesterov().check_state({**state, name: broken}, parameters)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": 0.0}, r"lr of the outer step must be a finite number > 0, but got lr=0.0"),
        ({"lr": math.nan}, r"lr of the outer step must be a finite number > 0, but got lr=nan"),
        ({"lr": math.inf}, r"lr of the outer step must be a finite number > 0, but got lr=inf"),
        ({"momentum": 1.0}, r"momentum of the outer step must be in \[0, 1\), but got momentum=1.0"),
        ({"momentum": -0.1}, r"momentum of the outer step must be in \[0, 1\), but got momentum=-0.1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Nesterov(**arguments)


def test_it_tells_what_it_is() -> None:
    assert repr(Nesterov()) == "Nesterov(lr=0.7, momentum=0.9)"


def test_names_stand_for_steps() -> None:
    names: tuple[Any, ...] = ("mean", "fittest", "grawa", "nesterov", "elastic")
    assert [repr(outer_step(name)) for name in names] == [
        "Mean()", "Fittest()", "Grawa()", "Nesterov(lr=0.7, momentum=0.9)", "Elastic(pull=0.9)",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r'outer must be one of "mean", "fittest", "grawa", "nesterov", "elastic", but'
    ):
        outer_step("median")  # type: ignore[arg-type]


# -- shares -----------------------------------------------------------------------------------------------------------


def test_shares_are_the_softmax_of_losses_in_units_of_a_fiftieth_of_the_lowest() -> None:
    losses = np.array([1.0, 1.01, 1.04, 1.02])
    weights = np.exp(-losses / 0.02)
    shares = Fittest().shares(losses, EVERYONE)
    assert shares is not None
    assert_allclose(shares, 4 * weights / weights.sum())
    for outer in (Mean(), Nesterov()):
        assert outer.shares(losses, EVERYONE) is None


@given(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_shares_of_the_healthy_are_1_on_average_and_of_the_others_0(losses: list[float], healthy: list[bool]) -> None:
    alive = np.array(healthy)
    shares = Fittest().shares(np.array(losses), alive)
    if alive.sum() < 2:
        assert shares is None
        return
    assert shares is not None
    assert (shares >= 0).all()
    assert shares[alive].mean() == pytest.approx(1)
    assert (shares[~alive] == 0).all()


def test_a_replica_without_a_loss_has_no_share() -> None:
    shares = Fittest().shares(np.array([1.0, math.nan, 1.0, math.inf]), EVERYONE)
    assert shares is not None
    assert shares.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert Fittest().shares(np.array([1.0, math.nan, math.nan, math.nan]), EVERYONE) is None


def test_gradient_norms_count_by_their_inverse() -> None:
    norms = np.array([1.0, 2.0, 4.0, math.nan])
    shares = Grawa().shares(norms, np.array([True, True, True, False]))
    assert shares is not None
    assert_allclose(shares, 3 * np.array([4, 2, 1, 0]) / 7)
    assert_allclose(Grawa().shares(np.array([0.0, 2.0]), np.array([True, True])), [2, 0])  # type: ignore[arg-type]
    assert_allclose(Grawa().shares(norms, EVERYONE), 4 * np.array([4, 2, 1, 0]) / 7)  # type: ignore[arg-type]
    assert Grawa().shares(np.full(4, math.nan), EVERYONE) is None


# -- the optimizers' state --------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


def _steps(optimizer: torch.optim.Optimizer, parameters: list[Tensor], seeds: range) -> None:
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_reset_it_steps_as_a_new_optimizer(name: str) -> None:
    parameters = _parameters()
    optimizer = OPTIMIZERS[name](parameters)
    _steps(optimizer, parameters, range(3))
    held = [t.data_ptr() for t in state_tensors(optimizer)]
    reset_state(optimizer)
    if name in ("adam", "amsgrad", "adamw", "momentum"):
        assert [t.data_ptr() for t in state_tensors(optimizer)] == held  # in place
    others: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in parameters]
    _steps(optimizer, parameters, range(3, 6))
    _steps(OPTIMIZERS[name](others), others, range(3, 6))
    assert_allclose(_values(parameters), _values(others), rtol=1e-6)


def test_tensors_of_the_state_come_in_the_order_of_the_parameters() -> None:
    parameters = _parameters()
    adam = torch.optim.Adam([{"params": parameters[1:]}, {"params": parameters[:1]}])
    assert state_tensors(adam) == []
    _steps(adam, parameters, range(1))
    expected = [adam.state[p][n] for p in (*parameters[1:], parameters[0]) for n in ("exp_avg", "exp_avg_sq", "step")]
    assert [t.data_ptr() for t in state_tensors(adam)] == [t.data_ptr() for t in expected]
    plain = torch.optim.SGD(parameters, lr=0.1)
    _steps(plain, parameters, range(1))
    assert state_tensors(plain) == []
    reset_state(plain)
    momentum = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    _steps(momentum, parameters, range(1))
    assert [t.shape for t in state_tensors(momentum)] == [p.shape for p in parameters]


def test_replicas_that_are_plainly_worse_do_not_count_among_the_fittest() -> None:
    losses = np.array([1.0, 1.02, 2.0, math.nan])
    shares = Fittest().shares(losses, np.array([True, True, True, False]))
    assert shares is not None
    assert shares[:2] == pytest.approx(3 / (1 + math.exp(-1)) * np.array([1, math.exp(-1)]))
    assert shares[2:] == pytest.approx([0, 0], abs=1e-15)
    assert Fittest().shares(np.array([0.0, 0.0]), np.array([True, True])) == pytest.approx([1, 1])
