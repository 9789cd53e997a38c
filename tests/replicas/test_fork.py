"""Ranks whose weights should be equal and are not: noticed by the bits, named, and an error, a repair or a warning."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hdet import AutoLR, Faults
from hdet.replicas.fork import bit_sums, is_equal, majority, packed
from hdet.replicas.sharding import local_tensor
from hdet.testing import Fault, Injector
from job import error, launch
from native import FACES, INTERVAL, TOTAL_STEPS, Run, net

FOREACH = functools.partial(torch.optim.Adam, foreach=True)
NOTHING_CHANGED = "Nothing was changed: resume from a checkpoint"

# -- the sums ---------------------------------------------------------------------------------------------------------


def _sum(tensor: torch.Tensor) -> int:
    return int(bit_sums([tensor])[0].item())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (4, 6)])
def test_any_bit_changes_the_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    before = _sum(tensor)
    assert _sum(tensor.clone()) == before
    bits = tensor.view(-1).view(torch.uint8)
    for place in (0, len(bits) - 1):
        for bit in (1, 128):
            bits[place] ^= bit
            assert _sum(tensor) != before
            bits[place] ^= bit
    assert _sum(tensor) == before


def test_only_shape_and_values_count() -> None:
    tensor = torch.randn(6, 4)
    assert _sum(tensor.t().contiguous().t()) == _sum(tensor)
    odd = torch.empty(25)[1:].view(6, 4).copy_(tensor)  # starts in the middle of a lane
    assert _sum(odd) == _sum(tensor)
    image = torch.randn(2, 3, 4, 4)
    assert _sum(image.to(memory_format=torch.channels_last)) == _sum(image)
    assert _sum(torch.empty(0, 3)) == 0
    assert _sum(torch.zeros(3)) != _sum(-torch.zeros(3))


def test_small_tensors_are_summed_together() -> None:
    tensors = [torch.zeros(200, 200), torch.ones(3).to(torch.float8_e5m2), torch.ones(5), torch.ones(2, 2)]
    tensors += [torch.ones(1, dtype=torch.complex64), torch.empty(0), torch.ones(4, dtype=torch.int8)]
    found = packed(tensors)
    assert sorted(t.numel() for t in found) == [1, 7, 9, 40_000]
    assert sum(t.nbytes for t in found) == sum(t.nbytes for t in tensors)


def test_who_is_right() -> None:
    """Most of those who hold the same; of equally many, those with the lowest rank. Who is broken has no say."""
    everyone = np.ones(4, dtype=bool)
    one = np.zeros(4)
    assert majority(np.array([5.0, 7, 7, 7]), one, everyone).tolist() == [1, 1, 2, 3]
    assert majority(np.array([5.0, 7, 5, 7]), one, everyone).tolist() == [0, 0, 2, 0]
    assert majority(np.array([5.0, 7, 5, 7]), np.array([0.0, 1, 0, 1]), everyone).tolist() == [0, 1, 2, 3]
    assert majority(np.array([5.0, 7, 7, 7]), one, np.array([True, True, False, False])).tolist() == [0, 0, 2, 3]
    assert majority(np.array([1.0, 2, 3]), np.zeros(3), np.ones(3, bool), order=np.array([2, 0, 1])).tolist() == [
        1,
        1,
        1,
    ]
    assert not is_equal(np.array([5.0, 7, 7, 7]), one, everyone)
    assert is_equal(np.array([5.0, 7, 7, 7]), one, np.array([False, True, True, True]))
    assert is_equal(np.array([5.0, 7, 5, 7]), np.array([0.0, 1, 0, 1]), everyone)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _corrupt(model: nn.Module, index: int) -> None:
    """One bit of one weight, a 2**-38th of it or less; the last one could be rounded away by the next step."""
    parameter = local_tensor(list(model.parameters())[index])
    with torch.no_grad():
        flat = parameter.view(-1).view(torch.int64)
        flat[-1] ^= 2**14


def _forked(choice: str, broken: int, how: str, act: bool = True) -> dict[str, Any]:
    """One weight of one rank changes by one bit in the second round."""
    rank, count = dist.get_rank(), dist.get_world_size()
    faults = Faults(on_fork=choice)  # type: ignore[arg-type]
    run = Run(DistributedDataParallel(net()), FACES["gradient"], (rank, count), faults=faults, act=act)
    whole = Run(DistributedDataParallel(net()), FACES["gradient"], (rank, count))
    run.advance(INTERVAL + 1)
    whole.advance(INTERVAL + 1)
    if rank == broken:
        _corrupt(run.model, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = error(run.scheduler.converge if how == "asked" else lambda: run.advance(TOTAL_STEPS))
    whole.advance(run.scheduler.last_epoch)
    return {
        "error": said,
        "step": run.scheduler.last_epoch,
        "warnings": [str(each.message) for each in caught],
        "weights": run.weights(),
        "undisturbed": whole.weights(),
        "state": [t.tolist() for s in run.optimizer.state.values() for t in s.values()],
        "events": [event for record in run.scheduler.history for event in record.events],
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_weight_that_differs_is_an_error_with_rank_and_parameter(num_ranks: int) -> None:
    for found in launch(_forked, num_ranks, "raise", 1, "end", timeout_s=150):
        others = "those of the lowest rank they compare with" if num_ranks == 2 else "the others'"
        text = f"the weights of rank 1 differ from {others} at step 8, first in 'module.2.weight'"
        assert text in found["error"]
        assert NOTHING_CHANGED in found["error"]
        assert found["step"] == 2 * INTERVAL - 1


def test_it_is_found_before_a_checkpoint_is_saved() -> None:
    for found in launch(_forked, 2, "raise", 0, "asked", timeout_s=150):
        assert "the weights of rank 1 differ" in found["error"]  # of two nobody knows which


def test_a_fork_is_repaired_from_those_who_agree() -> None:
    """Rank 0, which most do not agree with, receives theirs; a warning and the history name it."""
    results = launch(_forked, 4, "repair", 0, "end", timeout_s=150)
    for found in results:
        assert found["error"] == ""
        assert found["weights"] == results[1]["weights"]
        assert found["state"] == results[1]["state"]
        text = "the weights of rank 0 differ from the others' at step 8, first in 'module.2.weight'"
        assert [each for each in found["warnings"] if "differ" in each] == [
            f"{text}; copied from a rank that others agree with"
        ]
        assert found["events"] == [text]
        np.testing.assert_allclose(found["weights"], found["undisturbed"], rtol=1e-9)


@pytest.mark.parametrize(("choice", "act"), [("warn", True), ("raise", False), ("repair", False)])
def test_a_warning_comes_once_and_changes_nothing(choice: str, act: bool) -> None:
    """All that a scheduler does that only looks on."""
    results = launch(_forked, 2, choice, 1, "end", act, timeout_s=150)
    for found in results:
        assert found["error"] == ""
        assert len([each for each in found["warnings"] if "differ" in each]) == 1
    assert results[0]["weights"] != results[1]["weights"]


# -- shards -----------------------------------------------------------------------------------------------------------


def _hsdp(choice: str) -> dict[str, Any]:
    """Two replicas of two shards; a weight of rank 3 differs from that of rank 1, which holds the same shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    model = net(5)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = Run(model, FACES["gradient"], (rank, 4), make=FOREACH, faults=Faults(on_fork=choice))  # type: ignore[arg-type]
    run.advance(INTERVAL + 1)
    if rank == 3:
        _corrupt(run.model, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = error(lambda: run.advance(TOTAL_STEPS))
    parts = [local_tensor(p).tolist() for p in run.model.parameters()]
    return {"error": said, "parts": parts, "warned": [str(c.message) for c in caught if "differ" in str(c.message)]}


def test_copies_of_a_shard_are_compared() -> None:
    for found in launch(_hsdp, 4, "raise", timeout_s=150):
        assert "the weights of rank 3 differ" in found["error"]
        assert "at step 8, first in '0.weight'" in found["error"]


def test_a_shard_is_repaired_from_its_copy() -> None:
    results = launch(_hsdp, 4, "repair", timeout_s=150)
    for rank, found in enumerate(results):
        assert found["error"] == ""
        assert len(found["warned"]) == 1
        assert found["parts"] == results[rank % 2]["parts"]


def _averaged(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def _shards_alone() -> dict[str, Any]:
    """No rank holds what another does, but for a parameter that is not sharded."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    for name, ignored in (("all sharded", False), ("one whole", True)):
        model = net(5)
        bias = list(model.parameters())[3]
        if ignored:
            bias.register_hook(_averaged)  # type: ignore[no-untyped-call]
        fully_shard(model, mesh=mesh, ignored_params={bias} if ignored else None)
        run = Run(model, FACES["gradient"], (rank, 2), faults=Faults(on_fork="raise"))
        run.advance(INTERVAL + 1)
        if rank == 1:
            _corrupt(model, 3 if ignored else 0)
        out[name] = error(functools.partial(run.advance, TOTAL_STEPS))
    return out


def test_what_shards_have_in_common_is_compared() -> None:
    for found in launch(_shards_alone, 2, timeout_s=150):
        assert found["all sharded"] == ""
        assert "the weights of rank 1 differ" in found["one whole"]
        assert "first in '2.bias'" in found["one whole"]


# -- what is no fork --------------------------------------------------------------------------------------------------


def _healthy() -> list[str]:
    """Dtypes, frozen and empty parameters, a rank that breaks and is repaired, and signs of zeros."""
    rank = dist.get_rank()
    said = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(dtype)
        model.extra = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        model.minus = nn.Parameter(-torch.zeros(3, dtype=dtype))
        torch.manual_seed(rank)
        model.frozen = nn.Parameter(torch.randn(3), requires_grad=False)  # differs, and nothing writes it
        ddp = DistributedDataParallel(model, init_sync=False, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = AutoLR(optimizer, total_steps=24, interval=4, model=ddp)
        inject = Injector([Fault("nan_weights", replica=1, step=14)], replica=rank)

        def loop(ddp: Any = ddp, optimizer: Any = optimizer, scheduler: Any = scheduler, inject: Any = inject) -> None:
            for step in range(1, 25):
                optimizer.zero_grad()
                x = torch.randn(4, 3).to(ddp.module.weight.dtype)
                loss = ddp(x).abs().square().mean()
                loss.backward()
                optimizer.step()
                inject.weights(step, ddp)
                scheduler.step(loss.detach().float())

        said.append(error(loop))
        minus = torch.view_as_real(model.minus) if dtype.is_complex else model.minus
        said.append("" if bool(torch.signbit(minus).all()) else "the sign of a zero was lost")
    return said


def test_no_fork_where_there_is_none() -> None:
    for found in launch(_healthy, 2, timeout_s=150):
        assert found == [""] * 6


def test_on_fork_is_checked() -> None:
    with pytest.raises(ValueError, match=r'on_fork must be .*"raise", "repair"'):
        Faults(on_fork="explode")  # type: ignore[arg-type]
