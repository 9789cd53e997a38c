"""The snapshot: weights and optimizer state come back exactly, in the tensors that were there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.group import Replicas
from hdet.weights.averaged import Weights
from hdet.weights.snapshot import Snapshot, Undo

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def make(name: str, count: int = 3) -> tuple[list[nn.Parameter], Optimizer]:
    g = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3, generator=g)) for _ in range(count)]
    return parameters, OPTIMIZERS[name](parameters)


def train(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range, only: int | None = None) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(step)
        for i, p in enumerate(parameters):
            gradient = torch.randn(p.shape, generator=g)
            p.grad = gradient if only is None or i == only else None
        optimizer.step()


def plain(optimizer: Optimizer) -> Any:
    """The state as something that can be compared, by the parameter's place."""
    return [
        {name: v.tolist() if isinstance(v, Tensor) else v for name, v in optimizer.state.get(p, {}).items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def weights(parameters: list[nn.Parameter]) -> list[Any]:
    return [p.tolist() for p in parameters]


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_training_repeats_itself_bit_for_bit(name: str, device: str | None) -> None:
    parameters, optimizer = make(name)
    snapshot = Snapshot(device)
    assert not snapshot.taken
    train(parameters, optimizer, range(3))
    snapshot.take(parameters, optimizer)
    assert snapshot.taken
    before = copy.deepcopy((weights(parameters), plain(optimizer)))
    train(parameters, optimizer, range(3, 6))
    after = copy.deepcopy((weights(parameters), plain(optimizer)))
    for _ in range(2):  # a snapshot can be restored again and again
        with torch.no_grad():
            parameters[0].fill_(torch.nan)
        snapshot.restore(parameters, optimizer)
        assert (weights(parameters), plain(optimizer)) == before
        train(parameters, optimizer, range(3, 6))
        assert (weights(parameters), plain(optimizer)) == after


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_it_goes_back_to_the_copy_before_the_last(name: str) -> None:
    """The last one is where the broken round began; only a healthy round proves where it began."""
    parameters, optimizer = make(name)
    snapshot = Snapshot()
    taken = []

    def take(step: int) -> None:
        train(parameters, optimizer, range(step, step + 2))
        snapshot.take(parameters, optimizer)
        taken.append(copy.deepcopy((weights(parameters), plain(optimizer))))

    def restored() -> Any:
        train(parameters, optimizer, range(9))
        snapshot.restore(parameters, optimizer)
        return weights(parameters), plain(optimizer)

    for step in range(4):
        take(step)
    assert restored() == taken[-2]
    assert restored() == taken[-2]  # nothing has proven itself since
    take(5)
    assert restored() == taken[-3]  # that round began where the last rollback led
    take(6)
    take(7)
    assert restored() == taken[-2]


def test_nothing_to_go_back_to_is_an_error() -> None:
    parameters, optimizer = make("sgd")
    snapshot = Snapshot()
    with pytest.raises(RuntimeError, match="no copy has been taken yet"):
        snapshot.restore(parameters, optimizer)
    snapshot.take(parameters, optimizer)
    snapshot.forget()
    assert not snapshot.taken
    with pytest.raises(RuntimeError, match="no copy has been taken yet"):
        snapshot.restore(parameters, optimizer)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_taking_reuses_the_memory_of_the_oldest_copy(name: str) -> None:
    parameters, optimizer = make(name)
    snapshot = Snapshot()
    seen = []
    for step in range(8):
        train(parameters, optimizer, range(step, step + 1))
        snapshot.take(parameters, optimizer)
        assert snapshot._last is not None
        seen.append(snapshot._last.tensors[0].data_ptr())
    assert len(set(seen[2:])) == 2


@pytest.mark.parametrize("name", ["momentum", "adam", "fused adamw"])
def test_restoring_writes_into_the_tensors_that_are_there(name: str) -> None:
    parameters, optimizer = make(name)
    train(parameters, optimizer, range(2))
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)

    def places() -> list[int]:
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [t.data_ptr() for t in [*parameters, *states]]

    before = places()
    train(parameters, optimizer, range(2, 4))
    snapshot.restore(parameters, optimizer)
    assert places() == before


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_state_that_did_not_exist_is_gone_again(name: str) -> None:
    parameters, optimizer = make(name)
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)  # before the first step
    start = weights(parameters)
    train(parameters, optimizer, range(2))
    first = copy.deepcopy((weights(parameters), plain(optimizer)))
    snapshot.restore(parameters, optimizer)
    assert weights(parameters) == start
    assert not optimizer.state
    train(parameters, optimizer, range(2))
    assert (weights(parameters), plain(optimizer)) == first


