"""Settings for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from hdet.launch import preload

# A launched process imports the module of its test and everything that needs: seconds, unless it is there already.
preload("pytest", "hypothesis", "hypothesis.strategies", "numpy.testing", "torch.distributed.fsdp")
preload("hdet.lab.commands.train", "torch.utils.tensorboard")

# How long an example takes says more about a shared machine than about the code.
settings.register_profile("hdet", deadline=None)
settings.load_profile("hdet")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other on several threads. With ``pytest.mark.usefixtures``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
