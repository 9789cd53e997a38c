"""HDET: stop sweeping the learning rate. Schedulers that find it inside the one run that you train.

``AutoLR`` is the scheduler. ``hdet.ensemble``, for replicas that differ on purpose, is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hdet.auto_lr import AutoLR
from hdet.found import Found
from hdet.history import RoundRecord
from hdet.options import Adapt, Copies, Faults

if TYPE_CHECKING:
    from hdet.ensemble import Averaging, Ensemble, Explorer, OneCycleAutoLR, knobs, warm_noisy_init

__all__ = [
    "Adapt",
    "AutoLR",
    "Averaging",
    "Copies",
    "Ensemble",
    "Explorer",
    "Faults",
    "Found",
    "OneCycleAutoLR",
    "RoundRecord",
    "knobs",
    "warm_noisy_init",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        found = globals()[name] = getattr(import_module("hdet.ensemble"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
