"""Ranks that fall out of step, or come back: an error that names them, in time, and nothing averaged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet.replicas
from hdet.testing import Fault, Injector, launch
from native import FACES, TOTAL_STEPS, Run, error, net, paper


def _out_of_step(gradients: str, kind: str, name: str) -> dict[str, Any]:
    """Replica 1 is struck in step 2; the others should notice when they next meet."""
    rank, count = dist.get_rank(), dist.get_world_size()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    options = {"gradients": "local"} if gradients == "local" else {}
    run = Run(DistributedDataParallel(net()), FACES[name], (rank, count), **options)
    inject = Injector([Fault(kind, 1, 2)], rank)  # type: ignore[arg-type]
    before: list[float] = []

    def loop() -> None:
        for step in range(1, TOTAL_STEPS + 1):
            run.optimizer.zero_grad()
            loss = run.loss(step)
            torch.autograd.backward(loss)
            run.optimizer.step()
            if not inject.skips(step):
                before[:] = run.weights()
                run.scheduler.step(loss)

    return {"error": error(loop), "averaged": before != run.weights()}


@pytest.mark.parametrize("name", ["paper", "gradient"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_an_error_on_one_rank_ends_the_others(gradients: str, name: str) -> None:
    results = launch(_out_of_step, 3, gradients, "error", name, timeout_s=100)
    assert results[1]["error"] == "InjectedError: injected into replica 1 in step 2"
    for index in (0, 2):
        found = results[index]
        assert not found["averaged"]
        if gradients == "local":
            assert f"RuntimeError: replica {index} lost the others at the converge of step 4" in found["error"]
            assert "1: 0" in found["error"]
        else:  # they learn it from DistributedDataParallel, one step later
            assert found["error"].startswith("RuntimeError: ")


@pytest.mark.parametrize("name", ["paper", "gradient"])
def test_a_scheduler_step_left_out_on_one_rank_is_found_within_the_timeout(name: str) -> None:
    results = launch(_out_of_step, 3, "shared", "skip_step", name, timeout_s=100)
    for index, found in enumerate(results):
        assert not found["averaged"]
        if index != 1:
            assert f"RuntimeError: replica {index} lost the others at the converge of step 4" in found["error"]
            assert "(replica: step): {1: 0}" in found["error"]
        else:  # it waits for gradients
            assert found["error"].startswith("RuntimeError: ")


@pytest.mark.parametrize("name", FACES)
def test_with_local_gradients_it_is_found_when_they_next_meet(name: str) -> None:
    """It comes to the converge after a fifth optimizer step; the others have taken four."""
    for found in launch(_out_of_step, 3, "local", "skip_step", name, timeout_s=100):
        assert "scheduler.step() must follow every optimizer step on all replicas" in found["error"]
        assert (
            "in the 4 steps up to step 4 their optimizers took replica 0: 4, replica 1: 5, replica 2: 4"
            in found["error"]
        )
        assert not found["averaged"]


# -- started again, beside what the first start has left in the store -------------------------------------------------


def _restarted() -> list[str]:
    """torchrun keeps the store from one start to the next; new processes have no memory of the meetings in it."""
    found = []
    for seeds in ((0, 0), (0, 1)):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        seed = seeds[dist.get_rank()]
        found.append(error(lambda o=optimizer, m=model, s=seed: paper(o, m, seed=s)))  # type: ignore[misc]
        dist.barrier()
        hdet.replicas._meetings.clear()
    return found


def test_a_second_start_is_not_taken_in_by_what_the_first_agreed_on() -> None:
    for first, second in launch(_restarted, 2, timeout_s=30):
        assert first == ""
        assert "replicas must agree about their arguments and parameters, but got seed=0 on replicas [0], 1" in second


def _cut_short() -> str:
    if dist.get_rank() == 0:
        key = f"hdet/{dist.group.WORLD.group_name}/0/1"  # type: ignore[union-attr]
        dist.distributed_c10d._get_default_store().add(f"{key}/arrived", 1)
    dist.barrier()
    model = net()
    return error(lambda: paper(torch.optim.Adam(model.parameters()), model))


def test_a_first_start_that_was_cut_short_is_no_quarrel() -> None:
    assert launch(_cut_short, 3, timeout_s=30) == ["", "", ""]
