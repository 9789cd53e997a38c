"""What HDET costs, on paper: seconds of a round's end, their share of the time, bytes sent, memory. Pure functions.

A collective of S bytes takes ``latency + S / bandwidth``, and so does a message over a link. ``hdet plan`` makes the
line of an all-reduce from those of links; ``hdet doctor`` measures it, and compares what follows with a real round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from hdet.replicas.agreement import Note
from hdet.replicas.average import BUCKET_BYTES
from hdet.signals.gradient import MAX_SAMPLES, sample_every
from hdet.weights.anchor import CHUNK_ELEMENTS
from hdet.weights.columns import LARGE_MODEL_STRIDE
from hdet.weights.size import LARGE_MODEL

Method = Literal["paper", "loss", "gradient"]

SUM_BYTES = 4
"""Weights of any lower precision are summed, and so sent, in float32."""

# Passes over the weights, each a read or a write of all of them.
CONVERGE_PASSES = 9  # finite? 1; pack 2; displacement 3; its norm 1; the mean 2
PLACE_PASSES = 5  # Eq. 11: the point between anchor and mean 3, written back 2
KEEP_PASSES = 6  # a copy to roll back to, of the weights and Adam's two moments, beside them
SAMPLE_PASSES = 5  # theta - A 3, its product with the gradient 2
STEP_PASSES = 10  # forward 1, backward 2, Adam 7: what no step can do without


class Line(NamedTuple):
    """``latency_s + bytes / bytes_per_s``: seconds of a message over a link, or of a collective over many."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float, num_calls: int = 1) -> float:
        """Of ``num_bytes`` in ``num_calls`` portions."""
        return num_calls * self.latency_s + num_bytes / self.bytes_per_s


class Setting(NamedTuple):
    """What a prediction depends on.

    Attributes:
        num_parameters: of one rank; with sharded replicas its shard.
        dtype_bytes: of one parameter.
        num_replicas: N.
        all_reduce: over the replicas.
        memory_bytes_per_s: how fast a rank reads or writes its own memory.
        host_s: of Python at the end of a round, while the device waits.
        host_bytes_per_s: how fast a rank copies to the host's memory, where a large model keeps what it can go back to;
            None where all is kept beside the weights.
    """

    num_parameters: float
    dtype_bytes: int
    num_replicas: int
    all_reduce: Line
    memory_bytes_per_s: float
    host_s: float = 0.0
    host_bytes_per_s: float | None = None

    @property
    def keeps_on_host(self) -> bool:
        return self.host_bytes_per_s is not None and self.num_parameters > LARGE_MODEL

    @property
    def anchor_share(self) -> float:
        """Of the entries that the gradient signal's anchor holds."""
        return 1 / LARGE_MODEL_STRIDE if self.num_parameters > LARGE_MODEL else 1.0

    def passes_s(self, num_passes: float) -> float:
        return num_passes * self.num_parameters * self.dtype_bytes / self.memory_bytes_per_s

    def gather_s(self, num_values: int) -> float:
        """Everyone's ``num_values`` of 8 bytes, on everyone: the second half of an all-reduce of all of them."""
        return self.all_reduce.seconds(8 * num_values * self.num_replicas) / 2 if self.num_replicas > 1 else 0.0


class RoundCost(NamedTuple):
    """Seconds that a round costs beside its steps, by cause.

    Attributes:
        wire_s: weights on their way.
        latency_s: of the buckets that they are sent in.
        notes_s: steps, losses, health, distances and samples exchanged.
        memory_s: passes over this rank's own memory when the round ends.
        host_s: Python.
        samples_s: passes of the gradient signal, in steps of the round.
    """

    wire_s: float
    latency_s: float
    notes_s: float
    memory_s: float
    host_s: float
    samples_s: float

    @property
    def end_s(self) -> float:
        """What the end of the round takes."""
        return sum(self[:-1])


# -- collectives ----------------------------------------------------------------------------------------------


def ring(num_replicas: int, link: Line) -> Line:
    """An all-reduce around a ring: 2(N-1) steps, in each of which everyone passes one N-th of the bytes on."""
    steps = 2 * (num_replicas - 1)
    return Line(steps * link.latency_s, link.bytes_per_s * num_replicas / steps if steps else math.inf)


def flat_ring(num_replicas: int, node_size: int, inside: Line, across: Line) -> Line:
    """One ring over all nodes: its slowest link sets the pace."""
    slowest = Line(max(inside.latency_s, across.latency_s), min(inside.bytes_per_s, across.bytes_per_s))
    return ring(num_replicas, inside if num_replicas <= node_size else slowest)


def hierarchical(num_replicas: int, node_size: int, inside: Line, across: Line) -> Line:
    """Reduce-scatter inside nodes, all-reduce of each part across them, all-gather inside; full nodes."""
    node = min(num_replicas, node_size)
    within, between = ring(node, inside), ring(math.ceil(num_replicas / node), across)
    seconds_per_byte = 1 / within.bytes_per_s + 1 / (node * between.bytes_per_s)
    return Line(within.latency_s + between.latency_s, 1 / seconds_per_byte if seconds_per_byte else math.inf)


