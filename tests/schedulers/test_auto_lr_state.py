"""AutoLR saved, loaded and *continued*; rollback on several replicas; sharded parameters. All on real processes.

With the gradient signal a resumed run continues bit for bit. With the loss signal it continues to 1e-9: a checkpoint
holds the mean, and placing the replicas around it again rounds.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from hdet import AutoLR
from hdet.controllers import EvidenceController
from hdet.policy.spread import multipliers
from job import Training, launch, world
from options import with_ensemble

TOTAL_STEPS, INTERVAL, SPREAD = 22, 4, 0.3
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, [0.05, 0.02], TOTAL_STEPS, cycle_momentum=False)


def _long_one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, [0.05, 0.02], 2 * TOTAL_STEPS, cycle_momentum=False)


def _cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, TOTAL_STEPS)


def _warm_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, total_iters=6), CosineAnnealingLR(optimizer, TOTAL_STEPS - 6)]
    return SequentialLR(optimizer, parts, [6])


class _Run(Training):
    """A small regression under DDP, all of it a function of the step and the rank."""

    def __init__(
        self, signal: str = "gradient", *, adam: bool = True, schedule: Schedule = _one_cycle, fsdp: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=g))
        self.rank, self.count = world()
        if fsdp:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.count,)))
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        make: Any = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = make(groups, lr=0.05)
        parallel = self.count > 1 and not fsdp
        self.forward: nn.Module = DistributedDataParallel(self.model) if parallel else self.model
        options = {
            "signal": signal,
            "interval": INTERVAL,
            "spread": SPREAD,
            "start_steps": 3,
            "level": False,
            "controller": EvidenceController(),
            **options,
        }
        self.scheduler = AutoLR(schedule(self.optimizer), model=self.model, **with_ensemble(**options))

    def loss(self) -> Tensor:
        """Of this rank's part of a batch of 12 rows."""
        g = torch.Generator().manual_seed(self.scheduler.last_epoch + 1)
        x = torch.randn(12, 3, generator=g, dtype=torch.float64)
        y = torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(12, 1, generator=g, dtype=torch.float64)
        mine = slice(self.rank, None, self.count)
        return nn.functional.mse_loss(self.forward(x[mine]), y[mine])


# -- resuming -------------------------------------------------------------------------------------------------------

RESUMES: dict[str, tuple[dict[str, Any], int]] = {
    "gradient, before the first step": ({}, 0),
    "gradient, at a round's end": ({}, 8),
    "gradient, cosine": ({"schedule": _cosine}, 12),
    "gradient, warm-up then cosine": ({"schedule": _warm_cosine}, 8),
    "gradient, a scale for each group": ({"groups": "each", "adam": False}, 8),
    "gradient, at the last full round": ({}, 20),
    "gradient, in mid-round": ({}, 10),
    "gradient, in mid-round, no losses lost": ({"adam": False}, 11),
    "loss, before the first step": ({"signal": "loss"}, 0),
    "loss, at a round's end": ({"signal": "loss"}, 8),
    "loss, in mid-round": ({"signal": "loss"}, 10),
    "loss, sgd": ({"signal": "loss", "adam": False}, 14),
    "loss, a scale for each group": ({"signal": "loss", "groups": "each"}, 8),
    "loss, anchor renewed": ({"signal": "loss", "anchor": 2}, 12),
    "loss, paper's anchor": ({"signal": "loss", "anchor": "round"}, 8),
}
WITH_ONE = [name for name in RESUMES if name.startswith("gradient")]
WITH_TWO = [
    name
    for name in RESUMES
    if name not in WITH_ONE or name.endswith(("at a round's end", "each group", "in mid-round"))
]
"""Replicas that share gradients are equal: a few cases show that they do what one does."""
IN_ANY_ORDER = {f"{signal}, {when}" for signal in ("gradient", "loss") for when in ("at a round's end", "in mid-round")}
"""Loaded with the optimizer first, and with the scheduler first."""


