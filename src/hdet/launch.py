"""Run a function on N local processes, as replicas of one process group, with a deadline."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.context
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

_preloaded = ["torch", "torch.distributed", "torch._dynamo", "hdet"]


class ReplicaError(RuntimeError):
    """A replica failed. ``errors`` maps each failed replica to its traceback."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


def launch(
    function: Callable[..., Any],
    num_replicas: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(*args)`` on ``num_replicas`` fresh processes and return what each returned.

    Every process gets an initialised process group over loopback, and computes with one thread. The rendezvous is a
    file, so no port is needed. No process outlives the call, nor the process that calls, whatever ends it.

    Args:
        function: importable by name; its arguments and result must pickle.
        num_replicas: how many processes.
        *args: passed to every process.
        timeout_s: seconds for all of them together, and for each of their collectives.
        backend: of the process group.

    Raises:
        ReplicaError: a replica raised or died; the others are ended.
        TimeoutError: the deadline passed.

    Example:
        >>> from hdet.launch import launch
        >>> import torch.distributed as dist
        >>> launch(dist.get_world_size, 2)
        [2, 2]
    """
    context = server()
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="hdet-") as folder:
        pipes: list[Connection] = []
        processes: list[mp.context.ForkServerProcess] = []
        try:
            for index in range(num_replicas):
                receive, send = context.Pipe(duplex=False)
                process = context.Process(
                    target=_replica,
                    args=(send, function, args, index, num_replicas, os.path.join(folder, "store"), backend, timeout_s),
                    daemon=True,
                )
                process.start()
                send.close()
                pipes.append(receive)
                processes.append(process)
            return _collect(pipes, deadline, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def server() -> multiprocessing.context.ForkServerContext:
    """Processes fork from a server that has imported torch already: a tenth of a second each instead of several."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_preloaded, "hdet.frozen"])
    return context


def preload(*modules: str) -> None:
    """Have ``modules`` imported once for all processes instead of in each; call it before the first one."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


def end_with_parent() -> None:
    """Have this process end as soon as the one that started it is gone, by a signal too."""
    parent = mp.parent_process()
    if parent is None:
        return

    def wait_for_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_it, daemon=True).start()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: index for index, pipe in enumerate(pipes)}
    while waiting:
        left = deadline - time.monotonic()
        # After the first failure the others get a moment to report their own, which often names the cause.
        ready = wait(list(waiting), timeout=max(min(left, 2.0) if errors else left, 0.0))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            index = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "the process ended without reporting an error"
            (results if ok else errors)[index] = value
    if errors:
        listing = "\n".join(f"--- replica {index}:\n{text}" for index, text in sorted(errors.items()))
        raise ReplicaError(f"{len(errors)} of {len(pipes)} replicas failed:\n{listing}", errors)
    if waiting:
        raise TimeoutError(f"replicas {sorted(waiting.values())} were not done after {timeout_s} s")
    return [results[index] for index in range(len(pipes))]


def _replica(
    send: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    index: int,
    num_replicas: int,
    store_path: str,
    backend: str,
    timeout_s: float,
) -> None:
    from datetime import timedelta

    end_with_parent()
    torch.set_num_threads(1)
    try:
        store = FileStore(store_path, num_replicas)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=index, world_size=num_replicas, timeout=timeout)
        dist.barrier()  # a function that returns at once must not exit before the others have connected
        result = function(*args)
        # Plain pickle: torch's own would share the memory of tensors with a process that is about to end.
        send.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        send.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        send.close()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
