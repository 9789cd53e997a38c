"""torchft with the gradient signal: replicas that come and go have one learning rate and one model."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import framework_task as task
from hdet import AutoLR
from hdet.launch import launch

pytest.importorskip("torchft", reason="pip install 'hdet[torchft]'")

FAILED_STEP = 7
"""In the middle of a round of 2."""


class ScriptedError(Exception):
    """What happens to a replica."""


def _replica(rank: int, lighthouse: str, meeting: Any, fail_at: int) -> dict[str, Any]:
    """One replica group of one process, from joining the others to the end, or to its failure."""
    import torchft

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = task.Model()
    inner = task.make_optimizer(model)
    lrs = task.watch(inner)
    scheduler = AutoLR(task.make_schedule(inner), total_steps=task.STEPS, **task.GRADIENT)
    parts: dict[str, Any] = {"model": model, "optimizer": inner, "scheduler": scheduler}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=1,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
        replica_id=f"replica{rank}",
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
        init_sync=False,  # all start from the same weights
        timeout=timedelta(seconds=20),
    )
    meeting.set(f"here {rank}", "")
    meeting.wait(["here 0", "here 1"])  # the lighthouse waits for those it has heard of
    participants = []
    try:
        ddp = torchft.DistributedDataParallel(manager, model)
        optimizer = torchft.Optimizer(manager, inner)
        data = task.Samples(2 * task.STEPS * task.BATCH)
        while (step := manager.current_step()) < task.STEPS:
            if step == fail_at:
                raise ScriptedError
            where = torch.arange(task.BATCH) + (step * 2 + rank) * task.BATCH
            optimizer.zero_grad()
            loss = ddp(data.x[where], data.labels[where])["loss"]
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                participants.append(manager.num_participants())
                scheduler.step()
    finally:
        manager.shutdown(wait=False)
    return {
        "lrs": lrs,
        "losses": model.losses,
        "weights": model.flat(),
        "participants": participants,
        "last_epoch": scheduler.last_epoch,
        "scales": [record.scales for record in scheduler.history],
    }


def _run(fail_at: int) -> dict[str, Any]:
    from torchft.coordination import LighthouseServer

    logging.disable(logging.CRITICAL)
    rank = dist.get_rank()
    plain = task.plain_loop(task.GRADIENT, 1, "blocks")
    box: list[Any] = [None]
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
        box = [lighthouse.address()]
    dist.broadcast_object_list(box)
    # Under torchft each replica group has a world of its own; these have none.
    meeting = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1 and fail_at >= 0:
        with pytest.raises(ScriptedError):
            _replica(rank, box[0], meeting, fail_at)
    found = _replica(rank, box[0], meeting, -1)
    meeting.set(f"done {rank}", "")
    meeting.wait(["done 0", "done 1"])  # the lighthouse is the first one's
    return {**found, "plain": plain}


def test_replicas_train_as_in_the_plain_loop() -> None:
    for replica in launch(_run, 2, -1, timeout_s=150):
        assert replica["participants"] == [2] * task.STEPS
        task.check_same(replica, replica["plain"])


def test_a_replica_that_comes_back_goes_on_where_the_other_is() -> None:
    first, second = launch(_run, 2, FAILED_STEP, timeout_s=150)
    assert 1 in first["participants"]
    assert first["participants"][-1] == second["participants"][-1] == 2
    assert first["last_epoch"] == second["last_epoch"] == len(first["lrs"]) == task.STEPS
    assert len(second["lrs"]) < task.STEPS
    assert second["lrs"] == first["lrs"][-len(second["lrs"]) :]
    assert second["scales"] == first["scales"][-len(second["scales"]) :]
    assert second["weights"] == first["weights"]
