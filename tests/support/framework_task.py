"""One tiny task for every framework, and the plain torch loop that each of them has to reproduce step by step."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hdet import Adapt, AutoLR, Ensemble
from hdet.launch import launch

BATCH = 4
STEPS = 16
SAVED_STEP = 6
"""In the middle of a round of 4."""

GRADIENT: dict[str, Any] = {"interval": 2, "adapt": Adapt(_start_steps=0, level=False)}
APART: dict[str, Any] = {
    "ensemble": Ensemble(spread=0.3), "interval": 4, "adapt": Adapt(_start_steps=0, level=False)
}  # fmt: skip

Order = Literal["interleaved", "blocks"]
Results = tuple[list[dict[str, Any]], Path]
"""What each of two processes found, and the folder they wrote to."""


def on_two_processes(run: Callable[[str], dict[str, Any]], timeout_s: float = 100) -> Any:
    """A fixture for the module: ``run(folder)`` on two processes that look as if torchrun had started them."""

    @pytest.fixture(scope="module")
    def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
        folder = tmp_path_factory.mktemp("framework")
        return launch(_run, 2, run, str(folder), timeout_s=timeout_s), folder

    return results


def _run(run: Callable[[str], dict[str, Any]], folder: str) -> dict[str, Any]:
    pretend_torchrun()
    return run(folder)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_samples, 3, generator=generator)
        self.labels = self.x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(num_samples, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Model(nn.Module):
    """Returns its loss, and remembers those of training, and the weights that evaluations saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.evaluated: list[list[float]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = (self.layers(x).squeeze(-1) - labels).square().mean()
        if self.training:
            self.losses.append(loss.item())
        else:
            self.evaluated.append(self.flat())
        return {"loss": loss}

    def flat(self) -> list[float]:
        return [x for p in self.parameters() for x in p.detach().flatten().tolist()]


def num_samples(accumulate: int) -> int:
    return STEPS * accumulate * BATCH * dist.get_world_size()


def make_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def make_schedule(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS + 4)


def watch(optimizer: Optimizer) -> list[float]:
    """The learning rate of each optimizer step, as it is taken."""
    lrs: list[float] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: lrs.append(float(o.param_groups[0]["lr"])))
    return lrs


def plain_loop(
    settings: dict[str, Any],
    accumulate: int,
    order: Order,
    *,
    resume: dict[str, Any] | None = None,
    device: str = "cpu",
    half: bool = False,
    counts_skipped: bool = False,
) -> dict[str, Any]:
    """What a user writes without a framework; saves after ``SAVED_STEP`` steps, or goes on from there.

    Args:
        settings: of AutoLR.
        accumulate: micro-batches of a step.
        order: of the samples, among ranks.
        resume: what to go on from.
        device: where the model is.
        half: fp16 with a GradScaler.
        counts_skipped: whether a step that the GradScaler skips is one for the scheduler.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Samples(num_samples(accumulate))
    inner = Model().to(device)
    model = DistributedDataParallel(inner)
    scaler = torch.amp.GradScaler(device, enabled=half)
    optimizer = make_optimizer(model)
    lrs = watch(optimizer)
    scheduler = AutoLR(make_schedule(optimizer), model=model, total_steps=STEPS, **settings)
    parts = {"model": inner, "optimizer": optimizer, "scheduler": scheduler}
    for name, part in parts.items() if resume is not None else ():
        part.load_state_dict(resume[name])  # type: ignore[attr-defined,index]
    saved: dict[str, Any] = {}
    for step in range(0 if resume is None else SAVED_STEP, STEPS):
        for micro in range(accumulate):
            index = step * accumulate + micro
            if order == "blocks":
                where = torch.arange(BATCH) + (index * world + rank) * BATCH
            else:
                where = (torch.arange(BATCH) + index * BATCH) * world + rank
            with nullcontext() if micro == accumulate - 1 else model.no_sync():
                with torch.autocast(device, torch.float16, enabled=half):
                    loss = model(data.x[where].to(device), data.labels[where].to(device))["loss"]
                scaler.scale(loss / accumulate).backward()
            scheduler.observe(loss)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if counts_skipped or scaler.get_scale() >= scale:
            scheduler.step()
        optimizer.zero_grad()
        if step + 1 == SAVED_STEP:
            with scheduler.converged():
                saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})  # type: ignore[attr-defined]
                saved["flat"] = inner.flat()
    return {"lrs": lrs, "losses": inner.losses, "weights": inner.flat(), "saved": saved}


def plain_runs(order: Order, device: str = "cpu") -> dict[str, Any]:
    """All that the frameworks are compared with."""
    apart = plain_loop(APART, 2, order, device=device)
    saved = apart.pop("saved")
    resumed = plain_loop(APART, 2, order, resume=saved, device=device)
    gradient = {f"gradient-{a}": plain_loop(GRADIENT, a, order, device=device) for a in (1, 2)}
    runs = {"apart": apart, "resumed": resumed, **gradient}
    for run in runs.values():
        run.pop("saved", None)
    return {**runs, "mean": saved["flat"]}


def pretend_torchrun(device: str = "cpu") -> None:
    """Frameworks learn from these variables that processes are there already; the process group exists, too.

    On a GPU each process is said to be alone on its node, so that all of them take the first GPU.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    local, local_world, node = (rank, world, "0") if device == "cpu" else ("0", "1", rank)
    os.environ.update(RANK=rank, LOCAL_RANK=local, WORLD_SIZE=world, LOCAL_WORLD_SIZE=local_world)
    os.environ.update(GROUP_RANK=node, NODE_RANK=node)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")  # theirs; ours are tested elsewhere


def check_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The same learning rates, losses and weights, step by step."""
    for key in ("lrs", "losses", "weights"):
        assert len(found[key]) == len(plain[key]), key
        torch.testing.assert_close(found[key], plain[key], rtol=1e-5, atol=1e-7)


def check_steps(results: Results, run: str, accumulate: int) -> None:
    """One optimizer step was one step of HDET, and each did what the plain loop's did."""
    for replica in results[0]:
        assert len(replica[run]["lrs"]) == STEPS
        assert replica[run]["rounds"] == STEPS // GRADIENT["interval"]
        check_same(replica[run], replica["plain"][f"gradient-{accumulate}"])


def check_apart(replicas: list[dict[str, Any]], *, plain: str = "plain") -> None:
    """Replicas apart: like the plain loop, through a checkpoint in mid-round, and on after it."""
    for replica in replicas:
        check_same(replica["saved"], replica[plain]["apart"])
        check_same(replica["resumed"], replica[plain]["resumed"])
        # The mean and the anchor are saved, not each replica's own place: close, not equal.
        torch.testing.assert_close(replica["resumed"]["lrs"], replica["saved"]["lrs"][SAVED_STEP:], rtol=1e-2, atol=0.0)
    assert replicas[0]["saved"]["lrs"] != replicas[1]["saved"]["lrs"]
    assert replicas[0]["saved"]["weights"] == replicas[1]["saved"]["weights"]
