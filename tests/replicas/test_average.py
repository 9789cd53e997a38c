"""The mean over replicas (Eq. 3) against NumPy, for every kind of tensor a model may hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

import hdet.replicas.average
from hdet import OneCycleAutoLR
from hdet.replicas.average import mean_
from hdet.replicas.group import Replicas
from hdet.weights.averaged import health_of
from job import launch

Array = NDArray[np.float64]

CASES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "complex64",
    "mixed",
    "zero_size",
    "transposed",
    "channels_last",
    "sliced",
    "expanded",
    "scalar",
    "large",
    "large_strided",
    "integers",
    "bool",
)
SMALL_BUCKET_BYTES = 256


def _build(case: str, replica: int) -> list[Tensor]:
    """What ``replica`` holds in ``case``: a function of its arguments, so that the test knows all replicas' values."""
    g = torch.Generator().manual_seed(100 * CASES.index(case) + replica)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    match case:
        case "float32" | "float64" | "bfloat16" | "float16":
            return [randn(7, 3, dtype=getattr(torch, case)), randn(5, dtype=getattr(torch, case))]
        case "complex64":
            return [torch.complex(randn(3, 4), randn(3, 4)), torch.complex(randn(4, 3), randn(4, 3)).t()]
        case "mixed":
            dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.float64)
            return [randn(6, 5, dtype=dtype) for dtype in dtypes]
        case "zero_size":
            return [randn(0), randn(3, 0, 2), randn(4), torch.zeros(0, dtype=torch.int64)]
        case "transposed":
            return [randn(6, 4).t(), randn(2, 3, 4).permute(2, 0, 1)]
        case "channels_last":
            return [randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
        case "sliced":
            return [randn(10, 8)[::2, 1::3], randn(12)[::5]]
        case "expanded":
            return [randn(1, 4).expand(3, 4), randn(5, 1, 2).expand(5, 6, 2)]
        case "scalar":
            return [randn()]
        case "large":
            return [randn(1000), randn(3), randn(31, 33, dtype=torch.bfloat16), randn(257, dtype=torch.float64)]
        case "large_strided":
            return [randn(40, 60).t(), randn(90, 7)[::3, ::2]]
        case "integers":
            kinds = (torch.int64, torch.int32, torch.int8, torch.uint8)
            return [torch.randint(0, 100, (3, 4), generator=g).to(kind) for kind in kinds] + [
                torch.randint(-100, -1, (4, 3), generator=g).t(),
                torch.randint(-100, 100, (5,), generator=g),
            ]
        case "bool":
            return [torch.randint(0, 2, (20,), generator=g).bool()]
    raise AssertionError(case)


def _numbers(tensor: Tensor) -> Array:
    """Every value as float64, which holds all the others exactly."""
    tensor = tensor.detach()
    values: Array = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().numpy().copy()
    return values


def _means(bucket_bytes: int) -> dict[str, tuple[list[Array], float]]:
    hdet.replicas.average.BUCKET_BYTES = bucket_bytes
    replicas = Replicas(dist.group.WORLD)
    results = {}
    for case in CASES:
        tensors = _build(case, replicas.index)
        layout = [(t.shape, t.stride(), t.data_ptr()) for t in tensors]
        distance = mean_(tensors, replicas, [True] * replicas.count)
        assert layout == [(t.shape, t.stride(), t.data_ptr()) for t in tensors]
        results[case] = [_numbers(t) for t in tensors], distance.item()
    return results


@pytest.mark.parametrize(
    ("num_replicas", "bucket_bytes"),
    [(2, SMALL_BUCKET_BYTES), (3, SMALL_BUCKET_BYTES), (4, hdet.replicas.average.BUCKET_BYTES)],
)
def test_mean_is_numpys_in_every_layout_and_dtype(num_replicas: int, bucket_bytes: int) -> None:
    results = launch(_means, num_replicas, bucket_bytes)
    for case in CASES:
        squares = np.zeros(num_replicas)
        held = [_build(case, r) for r in range(num_replicas)]
        for index, tensor in enumerate(held[0]):
            got = [result[case][0][index] for result in results]
            for other in got[1:]:
                np.testing.assert_array_equal(got[0], other, err_msg=f"{case}[{index}]: replicas differ")
            values = np.stack([_numbers(tensors[index]) for tensors in held])
            if tensor.is_floating_point() or tensor.is_complex():
                mean = values.mean(axis=0)
                eps = torch.finfo(tensor.dtype).eps
                np.testing.assert_allclose(got[0], mean, rtol=eps, atol=2 * eps, err_msg=f"{case}[{index}]")
                unique = values.reshape(num_replicas, -1) if case != "expanded" else _once(values)
                middle = mean.reshape(-1) if case != "expanded" else _once(mean[None])[0]
                squares += ((unique - middle) ** 2).sum(axis=1)
            else:
                np.testing.assert_array_equal(got[0], values.max(axis=0), err_msg=f"{case}[{index}]")
        distances = [result[case][1] for result in results]
        np.testing.assert_allclose(distances, np.sqrt(squares), rtol=2e-2, atol=1e-6, err_msg=case)


def _once(values: Array) -> Array:
    """One copy of each element of the expanded tensors of `_build`."""
    return values[:, 0].reshape(len(values), -1) if values.ndim == 3 else values[:, :, 0].reshape(len(values), -1)


def _sixteen_bits_are_summed_in_32() -> dict[str, Any]:
    replicas = Replicas(dist.group.WORLD)
    healthy = [True] * replicas.count
    results: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
        mine = values.clone()
        mean_([mine], replicas, healthy)
        if dtype in (torch.bfloat16, torch.float16):
            results[f"identical {dtype}"] = torch.equal(mine, values)
        else:
            results[f"identical {dtype}"] = torch.allclose(mine, values, rtol=2 * torch.finfo(dtype).eps, atol=0)
    # A sum in float16 would overflow at 65504.
    high = torch.full((4,), 60000.0, dtype=torch.float16)
    mean_([high], replicas, healthy)
    results["no overflow"] = high.tolist() == [60000.0] * 4
    # In 16 bits 256 + 1 is 256: the ones of the other replicas would be lost.
    small = torch.full((4,), 256.0 if replicas.index == 0 else 1.0, dtype=torch.bfloat16)
    mean_([small], replicas, healthy)
    exact = (256.0 + replicas.count - 1) / replicas.count
    results["small terms count"] = small[0].item() == torch.tensor(exact).bfloat16().item()
    return results


def test_low_precision_is_averaged_in_float32_and_identical_replicas_do_not_change() -> None:
    for result in launch(_sixteen_bits_are_summed_in_32, 3):
        assert all(result.values()), result


def _unhealthy(index: int) -> tuple[list[Array], bool]:
    hdet.replicas.average.BUCKET_BYTES = SMALL_BUCKET_BYTES
    replicas = Replicas(dist.group.WORLD)
    tensors = [
        torch.full((100,), float(replicas.index)),
        torch.full((4,), replicas.index, dtype=torch.int64),
        torch.full((3,), float(replicas.index), dtype=torch.bfloat16),
    ]
    if replicas.index == index:
        tensors[0][17] = math.nan
        tensors[1].fill_(1000)
        tensors[2][1] = math.inf
    healthy = [r != index for r in range(replicas.count)]
    own = health_of(tensors)()
    mean_(tensors, replicas, healthy)
    return [_numbers(t) for t in tensors], own


def test_an_unhealthy_replica_is_left_out_and_receives_the_mean() -> None:
    results = launch(_unhealthy, 3, 1)
    assert [healthy for _, healthy in results] == [True, False, True]
    for tensors, _ in results:
        np.testing.assert_array_equal(tensors[0], np.full(100, 1.0))  # of 0 and 2
        np.testing.assert_array_equal(tensors[1], np.full(4, 2.0))
        np.testing.assert_array_equal(tensors[2], np.full(3, 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_health_finds_one_bad_value_and_no_false_ones(bad: float, dtype: torch.dtype) -> None:
    tensors = [
        torch.zeros(0),
        torch.ones(3),
        torch.ones(5, 4, dtype=dtype).t(),
        torch.arange(3),
        torch.ones(1).expand(9),
    ]
    assert health_of(tensors)()
    if not dtype.is_complex:
        tensors[2].fill_(torch.finfo(dtype).max)  # finite, though its norm is not
        assert health_of(tensors)()
    tensors[2][1, 2] = bad
    assert not health_of(tensors)()


class _Everything(nn.Module):
    """Frozen, tied, sparse, buffered: one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.hidden.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.unused = nn.Parameter(torch.zeros(2))  # not in the optimizer

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.norm(self.head(self.hidden(self.frozen(self.embedding(index)))))
        return out


def _model_tensors(model: nn.Module) -> dict[str, Array]:
    return {name: _numbers(t) for name, t in model.state_dict().items()}


def _model(with_model: bool) -> tuple[dict[str, Array], dict[str, Array], int]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = _Everything()
    nn.init.normal_(model.unused)
    model.get_buffer("mask")[rank] = True
    parameters = [p for name, p in model.named_parameters() if name != "unused"]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = OneCycleAutoLR(
        optimizer, 0.1, 100, ensemble_lr_spread_ratio=0.5, model=model if with_model else None, cycle_momentum=False
    )
    for _ in range(rank + 1):  # so that num_batches_tracked differs
        model.zero_grad()
        model(torch.randint(0, 6, (16,))).square().sum().backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.is_sparse
    optimizer.step()
    scheduler.step()
    before = _model_tensors(model)
    scheduler.converge()
    assert model.head.weight is model.hidden.weight
    return before, _model_tensors(model), rank


@pytest.mark.parametrize("with_model", [True, False])
def test_frozen_tied_sparse_and_buffers_of_a_model(with_model: bool) -> None:
    results = launch(_model, 3, with_model)
    befores = [before for before, _, _ in results]
    for name in befores[0]:
        values = np.stack([before[name] for before in befores])
        after = [got[name] for _, got, _ in results]
        untouched = name.startswith("frozen") or (
            not with_model and (name in ("mask", "unused") or "running" in name or "tracked" in name)
        )
        if untouched:
            for r in range(3):
                np.testing.assert_array_equal(after[r], values[r], err_msg=name)
            continue
        expected = values.max(axis=0) if name == "mask" or "tracked" in name else values.mean(axis=0)
        for r in range(3):
            np.testing.assert_array_equal(after[r], after[0], err_msg=name)
        np.testing.assert_allclose(after[0], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    if with_model:
        assert results[0][1]["norm.num_batches_tracked"] == 3
        assert results[0][1]["mask"].tolist() == [1, 1, 1, 0, 0]


MEMORY_BUCKET_BYTES = 64 * 1024


def _extra_memory() -> dict[str, tuple[int, int]]:
    """By case: the most bytes that were allocated at one time during a converge, and what the tensors hold."""
    hdet.replicas.average.BUCKET_BYTES = MEMORY_BUCKET_BYTES
    replicas = Replicas(dist.group.WORLD)
    cases: dict[str, list[Tensor]] = {
        "float32, many": [torch.ones(1500) for _ in range(100)],
        "float32, large": [torch.ones(500, 300)],
        "float32, strided": [torch.ones(500, 300).t()],
        "float64": [torch.ones(1000, dtype=torch.float64) for _ in range(100)],
        "bfloat16": [torch.ones(1500, dtype=torch.bfloat16) for _ in range(100)],
        "float32 and float64": [torch.ones(150_000), torch.ones(100_000, dtype=torch.float64)],
        "integers": [torch.ones(100_000, dtype=torch.int32)],
    }
    peaks = {}
    for name, tensors in cases.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            mean_(tensors, replicas, [True] * replicas.count)
        live = peak = 0
        profiler: Any = profile.profiler
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: int(e.start_ns())):
            live += event.nbytes()
            peak = max(peak, live)
        peaks[name] = peak, sum(t.nbytes for t in tensors)
    return peaks


MEMORY_CASES = (
    "float32, many",
    "float32, large",
    "float32, strided",
    "float64",
    "bfloat16",
    "float32 and float64",
    "integers",
)


@pytest.fixture(scope="module")
def extra_memory() -> dict[str, tuple[int, int]]:
    results: list[dict[str, tuple[int, int]]] = launch(_extra_memory, 2)
    return {name: (max(r[name][0] for r in results), results[0][name][1]) for name in results[0]}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_extra_memory_is_at_most_two_buckets(case: str, extra_memory: dict[str, tuple[int, int]]) -> None:
    peak, held = extra_memory[case]
    assert held > 2.25 * MEMORY_BUCKET_BYTES  # so that a copy of everything would be seen
    small_things = 16 * 1024  # one number per tensor, shapes and the like
    assert 0 < peak <= 2 * MEMORY_BUCKET_BYTES + small_things
