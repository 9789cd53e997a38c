"""Lightning on two processes does what a plain loop does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import framework_task as task
from framework_task import Results
from hdet import Adapt, AutoLR, Explorer, knobs
from hdet.launch import launch

try:
    import lightning.pytorch as pl
except ImportError:  # its other name
    pl = pytest.importorskip("pytorch_lightning", reason="pip install 'hdet[lightning]'")


def _shard() -> dict[str, Any]:
    """Parameters in shards (FSDP2): no replicas, so the gradient signal alone."""
    from torch.distributed.fsdp import fully_shard

    from hdet.integrations.lightning import HDETCallback

    module = _module(None)
    module.configure_model = lambda: fully_shard(module.inner.layers, mesh=module.device_mesh["data_parallel"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=task.STEPS,
        callbacks=[HDETCallback(**task.GRADIENT)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = task.Samples(task.num_samples(1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=task.BATCH, sampler=Later(data, shuffle=False)))
    weights = [x for p in module.inner.parameters() for x in p.detach().full_tensor().flatten().tolist()]
    return {"lrs": module.lrs, "losses": module.inner.losses, "weights": weights}


def _explore() -> dict[str, Any]:
    """An Explorer beside the module's own schedule."""
    from hdet.integrations.lightning import HDETCallback

    seen: list[Any] = []
    callback = HDETCallback(
        lambda schedule: Explorer(
            trainer.strategy.model, schedule.optimizer, knobs=[knobs.WeightDecay(adapt=False)], interval=4
        ),
        sinks=[lambda record, names: seen.append(record)],
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        max_steps=task.STEPS, callbacks=[callback], logger=False, **quiet,
    )  # fmt: skip
    module = _module(None)
    trainer.fit(module, torch.utils.data.DataLoader(task.Samples(task.num_samples(1)), batch_size=task.BATCH))
    return {
        "lrs": module.lrs,
        "weights": module.inner.flat(),
        "rounds": [record.step for record in seen],
        "decays": {value for record in seen for value in record.knobs["weight_decay"].values},
    }


class Later(torch.utils.data.DistributedSampler[Any]):
    """Lightning's own sampler shuffles, and starts over after a resume in the middle of an epoch."""

    first = 0

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[self.first :])


def _module(given: dict[str, Any] | None) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.Model()
            self.lrs: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            return self.inner(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.inner(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = task.make_optimizer(self.inner)
            self.lrs = task.watch(optimizer)
            schedule = task.make_schedule(optimizer)
            if given is not None:  # the other way: through the scheduler dict
                schedule = AutoLR(schedule, model=self, total_steps=task.STEPS, **given)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def fit(
    settings: dict[str, Any],
    accumulate: int,
    folder: str = "",
    *,
    resume: bool = False,
    by_dict: bool = False,
    device: str = "cpu",
    half: bool = False,
) -> dict[str, Any]:
    from hdet.integrations.lightning import HDETCallback

    callback = HDETCallback() if by_dict else HDETCallback(**settings)
    checkpoint = pl.callbacks.ModelCheckpoint(folder, monitor="val", save_top_k=-1, filename="at-{step}")
    validate = {"val_check_interval": task.SAVED_STEP * accumulate} if folder else {"limit_val_batches": 0}
    where: dict[str, Any] = (
        {"accelerator": "cpu", "devices": 2}
        if device == "cpu"
        else {"accelerator": "gpu", "devices": 1, "num_nodes": 2}
    )
    trainer = pl.Trainer(
        **where,
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        precision="16-mixed" if half else "32-true",
        max_steps=task.STEPS,
        accumulate_grad_batches=accumulate,
        callbacks=[checkpoint, callback] if folder else [callback],
        logger=pl.loggers.CSVLogger(folder, name="log", version=int(resume)) if folder else False,
        log_every_n_steps=1,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **validate,
    )
    module = _module(settings if by_dict else None)
    data = task.Samples(task.num_samples(accumulate))
    sampler = Later(data, shuffle=False)
    sampler.first = task.SAVED_STEP * accumulate * task.BATCH if resume else 0
    loader = torch.utils.data.DataLoader(data, batch_size=task.BATCH, sampler=sampler)
    held_out = torch.utils.data.DataLoader(task.Samples(8), batch_size=4)
    path = f"{folder}/at-step={task.SAVED_STEP}.ckpt" if resume else None
    trainer.fit(module, loader, held_out, ckpt_path=path, weights_only=True if resume else None)
    assert callback.scheduler is not None
    return {
        "lrs": module.lrs,
        "losses": module.inner.losses,
        "weights": module.inner.flat(),
        "evaluated": module.inner.evaluated[:1],
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "rounds": len(callback.scheduler.history),
    }


def _all(folder: str) -> dict[str, Any]:
    return {
        "plain": task.plain_runs("interleaved"),
        "1": fit(task.GRADIENT, 1),
        "2": fit(task.GRADIENT, 2),
        "by_dict": fit(task.GRADIENT, 2, by_dict=True),
        "sharded": _shard(),
        "explorer": _explore(),
        "saved": fit(task.APART, 2, folder),
        "resumed": fit(task.APART, 2, folder, resume=True),
    }


results = task.on_two_processes(_all)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "accumulate"), [("1", 1), ("2", 2), ("by_dict", 2)])
def test_one_optimizer_step_is_one_step(results: Results, run: str, accumulate: int) -> None:
    task.check_steps(results, run, accumulate)


