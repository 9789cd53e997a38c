"""Jobs of several ranks: a pool of processes that lasts as long as the tests, with a fresh process group for each job.

A process of its own for every rank of every test costs more than what most tests do with it. Ranks of this pool are
kept; one that dies or does not answer in time is killed, and the next job gets another. Between two jobs a rank puts
back what a function changes in its process: attributes of the library's modules and of torch.distributed, filters of
warnings, seeds, environment and working directory. Tests that end processes, or count what is in one, start their own
with :func:`hdet.launch.launch`.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import math
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import hdet.run
from hdet import RoundRecord
from hdet.launch import ReplicaError, server

NUM_KEPT = 4
"""Ranks that wait for the next job; few jobs have more."""
LAST_WORDS_S = 2.0
"""After the first failure the others have a moment to report theirs, which often names the cause."""


@dataclass(frozen=True)
class Rank:
    """A process of the pool, and the pipe to it."""

    process: Any
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_idle: list[Rank] = []


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 150.0) -> list[Any]:
    """Call ``function(*args)`` on ``num_ranks`` ranks of the pool, and return what each returned.

    As :func:`hdet.launch.launch`, whose errors it raises.
    """
    deadline = time.monotonic() + timeout_s
    call = pickle.dumps((function, args))
    ranks = [_take() for _ in range(num_ranks)]
    done: list[Rank] = []
    try:
        with tempfile.TemporaryDirectory(prefix="hdet-") as folder:
            for index, rank in enumerate(ranks):
                rank.pipe.send((sys.path, call, index, num_ranks, os.path.join(folder, "store"), timeout_s))
            return _collect(ranks, done, deadline, timeout_s)
    finally:
        for rank in ranks:
            if rank in done and len(_idle) < NUM_KEPT:
                _idle.append(rank)
            else:
                rank.end()


class OnDemand(dict[int, list[Any]]):
    """What ranks returned, by how many they are: launched when a test asks for it."""

    def __init__(self, launched: Callable[[int], list[Any]]) -> None:
        super().__init__()
        self._launched = launched

    def __missing__(self, num_ranks: int) -> list[Any]:
        self[num_ranks] = self._launched(num_ranks)
        return self[num_ranks]


def close() -> None:
    """End all ranks."""
    while _idle:
        _idle.pop().end()


def _take() -> Rank:
    while _idle:
        rank = _idle.pop(0)
        if rank.process.is_alive():
            return rank
        rank.end()
    context = server()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return Rank(process, here)


def _collect(ranks: list[Rank], done: list[Rank], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {rank.pipe: index for index, rank in enumerate(ranks)}
    while waiting:
        left = deadline - time.monotonic()
        ready = wait(list(waiting), timeout=max(min(left, LAST_WORDS_S) if errors else left, 0.0))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            index = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
                done.append(ranks[index])
            except (EOFError, ConnectionError):
                ok, value = False, "the process ended without reporting an error"
            (results if ok else errors)[index] = value
    if errors:
        listing = "\n".join(f"--- rank {index}:\n{text}" for index, text in sorted(errors.items()))
        raise ReplicaError(f"{len(errors)} of {len(ranks)} ranks failed:\n{listing}", errors)
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} were not done after {timeout_s} s")
    return [results[index] for index in range(len(ranks))]


# -- in the processes of the pool ---------------------------------------------------------------------------------


_last_groups: list[dist.ProcessGroup] = []


def _serve(pipe: Connection) -> None:
    """One job after the other, until the tests end."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            path, *job = pipe.recv()
            sys.path[:] = path
            pipe.send_bytes(_perform(*job))


