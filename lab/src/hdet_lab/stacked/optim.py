"""Optimizers of the stacked engine: torch.optim's formulas on (R, replicas, parameters)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
# First parts of the names of embeddings and output layers in the lab's models.
EMBEDDINGS_AND_HEADS = ("tokens", "positions", "users", "items", "inputs", "behaviours", "fields", "head", "mlp_out")


class Slot(NamedTuple):
    """Where one parameter lies in (..., parameters)."""

    name: str
    shape: torch.Size
    columns: slice


Layout: TypeAlias = Sequence[Slot]


def make_layout(names: Iterable[str], shapes: Iterable[torch.Size]) -> Layout:
    """Parameters one behind the other."""
    layout, end = [], 0
    for name, shape in zip(names, shapes, strict=True):
        start, end = end, end + shape.numel()
        layout.append(Slot(name, shape, slice(start, end)))
    return layout


class StackedOptimizer(Protocol):
    """Turns a gradient into what the learning rate multiplies: theta <- theta (1 - lr * decoupled_decay) - lr * update.

    With shared gradients the state is the same on all replicas of a run and kept once. State tensors start with the
    run axis and are changed in place, so that runs can be restored one by one and a step can be captured. The layout
    is for optimizers that treat parameters differently.

    Attributes:
        decoupled_decay: weight decay as in AdamW.
        needs_weights: whether the update depends on each replica's own weights, so that each has its own state.
    """

    decoupled_decay: float

    @property
    def needs_weights(self) -> bool: ...

    def init(self, like: Tensor, layout: Layout) -> State: ...

    def update(self, state: State, gradient: Tensor, weights: Tensor, layout: Layout) -> Tensor: ...


class SGD:
    """``torch.optim.SGD``, with momentum and coupled weight decay."""

    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.decoupled_decay = 0.0

    @property
    def needs_weights(self) -> bool:
        return self.weight_decay != 0

    def init(self, like: Tensor, layout: Layout) -> State:
        return {"momentum": torch.zeros_like(like)} if self.momentum else {}

    def update(self, state: State, gradient: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if not self.momentum:
            return gradient
        return state["momentum"].mul_(self.momentum).add_(gradient)


class Adam:
    """``torch.optim.Adam`` with coupled weight decay; with ``decoupled=True`` ``torch.optim.AdamW``."""

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ) -> None:
        self.betas = betas
        self.eps = eps
        self.coupled_decay = 0.0 if decoupled else weight_decay
        self.decoupled_decay = weight_decay if decoupled else 0.0

    @property
    def needs_weights(self) -> bool:
        return self.coupled_decay != 0

    def init(self, like: Tensor, layout: Layout) -> State:
        # Runs restored at different steps have different counts; float64, since beta^step loses digits in float32.
        steps = torch.zeros(like.shape[0], 1, 1, dtype=torch.float64, device=like.device)
        return {"first": torch.zeros_like(like), "second": torch.zeros_like(like), "steps": steps}

    def update(self, state: State, gradient: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        if self.coupled_decay:
            gradient = gradient + self.coupled_decay * weights
        beta1, beta2 = self.betas
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradient, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1 = (1 - beta1**steps).to(first.dtype)
        bias2_root = (1 - beta2**steps).sqrt().to(first.dtype)
        return first / bias1 / (second.sqrt() / bias2_root + self.eps)


class Lion:
    """The sign of an average of gradient and momentum (Chen et al. 2023), with decoupled weight decay."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        self.betas = betas
        self.decoupled_decay = weight_decay

    @property
    def needs_weights(self) -> bool:
        return False

    def init(self, like: Tensor, layout: Layout) -> State:
        return {"momentum": torch.zeros_like(like)}

    def update(self, state: State, gradient: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        beta1, beta2 = self.betas
        update = state["momentum"].lerp(gradient, 1 - beta1).sign_()
        state["momentum"].lerp_(gradient, 1 - beta2)
        return update


class Muon:
    """``torch.optim.Muon`` with Nesterov momentum for hidden matrices, :class:`Adam` for everything else.

    A hidden matrix is a 2-D parameter whose name is none of ``not_hidden``, nor begins with one of them. The update of
    a matrix has the size of Adam's (``adjust_lr_fn="match_rms_adamw"``), so that one learning rate serves both; with
    ``adam_share`` it is as its author has it (``"original"``), and the learning rate of everything else is this share
    of it. On the CPU, which is slow at bfloat16, matrices are multiplied as they are.

    Args:
        momentum: of the matrices.
        betas, eps: Adam's.
        weight_decay: decoupled, of all parameters.
        not_hidden: names of embeddings and output layers, or their first parts.
        adam_share: None for updates of the same size.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        not_hidden: Sequence[str] = EMBEDDINGS_AND_HEADS,
        adam_share: float | None = None,
    ) -> None:
        self.momentum = momentum
        self.adam_share = adam_share
        self.decoupled_decay = weight_decay
        self.not_hidden = frozenset(not_hidden)
        self._adam = Adam(betas, eps)

    @property
    def needs_weights(self) -> bool:
        return False

    def is_hidden_matrix(self, slot: Slot) -> bool:
        return len(slot.shape) == 2 and self.not_hidden.isdisjoint((slot.name, slot.name.partition(".")[0]))

    def init(self, like: Tensor, layout: Layout) -> State:
        matrices, others = self._split(layout)
        momentum = torch.zeros_like(_take(like, matrices))
        return {"momentum": momentum, **self._adam.init(_take(like, others), others)}

    def update(self, state: State, gradient: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        matrices, others = self._split(layout)
        update = torch.empty_like(gradient)
        theirs = self._adam.update(state, _take(gradient, others), weights, others)
        _put(update, others, theirs if self.adam_share is None else self.adam_share * theirs)
        theirs = _take(gradient, matrices)
        momentum = state["momentum"].lerp_(theirs, 1 - self.momentum)
        _put(update, matrices, theirs.lerp(momentum, self.momentum))
        lead = update.shape[:-1]
        # Layers have the same shapes: one batch for all runs, replicas and matrices of a shape.
        for shape in dict.fromkeys(slot.shape for slot in matrices):
            alike = [slot for slot in matrices if slot.shape == shape]
            stacked = torch.stack([update[..., slot.columns].reshape(*lead, *shape) for slot in alike])
            orthogonal = orthogonalize(stacked.bfloat16() if stacked.is_cuda else stacked).to(update.dtype)
            for slot, matrix in zip(alike, orthogonal, strict=True):
                update[..., slot.columns] = matrix.flatten(-2) * self._factor(*shape)
        return update

    def _factor(self, rows: int, columns: int) -> float:
        return 0.2 * math.sqrt(max(rows, columns)) if self.adam_share is None else math.sqrt(max(1, rows / columns))

    def _split(self, layout: Layout) -> tuple[Layout, Layout]:
        matrices = [slot for slot in layout if self.is_hidden_matrix(slot)]
        return matrices, [slot for slot in layout if not self.is_hidden_matrix(slot)]


def outer_matrices(model: nn.Module) -> list[str]:
    """Names, or first parts, of embeddings and of the output layer: where there is no ``head``, the last matrix.

    Not where that leads to the width of an embedding, which is the output layer too.
    """
    tables = {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and name not in tables]
    named = any(name.partition(".")[0] in ("head", "mlp_out") for name, _ in matrices)
    widths = {part.embedding_dim for part in tables.values()}
    last = [name for name, p in matrices[-1:] if not named and len(p) not in widths]
    return [*EMBEDDINGS_AND_HEADS, *tables, *last]


def orthogonalize(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """(..., rows, columns) with singular values brought near 1, by ``torch.optim.Muon``'s Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).flatten(0, -3)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrices.shape)


def _take(vectors: Tensor, slots: Layout) -> Tensor:
    """The columns of some parameters, one behind the other."""
    # Slices, not an index: that would have to be copied to the device, which a capture does not allow.
    return torch.cat([vectors[..., :0], *(vectors[..., slot.columns] for slot in slots)], dim=-1)


def _put(vectors: Tensor, slots: Layout, values: Tensor) -> None:
    """The opposite of :func:`_take`, in place."""
    parts = torch.split(values, [slot.shape.numel() for slot in slots], dim=-1)
    for slot, part in zip(slots, parts, strict=True):
        vectors[..., slot.columns] = part
