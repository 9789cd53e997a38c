"""The anchor: a copy of the weights, Eq. 11, and displacements in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor, nn

import hdet.weights.anchor
from hdet.weights.anchor import Anchor

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def parameters(seed: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def move(tensors: list[nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in tensors:
            t.add_(torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype))


def arrays(tensors: list[nn.Parameter]) -> list[np.ndarray]:
    return [t.detach().double().numpy().copy() for t in tensors]


@given(
    seed=st.integers(0, 1000),
    rhos=st.lists(st.floats(0.01, 1.99), min_size=len(SHAPES), max_size=len(SHAPES)),
)
def test_places_are_those_of_eq_11(seed: int, rhos: list[float]) -> None:
    tensors = parameters(seed)
    anchor = Anchor()
    anchor.renew(tensors)
    start = arrays(tensors)
    move(tensors, seed + 1)
    mean = arrays(tensors)
    anchor.place_(tensors, rhos)
    for t, a, m, rho in zip(tensors, start, mean, rhos, strict=True):
        assert_allclose(t.detach().numpy(), a + rho * (m - a), rtol=1e-12, atol=1e-14)
    for copy, a in zip(anchor.copies, start, strict=True):
        assert np.array_equal(copy.numpy(), a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_multiplier_1_and_a_renewed_anchor_leave_every_bit_alone(dtype: torch.dtype) -> None:
    tensors = parameters(0, dtype)
    anchor = Anchor()
    anchor.renew(tensors)
    move(tensors, 1)
    mean = arrays(tensors)
    anchor.place_(tensors, [1.0] * len(tensors))
    assert all(np.array_equal(a, b) for a, b in zip(arrays(tensors), mean, strict=True))
    anchor.renew(tensors)
    anchor.place_(tensors, [0.3] * len(tensors))
    assert all(np.array_equal(a, b) for a, b in zip(arrays(tensors), mean, strict=True))


def test_the_mean_over_replicas_of_their_places_is_the_mean() -> None:
    tensors = parameters(0)
    anchor = Anchor()
    anchor.renew(tensors)
    move(tensors, 1)
    mean = arrays(tensors)
    placed = []
    for rho in (0.5, 0.9, 1.1, 1.5):
        with torch.no_grad():
            for t, m in zip(tensors, mean, strict=True):
                t.copy_(torch.from_numpy(np.asarray(m)))
        anchor.place_(tensors, [rho] * len(tensors))
        placed.append(arrays(tensors))
    for index, m in enumerate(mean):
        assert_allclose(np.mean([p[index] for p in placed], axis=0), m, rtol=1e-13, atol=1e-14)


def test_a_copy_in_bfloat16_is_an_anchor_nearby() -> None:
    tensors = parameters(0, torch.float32)
    anchor = Anchor(dtype=torch.bfloat16, device="cpu")
    anchor.renew(tensors)
    start = arrays(tensors)
    assert {c.dtype for c in anchor.copies} == {torch.bfloat16}
    rounded = [c.double().numpy() for c in anchor.copies]
    for a, r in zip(start, rounded, strict=True):
        assert_allclose(r, a, rtol=2**-8)
    move(tensors, 1)
    mean = arrays(tensors)
    for index, d in anchor.displacements(tensors):
        assert d.dtype == torch.float32
        assert_allclose(d.numpy(), mean[index] - rounded[index], rtol=1e-6, atol=1e-7)
    anchor.place_(tensors, [1.2] * len(tensors))
    for t, r, m in zip(tensors, rounded, mean, strict=True):
        assert t.dtype == torch.float32
        assert_allclose(t.detach().numpy(), r + 1.2 * (m - r), rtol=1e-5, atol=1e-6)
    anchor.renew(tensors)  # into the same copies
    assert {c.dtype for c in anchor.copies} == {torch.bfloat16}


def test_strided_empty_integer_complex_and_expanded_tensors() -> None:
    strided = torch.arange(12.0, dtype=torch.float64).view(3, 4).t()
    empty = torch.zeros(0, 3, dtype=torch.float64)
    whole = torch.tensor([1, 2])
    turning = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    tensors: list[Tensor] = [strided, empty, whole, turning]
    anchor = Anchor(dtype=torch.float64)
    anchor.renew(tensors)
    with torch.no_grad():
        strided.add_(1)
        whole.add_(5)
        turning.mul_(2)
    anchor.place_(tensors, [1.5] * 4)
    assert_allclose(strided.numpy(), np.arange(12.0).reshape(3, 4).T + 1.5)
    assert strided.stride() == (1, 4)
    assert whole.tolist() == [6, 7]  # no place between two integers
    assert_allclose(turning.numpy(), np.array([1 + 2j, 3 - 1j]) * 2.5)


def test_expanded_parameters_have_a_place_too() -> None:
    """A converge averages them; placing them must not fail either."""
    expanded = torch.ones(1, 3, dtype=torch.float64).expand(4, 3)
    anchor = Anchor()
    anchor.renew([expanded])
    expanded[:1].add_(1)
    anchor.place_([expanded], [1.5])
    assert expanded.tolist() == [[2.5] * 3] * 4


def test_displacements_come_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdet.weights.anchor, "CHUNK_ELEMENTS", 12)
    sizes = [5, 7, 1, 30, 0, 11, 2, 3]
    chunks = list(hdet.weights.anchor._chunks(sizes))
    assert chunks == [[0, 1], [2], [3], [4, 5], [6, 7]]
    assert list(hdet.weights.anchor._chunks([])) == []

    tensors = parameters(0)
    anchor = Anchor()
    anchor.renew(tensors)
    start = arrays(tensors)
    move(tensors, 1)
    found = dict(anchor.displacements(tensors))
    assert list(found) == list(range(len(tensors)))
    for index, d in found.items():
        assert_allclose(d.numpy(), tensors[index].detach().numpy() - start[index])


def test_renewing_copies_into_the_same_memory_unless_shapes_changed() -> None:
    tensors = parameters(0)
    anchor = Anchor()
    anchor.renew(tensors)
    places = [c.data_ptr() for c in anchor.copies]
    move(tensors, 1)
    anchor.renew(tensors)
    assert [c.data_ptr() for c in anchor.copies] == places
    assert all(torch.equal(c, t) for c, t in zip(anchor.copies, tensors, strict=True))
    anchor.renew(tensors[:2])
    assert [c.shape for c in anchor.copies] == [torch.Size(s) for s in SHAPES[:2]]
