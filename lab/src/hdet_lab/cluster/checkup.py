"""What ``hdet doctor`` does on every rank: ranks compare notes, then measure collectives, a step and real rounds."""

from __future__ import annotations

import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet import AutoLR, Ensemble, OneCycleAutoLR
from hdet.replicas.average import BUCKET_BYTES
from hdet.replicas.group import Replicas, find_replicas
from hdet.replicas.sharding import local_tensor
from hdet.signals.gradient import sample_every
from hdet.signals.update_size import UpdateSize
from hdet.weights.averaged import shape_digest, trained_parameters
from hdet_lab.cluster.subject import Subject, is_sharded, load, noticing_grad_scaler, stand_in, traps

Method = Literal["paper", "loss", "gradient"]

SIZES_BYTES = (2**10, 2**18, 2**22, BUCKET_BYTES)
WARM_UPS, REPEATS = 2, 5
SLOW_RANK = 1.5
"""How much longer the slowest rank's step may take than the fastest one's."""


class CheckupError(Exception):
    """Why HDET cannot work here. All ranks raise it at the same point, unless one is ``alone`` with it."""

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


@dataclass(frozen=True)
class Question:
    """What the ranks must agree on; the fields are options of ``hdet doctor``."""

    model: str | None
    parameters: float
    tensors: int
    method: Method
    interval: int
    step_ms: float | None
    max_share: float
    device: str


def examine(question: Question) -> dict[str, Any]:
    """The report, the same on every rank but for the traps and, where a rank failed alone, its problem."""
    report = {**no_report(dist.get_world_size() if dist.is_initialized() else 1, []), **asdict(question)}
    try:
        _examine(question, report)
    except CheckupError as problem:
        report["problems"].append(str(problem))
        report["failed_alone"] = problem.alone
    except Exception as error:
        # Others may be waiting in a collective that this rank will never join.
        report["failed_alone"] = True
        rank = dist.get_rank() if dist.is_initialized() else 0
        report["problems"].append(f"rank {rank} failed: {type(error).__name__}: {error}")
    return report


def no_report(num_ranks: int, problems: list[str]) -> dict[str, Any]:
    """The start of every report, and all there is where no rank reported."""
    known = {"ranks": num_ranks, "versions": versions(), "failed_alone": False}
    return {**known, "warnings": [], "problems": problems}


