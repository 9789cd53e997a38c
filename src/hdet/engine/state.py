"""The state of a round loop as plain types, checked whole before anything is changed by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hdet.checks import FloatArray, flag_of, mapping_of, numbers_of, whole_of
from hdet.engine.tally import Tally
from hdet.policy.quarantine import QuarantineState, pack_quarantine
from hdet.policy.rollback import NO_ROLLBACK
from hdet.signals.base import Signal
from hdet.weights.anchor import Anchor
from hdet.weights.saved import tensors_of


class SavedRound(NamedTuple):
    """What a saved state says about a round, for one replica.

    Attributes:
        num_ranks: replicas it was saved with.
        losses: everyone's, as a :class:`Tally` keeps them.
        anchor: this rank's part of what this run's anchor holds, or nothing.
        signals: the state of each signal by its name.
        joined: of each param group that joined in mid-run, its share of the first one's learning rate.
    """

    num_ranks: int
    losses: FloatArray | None
    anchor: list[Tensor]
    signals: Mapping[str, Mapping[str, Any]]
    joined: list[float]


def read_round(
    state: Any, parameters: Sequence[Tensor], anchor: Anchor | None, signals: Sequence[Signal], tally: Tally
) -> SavedRound:
    """The round of a saved state; ValueError or KeyError where it cannot be used."""
    state = mapping_of(state, "rounds")
    num_ranks = whole_of(state["num_ranks"], "num_ranks", 1)
    whole_of(state["num_replicas"], "num_replicas", 1)
    flag_of(state["left_at_mean"], "left_at_mean")
    return SavedRound(
        num_ranks,
        tally.check_state(state["losses"], num_ranks),
        _anchor_of(state, parameters, anchor),
        _signals_of(state["signals"], signals),
        joined_of(state),
    )


def adopted(state: Mapping[str, Any], *, round_index: int, scale: float = 1.0) -> dict[str, Any]:
    """The state of a run that was trained without hdet so far, nothing known yet.

    ``state``: of the loop that is to continue it. ``scale``: of its learning rates.
    """
    zeros = [0.0] * len(state["scales"])
    num_knobs = len(state["panel"]["names"])
    return {
        **state,
        **NO_ROLLBACK,
        "round": round_index,
        "scales": [scale] * (len(zeros) - num_knobs) + [1.0] * num_knobs,
        "fallen": zeros, "first_level": scale, "warmup": 1.0, "level": None, "first_losses": [], "scheduled": 0.0,
        "searching": False, "searched": 0,
        "controller": {}, "panel": {**state["panel"], "controller": {}},
        "quarantine": pack_quarantine(QuarantineState()),
        "left_at_mean": False, "anchor": [],
        "curve": {"steps": [], "values": []},
        "losses": None, "signals": {}, "worse_since": None, "lowest": [],
    }  # fmt: skip


def _anchor_of(state: Mapping[str, Any], parameters: Sequence[Tensor], anchor: Anchor | None) -> list[Tensor]:
    """A whole anchor serves every run, one of a share of the entries only runs with the same share."""
    stride = whole_of(state.get("anchor_stride", 1), "anchor_stride", 1)  # older states have whole ones
    columns = Anchor(stride=stride).columns_of(parameters)
    found = tensors_of(state["anchor"], parameters, "anchor", "the shapes of the optimizer's parameters", columns)
    if anchor is None or not found or stride == anchor.stride:
        return found
    if stride > 1:
        mine = "all of them" if anchor.stride == 1 else f"1 in {anchor.stride}"
        raise ValueError(
            f"the anchor was saved with 1 in {stride} of its entries, and this run needs {mine}: construct the "
            f"scheduler with copies=Copies(anchor_share=1 / {stride}), or start from the weights without its state"
        )
    return anchor.kept(found, anchor.columns_of(parameters))


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
