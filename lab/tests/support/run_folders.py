"""Run folders as ``hdet train`` writes them, small, for tests that put something else into them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hdet_lab.runs.settings import Settings

NUM_STEPS, INTERVAL = 12, 4


def facts() -> dict[str, Any]:
    """``config.json``."""
    knobs: Any = ("eps",)
    settings = Settings("small-gpt", method="loss", steps=NUM_STEPS, interval=INTERVAL, replicas=2, knobs=knobs)
    hardware = {"system": "Linux", "cpu": "a fast one", "num_cores": 2, "gpus": []}
    about = {"hdet": "0", "torch": "2", "data_sha256": "0" * 64, "hardware": hardware}
    return {"config": settings.as_dict(), "groups": ["decay", "no_decay"], **about}


def entries() -> list[dict[str, Any]]:
    """``metrics.jsonl``: three rounds and the end."""
    found: list[dict[str, Any]] = []
    for index in range(NUM_STEPS // INTERVAL):
        base = 1e-3 / (index + 1)
        found.append(
            {
                "event": "round",
                "step": INTERVAL * (index + 1),
                "index": index,
                "losses": [5.0 - index, 5.1 - index],
                "values": [[0.9 * base, 1.1 * base], [1.8 * base, 2.2 * base]],
                "base_values": [base, 2 * base],
                "scales": [1.0, 2.0],
                "control": {"z": [-2.0 + index]},
                "unhealthy": [],
                "num_rollbacks": 0,
                "distance": 0.01 * (index + 1),
                "knobs": {"eps": {"values": [1e-8, 2e-8], "base": 1.5e-8}},
                "converge_s": 0.001,
                "time_s": float(index),
            }
        )
    validation = {"loss": 2.5, "accuracy": 0.5}
    end = {"event": "end", "status": "done", "step": NUM_STEPS, "validation": validation, "time_s": 12.0}
    return copy.deepcopy([*found, end])


def write(folder: Path, config: Any, lines: list[Any]) -> Path:
    """The two files a report needs, whatever is in them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
