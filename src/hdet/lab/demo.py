"""Four replicas on this machine train a small GPT on the source of Python's standard library.

``python -m hdet.lab.demo``. From a good learning rate: torch's OneCycleLR, and the paper's HDET, whose replicas
disagree about it on purpose. From one 30 times too low: OneCycleLR again, and AutoLR. Two minutes on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet import AutoLR, OneCycleAutoLR, RoundRecord
from hdet.lab.tasks import stdlib_gpt
from hdet.lab.tasks.base import param_groups
from hdet.launch import launch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOO_LOW = 30
PLAIN, HDET = "OneCycleLR", "HDET, the paper's"
PLAIN_LOW, AUTO_LOW = f"OneCycleLR, 1/{TOO_LOW}", f"AutoLR, 1/{TOO_LOW}"
RUNS = (PLAIN, HDET, PLAIN_LOW, AUTO_LOW)
SIZES: dict[str, Any] = {"context": 64, "num_layers": 2, "width": 64, "num_heads": 4, "num_validation": 256}


@dataclass(frozen=True)
class Settings:
    """What the demo trains with."""

    steps: int = 300
    max_lr: float = 3e-3
    spread: float = 1 / 9
    interval: int = 20
    batch_rows: int = 32


@dataclass(frozen=True)
class Result:
    """One run: the validation loss of the converged weights, seconds it took, and its rounds."""

    loss: float
    seconds: float
    history: list[RoundRecord]


def train(settings: Settings, name: str, progress: Connection) -> Result:
    """One replica's part of a run; all replicas return the same loss."""
    rank, num_replicas = dist.get_rank(), dist.get_world_size()
    task = stdlib_gpt(max_bytes=1_000_000, batch_rows=settings.batch_rows, **SIZES)
    model = task.build()
    ddp = DistributedDataParallel(model)
    max_lr = settings.max_lr if name in (PLAIN, HDET) else settings.max_lr / TOO_LOW
    optimizer = torch.optim.Adam(param_groups(task, model), lr=max_lr, betas=(0.9, 0.95))
    scheduler: AutoLR | OneCycleAutoLR
    if name == AUTO_LOW:
        plain = OneCycleLR(optimizer, max_lr, settings.steps, cycle_momentum=False)
        scheduler = AutoLR(plain, interval=max(1, settings.interval // 4))
    else:
        # With spread 0 this is torch's OneCycleLR.
        scheduler = OneCycleAutoLR(
            optimizer,
            max_lr=max_lr,
            total_steps=settings.steps,
            cycle_momentum=False,
            ensemble_lr_spread_ratio=settings.spread if name == HDET else 0.0,
            model_sync_interval=settings.interval,
            enable_auto_lr=name == HDET,
            auto_lr_warmup_steps=settings.steps // 10,
            loss_scale=0.02,
        )
    started = time.perf_counter()
    for step in range(settings.steps):
        loss = task.loss(ddp, task.batch(step, replica=rank, num_replicas=num_replicas))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss)
        if rank == 0:
            progress.send((name, step + 1, loss.item()))
    seconds = time.perf_counter() - started
    return Result(task.evaluate(model)["loss"], seconds, scheduler.history)


def all_runs(settings: Settings, progress: Connection) -> dict[str, Result]:
    """The runs, one after the other, on each replica."""
    return {name: train(settings, name, progress) for name in RUNS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(prog="python -m hdet.lab.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--max-lr", type=float, default=Settings.max_lr)
    parser.add_argument("--spread", type=float, default=Settings.spread)
    options = parser.parse_args(arguments)
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        sys.exit("the demo needs rich for its progress bar and table; install it with: pip install 'hdet[lab]'")
    settings = Settings(steps=options.steps, max_lr=options.max_lr, spread=options.spread)
    console = Console()
    console.print(
        f"{options.replicas} replicas train a GPT on Python's standard library, {settings.steps} steps: learning rates "
        f"{1 - settings.spread:.2f} to {1 + settings.spread:.2f} times the base, weights averaged every "
        f"{settings.interval} steps"
    )
    results = _run(console, settings, options.replicas)
    console.print(_round_table(results[HDET].history))
    console.print(_result_table(results))
    scales = [f"{record.scales[0]:.2g}" for record in results[AUTO_LOW].history]
    console.print(f"What AutoLR multiplied its schedule by, round by round: {' '.join(scales)}")
    console.print("Next: the diff of a training loop in README.md, and benchmarks/README.md for measurements.")


def _run(console: Console, settings: Settings, num_replicas: int) -> dict[str, Result]:
    receive, send = mp.get_context("forkserver").Pipe(duplex=False)
    # Only this process writes to the terminal; the thread ends when the last holder of ``send`` is gone.
    watcher = threading.Thread(target=_watch, args=(console, receive, settings), daemon=True)
    watcher.start()
    try:
        results = launch(all_runs, num_replicas, settings, send, timeout_s=600.0)
    finally:
        send.close()
        watcher.join(timeout=10.0)
    first: dict[str, Result] = results[0]
    return first


def _watch(console: Console, receive: Connection, settings: Settings) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal) as bar:
        rows = {name: bar.add_task(name, total=settings.steps, start=False, loss="") for name in RUNS}
        while True:
            try:
                name, step, loss = receive.recv()
            except (EOFError, OSError):
                return
            if step == 1:
                bar.start_task(rows[name])
            bar.update(rows[name], completed=step, loss=f"loss {loss:.3f}")
            # A file or a pipe gets a line now and then instead of a bar.
            if not console.is_terminal and step % max(settings.steps // 6, 1) == 0:
                console.print(f"{name} step {step}/{settings.steps} loss {loss:.3f}")


def _round_table(history: Sequence[RoundRecord]) -> Table:
    from rich.table import Table

    table = Table(title="Rounds; losses and LRs of each replica")
    for column in ("step", "losses", "LRs x 1e3", "base LR", "distance"):
        table.add_column(column, justify="right")
    for record in history:
        table.add_row(
            str(record.step),
            _row(record.losses, "{:.3f}"),
            _row([1e3 * value for value in record.values[0]], "{:.2f}"),
            f"{1e3 * record.base_values[0]:.2f}",
            f"{record.distance:.3f}",
        )
    return table


def _result_table(results: dict[str, Result]) -> Table:
    from rich.table import Table

    table = Table(title="Validation loss, converged")
    for column in ("run, by peak learning rate", "loss", "seconds"):
        table.add_column(column, justify="left" if column.startswith("run") else "right")
    for name, result in results.items():
        table.add_row(name, f"{result.loss:.4f}", f"{result.seconds:.1f}")
    return table


def _row(numbers: Sequence[Any], form: str) -> str:
    return " ".join(form.format(number) for number in numbers)


if __name__ == "__main__":
    main()