def sent_bytes(num_bytes: float, num_replicas: int) -> float:
    """What each replica sends in an all-reduce, by either algorithm."""
    return 2 * (num_replicas - 1) / num_replicas * num_bytes


def fit(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least relative errors; neither latency nor bandwidth is negative."""
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    rows = np.stack([1 / times, sizes / times], axis=1)
    scale = np.abs(rows).max(axis=0)
    latency, per_byte = np.linalg.lstsq(rows / scale, np.ones(len(times)), rcond=None)[0] / scale
    if latency < 0 or per_byte < 0:
        by_latency, by_bytes = (float(column.sum() / (column @ column)) for column in rows.T)
        latency, per_byte = (0.0, by_bytes) if latency < 0 else (by_latency, 0.0)
    return Line(float(latency), 1 / float(per_byte) if per_byte else math.inf)


# -- rounds ---------------------------------------------------------------------------------------------------


def num_samples(num_parameters: float, interval: int) -> int:
    """Samples that the gradient signal takes in a round, unless told otherwise."""
    return math.ceil(interval / sample_every(num_parameters, interval))


def round_cost(setting: Setting, method: Method, interval: int) -> RoundCost:
    """What a round of ``interval`` steps costs: the paper's scheduler, or AutoLR with either signal and rollback."""
    notes_s = setting.gather_s(len(Note._fields))
    several = setting.num_replicas > 1
    if method == "gradient":
        table_s = setting.all_reduce.seconds(8 * MAX_SAMPLES) if several else 0.0
        passes_s = setting.passes_s(SAMPLE_PASSES) * setting.anchor_share
        samples_s = num_samples(setting.num_parameters, interval) * passes_s
        memory_s = setting.passes_s(1) + _keep_s(setting)
        return RoundCost(0.0, 0.0, notes_s + table_s, memory_s, setting.host_s, samples_s)
    memory_s = setting.passes_s(CONVERGE_PASSES)
    if method == "loss":
        memory_s += setting.passes_s(PLACE_PASSES) + _keep_s(setting)
    latency_s = setting.all_reduce.latency_s * _num_buckets(weight_bytes(setting)) if several else 0.0
    wire_s = weight_bytes(setting) / setting.all_reduce.bytes_per_s
    notes_s += setting.gather_s(1)
    return RoundCost(wire_s, latency_s, notes_s, memory_s, setting.host_s, 0.0)


def _keep_s(setting: Setting) -> float:
    """Of a copy to roll back to. On its way to the host, the optimizer's state travels beside the next step."""
    if not setting.keeps_on_host:
        return setting.passes_s(KEEP_PASSES)
    assert setting.host_bytes_per_s is not None
    return setting.num_parameters * setting.dtype_bytes / setting.host_bytes_per_s


def weight_bytes(setting: Setting) -> float:
    """What a converge reduces."""
    return setting.num_parameters * max(SUM_BYTES, setting.dtype_bytes)


def share(extra_s: float, interval: int, step_s: float) -> float:
    """Of the time of a round that takes ``extra_s`` beside its steps."""
    return extra_s / (interval * step_s + extra_s)


def shortest_step_s(setting: Setting) -> float:
    """No step with shared gradients is shorter: they are averaged, and weights, gradients and moments pass by.

    Taken one after another, as in a converge.
    """
    num_bytes = setting.num_parameters * setting.dtype_bytes
    reduced_s = setting.all_reduce.seconds(num_bytes, _num_buckets(num_bytes)) if setting.num_replicas > 1 else 0.0
    return reduced_s + setting.passes_s(STEP_PASSES)


def memory_bytes(setting: Setting, method: Method) -> dict[str, float]:
    """What a rank needs beside plain training with Adam: on its device, unless it says "on the host"."""
    weights = setting.num_parameters * setting.dtype_bytes
    found = {"buckets": min(2.0 * BUCKET_BYTES, weight_bytes(setting))} if method != "gradient" else {}
    if method != "paper":
        held = setting.num_parameters * (setting.anchor_share if method == "gradient" else 1)
        # Of a share of the entries: what is read of the weights, and of the gradient; else theta - A.
        chunk = min(CHUNK_ELEMENTS, held) * setting.dtype_bytes * (1 if held == setting.num_parameters else 3)
        place = "rollback, on the host" if setting.keeps_on_host else "rollback"
        found |= {"anchor": held * setting.dtype_bytes, "anchor, while in use": chunk, place: 2 * 3 * weights}
    if method != "gradient":
        found["inside converged()"] = weights
    return found


def _num_buckets(num_bytes: float) -> int:
    return math.ceil(num_bytes / BUCKET_BYTES)
