"""Scripted faults: what a training script does when one of its replicas is broken, late, or gone.

Run the script's function on a few processes with :func:`hdet.launch.launch`, which has a deadline, let an
:class:`Injector` strike at a replica and a step, and compare what is left. A whole test file:

```python
import torch
import torch.distributed as dist
from torch import nn

from hdet import Explorer
from hdet.testing import Fault, Injector, assert_same_weights, collect_weights, launch


def train(faults):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Explorer(model, optimizer, interval=4, gradients="local")
    inject = Injector(faults, replica=dist.get_rank())
    for step in range(1, 13):
        optimizer.zero_grad()
        loss = inject.loss(step, model(torch.randn(8, 3)).square().mean())
        loss.backward()
        inject.gradients(step, model)
        optimizer.step()
        inject.weights(step, model)
        if not inject.skips(step):
            scheduler.step(loss)
    scheduler.finish()
    return collect_weights(model), [record.unhealthy for record in scheduler.history]


def test_a_broken_replica_is_repaired():
    faults = [Fault("nan_weights", replica=1, step=6)]
    weights, unhealthy = zip(*launch(train, 2, faults, timeout_s=60))
    assert_same_weights(weights)
    assert unhealthy[0] == [(), (1,), ()]
```

Processes that torchrun has restarted know it by ``TORCHELASTIC_RESTART_COUNT``: pass them no faults, or they die again.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Kind = Literal[
    "nan_weights", "inf_weights", "nan_loss", "nan_gradient", "explode", "skip_step", "error", "kill", "slow"
]


class InjectedError(RuntimeError):
    """What ``Fault("error", ...)`` raises."""


@dataclass(frozen=True)
class Fault:
    """What happens, to which replica, in which step; plain, and it pickles.

    Attributes:
        kind: ``"nan_weights"``, ``"inf_weights"``, ``"nan_gradient"``: the first element of every trained tensor;
            ``"nan_loss"``; ``"explode"``: the weights are multiplied by ``amount``; ``"skip_step"``; ``"error"``: an
            :class:`InjectedError`; ``"kill"``: SIGKILL to the own process; ``"slow"``: a pause of ``amount`` seconds.
        replica: index of the replica.
        step: number of the step, the first is 1.
        until: every step from ``step`` to this one; default ``step`` alone. ``math.inf`` is for good.
        amount: of ``"explode"`` (default 1000) and ``"slow"`` (default 1).
    """

    kind: Kind
    replica: int
    step: int
    until: float | None = None
    amount: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, but got kind={self.kind!r}")
        if self.replica < 0:
            raise ValueError(f"replica must be an index >= 0, but got replica={self.replica!r}")
        if self.step < 1:
            raise ValueError(f"step must be >= 1, the first step, but got step={self.step!r}")
        if self.until is not None and self.until < self.step:
            raise ValueError(f"until must be at least step={self.step}, but got until={self.until!r}")

    def strikes(self, step: int) -> bool:
        """Whether it happens in ``step``."""
        return self.step <= step <= (self.step if self.until is None else self.until)


class Injector:
    """Strikes one replica with its faults. Call the hooks in the loop, each with the number of the step.

    Errors, kills and pauses come by themselves, with the first hook that is called in their step.

    Args:
        faults: of all replicas.
        replica: which one this is.
    """

    def __init__(self, faults: Iterable[Fault], replica: int) -> None:
        self.replica = replica
        self.faults = [fault for fault in faults if fault.replica == replica]
        self._step = 0

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """The loss, or NaN. Before ``backward()`` the gradients become NaN with it, after it only what is told."""
        return loss * math.nan if self._now(step, "nan_loss") else loss

    @torch.no_grad()
    def gradients(self, step: int, model: nn.Module) -> None:
        """To be called between ``backward()`` and the optimizer's step."""
        if self._now(step, "nan_gradient"):
            for p in model.parameters():
                if p.grad is not None and p.grad.numel():
                    p.grad[(0,) * p.dim()] = math.nan

    @torch.no_grad()
    def weights(self, step: int, model: nn.Module) -> None:
        """To be called between the optimizer's step and the scheduler's."""
        trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
        for kind, value in (("nan_weights", math.nan), ("inf_weights", math.inf)):
            if self._now(step, kind):
                for p in trained:
                    p[(0,) * p.dim()] = value
        for fault in self._now(step, "explode"):
            for p in trained:
                p.mul_(1000.0 if fault.amount is None else fault.amount)

    def skips(self, step: int) -> bool:
        """Whether this replica leaves out the step of its scheduler, or whatever the loop makes depend on it."""
        return bool(self._now(step, "skip_step"))

    def _now(self, step: int, kind: str) -> list[Fault]:
        struck = [fault for fault in self.faults if fault.strikes(step)]
        if step != self._step:
            self._step = step
            for fault in struck:
                self._strike(fault)
        return [fault for fault in struck if fault.kind == kind]

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "slow":
            time.sleep(1.0 if fault.amount is None else fault.amount)
        elif fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "error":
            raise InjectedError(f"injected into replica {self.replica} in step {self._step}")


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters and buffers on the host, by name, to be returned to another process."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: t.detach().to("cpu", copy=True) for name, t in module.state_dict().items() if isinstance(t, Tensor)}


def assert_same_weights(weights: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise AssertionError unless all replicas hold the same bits; it names the first tensor that differs.

    Args:
        weights: of each replica, as :func:`collect_weights` returns them.
    """
    for replica, own in enumerate(weights):
        if set(own) != set(weights[0]):
            names = sorted(set(own) ^ set(weights[0]))
            raise AssertionError(f"replicas 0 and {replica} must hold the same tensors, but only one has {names}")
    for name in weights[0] if weights else ():
        first = weights[0][name]
        for replica, own in enumerate(weights):
            if own[name].shape != first.shape or own[name].dtype != first.dtype:
                found = [f"{tuple(t.shape)} {t.dtype}" for t in (first, own[name])]
                raise AssertionError(f"{name} must be alike on replicas 0 and {replica}, but got {' and '.join(found)}")
            if not torch.equal(_bits(own[name]), _bits(first)):
                apart = (own[name].to(torch.complex128) - first.to(torch.complex128)).abs().max().item()
                raise AssertionError(f"{name} differs between replicas 0 and {replica}, by up to {apart:.3g}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
