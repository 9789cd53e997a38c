"""weight_decay="learn": when it can be had."""

from __future__ import annotations

from typing import Any, Literal

from hdet.checks import number, require
from hdet.schedulers._auto_settings import SignalName
from hdet.schedulers._common import Common
from hdet.signals.decay import DecayLearner
from hdet.signals.gradient import default_sample_every
from hdet.weights.anchor import Anchor

WeightDecayChoice = Literal["learn"] | tuple[float, float]


def check_decay(common: Common, signal: SignalName) -> None:
    """Raise where nothing could be learned about it."""
    given: Any = common.weight_decay
    if given is None:
        return
    fine = isinstance(given, (tuple, list)) and len(given) == 2 and 0 < number(given[0]) < number(given[1])
    require(given == "learn" or fine, "weight_decay", 'None, "learn" or a pair (low, high) with 0 < low < high', given)
    need = ""
    if common.probe is None:
        need = "probe=, a loss on held-out data: the training loss always asks for less"
    elif signal != "gradient":
        need = 'signal="gradient"; with the loss signal, pass knobs=[hdet.knobs.WeightDecay()]'
    elif common.knobs:
        need = "knobs= to be left out, which replicas explore; knobs.WeightDecay is one of them"
    elif common.gradients == "local":
        need = 'gradients="shared": replicas that train on their own have different derivatives'
    if need:
        raise ValueError(f"weight_decay={given!r} needs {need}")


def make_decay(common: Common, anchor: Anchor) -> DecayLearner | None:
    """What learns it; None where it stays as it is."""
    given = common.weight_decay
    if given is None:
        return None
    return DecayLearner(
        common.optimizer,
        bounds=None if given == "learn" else (float(given[0]), float(given[1])),
        stride=anchor.stride,
        every=min(default_sample_every(common.optimizer, common.interval), 8),
    )
