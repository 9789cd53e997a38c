"""Files of others: only regular ones are read, up to a size, and links are never written through."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

MAX_BYTES = 2**30
"""Of a file of records; a run of ten thousand rounds has some tens of megabytes."""


def require_regular(path: Path, most: float = MAX_BYTES) -> None:
    """OSError unless it is a regular file, or a link to one, of at most so many bytes. It is not opened."""
    _check(os.stat(path), most)


def open_regular(path: Path, most: float = MAX_BYTES) -> IO[bytes]:
    """A regular file of at most so many bytes, open for reading; OSError for a device, a pipe or a folder."""
    require_regular(path, most)  # to open a device may already do something, and to open a pipe waits
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _check(os.fstat(file), most)  # it may have been replaced since
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """What a regular file of at most so many bytes says, in UTF-8."""
    with open_regular(path, most) as file:
        return file.read(most).decode("utf-8")


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file; whenever it fails, what was there before is there still, and nothing beside it.

    A link in its place is replaced, not followed.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(new, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _check(found: os.stat_result, most: float) -> None:
    kinds = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a device": stat.S_ISCHR, "a disk": stat.S_ISBLK}
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for name, is_kind in kinds.items() if is_kind(found.st_mode)), "something else")
        raise OSError(f"it must be a regular file, but is {kind}")
    if found.st_size > most:
        raise OSError(f"it must have at most {most:,.0f} bytes, but has {found.st_size:,}")
