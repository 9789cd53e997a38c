"""The first-order signal: <g, theta - A>, the derivative of the loss over log(learning rate), from gradients at hand.

As the spread goes to 0, the slope of the replicas' losses on the line through the anchor becomes this dot product. It
needs no replicas, no weights apart, and has far less noise; it serves the learning rate only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray, numbers_of, shown, whole_of
from hdet.notices import tell
from hdet.replicas.group import Replicas
from hdet.replicas.sharding import LARGE_MODEL, local_tensor, num_parameters, shares_of
from hdet.signals.base import Reading, Signal
from hdet.weights.anchor import Anchor, Columns

MAX_SAMPLES = 64
"""Samples of one round. A longer round samples every so many steps."""

MAX_WITHOUT = 3
"""Samples without any gradient, from the start of a run on, before it is said."""

MIN_SAMPLES, MAX_EVERY = 4, 8
"""Of a large model: samples of a round, so that it can tell its own error; and steps between them."""

MAX_WAITING, LARGEST_JOINED = 2**22, 2**12
"""Entries of tensors whose dot products are taken together, which bounds the memory; and of the largest of them in a
small model: joined, they are copied."""


def default_sample_every(optimizer: Optimizer, interval: int) -> int:
    """Steps between samples: all that fit into a round's table; of a large model about four a round.

    A sample starts a few kernels for each tensor, and reads weights and gradient; where the anchor holds a share of the
    entries it reads less, but starts as many. In every step that would show in the step time of a GPU.
    """
    return sample_every(num_parameters(optimizer), interval)


def sample_every(num_parameters: float, interval: int) -> int:
    """:func:`default_sample_every` by the number of parameters."""
    sparse = min(MAX_EVERY, max(1, interval // MIN_SAMPLES)) if num_parameters > LARGE_MODEL else 1
    return max(math.ceil(interval / MAX_SAMPLES), sparse)


class GradientSignal(Signal):
    """Samples <g, theta - A> of each knob in optimizer steps, on the device; :meth:`share` reads them once a round.

    Args:
        anchor: A.
        knob_of_group: which knob each param group belongs to.
        sample_every: steps between samples, at least 1.
        num_ranks: ranks whose samples :meth:`share` adds up.
        total_slope: whether to sample all knobs at once, too: a sum of means has no standard error of its own.
    """

    name = "gradient"
    compares = False

    def __init__(
        self, anchor: Anchor, knob_of_group: list[int], *, sample_every: int, num_ranks: int, total_slope: bool = False
    ) -> None:
        self.num_ranks = num_ranks
        self.total_slope = total_slope
        self.anchor = anchor
        self.knob_of_group = list(knob_of_group)
        self.num_knobs = max(knob_of_group) + 1
        self.sample_every = sample_every
        self.num_calls = 0
        self.num_without = 0
        """Samples without any gradient, as long as there was none at all; then -1."""
        self.samples: FloatArray = np.empty((0, self.num_columns))
        self._rows: list[Tensor] = []
        """Samples that are still on the device, each a matrix of one row or more."""
        self._shares_of: tuple[list[int], list[float]] = [], []
        """What each parameter counts, and by which they are known: asked for in every sample."""

    @property
    def num_columns(self) -> int:
        """Numbers of a sample: that of all knobs first, where it is asked for."""
        return self.num_knobs + self.total_slope

    def add_group(self, knob: int) -> None:
        """One more param group, of a knob that may be new: there are no samples of it yet."""
        self.knob_of_group.append(knob)
        if knob == self.num_knobs:
            self.num_knobs += 1
            self.samples = np.pad(self.samples, ((0, 0), (0, 1)), constant_values=math.nan)
            self._rows = [torch.cat([rows, rows.new_full((len(rows), 1), math.nan)], 1) for rows in self._rows]

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Take a sample if one is due."""
        self.num_calls += 1
        skipped = (self.num_calls - 1) % self.sample_every
        if skipped or sum(map(len, self._rows)) + len(self.samples) == MAX_SAMPLES:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if self.num_without >= 0:
            self._look_for_gradients(gradients)
        self._rows.append(_unscaled(self._dots(optimizer, gradients), optimizer)[None])

    def _look_for_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Say once where there are none: parameters may have been updated inside backward."""
        if any(gradient is not None for gradient in gradients):
            self.num_without = -1
            return
        self.num_without += 1
        if self.num_without == MAX_WITHOUT:
            self.num_without = -1
            tell(
                f"no parameter of the optimizer had a gradient in {MAX_WITHOUT} calls of optimizer.step() since the "
                "start: where they are updated inside backward (register_post_accumulate_grad_hook, fused embeddings) "
                "there is no gradient to learn from. The learning rate stays as it was given, and rounds are undone by "
                "their losses alone. Give AutoLR an optimizer of parameters that keep their gradients until its step, "
                "and let the others follow its learning rate: docs/frameworks.md, `Optimizers stepped inside backward`"
            )

    def _dots(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> Tensor:
        """<g, theta - A> of each knob, this rank's share of it, for any gradients of the parameters."""
        parameters: list[Tensor] = []
        knobs: list[int] = []
        for group, knob in zip(optimizer.param_groups, self.knob_of_group, strict=True):
            parameters += group["params"]
            knobs += [knob] * len(group["params"])
        shares = self._shares(optimizer)
        found: list[tuple[int, Tensor, float]] = []
        """Of each dot product its knob, its value, and what that counts."""
        waiting: dict[Any, list[Term]] = {}
        size: dict[Any, int] = {}
        apart: list[int] = []
        largest = LARGEST_JOINED if self.anchor.stride == 1 else math.inf
        for index, (p, gradient, knob) in enumerate(zip(parameters, gradients, knobs, strict=True)):
            if gradient is None:
                continue
            if gradient.is_sparse or p.dtype != gradient.dtype or p.is_complex() or p.numel() > largest:
                apart.append(index)
                continue
            # Some kernels for each tensor would show.
            columns = self.anchor.columns[index]
            factor = shares[index] * (1.0 if columns is None else columns.weight)
            home = p.device, p.dtype
            for term in self.anchor.terms(p, gradient, index):
                key = knob, factor, home, None if columns is None else term[0].shape[1:]
                waiting.setdefault(key, []).append(term)
                size[key] = size.get(key, 0) + term[0].numel()
                if size[key] >= MAX_WAITING:
                    found.append((knob, dot_all(waiting.pop(key)), factor))
                    del size[key]
        for (knob, factor, *_), terms in waiting.items():
            found.append((knob, dot_all(terms), factor))
        for index, displacement in self.anchor.displacements(parameters, apart):
            gradient, columns = gradients[index], self.anchor.columns[index]
            assert gradient is not None
            factor = shares[index] if columns is None else shares[index] * columns.weight
            found.append((knobs[index], _dot(displacement, gradient, columns), factor))
        device = found[0][1].device if found else torch.device("cpu")
        sampled = [[term for term in found if term[0] == knob] for knob in range(self.num_knobs)]
        if self.total_slope:  # in the order of the parameters, as one knob for all would have it
            sampled.insert(0, found)
        return torch.stack([_total(terms, device) for terms in sampled])

    def _shares(self, optimizer: Optimizer) -> list[float]:
        """What this rank's part of each parameter counts in a sum over all ranks."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if list(map(id, parameters)) != self._shares_of[0]:
            self._shares_of = list(map(id, parameters)), shares_of(parameters, self.num_ranks)
        if not any(group.get("maximize", False) for group in optimizer.param_groups):
            return self._shares_of[1]
        signs = [-1 if group.get("maximize", False) else 1 for group in optimizer.param_groups for _ in group["params"]]
        return [share * sign for share, sign in zip(self._shares_of[1], signs, strict=True)]

    def launch(self) -> None:
        if self._rows:  # one transfer for all of them
            self._rows = [torch.cat([rows.to(self._rows[0].device) for rows in self._rows])]

    def share(self, replicas: Replicas, losses: FloatArray) -> None:
        """Bring the samples to the host, the same on every rank; a collective, and it waits for the device.

        Each rank adds its share: the whole dot product divided by the number of ranks where all hold all parameters,
        its shard's part where they are sharded.
        """
        table = torch.full((MAX_SAMPLES, self.num_columns), math.nan, dtype=torch.float64, device=replicas.device)
        if self._rows:
            found = torch.cat([rows.to(replicas.device) for rows in self._rows])
            table[: len(found)] = found.double()
        self._rows = []
        shared = replicas.sum_(table).cpu().numpy()
        self.samples = np.concatenate([self.samples, shared[np.isfinite(shared).any(axis=1)]])

    def drain(self) -> Reading:
        """Mean and standard error of the round's samples."""
        found = self._reading(*mean_and_error(self.samples))
        self.forget()
        return found

    def _reading(self, mean: FloatArray, error: FloatArray) -> Reading:
        slopes = mean[self.total_slope :], error[self.total_slope :]
        return Reading(slopes=slopes, total_slope=(float(mean[0]), float(error[0])) if self.total_slope else None)

    def forget(self) -> None:
        self.samples = np.empty((0, self.num_columns))
        self._rows = []

    def refuse_capture(self) -> None:
        raise RuntimeError(
            "optimizer.step() must not be captured in a CUDA graph with the gradient signal: a replay takes no new "
            "sample; capture forward and backward, and call optimizer.step() after each replay"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls, "samples": self.samples.tolist()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        whole_of(state["num_calls"], "num_calls")
        unpack_samples(state["samples"], self.num_columns)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self.num_calls, self.samples = int(state["num_calls"]), unpack_samples(state["samples"], self.num_columns)


@torch.no_grad()
def drop_nonfinite(optimizer: Optimizer, replicas: Replicas | None = None) -> None:
    """Set all gradients to zero when any of them is not finite. On the device: no host sync.

    ``replicas``: those that share gradients, which drop them together: one that breaks on one rank alone, after the
    all-reduce, would otherwise part its weights from the others'. One all-reduce of a number; every rank must call it.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    values = [g._values() if g.is_sparse else g for g in gradients]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for g in (torch.view_as_real(g) if g.is_complex() else g for g in values if g.numel()):
        kinds.setdefault((g.device, g.dtype), []).append(g)
    # The largest absolute value: unlike a sum of squares it is finite whenever all values are.
    fine = [torch.isfinite(torch.stack(torch._foreach_norm(found, math.inf))).all() for found in kinds.values()]
    if replicas is not None and replicas.count > 1:
        home = next((p.device for group in optimizer.param_groups for p in group["params"]), replicas.device)
        fine = [~replicas.any_true(~_all_true(fine, home))]
    for (device, _), found in kinds.items():
        broken = ~_all_true(fine, device)
        for g in found:
            g.masked_fill_(broken, 0)


def _all_true(flags: list[Tensor], device: torch.device) -> Tensor:
    return (
        torch.stack([flag.to(device) for flag in flags]).all()
        if flags
        else torch.ones((), dtype=torch.bool, device=device)
    )


def dot(displacement: Tensor, gradient: Tensor, columns: Columns | None, factor: float) -> Tensor:
    """``factor`` times that of a gradient with a displacement, which may be known in some ``columns`` only."""
    return _dot(displacement, gradient, columns) * (factor if columns is None else factor * columns.weight)


Term = tuple[Tensor, Tensor, Tensor]
"""Of a dot product of a gradient with a displacement: parts of the weights, of the anchor, and of the gradient."""


def dot_all(terms: Sequence[Term]) -> Tensor:
    """The sum of their dot products, by a few kernels for all of them."""
    weights, anchors, gradients = (torch.cat(found) for found in zip(*terms, strict=True))
    wide = torch.promote_types(weights.dtype, torch.float32)
    return (weights - anchors).to(wide).mul_(gradients).sum()


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


def _total(terms: Sequence[tuple[int, Tensor, float]], device: torch.device) -> Tensor:
    """The sum of values times what each counts; NaN without any."""
    if not terms:
        return torch.full((), math.nan, device=device)
    factors = {factor for _, _, factor in terms}
    factor = factors.pop()
    if factors:  # parameters that are sharded in different ways, or ascend
        return torch.stack([(value * each).to(device) for _, value, each in terms]).sum()
    found = torch.stack([value.to(device) for _, value, _ in terms])
    return (found if factor == 1 else found * factor).sum()


def _unscaled(row: Tensor, optimizer: Optimizer) -> Tensor:
    """Undo a GradScaler that leaves unscaling, and skipping the step, to a fused optimizer."""
    scale: Any = getattr(optimizer, "grad_scale", None)
    found_inf: Any = getattr(optimizer, "found_inf", None)
    if isinstance(scale, Tensor):
        row = row / scale.to(row.device)
    if isinstance(found_inf, Tensor):
        row = torch.where(found_inf.to(row.device) > 0, math.nan, row)
    return row


def unpack_samples(saved: Any, num_knobs: int) -> FloatArray:
    """Samples of a saved state: NaN where one could not be taken, and none so large that its square is infinite."""
    samples = numbers_of(saved, "samples", None, num_knobs, low=-1e100, high=1e100, finite=False)
    if len(samples) > MAX_SAMPLES or np.isinf(samples).any():
        raise ValueError(f"samples must be at most {MAX_SAMPLES} rows without infinities, but got {shown(saved)}")
    return samples


def mean_and_error(samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard error of each column, over its finite entries; NaN where there are too few."""
    num_knobs = samples.shape[1]
    mean, error = np.full(num_knobs, np.nan), np.full(num_knobs, np.nan)
    for k in range(num_knobs):
        column = samples[:, k]
        column = column[np.isfinite(column)]
        if len(column):
            mean[k] = column.mean()
        if len(column) > 1:
            error[k] = column.std(ddof=1) / math.sqrt(len(column))
    return mean, error
