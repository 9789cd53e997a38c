"""Whether runs of AutoLR are of the code that ships, by the hash of what decides, and which hashes are equivalent.

python -m hdet_lab.bench.versions "why the code of today behaves like that of the other hashes"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hdet_lab.runs.code_hash import code_sha256

FILE = "versions.json"
"""Beside the records: hash to one line that says why it is equivalent to the others in the file."""
OF_AUTOLR = ("autolr", "autolr-held-out", "schedule-free-autolr")
MARK = "†"
SENTENCE = f"{MARK}: runs of an earlier version of AutoLR."


def equivalent(folder: Path) -> frozenset[str]:
    """The hashes of the code whose runs count as those of today's."""
    path, today = folder / FILE, code_sha256()
    declared = frozenset(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else frozenset()
    return declared if today in declared else frozenset({today})


def is_current(method: str, facts: Collection[dict[str, Any]], current: Collection[str]) -> bool:
    """Whether the runs of a method are of code that counts as today's; those without AutoLR always are."""
    if method not in OF_AUTOLR:
        return True
    named = {name for fact in facts for name in fact.get("methods", ())}
    mine = [
        fact for fact in facts if method in fact.get("methods", ()) or (method not in named and "methods" not in fact)
    ]
    return bool(mine) and all(fact.get("code_sha256") in current for fact in mine)


def declare(folder: Path, why: str) -> str:
    """Add the hash of today's code to the file; returns it."""
    path, today = folder / FILE, code_sha256()
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, today: why}, indent=1) + "\n", encoding="utf-8")
    return today


if __name__ == "__main__":
    print(declare(Path("lab/benchmarks/results/bench"), sys.argv[1]))
