"""All adapters take the same arguments, check them when they are given, and add the sinks to the scheduler."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import framework_task as task
from frameworks import lightning_module
from hdet import AutoLR, Explorer, OneCycleAutoLR, knobs
from job import launch

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 4


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer makes its folder, also where it saves nothing."""
    monkeypatch.chdir(tmp_path)


Attach = Callable[..., Any]
"""Attaches with the given arguments, trains for four steps if asked to, and returns the scheduler."""


def _lightning(*args: Any, train: bool = True, configured: Any = task.make_schedule, **kwargs: Any) -> Any:
    import lightning.pytorch as pl

    from hdet.integrations.lightning import HDETCallback

    callback = HDETCallback(*args, **kwargs)
    if not train:
        return None

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, callbacks=[callback], **quiet
    )  # fmt: skip
    module = lightning_module(task.make_optimizer, configured)
    trainer.fit(module, torch.utils.data.DataLoader(task.Samples(64), batch_size=4))
    return callback.scheduler


def _trainer(callbacks: Any = None) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused", use_cpu=True, max_steps=STEPS, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=4, dataloader_pin_memory=False,
    )  # fmt: skip
    model = task.Model()
    optimizer = task.make_optimizer(model)
    made = (optimizer, task.make_schedule(optimizer))
    return Trainer(
        model=model, args=arguments, train_dataset=task.Samples(64), callbacks=callbacks, optimizers=made
    )  # fmt: skip


def _transformers(*args: Any, train: bool = True, **kwargs: Any) -> Any:
    from hdet.integrations.transformers import HDETTrainerCallback

    trainer = _trainer()
    callback = HDETTrainerCallback.attach(trainer, *args, **kwargs)
    if train:
        trainer.train()
    return callback.scheduler


def _loop(scheduler: Any, optimizer: Any) -> Any:
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step(1.0)
    return scheduler


def _accelerate(*args: Any, train: bool = True, **kwargs: Any) -> Any:
    from accelerate import Accelerator

    from hdet.integrations.accelerate import HDETScheduler

    optimizer = task.make_optimizer(task.Model())
    scheduler = HDETScheduler(Accelerator(cpu=True), task.make_schedule(optimizer), *args, **kwargs)
    if train:
        _loop(scheduler, optimizer)
    return scheduler.scheduler


def _attach(framework: str) -> Attach:
    attach: Attach = globals()[f"_{framework}"]
    return attach


def _signature(framework: str) -> list[tuple[str, Any, Any]]:
    module = importlib.import_module(f"hdet.integrations.{framework}")
    found = {"lightning": "HDETCallback", "transformers": "HDETTrainerCallback", "accelerate": "HDETScheduler"}
    face = getattr(module, found[framework])
    parameters = inspect.signature(getattr(face, "attach", face)).parameters.values()
    own = ("trainer", "accelerator", "scheduler", "log", "monitor", "mode")
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in own]


def test_the_arguments_are_the_same_everywhere(framework: str) -> None:
    assert _signature(framework) == [
        ("make", inspect.Parameter.POSITIONAL_OR_KEYWORD, None),
        ("sinks", inspect.Parameter.KEYWORD_ONLY, ()),
        ("settings", inspect.Parameter.VAR_KEYWORD, inspect.Parameter.empty),
    ]


def test_settings_reach_autolr_and_records_reach_the_sinks(framework: str) -> None:
    seen: list[int] = []
    scheduler = _attach(framework)(sinks=[lambda record, names: seen.append(record.step)], interval=2)
    assert isinstance(scheduler, AutoLR)
    assert seen == [1, 2, 3, 4]  # each of the first steps is a round
    assert [record.step for record in scheduler.history] == seen


def test_make_builds_another_scheduler(framework: str) -> None:
    def make(schedule: Any) -> OneCycleAutoLR:
        return OneCycleAutoLR(schedule.optimizer, 0.1, STEPS, model_sync_interval=2)

    assert isinstance(_attach(framework)(make), OneCycleAutoLR)


