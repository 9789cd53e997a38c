"""Ray Train: the plain loop inside its workers does what it does elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import framework_task as task
from hdet import AutoLR, OneCycleAutoLR
from hdet.launch import launch

pytest.importorskip("ray.train.torch", reason="pip install 'hdet[ray]'")


pytestmark = pytest.mark.timeout(300)  # it takes its time to start


def _paper(optimizer: Optimizer, model: nn.Module) -> OneCycleAutoLR:
    return OneCycleAutoLR(
        optimizer,
        max_lr=0.05,
        total_steps=task.STEPS,
        ensemble_lr_spread_ratio=0.2,
        model_sync_interval=4,
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
        cycle_momentum=False,
        model=model,
    )


def _auto(settings: dict[str, Any]) -> Callable[[Optimizer, nn.Module], AutoLR]:
    return lambda optimizer, model: AutoLR(
        task.make_schedule(optimizer), model=model, total_steps=task.STEPS, **settings
    )


def _train(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, dict[str, Any]]:
    """Learning rates, losses and weights under each scheduler."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, face in (("gradient", _auto(task.GRADIENT)), ("loss", _auto(task.APART)), ("paper", _paper)):
        inner = task.Model()
        model = wrap(inner)
        optimizer = task.make_optimizer(model)
        scheduler = face(optimizer, model)
        lrs = task.watch(optimizer)
        data = task.Samples(task.num_samples(1))
        for step in range(task.STEPS):
            where = torch.arange(task.BATCH) + (step * world + rank) * task.BATCH
            loss = model(data.x[where], data.labels[where])["loss"]
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        found[name] = {"lrs": lrs, "losses": inner.losses, "weights": inner.flat()}
    return found


def _worker(config: dict[str, str]) -> None:
    import ray.train.torch

    found = _train(ray.train.torch.prepare_model)
    Path(config["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(found))


def _plain() -> dict[str, dict[str, Any]]:
    return _train(DistributedDataParallel)


@pytest.mark.filterwarnings("ignore")
def test_workers_train_as_in_the_plain_loop(tmp_path: Path) -> None:
    import ray
    import ray.train
    import ray.train.torch

    expected = launch(_plain, 2, timeout_s=150)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": variables},
    )
    try:
        trainer = ray.train.torch.TorchTrainer(
            _worker,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path / "storage")),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    for rank, plain in enumerate(expected):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("gradient", "loss", "paper"):
            task.check_same(found[name], plain[name])
    assert expected[0]["loss"]["lrs"] != expected[1]["loss"]["lrs"]
    assert expected[0]["loss"]["weights"] == expected[1]["loss"]["weights"]
