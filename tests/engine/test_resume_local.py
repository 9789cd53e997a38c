"""Local gradients, saved and resumed at the end of a round: what a checkpoint must hold to go on exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist

from hdet import Averaging, Explorer
from job import everyone, launch
from native import INTERVAL, TOTAL_STEPS, Run, net


def _run(optimizer_state: str) -> Run:
    place = dist.get_rank(), dist.get_world_size()

    def face(optimizer: Any, model: Any) -> Explorer:
        policy: Any = optimizer_state
        return Explorer(
            model, optimizer, interval=INTERVAL, gradients="local", averaging=Averaging(optimizer_state=policy)
        )

    return Run(net(), face, place)


def _resumed(optimizer_state: str, whose: str) -> float:
    """How far a run that was resumed after two rounds ends from one that was not."""
    whole = _run(optimizer_state)
    whole.advance(2 * INTERVAL)
    with whole.scheduler.converged():
        saved = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict(), whole.scheduler.state_dict()))
    whole.advance(TOTAL_STEPS)
    model, optimizer, scheduler = everyone(saved)[0]
    resumed = _run(optimizer_state)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(saved[1] if whose == "everyone's" else optimizer)
    resumed.scheduler.load_state_dict(scheduler)
    resumed.advance(TOTAL_STEPS)
    return float(max(abs(a - b) for a, b in zip(whole.weights(), resumed.weights(), strict=True)))


@pytest.mark.parametrize(
    ("optimizer_state", "whose"), [("average", "rank 0's"), ("reset", "rank 0's"), ("keep", "everyone's")]
)
def test_the_resumed_run_is_the_uninterrupted_one(optimizer_state: str, whose: str) -> None:
    assert max(launch(_resumed, 3, optimizer_state, whose)) < 1e-12


def test_the_kept_state_of_one_rank_is_not_enough() -> None:
    """As README, guarantees and the docstring say; Adam's moments are each replica's own."""
    assert min(launch(_resumed, 3, "keep", "rank 0's")) > 1e-4
