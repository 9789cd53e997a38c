"""Records reach their sinks, on one rank, whole, and never at the cost of the training."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet import Adapt, AutoLR, RoundRecord
from hdet.history import KnobRecord
from hdet.launch import launch
from hdet.sinks import JsonLinesSink, MLflowSink, Sink, TensorBoardSink, WandbSink, scalars


def _record(index: int = 0) -> RoundRecord:
    return RoundRecord(
        index=index,
        step=10 * (index + 1),
        losses=(1.0, float("nan")),
        values=((0.1, 0.2), (0.3, 0.4)),
        base_values=(0.15, 0.35),
        scales=(1.5,),
        control={"z": (2.0,)},
        unhealthy=(1,),
        num_rollbacks=3,
        distance=0.5,
        converge_s=0.01,
        probes=(0.9, 0.8),
        knobs={"weight_decay": KnobRecord((0.01, 0.02), 0.015, -1.0, 0.5, -2.0)},
    )


def test_scalars_by_replica_knob_and_group() -> None:
    assert scalars(_record(), ["body", "head"]) == {
        "round": 0.0,
        "rollbacks": 3.0,
        "distance": 0.5,
        "converge_s": 0.01,
        "unhealthy": 1.0,
        "quarantined": 0.0,
        "loss/replica0": 1.0,
        "probe/replica0": 0.9,
        "probe/replica1": 0.8,
        "lr/body/replica0": 0.1,
        "lr/body/replica1": 0.2,
        "lr/body/base": 0.15,
        "lr/head/replica0": 0.3,
        "lr/head/replica1": 0.4,
        "lr/head/base": 0.35,
        "scale/0": 1.5,
        "control/z/0": 2.0,
        "knob/weight_decay/replica0": 0.01,
        "knob/weight_decay/replica1": 0.02,
        "knob/weight_decay/base": 0.015,
        "knob/weight_decay/slope": -1.0,
        "knob/weight_decay/standard_error": 0.5,
        "knob/weight_decay/z": -2.0,
    }
    assert "lr/group1/base" in scalars(_record())


class _Kept(Sink):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, list[str]]] = []

    def write(self, record: RoundRecord, names: Any) -> None:
        self.kept.append((record.index, list(names)))


def _train(num_steps: int, sink: Sink | None = None, scheduler: AutoLR | None = None) -> AutoLR:
    if scheduler is None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([{"params": [weight], "name": "all"}], lr=0.01)
        scheduler = AutoLR(
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40), interval=2, adapt=Adapt(level=False)
        )
    if sink is not None:
        scheduler.add_sink(sink)
    (weight,) = scheduler.optimizer.param_groups[0]["params"]
    for _ in range(num_steps):
        loss = weight.square().sum()
        loss.backward()
        scheduler.optimizer.step()
        scheduler.step(loss)
        scheduler.optimizer.zero_grad()
    return scheduler


def test_a_sink_is_called_at_the_end_of_each_round_from_when_it_was_added() -> None:
    first, second = _Kept(), _Kept()
    scheduler = _train(3, first)
    _train(4, second, scheduler)
    assert first.kept == [(0, ["all"]), (1, ["all"]), (2, ["all"])]
    assert second.kept == first.kept[1:]


def test_rounds_that_are_repeated_after_a_load_are_written_again() -> None:
    sink = _Kept()
    scheduler = _train(4, sink)
    state = scheduler.state_dict()
    _train(4, None, scheduler)
    scheduler.load_state_dict(state)
    _train(2, None, scheduler)
    assert [index for index, _ in sink.kept] == [0, 1, 2, 3, 2]


def _on_ranks(path: str) -> int:
    sink = JsonLinesSink(path)
    _train(8, sink)
    return len(Path(path).read_text().splitlines()) if torch.distributed.get_rank() == 0 else 0


def test_one_rank_writes(tmp_path: Path) -> None:
    assert launch(_on_ranks, 2, str(tmp_path / "log.jsonl")) == [4, 0]


def test_json_lines_are_whole_and_valid(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    sink = JsonLinesSink(path)
    sink(_record(0), ["body", "head"])
    with path.open("a") as file:
        file.write('{"index": 1, "st')  # what a crash leaves
    JsonLinesSink(path)(_record(1))
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["losses"] == [1.0, None]
    assert first["names"] == ["body", "head"]
    assert first["knobs"]["weight_decay"]["z"] == -2.0
    assert second["index"] == 1


def test_a_disk_that_refuses_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonLinesSink(path)
    sink(_record(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    with pytest.warns(UserWarning, match=r"JsonLinesSink could not write round 1 \(OSError: .*training goes on"):
        sink(_record(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink(_record(2))
    monkeypatch.undo()
    sink(_record(3))
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 3]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'hdet[sinks]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink(_record(0))
    sink(_record(1))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = events.Scalars("hdet/lr/group0/replica1")
    assert [event.step for event in found] == [10, 20]
    assert found[0].value == pytest.approx(0.2)


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'hdet[sinks]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WandbSink(mode="offline", dir=str(tmp_path), project="test")
    sink(_record(0))
    assert sink._run.summary["hdet/scale/0"] == 1.5
    assert not sink._warned
    sink.close()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_local(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="pip install 'hdet[sinks]'")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sink = MLflowSink(uri)
    sink(_record(0))
    sink(_record(1))
    assert not sink._warned
    run_id = sink._run_id
    sink.close()
    history = MlflowClient(uri).get_metric_history(run_id, "hdet/lr/group1/base")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.35), (20, 0.35)]


@pytest.mark.parametrize(
    ("make", "package"), [(TensorBoardSink, "tensorboard"), (WandbSink, "wandb"), (MLflowSink, "mlflow")]
)
def test_a_missing_package_says_what_to_install(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}.*pip install {package}"):
        make("x")


@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_a_missing_framework_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [module for module in sys.modules if module.startswith((f"{name}.", "pytorch_lightning"))]
    for module in (name, *loaded):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"hdet.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {name}.*pip install {name}"):
        importlib.import_module(f"hdet.integrations.{name}")
