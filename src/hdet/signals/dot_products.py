"""Dot products of gradients with theta - A, by a few kernels for all tensors that are alike.

Tensors of different param groups are not taken together: so groups that have a learning rate each, without evidence
apart, are to the last bit what they are with one for all.

Which pieces of which tensors are taken together is found out once, and again where one lies in memory otherwise than
before: some calls for each tensor in every step would show in the step time of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.sharding import local_tensor, own_tensor, shares_of
from hdet.weights.anchor import Anchor, Columns

MAX_JOINED, LARGEST_JOINED = 2**22, 2**12
"""Entries of tensors whose dot products are taken together, which bounds the memory; and of the largest of them in a
small model: joined, they are copied."""

MAX_PLANS = 16
"""At a time: in a mixture of experts, say, others have gradients in every step."""

Product = tuple[int, Tensor, float]
"""The dot product of some tensors: the knob of them all, its value, and what that counts."""

Cut = tuple[int, tuple[Sequence[int], Sequence[int], int] | None]
"""Of the tensor of this index, the piece of this size, stride and start; None for all of a vector."""


class Joined(NamedTuple):
    """Pieces of tensors that are alike, of one param group, and of their anchors, and what their dot product counts."""

    group: int
    factor: float
    weights: list[Cut]
    gradients: list[Cut]
    anchors: list[Tensor]


class Plan(NamedTuple):
    """What is taken together.

    Attributes:
        joined: of tensors that are alike.
        apart: indices of the others.
        scattered: indices of weights, and of gradients, that are not one matrix in memory.
    """

    joined: list[Joined]
    apart: list[int]
    scattered: tuple[list[int], list[int]]


class DotProducts:
    """<g, theta - A> of an optimizer's parameters.

    Args:
        anchor: A.
        num_ranks: ranks whose products are added up.
    """

    def __init__(self, anchor: Anchor, num_ranks: int) -> None:
        self.anchor = anchor
        self.num_ranks = num_ranks
        self._shares_of: tuple[list[int], list[float]] = [], []
        """What each parameter counts, and by which they are known: asked for in every sample."""
        self._plans: dict[Any, Plan] = {}
        """By how the tensors lie in memory; for the anchor as it is since it has moved the last time."""
        self._num_renewed = -1

    def of(
        self, optimizer: Optimizer, gradients: Sequence[Tensor | None], knob_of_group: Sequence[int]
    ) -> list[Product]:
        """This rank's share of them, for any gradients of the parameters."""
        parameters: list[Tensor] = []
        groups: list[int] = []
        for number, group in enumerate(optimizer.param_groups):
            parameters += group["params"]
            groups += [number] * len(group["params"])
        shares = self.shares(optimizer)
        weights: list[Any] = [own_tensor(p) for p in parameters]
        own: list[Any] = [g if g is None or g.is_sparse else own_tensor(g) for g in gradients]
        plan = self._planned(weights, own, groups, shares)
        for tensors, scattered in zip((weights, own), plan.scattered, strict=True):
            for index in scattered:
                tensors[index] = tensors[index].contiguous()
        found = []
        for joined in plan.joined:
            w, g = torch.cat(_cut(weights, joined.weights)), torch.cat(_cut(own, joined.gradients))
            a = torch.cat(joined.anchors)
            wide = torch.promote_types(w.dtype, torch.float32)
            found.append((knob_of_group[joined.group], (w - a).to(wide).mul_(g).sum(), joined.factor))
        for index, displacement in self.anchor.displacements(parameters, plan.apart):
            gradient, columns = gradients[index], self.anchor.columns[index]
            assert gradient is not None
            factor = shares[index] if columns is None else shares[index] * columns.weight
            found.append((knob_of_group[groups[index]], _dot(displacement, gradient, columns), factor))
        return found

    def shares(self, optimizer: Optimizer) -> list[float]:
        """What this rank's part of each parameter counts in a sum over all ranks."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if list(map(id, parameters)) != self._shares_of[0]:
            self._shares_of = list(map(id, parameters)), shares_of(parameters, self.num_ranks)
        if not any(group.get("maximize", False) for group in optimizer.param_groups):
            return self._shares_of[1]
        signs = [-1 if group.get("maximize", False) else 1 for group in optimizer.param_groups for _ in group["params"]]
        return [share * sign for share, sign in zip(self._shares_of[1], signs, strict=True)]

    def _planned(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], groups: list[int], shares: list[float]
    ) -> Plan:
        """What is taken together of tensors that lie in memory as these do."""
        if self._num_renewed != self.anchor.num_renewed:
            self._plans, self._num_renewed = {}, self.anchor.num_renewed
        key = (
            tuple([(w.device, w.dtype, w.shape, w.stride(), w.storage_offset()) for w in weights]),
            tuple([None if g is None else g.is_sparse or (g.dtype, g.stride(), g.storage_offset()) for g in gradients]),
            tuple(groups),
            tuple(shares),
        )
        if key not in self._plans:
            if len(self._plans) == MAX_PLANS:
                self._plans = {}
            self._plans[key] = self._plan(weights, gradients, groups, shares)
        return self._plans[key]

    def _plan(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], groups: list[int], shares: list[float]
    ) -> Plan:
        joined: list[Joined] = []
        waiting: dict[Any, Joined] = {}
        size: dict[Any, int] = {}
        apart: list[int] = []
        scattered: tuple[list[int], list[int]] = [], []
        largest = LARGEST_JOINED if self.anchor.stride == 1 else math.inf
        for index, (w, g, group) in enumerate(zip(weights, gradients, groups, strict=True)):
            if g is None:
                continue
            a = self.anchor.copies[index]
            is_plain = {type(w), type(g)} <= {Tensor, nn.Parameter} and not g.is_sparse and not w.is_complex()
            is_beside = (a.device, a.dtype) == (w.device, w.dtype) == (g.device, g.dtype) and a.is_contiguous()
            if not is_plain or not is_beside or w.numel() > largest:
                apart.append(index)
                continue
            columns = self.anchor.columns[index]
            factor = shares[index] * (1.0 if columns is None else columns.weight)
            if not _is_matrix(w, columns):
                w = w.contiguous()
                scattered[0].append(index)
            if not _is_matrix(g, columns):
                g = g.contiguous()
                scattered[1].append(index)
            for of_weights, of_gradients, of_anchor in _pieces(w, g, a, columns):
                key = group, factor, w.device, w.dtype, None if columns is None else of_anchor.shape[1:]
                here = waiting.setdefault(key, Joined(group, factor, [], [], []))
                for cuts, piece in ((here.weights, of_weights), (here.gradients, of_gradients)):
                    place = piece.shape, piece.stride(), int(piece.storage_offset())
                    cuts.append((index, None if columns is None and w.dim() == 1 else place))
                here.anchors.append(of_anchor)
                size[key] = size.get(key, 0) + of_anchor.numel()
                if size[key] >= MAX_JOINED:
                    joined.append(waiting.pop(key))
                    del size[key]
        return Plan([*joined, *waiting.values()], apart, scattered)


def _pieces(w: Tensor, g: Tensor, a: Tensor, columns: Columns | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of weights and gradient what the anchor holds of them, and the anchor, as views."""
    if columns is None or not w.numel():  # a rank without a row of it has a term, too: zero
        yield w.view(-1), g.view(-1), a.view(-1)
        return
    pieces = columns.pieces(w)
    parts = a.split_with_sizes([piece.shape[0] * piece.shape[1] for piece in pieces])
    for piece, of_gradient, part in zip(pieces, columns.pieces(g), parts, strict=True):
        yield piece, of_gradient, part.view(piece.shape)