def _perform(call: bytes, index: int, num_ranks: int, store: str, timeout_s: float) -> bytes:
    faulthandler.dump_traceback_later(timeout_s)  # where it hangs
    try:
        function, args = pickle.loads(call)  # imports the module of the test
        gc.collect()
        gc.freeze()
        with _put_back(), _process_group(index, num_ranks, store, timeout_s):
            # Plain pickle: torch's own would share the memory of tensors.
            return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        gc.collect()
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _process_group(index: int, num_ranks: int, path: str, timeout_s: float) -> Iterator[None]:
    store = FileStore(path, num_ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=index, world_size=num_ranks, timeout=timeout)
    try:
        dist.barrier()  # a function that returns at once must not leave before the others have connected
        yield
    finally:
        # A group's destructor waits for its threads, one of which may still be letting go of a tensor, and wait for the
        # interpreter's lock, which a garbage collection holds: groups go when the next job ends, their threads idle.
        _last_groups[:] = _world.pg_map
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Leave the process as it was found."""
    torch.manual_seed(0)  # as in a fresh process, all ranks draw the same
    np.random.seed(0)
    random.seed(0)
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "hdet" or name == dist.__name__]
    before = [(vars(module), dict(vars(module))) for module in modules]
    environment, folder = dict(os.environ), os.getcwd()
    try:
        with warnings.catch_warnings():
            hdet.run.SLOW_S = math.inf  # a busy machine is slow, and says nothing of the test
            yield
    finally:
        for now, then in before:
            now.update({name: value for name, value in then.items() if now.get(name) is not value})
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


# -- what functions on ranks use ----------------------------------------------------------------------------------


def world() -> tuple[int, int]:
    """This rank, and how many there are; one process is one rank."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everyone(value: Any) -> list[Any]:
    """What each rank has, by rank."""
    rows: list[Any] = [value] * world()[1]
    if len(rows) > 1:
        dist.all_gather_object(rows, value)
    return rows


def alike(value: Any) -> bool:
    """Whether all ranks have the same ``value``."""
    rows = everyone(value)
    return all(row == rows[0] for row in rows)


def error(call: Callable[[], Any]) -> str:
    """The type and text of what ``call`` raises, or nothing."""
    try:
        call()
    except (Exception, CheckpointException) as found:  # the latter is a BaseException
        return f"{type(found).__name__}: {found}"
    return ""


def told(history: Iterable[RoundRecord]) -> list[dict[str, Any]]:
    """A history to compare: without what a clock has measured, and with None for NaN, which equals nothing."""
    rows = [{**record.as_dict(), "converge_s": 0.0} for record in history]
    return [{name: None if value != value else value for name, value in row.items()} for row in rows]


def weights(model: nn.Module) -> list[float]:
    """All of them, of sharded parameters too."""
    whole: list[Tensor] = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [v for t in whole for v in t.detach().flatten().tolist()]


class Training:
    """A model, its optimizer and its scheduler, in training.

    Subclasses make the three, and a loss that is a function of the step and the rank, so that runs can be compared.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any

    def loss(self) -> Tensor:
        """Of this rank's part of the next batch."""
        raise NotImplementedError

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        torch.autograd.backward(loss)
        return loss

    def step(self) -> Any:
        loss = self.backward()
        self.optimizer.step()
        self.scheduler.step(loss)

    def advance(self, until: int) -> list[Any]:
        """Step, and tell after each step all there is to compare."""
        rows = []
        while self.scheduler.last_epoch < until:
            self.step()
            rows.append(self.row())
        return rows

    def row(self) -> tuple[Any, ...]:
        return self.scheduler.last_epoch, self.lrs(), self.weights()

    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def weights(self) -> list[Any]:
        return weights(self.model)

    def told(self) -> list[dict[str, Any]]:
        return told(self.scheduler.history)

    def states(self) -> tuple[Any, Any, Any]:
        """Of the model, the optimizer and the scheduler, as they are now."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()))

    def save(self, path: str) -> None:
        """As a user does: inside ``converged()``, by rank 0."""
        with self.scheduler.converged():
            if world()[0] == 0:
                torch.save(self.states(), path)
            if world()[1] > 1:
                dist.barrier()

    def load(self, saved: Any, *, scheduler_first: bool = False) -> None:
        """From a file, or from :meth:`states`."""
        states = torch.load(saved, weights_only=True) if isinstance(saved, str) else copy.deepcopy(saved)
        parts = list(zip((self.model, self.optimizer, self.scheduler), states, strict=True))
        for part, state in [parts[0], parts[2], parts[1]] if scheduler_first else parts:
            part.load_state_dict(state)