@pytest.mark.slow
def test_sharded_parameters_with_the_gradient_signal(results: Results) -> None:
    for replica in results[0]:
        task.check_same(replica["sharded"], replica["plain"]["gradient-1"])


@pytest.mark.slow
def test_an_explorer_runs_beside_the_modules_schedule(results: Results) -> None:
    optimizer = task.make_optimizer(task.Model())
    schedule = task.make_schedule(optimizer)
    lrs = []
    for _ in range(task.STEPS):
        lrs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    first, second = (replica["explorer"] for replica in results[0])
    assert first["lrs"] == second["lrs"] == lrs
    assert first["rounds"] == [4, 8, 12, 16]
    assert len(first["decays"]) > 1
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_replicas_apart_are_saved_as_their_mean_and_resume(results: Results) -> None:
    replicas, folder = results
    task.check_apart(replicas)
    checkpoint = torch.load(folder / f"at-step={task.SAVED_STEP}.ckpt", weights_only=True)
    on_disk = [x for p in checkpoint["state_dict"].values() for x in p.flatten().tolist()]
    torch.testing.assert_close(on_disk, replicas[0]["plain"]["mean"])


@pytest.mark.slow
def test_validation_sees_the_mean(results: Results) -> None:
    for replica in results[0]:
        torch.testing.assert_close(replica["saved"]["evaluated"], [replica["plain"]["mean"]])


@pytest.mark.slow
def test_values_are_logged(results: Results) -> None:
    replicas, folder = results
    for replica in replicas:
        assert {"hdet/lr", "hdet/scale", "hdet/z"} <= set(replica["saved"]["metrics"])
    header = (folder / "log" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"hdet/lr", "hdet/scale", "hdet/z"} <= set(header.split(","))


