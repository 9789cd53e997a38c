"""One record of reference for each entry, gathered from the files of its methods, and small enough to be kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet_lab.bench.statistics import best_condition
from hdet_lab.bench.suite import BY_NAME, CALIBRATIONS

FACTS = ("hdet", "git_commit", "code_sha256", "torch", "python", "numpy", "hardware", "data_sha256", "matmul_precision",
         "batch_rows", "num_parameters")  # fmt: skip
Condition = tuple[str, float]
"""Schedule and learning rate."""


@dataclass(frozen=True)
class Record:
    """All runs of an entry.

    Attributes:
        name, half, task, optimizer, steps: of the entry.
        facts: versions, commit, hardware and data, each with the ``methods`` whose runs it is of (all but those that
            others name, where it names none).
        methods: method to its runs, as written; ``loss`` is infinite where a run broke.
        defaults: method to schedule and learning rate chosen on half A.
        seconds: method to how long all its runs took.
    """

    name: str
    half: str
    task: str
    optimizer: str
    steps: int
    facts: list[dict[str, Any]]
    methods: dict[str, list[dict[str, Any]]]
    defaults: dict[str, Condition]
    seconds: dict[str, float]

    def losses(self, method: str) -> dict[Condition, dict[int, float]]:
        """Condition to seed to loss."""
        found: dict[Condition, dict[int, float]] = {}
        for run in self.methods.get(method, ()):
            found.setdefault((run["schedule"], run["lr"]), {})[run["seed"]] = run["loss"]
        return found

    def best(self, method: str = "grid") -> Condition:
        """The condition with the lowest mean over seeds."""
        return best_condition({key: list(losses.values()) for key, losses in self.losses(method).items()})


def load(folder: Path) -> list[Record]:
    """All records of a folder, in the order of the suite."""
    paths = [folder / f"{name}.json" for name in BY_NAME]
    return [_record(json.loads(path.read_text())) for path in paths if path.exists()]


def of_files(folder: Path) -> Record | None:
    """The record of one entry from the files of its methods; None where there are none."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return _record(_merge(files)) if files else None


def _record(data: dict[str, Any]) -> Record:
    for runs in data["methods"].values():
        for run in runs:
            run["loss"] = math.inf if run["loss"] is None else run["loss"]
    data["defaults"] = {method: (shape, lr) for method, (shape, lr) in data["defaults"].items()}
    return Record(**data)


def gather(out: Path, folder: Path) -> None:
    """Write the record of every entry that has files in ``out``; methods without a file there stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in BY_NAME:
        paths = sorted((out / name).glob("*.json"))
        if paths:
            record, kept = _merge([json.loads(path.read_text()) for path in paths]), folder / f"{name}.json"
            if kept.exists():
                record = _updated(json.loads(kept.read_text()), record)
            kept.write_text(_text(record))


def _updated(record: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A record with the methods of a newer one in place of its own; a fact names the methods it is of."""
    for fact in record["facts"]:
        if "methods" in fact:
            fact["methods"] = [method for method in fact["methods"] if method not in new["methods"]]
    facts = [fact for fact in record["facts"] if fact.get("methods", True)] + new["facts"]
    parts = {key: {**record[key], **new[key]} for key in ("methods", "defaults", "seconds")}
    return {**record, "facts": facts, **parts}


def _merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    config = files[0]["config"]
    facts: list[dict[str, Any]] = []
    methods: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for file in files:
        method = file["config"]["method"]
        for known in file["facts"]:
            fact = {key: known[key] for key in FACTS if key in known}
            same = next((each for each in facts if {**each, "methods": 0} == {**fact, "methods": 0}), None)
            if same is None:
                facts.append({**fact, "methods": [method]})
            elif method not in same["methods"]:
                same["methods"].append(method)
        methods[method] = list(_compact(method, file["runs"]))
        defaults |= file["defaults"]
    first = {"name": config["entry"], **{key: config[key] for key in ("half", "task", "optimizer", "steps")}}
    seconds = {file["config"]["method"]: file["seconds"] for file in files}
    return {**first, "facts": facts, "methods": methods, "defaults": defaults, "seconds": seconds}


def _compact(method: str, runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Runs with few digits; of a grid, only its best condition keeps its curves."""
    best = _best(runs) if method.endswith("grid") and method not in CALIBRATIONS.values() else None
    for run in runs:
        small = {key: value for key, value in run.items() if key not in ("curve", "lrs", "others")}
        small["loss"] = _rounded(run["loss"], 6)
        if method in CALIBRATIONS.values() or (best is not None and (run["schedule"], run["lr"]) != best):
            yield small
            continue
        if run.get("curve"):
            small["curve"] = [[step, _rounded(loss, 5)] for step, loss in run["curve"]]
        if run.get("lrs"):
            small["lrs"] = [[step, _rounded(lr, 3)] for step, lr in run["lrs"]]
        yield small


def _best(runs: list[dict[str, Any]]) -> Condition:
    losses: dict[Condition, list[float]] = {}
    for run in runs:
        losses.setdefault((run["schedule"], run["lr"]), []).append(math.inf if run["loss"] is None else run["loss"])
    return best_condition(losses)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _text(record: Mapping[str, Any]) -> str:
    """JSON with one run a line."""
    tight: Any = {"separators": (",", ":"), "allow_nan": False}
    head = json.dumps({key: value for key, value in record.items() if key != "methods"}, **tight)
    methods = [
        json.dumps(method) + ":[\n" + ",\n".join(json.dumps(run, **tight) for run in runs) + "\n]"
        for method, runs in record["methods"].items()
    ]
    return head[:-1] + ',"methods":{\n' + ",\n".join(methods) + "\n}}\n"
