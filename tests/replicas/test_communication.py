"""HDET sends what it says: bytes on the wire, counted by the kernel, against data-parallel training."""

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
from torch.optim.lr_scheduler import ConstantLR

from hdet import AutoLR, Averaging, Explorer, OneCycleAutoLR
from job import launch
from tiers import slow

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is read as Linux lays it out")

STEPS, INTERVAL, WIDTH = 8, 2, 500


def _bytes_sent() -> dict[str, int]:
    """What others have acknowledged, by TCP connection of this process."""
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not (link := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                sent[link] = int(struct.unpack_from("Q", info, 120)[0])  # tcpi_bytes_acked
    return sent


def _bytes_since(before: dict[str, int]) -> int:
    """Connections that were closed meanwhile do not count: those of earlier groups may be, at any time."""
    return sum(now - before.get(link, 0) for link, now in _bytes_sent().items())


def _train(mode: str, steps: int = STEPS) -> int:
    """Bytes this rank sends in ``steps`` steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if mode == "moments" else 0.0)
    scheduler: Explorer | OneCycleAutoLR | AutoLR | None = None
    if mode in ("local", "moments"):
        averaging = Averaging(optimizer_state="average" if mode == "moments" else "keep")
        scheduler = Explorer(model, optimizer, interval=INTERVAL, gradients="local", averaging=averaging)
    elif mode == "spread":
        options: dict[str, Any] = {"ensemble_lr_spread_ratio": 0.1, "cycle_momentum": False, "model": model}
        scheduler = OneCycleAutoLR(optimizer, 1e-3, 1000, model_sync_interval=INTERVAL, **options)
    elif mode == "gradient":
        scheduler = AutoLR(ConstantLR(optimizer), interval=INTERVAL, model=model)
    dist.barrier()
    before = _bytes_sent()
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(loss)
    dist.barrier()
    sent = _bytes_since(before)
    dist.barrier()  # a rank that ends closes its connections, those of the others too
    return sent


def _all_modes() -> dict[str, int]:
    _train("shared", steps=2)  # connections are made, and buckets sized, on first use
    return {mode: _train(mode) for mode in ("shared", "spread", "gradient", "local", "moments")}


@pytest.mark.parametrize("num_replicas", [2, *(slow(n) for n in (4, 8))])
def test_what_is_sent_is_what_the_guarantees_say(num_replicas: int) -> None:
    """In units of one all-reduce of the weights, over all ranks: 2 (N - 1) times their size."""
    results = launch(_all_modes, num_replicas, timeout_s=150)
    unit = 2 * (num_replicas - 1) * 4 * (WIDTH * WIDTH + WIDTH)
    sent = {mode: sum(result[mode] for result in results) / unit for mode in results[0]}
    assert sent["shared"] == pytest.approx(STEPS, rel=0.03)  # the counter counts
    assert sent["spread"] == pytest.approx(STEPS + STEPS / INTERVAL, rel=0.03)
    assert sent["gradient"] == pytest.approx(STEPS, rel=0.03)
    assert sent["local"] == pytest.approx(STEPS / INTERVAL, rel=0.05)
    assert sent["moments"] == pytest.approx(2 * STEPS / INTERVAL, rel=0.05)  # of SGD there is one


def _small_talk() -> int:
    """Bytes a round's end sends beside the weights, with the gradient signal, which averages none."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-3)
    scheduler = AutoLR(ConstantLR(optimizer), interval=1)
    for _ in range(2):
        optimizer.step()
        scheduler.step(1.0)
    dist.barrier()
    before = _bytes_sent()
    for _ in range(40):
        optimizer.step()
        scheduler.step(1.0)
    sent = _bytes_since(before) // 40
    dist.barrier()
    return sent


def test_the_end_of_a_round_sends_little_beside_the_weights() -> None:
    assert max(launch(_small_talk, 4)) < 5120
