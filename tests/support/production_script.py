"""A training job as a cluster runs it: it saves, resumes from its newest checkpoint, and can be killed or preempted.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 tests/support/production_script.py FOLDER --kill 8
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hdet.testing import Fault, Injector, collect_weights
from job import alike
from native import FACES, TOTAL_STEPS, Run, net, replicated

SAVE_EVERY = 3


def train(
    folder: str,
    faults: Sequence[Fault] = (),
    *,
    names: Sequence[str] = tuple(FACES),
    preempt_at: int | None = None,
    preempt: Callable[[], int] = os.getpid,
    num_steps: int = TOTAL_STEPS,
) -> dict[str, Any]:
    """One model for each way of steering, side by side in one job; whatever strikes it strikes all of them.

    Args:
        folder: of the checkpoints.
        faults: what is injected.
        names: of the ways.
        preempt_at: the step in which replica 0 has the job ended by SIGTERM.
        preempt: tells to which process that signal goes.
        num_steps: where this part of the training ends.
    """
    rank = dist.get_rank()
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    inject = Injector(faults, rank)
    runs = make_runs(names)
    began_at = step = resume(Path(folder), runs)
    consistent, saved_at = [], []
    stop = False
    while step < num_steps and not stop:
        step += 1
        for run in runs.values():
            run.step(partial(inject.weights, step, run.model))
        if step == preempt_at and rank == 0:
            os.kill(preempt(), signal.SIGTERM)
            while not asked_to_stop:
                time.sleep(0.01)
        # A signal reaches ranks at different times, and saving is something they do together.
        flag = torch.tensor(float(bool(asked_to_stop)))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        stop = bool(flag)
        if stop or step % SAVE_EVERY == 0:
            consistent.append(save(Path(folder), step, runs))
            saved_at.append(step)
    if step == TOTAL_STEPS:
        for run in runs.values():
            run.scheduler.finish()
    return {
        "began_at": began_at,
        "ended_at": step,
        "consistent": consistent,
        "saved_at": saved_at,
        "weights": {name: collect_weights(run.model) for name, run in runs.items()},
        "records": {name: [vars(record) for record in run.scheduler.history] for name, run in runs.items()},
    }


def make_runs(names: Sequence[str] = tuple(FACES)) -> dict[str, Run]:
    place = dist.get_rank(), dist.get_world_size()
    return {name: Run(replicated(net()), FACES[name], place) for name in names}


def save(folder: Path, step: int, runs: dict[str, Run]) -> bool:
    """Rank 0 writes; whether all ranks would have written the same."""
    with ExitStack() as stack:
        for run in runs.values():
            stack.enter_context(run.scheduler.converged())
        checkpoint = {
            name: {
                "model": run.model.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "scheduler": run.scheduler.state_dict(),
            }
            for name, run in runs.items()
        }
        if dist.get_rank() == 0:
            unfinished = folder / "unfinished"
            torch.save(checkpoint, unfinished)
            os.replace(unfinished, folder / f"step-{step:04}.pt")  # all of it, or nothing
        same = alike([repr((c["model"], c["scheduler"], c["optimizer"]["state"])) for c in checkpoint.values()])
    dist.barrier()
    return same


def resume(folder: Path, runs: dict[str, Run], *, scheduler_first: bool = False) -> int:
    """Load the newest checkpoint, where there is one; the step it was written in."""
    checkpoints = sorted(folder.glob("step-*.pt"))
    if not checkpoints:
        return 0
    checkpoint = torch.load(checkpoints[-1], weights_only=True)
    for name, run in runs.items():
        run.model.load_state_dict(checkpoint[name]["model"])
        if scheduler_first:
            run.scheduler.load_state_dict(checkpoint[name]["scheduler"])
        run.optimizer.load_state_dict(checkpoint[name]["optimizer"])
        if not scheduler_first:
            run.scheduler.load_state_dict(checkpoint[name]["scheduler"])
    return int(checkpoints[-1].stem.removeprefix("step-"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill", type=int, help="step in which replica 1 gets SIGKILL, once")
    parser.add_argument("--preempt", type=int, help="step in which torchrun gets SIGTERM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    faults = [Fault("kill", replica=1, step=options.kill)] if options.kill and not restarted else []
    result = train(options.folder, faults, preempt_at=options.preempt, preempt=os.getppid)
    torch.save({**result, "records": None}, os.path.join(options.folder, f"result-{dist.get_rank()}.pt"))
    dist.destroy_process_group()
    if result["ended_at"] < TOTAL_STEPS:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
