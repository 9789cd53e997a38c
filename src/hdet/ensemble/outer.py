"""Outer steps: what becomes of the mean of replicas that have trained apart. A class each; a new one is one more class.

The names that users may pass in their place are resolved here, in :func:`outer_step`, and nowhere else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.checks import FloatArray, number, require, require_one_of
from hdet.replicas.sharding import as_saved, local_tensor, own_part
from hdet.replication import check_outer_state
from hdet.signals.update_size import squares
from hdet.weights.anchor import Anchor

OuterName = Literal["mean", "fittest", "grawa", "nesterov", "elastic"]

FITTEST = 0.02
"""Share of the lowest loss by which a replica must be above it to count e times less."""


class OuterStep:
    """Where the shared weights go at a converge: the base class does nothing, so that they stay at the mean (Eq. 3).

    Attributes:
        by_loss: whether replicas count in the mean by their losses.
        by_gradient: whether they count by the norms of their gradients, of which :meth:`begin` sees one in every step.
        leaves_apart: whether replicas stay apart, so that there is no one place for all after a converge.
        keeps_centre: whether :attr:`centre` holds a copy of where a round starts.
    """

    by_loss = False
    by_gradient = False
    leaves_apart = False
    keeps_centre = False

    def __init__(self) -> None:
        self.centre = Anchor()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def fresh(self) -> OuterStep:
        """The same step for one more run: it keeps copies of the weights, which two runs must not share."""
        found = copy.copy(self)
        found.centre = Anchor()
        return found

    def shares(self, values: FloatArray, healthy: NDArray[np.bool_]) -> FloatArray | None:
        """What each replica counts in the mean, by its loss or its gradient's norm; None for equal shares.

        Shares are 1 on average over the healthy replicas.
        """
        return None

    def squared_norm(self) -> float:
        """Of this rank's part of the last gradient, where it counts; NaN before any. Waits for the device."""
        return math.nan

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where a round starts, unless it is known; to be called before any optimizer step."""
        if self.keeps_centre and not self.centre.copies:
            self.centre.renew(parameters)

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that join in mid-run start from where they are."""
        if self.centre.copies:
            self.centre.add(parameters)

    def apply_(self, parameters: Sequence[Tensor]) -> None:
        """Move the parameters, which are at the mean, on to where the next round starts."""

    def pull_(self, parameters: Sequence[Tensor], own: Sequence[Tensor], num_replicas: int) -> None:
        """For one that leaves replicas apart: from the mean to where each belongs; ``own``: where it came from."""
        raise NotImplementedError

    def restart(self, parameters: Sequence[Tensor]) -> None:
        """After a rollback: the round starts from ``parameters``, at rest."""
        if self.centre.copies:
            self.centre.renew(parameters)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The centre comes back after the block, in which replicas may meet."""
        differ_from = self.centre.differ_from
        try:
            yield
        finally:
            self.centre.differ_from = differ_from

    # -- state --------------------------------------------------------------------------------------------------

    def copies(self, parameters: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """By name, what it keeps; before a run has begun, what it would, to read a checkpoint into."""
        centre = self.centre.copies
        if self.keeps_centre and not centre:
            centre = [local_tensor(p) for p in parameters]
        return {"centre": centre, "velocity": []}

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Sharded as the parameters are."""
        found = self.copies(parameters)
        return {name: [as_saved(t, p) for t, p in zip(each, parameters, strict=False)] for name, each in found.items()}

    def check_state(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """ValueError or KeyError where a state cannot be used."""
        check_outer_state(state, parameters)

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Continue from a state that has been checked."""
        self.centre.copies = []
        if self.keeps_centre and state["centre"]:
            self.begin(parameters)
            for name, mine in self.copies(parameters).items():
                for copied, value, p in zip(mine, state[name], parameters, strict=False):  # there may be no velocity
                    copied.copy_(own_part(value, p).detach())


class Mean(OuterStep):
    """Eq. 3: to the mean of the replicas, and no further."""


class Fittest(OuterStep):
    """To the mean by softmax of the replicas' losses, in units of 2% of the lowest loss.

    Replicas which are plainly worse do not count.
    """

    by_loss = True

    def shares(self, values: FloatArray, healthy: NDArray[np.bool_]) -> FloatArray | None:
        finite = np.isfinite(values) & healthy
        if finite.sum() < 2:
            return None
        least = float(values[finite].min())
        unit = FITTEST * abs(least)
        scores = np.zeros(len(values))
        scores[finite] = np.exp((least - values[finite]) / unit) if unit > 0 else 1.0
        found: FloatArray = scores * healthy.sum() / scores.sum()
        return found


class Grawa(OuterStep):
    r"""GRAWA: to the mean by the inverse of the replicas' gradient norms, so that flat places count more.

    .. math:: \theta \leftarrow \sum_r w_r \theta_r, \quad w_r \propto 1 / \lVert g_r \rVert

    g_r is the gradient of replica r in the last step of the round, over all parameters, as the optimizer receives it:
    where gradients are clipped, all that are count the same. A replica whose norm is not known or not finite has weight
    0. In the paper of Dimlioglu and Choromanska (2024) replicas are pulled towards this mean; here they go to it.
    """

    by_gradient = True

    def __init__(self) -> None:
        super().__init__()
        self._squares: Tensor | None = None

    def fresh(self) -> Grawa:
        return Grawa()

    def begin(self, parameters: Sequence[Tensor]) -> None:
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        if gradients:  # at the end of a round, zero_grad() may have come first
            self._squares = squares([g.coalesce().values() if g.is_sparse else g for g in gradients]).sum()

    def squared_norm(self) -> float:
        return math.nan if self._squares is None else float(self._squares)

    def shares(self, values: FloatArray, healthy: NDArray[np.bool_]) -> FloatArray | None:
        known = np.isfinite(values) & healthy
        if not known.any():
            return None
        least = float(values[known].min())
        scores = np.zeros(len(values))
        # A norm of 0 is the limit: what has one counts alone.
        scores[known] = least / values[known] if least > 0 else values[known] == 0
        found: FloatArray = scores * healthy.sum() / scores.sum()
        return found


class Nesterov(OuterStep):
    r"""DiLoCo's outer optimizer. With c the centre of the last converge, the displacement is a gradient.

    .. math:: d = c - \bar\theta, \quad v \leftarrow \mu v + d, \quad \theta \leftarrow c - \eta (d + \mu v)

    With momentum 0 and learning rate 1 that is the mean, to the last bit. It keeps two copies of the weights, c and v.

    Args:
        lr: eta > 0.
        momentum: mu in [0, 1).
    """

    keeps_centre = True

    def __init__(self, *, lr: float = 0.7, momentum: float = 0.9) -> None:
        require(number(lr) > 0, "lr", "a finite number > 0", lr, of=" of the outer step")
        require(0 <= number(momentum) < 1, "momentum", "in [0, 1)", momentum, of=" of the outer step")
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.velocity: list[Tensor] = []

    def __repr__(self) -> str:
        return f"Nesterov(lr={self.lr!r}, momentum={self.momentum!r})"

    def fresh(self) -> Nesterov:
        return Nesterov(lr=self.lr, momentum=self.momentum)

    def _rest(self) -> None:
        """What has no velocity yet has none."""
        self.velocity += [torch.zeros_like(copied) for copied in self.centre.copies[len(self.velocity) :]]

    def begin(self, parameters: Sequence[Tensor]) -> None:
        super().begin(parameters)
        self._rest()

    def add(self, parameters: Sequence[Tensor]) -> None:
        super().add(parameters)
        self._rest()

    @torch.no_grad()
    def apply_(self, parameters: Sequence[Tensor]) -> None:
        for centre, velocity, parameter in zip(self.centre.copies, self.velocity, parameters, strict=True):
            p = local_tensor(parameter)
            if p.is_floating_point() or p.is_complex():
                displacement = centre - p
                velocity.mul_(self.momentum).add_(displacement)
                # c - lr (d + mu v), written from the mean so that lr = 1, mu = 0 changes nothing.
                p.add_(displacement, alpha=1 - self.lr).sub_(velocity, alpha=self.lr * self.momentum)
        self.centre.renew(parameters)

    @torch.no_grad()
    def restart(self, parameters: Sequence[Tensor]) -> None:
        super().restart(parameters)
        for velocity in self.velocity:
            velocity.zero_()

    def copies(self, parameters: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        found = super().copies(parameters)
        velocity = self.velocity if self.centre.copies else [torch.zeros_like(t) for t in found["centre"]]
        return {**found, "velocity": velocity}

    def check_state(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        found = check_outer_state(state, parameters)
        if found["centre"] and not found["velocity"]:
            raise ValueError("the outer step's velocity must have the parameters' shapes; it is of another model")

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        self.velocity = []
        super().load_state_dict(state, parameters)


class Elastic(OuterStep):
    r"""EASGD. Replicas stay apart; at a converge they and a centre c, which is the model, are drawn towards each other.

    .. math:: \theta_r \leftarrow \theta_r - \frac{\beta}{N} (\theta_r - c), \quad
        c \leftarrow c + \beta (\bar\theta - c)

    with c of before on both sides. Where all have to be at one place they meet at the new c: at the end of a run, where
    a mean is asked for in mid-round, and in a round that leaves a replica out. It keeps one copy of the weights, c.

    Args:
        pull: beta in (0, 1].
    """

    leaves_apart = True
    keeps_centre = True

    def __init__(self, *, pull: float = 0.9) -> None:
        require(0 < number(pull) <= 1, "pull", "in (0, 1]", pull, of=" of the outer step")
        super().__init__()
        self.pull = pull

    def __repr__(self) -> str:
        return f"Elastic(pull={self.pull!r})"

    def apply_(self, parameters: Sequence[Tensor]) -> None:
        self.pull_(parameters, (), 1)

    @torch.no_grad()
    def pull_(self, parameters: Sequence[Tensor], own: Sequence[Tensor], num_replicas: int) -> None:
        """The centre moves, and so do the parameters: to it, or from ``own`` to where they belong."""
        for index, (centre, p) in enumerate(zip(self.centre.copies, parameters, strict=True)):
            if p.is_floating_point() or p.is_complex():
                place = torch.lerp(own[index], centre, self.pull / num_replicas) if own else None
                centre.copy_(torch.lerp(centre, p, self.pull))
                p.copy_(centre if place is None else place)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        before = [copied.clone() for copied in self.centre.copies]
        with super().set_aside():
            try:
                yield
            finally:
                for copied, value in zip(self.centre.copies, before, strict=False):
                    copied.copy_(value)


_NAMES: dict[OuterName, type[OuterStep]] = {
    "mean": Mean,
    "fittest": Fittest,
    "grawa": Grawa,
    "nesterov": Nesterov,
    "elastic": Elastic,
}


def outer_step(given: OuterStep | OuterName) -> OuterStep:
    """An outer step for one run, of a step or its name."""
    if isinstance(given, OuterStep):
        return given.fresh()
    require_one_of("outer", given, *_NAMES)
    return _NAMES[given]()
