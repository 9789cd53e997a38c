"""What the tests of native PyTorch stacks share: a small regression, all of it a function of step and place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR, Explorer, OneCycleAutoLR
from hdet.controllers import EvidenceController
from hdet.ensemble.knobs import LearningRate
from hdet.replicas.sharding import local_tensor
from job import Training
from options import grouped, with_ensemble

TOTAL_STEPS, INTERVAL, SPREAD, MAX_LR = 12, 4, 0.3, 0.05

Scheduler = OneCycleAutoLR | AutoLR | Explorer
Face = Callable[..., Scheduler]


def net(num_hidden: int = 4) -> nn.Sequential:
    """The same weights in every process."""
    module = nn.Sequential(nn.Linear(3, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 1)).double()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return module


def replicated(model: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """DDP, whose gradients go by way of one process where there are many.

    The ring of gloo has four messages for each process, one after the other: most of the time of a test on few cores.
    """
    module = DistributedDataParallel(model, process_group=group)
    if dist.get_world_size(group) > 2:
        # A lambda: DDP compares annotations, which are strings here.
        module.register_comm_hook(group or dist.group.WORLD, lambda group, bucket: _mean_by_way_of_one(group, bucket))
    return module


def _mean_by_way_of_one(group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:
    mean: Tensor = bucket.buffer()
    root = dist.get_global_rank(group, 0)
    rows = [torch.empty_like(mean) for _ in range(dist.get_world_size(group))]
    here = dist.get_rank() == root
    dist.gather(mean, rows if here else None, root, group)
    if here:
        mean.copy_(torch.stack(rows).mean(0))
    dist.broadcast(mean, root, group)
    future: Future[Tensor] = Future()
    future.set_result(mean)
    return future


def batch(step: int, index: int = 0, count: int = 1) -> tuple[Tensor, Tensor]:
    """Part ``index`` of ``count`` of a batch of 24 rows."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(24, 3, generator=g, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(24, 1, generator=g, dtype=torch.float64)
    return x[index::count], y[index::count]


def paper(optimizer: Optimizer, model: nn.Module, **options: Any) -> OneCycleAutoLR:
    settings: dict[str, Any] = {
        "ensemble_lr_spread_ratio": SPREAD,
        "model_sync_interval": INTERVAL,
        "enable_auto_lr": True,
        "auto_lr_warmup_steps": 0,
        "loss_scale": 0.1,
        "cycle_momentum": False,
    }
    return OneCycleAutoLR(optimizer, MAX_LR, TOTAL_STEPS, model=model, **with_ensemble(**{**settings, **options}))


def loss_signal(optimizer: Optimizer, model: nn.Module, **options: Any) -> AutoLR:
    return _auto(optimizer, model, signal="loss", spread=SPREAD, **options)


def gradient_signal(optimizer: Optimizer, model: nn.Module, **options: Any) -> AutoLR:
    """With a controller that moves from the first round on: that of a level needs more than there are."""
    return _auto(optimizer, model, **{"controller": EvidenceController(), **options})


def _auto(optimizer: Optimizer, model: nn.Module, **options: Any) -> AutoLR:
    schedule = OneCycleLR(optimizer, MAX_LR, TOTAL_STEPS, cycle_momentum=False)
    settings: dict[str, Any] = {"interval": INTERVAL, "start_steps": 0, "level": False, "hold_share": 0.0}
    return AutoLR(schedule, model=model, **with_ensemble(**{**settings, **options}))


def nesterov(optimizer: Optimizer, model: nn.Module, **options: Any) -> Explorer:
    settings: dict[str, Any] = {"knobs": [LearningRate(spread=SPREAD)], "interval": INTERVAL, "outer": "nesterov"}
    return Explorer(model, optimizer, **grouped(**{**settings, **options}))


FACES: dict[str, Face] = {"paper": paper, "loss": loss_signal, "gradient": gradient_signal, "nesterov": nesterov}


class Run(Training):
    """A model in training.

    Args:
        model: as it is called, wrapped or sharded.
        face: makes the scheduler.
        place: which part of the batch this process has, of how many.
        make: the optimizer's class.
        forward: what is called instead of the model.
        options: of the scheduler.
    """

    scheduler: Scheduler

    def __init__(
        self,
        model: nn.Module,
        face: Face,
        place: tuple[int, int],
        *,
        make: Any = torch.optim.Adam,
        forward: Any = None,
        **options: Any,
    ) -> None:
        # The order of dimensions in DDP's buckets of a model of two tensor-parallel layers.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self.model = model
        self.place = place
        self.optimizer: Optimizer = make(model.parameters(), lr=MAX_LR)
        self.scheduler = face(self.optimizer, model, **options)
        self.forward = model if forward is None else forward

    def loss(self, step: int | None = None) -> Tensor:
        x, y = batch(self.scheduler.last_epoch + 1 if step is None else step, *self.place)
        return nn.functional.mse_loss(self.forward(x), y)

    def step(self, accident: Callable[[], None] | None = None) -> None:
        """One step, with something that happens between the optimizer's and the scheduler's."""
        self.optimizer.zero_grad()
        loss = self.loss()
        torch.autograd.backward(loss)
        self.optimizer.step()
        if accident is not None:
            accident()
        self.scheduler.step(loss)

    def advance(self, until: int) -> list[Any]:
        lrs, parts = [], []
        while self.scheduler.last_epoch < until:
            self.step()
            lrs.append(self.lrs())
            parts.append(held(self.model))
        return list(zip(lrs, gathered(self.model, parts), strict=True))

    def told(self) -> list[Any]:
        """What the controller saw and did, round by round."""
        return [
            (record.step, record.losses, record.scales, record.control.get("slope", ()))
            for record in self.scheduler.history
        ]

    def converged(self) -> AbstractContextManager[None]:
        return self.scheduler.converged() if self.scheduler.last_epoch else nullcontext()


def held(model: nn.Module) -> list[Tensor]:
    """What this process has of the weights, as they are now."""
    return [local_tensor(p).detach().clone() for p in model.parameters()]


def gathered(model: nn.Module, steps: list[list[Tensor]]) -> list[list[float]]:
    """All weights after each of several steps, from what was held: one collective for each parameter."""
    if not steps:
        return []
    rows = [torch.empty(0, len(steps))]  # there are models that show no parameters
    for p, parts in zip(model.parameters(), zip(*steps, strict=True), strict=True):
        whole = torch.stack(parts, dim=-1)
        if isinstance(p, DTensor):
            shape = torch.Size([*p.shape, len(steps)])
            stride = torch.empty(shape, device="meta").stride()
            whole = DTensor.from_local(whole, p.device_mesh, p.placements, shape=shape, stride=stride).full_tensor()
        rows.append(whole.flatten(0, -2))
    every: list[list[float]] = torch.cat(rows).T.tolist()
    return every
