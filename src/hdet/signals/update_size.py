"""The size of an update beside that of the weights: what the first learning rate follows from (Eq. 16)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray
from hdet.policy.level import Sizes
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import local_tensor, num_shards
from hdet.signals.base import Reading, Signal
from hdet.weights.columns import Columns, columns_of


class UpdateSize(Signal):
    """Measures the optimizer step that ends a round: norms of weights, update and gradient over all that has one.

    A copy of the weights lives for the length of that step; of a large model it is of a share of the entries.

    Args:
        num_ranks: ranks whose sums :meth:`share` adds up.
        stride: measure one entry in so many.
    """

    name = "update_size"
    compares = False
    only_at_end = True  # another thread may save a state while the optimizer is in the middle of its step

    def __init__(self, *, num_ranks: int, stride: int = 1) -> None:
        self.num_ranks = num_ranks
        self.stride = stride
        self._before: list[tuple[Tensor, Columns | None, Tensor]] = []
        self._gradients: Tensor | None = None
        self._wants_gradient = True
        self._found: Sizes | None = None

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        self._before, self._gradients = [], None
        if not self.ends_round:
            return
        gradients = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or not (p.is_floating_point() or p.is_complex()):
                    continue
                columns = columns_of(p, self.stride)
                self._before.append((p, columns, _kept(p, columns).clone()))
                gradient = local_tensor(p.grad)
                gradients.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
        if self._wants_gradient and gradients:
            self._gradients = _squares(gradients)

    def _measured(self, device: torch.device) -> Tensor:
        """Sums of this rank, after the step; NaN where it was not told of one."""
        taken, gradients = self._before, self._gradients
        self._before, self._gradients = [], None
        if not taken:
            return torch.full((4,), math.nan, dtype=torch.float64, device=device)
        before = [copy for _, _, copy in taken]
        moved = torch._foreach_sub([_kept(p, columns) for p, columns, _ in taken], before)
        weights = [(self._weight(p, columns), self._weight(p, None), copy.numel()) for p, columns, copy in taken]
        # One copy to the device for all numbers that the host knows.
        kept, whole, sizes = torch.tensor(weights, dtype=torch.float64).T.to(device)
        rows = [_squares(before).to(device) * kept, _squares(moved).to(device) * kept]
        rows.append(torch.zeros_like(whole) if gradients is None else gradients.to(device) * whole)
        return torch.stack([*rows, kept * sizes]).sum(1)

    def _weight(self, parameter: Tensor, columns: Columns | None) -> float:
        """What a sum of squares over this rank's part counts in that over all ranks."""
        share = num_shards(parameter) / self.num_ranks
        return share if columns is None else share * columns.weight

    @torch.no_grad()
    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        """Add up what ranks have measured; a collective, and it waits for the device."""
        found = replicas.sum_(self._measured(replicas.device)).cpu().tolist()
        if not math.isnan(found[0]):
            weights, update, gradient, num = found
            self._found = Sizes(math.sqrt(weights), _root(update), _root(gradient), num)
            # What it is for: to guess the size of an update, until one was more than rounding.
            self._wants_gradient = not self._found.is_measurable

    def drain(self) -> Reading:
        found = Reading(sizes=self._found)
        self.forget()
        return found

    def forget(self) -> None:
        self._found = None


def _kept(parameter: Tensor, columns: Columns | None) -> Tensor:
    local = local_tensor(parameter.detach())
    return local if columns is None else columns.of(local)


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each, without a kernel for each where they are alike."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    norms = torch._foreach_norm([t if t.dtype in (torch.float32, torch.float64) else t.float() for t in real])
    kinds = {(norm.device, norm.dtype) for norm in norms}
    found = norms if len(kinds) == 1 else [norm.to(norms[0].device, torch.float64) for norm in norms]
    return torch.stack(list(found)).double().square()


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
