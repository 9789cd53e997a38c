"""Which optimizers of this process have a scheduler of ours: one has one, and several may train parts of one model."""

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


def trained_beside(optimizer: Optimizer, model: nn.Module | None) -> list[Tensor]:
    """What optimizers of another kind train, under schedulers of ours, of the models that this one trains a part of.

    Those of one kind may well train models of their own, as in a GAN. Muon counts for others, and for itself has no
    others: the size of the model is not what its learning rate goes by.
    """
    if is_muon(optimizer):
        return []
    groups = [group for other in list(_schedulers) if _is_other(other, optimizer) for group in other.param_groups]
    found = {identity_of(p): p for group in groups for p in group["params"] if p.requires_grad}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if found:
        models = models_of(own) if model is None else [model]
        in_models = {identity_of(p) for each in models for p in each.parameters()} - {identity_of(p) for p in own}
        found = {key: p for key, p in found.items() if key in in_models}
    return list(found.values())


def is_muon(optimizer: Optimizer) -> bool:
    """Whether updates of matrices have one spectral norm: known by the name, since sizes of updates do not tell."""
    return "muon" in type(optimizer).__name__.lower()


def _is_other(other: Optimizer, optimizer: Optimizer) -> bool:
    alike = isinstance(other, type(optimizer)) or isinstance(optimizer, type(other))
    return not alike and _working_on(other) is not None


def _working_on(optimizer: Optimizer) -> Any:
    other: Any = _schedulers.get(optimizer, lambda: None)()
    if other is None or other._run.finished or other.last_epoch == other.total_steps:
        return None
    return other
