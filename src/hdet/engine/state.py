"""The state of a round loop as plain types: made, and checked whole before anything is changed by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hdet.checks import LARGEST, FloatArray, flag_of, mapping_of, numbers_of, shown, whole_of
from hdet.replicas.group import Replicas
from hdet.signals.base import Signal
from hdet.weights.saved import tensors_of

LOSSES = ("totals", "weights", "num_updates")


class SavedRound(NamedTuple):
    """What a saved state says about a round, for one replica.

    Attributes:
        num_ranks: replicas it was saved with.
        losses: everyone's losses so far, their weights and their optimizer steps, shape (3, N); None where they are not
            known, or were another number's.
        total, weight, num_updates: this replica's part of them.
        anchor: this rank's part of the anchor, or nothing.
        signals: the state of each signal by its name.
        joined: of each param group that joined in mid-run, its share of the first one's learning rate.
        left_at_mean: whether the weights were left at the mean.
    """

    num_ranks: int
    losses: FloatArray | None
    total: float
    weight: float
    num_updates: int
    anchor: list[Tensor]
    signals: Mapping[str, Mapping[str, Any]]
    joined: list[float]
    left_at_mean: bool


def pack_losses(losses: FloatArray | None) -> dict[str, list[float]]:
    """The losses of an unfinished round by name; empty lists where there are none."""
    rows = losses if losses is not None else np.empty((len(LOSSES), 0))
    return dict(zip(LOSSES, rows.tolist(), strict=True))


def read_round(
    state: Any, replicas: Replicas, parameters: Sequence[Tensor], signals: Sequence[Signal], *, updates_alike: bool
) -> SavedRound:
    """The round of a saved state; ValueError or KeyError where it cannot be used."""
    state = mapping_of(state, "rounds")
    num_ranks = whole_of(state["num_ranks"], "num_ranks", 1)
    whole_of(state["num_replicas"], "num_replicas", 1)
    losses = _unpack_losses(state["losses"], num_ranks) if num_ranks == replicas.count else None
    total = weight = 0.0
    num_updates = 0
    if losses is not None:
        if updates_alike and len(set(losses[2])) > 1:
            raise ValueError(f"num_updates must be alike where gradients are shared, but got {losses[2].tolist()}")
        total, weight = (losses[:2, replicas.index] / replicas.num_parts).tolist()
        num_updates = int(losses[2, replicas.index])
    return SavedRound(
        num_ranks,
        losses,
        total,
        weight,
        num_updates,
        tensors_of(state["anchor"], parameters, "anchor", "the shapes of the optimizer's parameters"),
        _signals_of(state["signals"], signals),
        joined_of(state),
        flag_of(state["left_at_mean"], "left_at_mean"),
    )


def _signals_of(saved: Any, signals: Sequence[Signal]) -> dict[str, Mapping[str, Any]]:
    """Of each signal that a state has something for; the others of this run start afresh."""
    found = mapping_of(saved, "signals")
    states = {s.name: mapping_of(found[s.name], f"signals[{s.name!r}]") for s in signals if s.name in found}
    for signal in signals:
        if signal.name in states:
            signal.check_state(states[signal.name])
    return states


def joined_of(state: Any) -> list[float]:
    """For each param group of a saved state that had joined in mid-run, its share of the first one's learning rate."""
    saved = mapping_of(state, "rounds").get("joined", [])  # older states have none
    joined: list[float] = numbers_of(saved, "joined", None, low=0, high=1e100).tolist()
    return joined


def _unpack_losses(packed: Any, num_ranks: int) -> FloatArray | None:
    """The losses of an unfinished round, by replica; None where there are none."""
    if packed is None:
        return None
    saved: Mapping[str, Any] = mapping_of(packed, "losses")
    # A loss may have been NaN or infinite. The rest is counted.
    totals = numbers_of(saved["totals"], "totals of the losses", None, finite=False)
    weights = numbers_of(saved["weights"], "weights of the losses", None, low=0)
    num_updates = numbers_of(saved["num_updates"], "num_updates of the losses", None, low=0, high=LARGEST)
    if not len(totals):
        return None
    if {len(totals), len(weights), len(num_updates)} != {num_ranks}:
        raise ValueError(f"losses must hold one entry for each of {num_ranks} replicas, but got {shown(packed)}")
    if (num_updates % 1).any():
        raise ValueError(f"num_updates of the losses must be integers, but got {shown(packed)}")
    return np.stack([totals, weights, num_updates])


def refuse_copy(reasons: Mapping[str, bool]) -> None:
    """Raise where any of these holds: something outside scheduler, optimizer and model belongs to the run."""
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        raise TypeError(
            f"a scheduler that {' and '.join(why)} must not be copied or pickled: the copy would reach into the "
            "model of the original; make a new one, and give it the state: load_state_dict(old.state_dict())"
        )
