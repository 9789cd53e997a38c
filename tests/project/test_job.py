"""The pool of ranks that tests run on: it outlives what happens to its processes, and they forget what ran on them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet.launch
import job
from hdet.launch import ReplicaError
from job import launch


def _pids() -> int:
    return os.getpid()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not today")
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_ranks_are_kept() -> None:
    first = launch(_pids, 2)
    assert len(set(first)) == 2
    assert set(launch(_pids, 2)) <= {*first, *(rank.process.pid for rank in job._idle)}
    assert sum(launch(_sum_of_ranks, 3)) == 9


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (_fail_on_one, ReplicaError, "ValueError: not today"),
        (_die_on_one, ReplicaError, "the process ended without reporting an error"),
        (_hang_on_one, TimeoutError, r"ranks \[1\] were not done after 2 s"),
    ],
)
def test_what_goes_wrong_in_one_job_is_gone_in_the_next(function: Any, error: type[Exception], text: str) -> None:
    job.close()
    first = launch(_pids, 2)
    with pytest.raises(error, match=text):
        launch(function, 2, timeout_s=2)
    assert launch(_sum_of_ranks, 2) == [1, 1]
    kept = {rank.process.pid for rank in job._idle}
    assert (first[1] in kept) == (function is _fail_on_one)
    for pid in set(first) - kept:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _leave_traces() -> None:
    vars(dist)["all_reduce"] = None
    vars(hdet.launch)["server"] = None
    warnings.simplefilter("ignore")
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.rand(1)


def _look() -> list[Any]:
    changed = [callable(dist.all_reduce), callable(hdet.launch.server), "LEFT" in os.environ, os.getcwd()]
    return [*changed, len(warnings.filters), torch.get_default_dtype(), torch.rand(1).item()]


def test_a_job_finds_nothing_of_the_last_one() -> None:
    before = launch(_look, 2)
    launch(_leave_traces, 2)
    assert launch(_look, 2) == before


def test_no_process_is_left() -> None:
    launch(_pids, 2)
    ranks = [rank.process for rank in job._idle]
    assert len(ranks) >= 2
    job.close()
    assert not any(process.is_alive() for process in ranks)
    assert job._idle == []
