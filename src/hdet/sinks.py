"""Sinks: where the record of each round goes, once ``scheduler.add_sink(sink)`` was called. None runs inside a step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hdet.history import RoundRecord


def scalars(record: RoundRecord, names: Sequence[str] = ()) -> dict[str, float]:
    """The finite numbers of a record by name: one for each replica, knob and param group.

    Args:
        record: of a round.
        names: of the param groups; default their numbers.
    """
    found: dict[str, float] = {"round": record.index, "rollbacks": record.num_rollbacks}
    found |= {"distance": record.distance, "converge_s": record.converge_s, "unhealthy": len(record.unhealthy)}
    found["quarantined"] = len(record.quarantined)
    found |= _numbered("loss/replica", record.losses) | _numbered("probe/replica", record.probes)
    for k, values in enumerate(record.values):
        name = names[k] if k < len(names) else f"group{k}"
        found |= _numbered(f"lr/{name}/replica", values)
        found[f"lr/{name}/base"] = record.base_values[k]
    found |= _numbered("scale/", record.scales)
    for key, values in record.control.items():
        found |= _numbered(f"control/{key}/", values)
    if record.held_out is not None:
        found |= {f"held_out/{name}": value for name, value in record.held_out._asdict().items()}
    for name, knob in record.knobs.items():
        found |= _numbered(f"knob/{name}/replica", knob.values)
        found |= {f"knob/{name}/{key}": getattr(knob, key) for key in ("base", "slope", "standard_error", "z")}
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


def _numbered(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}{i}": value for i, value in enumerate(values)}


class Sink(ABC):
    """Called at the end of each round with its record, which has all replicas' numbers; only rank 0 writes.

    If a sink cannot write, it warns once, training goes on, and it tries again with the next record. Subclasses
    implement :meth:`write`.
    """

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, record: RoundRecord, names: Sequence[str] = ()) -> None:
        """Write one record. ``names`` are those of the param groups."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        try:
            self.write(record, names)
        except Exception as error:
            self._warn(f"write round {record.index}", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} could not {what} ({type(error).__name__}: {error}); "
                "training goes on, and further failures are not reported",
                stacklevel=3,
            )

    @abstractmethod
    def write(self, record: RoundRecord, names: Sequence[str]) -> None:
        """Write one record, or raise."""

    def close(self) -> None:  # noqa: B027
        """Release what the sink holds."""


class JsonLinesSink(Sink):
    """Appends a line of JSON a round: the whole record, and ``names``. NaN and infinity become null.

    The file never ends in half a line: a partial line left by a full disk or a crash is removed. Rounds that could not
    be written are missing; once there is room again, the next ones follow.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = _as_path(path, "path")

    def write(self, record: RoundRecord, names: Sequence[str]) -> None:
        line = json.dumps(as_json({**record.as_dict(), "names": list(names)}), allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.path, line)


class TensorBoardSink(Sink):
    """Scalars for TensorBoard, under ``hdet/``, over optimizer steps."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._folder = str(_as_path(folder, "folder"))
        self._writer: Any = None

    def write(self, record: RoundRecord, names: Sequence[str]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        for key, value in scalars(record, names).items():
            self._writer.add_scalar(f"hdet/{key}", value, record.step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:  # what the writer still held could not be written
            self._warn("write its last rounds", error)


class WandbSink(Sink):
    """Scalars for Weights & Biases, under ``hdet/``, over ``hdet/step``: the run's own step is left alone.

    Args:
        run: a run of yours; default one made by ``wandb.init(**settings)`` at the first record.
        settings: e.g. ``project="...", mode="offline"``.
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._init = wandb.init
        self._run = run
        self._own = run is None
        self._settings = settings
        self._defined = False

    def write(self, record: RoundRecord, names: Sequence[str]) -> None:
        if self._run is None:
            self._run = self._init(**self._settings)
        if not self._defined:
            self._run.define_metric("hdet/*", step_metric="hdet/step")
            self._defined = True
        values = {f"hdet/{key}": value for key, value in scalars(record, names).items()}
        self._run.log({"hdet/step": record.step, **values})

    def close(self) -> None:
        if self._own and self._run is not None:
            self._run.finish()
            self._run = None


class MLflowSink(Sink):
    """Scalars for MLflow, under ``hdet/``, over optimizer steps.

    Args:
        tracking_uri: e.g. ``"sqlite:///mlflow.db"``; default MLflow's own.
        run_id: a run of yours; default a new one in ``experiment``, made at the first record.
        experiment: its name; created if it does not exist.
    """

    def __init__(self, tracking_uri: str | None = None, *, run_id: str | None = None, experiment: str = "hdet") -> None:
        super().__init__()
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise _missing("mlflow") from error
        self._make_client = MlflowClient
        self._client: Any = None
        self._uri = tracking_uri
        self._run_id = run_id
        self._own = run_id is None
        self._experiment = experiment

    def write(self, record: RoundRecord, names: Sequence[str]) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self._client = self._make_client(self._uri)
        if self._run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            self._run_id = self._client.create_run(experiment).info.run_id
        now = int(time.time() * 1000)
        metrics = [Metric(f"hdet/{key}", value, now, record.step) for key, value in scalars(record, names).items()]
        for start in range(0, len(metrics), 1000):  # the most that a server takes at once
            self._client.log_batch(self._run_id, metrics[start : start + 1000])

    def close(self) -> None:
        if self._own and self._run_id is not None:
            self._client.set_terminated(self._run_id)
            self._run_id = None


def append_line(path: Path, line: str) -> None:
    """Append one line to a file, whole or not at all; OSError if it cannot be written."""
    data = line.encode() + b"\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = _cut_half_line(file)
        try:
            if os.write(file, data) != len(data):
                raise OSError("the disk took only a part of the line")
        except OSError:
            # If even that fails, the next call removes it.
            with contextlib.suppress(OSError):
                os.ftruncate(file, end)
            raise
    finally:
        os.close(file)


def _as_path(value: str | os.PathLike[str], name: str) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a string or a path, but got {type(value).__name__}")
    return Path(value)


def _missing(package: str) -> ImportError:
    return ImportError(f"this sink needs {package}, which is not installed; pip install {package}")


def as_json(value: Any) -> Any:
    """JSON's types only: null for numbers that are not finite, lists for tuples."""
    if isinstance(value, Mapping):
        return {key: as_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_half_line(file: int) -> int:
    """Remove what follows the last newline; returns the size of the file then."""
    end = size = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(file, end)
    return end
