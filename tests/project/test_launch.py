"""Launched processes are light: what the server they fork from has imported is not theirs to look through."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hdet.launch import launch, server


def _num_tracked() -> int:
    return len(gc.get_objects())


def test_what_was_imported_is_out_of_the_way_of_garbage_collections() -> None:
    gc.collect()
    (found,) = launch(_num_tracked, 1)
    assert found < 50_000  # torch alone makes several times as many


def _stay(path: str) -> None:
    Path(f"{path}{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def _begin(path: str) -> None:
    launch(_stay, 2, path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks /proc who is there")
def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    parent = server().Process(target=_begin, args=(f"{tmp_path}/rank",))
    parent.start()
    deadline = time.monotonic() + 60
    while len(found := [path.read_text() for path in tmp_path.iterdir()]) < 2 or not all(found):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.join()
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.1)
