"""How far a reader has to go: files that the end of one round, and a construction, of a default AutoLR pass through.

``python lab/benchmarks/structure.py`` counts, on one process and with ``sys.setprofile``, calls of functions of
``src/hdet``, the files they are in, and moves: calls from one of these files into another. ``--edges`` lists the moves.
Also the lines of the core and of the wing, with and without docstrings and comments, and the settings of AutoLR.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hdet
from hdet import Adapt, AutoLR, Copies, Faults
from hdet_lab.runs.code_hash import without_prose

ROOT = Path(hdet.__file__).parent
INTERVAL = 10


class Count:
    """What a block calls."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moves: Counter[tuple[str, str]] = Counter()
        """By file and function: of whoever calls, and of what is called, one after the other."""

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def line(self) -> str:
        return f"{self.calls.total():4d} calls, {len(self.files):2d} files, {self.moves.total():3d} moves between files"


def file_of(frame: FrameType | None) -> str | None:
    """The path below ``src/hdet``; None for code of others."""
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def caller_of(frame: FrameType) -> FrameType | None:
    """The nearest function of ours that a call came from, through torch or the standard library."""
    found = frame.f_back
    while found is not None and file_of(found) is None:
        found = found.f_back
    return found


@contextmanager
def counted() -> Iterator[Count]:
    """Counts the calls of a block. Comprehensions and generators are part of the function that they are written in."""
    count = Count()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file, name = file_of(frame), frame.f_code.co_qualname
        if event != "call" or file is None or name.endswith(("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")):
            return
        count.calls[file, name] += 1
        caller = caller_of(frame)
        if caller is not None and file_of(caller) != file:
            count.moves[f"{file_of(caller)}:{caller.f_code.co_qualname}", f"{file}:{name}"] += 1

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


def measured() -> dict[str, Count]:
    """Of a construction, of a ``step(loss)`` that ends a round after the level was found, and of that end alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with counted() as construction:
        scheduler = AutoLR(optimizer, total_steps=400, interval=INTERVAL)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    ends = []
    end_round = scheduler._run.end_round

    def watched(*args: Any, **kwargs: Any) -> bool:
        with counted() as count:
            ended = end_round(*args, **kwargs)
        ends.append(count)
        return ended

    for step in range(1, 12 * INTERVAL + 1):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if step == 10 * INTERVAL:
            with counted() as whole:
                scheduler.step(loss)
            scheduler._run.end_round = watched  # type: ignore[method-assign]
        else:
            scheduler.step(loss)
    return {"construction": construction, "end of a round": ends[0], "step() around it": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", action="store_true", help="list the moves")
    arguments = parser.parse_args()
    for name, count in measured().items():
        print(f"{name:16}: {count.line()}")
        if arguments.edges:
            for file in sorted(count.files):
                print(f"    {sum(n for (at, _), n in count.calls.items() if at == file):4d} {file}")
            for (caller, called), number in sorted(count.moves.items()):
                print(f"    {number:4d} {caller} -> {called}")
    own = len(inspect.signature(AutoLR).parameters)
    public = [field for group in (Adapt, Copies, Faults) for field in fields(group) if field.name[0] != "_"]
    leaves = own - 4 + len(public)
    print(f"{'settings':16}: {own} parameters of AutoLR; {leaves} settings beside the optimizer")
    for name, read in (("lines", str), ("lines of code", without_prose)):
        lines = {path: len(read(path.read_text()).splitlines()) for path in ROOT.rglob("*.py")}
        wing = sum(number for path, number in lines.items() if "ensemble" in path.parts)
        print(f"{name:16}: {sum(lines.values()) - wing} in the core, {wing} in hdet.ensemble")


if __name__ == "__main__":
    main()
