"""Which optimizers of this process have a scheduler of ours: each has one, and two may train parts of one model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.weights.averaged import identity_of, models_of

_schedulers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register(optimizer: Optimizer, scheduler: weakref.ref[Any]) -> None:
    """This optimizer has this scheduler from now on."""
    _schedulers[optimizer] = scheduler


def refuse_second(optimizer: Optimizer) -> None:
    """Raise where this optimizer has a scheduler of ours already: both would converge, and write learning rates."""
    if _working_on(optimizer) is not None:
        gc.collect()  # it may be garbage already
    if (other := _working_on(optimizer)) is not None:
        name = type(other).__name__
        raise ValueError(
            f"optimizer must have one scheduler of hdet, but it has {name} already, at step {other.last_epoch}; pass "
            f"knobs= to that one to explore more, call its finish() to end it, or drop it first (`del`) to replace it"
        )


def trained_by_muon(optimizer: Optimizer, model: nn.Module | None) -> list[Tensor]:
    """What Muon trains, under a scheduler of ours, of the models that this optimizer trains the rest of."""
    if is_muon(optimizer):
        return []
    muons = [other for other in list(_schedulers) if is_muon(other) and _working_on(other) is not None]
    groups = [group for muon in muons for group in muon.param_groups]
    found = {identity_of(p): p for group in groups for p in group["params"] if p.requires_grad}
    if not found:
        return []
    models = [model] if model is not None else models_of(p for group in optimizer.param_groups for p in group["params"])
    in_models = {identity_of(p) for each in models for p in each.parameters()}
    return [p for key, p in found.items() if key in in_models]


def is_muon(optimizer: Optimizer) -> bool:
    """Whether updates of matrices have one spectral norm: known by the name, since sizes of updates do not tell."""
    return "muon" in type(optimizer).__name__.lower()


def _working_on(optimizer: Optimizer) -> Any:
    other: Any = _schedulers.get(optimizer, lambda: None)()
    if other is None or other._run.finished or other.last_epoch == other.total_steps:
        return None
    return other
