"""Knobs: the scalars that replicas explore, where each is written, and in which space it spreads and moves.

A knob stands at a *position*, 0 where it starts, counted in units of its space: natural logarithms (``log``), log-odds
(``logit``), or widths of its range (``linear``). Spread, multipliers and controllers see positions only.
"""

from hdet.ensemble.knobs.base import Knob
from hdet.ensemble.knobs.model import Attribute, Dropout, LabelSmoothing, Temperature
from hdet.ensemble.knobs.update import Beta2, ClipNorm, Epsilon, LearningRate, Momentum, WeightDecay

__all__ = [
    "Attribute",
    "Beta2",
    "ClipNorm",
    "Dropout",
    "Epsilon",
    "Knob",
    "LabelSmoothing",
    "LearningRate",
    "Momentum",
    "Temperature",
    "WeightDecay",
]
