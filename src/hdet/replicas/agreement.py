"""What replicas exchange when a round ends, and why they might not go on together."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hdet.checks import BoolArray, FloatArray
from hdet.replicas.group import Replicas


class Report(NamedTuple):
    """One replica's facts at the end of a round, or when asked in its middle.

    Attributes:
        step: optimizer steps it has taken.
        total, weight: weighted sum of its losses, and the weights'.
        finite: whether its weights are.
        shapes, state: digests of what it would average, and of where its scheduler stands.
        num_updates: calls of its optimizer in this round; 0 where they are not counted.
        asked: whether it was called for, by converge(), converged() or finish(), instead of ending a round.
        frozen: whether it was told to hold its scale.
        evaluation, num_evaluations: sum of the validation losses that it was given since, and how many.
        whole, part, place: the :class:`~hdet.replicas.fork.Checksum` of its weights; zeros where none is taken.
    """

    step: int
    total: float
    weight: float
    finite: bool
    shapes: int
    state: int
    num_updates: int = 0
    asked: bool = False
    frozen: bool = False
    evaluation: float = 0.0
    num_evaluations: float = 0.0
    whole: int = 0
    part: int = 0
    place: int = 0


class Reports(NamedTuple):
    """Everyone's facts, an entry for each replica.

    Attributes:
        totals, weights, losses: weighted sum of the losses, the weights' sum, and their quotient, NaN without any.
        finite: whose weights are finite.
        num_updates: calls of the optimizer.
        frozen: whether any was told to hold its scale.
        evaluation: the mean of the validation losses that any was given; NaN without.
        checksums: of the weights, a row for each process.
    """

    totals: FloatArray
    weights: FloatArray
    losses: FloatArray
    finite: BoolArray
    num_updates: FloatArray
    frozen: bool
    evaluation: float
    checksums: FloatArray


def exchange(
    replicas: Replicas,
    mine: Report,
    *,
    losses_required: bool,
    updates_alike: bool = False,
    num_steps: int | None = None,
) -> Reports:
    """Everyone's facts; an error on all replicas where they cannot go on together.

    Nothing has been changed when it raises. One small collective.
    """
    rows = replicas.gather([float(fact) for fact in mine], step=mine.step)
    found = dict(zip(Report._fields, np.moveaxis(rows, 2, 0), strict=True))  # by replica and part
    # What a replica's parts saw makes up what it saw. All must decide alike, or its shards no longer fit together.
    totals, weights = found["total"].sum(axis=1), found["weight"].sum(axis=1)
    steps, states, shapes = found["step"].flatten(), found["state"].flatten(), found["shapes"]
    if len(set(steps)) > 1:
        by_replica = [sorted({int(s) for s in parts}) for parts in found["step"]]
        listing = ", ".join(f"replica {r}: {' and '.join(map(str, all_))}" for r, all_ in enumerate(by_replica))
        asked = found["asked"].max(axis=1) > 0
        alone = (
            f"only replicas {np.flatnonzero(asked).tolist()} are in converge(), converged() or finish(), which must be "
            "called on every rank after the same step; "
        )
        raise RuntimeError(
            f"replicas must take the same number of steps between converges, but got {listing}; "
            f"{alone if asked.any() and not asked.all() else ''}"
            "check for uneven data or steps skipped on some ranks. No weights were averaged"
        )
    num_updates = found["num_updates"][:, 0]
    if updates_alike and len(set(found["num_updates"].flatten())) > 1:
        listing = ", ".join(f"replica {r}: {int(n)}" for r, n in enumerate(num_updates))
        raise RuntimeError(
            "replicas that share gradients must take the same optimizer steps, but in the round up to step "
            f"{mine.step} they took {listing}; never skip optimizer.step() on some ranks alone. Nothing was averaged"
        )
    # Fewer than the scheduler's is a GradScaler's business. More on some alone: they have left out scheduler.step().
    if num_steps is not None and num_updates.min() <= num_steps < num_updates.max():
        listing = ", ".join(f"replica {r}: {int(n)}" for r, n in enumerate(num_updates))
        raise RuntimeError(
            f"scheduler.step() must follow every optimizer step on all replicas, but in the {num_steps} steps up to "
            f"step {mine.step} their optimizers took {listing}; never skip it on some ranks alone. Nothing was averaged"
        )
    if (shapes != shapes[0]).any():  # parts of one replica may differ, those of two not
        raise RuntimeError(
            f"replicas must hold the same parameters, but their shapes differ at step {mine.step} (digest by replica: "
            f"{[int(s) for s in shapes.flatten()]}); add param groups and freeze parameters on all ranks alike"
        )
    if len(set(states)) > 1:
        raise RuntimeError(
            f"replicas must continue from the same scheduler state, but at step {mine.step} theirs differ (digest by "
            f"replica: {[int(d) for d in states]}); load the same state_dict on every rank"
        )
    if losses_required and not weights.all():
        raise RuntimeError(
            f"the controller needs a loss from every replica in every round, but replicas "
            f"{np.flatnonzero(weights == 0).tolist()} gave none up to step {mine.step}; "
            "call step(loss), or observe(loss) before a bare step()"
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        losses = totals / weights
    num_evaluations = float(found["num_evaluations"].sum())
    evaluation = float(found["evaluation"].sum()) / num_evaluations if num_evaluations else math.nan
    frozen, finite = bool(found["frozen"].any()), found["finite"].min(axis=1) > 0
    checksums = np.stack([found[name].flatten() for name in ("whole", "part", "place")], axis=1)
    return Reports(totals, weights, losses, finite, num_updates, frozen, evaluation, checksums)