def _resume(folder: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended at step")
    out: dict[str, Any] = {}
    for name in WITH_ONE if world()[1] == 1 else WITH_TWO:
        options, saved_at = RESUMES[name]
        try:
            path = f"{folder}/{abs(hash(name)) % 10**8}-{world()[1]}.pt"
            out[name] = _one_resume(path, options, saved_at, orders=(False, True) if name in IN_ANY_ORDER else (False,))
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def _one_resume(path: str, options: dict[str, Any], saved_at: int, orders: tuple[bool, ...]) -> dict[str, Any]:
    whole = _Run(**options)
    whole.advance(saved_at)
    path = _from_rank_0(path)
    whole.save(path)
    expected = whole.advance(TOTAL_STEPS)
    got = []
    for scheduler_first in orders:
        resumed = _Run(**options)
        if not scheduler_first:
            resumed.advance(5)  # the state must replace what is there
        resumed.load(path, scheduler_first=scheduler_first)
        earlier = len(resumed.scheduler.history)
        got.append((resumed.advance(TOTAL_STEPS), resumed.told()[earlier:]))
    later = [record for record in whole.told() if record["step"] > saved_at]
    return {"expected": (expected, later), "got": got}


def _from_rank_0(value: str) -> str:
    """Strings hash differently in every process."""
    if world()[1] == 1:
        return value
    found: list[Any] = [value]
    dist.broadcast_object_list(found, 0)
    return str(found[0])


@pytest.fixture(scope="module")
def resumes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("resumes"))
    return {1: [_resume(folder)], 2: launch(_resume, 2, folder, timeout_s=150)}


@pytest.mark.parametrize(("count", "name"), [*((1, name) for name in WITH_ONE), *((2, name) for name in WITH_TWO)])
def test_a_resumed_run_continues_as_the_uninterrupted_one(
    resumes: dict[int, list[dict[str, Any]]], count: int, name: str
) -> None:
    for result in resumes[count]:
        assert isinstance(result[name], dict), result[name]
        steps, history = result[name]["expected"]
        assert history[-1]["scales"] != (1.0,)
        for rows, told in result[name]["got"]:
            if name.startswith("gradient"):
                assert rows == steps
                assert repr(told) == repr(history)  # equal, NaN too
                continue
            assert [row[0] for row in rows] == [row[0] for row in steps]
            for mine, theirs in zip(rows, steps, strict=True):
                assert_allclose(mine[1], theirs[1], rtol=1e-9)
                assert_allclose(mine[2], theirs[2], rtol=1e-9, atol=1e-12)
            for record, other in zip(told, history, strict=True):
                assert_allclose(record["scales"], other["scales"], rtol=1e-9)
                assert_allclose(record["losses"], other["losses"], rtol=1e-9)


def _rounds(run: _Run) -> dict[str, Any]:
    """Of its state; the anchor as an array, since a tensor must not outlive the process that sends it."""
    rounds: dict[str, Any] = run.scheduler.state_dict()["rounds"]
    return {**rounds, "anchor": np.concatenate([a.flatten().numpy() for a in rounds["anchor"]])}


