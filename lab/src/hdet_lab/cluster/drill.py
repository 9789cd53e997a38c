"""A drill on scratch data: a checkpoint is read back, a rank is killed, and the run resumes as if it was not.

Small and on the CPU: it tests processes, files and states of this machine and this installation, not its network.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet import AutoLR, Faults
from hdet.launch import ReplicaError, launch

TOTAL_STEPS, INTERVAL = 24, 4
SAVED_AT, KILLED_AT = 10, 15
"""The checkpoint is made in mid-round, and the rank killed in a later one."""


class Job:
    """A small regression, all of it a function of step and rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = AutoLR(
            self.optimizer, total_steps=TOTAL_STEPS, interval=INTERVAL, model=self.model, faults=Faults(on_fork="raise")
        )

    def step(self) -> None:
        g = torch.Generator().manual_seed(1000 * self.scheduler.last_epoch + dist.get_rank())
        x = torch.randn(16, 8, generator=g)
        loss = (self.model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step(loss)

    def _parts(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def train(path: str, how: str) -> tuple[list[Tensor], str]:
    """One rank of a run: ``"whole"``, ``"killed"`` after its checkpoint, or ``"resumed"`` from it.

    Returns the weights at the end, and what is wrong with the checkpoint.
    """
    logging.getLogger("hdet").setLevel(logging.WARNING)
    job, problem = Job(), ""
    if how == "resumed":
        job.load(torch.load(path, weights_only=True))
    while job.scheduler.last_epoch < TOTAL_STEPS:
        if how == "killed" and job.scheduler.last_epoch == KILLED_AT and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.step()
        if how != "resumed" and job.scheduler.last_epoch == SAVED_AT:
            with job.scheduler.converged():
                problem = _save(job, path)
    return job.weights(), problem


def _save(job: Job, path: str) -> str:
    """Write the checkpoint and read it again; what is wrong with it."""
    state, problem = job.state(), ""
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)
        found = torch.load(path, weights_only=True)
        if _bytes(found) != _bytes(state):
            problem = "what was read back differs from what was saved"
    dist.barrier()
    return problem


def _bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def drill(num_ranks: int, *, timeout_s: float) -> tuple[dict[str, str], list[str]]:
    """What was tried, each with "passed" or "failed", and what has failed, in words."""
    found: dict[str, str] = {}
    problems: list[str] = []

    def note(name: str, problem: str) -> None:
        found[name] = "failed" if problem else "passed"
        if problem:
            problems.append(f"{name}: {problem}")

    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="hdet-doctor-") as folder:
            path = Path(folder) / "checkpoint.pt"
            whole = launch(train, num_ranks, str(path), "whole", timeout_s=timeout_s)
            note("checkpoint read back", next((problem for _, problem in whole if problem), ""))
            note("ranks end with equal weights", _difference([weights for weights, _ in whole], exact=True))
            path.unlink()
            try:
                launch(train, num_ranks, str(path), "killed", timeout_s=timeout_s)
                note("a rank that is killed ends the run", "the run went on without it")
            except ReplicaError:
                note("a rank that is killed ends the run", "")
            resumed = launch(train, num_ranks, str(path), "resumed", timeout_s=timeout_s)
            # On more ranks the all-reduce of the gradients may round otherwise after a restart.
            note("resumed as if it was not", _difference([whole[0][0], resumed[0][0]], exact=num_ranks <= 2))
    except (ReplicaError, TimeoutError, OSError) as error:
        note("drill", f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    found["seconds of the drill"] = f"{time.monotonic() - started:.0f}"
    return found, problems


def _difference(runs: list[list[Tensor]], *, exact: bool) -> str:
    first = torch.cat([t.flatten() for t in runs[0]])
    for other in runs[1:]:
        largest = float((torch.cat([t.flatten() for t in other]) - first).abs().max())
        if largest > (0.0 if exact else 1e-4):
            return f"weights differ, by up to {largest:.2g}"
    return ""
