"""Python source that anyone can rebuild: the modules in pinned wheels of pure-Python packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import torch

from hdet_lab.tasks.download import check_sha256, make_writable
from hdet_lab.tasks.text import SKIPPED_FOLDERS, TextTask

WHEELS = {
    "attrs-24.2.0-py3-none-any.whl": "81921eb96de3191c8258c199618104dd27ac608d9366f5e35d011eae1867ede2",
    "click-8.1.7-py3-none-any.whl": "ae74fb96c20a0277a1d615f1e4d73c8414f5a98db8b799a7931d1582f3390c28",
    "flask-3.1.0-py3-none-any.whl": "d667207822eb83f1c4b50949b1623c8fc8d51f2341d65f72e1a1815397551136",
    "httpx-0.28.1-py3-none-any.whl": "d909fcccc110f8c7faf814ca82a9a4d816bc5a6dbfea25d6591d6985b8ba59ad",
    "jinja2-3.1.4-py3-none-any.whl": "bc5dd2abb727a5319567b7a813e6a2e7318c39f4f487cfe6c89c6f9c7d25197d",
    "networkx-3.4.2-py3-none-any.whl": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "requests-2.32.3-py3-none-any.whl": "70761cfe03c773ceb22aa2f671b4757976145175cdfca038c02654d061d6dcc6",
    "rich-13.9.4-py3-none-any.whl": "6049d5e6ec054bf2779ab3358186963bac2ea89175919d699e378b99738c2a90",
    "werkzeug-3.1.3-py3-none-any.whl": "54b78bf3716d19a65be4fceccc0d1d7b89e608834989dfae50ea87564639213e",
}
"""File name to SHA-256, as the Python Package Index has them."""
LARGE_WHEELS = {
    "diffusers-0.31.0-py3-none-any.whl": "cbc498ae63f4abfc7c3a07649cdcbee229ef2f9a9a1f0d19c9bbaf22f8d30c1f",
    "Django-5.1.3-py3-none-any.whl": "8b38a9a12da3ae00cb0ba72da985ec4b14de6345046b1e174b1fd7254398f818",
    "jax-0.4.35-py3-none-any.whl": "fa99e909a31424abfec750019a6dd36f6acc18a6e7d40e2c0086b932cc351325",
    "keras-3.6.0-py3-none-any.whl": "49585e4577f6e86bd890d96dfbcb1890f5bab5967ef831c07fd63f9d86e4bfe9",
    "networkx-3.4.2-py3-none-any.whl": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "pygments-2.18.0-py3-none-any.whl": "b8e6aca0523f3ab76fee51799c488e38782ac06eafcf95e7ba832985c8e7b13a",
    "sympy-1.13.3-py3-none-any.whl": "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
    "transformers-4.46.3-py3-none-any.whl": "a12ef6f52841fd190a3e5602145b542d03507222f2c64ebb7ee92e8788093aef",
}
"""For models that would memorise :data:`WHEELS`."""
TEXT_SHA256 = "50f3b9f9d48d302f2846671d466757628b8536c616ecdc3849a597cfb32d0688"
LARGE_TEXT_SHA256 = "4dc9794d9efa40fcf46c121a2f0c9ba221f1043d454fec8dee7ceae8d8169713"


def code_gpt(
    data: str | Path = "data",
    *,
    wheels: Mapping[str, str] = WHEELS,
    sha256: str | None = TEXT_SHA256,
    download: bool = True,
    **sizes: int,
) -> TextTask:
    """Byte-level GPT on the source of nine packages, the same text on every machine, 0.9M parameters.

    Args:
        data: folder that holds, or receives, ``code/corpus.txt``.
        wheels: file names of the wheels and their SHA-256.
        sha256: what the text must hash to; None skips the check.
        download: let pip fetch missing wheels.
        **sizes: as in :class:`TextTask`.
    """
    text = read_code(data, wheels=wheels, sha256=sha256, download=download)
    return TextTask("code-gpt", torch.frombuffer(bytearray(text), dtype=torch.uint8), 256, **sizes)


def read_code(
    data: str | Path,
    *,
    wheels: Mapping[str, str] = WHEELS,
    sha256: str | None = TEXT_SHA256,
    download: bool = True,
) -> bytes:
    """What ``<data>/code/corpus.txt`` holds; built first where it is missing.

    Args:
        data: folder that holds, or receives, ``code/corpus.txt``; it is built of ``code/wheels/``.
        wheels: file names of the wheels and their SHA-256.
        sha256: what the text must hash to; None skips the check.
        download: let pip fetch missing wheels.
    """
    path = Path(data) / "code" / "corpus.txt"
    if path.exists():
        text = path.read_bytes()
        check_sha256(text, sha256, path)
        return text
    folder = path.parent / "wheels"
    missing = [name for name in wheels if not (folder / name).exists()]
    if missing:
        _fetch(missing, folder, download=download)
    text = corpus(folder, wheels)
    check_sha256(text, sha256, path)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(text)
    part.replace(path)  # no process ever reads half of it
    return text


def corpus(folder: Path, wheels: Mapping[str, str]) -> bytes:
    """Every module of the wheels but tests, in the order of the hashes of their paths.

    So files of all packages are in the part that trains and in the one that validates.
    """
    found: dict[str, bytes] = {}
    for name, sha256 in wheels.items():
        check_sha256((folder / name).read_bytes(), sha256, folder / name)
        found |= dict(_modules(folder / name))
    return b"".join(found[path] for path in sorted(found, key=lambda path: hashlib.sha256(path.encode()).digest()))


def _modules(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if name.endswith(".py") and not SKIPPED_FOLDERS & set(PurePosixPath(name).parts):
                yield name, file.read(name)


def _fetch(names: list[str], folder: Path, *, download: bool) -> None:
    pins = ["==".join(name.split("-")[:2]) for name in names]
    wanted = f"{folder} must hold {', '.join(names)}; put them there: pip download --no-deps {' '.join(pins)}"
    if not download:
        raise FileNotFoundError(wanted)
    make_writable(folder)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), *pins], capture_output=True, text=True)
    if done.returncode or not all((folder / name).exists() for name in names):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise FileNotFoundError(f"{wanted} (pip said: {said})")