def _start(path: str, signal: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended at step")
    run = _Run(signal)
    run.advance(10)
    run.save(path)
    with run.scheduler.converged():
        return {"rounds": _rounds(run), "centre": run.weights()}


def _go_on(path: str, signal: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended at step")
    run = _Run(signal)
    run.load(path)
    out: dict[str, Any] = {"lrs": run.lrs(), "schedule": list(run.scheduler._schedule.lrs)}
    with run.scheduler.converged():
        out["rounds"] = _rounds(run)
        out["centre"] = run.weights()
    out["weights"] = run.weights()
    run.advance(TOTAL_STEPS)
    out["end"] = run.weights()
    out["steps"] = [record.step for record in run.scheduler.history]
    return out


@pytest.mark.parametrize(
    ("signal", "before", "after"), [("loss", 4, 2), ("loss", 2, 4), ("gradient", 1, 2), ("gradient", 2, 1)]
)
def test_another_number_of_replicas_goes_on_around_the_same_centre(
    tmp_path: Path, signal: str, before: int, after: int
) -> None:
    path = str(tmp_path / "state.pt")
    start = launch(_start, before, path, signal)[0]
    results = launch(_go_on, after, path, signal)
    rounds = start["rounds"]
    assert rounds["scales"] != [1.0]
    rho = multipliers(after, SPREAD) if signal == "loss" else np.ones(after)
    for result in results:
        for key in ("scales", "first_level", "warmup", "first_losses", "fallen", "controller", "round", "guard"):
            assert result["rounds"][key] == rounds[key], key
        assert_allclose(result["centre"], start["centre"], rtol=1e-12)
        assert result["end"] == results[0]["end"]
        assert result["steps"] == [12, 16, 20, 22]
    for knob in range(2):
        base = results[0]["schedule"][knob] * rounds["scales"][0]
        assert_allclose(sorted(result["lrs"][knob] / base for result in results), rho, rtol=1e-12)
    # Eq. 11 around the loaded centre
    anchor = rounds["anchor"]
    for result in results:
        mine = result["lrs"][0] / (result["schedule"][0] * rounds["scales"][0])
        line = anchor + mine * (np.array(start["centre"]) - anchor)
        assert_allclose(result["weights"], line, rtol=1e-10, atol=1e-12)


# -- states that cannot be used -------------------------------------------------------------------------------------


def _with(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        if value is KeyError:
            del state[keys[-1]]
        else:
            state[keys[-1]] = value

    return edit


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer version": (_with(2, "version"), "must have version 1, but got version 2"),
    "no last_epoch": (_with(KeyError, "last_epoch"), "cannot be loaded: KeyError: 'last_epoch'"),
    "last_epoch of text": (_with("eight", "last_epoch"), "cannot be loaded"),
    "no schedule": (_with(KeyError, "schedule"), "cannot be loaded: KeyError: 'schedule'"),
    "schedule of nothing": (_with(None, "schedule"), "cannot be loaded"),
    "no schedule_lrs": (_with(KeyError, "schedule_lrs"), "cannot be loaded: KeyError: 'schedule_lrs'"),
    "three groups": (_with([0.1] * 3, "schedule_lrs"), "has 2 param groups, but got a state with 3"),
    "nan learning rate": (_with([math.nan, 0.1], "schedule_lrs"), "cannot be loaded"),
    "no rounds": (_with(KeyError, "rounds"), "cannot be loaded: KeyError: 'rounds'"),
    "rounds of text": (_with("rounds", "rounds"), "cannot be loaded"),
    "two scales": (_with([1.0, 1.0], "rounds", "scales"), "scales must be 1 finite numbers"),
    "negative scale": (_with([-1.0], "rounds", "scales"), "scales must be positive"),
    "no level": (_with(KeyError, "rounds", "level"), "cannot be loaded: KeyError: 'level'"),
    "no guard": (_with(KeyError, "rounds", "guard"), "cannot be loaded: KeyError: 'guard'"),
    "guard of text": (_with("guard", "rounds", "guard"), "cannot be loaded"),
    "nan guard": (_with({"first": 1.0, "recent": [math.nan], "num_strikes": 0}, "rounds", "guard"), "recent must hold"),
    "no rollbacks": (_with(KeyError, "rounds", "num_rollbacks"), "cannot be loaded: KeyError: 'num_rollbacks'"),
    "no samples": (
        _with(KeyError, "rounds", "signals", "gradient", "samples"),
        "cannot be loaded: KeyError: 'samples'",
    ),
    "no calls": (
        _with(KeyError, "rounds", "signals", "gradient", "num_calls"),
        "cannot be loaded: KeyError: 'num_calls'",
    ),
    "no anchor": (_with(KeyError, "rounds", "anchor"), "cannot be loaded: KeyError: 'anchor'"),
    "another model's anchor": (_with([torch.zeros(2)], "rounds", "anchor"), "anchor must have the shapes"),
    "anchor of numbers": (_with([1.0, 2.0], "rounds", "anchor"), "cannot be loaded"),
    "other controller": (_with({"velocity": [0.0]}, "rounds", "controller"), "made with another controller"),
    "negative round": (_with(-1, "rounds", "round"), "round must be an integer >= 0"),
    "warm-up of no level": (_with(0.5, "rounds", "warmup"), "warmup must be 1 in a state without a level, but got 0.5"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name: str) -> None:
    edit, text = BROKEN[name]
    _check_refusal(edit, text, _one_cycle)


def test_a_broken_state_of_a_sequence_is_refused_and_changes_nothing() -> None:
    """SequentialLR looks into its state, and raises, where others just take it."""
    _check_refusal(
        _with(KeyError, "schedule", "_schedulers"), "cannot be loaded: KeyError: '_schedulers'", _warm_cosine
    )


def _check_refusal(edit: Callable[[dict[str, Any]], None], text: str, schedule: Schedule) -> None:
    run, other, twin = _Run(schedule=schedule), _Run(schedule=schedule), _Run(schedule=schedule)
    run.advance(5)
    other.advance(9)
    twin.advance(5)
    broken = copy.deepcopy(other.scheduler.state_dict())
    edit(broken)
    before = run.lrs(), run.weights(), repr(run.scheduler.state_dict())
    try:
        with pytest.raises(ValueError, match=text):
            run.scheduler.load_state_dict(broken)
    finally:
        assert (run.lrs(), run.weights(), repr(run.scheduler.state_dict())) == before
    assert run.advance(14) == twin.advance(14)


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_at_all_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state_dict must be a dict that AutoLR has written, but got"):
        _Run().scheduler.load_state_dict(state)


# -- rollback, and all else that takes several processes --------------------------------------------------------


def _break(run: _Run, factor: float) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(factor)


def _optimizer_state(run: _Run) -> list[Any]:
    return [{name: value.tolist() for name, value in run.optimizer.state[p].items()} for p in run.model.parameters()]


def _on_the_line(run: _Run, centre: list[float]) -> bool:
    """Whether this replica is at A + rho (centre - A)."""
    loop = run.scheduler._run
    assert loop.anchor is not None
    anchor = np.concatenate([c.flatten().numpy() for c in loop.anchor.copies])
    rho = loop.steering.multipliers[0, run.rank] if loop.replication.differs else 1.0
    return bool(np.allclose(run.weights(), anchor + rho * (np.array(centre) - anchor), rtol=1e-10, atol=1e-12))


def _rollbacks(folder: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended at step")
    out: dict[str, Any] = {}
    for signal in ("loss", "gradient"):
        for factor in (math.nan, 1e3):
            label = f"{signal}, {factor}"
            run = _Run(signal, schedule=_long_one_cycle)
            run.advance(12)
            with run.scheduler.converged():
                centre = run.weights()  # the healthy round from 12 to 16 starts here
            state = _optimizer_state(run)
            run.advance(18)
            _break(run, factor)
            end = 20 if math.isnan(factor) else 32  # a loss that is up for fewer than 16 steps may come down by itself
            run.advance(end)
            scale, record = run.scheduler.history[-2].scales[0], run.scheduler.history[-1]
            out[f"{label}: counted"] = record.num_rollbacks == 1 and record.step == end
            out[f"{label}: scale halved"] = math.isclose(record.scales[0], scale / 2)
            out[f"{label}: on the line through the healthy centre"] = _on_the_line(run, centre)
            with run.scheduler.converged():
                out[f"{label}: healthy centre"] = np.allclose(run.weights(), centre, rtol=1e-12, atol=1e-13)
            out[f"{label}: optimizer state"] = _optimizer_state(run) == state
            run.advance(2 * TOTAL_STEPS)
            out[f"{label}: goes on"] = run.scheduler.history[-1].num_rollbacks == 1
            out[f"{label}: finite"] = all(math.isfinite(w) for w in run.weights())

        run = _Run(signal)
        run.advance(10)
        run.save(f"{folder}/{signal}.pt")
        resumed = _Run(signal)
        resumed.load(f"{folder}/{signal}.pt")
        with resumed.scheduler.converged():
            centre = resumed.weights()
        resumed.advance(11)
        _break(resumed, math.nan)
        resumed.advance(12)
        out[f"{signal}: the round after a resume goes back to the loaded centre"] = _on_the_line(resumed, centre)

        run = _Run(signal, max_rollbacks=1)
        message = ""
        warnings.filterwarnings("ignore", message="max_rollbacks=1 are spent")
        try:
            for _ in range(12):
                run.step()
                _break(run, math.nan)
        except RuntimeError as error:
            message = str(error)
        out[f"{signal}: error"] = (
            "training broke again at step 8 after 1 rollbacks without a healthy round between them" in message
        )

    run = _Run("loss", anchor="round")
    run.advance(6)
    _break(run, math.nan)
    run.advance(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.scheduler.state_dict()
    out["no warning where a rollback has left all replicas equal"] = not caught
    return out


def _one_broken_rank() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, options in {"loss": {"signal": "loss"}, "gradient": {}, "gradient, sharded": {"fsdp": True}}.items():
        try:
            run = _Run(**options)  # type: ignore[arg-type]
            run.advance(12)
            healthy = run.weights()
            run.advance(19)
            run.optimizer.zero_grad()
            loss = run.loss()
            torch.autograd.backward(loss)
            run.optimizer.step()
            trained = run.weights()
            if run.rank == 1:
                _break(run, math.nan)
            run.scheduler.step(loss)
            out[f"{name}: finite"] = all(math.isfinite(w) for w in run.weights())
            record = run.scheduler.history[-1]
            out[f"{name}: named"] = record.unhealthy == (1,)
            if name == "gradient":
                # Equal replicas: the broken one receives what the others have, who lose nothing.
                out[f"{name}: mended"] = record.num_rollbacks == 0 and run.weights() == trained
            if name == "gradient, sharded":
                # Nobody else has what is broken.
                out[f"{name}: undone"] = record.num_rollbacks == 1 and run.weights() == healthy
        except Exception as error:
            out[f"{name}: {type(error).__name__}: {error}"] = False
    return out


def _sharded() -> Any:
    """FSDP2, whose shards of five rows differ in size: the same learning rates as DDP."""
    try:
        ddp, fsdp = _Run(), _Run(fsdp=True)
        return ddp.advance(TOTAL_STEPS), fsdp.advance(TOTAL_STEPS), ddp.told(), fsdp.told()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _states() -> dict[str, Any]:
    """What a state is, and when saving one warns."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the round that ended at step")
    out: dict[str, Any] = {"states": []}
    for signal in ("loss", "gradient"):
        run = _Run(signal)
        run.advance(8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.scheduler.state_dict()
        out[f"{signal}: warnings"] = [str(w.message) for w in caught]
        with run.scheduler.converged():
            out["states"].append(repr(run.scheduler.state_dict()))
        own = run.weights()
        with run.scheduler.converged():
            found: list[Any] = [None] * run.count
            dist.all_gather_object(found, run.weights())
            out[f"{signal}: same inside"] = all(f == found[0] for f in found)
        out[f"{signal}: own back"] = run.weights() == own
        run.advance(TOTAL_STEPS)
        out["states"].append(repr(run.scheduler.state_dict()))  # at the end all are at the mean
    return out


def _disagree() -> str:
    try:
        _Run("loss", spread=0.1 * (1 + world()[0]))
    except ValueError as error:
        return str(error)
    return ""


def _no_loss() -> str:
    run = _Run("loss")
    try:
        for _ in range(INTERVAL):
            run.optimizer.step()
            run.scheduler.step()
    except RuntimeError as error:
        return str(error)
    return ""


def _several(folder: str) -> dict[str, Any]:
    return {
        "rollbacks": _rollbacks(folder),
        "states": _states(),
        "broken rank": _one_broken_rank(),
        "disagree": _disagree(),
        "no loss": _no_loss(),
        "sharded": _sharded(),
    }


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(_several, 2, str(tmp_path_factory.mktemp("several")), timeout_s=150)


def test_a_broken_round_is_undone_on_every_replica(several: list[dict[str, Any]]) -> None:
    for result in several:
        assert all(result["rollbacks"].values()), [name for name, ok in result["rollbacks"].items() if not ok]


def test_one_broken_rank_does_no_harm(several: list[dict[str, Any]]) -> None:
    for result in several:
        assert all(result["broken rank"].values()), [name for name, ok in result["broken rank"].items() if not ok]


def test_sharded_parameters_train_as_replicated_ones(several: list[dict[str, Any]]) -> None:
    for result in several:
        assert not isinstance(result["sharded"], str), result["sharded"]
        ddp, fsdp, told, told_sharded = result["sharded"]
        for mine, theirs in zip(fsdp, ddp, strict=True):
            assert_allclose(mine[1], theirs[1], rtol=1e-9)
            assert_allclose(mine[2], theirs[2], rtol=1e-8, atol=1e-10)
        for record, other in zip(told_sharded, told, strict=True):
            assert_allclose(record["scales"], other["scales"], rtol=1e-9)


def test_the_state_is_the_same_on_every_rank_and_warns_where_replicas_are_apart(several: list[dict[str, Any]]) -> None:
    assert several[0]["states"]["states"] == several[1]["states"]["states"]
    for result in several:
        states = result["states"]
        assert states["gradient: warnings"] == []
        [message] = states["loss: warnings"]
        assert "state_dict() at step 8, where replicas are apart" in message
        assert "scheduler.converged()" in message
        for signal in ("loss", "gradient"):
            assert states[f"{signal}: same inside"]
            assert states[f"{signal}: own back"]


def test_what_replicas_must_agree_about_and_give(several: list[dict[str, Any]]) -> None:
    for result in several:
        assert "spread=0.1 on replicas [0], 0.2 on replicas [1]" in result["disagree"]
        assert "needs a loss from every replica in every round, but replicas [0, 1] gave none" in result["no loss"]
