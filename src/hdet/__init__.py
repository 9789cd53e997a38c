"""HDET: stop sweeping the learning rate. Schedulers that find it inside the one run that you train."""

from hdet import knobs
from hdet.found import Found
from hdet.history import RoundRecord
from hdet.options import Adapt, Averaging, Copies, Faults
from hdet.schedulers import AutoLR, OneCycleAutoLR
from hdet.schedulers.explorer import Explorer
from hdet.warm_start import warm_noisy_init

__all__ = [
    "Adapt",
    "AutoLR",
    "Averaging",
    "Copies",
    "Explorer",
    "Faults",
    "Found",
    "OneCycleAutoLR",
    "RoundRecord",
    "knobs",
    "warm_noisy_init",
]
__version__ = "0.1.0"
