"""``hdet train``: one run, on local processes or in the process group that torchrun has started."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing as mp
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hdet.checks import as_int, printable, shown
from hdet.launch import ReplicaError, launch, preload
from hdet_lab.command_line import FailedError, UsageError, parse, torchrun_rank
from hdet_lab.recipes import make_torch_optimizer
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs import provenance
from hdet_lab.runs.progress import RunBar, from_processes
from hdet_lab.runs.settings import Settings, folder_name, from_dict, make_scheduler, open_task, task_first
from hdet_lab.runs.stopping import Stop
from hdet_lab.runs.worker import Progress, cannot_continue, train
from hdet_lab.targets import is_target
from hdet_lab.tasks.base import Task

DAY_S = 86400.0
# Where a run may differ from the one it continues: the data have a checksum.
FREE_ON_RESUME = ("data", "checkpoint_s", "freeze_file")
_STATUS = {"done": 0, "diverged": 1, "stopped": 130}


@dataclass(frozen=True)
class TrainOptions(Settings):
    """Train a task and write a run folder: configuration, metrics, TensorBoard events and a checkpoint."""

    out: Path | None = None
    """New folder for the run; default runs/TASK-METHOD-LR-sSEED-TIME."""
    resume: Path | None = None
    """Folder of an unfinished run to continue with its own settings."""
    yes: bool = False
    """Resume a run that was not started in this folder by this user, without asking."""
    json: bool = False
    """Print the result as JSON, and no progress."""


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: settings resolved, folder made."""

    settings: Settings
    folder: Path
    resume: bool


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status: 0, 1 where the model broke, 130 after a signal."""
    arguments = task_first(arguments)
    folder = _resumed_folder(arguments)
    stored = None if folder is None else TrainOptions(**vars(from_dict(_unfinished(folder).config)))
    options = parse(TrainOptions, "train", arguments, default=stored)
    options.check()
    if folder is not None and not options.yes:
        _require_consent(folder, options)
    torchrun = torchrun_rank(options.replicas)
    if torchrun is not None:
        return _main_under_torchrun(options, *torchrun)
    job = prepare(options, options.replicas or 1, folder=options.out, resume=options.resume)
    console = Console(quiet=options.json)
    try:
        with RunBar(console, options.task, job.settings.steps or 1, quiet=options.json) as bar:
            end = run(job, bar)
    except ReplicaError as error:
        print(f"{error}\n{printable(_go_on(job))}", file=sys.stderr)
        return 1
    return _tell(job, end, console, as_json=options.json)


def prepare(settings: Settings, num_replicas: int, *, folder: Path | None, resume: Path | None = None) -> Job:
    """Check everything that can be wrong, and make the run folder; UsageError says what is."""
    settings.check()
    task = open_task(settings.task, settings.data)
    resolved = settings.resolve(task, num_replicas)
    own = Settings(**{field.name: getattr(resolved, field.name) for field in fields(Settings)})
    about = provenance.describe(task)
    provenance.tell_note(task)
    if resume is not None:
        _check_unchanged(own, about["data_sha256"], resume)
        _check_checkpoint(own, task, resume)
        return Job(own, resume, resume=True)
    now = datetime.now(timezone.utc)
    if folder is None:
        stamp = now.strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / f"{folder_name(own.task)}-{own.method}-{own.lr:g}-s{own.seed}-{stamp}"
    model = task.build(own.seed)
    facts = {
        "config": own.as_dict(),
        "started": now.isoformat(timespec="seconds"),
        **about,
        "batch_rows": task.batch_rows,
        "groups": list(task.groups(model)),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    run_folder.create(folder, facts)
    return Job(own, folder, resume=False)


def make_stop() -> Stop:
    """A request that reaches all processes of a run."""
    return Stop(mp.get_context("forkserver").Event())


def run(job: Job, bar: RunBar, stop: Stop | None = None) -> dict[str, Any]:
    """Train in this process, or on as many as the settings say; returns how it ended."""
    num_replicas = job.settings.replicas or 1
    stop = make_stop() if stop is None else stop
    if num_replicas == 1:
        with stop.on_signals(in_charge=True), _one_thread():
            return train(job.settings, job.folder, bar, stop, resume=job.resume)
    preload(__name__, "torch.utils.tensorboard")
    with stop.on_signals(in_charge=True), from_processes(bar) as progress:
        try:
            ends = launch(replica, num_replicas, job, progress, stop, timeout_s=7 * DAY_S)
        except ReplicaError as error:
            if stop:
                return {"status": "stopped", "step": 0}  # before the replicas could see the request
            said = [re.search(rf"{UsageError.__name__}: (.+)\s*$", text) for text in error.errors.values()]
            if said and all(said):  # what the user can fix, on every replica that failed
                raise UsageError(said[0][1]) from None  # type: ignore[index]
            for text in error.errors.values():  # the others have only lost the one that failed
                if failed := re.search(rf"{FailedError.__name__}: (.+)\s*$", text):
                    raise FailedError(failed[1]) from None
            raise
    end: dict[str, Any] = ends[0]
    return end


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """As on launched processes and under torchrun, so that a run does not depend on how many cores are free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def replica(job: Job, progress: Progress, stop: Stop) -> dict[str, Any]:
    """What each process of a run does."""
    with stop.on_signals(in_charge=False):
        return train(job.settings, job.folder, progress, stop, resume=job.resume)


