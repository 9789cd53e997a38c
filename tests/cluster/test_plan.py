"""The cost of HDET on paper, against slow simulations of the collectives, measurements, and the paper's own figure."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hdet import cli
from hdet.cluster import cost
from hdet.cluster.cost import Line, Setting
from hdet.cluster.plan import SWEEP, PlanOptions, plan
from hdet.replicas.average import buckets

LINKS = st.builds(Line, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
SIZES = st.floats(1, 1e11)


class Network:
    """Ranks that pass chunks around rings; counts bytes, and the seconds of steps that all take together."""

    def __init__(self, num_ranks: int) -> None:
        self.sent_bytes = np.zeros(num_ranks)
        self.seconds = 0.0

    def pass_around(self, rings: list[list[int]], data: list[NDArray[Any]], link: Line, steps: range) -> None:
        """In each step everyone sends one chunk (a row) to the next, who adds it or, in the second half, keeps it."""
        num_chunks = len(rings[0])
        for step in steps:
            messages = []
            for ring in rings:
                for place, rank in enumerate(ring):
                    chunk = (place - step) % num_chunks
                    messages.append((rank, ring[(place + 1) % num_chunks], chunk, data[rank][chunk].copy()))
            for sender, receiver, chunk, values in messages:
                old = data[receiver][chunk]
                data[receiver][chunk] = old + values if step < num_chunks - 1 else values
                self.sent_bytes[sender] += values.nbytes
            self.seconds += link.seconds(messages[0][3].nbytes)


@given(st.integers(2, 9), st.integers(1, 5), LINKS)
def test_a_ring_equals_its_simulation(num_ranks: int, chunk_values: int, link: Line) -> None:
    data: list[NDArray[Any]] = [np.random.default_rng(r).random((num_ranks, chunk_values)) for r in range(num_ranks)]
    total = sum(data)
    network = Network(num_ranks)
    network.pass_around([list(range(num_ranks))], data, link, range(2 * (num_ranks - 1)))
    assert all(np.allclose(mine, total) for mine in data)  # the simulation does reduce
    num_bytes = 8 * num_ranks * chunk_values
    assert network.sent_bytes == pytest.approx(cost.sent_bytes(num_bytes, num_ranks))
    assert cost.ring(num_ranks, link).seconds(num_bytes) == pytest.approx(network.seconds)


@given(st.integers(2, 4), st.integers(2, 5), st.integers(1, 3), LINKS, LINKS)
def test_the_hierarchical_all_reduce_equals_its_simulation(
    node: int, num_nodes: int, values: int, inside: Line, across: Line
) -> None:
    num_ranks = node * num_nodes
    data: list[NDArray[Any]] = [np.random.default_rng(r).random((node, num_nodes, values)) for r in range(num_ranks)]
    total = sum(data)
    network = Network(num_ranks)
    nodes = [list(range(first, first + node)) for first in range(0, num_ranks, node)]
    network.pass_around(nodes, data, inside, range(node - 1))
    # Now the rank at place i of each node has its node's sum of row i + 1.
    parts = [data[rank][(rank % node + 1) % node] for rank in range(num_ranks)]
    same_place = [list(range(place, num_ranks, node)) for place in range(node)]
    network.pass_around(same_place, parts, across, range(2 * (num_nodes - 1)))
    network.pass_around(nodes, data, inside, range(node - 1, 2 * (node - 1)))
    assert all(np.allclose(mine, total) for mine in data)
    num_bytes = total.nbytes  # type: ignore[union-attr]
    assert network.sent_bytes == pytest.approx(cost.sent_bytes(num_bytes, num_ranks))
    assert cost.hierarchical(num_ranks, node, inside, across).seconds(num_bytes) == pytest.approx(network.seconds)


def test_alone_there_is_nothing_to_reduce() -> None:
    link = Line(1.0, 1.0)
    for line in (cost.ring(1, link), cost.flat_ring(1, 8, link, link), cost.hierarchical(1, 8, link, link)):
        assert line == Line(0.0, math.inf)
        assert line.seconds(1e9) == 0
    assert cost.sent_bytes(1e9, 1) == 0
    costs = cost.round_cost(Setting(1e6, 4, 1, Line(0.0, math.inf), 1e9), "gradient", 100)
    assert costs.wire_s == costs.latency_s == costs.notes_s == 0


@given(st.integers(1, 20_000), st.integers(1, 64), LINKS, LINKS, SIZES)
def test_nodes_help_where_links_between_them_are_slower(
    num_replicas: int, node_size: int, one: Line, other: Line, num_bytes: float
) -> None:
    inside = Line(min(one.latency_s, other.latency_s), max(one.bytes_per_s, other.bytes_per_s))
    across = Line(max(one.latency_s, other.latency_s), min(one.bytes_per_s, other.bytes_per_s))
    num_replicas = -(-num_replicas // node_size) * node_size  # full nodes
    flat = cost.flat_ring(num_replicas, node_size, inside, across).seconds(num_bytes)
    assert cost.hierarchical(num_replicas, node_size, inside, across).seconds(num_bytes) <= flat * (1 + 1e-9)


@given(LINKS, st.lists(st.floats(1, 1e9), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_the_line(line: Line, sizes: list[float]) -> None:
    found = cost.fit(sizes, [line.seconds(size) for size in sizes])
    for size in sizes:
        assert found.seconds(size) == pytest.approx(line.seconds(size), rel=1e-3)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=8))
def test_a_fit_is_never_negative(points: list[tuple[float, float]]) -> None:
    found = cost.fit(*zip(*points, strict=True))
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0
    assert all(math.isfinite(found.seconds(size)) for size, _ in points)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 10**6))
def test_a_share_is_one_and_falls_with_the_interval(extra_s: float, step_s: float, interval: int) -> None:
    found = cost.share(extra_s, interval, step_s)
    assert 0 < found < 1
    assert cost.share(extra_s, interval + 1, step_s) < found
    assert found == pytest.approx(extra_s / (extra_s + sum([step_s] * interval))) if interval < 1000 else True


@given(st.lists(st.integers(1, 3 * 10**7), min_size=1, max_size=20))
def test_buckets_are_counted_as_they_are_packed(sizes: list[int]) -> None:
    actual = sum(1 for _ in buckets([torch.empty(size, device="meta") for size in sizes]))
    counted = cost._num_buckets(4 * sum(sizes))
    assert counted <= actual <= 2 * counted + 1  # tensors are halved until they fit, so buckets may stay half empty


# -- against what is known ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [1e9, 7e9, 1e11])
def test_the_paper_on_eight_h100s(parameters: float) -> None:
    """About 0.1% at T = 1000, says the paper; data sheets and no step time at all say as much, whatever the model."""
    (row,) = [row for row in plan(PlanOptions(parameters=parameters))["by_interval"] if row["interval"] == 1000]
    for algorithm in ("ring", "hierarchical"):
        assert row[algorithm]["share"]["paper"] == pytest.approx(1e-3, rel=0.2)


@given(st.floats(1e7, 1e12), st.sampled_from(SWEEP), LINKS, LINKS, st.integers(1, 10**4))
def test_a_converge_takes_no_longer_than_the_shortest_step(
    parameters: float, num_replicas: int, inside: Line, across: Line, interval: int
) -> None:
    setting = Setting(parameters, 4, num_replicas, cost.hierarchical(num_replicas, 8, inside, across), 3e12)
    costs = cost.round_cost(setting, "paper", interval)
    step_s = cost.shortest_step_s(setting)
    assert costs.end_s - costs.notes_s <= step_s
    assert cost.share(costs.end_s - costs.notes_s, interval, step_s) <= 1 / (interval + 1) * (1 + 1e-9)


H200 = {"parameters": 124e6, "replicas": 1, "memory_bandwidth": 4800.0, "step_ms": 24.1}


class _Whole(Setting):
    """As a large model was measured: with a whole anchor, and all copies beside the weights."""

    keeps_on_host = False
    anchor_share = 1.0


def _measured() -> Setting:
    return _Whole(*PlanOptions(**H200).settings(1)["ring"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("interval", "measured"), [(20, 0.024), (200, 0.003)])
def test_the_gradient_signal_as_measured_on_a_gpu(interval: int, measured: float) -> None:
    """benchmarks/README.md, cost of a step: with rollback at T = 20, without at T = 200."""
    found = cost.round_cost(_measured(), "gradient", interval)
    share = cost.share(found.end_s + found.samples_s, interval, 24.1e-3)
    assert measured / 1.6 < share < measured * 1.6


def test_memory_as_measured_on_a_gpu() -> None:
    """benchmarks/README.md: 3.5 bytes a parameter, with rollback 27.6."""
    needs = cost.memory_bytes(_measured(), "gradient")
    assert needs["anchor"] / 124e6 == pytest.approx(3.5, rel=0.15)
    assert (needs["anchor"] + needs["rollback"]) / 124e6 == pytest.approx(27.6, rel=0.05)
    light = cost.memory_bytes(PlanOptions(**H200).settings(1)["ring"], "gradient")  # type: ignore[arg-type]
    assert light["rollback, on the host"] == needs["rollback"]
    assert (light["anchor"] + light["anchor, while in use"]) / 124e6 == pytest.approx(1.0)
    many = cost.memory_bytes(PlanOptions().settings(8)["ring"], "paper")
    assert many["buckets"] == 48 * 2**20


def test_averages_are_sent_in_float32() -> None:
    half, full = (plan(PlanOptions(dtype_bytes=size))["round"]["paper"] for size in (2, 4))
    assert half["sent_bytes"] == full["sent_bytes"] == 2 * 7 / 8 * 4e9
    assert half["memory_s"] < full["memory_s"]


# -- the command ----------------------------------------------------------------------------------------------


def test_the_command_prints_tables_up_to_16384_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--parameters", "7e9", "--interval", "250", "--step-ms", "800"]) == 0
    shown = capsys.readouterr().out
    first_words = {line.split()[0] for line in shown.splitlines() if line.split()}
    assert {"10", "100", "250", "1000", *map(str, SWEEP)} <= first_words
    assert "16384" in first_words
    assert "7e+09 parameters, steps of 800 ms" in shown


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--replicas", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["interval"] for row in found["by_interval"]] == [10, 100, 1000]
    assert [row["replicas"] for row in found["by_replicas"]] == [8, 12, *SWEEP[1:]]
    assert found["round"]["gradient"]["sent_bytes"] == 0
