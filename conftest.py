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
import torch
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


OLD_TORCH = {
    "SequentialLR of torch before 2.9 calls step(0) of its parts, and warns of that": (
        "gradient, warm-up then cosine]", "test_inside_sequentiallr", "test_sequentiallr_resumes", "test_row_17",
        "test_a_state_as_it_was_is_loaded",
    ),
    "before torch 2.9, learning rates that are tensors are shared with what get_last_lr returns": (
        "test_learning_rates_that_are_tensors_stay", "is_onecyclelr[train, sgd, tensors]", "SequentialLR-tensor]",
        "is_onecyclelr[train, adamw]", "is_onecyclelr[continue", "test_without_a_spread_it_is_onecyclelr_in_a_process",
    ),
    "before torch 2.9, FSDP2 does not run on the CPU, and DistributedDataParallel has no init_sync": (
        "test_each_rank_keeps_its_own[fsdp]", "test_ranks_start_again_together[fsdp]", "test_what_shards_have",
        "test_copies_of_a_shard", "test_a_shard_is_repaired", "test_sharded_parameters_train", "test_one_broken_rank",
        "test_no_fork_where",
        "test_parallel_training_reads", "test_ddp_and_sharded_parameters",
    ),
    "before torch 2.9, Adam has no decoupled_weight_decay": ("test_where_decay_is_applied",),
    "other kernels, and other random numbers": ("test_trajectories", "a fall that renews the anchor]"),
    "before torch 2.9, one more call and one more operation": (
        "test_a_step_between_rounds_calls_little[one_cycle]", "test_a_loss_on_a_device_is_one_operation",
    ),
    "before torch 2.9, gloo keeps the time limit that a group was made with": ("test_out_of_step",),
}  # fmt: skip
"""What tests cannot show on torch 2.6 to 2.8, by the reason."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a newer torch."""
    if hasattr(torch.optim.lr_scheduler.LRScheduler, "_update_lr"):
        return
    for item in items:
        for reason, names in OLD_TORCH.items():
            if any(name in item.nodeid for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Likewise what the tests of a file have imported: the next ones need not search it either."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ranks of jobs are kept from one test to the next, not longer."""
    if "job" in sys.modules:
        sys.modules["job"].close()