def _main_under_torchrun(options: TrainOptions, rank: int, num_replicas: int) -> int:
    _init_process_group(options.device, rank)
    try:
        job = _prepare_together(options, rank, num_replicas)
        console = Console(quiet=options.json or rank > 0)
        with RunBar(console, options.task, job.settings.steps or 1, quiet=console.quiet) as bar:
            end = replica(job, bar, Stop())
        dist.barrier()  # rank 0 writes the checkpoint, and may host the store: no rank leaves before it is done
        return _tell(job, end, console, as_json=options.json) if rank == 0 else _STATUS[end["status"]]
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _init_process_group(device: str, rank: int) -> None:
    address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    in_use = UsageError(
        f"the port of the process group must be free, but MASTER_PORT={port} on {address} is in use; "
        "choose another, or let torchrun do it: torchrun --standalone"
    )
    # torch would report it in a screen of its own; under torchrun's agent the store is there already.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise in_use from None
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def _prepare_together(options: TrainOptions, rank: int, num_replicas: int) -> Job:
    """Rank 0 prepares and tells the others the outcome, so that all train or none."""
    said: list[Any] = [None]
    if rank == 0:
        try:
            said = [prepare(options, num_replicas, folder=options.out, resume=options.resume)]
        except UsageError as error:
            said = [str(error)]
    dist.broadcast_object_list(said)
    if isinstance(said[0], str):
        raise UsageError(said[0])
    job: Job = said[0]
    return job


# -- resuming ---------------------------------------------------------------------------------------------------


