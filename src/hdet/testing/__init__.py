"""For tests of your own: controllers that keep the contract, and training scripts that survive faults."""

from __future__ import annotations

from hdet.launch import ReplicaError, launch
from hdet.testing.controllers import check_controller
from hdet.testing.faults import Fault, InjectedError, Injector, assert_same_weights, collect_weights

__all__ = [
    "Fault",
    "InjectedError",
    "Injector",
    "ReplicaError",
    "assert_same_weights",
    "check_controller",
    "collect_weights",
    "launch",
]
