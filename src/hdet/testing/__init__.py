"""For tests of your own: controllers and signals that keep the contract, and training scripts that survive faults."""

from __future__ import annotations

from hdet.launch import ReplicaError, launch
from hdet.testing.controllers import check_controller
from hdet.testing.faults import Fault, InjectedError, Injector, assert_same_weights, collect_weights
from hdet.testing.signals import check_signal

__all__ = [
    "Fault",
    "InjectedError",
    "Injector",
    "ReplicaError",
    "assert_same_weights",
    "check_controller",
    "check_signal",
    "collect_weights",
    "launch",
]
