"""The first sentence of a report: true, about what was compared, and in plain words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hdet_lab.reports.charts import Group
from hdet_lab.reports.headline import headline
from hdet_lab.reports.run import Run


def run(loss: float | None, *, scale: float = 1.0, lr: float = 1e-3, seed: int = 0, **about: Any) -> Run:
    entry = {"step": 10, "index": 0, "losses": [1.0], "values": [[lr * scale]], "base_values": [lr * scale]}
    entry |= {"scales": [scale], "control": {}, "unhealthy": [], "num_rollbacks": 0, "distance": 0.0}
    about = {"method": "AutoLR" if scale != 1 else "the fixed schedule", "status": "done", **about}
    return Run("run", [entry], ["all"], seed=seed, validation={"loss": loss}, **about)


def fixed(*losses: float | None, lr: float = 1e-3) -> Group:
    return Group(f"fixed, lr {lr:g}", [run(loss, lr=lr, seed=seed) for seed, loss in enumerate(losses)], fixed=True)


def learned(*losses: float | None, scale: float = 30.0) -> Group:
    return Group("AutoLR", [run(loss, scale=scale, seed=seed) for seed, loss in enumerate(losses)])


FOUND = "AutoLR found a peak learning rate of 0.03, 30 times the 0.001 it was given"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([learned(2.0)], f"{FOUND}; the validation loss ended at 2."),
        ([learned(None)], f"{FOUND}; the loss is not finite."),
        (
            [learned(2.0, scale=1 / 30)],
            "AutoLR found a peak learning rate of 3.3e-05, 1/30 of the 0.001 it was given; the validation loss ended "
            "at 2.",
        ),
        (
            [fixed(2.0)],
            "The fixed schedule trained at learning rates up to 0.001, as scheduled; the validation loss ended at 2.",
        ),
        (
            [fixed(4.0), learned(2.0)],
            f"{FOUND}. Its validation loss is 50% lower than with the same schedule left as it is: 2 against 4.",
        ),
        (
            [fixed(2.0), learned(2.1)],
            f"{FOUND}. Its validation loss is 5.0% higher than with the same schedule left as it is: 2.1 against 2.",
        ),
        (
            [fixed(2.0, lr=0.05), fixed(3.0, lr=0.2), learned(1.0)],
            f"{FOUND}. Its validation loss is 50% lower than with the best fixed learning rate (fixed, lr 0.05): 1 "
            "against 2.",
        ),
        (
            [fixed(None), learned(2.0)],
            f"{FOUND}, and ended at a validation loss of 2; the same schedule left as it is broke.",
        ),
        ([fixed(2.0), learned(None)], f"{FOUND}, but has no finite validation loss."),
        # The third seed of one of them is not compared with nothing.
        (
            [fixed(4.0, 4.0, 100.0), learned(2.0, 2.0)],
            f"{FOUND}. Its validation loss is 50% lower than with the same schedule left as it is: 2 against 4 (means "
            "over 2 seeds).",
        ),
        (
            [fixed(4.0), learned(2.0), learned(3.0)],
            f"{FOUND}. Its validation loss is 50% lower than with the same schedule left as it is: 2 against 4. It is "
            "the best of 2 configurations that learn.",
        ),
        (
            [learned(2.0), learned(3.0)],
            "Of 2 configurations AutoLR has the lowest validation loss: 2, ahead of AutoLR (3).",
        ),
        (
            [fixed(2.0), Group("AutoLR", [run(1.0, scale=30.0, num_steps=500)])],
            f"{FOUND}. Its validation loss is 50% lower than with the same schedule left as it is: 1 against 2. These "
            "runs differ in length.",
        ),
        ([learned(None), learned(None)], "None of the 2 configurations has a finite loss."),
    ],
)
def test_headline(groups: list[Group], expected: str) -> None:
    assert headline(groups) == expected


def test_a_run_without_any_numbers_has_a_headline() -> None:
    bare = run(None)
    bare.rounds[0] |= {"losses": [None], "base_values": [None], "scales": [None]}
    assert math.isnan(bare.peak)
    assert headline([Group("bare", [bare])]) == "The fixed schedule trained for 10 steps; the loss is not finite."