def test_records_of_what_make_builds_reach_the_sinks(framework: str) -> None:
    seen: list[int] = []
    sinks = [lambda record, names: seen.append(record.step)]
    _attach(framework)(lambda schedule: AutoLR(schedule, interval=2), sinks=sinks)
    assert seen == [1, 2, 3, 4]  # each of the first steps is a round


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"intervall": 2}, TypeError, "arguments of AutoLR, but got intervall; did you mean interval?"),
        ({"skip_nonfinit": True}, TypeError, "did you mean .*=.*\\(skip_nonfinite=...\\)?"),
        ({"zzz": 2}, TypeError, "arguments of AutoLR, but got zzz; it has .*'interval'"),
        ({"schedule": 2}, TypeError, "arguments of AutoLR, but got schedule"),
        ({"sinks": print}, TypeError, "sinks must be a list of sinks, see hdet.sinks, but got <built-in"),
        ({"sinks": ["rounds.jsonl"]}, TypeError, "sinks must be a list of sinks"),
        ({"interval": 0}, ValueError, "interval must be an integer >= 1, but got interval=0"),
        ({"ensemble": 0.1}, TypeError, "ensemble must be an hdet.ensemble.Ensemble, but got float"),
        ({"adapt": {"level": False}}, TypeError, "adapt must be an hdet.Adapt, but got dict"),
        ({"make": 3}, TypeError, "make must be a function of a schedule, but got int"),
        ({"make": AutoLR, "interval": 2}, ValueError, "settings must be empty with make.*but got \\['interval'\\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_when_they_are_given(
    framework: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _attach(framework)(train=False, **arguments)


def test_what_make_returns_is_checked(framework: str) -> None:
    with pytest.raises(TypeError, match="make must return a scheduler of HDET, but got CosineAnnealingLR"):
        _attach(framework)(lambda schedule: schedule)


def _explorer(schedule: Any, knob: Any) -> Explorer:
    model = torch.nn.ParameterList(schedule.optimizer.param_groups[0]["params"])
    return Explorer(model, schedule.optimizer, knobs=[knob], interval=2)


def _beside() -> tuple[list[int], list[float], float]:
    """The rounds of an Explorer, the weight decay of all replicas in each, and the learning rate at the end."""
    task.pretend_torchrun()
    seen: list[int] = []
    values: list[float] = []

    def sink(record: Any, names: Any) -> None:
        seen.append(record.step)
        values.extend(record.knobs["weight_decay"].values)

    explorer = _accelerate(lambda s: _explorer(s, knobs.WeightDecay(adapt=False)), sinks=[sink])
    assert isinstance(explorer, Explorer)
    return seen, values, float(explorer.optimizer.param_groups[0]["lr"])


def test_accelerate_runs_an_explorer_and_leaves_the_schedule_to_the_user() -> None:
    pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")
    for seen, values, lr in launch(_beside, 2, timeout_s=150):
        assert seen == [2, 4]
        assert len(set(values)) > 1
        assert lr == 0.05


@pytest.mark.parametrize("framework", ["transformers"], indirect=True)
def test_an_explorer_is_refused_elsewhere(framework: str) -> None:
    with pytest.raises(TypeError, match="which steps one schedule, but got Explorer; pass its knobs to AutoLR"):
        _attach(framework)(lambda schedule: _explorer(schedule, knobs.WeightDecay(adapt=False)))


def test_an_explorer_of_the_learning_rate_takes_the_place_of_no_schedule() -> None:
    pytest.importorskip("lightning", reason="pip install 'hdet[lightning]'")
    explorer = _lightning(lambda schedule: _explorer(schedule, knobs.LearningRate()), configured=None)
    assert explorer.last_epoch == STEPS


def test_a_callback_of_transformers_may_be_passed_to_the_trainer(tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    from hdet.integrations.transformers import HDETTrainerCallback

    monkeypatch.chdir(tmp_path)
    callback = HDETTrainerCallback(interval=2)
    trainer = _trainer(callbacks=[callback])
    trainer.train()
    assert callback.scheduler is not None
    assert trainer.lr_scheduler is callback.scheduler
    history = callback.scheduler.history
    assert [record.step for record in history] == [1, 2, 3, 4]  # each of the first steps is a round
    assert all(loss > 0 for record in history for loss in record.losses)
    with pytest.raises(ValueError, match="HDETTrainerCallback must be given to one Trainer, but it is that of another"):
        _trainer(callbacks=[callback])


def test_a_callback_of_transformers_that_comes_too_late_says_so() -> None:
    pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    from hdet.integrations.transformers import HDETTrainerCallback

    trainer = _trainer()
    trainer.add_callback(HDETTrainerCallback())
    message = (
        r"was added later, .* write Trainer\(..., callbacks=\[HDETTrainerCallback\(\)\]\), or HDETTrainerCallback.at"
    )
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


@pytest.mark.parametrize("framework", ["transformers", "accelerate"], indirect=True)
def test_attaching_twice_is_refused(framework: str) -> None:  # Lightning's callbacks are looked at when fit begins
    module = importlib.import_module(f"hdet.integrations.{framework}")
    twice = "must be attached to once, but hdet is attached to this one already; delete one line"
    if framework == "accelerate":
        from accelerate import Accelerator

        accelerator, scheduler = Accelerator(cpu=True), AutoLR(task.make_schedule(task.make_optimizer(task.Model())))
        first = module.HDETScheduler(accelerator, scheduler)
        with pytest.raises(ValueError, match="AutoLR must have one HDETScheduler, but this accelerator has one for it"):
            module.HDETScheduler(accelerator, scheduler)
        with pytest.raises(TypeError, match="but it is an HDETScheduler already"):
            module.HDETScheduler(accelerator, first)
        with pytest.raises(TypeError, match="accelerator must be an Accelerator, but got AutoLR"):
            module.HDETScheduler(scheduler, accelerator)
    else:
        trainer = _trainer()
        module.HDETTrainerCallback.attach(trainer)
        with pytest.raises(ValueError, match=twice):
            module.HDETTrainerCallback.attach(trainer)


def test_a_second_training_needs_a_new_schedule() -> None:
    pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
    from hdet.integrations.transformers import HDETTrainerCallback

    trainer = _trainer()
    HDETTrainerCallback.attach(trainer, interval=2)
    trainer.train()
    with pytest.raises(ValueError, match="must be new for each training, but it is the AutoLR of the last one"):
        trainer.train()
