"""Launched processes are light: what the server they fork from has imported is not theirs to look through."""

from __future__ import annotations

import gc

from hdet.launch import launch


def _num_tracked() -> int:
    return len(gc.get_objects())


def test_what_was_imported_is_out_of_the_way_of_garbage_collections() -> None:
    gc.collect()
    (found,) = launch(_num_tracked, 1)
    assert found < 50_000  # torch alone makes several times as many
