"""What ``hdet doctor`` looks at: the user's model or a stand-in, and the traps that can be seen in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hdet.replicas.sharding import sharding
from hdet.weights.averaged import trained_parameters
from hdet_lab.targets import load_target


class Subject(NamedTuple):
    """What is looked at: a model, its optimizer, and a training step if there is one."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], object] | None


class StandIn(nn.Module):
    """Parameters, a forward and a backward pass that touch each of them, and nothing else."""

    def __init__(self, num_parameters: int, num_tensors: int, device: str) -> None:
        super().__init__()
        sizes = np.diff(np.linspace(0, num_parameters, num_tensors + 1).astype(int)).tolist()
        self.tensors = nn.ParameterList([nn.Parameter(torch.ones(size, device=device)) for size in sizes])

    def forward(self) -> Tensor:
        return torch.stack([t.square().mean() for t in self.tensors]).mean()


def stand_in(num_parameters: int, num_tensors: int, device: str) -> Subject:
    """Trained by AdamW, its gradients shared where there are several ranks."""
    bare = StandIn(num_parameters, num_tensors, device)
    model = DistributedDataParallel(bare) if dist.is_initialized() and dist.get_world_size() > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return Subject(model, optimizer, step)


def load(target: str) -> Subject:
    """Call ``package.module:function``, which returns a model, or (model, optimizer), or (model, optimizer, step)."""
    made = load_target(target)()
    parts = made if isinstance(made, tuple) else (made,)
    kinds: tuple[Callable[[object], bool], ...] = (
        lambda part: isinstance(part, nn.Module), lambda part: isinstance(part, Optimizer), callable
    )  # fmt: skip
    if not 1 <= len(parts) <= 3 or not all(is_kind(part) for is_kind, part in zip(kinds, parts, strict=False)):
        said = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"it must return a model, (model, optimizer) or (model, optimizer, step), but got {said}")
    optimizer = parts[1] if len(parts) > 1 else torch.optim.AdamW(parts[0].parameters())
    return Subject(parts[0], optimizer, parts[2] if len(parts) > 2 else None)


def is_sharded(subject: Subject) -> bool:
    """Whether ranks hold different parts of the parameters."""
    flat = any(type(m).__name__ == "FullyShardedDataParallel" for m in subject.model.modules())
    return flat or any(sharding(p) for p in trained_parameters(subject.optimizer, subject.model))


def traps(subject: Subject, num_replicas: int) -> list[str]:
    """What tends to go wrong with such a model, as far as it can be seen from here."""
    modules = list(subject.model.modules())
    parameters = trained_parameters(subject.optimizer, subject.model)
    ddp = [m for m in modules if isinstance(m, DistributedDataParallel)]
    num_norms = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules)
    num_buffers = sum(1 for _ in subject.model.buffers())
    found = []
    if num_buffers:
        what = f"{num_norms} BatchNorm layers" if num_norms else f"{num_buffers} buffers"
        found.append(f"the model has {what}: pass model= to the scheduler, or each replica keeps its own statistics")
    if num_buffers and any(m.broadcast_buffers for m in ddp):
        found.append(
            "DistributedDataParallel gives all ranks rank 0's buffers in every forward pass, the statistics of one "
            "replica: construct it with forward_sync_buffers=False (broadcast_buffers=False in older versions)"
        )
    half = {str(p.dtype) for p in parameters if p.dtype in (torch.float16, torch.bfloat16)}
    if half:
        found.append(
            f"parameters are {' and '.join(sorted(half))}: what replicas differ by is easily lost in rounding; keep "
            "float32 weights under autocast, and where an optimizer has master weights, let it be given those"
        )
    if any(isinstance(m, AveragedModel) for m in modules):
        found.append("the model has an AveragedModel: update it inside converged(), or it averages one replica")
    if num_replicas > 1 and not ddp and not is_sharded(subject):
        found.append(
            "the model is not wrapped in DistributedDataParallel, so gradients are not shared here: wrap it as in "
            'training, unless you train with gradients="local"'
        )
    return found


@contextlib.contextmanager
def noticing_grad_scaler() -> Iterator[list[bool]]:
    """A list that is not empty once a GradScaler has taken a step."""
    seen: list[bool] = []
    original = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> float | None:
        seen.append(True)
        return original(self, *args, **kwargs)

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        torch.amp.GradScaler.step = original  # type: ignore[method-assign]