def _resumed_folder(arguments: Sequence[str]) -> Path | None:
    """Where --resume points, needed before parsing: the settings there are the defaults."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--resume="):
            return Path(argument.partition("=")[2])
        if argument == "--resume" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return None


def _unfinished(folder: Path) -> run_folder.RunRecord:
    record = run_folder.read(folder)
    if record.end is not None:
        raise UsageError(f"--resume must name an unfinished run, but {folder} is {record.status}; start a new one")
    if not os.path.exists(folder / run_folder.CHECKPOINT):
        raise UsageError(f"--resume needs a checkpoint, but {folder} ended before its first; start a new run")
    run_folder.refuse_links(folder)
    return record


def _require_consent(folder: Path, options: TrainOptions) -> None:
    """Ask before a run from elsewhere is continued: its files say what is fetched, read, started and written."""
    if run_folder.is_own(_unfinished(folder)):
        return
    code = f"runs your module {options.task.partition(':')[0]}, " if is_target(options.task) else ""
    does = (
        f"{folder} was not started here by you. To resume it {code}starts {options.replicas or 1} processes on "
        f"{options.device} that train {options.task} up to step {options.steps}, reads the task's data from "
        f"{options.data}, downloads what is missing there, and writes into {folder}"
    )
    if "RANK" in os.environ or not sys.stdin.isatty():
        raise UsageError(f"{does}; pass --yes to go ahead")
    print(f"{printable(does)}.", file=sys.stderr)
    if input("Go ahead? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UsageError(f"{folder} was left alone; pass --yes to go ahead without being asked")


def _check_unchanged(settings: Settings, data_sha256: str, folder: Path) -> None:
    record = _unfinished(folder)
    old, new = record.config, settings.as_dict()
    changed = [name for name in new if new[name] != old.get(name, new[name]) and name not in FREE_ON_RESUME]
    if changed:
        said = ", ".join(
            f"--{name.replace('_', '-')} {_text(new[name])} instead of {_text(old[name])}" for name in changed
        )
        raise UsageError(
            f"a resumed run must keep its settings, but got {said}; leave them out, or start a new run with --out"
        )
    if record.facts.get("data_sha256") != data_sha256:
        raise UsageError(
            f"a resumed run must have the same data, but those of {settings.task} have changed since {folder} began; "
            "put the old ones back, or start a new run"
        )


def _check_checkpoint(settings: Settings, task: Task, folder: Path) -> None:
    """Before processes are started: is the checkpoint intact, of this run, and can training take a step from it?"""
    state = run_folder.load_checkpoint(folder)
    path, steps, interval = folder / run_folder.CHECKPOINT, settings.steps or 1, settings.interval or 1
    step = as_int(state["step"])
    if not 0 < step <= steps or (step % interval and step < steps):
        raise UsageError(
            f"step of {path} must be the end of a round, a multiple of {interval} up to {steps}, but got "
            f"{shown(state['step'])}; put an older checkpoint in its place, or start a new run"
        )
    model = task.build(settings.seed)
    try:
        model.load_state_dict(state["model"])
    except Exception as error:
        raise UsageError(
            f"the checkpoint of {folder} is of another model: {' '.join(str(error).split())[:200]}; start a new run"
        ) from None
    optimizer = make_torch_optimizer(settings.optimizer, settings.lr, task, model)
    # Of hdet's schedulers only the processes can tell, which then refuse; torch's take whatever they are given.
    scheduler = make_scheduler(settings, optimizer, model) if settings.method == "fixed" else None
    try:
        optimizer.load_state_dict(state["optimizer"])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
            if scheduler.last_epoch != step:
                raise ValueError(f"last_epoch must be the step, {step}, but got {shown(scheduler.last_epoch)}")
            if step < steps:
                scheduler.step()
    except Exception as error:  # whatever torch raises for what it has not checked
        raise cannot_continue(folder, error) from None


def _text(value: Any) -> str:
    return (" ".join(value) or "none") if isinstance(value, list) else str(value)


def _go_on(job: Job) -> str:
    if not (job.folder / run_folder.CHECKPOINT).exists():
        return f"there is no checkpoint in {job.folder} to continue from yet"
    return f"continue with: hdet train --resume {shlex.quote(str(job.folder))}"


def _tell(job: Job, end: dict[str, Any], console: Console, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"folder": str(job.folder), **end}))
    if end["status"] == "stopped":
        print(f"stopped at step {end['step']} of {job.settings.steps}; {printable(_go_on(job))}", file=sys.stderr)
        return _STATUS["stopped"]
    if end["status"] == "diverged":
        broke = f"the model broke at step {end['step']}: {end.get('error', 'its loss is not finite')}"
        console.print(broke, soft_wrap=True, markup=False)
    figures = ", ".join(f"{name} {value:.4f}" for name, value in end["validation"].items() if value is not None)
    told = printable(f"validation: {figures or 'none'}; {end['time_s']:.0f} s; in {job.folder}")
    console.print(told, soft_wrap=True, markup=False)
    return _STATUS[end["status"]]
