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
from hdet.replicas.sharding import LARGE_MODEL, num_parameters
from hdet.signals.base import Reading, Signal
from hdet.signals.dot_products import DotProducts, Product
from hdet.weights.anchor import Anchor

MAX_SAMPLES = 64
"""Samples of one round. A longer round samples every so many steps."""

MAX_WITHOUT = 3
"""Samples without any gradient, from the start of a run on, before it is said."""

MIN_SAMPLES, MAX_EVERY = 4, 8
"""Of a large model: samples of a round, so that it can tell its own error; and steps between them."""


def default_sample_every(optimizer: Optimizer, interval: int) -> int:
    """Steps between samples: all that fit into a round's table; of a large model about four a round.

    A sample takes a call or two for each tensor, and reads weights and gradient; where the anchor holds a share of the
    entries it reads less, but takes as many. In every step that would show in the step time of a GPU.
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
        self.dot_products = DotProducts(anchor, num_ranks)

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

    def _dots(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> Tensor:
        """<g, theta - A> of each knob, this rank's share of it, for any gradients of the parameters."""
        found = self.dot_products.of(optimizer, gradients, self.knob_of_group)
        sampled = [[term for term in found if term[0] == knob] for knob in range(self.num_knobs)]
        if self.total_slope:  # in the order of the parameters, as one knob for all would have it
            sampled.insert(0, found)
        device = found[0][1].device if found else torch.device("cpu")
        return torch.stack([_total(terms, device) for terms in sampled])

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


def _total(terms: Sequence[Product], device: torch.device) -> Tensor:
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