def test_state_of_a_parameter_that_joins_later() -> None:
    parameters, optimizer = make("adam")
    train(parameters, optimizer, range(2), only=1)
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)
    before = copy.deepcopy((weights(parameters), plain(optimizer)))
    train(parameters, optimizer, range(2, 4))
    assert len(optimizer.state) == 3
    snapshot.restore(parameters, optimizer)
    assert (weights(parameters), plain(optimizer)) == before
    assert list(optimizer.state) == [parameters[1]]


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_state_that_has_been_dropped_since_comes_back(name: str) -> None:
    parameters, optimizer = make(name)
    train(parameters, optimizer, range(3))
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)
    before = copy.deepcopy((weights(parameters), plain(optimizer)))
    for _ in range(2):
        optimizer.state.clear()
        snapshot.restore(parameters, optimizer)
        assert (weights(parameters), plain(optimizer)) == before
        train(parameters, optimizer, range(2))  # must not write into the snapshot


def test_state_in_lists_is_copied_too() -> None:
    """As LBFGS keeps it: a list that is changed in place."""
    parameters, optimizer = make("sgd", 1)
    optimizer.state[parameters[0]]["past"] = [torch.ones(2)]
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)
    optimizer.state[parameters[0]]["past"][0].add_(1)
    optimizer.state[parameters[0]]["past"].append(torch.zeros(2))
    snapshot.restore(parameters, optimizer)
    assert [t.tolist() for t in optimizer.state[parameters[0]]["past"]] == [[1.0, 1.0]]


def test_plain_numbers_in_the_state_come_back() -> None:
    parameters, optimizer = make("sgd", 1)
    state = optimizer.state[parameters[0]]
    state["count"] = 3
    snapshot = Snapshot()
    snapshot.take(parameters, optimizer)
    state["count"], state["other"] = 4, "x"
    snapshot.restore(parameters, optimizer)
    assert dict(optimizer.state[parameters[0]]) == {"count": 3}


def test_buffers_and_strided_tensors() -> None:
    parameters, optimizer = make("sgd", 1)
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.ones(4, dtype=torch.bool), torch.zeros(0)]
    expected = [t.clone() for t in tensors]
    snapshot = Snapshot()
    snapshot.take([*parameters, *tensors], optimizer)
    for t in tensors:
        t.zero_()
    snapshot.restore([*parameters, *tensors], optimizer)
    for t, e in zip(tensors, expected, strict=True):
        assert torch.equal(t, e)
    assert tensors[0].stride() == (1, 3)


def test_the_copy_lives_where_it_is_told() -> None:
    parameters, optimizer = make("adam")
    train(parameters, optimizer, range(1))
    snapshot = Snapshot("cpu")
    snapshot.take(parameters, optimizer)
    assert snapshot._last is not None
    kept = [*snapshot._last.tensors.values(), *snapshot._last.state.values()]
    assert {t.device.type for t in kept} == {"cpu"}
    live = {p.data_ptr() for p in parameters}
    assert not live & {t.data_ptr() for t in kept}
    # With no accelerator at hand, another device that is not the parameters' own: nothing is computed there.
    elsewhere = Snapshot("meta")
    elsewhere.take(parameters, optimizer)
    assert elsewhere._last is not None
    assert {t.device.type for t in elsewhere._last.tensors.values()} == {"meta"}


def test_a_undo_may_keep_every_other_round_only() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    weights = Weights(optimizer, None, Replicas(None))
    undo = Undo(weights, optimizer, Snapshot(), every=2)
    undo.before_first_step()
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        with torch.no_grad():
            p.fill_(value)
        undo.keep()
    undo.restore()
    assert p.tolist() == [2.0, 2.0]  # the copies are those of 2 and 4; the one before the last is proven
