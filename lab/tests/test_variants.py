"""The benchmark of single rules: each is found in the controller as it is, and taken out of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hdet.controllers import Evidence, LevelController


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("variants")


def _scale_after(controller: Any, rounds: int = 40) -> float:
    """Losses that fall along a line, with a slope that is sure of it."""
    state, scale = controller.init(1), 1.0
    for index in range(rounds):
        loss, step = np.array([10.0 - 0.1 * index]), float(index + 1)
        seen = Evidence(
            loss, np.ones((1, 1)), (np.array([-0.1 * step]), np.array([0.001])),
            start=(10.0, 0.01), elapsed=1 / step, progress=index / rounds,
        )  # fmt: skip
        state, decision = controller.update(state, seen)
        scale *= float(decision.factors[0])
    return scale


def test_every_rule_can_be_taken_out(variants: ModuleType) -> None:
    for edits in variants.RULES.values():
        # Raises where a rule's text is not found, or a name is left undefined; no rule alone makes this run rise.
        assert _scale_after(variants.without(edits)()) > 1
    assert _scale_after(variants.without(())()) == _scale_after(LevelController())
    assert _scale_after(variants.without(variants.RULES["linear loss"])()) < _scale_after(LevelController())


def test_what_is_no_rule_is_refused(variants: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"the rule must be found in .*level\.py, but there is no 'no such line'"):
        variants.without((("no such line", ""),))


def test_a_rule_is_judged_task_by_task(variants: ModuleType) -> None:
    losses = {"a": {"": {0: 1.0, 1: 2.0}, "jump": {0: 1.1, 1: 2.2}}, "b": {"": {0: 1.0}, "jump": {0: 1.0}}}
    found = variants.compared(losses)
    assert found[""] == (0.0, 0.0)
    assert found["jump"] == pytest.approx((100 * np.log(1.1) / 2, 100 * np.log(1.1) / 2 / np.sqrt(2)))