def _is_matrix(tensor: Tensor, columns: Columns | None) -> bool:
    """Whether it can be viewed as one, without a copy."""
    try:
        tensor.view(-1 if columns is None else (-1, columns.width))
    except RuntimeError:
        return False
    return True


def _cut(tensors: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
    return [tensors[index] if place is None else tensors[index].as_strided(*place) for index, place in cuts]


def dot(displacement: Tensor, gradient: Tensor, columns: Columns | None, factor: float) -> Tensor:
    """``factor`` times that of a gradient with a displacement, which may be known in some ``columns`` only."""
    return _dot(displacement, gradient, columns) * (factor if columns is None else factor * columns.weight)


def _dot(displacement: Tensor, gradient: Tensor, columns: Columns | None) -> Tensor:
    plain = columns is None and type(gradient) is Tensor and gradient.dtype == displacement.dtype == torch.float32
    if plain and not gradient.is_sparse and displacement.is_contiguous() and gradient.is_contiguous():
        # By far the most frequent case, in a small model in every step: a check more shows in the step time.
        return torch.dot(displacement.view(-1), gradient.view(-1))
    gradient = local_tensor(gradient)
    if gradient.is_sparse and columns is not None and (gradient.sparse_dim() > 1 or gradient.dim() == 1):
        gradient = gradient.to_dense()  # its values are not rows
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()
        displacement, gradient = displacement[tuple(rows)], gradient.values()
        if columns is not None:
            gradient = columns.of_rows(gradient, rows[0])
    elif columns is not None:
        gradient = columns.of(gradient)
    if displacement.is_complex():
        displacement, gradient = torch.view_as_real(displacement), torch.view_as_real(gradient)
    if displacement.is_contiguous() and gradient.is_contiguous() and displacement.dtype == torch.float32:
        return torch.dot(displacement.view(-1), gradient.view(-1).float())
    wide = torch.promote_types(displacement.dtype, torch.float32)
    return (displacement.to(wide) * gradient.to(wide)).sum()
