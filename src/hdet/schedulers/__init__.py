"""Learning-rate schedulers: thin faces of the round loop."""

from hdet.schedulers.auto_lr import AutoLR
from hdet.schedulers.one_cycle import OneCycleAutoLR

__all__ = ["AutoLR", "OneCycleAutoLR"]
