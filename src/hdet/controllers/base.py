"""The contract of a controller: state and one round's evidence in, state and a decision out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from hdet.checks import FloatArray, numbers_of, shown


class Evidence(NamedTuple):
    """What one round showed.

    Attributes:
        losses: mean loss of each replica, shape (N,). NaN or infinite where a replica has none that counts.
        multipliers: what each knob (row) was multiplied by on each replica (column), shape (K, N).
        slopes: derivative of the loss over the logarithm of each knob, and its standard error, both of shape (K,),
            where the signal measures it directly; NaN where it could not.
        in_warmup: whether the schedule's own warm-up has raised the learning rates in this round: nothing else should.
        elapsed: by how much the logarithm of the time since the start has grown in this round.
        start: mean loss before training, and the standard error of its difference from the losses of a round; None
            where no losses are known.
        update: size of an update, relative to that of the weights, over the model's allowance and what a step of a
            short run has to do more (Eq. 16); None where it was not measured.
        ease: what the update is to be multiplied by where a larger one surely costs little: it has the allowance of a
            small model then (Eq. 17).
        level: what the scales started from.
        given: the scale that progress alone leads up to, where that of 1 is a schedule which somebody has chosen, and
            which is not far below the first level; infinite where it is none.
        usual: the scale that progress alone leads up to for models of this size, more where updates have become small;
            infinite where none is known.
        further: how many times further it leads where noise surely costs nothing, as in long runs of large models.
        shrinks: 1 where updates shrink as noise averages out, as Adam's; 0 where all are of one size, as Lion's.
        decay: what a line from where the rate is to zero, at the end of the run, takes off its logarithm in this round;
            0 where the schedule is somebody's or the end is not known.
        progress: share of the time in which base values may move that has passed; None where its length is unknown.
        whole: slope over the logarithm of all knobs at once, and its standard error, where that was measured.
        scales: where each knob's learned scale stands, shape (K,).
        trained: mean training loss of each replica, shape (N,), beside ``losses`` on held-out data; NaN where it has
            none.
        values: base value of each knob in the round's last step, shape (K,); None where it is not known.
        last: whether training ends here, so that nothing will be trained with the decision.
    """

    losses: FloatArray
    multipliers: FloatArray
    slopes: tuple[FloatArray, FloatArray] | None = None
    in_warmup: bool = False
    elapsed: float = 0.0
    start: tuple[float, float] | None = None
    update: float | None = None
    ease: float = 1.0
    level: float = 1.0
    given: float = math.inf
    usual: float = math.inf
    further: float = 1.0
    shrinks: float = 1.0
    decay: float = 0.0
    progress: float | None = None
    whole: tuple[float, float] | None = None
    scales: FloatArray | None = None
    trained: FloatArray | None = None
    values: FloatArray | None = None
    last: bool = False


class Decision(NamedTuple):
    """What a controller decides.

    Attributes:
        factors: what to multiply each knob's base value by, shape (K,). Positive and finite.
        info: named numbers for the history.
    """

    factors: FloatArray
    info: Mapping[str, tuple[float, ...]]


class Controller(Protocol):
    """A pure function of its state and the evidence; the state is a NamedTuple of arrays.

    It may also have ``check_state(state)``, which raises ValueError for a loaded state it could not have made, and
    ``insert(index)``, which makes room where it has settings for each knob and one joins, and ``forget(state)``, which
    keeps what is still true after a round was undone; without it the state starts afresh. With ``widths(state)``, what
    the spreads of a panel's knobs are multiplied by, replicas stand over a window that is moved inside the bounds.
    """

    def init(self, num_knobs: int) -> Any: ...

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]: ...


def grown(controller: Controller, state: Any, num_knobs: int, index: int) -> Any:
    """The state with room for one more knob at ``index``, of which nothing is known yet."""
    insert: Any = getattr(controller, "insert", None)
    if insert is not None:
        insert(index)
    rows = [k for k in range(num_knobs) if k != index]
    arrays = {}
    for name, value in controller.init(num_knobs)._asdict().items():
        old = getattr(state, name)
        places = [rows if n == m + 1 else range(m) for n, m in zip(value.shape, old.shape, strict=True)]
        value[np.ix_(*places)] = old
        arrays[name] = value
    return type(state)(**arrays)


def pack_state(state: Any) -> dict[str, list[float]]:
    """A controller's state as plain types."""
    return {name: value.tolist() for name, value in state._asdict().items()}


def unpack_state(packed: Mapping[str, Any], like: Any) -> Any:
    """The inverse of :func:`pack_state`; ``like`` is a fresh state of the same controller."""
    if set(packed) != set(like._fields):
        raise ValueError(
            f"controller state must have the fields {sorted(like._fields)}, but got {shown(list(packed))}; "
            "the checkpoint was made with another controller"
        )
    arrays = {}
    for name, template in like._asdict().items():
        try:
            arrays[name] = numbers_of(packed[name], name, *template.shape, low=-1e150, high=1e150)
        except ValueError:
            raise ValueError(
                f"controller state {name!r} must be finite numbers of shape {template.shape}, but got "
                f"{shown(packed[name])}"
            ) from None
    return type(like)(**arrays)
