"""Files that are fetched from their origin where they are missing, and checked."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path


def read_or_download(path: Path, url: str, *, download: bool) -> bytes:
    """What ``path`` holds; fetched from ``url`` first where it is missing and ``download`` allows it."""
    if not path.exists():
        if not download:
            raise FileNotFoundError(f"{path} is missing; get it from {url}")
        _download(url, path)
    return path.read_bytes()


def check_sha256(content: bytes, sha256: str | None, path: Path) -> None:
    """Raise where ``content``, read from ``path``, does not hash to ``sha256``; None skips the check."""
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(f"{path} must have the SHA-256 {sha256}, but got {found}; delete it and try again")


def make_writable(folder: Path) -> Path:
    """``folder``, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileNotFoundError(
            f"{folder} is missing and cannot be made ({error}); choose another data folder"
        ) from error
    return folder


def _download(url: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:  # URLError and TimeoutError are OSErrors
        raise FileNotFoundError(
            f"{path} is missing and {url} cannot be reached ({error}); put the file there"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
