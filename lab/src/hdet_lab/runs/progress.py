"""Progress of a run on the terminal: a bar, or a line now and then where the output is a file or a pipe."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

NUM_LINES = 6  # of a run, where there is no terminal


class RunBar:
    """One run's bar."""

    def __init__(self, console: Console, name: str, steps: int, *, quiet: bool = False) -> None:
        self.console, self.name, self.steps, self.quiet = console, name, steps, quiet
        columns = [TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self.bars = Bars(
            *columns, TextColumn("{task.fields[news]}"), console=console, disable=quiet or not console.is_terminal
        )
        self.row = self.bars.add_task(name, total=steps, news="")
        self.told = 0

    def __enter__(self) -> RunBar:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def send(self, news: dict[str, Any], /) -> None:
        """Show the end of a round."""
        self.advance(news["step"], describe(news["losses"], news["scales"]))

    def advance(self, step: int, line: str = "") -> None:
        """Show that ``step`` is done."""
        self.bars.update(self.row, completed=step, news=line)
        part = step * NUM_LINES // self.steps
        if not self.quiet and not self.console.is_terminal and part > self.told:
            self.told = part
            told = ", ".join(filter(None, [f"{self.name}: step {step}/{self.steps}", line]))
            self.console.print(told, soft_wrap=True, markup=False)


def describe(losses: Sequence[float | None], scales: Sequence[float]) -> str:
    """Mean loss of the replicas that have one, and what the schedule is multiplied by."""
    seen = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    text = f"loss {sum(seen) / len(seen):.3f}" if seen else "loss not finite"
    return text if set(scales) == {1.0} else f"{text}, scale {' '.join(f'{scale:.3g}' for scale in scales)}"


@contextlib.contextmanager
def from_processes(bar: RunBar) -> Iterator[Connection]:
    """The sending end of a pipe to ``bar``, for another process: only this one writes to the terminal."""
    receive, send = mp.get_context("forkserver").Pipe(duplex=False)

    def pass_on() -> None:
        # Ends when the last holder of ``send`` is gone.
        with contextlib.suppress(EOFError, OSError):
            while True:
                bar.send(receive.recv())

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield send
    finally:
        send.close()
        thread.join(timeout=10.0)
        receive.close()
