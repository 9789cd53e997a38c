"""Learning-rate schedulers: what users construct and step."""

from hdet.schedulers.auto_lr import AutoLR
from hdet.schedulers.one_cycle import OneCycleAutoLR

__all__ = ["AutoLR", "OneCycleAutoLR"]
