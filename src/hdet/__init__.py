"""HDET: data-parallel training whose replicas disagree about the learning rate on purpose, and learn from it."""

from hdet.history import RoundRecord
from hdet.schedulers import AutoLR, OneCycleAutoLR
from hdet.warm_start import warm_noisy_init

__all__ = ["AutoLR", "OneCycleAutoLR", "RoundRecord", "warm_noisy_init"]
__version__ = "0.1.0"
