"""The first-order signal against finite differences of the loss along the line through the anchor."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet import Adapt, AutoLR
from hdet.replicas.group import Replicas
from hdet.signals.gradient import MAX_SAMPLES, GradientSignal, default_sample_every, mean_and_error
from hdet.weights.anchor import Anchor, Columns
from job import launch
from tiers import slow

BATCH = 8


def make_model(seed: int = 0) -> nn.Sequential:
    g = torch.Generator().manual_seed(seed)
    # Five rows cannot be shared out evenly to two or four ranks.
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    return model


def data(seed: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def shift(parameters: Sequence[Tensor], seed: int = 1) -> None:
    """Go somewhere else, the way training would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype))


def slope_along_the_line(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], anchors: Sequence[Tensor], h: float = 1e-5
) -> float:
    """d loss / d rho at rho = 1 of theta = A + rho (theta - A), by central differences."""
    here = [p.detach().clone() for p in parameters]
    found = []
    with torch.no_grad():
        for rho in (1 + h, 1 - h):
            for p, a, t in zip(parameters, anchors, here, strict=True):
                p.copy_(a + rho * (t - a))
            found.append(loss().item())
        for p, t in zip(parameters, here, strict=True):
            p.copy_(t)
    return (found[0] - found[1]) / (2 * h)


def drain(signal: GradientSignal, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """The end of a round."""
    signal.share(Replicas(group), np.array([np.nan]))
    slopes = signal.drain().slopes
    assert slopes is not None
    return slopes


class Setting:
    """A model away from its anchor, an optimizer that samples before each step, and the anchor."""

    def __init__(
        self,
        make: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.0),
        *,
        per_parameter: bool = False,
        sample_every: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.model = make_model()
        self.parameters = list(self.model.parameters())
        groups: Any = [{"params": [p]} for p in self.parameters] if per_parameter else self.parameters
        self.optimizer = make(groups)
        self.anchor = Anchor()
        self.anchor.renew(self.parameters)
        knobs = list(range(len(self.parameters))) if per_parameter else [0]
        self.signal = GradientSignal(self.anchor, knobs, sample_every=sample_every, num_ranks=num_ranks)
        self.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self.signal.before_step(optimizer))
        shift(self.parameters)

    def drain(self) -> tuple[Any, Any]:
        return drain(self.signal)

    def expected(self, which: Sequence[int] | None = None, sign: float = 1.0) -> float:
        x, y = data()
        chosen = range(len(self.parameters)) if which is None else which
        return sign * slope_along_the_line(
            lambda: mse(self.model, x, y), [self.parameters[i] for i in chosen], [self.anchor.copies[i] for i in chosen]
        )

    def backward(self, scale: float = 1.0) -> None:
        (mse(self.model, *data()) * scale).backward()  # type: ignore[no-untyped-call]


def close(actual: Any, desired: Any) -> None:
    assert_allclose(actual, desired, rtol=1e-6, atol=1e-9)


def test_equals_the_finite_difference_along_the_line() -> None:
    s = Setting()
    expected = s.expected()
    assert abs(expected) > 0.01
    s.backward()
    s.optimizer.step()
    mean, error = s.drain()
    close(mean, [expected])
    assert np.isnan(error).all()  # one sample cannot tell


def test_per_group_and_their_sum() -> None:
    s = Setting(per_parameter=True)
    expected = [s.expected([i]) for i in range(len(s.parameters))]
    whole = s.expected()
    s.backward()
    s.optimizer.step()
    mean, _ = s.drain()
    close(mean, expected)
    close(mean.sum(), whole)


def test_several_groups_may_share_a_knob() -> None:
    s = Setting(per_parameter=True)
    s.signal = GradientSignal(s.anchor, [0, 1, 0, 1, 0, 1], sample_every=1, num_ranks=1)
    s.backward()
    s.optimizer.step()
    close(s.drain()[0], [s.expected([0, 2, 4]), s.expected([1, 3, 5])])


