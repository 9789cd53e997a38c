"""Whether runs of AutoLR are of the code that ships, by the hash of what decides, and which hashes are equivalent.

python -m hdet_lab.bench.versions "why the code of today behaves like that of the other hashes"
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hdet_lab.runs.code_hash import code_sha256

FILE = "versions.json"
"""Beside the records: names of code that is equivalent, each with one line that says why.

A name is a hash, or ``golden`` and a hash of the golden trajectories, which stands for all code that keeps them. Or
the name of a task, whose runs are of an earlier version all the same.
"""
GOLDEN = Path("tests") / "golden" / "trajectories.json"
GOLDEN_RUNS = ("AdamW", "SGD", "SGD with momentum", "updates of a fixed size", "rollback", "two ranks")
"""Those of AutoLR as the benchmark uses it: around an optimizer, with the number of steps."""
OF_AUTOLR = ("autolr", "autolr-adamw", "autolr-muon")
MARK = "†"
SENTENCE = f"{MARK}: runs of an earlier version of AutoLR."


def equivalent(folder: Path) -> frozenset[str]:
    """The hashes of the code whose runs count as those of today's."""
    path, today = folder / FILE, code_sha256()
    declared = frozenset(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else frozenset()
    return declared | {today} if declared & {today, golden_name(folder)} else frozenset({today})


def golden_name(folder: Path) -> str:
    """Of the golden trajectories in the repository that holds the folder of records; empty where there are none."""
    parents = folder.resolve().parents
    path = parents[3] / GOLDEN if len(parents) > 3 else GOLDEN
    if not path.exists():
        return ""
    runs = json.loads(path.read_text(encoding="utf-8"))["trajectories"]
    kept = [[name, runs[name]["lrs"], runs[name]["weights"]] for name in GOLDEN_RUNS]
    return f"golden {hashlib.sha256(json.dumps(kept).encode()).hexdigest()}"


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
