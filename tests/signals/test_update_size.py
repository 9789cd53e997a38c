"""Sizes of weights, update and gradient in the step that ends a round, against NumPy."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.policy.level import Sizes
from hdet.replicas.group import Replicas
from hdet.signals.update_size import UpdateSize

NOTHING = np.zeros(0)


def dense(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (tensor if tensor.is_complex() else tensor.double()).clone().numpy().ravel()


def norm(parts: list[np.ndarray[Any, Any]]) -> float:
    return math.sqrt(sum(float((np.abs(part.astype(complex)) ** 2).sum()) for part in parts))


def measured(optimizer: Optimizer, stride: int = 1) -> tuple[Sizes, Sizes]:
    """What the signal shows of a step, and what it should."""
    signal = UpdateSize(num_ranks=1, stride=stride)
    trained = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}.values()
    before, gradients = [dense(p) for p in trained], [dense(p.grad) for p in trained]
    signal.ends_round = True
    signal.before_step(optimizer)
    optimizer.step()
    moved = [dense(p) - was for p, was in zip(trained, before, strict=True)]
    signal.launch()
    signal.share(Replicas(None), NOTHING)
    found = signal.drain().sizes
    assert found is not None
    assert signal.drain().sizes is None
    return found, Sizes(norm(before), norm(moved), norm(gradients), sum(len(part) for part in before))


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
        p.grad = (0.1 * torch.randn(shape, generator=generator)).to(dtype)
        found.append(p)
    return found


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_norms_are_over_all_entries_that_have_a_gradient(kind: str) -> None:
    weight, bias, frozen, unused = parameters((30, 20), (20,), (7, 7), (5,))
    frozen.requires_grad_(False)
    frozen.grad = unused.grad = None
    groups = [{"params": [weight, frozen], "lr": 0.1}, {"params": [bias, unused], "lr": 1e-3}]
    found, expected = measured(getattr(torch.optim, kind)(groups, lr=0.1))
    assert_allclose(found, expected, rtol=1e-5)
    assert found.num == 30 * 20 + 20


def test_an_update_far_smaller_than_the_weights_is_still_seen() -> None:
    """As in the first steps: of a millionth, which single precision has eight digits for."""
    (p,) = parameters((1000,), dtype=torch.float64)
    found, expected = measured(torch.optim.SGD([p], lr=1e-5))
    assert_allclose(found, expected, rtol=1e-9)
    (p,) = parameters((1000,))
    found, expected = measured(torch.optim.Adam([p], lr=1e-12))
    assert found.update <= 1e-9 * found.weights  # and what is lost in rounding is not


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_floating_point(dtype: torch.dtype) -> None:
    found, expected = measured(torch.optim.SGD(parameters((40, 30), (3,), dtype=dtype), lr=1.0))
    assert_allclose(found, expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)


def test_several_dtypes_at_once() -> None:
    parts = [parameters((8, 4), dtype=dtype)[0] for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    found, expected = measured(torch.optim.SGD(parts, lr=0.1, foreach=False))
    assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_count_with_both_parts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(50, generator=generator, dtype=dtype))
    p.grad = torch.randn(50, generator=generator, dtype=dtype)
    found, expected = measured(torch.optim.SGD([p], lr=0.1))
    assert_allclose(found, expected, rtol=1e-5)


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(50, 8, sparse=True)
    torch.autograd.backward(embedding(torch.tensor([3, 7, 7, 20])).square().sum())
    found, expected = measured(torch.optim.SGD(embedding.parameters(), lr=0.1))
    assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    torch.autograd.backward(model(torch.ones(2, 6)).square().sum())
    found, expected = measured(torch.optim.SGD(model.parameters(), lr=0.1))
    assert_allclose(found, expected, rtol=1e-5)
    assert found.num == 6 * 6 + 2 * 6


@pytest.mark.parametrize("shape", [(300, 200), (60_000,), (64, 16, 5, 5)])
def test_of_a_large_tensor_a_share_is_measured(shape: tuple[int, ...]) -> None:
    found, expected = measured(torch.optim.Adam(parameters(shape, (100,)), lr=0.1), stride=16)
    assert_allclose(found, expected, rtol=0.05)
    assert found.num == pytest.approx(expected.num, rel=1e-6)


def test_a_step_that_breaks_the_weights_has_no_size() -> None:
    (p,) = parameters((10,))
    p.grad = torch.full((10,), math.inf)
    found, _ = measured(torch.optim.SGD([p], lr=0.1))
    assert not math.isfinite(found.update)
    assert math.isfinite(found.weights)


def test_empty_parameters_do_no_harm() -> None:
    found, expected = measured(torch.optim.SGD(parameters((0, 3), (4,)), lr=0.1))
    assert_allclose(found, expected, rtol=1e-5)
    found, _ = measured(torch.optim.SGD(parameters((0,)), lr=0.1))
    assert found == (0.0,) * 6


def test_what_others_train_is_measured_beside_it() -> None:
    own, *others = parameters((30, 20), (40, 8), (5,))
    asked = []
    signal = UpdateSize(num_ranks=1, others=lambda: asked.append(1) or others)  # type: ignore[func-returns-value]
    optimizer = torch.optim.SGD([own], lr=0.1)
    for factor in (1.0, 3.0):  # they train, too
        signal.ends_round = True
        signal.before_step(optimizer)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_mul_(list[Tensor](others), factor)
        signal.launch()
        signal.share(Replicas(None), NOTHING)
        found = signal.drain().sizes
        assert found is not None
        assert (found.num, found.num_others) == (600, 325)
        assert found.others == pytest.approx(norm([dense(p) for p in others]))
    assert asked == [1]


# -- when -----------------------------------------------------------------------------------------------------------


def test_only_the_step_that_ends_a_round_is_measured_and_nothing_is_kept() -> None:
    optimizer = torch.optim.SGD(parameters((20,)), lr=0.1)
    signal = UpdateSize(num_ranks=1)
    for ends in (False, False, True, False):
        signal.ends_round = ends
        signal.before_step(optimizer)
        assert bool(signal._before) == ends
        kept = [weakref.ref(tensor) for _, _, tensor in signal._before]
        optimizer.step()
        signal.launch()
        signal.share(Replicas(None), NOTHING)
        assert not signal._before
        assert not signal._gradients
        gc.collect()
        assert [ref() for ref in kept] == [None] * len(kept)
        assert (signal.drain().sizes is not None) == ends


def test_a_copy_is_dropped_in_the_next_step_where_nobody_has_shared() -> None:
    optimizer = torch.optim.SGD(parameters((20,)), lr=0.1)
    signal = UpdateSize(num_ranks=1)
    signal.ends_round = True
    signal.before_step(optimizer)
    signal.ends_round = False
    signal.before_step(optimizer)
    signal.launch()
    signal.share(Replicas(None), NOTHING)
    assert signal.drain().sizes is None


def test_without_a_gradient_there_is_nothing_to_measure() -> None:
    (p,) = parameters((20,))
    p.grad = None
    signal = UpdateSize(num_ranks=1)
    signal.ends_round = True
    signal.before_step(torch.optim.SGD([p], lr=0.1))
    signal.launch()
    signal.share(Replicas(None), NOTHING)
    assert signal.drain().sizes is None
