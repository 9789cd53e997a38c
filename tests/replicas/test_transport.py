"""A mean in fewer bytes against a slow one in NumPy, on real processes; and the bytes it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_communication import _bytes_sent
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet import Adapt, AutoLR, Averaging, Explorer
from hdet.launch import launch
from hdet.replicas.group import Replicas
from hdet.replicas.transport import BLOCK, coded_mean_, decode, encode

Array = NDArray[np.float32]
NUM_REPLICAS = 3


def slow_code(values: Array, transport: str) -> Array:
    """One block of int8, or bfloat16 by hand: round to the upper 16 bits, half to even."""
    if transport == "int8":
        scale = np.float32(max(np.abs(values).max(), np.finfo(np.float32).tiny)) / np.float32(127)
        found: Array = np.rint(values / scale).astype(np.float32) * scale
        return found
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("transport", ["bfloat16", "int8"])
def test_codes_are_those_of_a_slow_version(transport: Any) -> None:
    values = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-6], [30.0]])
    values[0, :BLOCK] = 0
    coded = encode(values, transport)
    assert coded.dtype == torch.uint8
    assert coded.shape == (2, {"bfloat16": 6 * BLOCK, "int8": 3 * (BLOCK + 4)}[transport])
    expected = [[slow_code(block, transport) for block in np.split(row, 3)] for row in values.numpy()]
    np.testing.assert_array_equal(decode(coded, transport).numpy(), np.array(expected).reshape(2, -1))


def _build(replica: int) -> list[Tensor]:
    """Odd sizes, strides, several dtypes, integers, nothing at all."""
    g = torch.Generator().manual_seed(replica)
    wide = torch.randn(40, 60, generator=g)
    return [
        wide.t(),
        torch.randn(7, generator=g),
        torch.randn(31, 3, generator=g).bfloat16(),
        torch.randn(5, generator=g).double(),
        torch.zeros(0),
        torch.tensor([replica, 3]),
    ]


def _base() -> list[Tensor]:
    return [torch.full_like(t, 0.25) for t in _build(0)]


def _coded(transport: Any) -> tuple[list[Tensor], float]:
    import torch.distributed as dist

    tensors = dict(enumerate(_build(dist.get_rank())))
    distance = coded_mean_(tensors, dict(enumerate(_base())), Replicas(dist.group.WORLD), transport)
    return [t.contiguous() for t in tensors.values()], distance.item()


def _slow_mean(transport: str) -> Array:
    """Of all floating-point values in the order they travel: float32 and narrower first, then float64."""
    rows = []
    for replica in range(NUM_REPLICAS):
        moved = [t.float() - 0.25 for t in _build(replica) if t.is_floating_point()]
        rows.append([moved[:3] + moved[4:], moved[3:4]])
    found = []
    for kind in range(2):
        flat = np.stack([torch.cat([t.flatten() for t in row[kind]]).numpy() for row in rows])
        part = -(-flat.shape[1] // (NUM_REPLICAS * BLOCK)) * BLOCK
        padded = np.pad(flat, ((0, 0), (0, NUM_REPLICAS * part - flat.shape[1])))
        blocks = padded.reshape(NUM_REPLICAS, -1, BLOCK)
        sent = np.array([[slow_code(block, transport) for block in row] for row in blocks])
        mean = np.array([slow_code(block, transport) for block in sent.mean(0, dtype=np.float32)])
        found.append(mean.reshape(-1)[: flat.shape[1]])
    return np.concatenate(found)


@pytest.mark.parametrize("transport", ["bfloat16", "int8"])
def test_the_mean_is_that_of_a_slow_version_and_the_same_on_all(transport: str) -> None:
    results = launch(_coded, NUM_REPLICAS, transport, timeout_s=60)
    expected = torch.from_numpy(_slow_mean(transport))
    for tensors, distance in results:
        for mine, theirs in zip(tensors, results[0][0], strict=True):
            assert torch.equal(mine, theirs)
        assert tensors[5].tolist() == [NUM_REPLICAS - 1, 3]
        # As they travel: a transposed tensor by its own order of elements.
        values = torch.cat([t.float().flatten() for t in (*tensors[:3], tensors[3])]) - 0.25
        torch.testing.assert_close(values[:2407], expected[:2407], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values[2407:], expected[2407:], rtol=1e-2, atol=1e-2)  # through bfloat16 weights
        assert distance > 1
    exact = torch.stack([_build(replica)[0].float() for replica in range(NUM_REPLICAS)]).mean(0)
    error = (results[0][0][0] - exact).abs().max()
    assert 0 < error < {"bfloat16": 0.03, "int8": 0.08}[transport]


def _trains(transport: Any, broken_at: int = -1) -> tuple[list[float], float, int]:
    """Losses, the last weights' sum, and bytes sent after the first converge; rank 1 breaks after ``broken_at``."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4000), nn.Tanh(), nn.Linear(4000, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    averaging = Averaging(transport=transport)
    explorer = Explorer(model, optimizer, interval=5, gradients="local", averaging=averaging)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, before = [], 0
    for step in range(40):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        if step == broken_at and dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        explorer.step(loss)
        losses.append(loss.item())
        if step == 4:
            dist.barrier()
            before = _bytes_sent()
    dist.barrier()
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    return losses, total, _bytes_sent() - before


