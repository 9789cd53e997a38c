"""``accelerator.prepare`` of a scheduler of hdet, without the adapter: it works, or says what to pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import framework_task as task
from hdet import Adapt, AutoLR, OneCycleAutoLR
from hdet.launch import launch

pytest.importorskip("accelerate", reason="pip install 'hdet[accelerate]'")

STEPS, NUM_ROUNDS = 12, 8
"""Of one step each at first, and of two after the fourth."""


def _schedule(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "OneCycleAutoLR":
        spread = 0.1 if dist.is_initialized() else 0.0
        return OneCycleAutoLR(
            optimizer, 0.1, STEPS, ensemble_lr_spread_ratio=spread, model_sync_interval=2, cycle_momentum=False
        )
    schedule: Any = CosineAnnealingLR(optimizer, STEPS) if kind == "AutoLR" else LambdaLR(optimizer, lambda _: 1.0)
    return AutoLR(schedule, interval=2, adapt=Adapt(_start_steps=0))


def fit(kind: str, options: dict[str, Any], accumulate: int = 1, folder: str = "", *, resume: bool = False) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    options = dict(options)
    split = DataLoaderConfiguration(split_batches=options.pop("split_batches", False), use_seedable_sampler=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=split, **options)
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = _schedule(kind, optimizer)
    data = torch.randn(accumulate * STEPS * accelerator.num_processes * 4, 2)
    batch_size = 4 * (accelerator.num_processes if split.split_batches else 1)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, inner)
    if resume:
        accelerator.load_state(folder)
    lrs = []
    for (batch,) in accelerator.skip_first_batches(loader, inner.last_epoch * accumulate):
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if options.get("step_scheduler_with_optimizer", True) or accelerator.sync_gradients:
                scheduler.step(loss)
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            lrs.append(float(scheduler.get_last_lr()[0]))
        if folder and not resume and inner.last_epoch == 4 and accelerator.sync_gradients:
            accelerator.save_state(folder)
    return lrs, inner.last_epoch, [record.scales for record in inner.history]


def _plain(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = _schedule(kind, optimizer)
    lrs = []
    for batch in torch.randn(STEPS, 4, 2):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        lrs.append(float(scheduler.get_last_lr()[0]))
    return lrs, scheduler.last_epoch, [record.scales for record in scheduler.history]


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("kind", ["AutoLR", "OneCycleAutoLR", "AutoLR without an end"])
def test_prepared_on_one_process_it_does_what_a_plain_loop_does(kind: str, with_optimizer: bool) -> None:
    assert fit(kind, {"step_scheduler_with_optimizer": with_optimizer}) == _plain(kind)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_one_optimizer_step_is_one_step_when_gradients_accumulate(with_optimizer: bool) -> None:
    lrs, steps, scales = fit("AutoLR", {"step_scheduler_with_optimizer": with_optimizer}, accumulate=3)
    assert (len(lrs), steps, len(scales)) == (STEPS, STEPS, NUM_ROUNDS)


def test_accelerators_own_checkpoint_resumes_it(tmp_path: Path) -> None:
    lrs, _, _ = fit("AutoLR", {}, folder=str(tmp_path))
    assert fit("AutoLR", {}, folder=str(tmp_path), resume=True)[0] == lrs[4:]


def _on_two(kind: str, options: dict[str, Any]) -> Any:
    task.pretend_torchrun()
    try:
        return fit(kind, options)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["AutoLR", "OneCycleAutoLR", "AutoLR without an end"])
def test_on_two_processes_a_step_for_each_of_them_is_refused(kind: str) -> None:
    for said in launch(_on_two, 2, kind, {}, timeout_s=150):
        assert said == (
            f"{kind.split()[0]} must be stepped once for each optimizer step, but after accelerator.prepare() it is "
            "stepped once for each process; step hdet.integrations.accelerate.HDETScheduler(accelerator, scheduler) "
            "instead, or pass step_scheduler_with_optimizer=False or split_batches=True to Accelerator"
        )


@pytest.mark.parametrize("options", [{"step_scheduler_with_optimizer": False}, {"split_batches": True}])
def test_on_two_processes_it_works_as_the_error_says(options: dict[str, Any]) -> None:
    found = launch(_on_two, 2, "AutoLR", options, timeout_s=150)
    lrs, steps, scales = found[0]
    assert found[1] == found[0]
    assert (len(lrs), steps, len(scales)) == (STEPS, STEPS, NUM_ROUNDS)
    assert len(set(scales)) >= 3
