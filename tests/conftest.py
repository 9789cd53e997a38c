"""Settings for all tests."""

from __future__ import annotations

import gc
import os

# Models this small only wait for each other on several threads, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from hypothesis import settings

from hdet.launch import preload

pytest_plugins = ["stand_ins"]  # the fixture of all frameworks

# A launched process imports the module of its test and everything that needs: seconds, unless it is there already.
preload("pytest", "hypothesis", "hypothesis.strategies", "numpy.testing", "torch.distributed.fsdp")
preload("hdet.lab.commands.train", "torch.utils.tensorboard", "torch._dynamo.backends.debugging")

# How long an example takes says more about a shared machine than about the code.
settings.register_profile("hdet", deadline=None)
settings.load_profile("hdet")


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collections, and of searches for a model: see ``hdet.frozen``."""
    gc.collect()
    gc.freeze()
