"""torchrun for scripts of tests: its agent and its environment, in processes that have imported torch already.

What is left out is the start of four or more interpreters, seconds each. The agent is forked from the server of
:mod:`hdet.launch`, its workers from the agent.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hdet.launch import server


@dataclass(frozen=True)
class Done:
    """How a job ended, and what its processes wrote."""

    returncode: int
    stdout: str
    stderr: str


def torchrun(
    script: str | Path,
    *arguments: str,
    folder: Path | None = None,
    num_workers: int = 2,
    max_restarts: int = 0,
    timeout_s: float = 90.0,
    **environment: str,
) -> Done:
    """``torchrun --standalone --nproc-per-node NUM_WORKERS --max-restarts MAX_RESTARTS SCRIPT ARGUMENTS``.

    Args:
        script: a file, or the name of a module, as of ``torchrun -m``.
        *arguments: of the script.
        folder: the working directory.
        num_workers: how many processes run the script.
        max_restarts: of the workers.
        timeout_s: seconds until all processes are killed.
        **environment: more variables for agent and workers.

    Raises:
        TimeoutError: they were killed.
    """
    with tempfile.TemporaryDirectory(prefix="hdet-") as outputs:
        command = [str(script), *arguments]
        details = (command, folder, outputs, num_workers, max_restarts, environment)
        process = server().Process(target=_agent, args=details)  # no daemon: those have no processes of their own
        process.start()
        assert process.pid is not None
        try:
            process.join(timeout_s)
            late = process.is_alive()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        out, err = (Path(outputs, name).read_text() for name in ("stdout", "stderr"))
        if late:
            raise TimeoutError(f"{command} was not done after {timeout_s} s:\n{err}")
        assert process.exitcode is not None
        return Done(process.exitcode, out, err)


def _agent(
    command: list[str],
    folder: Path | None,
    outputs: str,
    num_workers: int,
    max_restarts: int,
    environment: dict[str, str],
) -> None:
    os.setpgid(0, 0)  # so that whoever ends the agent ends the workers too
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(outputs, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    if folder is not None:
        os.chdir(folder)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="fork",
    )
    elastic_launch(config, _work)(command)


def _work(command: list[str]) -> None:
    sys.argv = command
    if command[0].endswith(".py"):
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
