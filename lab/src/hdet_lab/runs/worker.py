"""One replica's part of a run: train, record every round, save now and then, stop when asked."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet import AutoLR, OneCycleAutoLR
from hdet.policy.rollback import BrokenError
from hdet.signals.held_out import Probe
from hdet_lab.command_line import FailedError, UsageError
from hdet_lab.recipes import make_torch_optimizer
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.settings import Settings, make_scheduler, open_task
from hdet_lab.runs.stopping import Stop
from hdet_lab.tasks.base import batch_of


class Progress(Protocol):
    """Where progress is reported: the sending end of a pipe, or a progress bar."""

    def send(self, news: dict[str, Any], /) -> None: ...


def train(settings: Settings, folder: Path, progress: Progress, stop: Stop, *, resume: bool = False) -> dict[str, Any]:
    """Train to the end, or until asked to stop; the same on every rank of the process group.

    Args:
        settings: resolved ones.
        folder: the run folder, which rank 0 writes.
        progress: gets a message a round from rank 0.
        stop: asked at the end of each round on every rank; one rank's yes is enough.
        resume: continue from the folder's checkpoint.

    Returns:
        The line that ends the metrics, ``status`` ``done`` or ``diverged``; or ``status`` ``stopped``, and no line.
    """
    return _Run(settings, folder, progress, stop).train(resume=resume)


class _Run:
    def __init__(self, settings: Settings, folder: Path, progress: Progress, stop: Stop) -> None:
        assert settings.steps is not None
        assert settings.interval is not None
        self.settings, self.folder, self.progress, self.stop = settings, folder, progress, stop
        self.steps, self.interval = settings.steps, settings.interval
        self.is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.num_replicas = dist.get_world_size() if self.is_distributed else 1
        self.device = _device(settings.device, self.rank)
        self.task = open_task(settings.task, settings.data).to(self.device)
        self.model = self.task.build(settings.seed).to(self.device)
        self.wrapped: nn.Module = DistributedDataParallel(self.model) if self.is_distributed else self.model
        self.optimizer = make_torch_optimizer(settings.optimizer, settings.lr, self.task, self.model)
        self.scheduler = make_scheduler(settings, self.optimizer, self.model, self._make_probe())
        self.board = _make_board(folder) if self.rank == 0 else None
        self.total: Tensor = torch.zeros((), dtype=torch.float64, device=self.device)
        self.before_s = 0.0
        self.warned = False

    def train(self, *, resume: bool) -> dict[str, Any]:
        first = self._load() if resume else 0
        self.started = self.saved = time.monotonic()
        step = first
        try:
            for step in range(first + 1, self.steps + 1):
                ends = self._ends_round(step)
                self._step(step)
                if ends:
                    save, stop = self._end_round(step)
                    if step % self.interval:
                        continue  # one of the first steps, each a round of its own: it goes on a little
                    if stop and step < self.steps:
                        self._save(step)
                        return {"status": "stopped", "step": step}
                    if save:
                        self._save(step)
            return self._end(step)
        except RuntimeError as error:
            if not isinstance(error, BrokenError) and self._is_finite():
                raise
            return self._finish({"status": "diverged", "step": step, "validation": {}, "error": str(error)})
        finally:
            if self.board is not None:
                with contextlib.suppress(OSError):  # a full disk was reported already
                    self.board.close()

    def _ends_round(self, step: int) -> bool:
        """Asked before the step: what it shows decides about the next one alone."""
        if isinstance(self.scheduler, (AutoLR, OneCycleAutoLR)):
            return self.scheduler._run.policy.is_due(step, last=step == self.steps)
        return step % self.interval == 0 or step == self.steps

    def _step(self, step: int) -> None:
        loss = self._loss(step - 1)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if isinstance(self.scheduler, (AutoLR, OneCycleAutoLR)):
            self.scheduler.step(loss)
        else:
            self.lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.scheduler.step()
        self.total += loss.detach()

    def _loss(self, step: int) -> Tensor:
        seed, rank, count = self.settings.seed, self.rank, self.num_replicas
        return self.task.loss(self.wrapped, batch_of(self.task, step, seed=seed, replica=rank, num_replicas=count))

    def _make_probe(self) -> Probe | None:
        if not self.settings.needs_probe:
            return None
        # The batch that would come next, whole and the same on every replica. Not the validation set, which reports.
        batch = batch_of(self.task, self.steps, seed=self.settings.seed)
        return lambda: self.task.loss(self.model, batch)

    def _end_round(self, step: int) -> tuple[bool, bool]:
        """Record the round; returns whether to save and whether to stop, the same on every rank."""
        count = (step - 1) % self.interval + 1
        due = time.monotonic() - self.saved >= self.settings.checkpoint_s
        table = self._gather([self.total.item() / count, float(due), float(bool(self.stop))])
        self.total.zero_()
        entry: dict[str, Any] = {"event": "round", "step": step, **self._record(step, table[:, 0].tolist())}
        entry["time_s"] = self._time_s()
        if self.rank == 0:
            assert self.board is not None
            self._keep(entry, self.board.add)
            self.progress.send(
                {"step": step, "steps": self.steps, "losses": entry["losses"], "scales": entry["scales"]}
            )
        # The first rank's clock decides when to save, anybody's signal when to stop.
        return bool(table[0, 1]), bool(table[:, 2].any())

    def _record(self, step: int, losses: list[float]) -> dict[str, Any]:
        if isinstance(self.scheduler, (AutoLR, OneCycleAutoLR)):
            return self.scheduler.history[-1].as_dict()
        return {
            "index": (step - 1) // self.interval,
            "losses": losses,
            "values": [[lr] * self.num_replicas for lr in self.lrs],
            "base_values": self.lrs,
            "scales": [1.0],
            "control": {},
            "unhealthy": [],
            "num_rollbacks": 0,
            "distance": 0.0,
            "converge_s": 0.0,
        }

    def _gather(self, values: list[float]) -> Tensor:
        mine = torch.tensor(values, dtype=torch.float64)
        if not self.is_distributed:
            return mine[None]
        mine = mine.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def _end(self, step: int) -> dict[str, Any]:
        with self._converged():
            validation = self.task.evaluate(self.model)
        status = "done" if math.isfinite(validation["loss"]) else "diverged"
        if status == "done":
            self._save(step)
        return self._finish({"status": status, "step": step, "validation": validation})

    def _finish(self, end: dict[str, Any]) -> dict[str, Any]:
        end = run_folder.plain({"event": "end", **end, "time_s": self._time_s()})
        if self.rank == 0:
            assert self.board is not None
            self._keep(end, self.board.add_end)
        return end

    def _keep(self, entry: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
        """Write a line of metrics and show it. A full disk loses lines, not the run."""
        for write in (partial(run_folder.append, self.folder), show):
            try:
                write(entry)
            except OSError as error:
                if not self.warned:
                    self.warned = True
                    warnings.warn(
                        f"could not write step {entry['step']} into {self.folder} ({error}); training goes on, and "
                        "further failures are not reported",
                        stacklevel=2,
                    )

    def _is_finite(self) -> bool:
        """Whether the weights are finite: then an error is not the model's."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    # -- state --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _converged(self) -> Iterator[None]:
        if isinstance(self.scheduler, (AutoLR, OneCycleAutoLR)):
            with self.scheduler.converged():
                yield
        else:
            yield

    def _save(self, step: int) -> None:
        with self._converged():
            if self.rank == 0:
                state = {
                    "step": step,
                    "time_s": self._time_s(),
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                }
                run_folder.save_checkpoint(self.folder, state)
        self.saved = time.monotonic()

    def _load(self) -> int:
        # DDP rebuilds its buckets after the first backward pass, which changes the order of its sums. After this one,
        # gradients of more than two replicas are rounded as in the run that was interrupted.
        self._loss(0).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        state = run_folder.load_checkpoint(self.folder)
        try:
            step, self.before_s = int(state["step"]), float(state["time_s"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
        except Exception as error:
            raise cannot_continue(self.folder, error) from error
        if self.rank == 0:
            run_folder.cut_metrics(self.folder, step)
            run_folder.append(self.folder, {"event": "resumed", "step": step})
        return step

    def _time_s(self) -> float:
        return self.before_s + time.monotonic() - self.started


class _Board:
    """TensorBoard's view of a run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder))

    def add(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        for replica, loss in enumerate(entry["losses"]):
            self.writer.add_scalar(f"loss/replica{replica}", loss, step)
        for group, values in enumerate(entry["values"]):
            for replica, value in enumerate(values):
                self.writer.add_scalar(f"lr/group{group}/replica{replica}", value, step)
        for name, knob in entry.get("knobs", {}).items():
            for replica, value in enumerate(knob["values"]):
                self.writer.add_scalar(f"{name}/replica{replica}", value, step)
            self.writer.add_scalar(f"{name}/base", knob["base"], step)
        for name, numbers in {"scale": entry["scales"], **entry["control"]}.items():
            for knob, number in enumerate(numbers):
                self.writer.add_scalar(f"control/{name}{knob}", number, step)
        self.writer.add_scalar("distance", entry["distance"], step)
        self.writer.add_scalar("rollbacks", entry["num_rollbacks"], step)

    def add_end(self, end: dict[str, Any]) -> None:
        for name, value in end["validation"].items():
            if value is not None:
                self.writer.add_scalar(f"validation/{name}", value, end["step"])

    def close(self) -> None:
        self.writer.close()


def _make_board(folder: Path) -> _Board:
    try:
        return _Board(folder)
    except OSError as error:
        raise FailedError(f"events cannot be written into {folder} ({error.strerror or error}); make room") from None


def cannot_continue(folder: Path, error: Exception) -> UsageError:
    """The error for a checkpoint that does not fit, on one line."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UsageError(
        f"the checkpoint of {folder} cannot be continued from ({reason}); put an older one in its place, or start a "
        "new run"
    )


def _device(kind: str, rank: int) -> torch.device:
    """Replicas on one machine share out its GPUs."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
