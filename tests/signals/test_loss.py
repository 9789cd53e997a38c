"""The loss meter: what it accepts, what it refuses, and that it adds up."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdet import AutoLR
from hdet.signals.loss import LossMeter

FLOAT_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

losses = st.floats(-1e6, 1e6)
weights = st.floats(0, 1e6)


def metered(*observations: tuple[Any, Any]) -> tuple[float, float]:
    meter = LossMeter()
    for loss, weight in observations:
        meter.observe(loss, weight)
    return meter.drain()


# -- what it accepts ------------------------------------------------------------------------------------------------


def test_a_fresh_meter_has_seen_nothing() -> None:
    assert LossMeter().drain() == (0.0, 0.0)


@pytest.mark.parametrize("loss", [2.5, np.float64(2.5), np.float32(2.5), Fraction(5, 2)])
def test_a_loss_may_be_a_number(loss: Any) -> None:
    meter = LossMeter()
    meter.observe(loss)
    assert meter.drain() == (2.5, 1.0)


@pytest.mark.parametrize("loss", [3, np.int64(3)])
def test_a_loss_may_be_a_whole_number(loss: Any) -> None:
    assert metered((loss, 2)) == (6.0, 2.0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_loss_may_be_a_tensor_with_one_float(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 2.5, dtype=dtype)
    meter = LossMeter()
    meter.observe(loss)
    meter.observe(loss, 3)
    assert meter.drain() == (10.0, 4.0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("loss", [2.5, torch.tensor(2.5), torch.tensor([2.5], dtype=torch.bfloat16)])
def test_a_weight_may_be_a_tensor_too(loss: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert metered((loss, torch.full(shape, 4.0, dtype=dtype))) == (10.0, 4.0)


def test_a_loss_that_needs_a_gradient_keeps_it() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss = x**2
    meter = LossMeter()
    meter.observe(loss)
    meter.observe(loss, 2.0)
    torch.autograd.backward(loss)
    assert x.grad is not None
    assert x.grad.item() == 6.0
    assert meter.drain() == (27.0, 3.0)


def test_a_tensor_may_be_overwritten_after_it_was_observed() -> None:
    loss = torch.tensor(1.0)
    meter = LossMeter()
    meter.observe(loss)
    loss.fill_(7.0)
    assert meter.drain() == (1.0, 1.0)


@pytest.mark.parametrize("weight", [1.0, 2, torch.tensor(2.0, device="meta")])
def test_observing_never_reads_a_value(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A meta tensor, let in for once, has none: reading it raises.
    monkeypatch.setattr("hdet.signals.loss.require_scalar", lambda *_: None)
    meter = LossMeter()
    meter.observe(torch.ones((), device="meta"), weight)
    meter.observe(torch.ones(1, device="meta"), weight)
    with pytest.raises(RuntimeError, match="meta"):
        meter.drain()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_that_is_not_finite_stays_visible(bad: float, as_tensor: bool) -> None:
    total, weight = metered((1.0, 1.0), (torch.tensor(bad) if as_tensor else bad, 1.0))
    assert str(total) == str(bad)
    assert weight == 2.0


# -- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (10**400, r"loss must be a number that a float can hold, up to 1.8e308, but got 1000.*; divide it first"),
        (-(10**400), r"loss must be a number that a float can hold, up to 1.8e308, but got -1000.*; divide it first"),
        (torch.ones((), device="meta"), "loss must be a tensor with a value, but got one on the meta device"),
        (torch.ones(1, device="meta"), "loss must be a tensor with a value, but got one on the meta device"),
        (torch.ones(()).to_sparse(), r"loss must be a dense tensor, but got layout torch.sparse_coo; pass loss.to_de"),
        (torch.ones(1).to_sparse(), r"loss must be a dense tensor, but got layout torch.sparse_coo; pass loss.to_de"),
    ],
    ids=["huge", "negative", "meta", "meta, one element", "sparse", "sparse, one element"],
)
def test_numbers_that_cannot_be_read_are_refused(loss: Any, text: str) -> None:
    meter = LossMeter()
    with pytest.raises(ValueError, match=text):
        meter.observe(loss)
    with pytest.raises(ValueError, match=text.replace("loss must", "weight must", 1).replace("-", "")):
        meter.observe(1.0, abs(loss))
    assert meter.drain() == (0.0, 0.0)
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    scheduler = AutoLR(optimizer, total_steps=20)
    weights.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(ValueError, match=text):
        scheduler.step(loss)
    scheduler.step(1.0)
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("loss", [{"a": 1.0}, [1.0], "1.0", None, 1j, np.ones(1)])
def test_other_types_are_refused_by_name(loss: Any) -> None:
    name = type(loss).__name__
    with pytest.raises(
        TypeError, match=rf"loss must be a number or a tensor with one element, but got {name}; pass the scalar"
    ):
        LossMeter().observe(loss)


@pytest.mark.parametrize("shape", [(4,), (0,), (2, 3)])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_batch_of_losses_is_refused(shape: tuple[int, ...], weight: float) -> None:
    listing = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    with pytest.raises(
        ValueError, match=rf"loss must have one element, but got shape \({listing}\); reduce it first, e.g. loss.mean"
    ):
        LossMeter().observe(torch.ones(shape), weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensors_that_are_not_floats_are_refused(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=f"loss must be a floating-point tensor, but got dtype {dtype}"):
        LossMeter().observe(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, -math.inf, "3", None, [1.0]])
@pytest.mark.parametrize("loss", [1.0, torch.tensor(1.0)])
def test_bad_weights_are_refused(loss: Any, weight: Any) -> None:
    with pytest.raises(ValueError, match=r"weight must be a finite number >= 0, but got weight="):
        LossMeter().observe(loss, weight)


def test_bad_weight_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight must have one element, but got shape \(2,\)"):
        LossMeter().observe(1.0, torch.ones(2))
    with pytest.raises(TypeError, match=r"weight must be a floating-point tensor, but got dtype torch\.int64"):
        LossMeter().observe(1.0, torch.tensor(3))


@pytest.mark.parametrize(
    ("loss", "weight"), [({}, 1.0), (torch.ones(3), 1.0), (1.0, -1), (1.0, torch.ones(2)), (torch.tensor(1), 2.0)]
)
def test_what_is_refused_leaves_no_trace(loss: Any, weight: Any) -> None:
    meter = LossMeter()
    meter.observe(torch.tensor(2.0), 3)
    with pytest.raises((TypeError, ValueError), match=r"loss|weight"):
        meter.observe(loss, weight)
    assert meter.drain() == (6.0, 3.0)


# -- that it adds up ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(losses, weights, st.booleans(), st.booleans()), max_size=20))
def test_the_mean_is_weighted(rows: list[tuple[float, float, bool, bool]]) -> None:
    meter = LossMeter()
    for loss, weight, loss_on_device, weight_on_device in rows:
        meter.observe(
            torch.tensor(loss, dtype=torch.float64) if loss_on_device else loss,
            torch.tensor(weight, dtype=torch.float64) if weight_on_device else weight,
        )
    total, weight_sum = meter.drain()
    size = math.fsum(abs(loss * weight) for loss, weight, *_ in rows)
    assert total == pytest.approx(math.fsum(loss * weight for loss, weight, *_ in rows), rel=1e-12, abs=1e-12 * size)
    assert weight_sum == pytest.approx(math.fsum(weight for _, weight, *_ in rows), rel=1e-12)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50))
def test_half_the_losses_at_weight_two_count_as_much_as_all_twice(values: list[float]) -> None:
    once = metered(*((torch.tensor(v, dtype=torch.float64), 2.0) for v in values))
    twice = metered(*((torch.tensor(v, dtype=torch.float64), 1.0) for v in values + values))
    assert once == pytest.approx(twice, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_many_small_losses_do_not_lose_precision(dtype: torch.dtype) -> None:
    loss = torch.tensor(0.1, dtype=dtype)
    meter = LossMeter()
    for _ in range(5000):
        meter.observe(loss)
    total, weight = meter.drain()
    assert weight == 5000
    assert total / weight == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("num_tokens", [1000, 32768, 100_000])
def test_a_weighted_loss_is_not_rounded_to_its_own_precision(dtype: torch.dtype, num_tokens: int) -> None:
    # A token count times a loss overflows float16 and loses digits in bfloat16.
    loss = torch.tensor(2.015625, dtype=dtype)
    assert metered((loss, num_tokens)) == (loss.item() * num_tokens, num_tokens)
    assert metered((loss, torch.tensor(float(num_tokens)))) == (loss.item() * num_tokens, num_tokens)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_weight_tensor_does_not_round_the_loss(dtype: torch.dtype) -> None:
    weight = torch.tensor(32768.0, dtype=dtype)
    assert metered((2.001953125, weight)) == (2.001953125 * 32768, 32768)


# -- draining -------------------------------------------------------------------------------------------------------


@given(st.lists(losses, max_size=20), st.booleans())
def test_draining_twice_changes_nothing(values: list[float], on_device: bool) -> None:
    meter = LossMeter()
    for value in values:
        meter.observe(torch.tensor(value, dtype=torch.float64) if on_device else value)
    assert meter.drain() == meter.drain()


@given(st.lists(losses, max_size=20), st.lists(losses, max_size=20), st.booleans())
def test_a_meter_restored_from_a_drain_goes_on_bit_for_bit(
    before: list[float], after: list[float], on_device: bool
) -> None:
    def observe(meter: LossMeter, values: list[float]) -> None:
        for value in values:
            meter.observe(torch.tensor(value, dtype=torch.float64) if on_device else value, 0.7)

    going_on, restored = LossMeter(), LossMeter()
    observe(going_on, before)
    restored.reset(*going_on.drain())
    observe(going_on, after)
    observe(restored, after)
    assert going_on.drain() == restored.drain()


def test_reset_forgets_host_and_device() -> None:
    meter = LossMeter()
    meter.observe(1.0)
    meter.observe(torch.tensor(2.0), torch.tensor(3.0))
    meter.reset()
    assert meter.drain() == (0.0, 0.0)
    meter.observe(torch.tensor(4.0))
    assert meter.drain() == (4.0, 1.0)


@given(st.lists(losses, max_size=20), st.data())
def test_reading_the_sums_or_going_on_from_them_changes_no_bit(values: list[float], data: st.DataObject) -> None:
    meter, read, continued = LossMeter(), LossMeter(), LossMeter()
    for value in values:
        for each in (meter, read, continued):
            each.observe(torch.tensor(value, dtype=torch.float64))
        if data.draw(st.booleans()):
            sums = read.drain()
            continued = LossMeter()
            continued.reset(*sums)
    assert meter.drain() == read.drain() == continued.drain()