def versions() -> dict[str, str]:
    """Of what takes part in a collective."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "hdet": hdet.__version__}
    return found | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})


def _examine(question: Question, report: dict[str, Any]) -> None:
    # Before anything whose shape depends on arguments: in a collective, ranks that disagree would wait or worse.
    _agree({**versions(), **asdict(question)})
    subject, failure = _make(question)
    parameters = [] if subject is None else trained_parameters(subject.optimizer, subject.model)
    # A rank without a model does not wait: the others may never come, and learn of it if they do.
    _agree({"model": failure or "made", "shapes": shape_digest(parameters)}, wait=not failure)
    if subject is None:
        raise CheckupError(failure, alone=True)
    report["parameters"] = sum(local_tensor(p).numel() for p in parameters)
    report["tensors"] = len(parameters)
    try:
        replicas = find_replicas(subject.optimizer, None, spread=float(question.method != "gradient"))
    except ValueError as error:
        raise CheckupError(str(error)) from None
    report["replicas"] = replicas.count
    report["warnings"] += traps(subject, replicas.count)
    sums = _everyone(float(sum(local_tensor(p).double().sum() for p in parameters)), replicas.group)
    if len(set(sums)) > 1 and not is_sharded(subject):
        report["warnings"].append("replicas start from different weights: seed all ranks alike, or wrap the model")
    if question.method != "gradient" and replicas.count < 2:
        raise CheckupError(
            f"--method {question.method} compares replicas and needs at least 2, but found {replicas.count}; start "
            "more processes (torchrun, or --replicas 4), or use --method gradient, which needs one"
        )
    _measure(question, subject, replicas, report)
    found = report["measured"]["share"]
    if found > question.max_share:
        raise CheckupError(
            f"HDET takes {found:.2%} of the time at T = {question.interval}, more than --max-share "
            f"{question.max_share:.2%}; use a longer --interval, or --method gradient, which sends no weights"
        )


def _agree(facts: dict[str, Any], *, wait: bool = True) -> None:
    try:
        Replicas(dist.group.WORLD if dist.is_initialized() else None).agree(facts, wait=wait)
    except ValueError as error:
        raise CheckupError(str(error).replace("replicas", "ranks")) from None


# -- the model ------------------------------------------------------------------------------------------------


def _make(question: Question) -> tuple[Subject | None, str]:
    """The model and its optimizer, or why they could not be made: the other ranks have to know."""
    try:
        if question.model is not None:
            return load(question.model), ""
        return stand_in(int(question.parameters), question.tensors, question.device), ""
    except Exception as error:
        source = f"--model {question.model}" if question.model else "the stand-in"
        return None, f"{source} could not be made: {type(error).__name__}: {error}"


# -- measurements ---------------------------------------------------------------------------------------------


def _measure(question: Question, subject: Subject, replicas: Replicas, report: dict[str, Any]) -> None:
    device, group = question.device, replicas.group
    all_reduce = _measure_all_reduce(device, replicas)
    with noticing_grad_scaler() as scaled:
        own_steps = _everyone(_median_s(subject.step or partial(_optimizer_step, subject), device, group), group)
    if scaled:
        report["warnings"].append(
            "training uses a GradScaler, which may skip a step: call scheduler.step in every iteration on every rank, "
            "also where it has skipped"
        )
    if max(own_steps) > SLOW_RANK * min(own_steps):
        report["warnings"].append(
            f"replica {int(np.argmax(own_steps))} takes {max(own_steps) / min(own_steps):.1f} times as long for a step "
            f"as replica {int(np.argmin(own_steps))}: all wait for it at every converge"
        )
    if question.step_ms is None and subject.step is None:
        report["warnings"].append(
            "the step is the optimizer's alone, so shares are upper bounds: give --step-ms, or let --model return "
            "(model, optimizer, step)"
        )
    step_s = max(own_steps) if question.step_ms is None else question.step_ms / 1e3
    end_s, sample_s = (max(_everyone(own, group)) for own in _measure_round(question.method, subject, device, group))
    by_interval = {}
    for interval in sorted({10, 100, 1000, question.interval}):
        num_samples = math.ceil(interval / sample_every(report["parameters"], interval))
        extra_s = end_s + num_samples * sample_s
        by_interval[interval] = extra_s / (interval * step_s + extra_s)
    report |= {
        "step_s": step_s,
        "all_reduce": [{"bytes": size, "seconds": seconds} for size, seconds in all_reduce],
        "measured": {
            "end_s": end_s,
            "sample_s": sample_s,
            "share": by_interval[question.interval],
            "share_by_interval": by_interval,
        },
    }


def _measure_all_reduce(device: str, replicas: Replicas) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    if replicas.count == 1:
        return found
    for size in SIZES_BYTES:
        buffer = torch.zeros(size // 4, device=device)
        run = partial(dist.all_reduce, buffer, group=replicas.group)
        found.append((size, max(_everyone(_median_s(run, device, replicas.group), replicas.group))))
    return found


def _measure_round(
    method: Method, subject: Subject, device: str, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """A real scheduler on the real model, in rounds of one step: seconds of a round's end, and of a sample."""
    optimizer = subject.optimizer
    scheduler: AutoLR | OneCycleAutoLR
    try:
        if method == "paper":
            scheduler = OneCycleAutoLR(
                optimizer, [float(g["lr"]) for g in optimizer.param_groups], 10**6, model=subject.model,
                ensemble_lr_spread_ratio=1 / 9, model_sync_interval=1, enable_auto_lr=True, auto_lr_warmup_steps=1,
                cycle_momentum=False,
            )  # fmt: skip
        else:
            schedule = LambdaLR(optimizer, lambda _: 1.0)
            apart = Ensemble(spread=0.1) if method == "loss" else None
            scheduler = AutoLR(schedule, ensemble=apart, interval=1, model=subject.model)
    except (ValueError, TypeError) as error:
        raise CheckupError(str(error)) from None
    end_s = _median_s(lambda: scheduler.step(1.0), device, group, before=partial(_optimizer_step, subject))
    sample_s = 0.0
    for signal in scheduler._run.signals:
        signal.ends_round = True
        seconds = _median_s(partial(signal.before_step, optimizer), device, group)
        if isinstance(signal, UpdateSize):  # in the last step of a round alone
            end_s += seconds
        elif method == "gradient":
            sample_s += seconds
    return end_s, sample_s


def _optimizer_step(subject: Subject) -> None:
    """With gradients of zero where there are none, so that every parameter takes part."""
    for p in trained_parameters(subject.optimizer, subject.model):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    subject.optimizer.step()


def _median_s(
    run: Callable[[], object],
    device: str,
    group: dist.ProcessGroup | None,
    *,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds, after warming up, of what all ranks start together."""
    seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the order of calls
        for _ in range(WARM_UPS + REPEATS):
            before()
            _wait(device)
            if group is not None:
                dist.barrier(group)
            started = time.perf_counter()
            run()
            _wait(device)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UPS:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _everyone(value: float, group: dist.ProcessGroup | None) -> list[float]:
    """Each rank's value."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
