"""The stacked engine: R runs of N replicas as one batched computation on one device.

Mechanics only. What the learning rates are, when replicas converge and where the base value goes is decided outside, by
the same spread and controller code that drives real processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hdet_lab.stacked.buffers import copy_buffers, mean_buffers, stack_buffers
from hdet_lab.stacked.optim import StackedOptimizer, make_layout
from hdet_lab.stacked.rivals import Rule
from hdet_lab.tasks.base import Batch, evaluation_mode

LossFunction = Callable[[Any, Batch], Tensor]


class Step(NamedTuple):
    """What one step showed, on the device.

    Attributes:
        losses: (R, N), of each replica on its own part of the batch, before the update.
        slopes: (R, G), <g, theta - A> for each run and param group: gradient and mean weights before the update. The
            derivative of the loss by the log of the learning rate since the anchor.
        sizes: (R, 3), norms of the weights before the update, of the update and of the gradient; over replicas their
            root mean square.
        norms: (R, N), of each replica's own gradient, before any mean or clipping.
    """

    losses: Tensor
    slopes: Tensor
    sizes: Tensor
    norms: Tensor


class StackedModels:
    """R runs x N replicas of one architecture, their weights one tensor of shape (R, N, parameters).

    Matrix products follow torch's settings: on CUDA, ``torch.set_float32_matmul_precision("high")`` allows TF32.
    Replicas share the gradient, averaged over a run, unless ``shared=False``. Runs never mix: one that turns non-finite
    leaves the others alone. Every replica has its own buffers (BatchNorm statistics).

    Args:
        models: one freshly built model per run, all alike; their weights are copied and all replicas start with them.
        loss: ``loss(model, batch)``, the mean loss over a batch.
        groups: param group name to names of parameters, as a task gives them.
        num_replicas: N.
        optimizer: how gradients become updates; a rule has one learning rate for all groups.
        shared: average the gradient over the replicas of a run; otherwise each trains alone.
        max_grad_norm: clip the gradient, as ``clip_grad_norm_`` does.
        device, dtype: of the weights.
        noise: (R, N, parameters) that replicas start away from their model; the anchor does not have it.
        compile: fuse the forward and backward pass with ``torch.compile``.
        graph: capture the step in a CUDA graph at the first call; the shapes of batches must then stay as they are.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: LossFunction,
        groups: Mapping[str, Sequence[str]],
        *,
        num_replicas: int,
        optimizer: StackedOptimizer | Rule,
        shared: bool = True,
        max_grad_norm: float | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        noise: Tensor | None = None,
        compile: bool = False,  # noqa: A002
        graph: bool = False,
    ) -> None:
        self.model = copy.deepcopy(models[0]).to(device=device, dtype=dtype)
        parameters = dict(self.model.named_parameters())
        self.names = [name for names in groups.values() for name in names]
        if sorted(self.names) != sorted(parameters):
            differing = sorted(set(self.names) ^ set(parameters))
            raise ValueError(f"groups must name every parameter once, but they differ in {differing or 'repeats'}")
        self.shapes = [parameters[name].shape for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.layout = make_layout(self.names, self.shapes)
        self.group_names = tuple(groups)
        ends = torch.tensor([sum(parameters[n].numel() for n in names) for names in groups.values()]).cumsum(0).tolist()
        self._columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

        self.num_runs, self.num_replicas = len(models), num_replicas
        self.shared = shared
        self.max_grad_norm = max_grad_norm
        with torch.no_grad():
            starts = torch.stack([self.flatten(dict(m.named_parameters())) for m in models]).to(device, dtype)
            self.weights = starts.unsqueeze(1).repeat(1, num_replicas, 1)
            if noise is not None:
                self.weights += noise.to(self.weights)
        self.anchors = starts.clone()
        self.buffers = stack_buffers(models, self.model, num_replicas)
        per_replica = not shared or optimizer.needs_weights
        self.optimizer = optimizer
        self.state = optimizer.init(self.weights if per_replica else self.weights[:, :1], self.layout)
        self._last = {name: tensor.clone() for name, tensor in self._everything().items()}
        self._proven = {name: tensor.clone() for name, tensor in self._everything().items()}

        self._one_loss = _LossModule(self.model, loss)
        self._stacked_losses = torch.compile(self._losses) if compile else self._losses
        self._use_graph = graph
        self._graph: _CapturedStep | None = None

    # -- weights ------------------------------------------------------------------------------------------------

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """One model's parameters as a vector, group by group."""
        return torch.cat([parameters[name].detach().flatten() for name in self.names])

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor]:
        """Views of the parameters in (..., parameters)."""
        # split, not slices: its backward is one concatenation, that of a slice a full-size tensor each.
        parts = torch.split(vectors, self.sizes, dim=-1)
        lead = vectors.shape[:-1]
        return {n: p.view(*lead, *shape) for n, p, shape in zip(self.names, parts, self.shapes, strict=True)}

    def mean(self) -> Tensor:
        """(R, parameters): each run's mean over replicas (Eq. 3)."""
        return self.weights.mean(1)

    def final(self) -> Tensor:
        """(R, parameters): the mean of the weights to evaluate, which some rules keep apart from those they train."""
        rule = self.optimizer
        return rule.final(self.state, self.weights).mean(1) if isinstance(rule, Rule) else self.mean()

    def mean_model(self, run: int) -> nn.Module:
        """A model with the final weights of one run, for a task's ``evaluate``; the same object every time."""
        vector = self.final()[run] if isinstance(self.optimizer, Rule) else self.weights[run].mean(0)
        return self._filled_model(vector, mean_buffers(self.buffers), run)

    def replica_model(self, run: int, replica: int) -> nn.Module:
        """The same with the weights of one replica."""
        buffers = {name: buffer[:, replica] for name, buffer in self.buffers.items()}
        return self._filled_model(self.weights[run, replica], buffers, run)

    @torch.no_grad()
    def _filled_model(self, vector: Tensor, buffers: Mapping[str, Tensor], run: int) -> nn.Module:
        values = self.unflatten(vector)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(values[name])
        copy_buffers(buffers, self.model, run)
        return self.model

    @torch.no_grad()
    def converge(self, runs: Tensor | None = None) -> Tensor:
        """Eq. 3: every replica of all runs, or of those where ``runs`` (R,) is True, to its run's mean.

        Returns the (R, N) distances from it before.
        """
        mean = self.mean().unsqueeze(1)
        distances: Tensor = torch.linalg.vector_norm(self.weights - mean, dim=-1)
        _copy_where(self.weights, mean.expand_as(self.weights), runs)
        for name, value in mean_buffers(self.buffers).items():
            _copy_where(self.buffers[name], value.unsqueeze(1).expand_as(self.buffers[name]), runs)
        return distances

    @torch.no_grad()
    def repair(self, healthy: Tensor) -> None:
        """Replicas where ``healthy`` (R, N) is False receive the mean of their run's others, optimizer state too."""
        for tensor in self._everything().values():
            if tensor.shape[1] == self.num_replicas and tensor.is_floating_point():  # what all share needs no repair
                counts = healthy.to(tensor.device).view(*healthy.shape, *[1] * (tensor.dim() - 2))
                zeros = torch.zeros_like(tensor)
                mean = torch.where(counts, tensor, zeros).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
                tensor.copy_(torch.where(counts, tensor, mean))

    @torch.no_grad()
    def copy_replicas(self, sources: Tensor) -> None:
        """Every replica takes weights, buffers and optimizer state from replica ``sources`` (R, N) of its run."""
        sources = sources.to(self.weights.device)
        runs = torch.arange(self.num_runs, device=sources.device).unsqueeze(1)
        for tensor in self._everything().values():
            if tensor.shape[1] == self.num_replicas:  # what all replicas share needs no copy
                tensor.copy_(tensor[runs, sources])

    @torch.no_grad()
    def set_anchor(self, runs: Tensor | None = None) -> None:
        """Put the anchor of all runs, or of those where the mask ``runs`` (R,) is True, at their mean."""
        _copy_where(self.anchors, self.mean(), runs)

    @torch.no_grad()
    def place(self, multipliers: Tensor, runs: Tensor | None = None) -> None:
        """Eq. 11: theta <- A + rho (mean - A), with rho (R, N, G) for each run, replica and group.

        Of all runs, or of those where ``runs`` (R,) is True.
        """
        mean, anchors = self.mean().unsqueeze(1), self.anchors.unsqueeze(1)
        multipliers = multipliers.to(self.weights)
        for group, columns in enumerate(self._columns):
            start = anchors[..., columns]
            placed = start + multipliers[..., group, None] * (mean[..., columns] - start)
            _copy_where(self.weights[..., columns], placed, runs)

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, lrs: Tensor) -> Step:
        """One optimizer step of every model. Nothing waits for the device.

        Args:
            batch: tensors of shape (R, N, rows, ...).
            lrs: (R, N, G) learning rates.

        Returns:
            Tensors of its own; they stay as they are in later steps.
        """
        lrs = lrs.to(self.weights, non_blocking=True)
        if not self._use_graph:
            return self._step(batch, lrs)
        if self._graph is None:
            self._graph = self._capture(batch, lrs)
        return self._graph.replay(batch, lrs)

    def _step(self, batch: Batch, lrs: Tensor) -> Step:
        flat = self.weights.flatten(0, 1).requires_grad_()
        # Views, as buffers are contiguous: what the forward pass writes into them stays.
        buffers = {name: buffer.flatten(0, 1) for name, buffer in self.buffers.items()}
        losses = self._stacked_losses(flat, buffers, tuple(t.flatten(0, 1) for t in batch))
        (gradients,) = torch.autograd.grad(losses.sum(), flat)
        losses = losses.detach().view(self.num_runs, self.num_replicas)
        with torch.no_grad():
            gradient = gradients.view_as(self.weights)
            norms_of_all: Tensor = torch.linalg.vector_norm(gradient, dim=-1)
            # The dot product of the means is the mean over replicas only where the gradient is shared.
            shared_gradient = gradient.mean(1)
            offsets = self.mean() - self.anchors
            slopes = torch.stack([(shared_gradient[:, c] * offsets[:, c]).sum(-1) for c in self._columns], dim=-1)
            if self.shared:
                gradient = shared_gradient.unsqueeze(1)
            if self.max_grad_norm is not None:
                norms = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
                gradient = gradient * (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
            before, size = self.weights.clone(), _size(gradient)
            self._update(gradient, lrs)
            sizes = torch.stack([_size(before), _size(self.weights - before), size], dim=-1)
        return Step(losses, slopes, sizes, norms_of_all)

    def _update(self, gradient: Tensor, lrs: Tensor) -> None:
        if isinstance(self.optimizer, Rule):  # one learning rate for all groups
            self.weights.sub_(self.optimizer.move(self.state, gradient, self.weights, lrs[..., :1]))
            return
        update = self.optimizer.update(self.state, gradient, self.weights, self.layout)
        for group, columns in enumerate(self._columns):
            lr, weights = lrs[..., group, None], self.weights[..., columns]
            if self.optimizer.decoupled_decay:
                weights.mul_(1 - lr * self.optimizer.decoupled_decay)
            weights.sub_(lr * update[..., columns])

    def _losses(self, flat: Tensor, buffers: dict[str, Tensor], batch: Batch) -> Tensor:
        def one(tensors: dict[str, Tensor], rows: Batch) -> Tensor:
            loss: Tensor = functional_call(self._one_loss, tensors, (rows,))
            return loss

        tensors = {f"model.{name}": value for name, value in (self.unflatten(flat) | buffers).items()}
        if len(flat) == 1:  # what vmap cannot do, as some convolutions on a GPU, is no obstacle to one model
            return one({name: value[0] for name, value in tensors.items()}, tuple(t[0] for t in batch)).unsqueeze(0)
        losses: Tensor = vmap(one)(tensors, batch)
        return losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """(R,): loss of each run's final weights in evaluation mode over ``batches`` of (rows, ...) that all share."""
        mean, buffers = self.final(), mean_buffers(self.buffers)
        total, rows = torch.zeros_like(mean[:, 0]), 0
        for batch in batches:
            repeated = tuple(t.unsqueeze(0).expand(self.num_runs, *t.shape) for t in batch)
            with evaluation_mode(self.model):
                total += self._losses(mean, buffers, repeated) * len(batch[0])
            rows += len(batch[0])
        return total / rows

    # -- rollback -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def snapshot(self, runs: Tensor | None = None) -> None:
        """Remember weights, buffers and optimizer state of all runs, or of those where ``runs`` (R,) is True."""
        for name, tensor in self._everything().items():
            _copy_where(self._proven[name], self._last[name], runs)
            _copy_where(self._last[name], tensor, runs)

    @torch.no_grad()
    def restore(self, runs: Tensor | None = None) -> None:
        """Bring back what the last :meth:`snapshot` but one remembered of each chosen run; at first, the start."""
        for name, tensor in self._everything().items():
            _copy_where(tensor, self._proven[name], runs)
            _copy_where(self._last[name], self._proven[name], runs)

    def _everything(self) -> dict[str, Tensor]:
        buffers = {f"buffers.{name}": buffer for name, buffer in self.buffers.items()}
        return {"weights": self.weights, **buffers, **self.state}

    def _capture(self, batch: Batch, lrs: Tensor) -> _CapturedStep:
        before = {name: tensor.clone() for name, tensor in self._everything().items()}
        captured = _CapturedStep(self._step, batch, lrs)
        # The warm-up took real steps.
        for name, tensor in self._everything().items():
            tensor.copy_(before[name])
        return captured


class _LossModule(nn.Module):
    """``functional_call`` swaps the parameters of a module while its forward runs: this one's forward is the loss."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.model, batch)


class _CapturedStep:
    """A step as a CUDA graph: hundreds of kernels for the price of one launch."""

    def __init__(self, step: Callable[[Batch, Tensor], Step], batch: Batch, lrs: Tensor) -> None:
        self.batch = tuple(t.clone() for t in batch)
        self.lrs = lrs.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lets libraries and the compiler allocate what they need outside the capture
                step(self.batch, self.lrs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = step(self.batch, self.lrs)

    def replay(self, batch: Batch, lrs: Tensor) -> Step:
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor)
        self.lrs.copy_(lrs)
        self.graph.replay()
        return Step(*(tensor.clone() for tensor in self.result))


def _size(vectors: Tensor) -> Tensor:
    """(R,): the norm of (R, N, parameters), as the root mean square over replicas."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=(1, 2))
    return norms / math.sqrt(vectors.shape[1])


def _copy_where(target: Tensor, source: Tensor, runs: Tensor | None) -> None:
    if runs is None:
        target.copy_(source)
    else:
        mask = runs.to(target.device, torch.bool).view(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(mask, source, target))
