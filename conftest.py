"""Settings for all tests."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from multiprocessing import forkserver

# Models this small only wait for each other on several threads, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest
from hypothesis import settings

from hdet.launch import preload, server

pytest_plugins = ["frameworks"]  # the fixture of all frameworks

# A launched process imports the module of its test and everything that needs: seconds, unless it is there already.
preload("pytest", "hypothesis", "hypothesis.strategies", "numpy.testing", "torch.distributed.fsdp")
preload("hdet_lab.commands.train", "torch.utils.tensorboard", "torch._dynamo.backends.debugging")
preload("torch.distributed.launcher.api")

FRAMEWORKS = {"test_examples", "test_lightning", "test_transformers"}
"""Whose processes import frameworks, which take as long as all the rest."""

# How long an example takes says more about a shared machine than about the code.
settings.register_profile("hdet", deadline=None, max_examples=30)
settings.load_profile("hdet")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what imports have made out of garbage collections, and of searches for a model: see ``hdet.frozen``."""
    files = {item.path.stem for item in session.items}
    if FRAMEWORKS & {item.path.stem for item in session.items if item.get_closest_marker("slow")}:
        preload("transformers.trainer", "lightning.pytorch")  # where they are installed
        server()
        forkserver.ensure_running()  # it imports while the first tests run, which do not wait for it
    if len(files) > 1:
        importlib.import_module("torch._dynamo")  # the first optimizer would, and is sure to come
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ranks of jobs are kept from one test to the next, not longer."""
    if "job" in sys.modules:
        sys.modules["job"].close()
