"""``hdet plan``: what HDET will cost on a cluster you do not have yet, from the size of the model and data sheets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from hdet.cluster.cost import (
    Line,
    Method,
    Setting,
    flat_ring,
    hierarchical,
    memory_bytes,
    round_cost,
    sent_bytes,
    share,
    shortest_step_s,
    weight_bytes,
)
from hdet.command_line import Options, parse

INTERVALS = (10, 100, 1000)
SWEEP = tuple(2**k for k in range(3, 15))
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class PlanOptions(Options):
    """Predict, on paper, the share of the time that HDET takes, what it sends and the memory it needs.

    Defaults are data-sheet figures of 8 H100s a node: NVLink 450 GB/s each way, 400 Gb/s of network for each GPU, HBM3;
    latencies are assumed. hdet doctor measures yours.
    """

    parameters: float = 1e9
    """Parameters of one rank, e.g. 7e9; of its shard where a replica is sharded."""
    dtype_bytes: int = 4
    """Bytes of a parameter in memory. Averages are sent in float32 at least."""
    replicas: int = 8
    """N, the number of replicas."""
    interval: int = 1000
    """T, steps of a round."""
    step_ms: float | None = None
    """Milliseconds of a training step. Default the shortest that shared gradients and Adam allow: an upper bound of the
    share."""
    node_size: int = 8
    """Replicas in a node."""
    bandwidth: float = 450.0
    """GB/s that a replica sends inside a node (bus bandwidth)."""
    latency_us: float = 2.0
    """Microseconds of a message inside a node."""
    across_bandwidth: float = 50.0
    """GB/s that a replica sends to another node."""
    across_latency_us: float = 10.0
    """Microseconds of a message to another node."""
    memory_bandwidth: float = 3350.0
    """GB/s that a rank reads or writes of its own memory."""
    host_bandwidth: float = 50.0
    """GB/s that a rank copies from its device to the host's memory."""
    host_ms: float = 6.0
    """Milliseconds of Python at the end of a round; measured on an H200."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        for name in ("replicas", "interval", "node_size"):
            self.require(name, "an integer >= 1", getattr(self, name) >= 1)
        self.require("dtype_bytes", "1, 2, 4 or 8", self.dtype_bytes in (1, 2, 4, 8))
        self.require("parameters", "a finite number >= 1", 1 <= self.parameters < math.inf)
        self.require("step_ms", "a finite number > 0", self.step_ms is None or 0 < self.step_ms < math.inf)
        for name in ("bandwidth", "across_bandwidth", "memory_bandwidth", "host_bandwidth"):
            self.require(name, "a finite number > 0", 0 < getattr(self, name) < math.inf)
        for name in ("latency_us", "across_latency_us", "host_ms"):
            self.require(name, "a finite number >= 0", 0 <= getattr(self, name) < math.inf)

    def settings(self, num_replicas: int) -> dict[str, Setting]:
        """On ``num_replicas``, by the algorithm of the all-reduce."""
        inside = Line(self.latency_us * 1e-6, self.bandwidth * 1e9)
        across = Line(self.across_latency_us * 1e-6, self.across_bandwidth * 1e9)
        lines = {
            algorithm.__name__: algorithm(num_replicas, self.node_size, inside, across)
            for algorithm in (flat_ring, hierarchical)
        }
        memory, host_s = self.memory_bandwidth * 1e9, self.host_ms * 1e-3
        return {
            name.removeprefix("flat_"): Setting(
                self.parameters, self.dtype_bytes, num_replicas, line, memory, host_s, self.host_bandwidth * 1e9
            )
            for name, line in lines.items()
        }


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(PlanOptions, "plan", arguments)
    options.check()
    found = plan(options)
    if options.json:
        print(json.dumps(found))
    else:
        _tell(options, found)
    return 0


def plan(options: PlanOptions) -> dict[str, Any]:
    """Everything, in plain types."""
    setting = options.settings(options.replicas)["hierarchical"]
    costs = {method: round_cost(setting, method, options.interval) for method in METHODS}
    sent = sent_bytes(weight_bytes(setting), options.replicas)
    return {
        "options": asdict(options),
        "by_interval": [_row(options, options.replicas, t) for t in sorted({*INTERVALS, options.interval})],
        "by_replicas": [_row(options, n, options.interval) for n in sorted({*SWEEP, options.replicas})],
        "round": {
            method: {**cost._asdict(), "end_s": cost.end_s, "sent_bytes": 0.0 if method == "gradient" else sent}
            for method, cost in costs.items()
        },
        "memory_bytes": {method: memory_bytes(setting, method) for method in METHODS},
    }


def _row(options: PlanOptions, num_replicas: int, interval: int) -> dict[str, Any]:
    row: dict[str, Any] = {"replicas": num_replicas, "interval": interval}
    for algorithm, setting in options.settings(num_replicas).items():
        step_s = shortest_step_s(setting) if options.step_ms is None else options.step_ms * 1e-3
        costs = {method: round_cost(setting, method, interval) for method in METHODS}
        row[algorithm] = {
            "step_s": step_s,
            "converge_s": costs["paper"].end_s,
            "latency_s": costs["paper"].latency_s,
            "share": {m: share(cost.end_s + cost.samples_s, interval, step_s) for m, cost in costs.items()},
        }
    return row


# -- tables ---------------------------------------------------------------------------------------------------

CAUSES = {
    "wire_s": "weights on the wire, ms",
    "latency_s": "latency of their buckets, ms",
    "notes_s": "notes and samples exchanged, ms",
    "memory_s": "passes over memory, ms",
    "host_s": "Python, ms",
    "samples_s": "samples of the gradient, in steps, ms",
}


def _tell(options: PlanOptions, found: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    step = "the shortest step there is" if options.step_ms is None else f"steps of {options.step_ms:g} ms"
    console.print(f"{options.parameters:.3g} parameters, {step}; paper: OneCycleAutoLR; loss, gradient: AutoLR")
    console.print(_shares(f"share of the time, N = {options.replicas}", "T", "interval", found["by_interval"]))
    console.print(_shares(f"share of the time, T = {options.interval}", "N", "replicas", found["by_replicas"]))
    table = _table(f"what a round costs, N = {options.replicas}, T = {options.interval}", "", *METHODS)
    rounds, needs = found["round"], found["memory_bytes"]
    for key, name in CAUSES.items():
        table.add_row(name, *(f"{rounds[method][key] * 1e3:,.2f}" for method in METHODS))
    table.add_row("weights sent by each replica, MB", *(_megabytes(rounds[m]["sent_bytes"]) for m in METHODS))
    for name in dict.fromkeys(name for method in METHODS for name in needs[method]):
        table.add_row(f"memory: {name}, MB", *(_megabytes(needs[method].get(name, 0.0)) for method in METHODS))
    console.print(table)


def _shares(title: str, head: str, key: str, rows: list[dict[str, Any]]) -> Table:
    """Shares with the hierarchical all-reduce, and what changes by one ring over all replicas."""
    table = _table(title, head, "converge s", "of which latency", *METHODS, "one ring: s", "paper")
    for row in rows:
        tree, ring = row["hierarchical"], row["ring"]
        table.add_row(
            f"{row[key]}",
            *(f"{tree[name]:.3f}" for name in ("converge_s", "latency_s")),
            *(f"{tree['share'][method]:.3%}" for method in METHODS),
            f"{ring['converge_s']:.3f}",
            f"{ring['share']['paper']:.3%}",
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f}"
