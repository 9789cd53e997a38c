"""The Trainer of Transformers on two processes does what a plain loop does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import framework_task as task
from framework_task import Results
from hdet import Adapt, AutoLR, Ensemble

pytest.importorskip("transformers", reason="pip install 'hdet[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'hdet[transformers]'")


class PerItem(task.Model):
    """A model that divides by the number of items itself, as the language models of Transformers do."""

    accepts_loss_kwargs = True

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> dict[str, Any]:
        total = (self.layers(x).squeeze(-1) - labels).square().sum()
        mean = total / len(labels)
        if self.training:
            self.losses.append(mean.item())
        return {"loss": mean if num_items_in_batch is None else total / num_items_in_batch}


def fit(
    settings: dict[str, Any], accumulate: int, folder: str, *, case: str = "", device: str = "cpu", **more: Any
) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETTrainerCallback

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=device == "cpu",
        ddp_backend="gloo",
        max_steps=task.STEPS,
        per_device_train_batch_size=task.BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="steps",
        logging_steps=4,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        **({"save_strategy": "no"} | more),
    )
    model = (PerItem() if case == "per_item" else task.Model()).to(device)
    optimizer = task.make_optimizer(model)
    lrs = task.watch(optimizer)
    schedule = task.make_schedule(optimizer)
    if case == "own":
        schedule = AutoLR(schedule, model=model, total_steps=task.STEPS, **settings)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=task.Samples(task.num_samples(accumulate)),
        eval_dataset=task.Samples(8),
        optimizers=(optimizer, schedule),
    )
    callback = HDETTrainerCallback.attach(trainer, **({} if case == "own" else settings))
    path = f"{folder}/checkpoint-{task.SAVED_STEP}" if case == "resume" else None
    trainer.train(resume_from_checkpoint=path)
    assert callback.scheduler is not None
    return {
        "lrs": lrs,
        "losses": model.losses,
        "weights": model.flat(),
        "evaluated": model.evaluated[:1],
        "rounds": len(callback.scheduler.history),
        "seen": [loss for record in callback.scheduler.history for loss in record.losses],
        "best": trainer.state.best_model_checkpoint,
        "log": trainer.state.log_history,
        "apart": callback.scheduler.weights_apart,
    }


def _made_by_the_trainer(folder: str) -> tuple[str, float, list[float]]:
    """No optimizer and no schedule from the user: the Trainer makes both, the schedule around its own optimizer."""
    from transformers import Trainer, TrainingArguments

    from hdet.integrations.transformers import HDETTrainerCallback

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=4, report_to=[], disable_tqdm=True, save_strategy="no",
        learning_rate=0.01, per_device_train_batch_size=2, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=task.Model(), args=arguments, train_dataset=task.Samples(32))
    callback = HDETTrainerCallback.attach(trainer, interval=2, adapt=Adapt(_start_steps=0, level=False))
    trainer.train()
    assert callback.scheduler is not None
    lrs = [record.values[0][0] for record in callback.scheduler.history]
    scheduler: Any = callback.scheduler
    return type(scheduler.schedule).__name__, scheduler.total_steps, lrs


SAVE: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": task.SAVED_STEP,
    "eval_strategy": "steps",
    "eval_steps": task.SAVED_STEP,
}


def _all(folder: str) -> dict[str, Any]:
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    return {
        "plain": task.plain_runs("blocks"),
        "1": fit(task.GRADIENT, 1, folder),
        "2": fit(task.GRADIENT, 2, folder),
        "own": fit(task.GRADIENT, 2, folder, case="own"),
        "per_item": fit(task.GRADIENT, 2, folder, case="per_item"),
        "saved": fit(task.APART, 2, folder, **SAVE),
        "resumed": fit(task.APART, 2, folder, case="resume"),
        "best": fit(task.APART, 2, f"{folder}/best", **SAVE, **best),
        "made": _made_by_the_trainer(folder),
    }


results = task.on_two_processes(_all)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "accumulate"), [("1", 1), ("2", 2), ("own", 2), ("per_item", 2)])
def test_one_optimizer_step_is_one_step(results: Results, run: str, accumulate: int) -> None:
    task.check_steps(results, run, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["2", "per_item"])
def test_the_loss_that_is_seen_is_the_mean_over_micro_batches(results: Results, run: str) -> None:
    replicas, _ = results
    for r, replica in enumerate(replicas):
        per_round = 2 * task.GRADIENT["interval"]
        losses = torch.tensor(replica[run]["losses"]).view(-1, per_round).mean(dim=1)
        torch.testing.assert_close(torch.tensor(replica[run]["seen"]).view(-1, 2)[:, r], losses)


@pytest.mark.slow
def test_replicas_apart_are_saved_as_their_mean_and_resume(results: Results) -> None:
    from safetensors.torch import load_file

    replicas, folder = results
    task.check_apart(replicas)
    weights = load_file(folder / f"checkpoint-{task.SAVED_STEP}" / "model.safetensors")
    on_disk = [x for name, _ in task.Model().named_parameters() for x in weights[name].flatten().tolist()]
    torch.testing.assert_close(on_disk, replicas[0]["plain"]["mean"])
    torch.load(folder / f"checkpoint-{task.SAVED_STEP}" / "scheduler.pt", weights_only=True)


@pytest.mark.slow
def test_evaluation_sees_the_mean(results: Results) -> None:
    for replica in results[0]:
        torch.testing.assert_close(replica["saved"]["evaluated"], [replica["plain"]["mean"]])


@pytest.mark.slow
def test_the_best_checkpoint_is_what_training_ends_with(results: Results) -> None:
    from safetensors.torch import load_file

    for replica in results[0]:
        weights = load_file(Path(replica["best"]["best"]) / "model.safetensors")
        assert replica["best"]["weights"] == [
            x for name, _ in task.Model().named_parameters() for x in weights[name].flatten().tolist()
        ]


@pytest.mark.slow
def test_scale_and_z_are_logged(results: Results) -> None:
    log = [entry for entry in results[0][0]["saved"]["log"] if "learning_rate" in entry]
    assert all("hdet/scale" in entry for entry in log)
    assert ["hdet/z" in entry for entry in log] == [True, True, True, False]  # the scale holds still in the last round
    json.dumps(log)


@pytest.mark.slow
def test_the_trainers_own_schedule_is_wrapped(results: Results) -> None:
    for replica in results[0]:
        name, total_steps, lrs = replica["made"]
        assert (name, total_steps, len(lrs)) == ("LambdaLR", 4, 2)


@pytest.mark.slow
def test_local_gradients_are_refused() -> None:
    from hdet.integrations.transformers import HDETTrainerCallback

    with pytest.raises(ValueError, match="gradients must be \"shared\" under the Trainer, but got gradients='local'"):
        HDETTrainerCallback(ensemble=Ensemble(gradients="local"))


def test_another_trainer_is_refused() -> None:
    from hdet.integrations.transformers import HDETTrainerCallback

    with pytest.raises(TypeError, match=r"trainer must be a transformers.Trainer .* but object has no"):
        HDETTrainerCallback.attach(object())


@pytest.mark.parametrize("across", [True, False])
def test_a_rank_with_fewer_labels_does_not_look_better(across: bool) -> None:
    from types import SimpleNamespace

    from hdet.integrations.transformers import HDETTrainerCallback

    labels = torch.tensor([[1, 2, -100, -100], [3, 4, 5, -100]])  # 5 labels of 20 in the step
    num_items, ranks = 20, 2 if across else 1
    returned = torch.tensor(2.0 * 5 * ranks / num_items)  # a mean of 2.0 over its own labels, as the Trainer scales it
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=2, average_tokens_across_devices=across),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        training_step=lambda model, inputs, num_items_in_batch: returned,
    )
    seen: list[tuple[float, float]] = []
    callback = HDETTrainerCallback()
    callback.scheduler = SimpleNamespace(observe=lambda loss, weight: seen.append((float(loss), float(weight))))  # type: ignore[assignment]
    callback._wrap_loss(trainer)
    assert trainer.training_step(None, {"labels": labels}, torch.tensor(num_items)) is returned
    torch.testing.assert_close(seen, [(2.0, 5.0)])
