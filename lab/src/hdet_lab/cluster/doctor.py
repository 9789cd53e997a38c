"""``hdet doctor``: whether HDET will work on these processes and this network, and what it costs there."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from hdet.launch import ReplicaError, launch
from hdet.policy.timing import MAX_INTERVAL
from hdet_lab.cluster.checkup import Method, Question, examine, no_report
from hdet_lab.cluster.drill import drill
from hdet_lab.command_line import Options, UsageError, parse, torchrun_rank

PATIENCE = 5
"""The whole check may take so many times the timeout of one collective."""
A_MOMENT_S = 1.0
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class DoctorOptions(Options):
    """Check a cluster: do ranks agree, are there replicas, what does HDET cost here, what may go wrong?

    Under torchrun: torchrun ... -m hdet_lab doctor; on this machine alone: hdet doctor --replicas 4. There it also
    reads a checkpoint back, kills a rank and resumes, on scratch data; torchrun would end with the rank.
    Exit status 0 if HDET will work, perhaps with warnings; 1 if there is a problem; 2 for wrong options.
    """

    replicas: int | None = None
    """Local processes to start, each a replica. Under torchrun: leave it out."""
    model: str | None = None
    """package.module:function that returns a model, (model, optimizer) or (model, optimizer, step); step() trains one
    step. Default a stand-in."""
    parameters: float = 1e7
    """Parameters of the stand-in, e.g. 1e9."""
    tensors: int = 100
    """Tensors of the stand-in."""
    method: Method = "gradient"
    """What to check: AutoLR with the gradient signal, its default, or the loss signal; or OneCycleAutoLR (paper)."""
    interval: int | None = None
    """T, steps of a round; default 50 with the gradient signal, AutoLR's own in a long run, else 1000."""
    step_ms: float | None = None
    """Milliseconds of a training step; default measured."""
    max_share: float = 0.05
    """Share of the time above which HDET's cost is a problem."""
    device: str | None = None
    """cpu or cuda; default cuda where there is one."""
    timeout_s: float = 60.0
    """Seconds that ranks wait for each other; the whole check may take five times as long."""
    skip_drill: bool = False
    """Leave out the drill: a checkpoint read back, a rank killed and the run resumed, on scratch data."""
    json: bool = False
    """Print the report as JSON."""

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        self.require("replicas", "an integer >= 1", self.replicas is None or self.replicas >= 1)
        self.require("parameters", "a finite number >= 1", 1 <= self.parameters < math.inf)
        self.require("tensors", "between 1 and --parameters", 1 <= self.tensors <= self.parameters)
        self.require("interval", "an integer >= 1", self.interval is None or self.interval >= 1)
        self.require("step_ms", "a finite number > 0", self.step_ms is None or 0 < self.step_ms < math.inf)
        self.require("max_share", "in (0, 1]", 0 < self.max_share <= 1)
        self.require("timeout_s", "a finite number > 0", 0 < self.timeout_s < math.inf)
        self.require("model", "MODULE:FUNCTION", self.model is None or all(self.model.partition(":")))
        self.require("device", "cpu or cuda", self.device in (None, "cpu", "cuda"))
        num_gpus = torch.cuda.device_count()
        if self.device == "cuda" and num_gpus < (self.replicas or 1):
            raise UsageError(f"--device cuda needs a GPU for each process here, but there are {num_gpus}; use cpu")

    def question(self) -> Question:
        """What every rank is asked."""
        own = {field.name: getattr(self, field.name) for field in fields(Question)}
        enough = torch.cuda.device_count() >= (self.replicas or 1)
        interval = self.interval or (MAX_INTERVAL if self.method == "gradient" else 1000)
        return Question(**{**own, "interval": interval, "device": self.device or ("cuda" if enough else "cpu")})


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status: 0, or 1 where there is a problem."""
    options = parse(DoctorOptions, "doctor", arguments)
    options.check()
    question = options.question()
    torchrun = torchrun_rank(options.replicas)
    if torchrun is not None:
        return _main_under_torchrun(options, question, torchrun[0])
    num_replicas = options.replicas or 1
    if num_replicas == 1:
        report = examine(question)
    else:
        try:
            timeout_s = PATIENCE * options.timeout_s
            report = launch(
                _local_rank, num_replicas, question, timeout_s=timeout_s, backend=BACKENDS[question.device]
            )[0]
        except ReplicaError as error:
            # The last line of each traceback; ranks may have failed alike.
            last = dict.fromkeys(text.strip().splitlines()[-1] for text in error.errors.values())
            report = no_report(num_replicas, [line.removeprefix("RuntimeError: ") for line in last])
        except TimeoutError as error:
            report = no_report(num_replicas, [str(error)])
    if not report["problems"] and not options.skip_drill:
        report["drill"], failed = drill(max(num_replicas, 2), timeout_s=options.timeout_s)
        report["problems"] += failed
    _tell(report, as_json=options.json)
    return int(bool(report["problems"]))


def _local_rank(question: Question) -> dict[str, Any]:
    _take_gpu(question.device, dist.get_rank())
    report = examine(question)
    if report["failed_alone"]:
        raise RuntimeError("; ".join(report["problems"]))  # ends the others, who may be waiting
    return report


def _main_under_torchrun(options: DoctorOptions, question: Question, rank: int) -> int:
    # Should the user's model hang, the processes still end, and show where.
    faulthandler.dump_traceback_later(PATIENCE * options.timeout_s, exit=True, file=2)
    try:
        _take_gpu(question.device, int(os.environ.get("LOCAL_RANK", rank)))
        try:
            dist.init_process_group(BACKENDS[question.device], timeout=timedelta(seconds=options.timeout_s))
        except (RuntimeError, ValueError) as error:  # torch raises several types
            raise UsageError(f"rank {rank} could not join the process group: {error}") from None
        report = examine(question)
        if rank == 0:
            _tell(report, as_json=options.json)
        elif report["failed_alone"]:
            print("\n".join(f"hdet doctor: {problem}" for problem in report["problems"]), file=sys.stderr, flush=True)
        # torchrun ends all ranks as soon as one has failed: let rank 0 report first.
        if report["failed_alone"]:
            time.sleep(A_MOMENT_S)
        else:
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        return int(bool(report["problems"]))
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _take_gpu(device: str, local_rank: int) -> None:
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


# -- the report -----------------------------------------------------------------------------------------------


def _tell(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: value for key, value in report.items() if key != "failed_alone"}), flush=True)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_findings(report))
    if "measured" in report:
        console.print(_shares(report))
    for kind in ("warning", "problem"):
        for text in report[f"{kind}s"]:
            console.print(f"{kind}: {text}", markup=False)
    if not report["problems"]:
        console.print("HDET will work here." + (" See the warnings above." if report["warnings"] else ""))
    sys.stdout.flush()


def _findings(report: dict[str, Any]) -> Table:
    table = Table("what", "found", title="hdet doctor", box=box.SIMPLE, title_justify="left")
    rows = {"ranks": report["ranks"], **report["versions"]}
    if "replicas" in report:
        rows["replicas"] = report["replicas"]
        rows["model"] = (
            f"{report['model'] or 'stand-in'}: {report['parameters']:,} parameters, {report['tensors']} tensors"
        )
    if "measured" in report:
        rows["step"] = f"{report['step_s'] * 1e3:.2f} ms" + (" (as given)" if report["step_ms"] else "")
        for found in report["all_reduce"]:
            rows[f"all-reduce of {found['bytes'] / 1024:,.0f} KB"] = f"{found['seconds'] * 1e3:.2f} ms"
    rows |= report.get("drill", {})
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _shares(report: dict[str, Any]) -> Table:
    measured, title = report["measured"], f"what --method {report['method']} costs"
    table = Table("", "measured", title=title, box=box.SIMPLE, title_justify="left")
    table.add_row("end of a round", f"{measured['end_s'] * 1e3:.2f} ms")
    if report["method"] == "gradient":
        table.add_row("sample of the gradient, in a step", f"{measured['sample_s'] * 1e3:.2f} ms")
    for interval, value in measured["share_by_interval"].items():
        chosen = " (chosen)" if interval == report["interval"] else ""
        table.add_row(f"share of the time, T = {interval}{chosen}", f"{value:.3%}")
    return table
