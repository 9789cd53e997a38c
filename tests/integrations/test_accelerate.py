"""Accelerate on two processes does what a plain loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import framework_task as task
from framework_task import Results
from hdet import AutoLR, OneCycleAutoLR
from hdet.launch import launch

pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")

PREPARE = ("scheduler_before", "schedule_after", "scheduler_prepared")


def fit(
    settings: dict[str, Any],
    accumulate: int,
    how: str,
    folder: str,
    *,
    resume: bool = False,
    device: str = "cpu",
    half: bool = False,
) -> dict[str, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState

    from hdet.integrations.accelerate import HDETScheduler

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision="fp16" if half else "no",
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
    )
    inner = task.Model().to(device)
    optimizer = task.make_optimizer(inner)
    lrs = task.watch(optimizer)
    settings = {"total_steps": task.STEPS, **settings}
    loader = torch.utils.data.DataLoader(task.Samples(task.num_samples(accumulate)), batch_size=task.BATCH)
    model, loader = accelerator.prepare(inner, loader)
    given: Any
    if how == "schedule_after":
        optimizer = accelerator.prepare(optimizer)
        scheduler = HDETScheduler(accelerator, task.make_schedule(optimizer), **settings)
    else:
        given = AutoLR(task.make_schedule(optimizer), **settings)
        optimizer = accelerator.prepare(optimizer)
        if how == "scheduler_prepared":
            given = accelerator.prepare(given)
        scheduler = HDETScheduler(accelerator, given)
    if resume:
        scheduler.load_state(folder)
    refused = ""
    first = task.SAVED_STEP * accumulate if resume else 0
    for batch in accelerator.skip_first_batches(loader, first):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        if folder and not resume and accelerator.sync_gradients and scheduler.scheduler.last_epoch == task.SAVED_STEP:
            try:
                accelerator.save_state(folder)
            except RuntimeError as error:
                refused = str(error)
            scheduler.save_state(folder)
    rounds = len(scheduler.history)
    assert half or rounds == (task.STEPS - (4 if resume else 0)) // settings["interval"]
    return {"lrs": lrs, "losses": inner.losses, "weights": inner.flat(), "rounds": rounds, "refused": refused}


def _all(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"plain": task.plain_runs("blocks")}
    for accumulate in (1, 2):
        for how in PREPARE:
            found[f"{how}-{accumulate}"] = fit(task.GRADIENT, accumulate, how, "")
    found["saved"] = fit(task.APART, 2, "scheduler_prepared", folder)
    found["resumed"] = fit(task.APART, 2, "schedule_after", folder, resume=True)
    return found


results = task.on_two_processes(_all)


@pytest.mark.slow
@pytest.mark.parametrize("how", PREPARE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_optimizer_step_is_one_step(results: Results, how: str, accumulate: int) -> None:
    task.check_steps(results, f"{how}-{accumulate}", accumulate)


@pytest.mark.slow
def test_replicas_apart_are_saved_as_their_mean_and_resume(results: Results) -> None:
    replicas, folder = results
    from safetensors.torch import load_file

    on_disk = [x for p in load_file(folder / "model.safetensors").values() for x in p.flatten().tolist()]
    task.check_apart(replicas)
    torch.testing.assert_close(sorted(on_disk), sorted(replicas[0]["plain"]["mean"]))


@pytest.mark.slow
def test_a_bare_save_of_replicas_apart_is_refused(results: Results) -> None:
    for replica in results[0]:
        assert "must not be called while replicas are apart" in replica["saved"]["refused"]
        assert "scheduler.save_state()" in replica["saved"]["refused"]


def _one_cycle() -> tuple[list[float], int]:
    task.pretend_torchrun()
    from accelerate import Accelerator

    from hdet.integrations.accelerate import HDETScheduler

    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(task.make_optimizer(task.Model()))
    inner = OneCycleAutoLR(
        optimizer.optimizer, max_lr=0.1, total_steps=8, ensemble_lr_spread_ratio=0.2, model_sync_interval=4
    )
    scheduler = HDETScheduler(accelerator, accelerator.prepare(inner))
    lrs = []
    for _ in range(8):
        lrs.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step(1.0)
    return lrs, len(scheduler.history)


def test_a_prepared_optimizer_is_refused_by_its_name_and_stays_as_it_was() -> None:
    from accelerate import Accelerator

    inside = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    prepared = Accelerator(cpu=True).prepare_optimizer(inside)
    with pytest.raises(TypeError, match="AcceleratedOptimizer is a wrapper without them; pass the optimizer inside it"):
        AutoLR(prepared, total_steps=100)
    AutoLR(inside, total_steps=100)


def test_one_cycle_steps_once_too() -> None:
    (first, rounds), (second, _) = launch(_one_cycle, 2, timeout_s=150)
    assert rounds == 2
    assert sorted(a / b for a, b in zip(first, second, strict=True))[0] == pytest.approx(0.8 / 1.2)
