"""The size of an update beside that of the weights: what the first learning rate follows from (Eq. 16)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.beside import trained_by_muon
from hdet.checks import FloatArray
from hdet.policy.level import Sizes
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import doubled, local_tensors, own_tensor, shares_of, whole_size
from hdet.signals.base import Reading, Signal
from hdet.weights.anchor import Columns, columns_of, stride_of
from hdet.weights.averaged import Weights

NOTHING = torch.full((5,), math.nan, dtype=torch.float64)


class UpdateSize(Signal):
    """Measures the optimizer step that ends a round: norms of weights, update and gradient over all that has one.

    A copy of the weights lives for the length of that step; of a large model it is of a share of the entries.

    Args:
        num_ranks: ranks whose sums :meth:`share` adds up.
        stride: measure one entry in so many.
        others: finds what Muon trains of the same model; called once, in the first step that is measured.
    """

    name = "update_size"
    compares = False
    only_at_end = True  # another thread may save a state while the optimizer is in the middle of its step

    def __init__(self, *, num_ranks: int, stride: int = 1, others: Callable[[], Sequence[Tensor]] = tuple) -> None:
        self.num_ranks = num_ranks
        self.stride = stride
        self._find_others = others
        self._others: Sequence[Tensor] | None = None
        self._before: list[tuple[Tensor, Columns | None, Tensor]] = []
        """Of each parameter that is measured: it, what is kept of it, and that as it was before the step."""
        self._gradients: Tensor | None = None
        self._wants_gradient = True
        self._sums = NOTHING
        """Of weights, update, gradient and entries in the step, and of others' weights, on their way."""
        self._found: Sizes | None = None

    @classmethod
    def of(cls, weights: Weights) -> UpdateSize:
        """For what this optimizer trains, beside what others do."""
        optimizer, replicas = weights.optimizer, weights.replicas
        return cls(
            num_ranks=replicas.count * replicas.num_parts,
            stride=stride_of(None, optimizer),
            others=partial(trained_by_muon, optimizer, weights.model),
        )

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        self._before, self._gradients, self._sums = [], None, NOTHING
        if not self.ends_round:
            return
        if self._others is None:
            self._others = self._find_others()
        moving = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        moving = [p for p in moving if p.is_floating_point() or p.is_complex()]
        columns = [columns_of(p, self.stride) for p in moving]
        kept = _kept(moving, columns)
        copies = [t.clone() if _is_part(t, p) else t for t, p in zip(kept, map(own_tensor, moving), strict=True)]
        self._before = list(zip(moving, columns, copies, strict=True))
        if self._wants_gradient and moving:
            gradients = local_tensors([p.grad for p in moving])
            self._gradients = squares([g.coalesce().values() if g.is_sparse else g for g in gradients])

    @torch.no_grad()
    def launch(self) -> None:
        """Start the sums of this rank, after the step, where it was told of one."""
        taken, gradients = self._before, self._gradients
        self._before, self._gradients = [], None
        if not taken:
            return
        parameters, columns, before = zip(*taken, strict=True)
        moved = torch._foreach_sub(list(_kept(parameters, columns)), list(before))
        rows = [squares(before), squares(moved)]
        shares = shares_of(parameters, self.num_ranks)
        kept_shares = [share if c is None else share * c.weight for share, c in zip(shares, columns, strict=True)]
        # One copy to the device for all numbers that the host knows.
        known = [kept_shares, shares, [copy.numel() for copy in before]]
        kept, whole, sizes = torch.tensor(known, dtype=torch.float64).to(rows[0].device, non_blocking=True)
        of_gradients = torch.zeros_like(whole) if gradients is None else gradients * whole
        sums = torch.stack([rows[0] * kept, rows[1] * kept, of_gradients, kept * sizes]).sum(1)
        self._sums = torch.cat([sums, self._measure_others(sums)])

    def _measure_others(self, beside: Tensor) -> Tensor:
        """Squares of the others' entries, of this rank: one tensor at a time, since all may be most of the memory."""
        total = beside.new_zeros(1)
        for part, share in zip(
            local_tensors(self._others or ()), shares_of(self._others or (), self.num_ranks), strict=True
        ):
            wide = part.is_complex() or part.dtype in (torch.float32, torch.float64)
            norm = torch.linalg.vector_norm(part, dtype=None if wide else torch.float32)
            total += share * doubled(norm).square().to(beside.device)
        return total

    @torch.no_grad()
    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        """Add up what ranks have measured; a collective, and it waits for the device."""
        found, self._sums = replicas.sum_(self._sums.to(replicas.device, copy=True)).tolist(), NOTHING
        if not math.isnan(found[0]):
            weights, update, gradient, num, others = found
            num_others = sum(whole_size(p) for p in self._others or ())
            self._found = Sizes(math.sqrt(weights), _root(update), _root(gradient), num, math.sqrt(others), num_others)
            # What it is for: to guess the size of an update, until one was more than rounding.
            self._wants_gradient = not self._found.is_measurable

    def drain(self) -> Reading:
        found = Reading(sizes=self._found)
        self.forget()
        return found

    def forget(self) -> None:
        self._found = None


def _kept(parameters: Sequence[Tensor], columns: Sequence[Columns | None]) -> Iterator[Tensor]:
    """One after the other: what is kept of a parameter may be a copy."""
    return (t if c is None else c.of(t) for t, c in zip(map(own_tensor, parameters), columns, strict=True))


def _is_part(kept: Tensor, parameter: Tensor) -> bool:
    """Whether they share memory: what is kept of a matrix is a copy already."""
    return kept.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each, without a kernel for each where they are alike."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    norms = torch._foreach_norm([t if t.dtype in (torch.float32, torch.float64) else t.float() for t in real])
    kinds = {(norm.device, norm.dtype) for norm in norms}
    if len(kinds) == 1:
        return doubled(torch.stack(list(norms))).square()
    found = [doubled(norm) for norm in norms]
    return torch.stack([norm.to(found[0].device) for norm in found]).square()


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
