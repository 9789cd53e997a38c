"""Which code has decided: a hash of the parts of hdet that set the learning rate, without comments and docstrings."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path

import hdet

FOLDERS = ("controllers", "policy", "signals")


@functools.cache
def code_sha256() -> str:
    """Of the package that is installed."""
    folder = Path(hdet.__file__).parent
    paths = sorted(path for name in FOLDERS for path in (folder / name).rglob("*.py"))
    return hash_of({path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def hash_of(sources: Mapping[str, str]) -> str:
    """Of files by name. It is the same on every version of Python."""
    found = hashlib.sha256()
    for name in sorted(sources):
        found.update(f"{name}\n{without_prose(sources[name])}\n".encode())
    return found.hexdigest()


def without_prose(source: str) -> str:
    """The source without comments, empty lines, and strings that are statements of their own.

    Text is cut rather than written anew from the syntax tree, which differs between versions of Python.
    """
    spans = [
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    lines = [line.encode() for line in source.splitlines()]  # the tree counts bytes
    for first, begin, last, end in spans:
        if last is None or end is None:
            continue
        for number in range(first - 1, last):
            line = lines[number]
            start, stop = begin if number == first - 1 else 0, end if number == last - 1 else len(line)
            lines[number] = line[:start] + b" " * (stop - start) + line[stop:]
    text = [line.decode(errors="replace") for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            text[row - 1] = text[row - 1][:column]
    return "\n".join(line.rstrip() for line in text if line.strip())
