"""What the commands share: arguments from a dataclass, and errors that are one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from hdet.checks import printable

T = TypeVar("T")


class UsageError(Exception):
    """A mistake of the user: one line, no traceback, exit status 2."""


class FailedError(Exception):
    """What the user could not have known, such as a full disk: one line, no traceback, exit status 1."""


def say(text: str) -> None:
    """Print a line, with escapes for what a terminal might obey, or cannot show."""
    print(printable(text))


class Options:
    """Base of the dataclasses of options."""

    def require(self, name: str, rule: str, ok: bool) -> None:
        """UsageError that names the option, the rule and the value, unless ``ok``."""
        if not ok:
            value = getattr(self, name)
            said = " ".join(map(str, value)) or "none" if isinstance(value, tuple) else repr(value)
            raise UsageError(f"--{name.replace('_', '-')} must be {rule}, but got {said}")


def torchrun_rank(replicas: int | None) -> tuple[int, int] | None:
    """Rank and number of processes under torchrun, None elsewhere; UsageError where ``replicas`` is another number."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if replicas not in (None, num_ranks):
        raise UsageError(
            f"--replicas must be left out or be the number of processes that torchrun has started, {num_ranks}, "
            f"but got {replicas}"
        )
    return rank, num_ranks


def parse(kind: type[T], command: str, arguments: Sequence[str], *, default: T | None = None) -> T:
    """An object of the dataclass ``kind`` from ``arguments``; ``default`` has its values where none are given."""
    errors = io.StringIO()
    chosen: dict[str, Any] = {} if default is None else {"default": default}
    options = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    try:
        with contextlib.redirect_stderr(errors):
            parsed: T = tyro.cli(kind, prog=f"hdet {command}", args=list(arguments), config=options, **chosen)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            sys.exit(0)  # the help has been printed
        raise UsageError(f"{one_line(errors.getvalue())}; see hdet {command} --help") from None
    return parsed


def one_line(box: str) -> str:
    """The message of one of tyro's errors: title, rule, message, rule, help; or in a frame, with the title in it."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    parts = re.split(r"\n(?:[╭╰].*|[─-]{5,})(?=\n|$)", "\n" + "\n".join(lines))
    title, message = (part.strip() for part in (*parts, "")[:2])
    return re.sub(r"\s+", " ", message or title).rstrip(".:")