def test_gradient_accumulation() -> None:
    s = Setting()
    x, y = data()
    for part in range(4):
        (mse(s.model, x[part::4], y[part::4]) / 4).backward()  # type: ignore[no-untyped-call]
    s.optimizer.step()
    close(s.drain()[0], [s.expected()])


def test_clipping_scales_it() -> None:
    s = Setting()
    s.backward()
    norm = nn.utils.clip_grad_norm_(s.parameters, 0.01)
    assert norm > 0.01
    s.optimizer.step()
    close(s.drain()[0], [s.expected() * 0.01 / (norm.item() + 1e-6)])


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool, unscale_first: bool) -> None:
    s = Setting(lambda p: torch.optim.Adam(p, lr=0.0, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for _ in range(3):
        s.optimizer.zero_grad()
        scaler.scale(mse(s.model, *data())).backward()  # type: ignore[no-untyped-call]
        if unscale_first:
            scaler.unscale_(s.optimizer)
        scaler.step(s.optimizer)
        scaler.update()
    mean, error = s.drain()
    close(mean, [s.expected()])
    assert error[0] == pytest.approx(0, abs=1e-9)  # the scale changed in between, the sample did not


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_does_not_count(fused: bool) -> None:
    s = Setting(lambda p: torch.optim.Adam(p, lr=0.0, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        s.optimizer.zero_grad()
        scaler.scale(mse(s.model, *data())).backward()  # type: ignore[no-untyped-call]
        if bad:
            gradient = s.parameters[0].grad
            assert gradient is not None
            gradient[0, 0] = math.inf
        scaler.step(s.optimizer)
        scaler.update()
    mean, error = s.drain()
    close(mean, [s.expected()])
    assert error[0] == pytest.approx(0, abs=1e-9)


def test_frozen_parameters_and_missing_gradients() -> None:
    s = Setting(per_parameter=True)
    for p in s.parameters[:2]:
        p.requires_grad_(False)
    s.backward()
    s.parameters[3].grad = None
    s.optimizer.step()
    mean, _ = s.drain()
    assert np.isnan(mean[[0, 1, 3]]).all()
    close(mean[[2, 4, 5]], [s.expected([i]) for i in (2, 4, 5)])

    s = Setting()
    s.parameters[0].requires_grad_(False)
    s.backward()
    s.optimizer.step()
    close(s.drain()[0], [s.expected(range(1, 6))])


def test_without_any_gradient_there_is_no_sample() -> None:
    s = Setting()
    s.optimizer.step()
    mean, error = s.drain()
    assert np.isnan(mean).all()
    assert np.isnan(error).all()


@pytest.mark.parametrize("rows", [[1, 4, 4, 2], [0]])
def test_sparse_gradients(rows: list[int]) -> None:
    embedding = nn.Embedding(6, 3, sparse=True).double()
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    anchor = Anchor()
    anchor.renew([embedding.weight])
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
    shift([embedding.weight])

    def loss() -> Tensor:
        found: Tensor = embedding(torch.tensor(rows)).sin().square().sum()
        return found

    torch.autograd.backward(loss())
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    signal.before_step(optimizer)
    close(drain(signal)[0], [slope_along_the_line(loss, [embedding.weight], anchor.copies)])


def test_maximize() -> None:
    """What is minimised is the negative."""
    s = Setting(lambda p: torch.optim.SGD(p, lr=0.0, maximize=True))
    s.backward()
    s.optimizer.step()
    close(s.drain()[0], [s.expected(sign=-1.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_weights_are_added_up_in_float32(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(4000, dtype=dtype))
    anchor = Anchor()
    anchor.renew([p])
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
    with torch.no_grad():
        p.copy_(torch.rand(4000, generator=g))
    p.grad = torch.rand(4000, generator=g).to(dtype)
    signal.before_step(torch.optim.SGD([p], lr=0.1))
    expected = (p.detach().double() * p.grad.double()).sum().item()
    assert drain(signal)[0][0] == pytest.approx(expected, rel=1e-5)


def test_strided_and_complex_weights() -> None:
    strided = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).t())
    turning = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
    anchor = Anchor()
    anchor.renew([strided, turning])
    signal = GradientSignal(anchor, [0, 1], sample_every=1, num_ranks=1)
    with torch.no_grad():
        strided.mul_(1.5)
        turning.mul_(2)
    strided.grad = torch.ones(3, 4)
    turning.grad = torch.tensor([1 + 1j, 2 + 0j], dtype=torch.complex128)
    signal.before_step(torch.optim.SGD([{"params": [strided]}, {"params": [turning]}], lr=0.1))
    mean, _ = drain(signal)
    assert mean[0] == pytest.approx((strided.detach() / 3).sum().item(), rel=1e-5)
    assert mean[1] == pytest.approx((1 + 2) + 3 * 2)  # torch's gradient of a complex number: by its two parts


# -- many samples ---------------------------------------------------------------------------------------------------


def test_mean_and_error_over_the_finite_samples() -> None:
    samples = np.array([[1.0, math.nan], [math.nan, math.nan], [3.0, 5.0], [math.inf, math.nan], [-1.0, -math.inf]])
    mean, error = mean_and_error(samples)
    assert_allclose(mean, [1.0, 5.0])
    assert error[0] == pytest.approx(float(np.std([1.0, 3.0, -1.0], ddof=1)) / math.sqrt(3))
    assert np.isnan(error[1])
    mean, error = mean_and_error(np.zeros((0, 2)))
    assert np.isnan(mean).all()
    assert np.isnan(error).all()


def test_samples_that_are_not_finite_are_dropped() -> None:
    s = Setting()
    for factor in (1.0, math.nan, 3.0, math.inf):
        s.optimizer.zero_grad()
        s.backward()
        for p in s.parameters:
            assert p.grad is not None
            p.grad.mul_(factor)
        s.signal.before_step(s.optimizer)
    mean, error = s.drain()
    b = s.expected()
    close(mean, [2 * b])
    close(error, [abs(b)])  # b and 3 b


@pytest.mark.parametrize("sample_every", [1, 3])
def test_samples_every_so_many_steps_and_no_more_than_the_table_holds(sample_every: int) -> None:
    s = Setting(sample_every=sample_every)
    s.backward()
    for _ in range(7):
        s.signal.before_step(s.optimizer)
    assert len(s.signal._rows) == math.ceil(7 / sample_every)
    s.signal.forget()
    assert np.isnan(s.drain()[0]).all()
    for _ in range(sample_every * (MAX_SAMPLES + 5)):
        s.signal.before_step(s.optimizer)
    assert len(s.signal._rows) == MAX_SAMPLES
    s.drain()
    assert s.signal._rows == []


# -- many processes -------------------------------------------------------------------------------------------------


def _distributed() -> dict[str, Any]:
    """Each rank has its part of the batch; the drained value is that of the whole batch in one process."""
    warnings.simplefilter("error")
    rank, count = dist.get_rank(), dist.get_world_size()
    x, y = data()
    mine = slice(rank, None, count)
    out: dict[str, Any] = {}

    for per_parameter in (False, True):
        s = Setting(per_parameter=per_parameter, num_ranks=count)
        model = DistributedDataParallel(s.model)
        for _ in range(2):
            s.optimizer.zero_grad()
            torch.autograd.backward(mse(model, x[mine], y[mine]))
            s.optimizer.step()
        out[f"ddp {per_parameter}"] = drain(s.signal, dist.group.WORLD)

    sharded = make_model()
    mesh = init_device_mesh("cpu", (count,))
    fully_shard(sharded, mesh=mesh)
    parameters = list(sharded.parameters())
    out["rows"] = [p.to_local().shape[0] for p in parameters]  # type: ignore[attr-defined]
    anchor = Anchor()
    anchor.renew(parameters)
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.0)
    signal = GradientSignal(anchor, list(range(len(parameters))), sample_every=1, num_ranks=count)
    elsewhere = make_model()
    shift(list(elsewhere.parameters()))
    with torch.no_grad():
        for p, full in zip(parameters, elsewhere.parameters(), strict=True):
            p.copy_(torch.distributed.tensor.distribute_tensor(full.detach(), mesh, p.placements))  # type: ignore[attr-defined]
    torch.autograd.backward(mse(sharded, x[mine], y[mine]))
    signal.before_step(optimizer)
    out["fsdp"] = drain(signal, dist.group.WORLD)
    return out


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_ddp_and_sharded_parameters_give_what_one_process_gives(num_ranks: int) -> None:
    one, each = Setting(), Setting(per_parameter=True)
    for s in (one, each):
        s.backward()
        s.optimizer.step()
    whole, by_parameter = one.drain()[0], each.drain()[0]
    results = launch(_distributed, num_ranks)
    for result in results:
        assert_allclose(result["ddp False"][0], whole, rtol=1e-12)
        assert_allclose(result["ddp True"][0], by_parameter, rtol=1e-12, atol=1e-15)
        assert_allclose(result["ddp False"][1], 0, atol=1e-12)
        assert_allclose(result["fsdp"][0], by_parameter, rtol=1e-12, atol=1e-15)
    assert results[0]["rows"] != results[-1]["rows"]  # uneven shards


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_sampled_after_it_has_run(by_name: bool) -> None:
    lrs: dict[bool, list[float]] = {True: [], False: []}
    for with_closure, found in lrs.items():
        weights = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = torch.optim.SGD([weights], lr=0.01)
        scheduler = AutoLR(
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40), interval=2, adapt=Adapt(_start_steps=0)
        )

        def closure(weights: nn.Parameter = weights) -> float:
            weights.grad = 2 * weights.detach()
            return float(weights.detach().square().sum())

        for _ in range(20):
            if with_closure:
                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            scheduler.step(loss)
            found.append(optimizer.param_groups[0]["lr"])
    assert lrs[True] == lrs[False]


# -- an anchor of a share of the entries ------------------------------------------------------------------------------


def _kept(index: int, width: int, stride: int) -> list[int]:
    return list(range(index % stride, width // stride * stride, stride))


@pytest.mark.parametrize("kind", ["dense", "strided", "sparse", "sparse entries", "complex", "bfloat16"])
def test_a_share_of_the_entries_estimates_the_slope(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    dtype = {"complex": torch.complex128, "bfloat16": torch.bfloat16}.get(kind, torch.float64)
    start = torch.randn(120, 64, generator=g, dtype=torch.float64).to(dtype)
    p = nn.Parameter(start.t().contiguous().t() if kind == "strided" else start.clone())
    bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    anchor = Anchor(stride=8)
    anchor.renew([p, bias])
    assert [c.shape for c in anchor.copies] == [(120, 8), (5,)]
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
    shift([p, bias])
    gradient = torch.randn(120, 64, generator=g, dtype=torch.float64).to(dtype)
    if kind.startswith("sparse"):
        gradient[torch.randperm(120, generator=g)[:80]] = 0
    p.grad = gradient.to_sparse(1 if kind == "sparse" else 2) if kind.startswith("sparse") else gradient
    bias.grad = torch.arange(5.0, dtype=torch.float64)
    signal.before_step(torch.optim.SGD([p, bias], lr=0.1))
    products = ((p.detach() - start).conj() * gradient).real.double()
    expected = sum(products[i, _kept(i, 64, 8)].sum().item() for i in range(120)) * 8
    expected += (bias.detach() * bias.grad).sum().item()
    assert drain(signal)[0][0] == pytest.approx(expected, rel=1e-2 if kind == "bfloat16" else 1e-10)


def test_estimates_have_no_bias() -> None:
    """Over all ways in which rows can come, the mean of the estimates is what is estimated."""
    g = torch.Generator().manual_seed(0)
    gradient, moved = (torch.randn(64, 64, generator=g, dtype=torch.float64) for _ in range(2))
    found = []
    for shift_by in range(8):
        p = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
        anchor = Anchor(stride=8)
        anchor.renew([p])
        signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
        p.grad = gradient.roll(shift_by, 0)
        with torch.no_grad():
            p.copy_(moved.roll(shift_by, 0))
        signal.before_step(torch.optim.SGD([p], lr=0.1))
        found.append(drain(signal)[0][0])
    assert len(set(found)) == 8
    assert np.mean(found) == pytest.approx((gradient * moved).sum().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("interval", "small", "large"),
    [(1, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 2), (20, 1, 5), (32, 1, 8), (100, 2, 8), (1000, 16, 16)],
)
def test_samples_of_a_round_by_default(interval: int, small: int, large: int) -> None:
    for size, expected in ((10_000_000, small), (10_000_001, large)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.empty(size, device="meta"))])
        every = default_sample_every(optimizer, interval)
        assert every == expected
        assert min(4, interval) <= interval // every <= MAX_SAMPLES


@pytest.mark.parametrize("most", [1, 300, 2**22])
def test_tensors_of_a_large_model_are_added_up_together(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """However many at a time, the slopes of both knobs and of all are those of each tensor by itself."""
    monkeypatch.setattr("hdet.signals.dot_products.MAX_JOINED", most)
    g = torch.Generator().manual_seed(0)
    shapes = [(120, 64), (5,), (70, 80), (3, 2), (4100,), (64, 3, 5, 5)]
    parameters = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    starts = [p.detach().clone() for p in parameters]
    anchor = Anchor(stride=8)
    anchor.renew(parameters)
    optimizer = torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.1)
    signal = GradientSignal(anchor, [0, 1], sample_every=1, num_ranks=1, total_slope=True)
    shift(parameters)
    for p in parameters[1:]:
        p.grad = torch.randn(p.shape, generator=g)
    signal.before_step(optimizer)
    expected = [0.0, 0.0]
    for i, (p, start, columns) in enumerate(zip(parameters, starts, anchor.columns, strict=True)):
        if p.grad is not None:
            products = ((p.detach() - start) * p.grad).double()
            kept = products if columns is None else columns.of(products) * columns.weight
            expected[i // 3] += kept.sum().item()
    signal.share(Replicas(None), np.array([1.0]))
    reading = signal.drain()
    assert reading.slopes is not None
    assert reading.total_slope is not None
    assert reading.slopes[0] == pytest.approx(expected, rel=1e-5)
    assert reading.total_slope[0] == pytest.approx(sum(expected), rel=1e-5)


def _products(p: Tensor, start: Tensor, columns: Columns | None) -> float:
    """One after the other."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    found = ((p.detach() - start) * gradient).double()
    return float((found if columns is None else columns.of(found) * columns.weight).sum())


@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_may_lie_otherwise_in_memory_than_in_the_step_before(stride: int, dtype: torch.dtype | None) -> None:
    """What is taken together is known from step to step, until anything about it changes."""
    g = torch.Generator().manual_seed(0)
    shapes = [(120, 64), (5,), (70, 80), (64, 8, 3, 3), (9, 7), (33,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    anchor = Anchor(stride=stride, dtype=dtype)
    optimizer = torch.optim.SGD(parameters[:5], lr=0.1)

    def renew() -> None:
        anchor.renew(parameters[: len(optimizer.param_groups[0]["params"])])
        starts[:] = [p.detach().to(dtype or p.dtype).to(p.dtype, copy=True) for p in parameters]

    def load() -> None:
        anchor.copies = []
        renew()

    def average() -> None:
        for index, copy in enumerate(anchor.copies):
            copy.div_(2)
            starts[index].div_(2)

    def swap(index: int, change: Callable[[Tensor], Tensor]) -> None:
        parameters[index].data = change(parameters[index].data)

    def join() -> None:
        optimizer.param_groups[0]["params"].append(parameters[5])
        anchor.add(parameters[5:])
        starts[5] = parameters[5].detach().to(dtype or torch.float32).to(torch.float32, copy=True)

    starts: list[Tensor] = []
    seen: list[float] = []
    renew()
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
    last, first = torch.channels_last, torch.contiguous_format
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: None,
        lambda: swap(2, lambda t: t.t().contiguous().t()),
        lambda: swap(0, torch.clone),
        lambda: swap(3, lambda t: t.contiguous(memory_format=last)),
        renew,
        lambda: swap(3, lambda t: t.contiguous(memory_format=first)),
        lambda: swap(4, lambda t: torch.cat([t, t])[3:12]),
        load,
        average,
        lambda: None if len(anchor.copies) == 6 else join(),
    ]
    given: list[Callable[[int, Tensor], Tensor | None]] = [
        lambda index, t: t,
        lambda index, t: None if index == 1 else t,
        lambda index, t: t.to_sparse(1) if index == 0 else t,
        lambda index, t: t.mT.contiguous().mT if t.dim() == 2 else t,
        lambda index, t: t.contiguous(memory_format=last) if t.dim() == 4 else t,
        lambda index, t: torch.stack([t, t], -1)[..., 0],
    ]
    for gradient, change in itertools.product(given, changes):
        change()
        shift(parameters, len(seen))
        joined = optimizer.param_groups[0]["params"]
        for index, p in enumerate(joined):
            p.grad = gradient(index, torch.randn(p.shape, generator=g))
        signal.before_step(optimizer)
        together = zip(joined, starts, anchor.columns, strict=False)
        expected = sum(_products(p, start, columns) for p, start, columns in together if p.grad is not None)
        seen.append(drain(signal)[0][0])
        assert seen[-1] == pytest.approx(expected, rel=1e-4, abs=1e-2)


def test_a_rank_without_a_row_of_a_large_tensor_adds_nothing() -> None:
    """Its slope is zero, not missing: the sum over ranks has to be a number."""
    parameter = nn.Parameter(torch.zeros(0, 4096))
    parameter.grad = torch.zeros(0, 4096)
    anchor = Anchor(stride=16)
    anchor.columns, anchor.copies = [Columns(2, 4096, 16, row=2)], [torch.zeros(0, 256)]
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=4)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    signal.before_step(optimizer)
    signal.share(Replicas(None), np.array([1.0]))
    assert signal.samples.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_kinds_of_a_large_model(dtype: torch.dtype) -> None:
    """Products are added up in float32 at least, also where some gradients are sparse or of another kind."""
    g = torch.Generator().manual_seed(1)
    shapes = [(96, 64), (96, 64), (200, 32)]
    parameters = [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]
    anchor = Anchor(stride=8)
    anchor.renew(parameters)
    starts = [p.detach().clone() for p in parameters]
    shift(parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=g).to(dtype)
    dense = parameters[2].grad
    assert dense is not None
    parameters[2].grad = dense.to_sparse(1)
    expected = sum(
        columns.of((p.detach() - start).double() * grad.double()).sum().item() * columns.weight
        for p, start, grad, columns in zip(
            parameters, starts, [parameters[0].grad, parameters[1].grad, dense], anchor.columns, strict=True
        )
        if columns is not None and grad is not None
    )
    signal = GradientSignal(anchor, [0], sample_every=1, num_ranks=1)
    signal.before_step(torch.optim.SGD(parameters, lr=0.1))
    signal.share(Replicas(None), np.array([1.0]))
    assert signal.samples[0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shapes", [[(3,)], [(3,), (2, 4)], [(3,), (80, 80)], [(2, 3, 2, 2), (4,), (70, 70), (5, 2)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_tensors_are_joined_large_ones_are_not_and_none_is_changed(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    if len(shapes[0]) == 4:  # logical order counts, not that of memory
        parameters[0] = nn.Parameter(parameters[0].detach().contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}])
    anchor = Anchor()
    anchor.renew(parameters)
    starts = [p.detach().clone() for p in parameters]
    shift(parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape).to(dtype)
    before = [p.detach().clone() for p in parameters]
    signal = GradientSignal(anchor, [0, 1], sample_every=1, num_ranks=1)
    signal.before_step(optimizer)
    (row,) = torch.cat(signal._rows)
    gradients = [p.grad for p in parameters]
    with torch.no_grad():
        known = [(p, a, g) for p, a, g in zip(before, starts, gradients, strict=True) if g is not None]
        terms = [((p - a).double() * g.double()).sum() for p, a, g in known]
    assert row[0].item() == pytest.approx(terms[0].item(), rel=1e-4, abs=1e-4)
    assert row[1:].nansum().item() == pytest.approx(float(sum(terms[1:])), rel=1e-4, abs=1e-3)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
