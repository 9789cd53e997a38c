"""DeepSpeed on two processes does what a plain loop does at ZeRO stage 0, and is refused at the others."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import framework_task as task
from framework_task import Results
from hdet import Adapt, AutoLR, OneCycleAutoLR
from native import error

pytest.importorskip("deepspeed", reason="pip install 'hdet[deepspeed]'")


def _engine(model: Any, accumulate: int = 1, schedule: Any = task.make_schedule, **config: Any) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": task.BATCH,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,  # it clips at 1 unless told otherwise
        "zero_allow_untested_optimizer": True,
        **config,
    }
    optimizer = task.make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    return engine


def _fit(
    settings: dict[str, Any],
    accumulate: int,
    folder: str = "",
    *,
    resume: bool = False,
    schedule: Any = task.make_schedule,
    **config: Any,
) -> dict[str, Any]:
    from hdet.integrations.deepspeed import attach

    rank, world = dist.get_rank(), dist.get_world_size()
    model = task.Model()
    engine = _engine(model, accumulate, schedule, **config)
    lrs = task.watch(engine.basic_optimizer)
    seen: list[Any] = []
    hdet = attach(engine, sinks=[lambda record, names: seen.append(record)], **settings)
    if resume:
        engine.load_checkpoint(folder, tag="saved")
    data = task.Samples(task.num_samples(accumulate))
    for index in range(task.SAVED_STEP * accumulate if resume else 0, task.STEPS * accumulate):
        where = torch.arange(task.BATCH) + (index * world + rank) * task.BATCH
        loss = engine(data.x[where], data.labels[where])["loss"]
        engine.backward(loss)
        engine.step()
        if folder and not resume and index + 1 == task.SAVED_STEP * accumulate:
            engine.save_checkpoint(folder, tag="saved")
    return {"lrs": lrs, "losses": model.losses, "weights": model.flat(), "rounds": len(hdet.history), "seen": len(seen)}


def _one_cycle(optimizer: Any) -> OneCycleAutoLR:
    return OneCycleAutoLR(
        optimizer,
        max_lr=0.1,
        total_steps=task.STEPS,
        ensemble_lr_spread_ratio=0.2,
        model_sync_interval=4,
        cycle_momentum=False,
    )


def _refused(**config: Any) -> str:
    from hdet.integrations.deepspeed import attach

    engine = _engine(task.Model(), **config)
    return error(lambda: attach(engine, **task.GRADIENT))


def _start() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.CRITICAL)


def _all(folder: str) -> dict[str, Any]:
    from hdet.integrations.deepspeed import attach

    _start()
    total: dict[str, Any] = {"total_steps": task.STEPS}
    found: dict[str, Any] = {
        "plain": task.plain_runs("blocks"),
        "1": _fit({**task.GRADIENT, **total}, 1),
        "2": _fit({**task.GRADIENT, **total}, 2),
        "own": _fit({}, 2, schedule=lambda o: AutoLR(task.make_schedule(o), **task.GRADIENT, **total)),
        "saved": _fit({**task.APART, **total}, 2, folder),
        "resumed": _fit({**task.APART, **total}, 2, folder, resume=True),
        "one cycle": _fit({}, 1, schedule=_one_cycle),
        "autocast": _fit({**task.APART, **total}, 1, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        "local": error(lambda: attach(_engine(task.Model()), gradients="local")),
        "nothing": error(lambda: attach(task.Model())),
        "bf16": _refused(bf16={"enabled": True}),
        "of DeepSpeed": _refused(schedule=None, scheduler={"type": "WarmupLR", "params": {}}),
        "none": _fit({"interval": 2, "adapt": Adapt(start_steps=0), **total}, 1, schedule=None)["rounds"],
    }
    for stage in (1, 2, 3):
        found[f"stage {stage}"] = _refused(zero_optimization={"stage": stage})
    return found


results = task.on_two_processes(_all, timeout_s=110)


@pytest.mark.parametrize(("run", "accumulate"), [("1", 1), ("2", 2), ("own", 2)])
def test_one_optimizer_step_is_one_step(results: Results, run: str, accumulate: int) -> None:
    task.check_steps(results, run, accumulate)
    assert [replica[run]["seen"] for replica in results[0]] == [replica[run]["rounds"] for replica in results[0]]


def test_replicas_apart_are_saved_as_their_mean_and_resume(results: Results) -> None:
    replicas, folder = results
    task.check_apart(replicas)
    saved = torch.load(folder / "saved" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    on_disk = [x for p in saved.values() for x in p.flatten().tolist()]
    torch.testing.assert_close(on_disk, replicas[0]["plain"]["mean"])


def test_one_cycle_fans_out(results: Results) -> None:
    first, second = (replica["one cycle"] for replica in results[0])
    assert first["rounds"] == task.STEPS // 4
    assert sorted(a / b for a, b in zip(first["lrs"], second["lrs"], strict=True))[0] == pytest.approx(0.8 / 1.2)
    assert first["weights"] == second["weights"]


def test_autocast(results: Results) -> None:
    first, second = (replica["autocast"] for replica in results[0])
    assert first["weights"] == second["weights"]
    assert first["lrs"] != second["lrs"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused(results: Results, stage: int) -> None:
    for replica in results[0]:
        text = replica[f"stage {stage}"]
        assert f"ValueError: zero_optimization must be of stage 0, but got stage {stage}: each rank updates" in text
        assert "there are no replicas to fan out, and no whole weights to measure a gradient against" in text


def test_copies_of_the_weights_are_refused(results: Results) -> None:
    for replica in results[0]:
        assert "ValueError: the optimizer must train the model's own weights, but got FP16" in replica["bf16"]
        assert '{"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}' in replica["bf16"]


def test_without_a_schedule_the_learning_rate_is_constant(results: Results) -> None:
    assert [replica["none"] for replica in results[0]] == [task.STEPS // 2] * 2


def test_a_schedule_of_deepspeed_is_refused(results: Results) -> None:
    for replica in results[0]:
        assert "TypeError: schedule must be an LRScheduler, but got WarmupLR" in replica["of DeepSpeed"]


def test_local_gradients_and_other_objects_are_refused(results: Results) -> None:
    for replica in results[0]:
        assert "gradients must be \"shared\" under DeepSpeed, but got gradients='local'" in replica["local"]
        assert "TypeError: engine must be what deepspeed.initialize returns first, but got Model" in replica["nothing"]
