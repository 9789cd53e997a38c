"""Local gradients send what they say: bytes on the wire, counted by the kernel, against data-parallel training."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet import Explorer
from hdet.launch import launch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is read as Linux lays it out")

STEPS, INTERVAL, WIDTH = 20, 10, 1000


def _bytes_sent() -> int:
    """What others have acknowledged, over every TCP connection of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total


def _train(*, local: bool, steps: int = STEPS) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    explorer = Explorer(model, optimizer, interval=INTERVAL, gradients="local") if local else None
    dist.barrier()
    before = _bytes_sent()
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if explorer is not None:
            explorer.step(loss)
    dist.barrier()
    return {"bytes": _bytes_sent() - before, "parameters": sum(p.numel() for p in model.parameters())}


def _both() -> list[dict[str, Any]]:
    _train(local=False, steps=2)  # connections are made, and buckets sized, on first use
    return [_train(local=False), _train(local=True)]


def test_local_gradients_cut_communication_by_the_interval() -> None:
    for shared, local in launch(_both, 2):
        weights = 4 * shared["parameters"]
        assert weights > 4_000_000
        assert shared["bytes"] == pytest.approx(STEPS * weights, rel=0.05)  # the counter counts
        assert local["bytes"] / shared["bytes"] * INTERVAL == pytest.approx(1, rel=0.05)
