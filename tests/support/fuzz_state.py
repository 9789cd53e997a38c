"""Fuzzes ``load_state_dict``: real states, mutated, loaded into live schedulers.

Each mutation ends in one of two ways: a ValueError with a text, after which nothing reachable from scheduler, optimizer
and model differs in a single bit; or a load with which two rounds of training run. ``test_fuzz_state.py`` runs a few
hundred; ``python tests/support/fuzz_state.py --mutations 10000`` runs many.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import math
import random
import reprlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs
from hdet.controllers import Decision, Evidence
from hdet.launch import launch
from options import grouped, with_ensemble

TOTAL, INTERVAL = 24, 3


class _Seen(NamedTuple):
    count: Any
    table: Any


class _Custom:
    """A controller of a user: it counts rounds, and moves nothing by much."""

    def init(self, num_knobs: int) -> _Seen:
        return _Seen(np.zeros(()), np.zeros((num_knobs, 2)))

    def update(self, state: _Seen, evidence: Evidence) -> tuple[_Seen, Decision]:
        factors = np.full(len(evidence.multipliers), 1.01)
        return _Seen(np.tanh(state.count) + 1, np.tanh(state.table)), Decision(factors, {})


class Subject:
    """A scheduler with its model and optimizer, trained for some steps."""

    def __init__(self, kind: str, steps: int) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.BatchNorm1d(3), nn.Linear(3, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        first, *rest = self.model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 0.02, "weight_decay": 0.05}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        self.data = torch.randn(64, 2, generator=generator)
        self.end = math.inf
        self.knobs: list[Any] = []
        self.scheduler = self._make(kind)
        self.train(steps)

    def _make(self, kind: str) -> Any:
        model, optimizer = self.model, self.optimizer
        name, _, detail = kind.partition(" ")
        options: dict[str, Any] = {"model": model}
        if name == "AutoLR":
            options["interval"] = INTERVAL
            schedule: Any = OneCycleLR(optimizer, [0.02, 0.01], TOTAL)
            if detail in ("gradient", "started"):
                self.end = TOTAL
                options |= {"groups": "each", "level": detail == "gradient"}
            elif detail == "sequential":
                parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, TOTAL, eta_min=1e-4)]
                schedule = SequentialLR(optimizer, parts, [4])
            elif detail == "custom":
                schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
                options |= {"controller": _Custom(), "start_steps": 1}
            elif detail == "loss":
                self.end = TOTAL
                options |= {"signal": "loss", "level": False, "start_steps": 1}
            return AutoLR(schedule, **with_ensemble(**options))
        if name == "OneCycleAutoLR":
            self.end = TOTAL
            options |= {"total_steps": TOTAL, "model_sync_interval": INTERVAL, "auto_lr_warmup_steps": 2}
            options |= {"ensemble_lr_spread_ratio": 0.3, "enable_auto_lr": True, "loss_scale": 0.1}
            if detail == "floor":
                options["decay"] = "floor"
            if detail == "knobs":
                options |= {"knobs": self._knobs(), "gradients": "local", "probe": self.loss}
            return OneCycleAutoLR(optimizer, [0.02, 0.01], **with_ensemble(**options))
        rate = knobs.LearningRate(groups="each")
        if detail == "nesterov":
            options = {"gradients": "local", "probe": self.loss, "outer": "nesterov"}
            return Explorer(model, optimizer, knobs=[*self._knobs(), rate], interval=INTERVAL, **grouped(**options))
        self.knobs = [knobs.Epsilon(), knobs.Beta2()]
        return Explorer(model, optimizer, knobs=[*self.knobs, rate], interval=INTERVAL, adapt=Adapt(anchor="round"))

    def _knobs(self) -> list[Any]:
        self.knobs = [knobs.WeightDecay(), knobs.Dropout(self.model)]
        return self.knobs

    def loss(self) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        first = (self.scheduler.last_epoch * 8 + rank) % 48
        batch = self.data[first : first + 8]
        return nn.functional.mse_loss(self.model(batch), torch.sin(batch.sum(1, keepdim=True)))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss()
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.scheduler.step(loss)

    def state(self) -> dict[str, Any]:
        with self.scheduler.converged():
            return copy.deepcopy(self.scheduler.state_dict())

    def two_rounds(self) -> None:
        """Train on, as far as the schedule goes, and look at the learning rates and knobs of each step."""
        end = min(self.end, getattr(getattr(self.scheduler, "schedule", None), "total_steps", math.inf))
        for _ in range(2 * INTERVAL):
            lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            assert all(0 < lr < math.inf for lr in lrs), f"learning rates became {lrs}"
            for knob in self.knobs:
                assert knob.low <= float(knob._get()) <= knob.high, f"{knob.name} became {knob._get()}"
            if self.scheduler.last_epoch >= min(end, getattr(self.scheduler, "total_steps", None) or math.inf):
                return
            self.train(1)


ALONE = (
    *(
        "AutoLR gradient",
        "AutoLR started",
        "AutoLR sequential",
        "AutoLR custom",
        "OneCycleAutoLR paper",
        "OneCycleAutoLR floor",
    ),
    *("OneCycleAutoLR knobs", "Explorer knobs", "Explorer nesterov"),
)
APART = (
    *("AutoLR loss", "OneCycleAutoLR paper", "OneCycleAutoLR floor", "OneCycleAutoLR knobs"),
    *("Explorer knobs", "Explorer nesterov"),
)


# -- everything that must not change ------------------------------------------------------------------------------

_SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)


def frozen(value: Any, found: dict[int, Any] | None = None) -> Any:
    """All that is reachable from ``value``, as something that compares equal only where every bit is the same."""
    found = {} if found is None else found
    if value is None or isinstance(value, (bool, int, str, bytes, complex)):
        return type(value), value
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, _SKIPPED):
        return type(value)
    if id(value) not in found:
        found[id(value)] = "a circle", value  # held on to: another object must not get its identity
        found[id(value)] = _parts(value, found), value
    return found[id(value)][0]


def _parts(value: Any, found: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        grad = None if value.grad is None else frozen(value.grad, found)
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes(), value.requires_grad, grad
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), tuple((k if isinstance(k, str) else id(k), frozen(v, found)) for k, v in value.items())
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), tuple(frozen(v, found) for v in value)
    return type(value), frozen(vars(value), found) if hasattr(value, "__dict__") else None


def everything(subject: Subject) -> Any:
    closures = [cell.cell_contents for knob in subject.knobs for cell in knob._set.__closure__ or ()]
    return frozen([subject.scheduler, subject.optimizer, subject.model, closures])


# -- mutations ----------------------------------------------------------------------------------------------------


def _recursive() -> Any:
    loop: list[Any] = [1.0]
    loop.append(loop)
    return loop


def _deep() -> Any:
    nested: Any = 1.0
    for _ in range(3000):
        nested = [nested]
    return nested


JUNK: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, False, 0, 1, -1, 7, 2**70, 10**400, -0.0, 0.5, -3.5, 1e-320, 1e30, 1e300)),
    *(lambda v=v: v for v in (math.nan, math.inf, -math.inf, 1j, "", "0", "nan", "max_lr", "é" * 50, b"\x00")),
    *(list, dict, set, object, _recursive, _deep, lambda: [[]], lambda: {"a": {"b": [None]}}, lambda: {1: 2, "x": 3}),
    lambda: (1, 2),
    lambda: range(3),
    lambda: iter([1.0]),
    lambda: np.float32(1.5),
    lambda: np.int64(3),
    lambda: np.bool_(True),
    lambda: np.array([1.0, math.nan]),
    lambda: np.zeros((2, 2, 2)),
    lambda: np.array("text"),
    lambda: torch.tensor(1.0),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.ones(3, 2, device="meta"),
    lambda: nn.Linear(2, 1),
]

TENSORS: list[Callable[[Tensor], Any]] = [
    lambda t: t.flatten()[:-1],
    lambda t: t[None],
    lambda t: t.T if t.dim() == 2 else t.new_zeros(()),
    lambda t: t.to(torch.int32),
    lambda t: t.to(torch.bool),
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.float16),
    lambda t: t.double(),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: torch.full_like(t, math.nan),
    lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, math.inf, t),
    lambda t: t * 1e30,
    lambda t: t.clone().requires_grad_(),
    lambda t: nn.Parameter(t),
    lambda t: t.numpy(),
    lambda t: t.tolist(),
    lambda t: t[:1].expand_as(t),
]

NUMBERS: list[Callable[[Any], Any]] = [
    lambda x: -x,
    lambda x: x + 1,
    lambda x: x - 1,
    lambda x: x + 0.5,
    lambda x: x * 1e6,
    lambda x: float(x),
    lambda x: str(x),
    lambda x: bool(x),
    lambda x: [x],
    lambda x: np.float64(x),
    lambda x: torch.tensor(x),
]

LISTS: list[Callable[[list[Any]], Any]] = [
    lambda x: x[:-1],
    lambda x: x + x[-1:],
    lambda x: x + x,
    lambda x: x[::-1],
    lambda x: [x],
    lambda x: tuple(x),
    lambda x: [],
    lambda x: dict(enumerate(x)),
    lambda x: [str(v)[:9] for v in x],
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = () if len(path) == 6 else value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) and len(path) < 6 else items
    for key, entry in items:
        yield from _places(entry, (*path, key))


def mutated(state: dict[str, Any], others: list[dict[str, Any]], dice: random.Random) -> tuple[Any, str]:
    """A changed copy, and what was done to it."""
    state, said = copy.deepcopy(state), []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        path = dice.choice(list(_places(state)))
        if not path:
            if dice.random() < 0.9:
                continue
            return dice.choice(JUNK)(), "junk instead of a state"
        *way, key = path
        parent: Any = state
        for part in way:
            parent = parent[part]
        old = parent[key]
        action = dice.choice(
            ("junk", "junk", "kind", "kind", "kind", "delete", "rename", "duplicate", "swap", "itself")
        )
        if action == "junk":
            parent[key] = dice.choice(JUNK)()
        elif action == "kind":
            if isinstance(old, Tensor):
                with contextlib.suppress(NotImplementedError, RuntimeError):  # it may have been changed before
                    parent[key] = dice.choice(TENSORS)(old)
            elif isinstance(old, (int, float)):
                parent[key] = dice.choice(NUMBERS)(old)
            elif isinstance(old, list):
                parent[key] = dice.choice(LISTS)(old)
            else:
                parent[key] = [old]
        elif action == "delete":
            del parent[key]
        elif action == "rename" and isinstance(parent, dict):
            parent[dice.choice((f"{key}_", "", 3, "optimizer", "step"))] = parent.pop(key)
        elif action == "duplicate" and isinstance(parent, dict):
            parent[dice.choice((f"{key}_", None, "optimizer", "get_lr", "last_epoch"))] = old
        elif action == "swap":
            other: Any = dice.choice(others)
            for part in dice.choice(list(_places(other))):
                other = other[part]
            parent[key] = copy.deepcopy(other)
        elif action == "itself":
            parent[key] = parent
        said.append(f"{action} at {list(path)}")
        if isinstance(parent, dict) and key in parent:
            said[-1] += f": {reprlib.repr(parent[key])[:80]}"
    return state, "; ".join(said)


# -- the run ------------------------------------------------------------------------------------------------------


def states_of(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of each kind before its first step, in mid-round or in the search of a level, and at the end of a round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            Subject(kind, steps).state() for kind in kinds for steps in (0, 2 if kind == "AutoLR gradient" else 4, 6)
        ]


def fuzz(kinds: tuple[str, ...], donors: list[list[dict[str, Any]]], mutations: int, seed: int) -> dict[str, int]:
    """Load ``mutations`` mutated states; ``donors`` are :func:`states_of` these kinds, from any number of replicas."""
    counts = {"refused": 0, "loaded": 0}
    live: dict[str, Subject] = {}
    before: dict[str, Any] = {}
    everyone = [state for states in donors for state in states]
    for index in range(mutations):
        dice = random.Random(f"{seed}/{index}")
        number = index % len(kinds)
        kind = kinds[number]
        state, said = mutated(dice.choice(donors)[3 * number + dice.randrange(3)], everyone, dice)
        label = f"mutation {index} of {kind}, seed {seed} ({said})"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind not in live:
                live[kind] = Subject(kind, 7)
                before[kind] = everything(live[kind])
        subject = live[kind]
        refused = _refused(subject, state, label)
        if refused:
            assert everything(subject) == before[kind], f"{label}: refused ({refused}), but something has changed"
        if dist.is_initialized():
            all_said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_said, bool(refused))
            assert len(set(all_said)) == 1, f"{label}: refused by some replicas only: {all_said}"
        if refused:
            counts["refused"] += 1
        else:
            counts["loaded"] += 1
            _works(live.pop(kind), kind, label)
    return counts


def _refused(subject: Subject, state: Any, label: str) -> str:
    generator = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the round that ended at step")
        try:
            subject.scheduler.load_state_dict(state)
        except ValueError as error:
            text = str(error)
            assert text.startswith("state_dict "), f"{label}: a text without a subject: {text}"
            assert len(text) < 2000, f"{label}: a text of {len(text)} characters"
            return text
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__} instead of ValueError") from error
        finally:
            assert torch.equal(generator, torch.get_rng_state()), f"{label}: the random state has changed"
    return ""


def _works(subject: Subject, kind: str, label: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the round that ended at step")
        try:
            subject.two_rounds()
            saved = subject.state()
            warnings.simplefilter("ignore")
            fresh = Subject(kind, 0)
            fresh.scheduler.load_state_dict(saved)
        except Exception as error:
            raise AssertionError(f"{label}: loaded, but {type(error).__name__}: {error}") from error


def fuzz_apart(donors: list[list[dict[str, Any]]], mutations: int, seed: int) -> dict[str, int]:
    """On each replica of a launch."""
    return fuzz(APART, [states_of(APART), *donors], mutations, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    of_four = launch(states_of, 4, APART, timeout_s=300)[0]
    apart = options.mutations // 5
    found = fuzz(ALONE, [states_of(ALONE)], options.mutations - apart, options.seed)
    print(f"alone: {found}")
    for found in launch(fuzz_apart, 2, [of_four], apart, options.seed, timeout_s=3600):
        print(f"on 2 replicas: {found}")


if __name__ == "__main__":
    main()
