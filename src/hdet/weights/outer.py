"""The outer step: what becomes of the mean of replicas that have trained apart, and of their optimizers' state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import FloatArray, mapping_of, number, require, require_one_of
from hdet.replicas.sharding import as_saved, local_tensor, own_part
from hdet.weights.anchor import Anchor
from hdet.weights.saved import tensors_of

StatePolicy = Literal["average", "keep", "reset"]
OuterKind = Literal["mean", "fittest", "nesterov", "elastic"]

FITTEST = 0.02
"""Share of the lowest loss by which a replica must be above it to count e times less."""


class OuterStep:
    r"""Where the shared weights go at a converge.

    ``"mean"``: to the mean of the replicas (Eq. 3). ``"fittest"``: to their mean by softmax of their losses, in units
    of 2% of the lowest loss, so that replicas which are plainly worse do not count. ``"nesterov"``: DiLoCo's outer
    optimizer. With c the centre of the last converge, the displacement is a gradient:

    .. math:: d = c - \bar\theta, \quad v \leftarrow \mu v + d, \quad \theta \leftarrow c - \eta (d + \mu v)

    With momentum 0 and learning rate 1 that is the mean, to the last bit. It keeps two copies of the weights, c and v.

    ``"elastic"``: EASGD. Replicas stay apart; at a converge they and a centre c, which is the model, are drawn towards
    each other:

    .. math:: \theta_r \leftarrow \theta_r - \frac{\beta}{N} (\theta_r - c), \quad
        c \leftarrow c + \beta (\bar\theta - c)

    with c of before on both sides. Where all have to be at one place they meet at the new c: at the end of a run, where
    a mean is asked for in mid-round, and in a round that leaves a replica out. It keeps one copy of the weights, c.

    Args:
        kind: which.
        lr, momentum: eta > 0 and mu in [0, 1) of ``"nesterov"``.
        pull: beta in (0, 1] of ``"elastic"``.
    """

    def __init__(
        self,
        kind: OuterKind = "mean",
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        pull: float = 0.9,
    ) -> None:
        require_one_of("outer", kind, "mean", "fittest", "nesterov", "elastic")
        of = " of the outer step"
        require(number(lr) > 0, "lr", "a finite number > 0", lr, of=of)
        require(0 <= number(momentum) < 1, "momentum", "in [0, 1)", momentum, of=of)
        require(0 < number(pull) <= 1, "pull", "in (0, 1]", pull, of=of)
        self.kind, self.lr, self.momentum, self.pull = kind, lr, momentum, pull
        self.centre = Anchor()
        self.velocity: list[Tensor] = []

    def __repr__(self) -> str:
        if self.kind == "elastic":
            return f"OuterStep({self.kind!r}, pull={self.pull!r})"
        return f"OuterStep({self.kind!r}, lr={self.lr!r}, momentum={self.momentum!r})"

    @property
    def keeps_centre(self) -> bool:
        return self.kind in ("nesterov", "elastic")

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where a round starts, unless it is known; to be called before any optimizer step."""
        if self.keeps_centre and not self.centre.copies:
            self.centre.renew(parameters)
            self._rest()

    def _rest(self) -> None:
        """What has no velocity yet has none."""
        if self.kind == "nesterov":
            self.velocity += [torch.zeros_like(copy) for copy in self.centre.copies[len(self.velocity) :]]

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that join in mid-run start from where they are, at rest."""
        if self.centre.copies:
            self.centre.add(parameters)
            self._rest()

    def shares(self, losses: FloatArray, healthy: NDArray[np.bool_]) -> FloatArray | None:
        """What each replica counts in the mean, 1 on average over the healthy ones; None for equal shares."""
        finite = np.isfinite(losses) & healthy
        if self.kind != "fittest" or finite.sum() < 2:
            return None
        least = float(losses[finite].min())
        unit = FITTEST * abs(least)
        scores = np.zeros(len(losses))
        scores[finite] = np.exp((least - losses[finite]) / unit) if unit > 0 else 1.0
        shares: FloatArray = scores * healthy.sum() / scores.sum()
        return shares

    @torch.no_grad()
    def apply_(self, parameters: Sequence[Tensor]) -> None:
        """Move the parameters, which are at the mean, on to where the next round starts."""
        if self.kind == "elastic":
            self.pull_(parameters)
        if self.kind != "nesterov":
            return
        for centre, velocity, parameter in zip(self.centre.copies, self.velocity, parameters, strict=True):
            p = local_tensor(parameter)
            if p.is_floating_point() or p.is_complex():
                displacement = centre - p
                velocity.mul_(self.momentum).add_(displacement)
                # c - lr (d + mu v), written from the mean so that lr = 1, mu = 0 changes nothing.
                p.add_(displacement, alpha=1 - self.lr).sub_(velocity, alpha=self.lr * self.momentum)
        self.centre.renew(parameters)

    @torch.no_grad()
    def pull_(self, parameters: Sequence[Tensor], own: Sequence[Tensor] = (), num_replicas: int = 1) -> None:
        """The elastic step, from the mean: the centre moves, and so do the parameters, to it or to where they belong.

        ``own``: what the parameters were before the mean; they go from there.
        """
        for index, (centre, p) in enumerate(zip(self.centre.copies, parameters, strict=True)):
            if p.is_floating_point() or p.is_complex():
                place = torch.lerp(own[index], centre, self.pull / num_replicas) if own else None
                centre.copy_(torch.lerp(centre, p, self.pull))
                p.copy_(centre if place is None else place)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The elastic centre comes back after the block, in which replicas may meet."""
        before = [copy.clone() for copy in self.centre.copies] if self.kind == "elastic" else []
        differ_from = self.centre.differ_from
        try:
            yield
        finally:
            for copy, value in zip(self.centre.copies, before, strict=False):
                copy.copy_(value)
            self.centre.differ_from = differ_from

    @torch.no_grad()
    def restart(self, parameters: Sequence[Tensor]) -> None:
        """After a rollback: the round starts from ``parameters``, at rest."""
        if self.centre.copies:
            self.centre.renew(parameters)
            for velocity in self.velocity:
                velocity.zero_()

    def state_dict(self, parameters: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """With ``parameters``: sharded as they are, and complete before a run has begun, to read a checkpoint into."""
        centre, velocity = self.centre.copies, self.velocity
        if parameters is not None and self.keeps_centre and not centre:
            centre = [local_tensor(p) for p in parameters]
            velocity = [torch.zeros_like(t) for t in centre] if self.kind == "nesterov" else []
        like = parameters if parameters is not None else centre
        return {
            "centre": [as_saved(t, p) for t, p in zip(centre, like, strict=False)],
            "velocity": [as_saved(t, p) for t, p in zip(velocity, like, strict=False)],
        }

    def check_state(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        state = mapping_of(state, "outer")
        found = {
            name: tensors_of(state[name], parameters, f"the outer step's {name}") for name in ("centre", "velocity")
        }
        if found["velocity"] and not found["centre"]:
            raise ValueError("the outer step's centre must have the parameters' shapes; it is of another model")
        if found["centre"] and not found["velocity"] and self.kind == "nesterov":
            raise ValueError("the outer step's velocity must have the parameters' shapes; it is of another model")

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        self.centre.copies, self.velocity = [], []
        if self.keeps_centre and state["centre"]:
            self.begin(parameters)
            for mine, saved in ((self.centre.copies, state["centre"]), (self.velocity, state["velocity"])):
                for copy, value, p in zip(mine, saved, parameters, strict=False):  # there may be no velocity
                    copy.copy_(own_part(value, p).detach())


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of an optimizer's state, in the order of its parameters."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            found += [local_tensor(state[name]) for name in sorted(state) if isinstance(state[name], Tensor)]
    return found


@torch.no_grad()
def reset_state(optimizer: Optimizer) -> None:
    """As in the first step, in place: compiled and captured steps hold on to these tensors."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if group.get("dampening"):
                state.pop("momentum_buffer", None)  # the first step of SGD makes it without dampening
            for name, value in state.items():
                if isinstance(value, Tensor):
                    first = {"mu_product": 1.0, "sum": group.get("initial_accumulator_value", 0.0)}.get(name, 0.0)
                    local_tensor(value).fill_(first)