def _trainer(**settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", devices=1, max_steps=4, logger=False, **quiet, **settings)


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_by_epochs_is_refused() -> None:
    from hdet.integrations.lightning import HDETCallback

    module = _module(None)
    optimizer = task.make_optimizer(module.inner)
    module.configure_optimizers = lambda: ([optimizer], [task.make_schedule(optimizer)])
    loader = torch.utils.data.DataLoader(task.Samples(8), batch_size=4)
    with pytest.raises(ValueError, match=r'stepped with every optimizer step, but got {"interval": "epoch"'):
        _trainer(callbacks=[HDETCallback()]).fit(module, loader)


@pytest.mark.filterwarnings("ignore")
def test_without_a_schedule_the_learning_rate_decays_to_zero() -> None:
    from hdet.integrations.lightning import HDETCallback

    module = _module(None)
    module.configure_optimizers = lambda: task.make_optimizer(module.inner)
    callback = HDETCallback(interval=2, adapt=Adapt(level=False))
    trainer = _trainer(callbacks=[callback])
    trainer.fit(module, torch.utils.data.DataLoader(task.Samples(16), batch_size=4))
    assert callback.scheduler is not None
    assert callback.scheduler.last_epoch == 4
    assert callback.scheduler._schedule.total_steps == 4
    assert callback.scheduler.optimizer.param_groups[0]["lr"] == 0
    assert "save_checkpoint" not in vars(trainer)


# -- other callbacks -----------------------------------------------------------------------------------------------


class Unfreeze(pl.callbacks.BaseFinetuning):
    """The first layer joins in the second epoch, at a tenth of the learning rate."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.freeze(pl_module.inner.layers[0])  # not before DistributedDataParallel has seen it

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.inner.layers[0], optimizer)
        elif epoch > 1:
            self.make_trainable(pl_module.inner.layers[0])  # after a resume


def _finetune(order: str, folder: str = "", *, resume: bool = False, **trainer: Any) -> dict[str, Any]:
    from hdet.integrations.lightning import HDETCallback

    module = _module(None)
    lrs: list[list[float]] = []

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.inner.layers[2].parameters(), lr=0.05)
        optimizer.register_step_post_hook(lambda o, *_: lrs.append([float(group["lr"]) for group in o.param_groups]))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    callback = HDETCallback(interval=3, adapt=Adapt(level=False))
    callbacks: list[Any] = [Unfreeze(), callback] if order == "after" else [callback, Unfreeze()]
    if folder:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename=order + "-{epoch}"))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": bool(folder)}
    where = {"accelerator": "cpu", "devices": 1, **trainer}
    fit = pl.Trainer(**where, max_epochs=3, logger=False, callbacks=callbacks, **quiet)
    data = torch.utils.data.DataLoader(task.Samples(20), batch_size=4, shuffle=False)
    fit.fit(module, data, ckpt_path=f"{folder}/{order}-epoch=1.ckpt" if resume else None)
    assert callback.scheduler is not None
    return {"lrs": lrs, "weights": module.inner.flat(), "values": len(callback.scheduler.history[-1].base_values)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after"])
def test_layers_that_basefinetuning_unfreezes_are_trained_and_resume(order: str, tmp_path: Path) -> None:
    whole = _finetune(order, str(tmp_path))
    assert [len(lrs) for lrs in whole["lrs"]] == [1] * 5 + [2] * 10
    assert [lrs[1] / lrs[0] for lrs in whole["lrs"][5:]] == pytest.approx([0.1] * 10)
    assert whole["values"] == 2
    resumed = _finetune(order, str(tmp_path), resume=True)
    assert resumed["lrs"] == whole["lrs"][10:]
    assert resumed["weights"] == whole["weights"]


def _finetune_on_two() -> dict[str, Any]:
    task.pretend_torchrun()
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    return _finetune("after", devices=2, strategy=strategy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_basefinetuning_on_two_processes() -> None:
    one, two = launch(_finetune_on_two, 2, timeout_s=150)
    assert one["lrs"] == two["lrs"]
    assert [len(lrs) for lrs in one["lrs"]][-1] == 2
    assert one["weights"] == two["weights"]


def _average(settings: dict[str, Any]) -> dict[str, Any]:
    from hdet.integrations.lightning import HDETCallback

    callback = HDETCallback(**settings)
    swa = pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"), max_epochs=4,
        logger=False, callbacks=[callback, swa], **quiet,
    )  # fmt: skip
    module = _module(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(task.Samples(40), batch_size=4, shuffle=False))
    assert callback.scheduler is not None
    return {
        "said": [str(w.message) for w in caught if "HDETCallback" in str(w.message)],
        "rounds": len(callback.scheduler.history),
        "weights": module.inner.flat(),
    }


def _average_both() -> dict[str, Any]:
    task.pretend_torchrun()
    return {"gradient": _average(task.GRADIENT), "apart": _average(task.APART)}


@pytest.mark.slow
def test_stochasticweightaveraging_takes_over_with_a_warning() -> None:
    for replica in launch(_average_both, 2, timeout_s=150):
        for name, found in replica.items():
            assert len(found["said"]) == 1, name
            assert "ends at step 5: the Trainer's schedule is ['SWALR'] now, no longer AutoLR" in found["said"][0]
            assert found["rounds"] > 0
