"""Every public constructor, with anything for an argument: a clear error and nothing changed, or an object that trains.

One to three arguments of a valid call are replaced. An error must be a ValueError or TypeError that names one of them
and shows what it was. ``HDET_FUZZ_EXAMPLES=1000`` in the environment makes a long run.
"""

from __future__ import annotations

import copy
import math
import os
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from hdet import (
    Adapt,
    AutoLR,
    Averaging,
    Copies,
    Ensemble,
    Explorer,
    Faults,
    OneCycleAutoLR,
    RoundRecord,
    knobs,
    warm_noisy_init,
)
from hdet.controllers import EvidenceController
from hdet.ensemble.controllers import JointController, PaperController
from hdet.ensemble.outer import Nesterov
from hdet.sinks import JsonLinesSink, TensorBoardSink

INTERVAL = 2
MANY = int(os.environ.get("HDET_FUZZ_EXAMPLES", "0"))
"""How many examples a constructor gets, in a long run."""

NASTY: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, False, 0, 1, -1, 3, 2**60, 10**400, -(10**5000), 0.0, -0.0, 0.5, 1.0, 1.5)),
    *(lambda v=v: v for v in (-0.1, 1e-320, 1e300, -1e300, math.nan, math.inf, -math.inf, 1j, "", "text", "cpu", b"x")),
    *(
        tuple,
        list,
        dict,
        set,
        object,
        lambda: (1, 2),
        lambda: [0.5],
        lambda: [None],
        lambda: (0.5, 2.0),
        lambda: {"a": 1},
    ),
    lambda: np.array([1.0, 2.0]),
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.tensor(0.5),
    lambda: torch.float32,
    lambda: torch.device("meta"),
    lambda: nn.Linear,
    lambda: len,
]