def _trains_by_all() -> dict[str, tuple[list[float], float, int]]:
    return {transport: _trains(transport) for transport in ("full", "bfloat16", "int8")}


def test_it_trains_as_with_the_full_mean_for_a_half_and_a_quarter_of_the_bytes() -> None:
    results = launch(_trains_by_all, 2, timeout_s=100)
    for transport in ("full", "bfloat16", "int8"):
        assert results[0][transport][1] == results[1][transport][1]  # one model in the end
    ends = {name: np.mean([result[name][0][-10:] for result in results]) for name in results[0]}
    starts = np.mean([result["full"][0][:5] for result in results])
    assert ends["full"] < 0.5 * starts
    for name, losses in ends.items():
        assert losses == pytest.approx(ends["full"], rel=0.02), name
    sent = {name: sum(result[name][2] for result in results) for name in results[0]}
    assert sent["full"] == pytest.approx(7 * 2 * 40_001 * 4, rel=0.1)  # seven rounds, each value there and back
    assert sent["bfloat16"] / sent["full"] == pytest.approx(1 / 2, abs=0.03)
    assert sent["int8"] / sent["full"] == pytest.approx(1 / 4, abs=0.03)


def test_a_replica_that_breaks_is_left_out_and_receives_the_mean() -> None:
    (losses, one, _), (_, other, _) = launch(_trains, 2, "int8", 12, timeout_s=60)
    assert one == other
    assert np.isfinite(one)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


def test_where_it_cannot_be_used_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r'transport must be one of .*"int8", but got transport=\'int4\''):
        Averaging(transport="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"overlap needs transport=\"full\", but got transport='int8'"):
        Averaging(transport="int8", overlap=True)


def _anchored() -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r'transport must be "full" where rounds start') as caught:
        AutoLR(schedule, model=model, signal="loss", adapt=Adapt(spread=0.1), averaging=Averaging(transport="int8"))
    return str(caught.value)


def test_on_the_line_it_is_refused() -> None:
    assert "but got transport='int8'" in launch(_anchored, 2, timeout_s=60)[0]


def _one_forgets() -> str:
    import torch.distributed as dist

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging = Averaging(transport="int8")
    explorer = Explorer(model, optimizer, interval=1, gradients="local", averaging=averaging)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        if step == 2:
            if dist.get_rank() == 1:
                explorer._rounds.weights._bases.clear()
            with pytest.raises(RuntimeError, match="replicas must hold the same parameters") as caught:
                explorer.step(1.0)
            return str(caught.value)
        explorer.step(1.0)
    return ""


def test_a_replica_without_the_last_mean_is_found_before_anything_is_sent() -> None:
    assert all(launch(_one_forgets, 2, timeout_s=60))
