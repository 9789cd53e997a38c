"""Lightning on two processes does what a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import framework_task as task
from hdet import AutoLR
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


class Later(torch.utils.data.DistributedSampler[Any]):
    """Lightning's own sampler shuffles, and starts anew after a resume in the middle of an epoch."""

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
    task.pretend_torchrun()
    return {
        "plain": task.plain_runs("interleaved"),
        "1": fit(task.GRADIENT, 1),
        "2": fit(task.GRADIENT, 2),
        "by_dict": fit(task.GRADIENT, 2, by_dict=True),
        "sharded": _shard(),
        "saved": fit(task.APART, 2, folder),
        "resumed": fit(task.APART, 2, folder, resume=True),
    }


Results = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("lightning")
    return launch(_all, 2, str(folder), timeout_s=100), folder


@pytest.mark.parametrize(("run", "accumulate"), [("1", 1), ("2", 2), ("by_dict", 2)])
def test_one_optimizer_step_is_one_step(results: Results, run: str, accumulate: int) -> None:
    for replica in results[0]:
        assert len(replica[run]["lrs"]) == task.STEPS
        assert replica[run]["rounds"] == task.STEPS // task.GRADIENT["interval"]
        task.check_same(replica[run], replica["plain"][f"gradient-{accumulate}"])


def test_sharded_parameters_with_the_gradient_signal(results: Results) -> None:
    for replica in results[0]:
        task.check_same(replica["sharded"], replica["plain"]["gradient-1"])


def test_replicas_apart_are_saved_as_their_mean_and_resume(results: Results) -> None:
    replicas, folder = results
    task.check_apart(replicas)
    checkpoint = torch.load(folder / f"at-step={task.SAVED_STEP}.ckpt", weights_only=True)
    on_disk = [x for p in checkpoint["state_dict"].values() for x in p.flatten().tolist()]
    torch.testing.assert_close(on_disk, replicas[0]["plain"]["mean"])


def test_validation_sees_the_mean(results: Results) -> None:
    for replica in results[0]:
        torch.testing.assert_close(replica["saved"]["evaluated"], [replica["plain"]["mean"]])


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
def test_without_a_schedule_the_learning_rate_is_one() -> None:
    from hdet.integrations.lightning import HDETCallback

    module = _module(None)
    module.configure_optimizers = lambda: task.make_optimizer(module.inner)
    callback = HDETCallback(interval=2, first_scale=0.5)
    trainer = _trainer(callbacks=[callback])
    trainer.fit(module, torch.utils.data.DataLoader(task.Samples(16), batch_size=4))
    assert callback.scheduler is not None
    assert callback.scheduler.last_epoch == 4
    assert callback.scheduler.total_steps == 4
    assert "save_checkpoint" not in vars(trainer)