class Setting:
    """What constructors take: a model, its optimizer and a schedule."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.temperature, self.criterion = 1.5, nn.CrossEntropyLoss(label_smoothing=0.1)
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(0.1)
        groups = [{"params": [p]} for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        self.batch = torch.linspace(-1, 1, 8).view(4, 2)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.batch).square().mean()
        return loss

    def train(self, scheduler: Any = None, steps: int = 2 * INTERVAL) -> None:
        for _ in range(min(steps, getattr(scheduler, "total_steps", None) or steps)):
            self.optimizer.zero_grad()
            loss = self.loss()
            torch.autograd.backward(loss)
            self.optimizer.step()
            if scheduler is not None:
                scheduler.step(loss)

    def explore(self, *chosen: Any, **options: Any) -> None:
        options = {"interval": INTERVAL, "gradients": "local", "probe": self.loss, **options}
        self.train(Explorer(self.model, self.optimizer, knobs=chosen, **options))

    def facts(self) -> Any:
        return (
            copy.deepcopy(
                [{**group, "params": [id(p) for p in group["params"]]} for group in self.optimizer.param_groups]
            ),
            [t.detach().numpy().tobytes() for t in self.model.state_dict().values()],
            (self.model[1].p, self.temperature, self.criterion.label_smoothing),
            torch.get_rng_state().numpy().tobytes(),
            (random.getstate(), repr(np.random.get_state())),
        )


def _auto_lr(s: Setting, schedule: Any = "cosine", **arguments: Any) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "cosine": lambda: CosineAnnealingLR(s.optimizer, 400),
        "lambda": lambda: LambdaLR(s.optimizer, lambda _: 1.0),
    }
    if isinstance(schedule, str) and schedule in made:
        schedule = made[schedule]()
    return lambda: s.train(AutoLR(schedule, **arguments))


def _acting(controller: Any) -> Adapt:
    return Adapt(controller=controller, _start_steps=0)


def _record() -> RoundRecord:
    return RoundRecord(0, 2, (1.0,), ((0.1,),), (0.1,), (1.0,), {}, (), 0, 0.0, 0.0)


Build = Callable[..., Callable[[], object]]
"""Makes what the constructor takes, and returns what constructs and uses it."""

FLAG = [True, False]
UNIT = [0.0, 0.1, 0.9]
GROUPS: dict[str, list[Any]] = {
    "adapt": [Adapt(_start_steps=0)], "copies": [Copies()], "faults": [Faults()]
}  # fmt: skip
CASES: dict[str, tuple[Build, dict[str, list[Any]], str]] = {
    "AutoLR": (
        _auto_lr,
        {
            "schedule": ["cosine", "lambda"], "model": [None],
            "interval": [None, 1, INTERVAL], "total_steps": [None, 100, 400],
            "ensemble": [None, Ensemble(spread=0.1), Ensemble(knobs=[knobs.Epsilon()], seed=7)], "probe": [None],
            "process_group": [None], **GROUPS,
        },
        "ensemble",
    ),
    "OneCycleAutoLR": (
        lambda s, **a: lambda: s.train(OneCycleAutoLR(s.optimizer, **a)),
        {
            "max_lr": [0.01, [0.01, 0.02, 0.01, 0.02]], "total_steps": [None, 4, 20, 400], "epochs": [2],
            "steps_per_epoch": [10], "pct_start": [0.3, 0.0, 0.05, 0.25, 1.0], "anneal_strategy": ["cos", "linear"],
            "cycle_momentum": FLAG, "base_momentum": [0.85], "max_momentum": [0.95], "div_factor": [25.0, 1.0],
            "final_div_factor": [1e4, 1.0], "three_phase": FLAG, "last_epoch": [-1, 0, 3],
            "ensemble_lr_spread_ratio": [0.0, 0.3], "model_sync_interval": [INTERVAL, 5],
            "auto_lr_warmup_steps": [0, 2],
            "enable_auto_lr": FLAG, "loss_scale": [0.1], "lr_of_lr": [0.0, 0.5], "momentum_of_lr": UNIT,
            "rank": [0], "world_size": [1], "model": [None], "process_group": [None],
            "decay": ["schedule", "floor", "printed"],
            "ensemble": [Ensemble(), Ensemble(knobs=[knobs.Epsilon()])], "probe": [None], "faults": [Faults()],
        },
        "OneCycleLR|replicas|auto-LR",
    ),
    "Explorer": (
        lambda s, **a: lambda: s.train(Explorer(**{"model": s.model, "optimizer": s.optimizer, **a})),
        {
            "knobs": [[knobs.Epsilon()], [knobs.LearningRate(), knobs.Beta2()]], "interval": [1, INTERVAL],
            "gradients": ["shared", "local"], "probe": [None, lambda: 1.0], "total_steps": [None, 3],
            "process_group": [None], "seed": [0], "averaging": [Averaging()], "horizon": ["short"],
            "assignment": ["balanced", "permutation"], **GROUPS,
        },
        "model|optimizer",
    ),
    "Knob": (
        lambda s, **a: lambda: s.explore(
            knobs.Knob(**{"get": lambda: s.temperature, "set": lambda v: setattr(s, "temperature", v), **a})
        ),
        {
            "name": ["it"], "low": [0.0, 1.0], "high": [2.0, 9.0], "space": ["linear", "log"], "spread": UNIT,
            "adapt": FLAG, "acts": ["update", "forward", "training"], "fair": [None, True], "check_signal": FLAG,
        },
        "get|set|it",
    ),
    "Attribute": (
        lambda s, **a: lambda: s.explore(knobs.Attribute(s, **a)),
        {
            "attribute": ["temperature"], "low": [0.0], "high": [2.0, 9.0], "space": ["linear", "log"],
            "spread": UNIT, "adapt": FLAG, "acts": ["forward", "training"], "fair": [None], "check_signal": FLAG,
            "name": [None, "mine"],
        },
        "temperature|Setting|mine",
    ),
    "Dropout": (
        lambda s, **a: lambda: s.explore(knobs.Dropout(**{"model": s.model, **a})),
        {"names": [None, ["1"]], "low": [0.0], "high": [0.9], "spread": UNIT, "adapt": FLAG, "check_signal": FLAG},
        "dropout|model",
    ),
    "LabelSmoothing": (
        lambda s, **a: lambda: s.explore(knobs.LabelSmoothing(**{"criterion": s.criterion, **a})),
        {"low": [0.0], "high": [0.5], "spread": UNIT, "adapt": FLAG, "check_signal": FLAG},
        "label_smoothing|criterion",
    ),
    "Temperature": (
        lambda s, **a: lambda: s.explore(knobs.Temperature(s, **a)),
        {"attribute": ["temperature"], "low": [1e-4], "high": [1e4], "spread": UNIT, "adapt": FLAG, "name": [None]},
        "temperature|Setting",
    ),
    "WeightDecay": (
        lambda s, **a: lambda: s.explore(knobs.WeightDecay(**a)),
        {"low": [1e-6], "high": [10.0], "spread": UNIT, "adapt": FLAG, "check_signal": FLAG},
        "weight_decay",
    ),
    "Epsilon": (
        lambda s, **a: lambda: s.explore(knobs.Epsilon(**a)),
        {"low": [1e-12], "high": [1e-2], "spread": UNIT, "adapt": FLAG},
        "eps",
    ),
    "Momentum": (
        lambda s, **a: lambda: s.explore(knobs.Momentum(**a)),
        {"low": [0.1], "high": [0.999], "spread": UNIT, "adapt": FLAG, "name": ["momentum"]},
        "momentum",
    ),
    "Beta2": (
        lambda s, **a: lambda: s.explore(knobs.Beta2(**a)),
        {"low": [0.5], "high": [0.99999], "spread": UNIT, "adapt": FLAG},
        "beta2",
    ),
    "ClipNorm": (
        lambda s, **a: lambda: s.explore(knobs.ClipNorm(**a)),
        {"value": [1.0], "low": [1e-3], "high": [1e3], "spread": UNIT, "adapt": FLAG},
        "clip_norm",
    ),
    "LearningRate": (
        lambda s, **a: lambda: s.explore(knobs.LearningRate(**a)),
        {"spread": UNIT, "groups": ["together", "each"], "adapt": FLAG},
        "learning_rate",
    ),
    "Nesterov": (
        lambda s, **a: lambda: s.explore(averaging=Averaging(outer=Nesterov(**a))),
        {"lr": [0.7, 1.0], "momentum": UNIT},
        "outer",
    ),
    "Adapt": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, adapt=Adapt(**a))(),
        {
            "controller": [None, EvidenceController(), PaperController()],
            "anchor": ["start", "round", 3], "groups": ["together", "each"], "level": [None, True, False],
            "bounds": [(1e-3, 1e3), (1.0, 1.0)], "act": FLAG,
        },
        "",
    ),
    "Adapt, of Explorer": (
        lambda s, **a: lambda: s.explore(knobs.Epsilon(), adapt=Adapt(**a)),
        {
            "controller": [None, PaperController()], "anchor": ["start", "round", 2],
            "bounds": [(1e-3, 1e3)], "level": [None],
        },
        "",
    ),
    "Ensemble": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, ensemble=Ensemble(**a))(),
        {
            "spread": [0.0, 0.1, 0.5], "knobs": [(), [knobs.Epsilon()]], "gradients": ["shared"],
            "averaging": [Averaging()], "assignment": ["balanced", "permutation"], "seed": [0, 7],
        },
        "knobs",
    ),
    "Copies": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, copies=Copies(**a))(),
        {
            "anchor_device": [None, "cpu"], "anchor_dtype": [None, torch.bfloat16], "snapshot_device": [None, "cpu"],
            "anchor_share": [None, 1, 1.0, 0.5, 1 / 256],
        },
        "",
    ),
    "Faults": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, faults=Faults(**a))(),
        {
            "max_rollbacks": [None, 0, 20], "quarantine": [None, 20.0], "skip_nonfinite": FLAG,
            "on_fork": ["raise", "repair", "warn"],
        },
        "",
    ),
    "Averaging": (
        lambda s, **a: lambda: s.explore(averaging=Averaging(**a)),
        {
            "outer": ["mean", "fittest", "grawa", "nesterov"], "optimizer_state": ["keep", "average", "reset"],
            "slow_share": [0.1],
        },
        "",
    ),
    "EvidenceController": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, adapt=_acting(EvidenceController(**a)))(),
        {
            "gain": [0.1], "optimism": [0.0, 2.0], "smoothing": UNIT, "up": [0.2], "sprint": [0.2, 0.5],
            "down": [1.0],
        },
        "sprint",
    ),
    "JointController": (
        lambda s, **a: lambda: s.explore(knobs.Epsilon(), adapt=_acting(JointController(**a))),
        {"gain": [0.1], "optimism": [0.0, [0.1, 0.2]], "doubt": [0.0, 1.0], "smoothing": UNIT, "step": [0.2]},
        "optimism",
    ),
    "PaperController": (
        lambda s, **a: lambda: _auto_lr(s, interval=INTERVAL, adapt=_acting(PaperController(**a)))(),
        {"temperature": [0.1], "rate": [0.0, 0.5], "momentum": UNIT},
        "",
    ),
    "warm_noisy_init": (
        lambda s, **a: lambda: (warm_noisy_init(**{"model": s.model, **a}), s.train()),
        {"nu": [0.0, 0.01], "scope": ["tensor", "model"], "seed": [0, 3], "process_group": [None], "filter": [None]},
        "model",
    ),
    "JsonLinesSink": (
        lambda s, **a: lambda: JsonLinesSink(**a)(_record()), {"path": ["rounds.jsonl", Path("a/b.jsonl")]}, ""
    ),
    "TensorBoardSink": (
        lambda s, **a: lambda: TensorBoardSink(**a)(_record()), {"folder": ["board", Path("a/b")]}, ""
    ),
}  # fmt: skip

BASE: dict[str, dict[str, Any]] = {
    "OneCycleAutoLR": {"max_lr": 0.01, "total_steps": 20, "model_sync_interval": INTERVAL, "auto_lr_warmup_steps": 2},
    "Explorer": {"knobs": [], "gradients": "local", "interval": INTERVAL},
    "Knob": {"name": "it", "low": 0.0, "high": 9.0},
    "Attribute": {"attribute": "temperature", "low": 0.0, "high": 9.0},
    "Temperature": {"attribute": "temperature"},
    "ClipNorm": {"value": 1.0},
    "JsonLinesSink": {"path": "rounds.jsonl"},
    "TensorBoardSink": {"folder": "board"},
}
EXTRA = {
    "Explorer": ("model", "optimizer"),
    "Knob": ("get", "set"),
    "Dropout": ("model",),
    "warm_noisy_init": ("model",),
}


def _shown(value: Any) -> list[str]:
    """How an error may show a value: itself, its kind, its size, or the kind of what it holds."""
    try:
        texts = [repr(value), str(value)]
    except ValueError:  # an integer of more digits than Python prints
        texts = []
    if isinstance(value, (int, float, np.floating, np.integer)) and -1e300 < value < 1e300:
        texts += [f"{value:g}", str(float(value))]
    if isinstance(value, (list, tuple)):
        texts += [str(len(value)), *(type(entry).__name__ for entry in value)]
    return [*(text[:20] for text in texts), type(value).__name__]


def _check(name: str, arguments: dict[str, Any]) -> None:
    build, _, others = CASES[name]
    if any(callable(arguments.get(name)) for name in ("get", "set", "filter")):
        return  # what a function of the user's raises is the user's
    setting = Setting()
    use = build(setting, **{**BASE.get(name, {}), **arguments})
    before = setting.facts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use()
        except (ValueError, TypeError) as error:
            text = str(error)
            assert re.search(rf"\b({'|'.join([*arguments, *filter(None, others.split('|'))])})\b", text), text
            # torch says of nothing at all only that it is missing, and of a function there is no more to say.
            values = [value for value in arguments.values() if value is not None]
            fine = all(map(callable, values)) or any(shown in text for value in values for shown in _shown(value))
            assert fine, text
            assert setting.facts() == before, f"{text}: but something has changed"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_clear_error_or_an_object_that_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    valid = CASES[name][1]
    names = [*valid, *EXTRA.get(name, ())]
    examples = MANY or 12

    @settings(max_examples=examples, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        values = {}
        for argument in chosen:
            made = data.draw(st.sampled_from([*[lambda v=v: v for v in valid.get(argument, ())], *NASTY]))
            values[argument] = made()
        _check(name, values)

    check()


@pytest.mark.parametrize("name", CASES)
def test_each_argument_with_each_value(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One argument at a time: in a usual run every thirteenth value, shifted from argument to argument."""
    monkeypatch.chdir(tmp_path)
    every = 1 if MANY else 13
    for index, argument in enumerate([*CASES[name][1], *EXTRA.get(name, ())]):
        for make in NASTY[index % every :: every]:
            value = make()
            try:
                _check(name, {argument: value})
            except Exception as error:
                raise AssertionError(f"{argument}={_shown(value)}: {type(error).__name__}: {error}") from error
