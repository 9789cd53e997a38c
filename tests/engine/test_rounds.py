"""Rounds on real processes: when replicas meet, what they decide there, and what happens when one of them is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet.launch
from hdet import Ensemble, OneCycleAutoLR, RoundRecord
from hdet.policy.spread import multipliers
from hdet.replicas.group import Replicas
from job import error, everyone, launch, told

SPREAD = 0.5
MAX_LR = 0.1


def _parameters(num: int = 3) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, k + 1, generator=g)) for k in range(num)]


def _scheduler(
    parameters: list[nn.Parameter], *, total_steps: int = 40, interval: int = 4, auto: bool = False, **options: Any
) -> tuple[torch.optim.Optimizer, OneCycleAutoLR]:
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=MAX_LR)
    if auto:
        options = {"enable_auto_lr": True, "auto_lr_warmup_steps": 0, "loss_scale": 0.1, **options}
    options = {"ensemble_lr_spread_ratio": SPREAD, "cycle_momentum": False, **options}
    return optimizer, OneCycleAutoLR(optimizer, MAX_LR, total_steps, model_sync_interval=interval, **options)


def _train_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """An update with a gradient that all replicas share, as under DDP."""
    g = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=g)
    optimizer.step()


def _weights(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in parameters]


def _all_same(parameters: list[nn.Parameter]) -> bool:
    rows = everyone(_weights(parameters))
    return all(row == rows[0] for row in rows)


# -- when replicas converge ---------------------------------------------------------------------------------------


def _cadence(auto: bool, total_steps: int, interval: int) -> dict[str, Any]:
    rank = dist.get_rank()
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, total_steps=total_steps, interval=interval, auto=auto)
    same, lrs, bases = [], [], []
    for step in range(1, total_steps + 1):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        bases.append(list(scheduler._schedule_lrs or []))
        _train_step(optimizer, step)
        scheduler.step(1.0 + 0.1 * rank + 0.01 * step)
        if _all_same(parameters):
            same.append(step)
    return {"same": same, "lrs": lrs, "bases": bases, "history": scheduler.history, "finite": _weights(parameters)}


def _cadences() -> dict[str, dict[str, Any]]:
    return {f"{auto} {total}": _cadence(auto, total, 4) for auto in (False, True) for total in (12, 14)}


@pytest.fixture(scope="module")
def cadences() -> list[dict[str, dict[str, Any]]]:
    return launch(_cadences, 3)


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(("total_steps", "converges"), [(12, [4, 8, 12]), (14, [4, 8, 12, 14])])
def test_replicas_are_bit_identical_every_interval_and_at_the_last_step_and_only_there(
    cadences: list[dict[str, dict[str, Any]]], auto: bool, total_steps: int, converges: list[int]
) -> None:
    for result in cadences:
        assert result[f"{auto} {total_steps}"]["same"] == converges


@pytest.mark.parametrize("auto", [False, True])
def test_a_record_tells_what_happened_in_its_round(cadences: list[dict[str, dict[str, Any]]], auto: bool) -> None:
    runs = [result[f"{auto} 14"] for result in cadences]
    history: list[RoundRecord] = runs[0]["history"]
    assert [record.index for record in history] == [0, 1, 2, 3]
    assert [record.step for record in history] == [4, 8, 12, 14]
    rho = sorted(multipliers(3, SPREAD))
    scales = np.ones(2)
    start = 0
    for record in history:
        steps = np.arange(start + 1, record.step + 1)
        np.testing.assert_allclose(record.losses, [np.mean(1 + 0.1 * r + 0.01 * steps) for r in range(3)])
        for knob in range(2):
            by_replica = [run["lrs"][record.step - 1][knob] for run in runs]
            np.testing.assert_allclose(record.values[knob], by_replica, rtol=1e-14)
            base = runs[0]["bases"][record.step - 1][knob]
            np.testing.assert_allclose(sorted(np.array(record.values[knob]) / base / scales[knob]), rho, rtol=1e-14)
            np.testing.assert_allclose(record.base_values[knob], base * record.scales[knob], rtol=1e-14)
        if auto:
            assert set(record.control) == {"weights", "delta", "velocity"}
            assert sum(record.control["weights"]) == pytest.approx(1)
            assert list(record.control["weights"]) == sorted(record.control["weights"], reverse=True)
            moved = scales * (1 + 0.5 * np.array(record.control["velocity"]))
            np.testing.assert_allclose(record.scales, moved)
        else:
            assert record.control == {}
            assert record.scales == (1.0, 1.0)
        scales, start = np.array(record.scales), record.step
        assert record.unhealthy == ()
        assert record.distance > 0
        assert record.converge_s > 0
        assert set(record.as_dict()) >= {
            *("index", "step", "losses", "values", "base_values", "scales", "control"),
            *("unhealthy", "distance", "converge_s"),
        }


def test_history_is_the_same_on_every_replica_but_for_the_time(cadences: list[dict[str, dict[str, Any]]]) -> None:
    for name in cadences[0]:
        rows = [told(result[name]["history"]) for result in cadences]
        assert rows[0] == rows[1] == rows[2]


def test_later_rounds_permute_each_group_by_itself(cadences: list[dict[str, dict[str, Any]]]) -> None:
    records = [record for name in ("False 12", "True 14") for record in cadences[0][name]["history"]]
    order = [tuple(np.argsort(values).tolist() for values in record.values) for record in records]
    assert order[0] == ([0, 1, 2], [0, 1, 2])
    assert len({str(o) for o in order}) > 1
    assert any(o[0] != o[1] for o in order)


# -- on demand ----------------------------------------------------------------------------------------------------


def _on_demand() -> dict[str, Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    out: dict[str, Any] = {}
    model = nn.BatchNorm1d(3)
    parameters = [*model.parameters(), nn.Parameter(torch.randn(2, generator=torch.Generator().manual_seed(1)))]
    optimizer, scheduler = _scheduler(parameters, interval=4, model=model)
    model.get_buffer("running_mean").fill_(float(rank))
    for step in (1, 2):
        _train_step(optimizer, step)
        scheduler.step()
    own = _weights(parameters)
    rows = np.array([np.concatenate(row) for row in everyone(own)])
    lr = optimizer.param_groups[0]["lr"]

    def inside(label: str) -> None:
        now = np.concatenate(_weights(parameters))
        out[f"{label}: mean"] = np.allclose(now, rows.mean(axis=0), rtol=1e-6)
        out[f"{label}: same"] = _all_same(parameters)
        out[f"{label}: buffer"] = model.get_buffer("running_mean").tolist() == [(count - 1) / 2] * 3

    def outside(label: str) -> None:
        out[f"{label}: own back"] = _weights(parameters) == own
        out[f"{label}: buffer back"] = model.get_buffer("running_mean").tolist() == [float(rank)] * 3

    out["apart before"] = not _all_same(parameters)
    with scheduler.converged():
        inside("block")
    outside("block")

    message = ""
    try:
        with scheduler.converged():
            inside("raising block")
            raise KeyError("evaluation failed")
    except KeyError as found:
        message = str(found)
    out["the block's own exception"] = "evaluation failed" in message
    outside("raising block")

    with scheduler.converged():
        with scheduler.converged():
            inside("nested block")
        inside("after nested block")
        scheduler.converge()
        inside("after converge in block")
        out["step in block"] = "step() must not be called inside" in error(scheduler.step)
        inside("after refused step")
    outside("nested block")
    out["refused step did not count"] = scheduler.last_epoch == 2

    out["lr untouched"] = optimizer.param_groups[0]["lr"] == lr
    out["no record yet"] = scheduler.history == []
    scheduler.converge()
    inside("converge")
    out["still no record"] = scheduler.history == []
    out["round goes on"] = optimizer.param_groups[0]["lr"] == lr

    for step in (3, 4):
        _train_step(optimizer, step)
        scheduler.step()
    out["round ends on time"] = [r.step for r in scheduler.history] == [4] and _all_same(parameters)
    return out


def test_converge_and_converged_on_demand() -> None:
    for result in launch(_on_demand, 3):
        assert all(result.values()), [name for name, ok in result.items() if not ok]


def _awkward_tensors() -> dict[str, bool]:
    """`converged()` with tensors that cannot simply be copied over, and with a parameter frozen in mid-round."""
    out = {}
    rank = dist.get_rank()
    base = torch.full((1, 3), float(rank))
    expanded = nn.Parameter(base.expand(4, 3))
    strided = nn.Parameter(torch.full((6, 4), float(rank)).t())
    optimizer, scheduler = _scheduler([expanded, strided])
    message = ""
    try:
        with scheduler.converged():
            out["mean of expanded"] = bool((expanded == 0.5).all())
            out["mean of strided"] = bool((strided == 0.5).all())
    except RuntimeError as error:
        message = str(error)
    out[f"no error ({message})"] = not message
    out["own expanded back"] = bool((expanded == rank).all())
    out["own strided back"] = bool((strided == rank).all())

    frozen_later, other = _parameters(2)
    optimizer, scheduler = _scheduler([frozen_later, other], interval=4)
    for step in (1, 2):
        _train_step(optimizer, step)
        scheduler.step()
    frozen_later.requires_grad_(False)
    frozen_later.grad = None
    with scheduler.converged():
        pass
    for _ in (3, 4):
        scheduler.step()
    out["frozen in mid-round, averaged at its end"] = _all_same([frozen_later, other])
    return out


@pytest.fixture(scope="module")
def awkward_tensors() -> list[dict[str, bool]]:
    return launch(_awkward_tensors, 2)


def test_converged_puts_expanded_and_strided_tensors_back(awkward_tensors: list[dict[str, bool]]) -> None:
    for result in awkward_tensors:
        assert all(result[name] for name in result if "frozen" not in name), result


def test_a_parameter_frozen_in_mid_round_before_converged_is_averaged_at_the_end_of_the_round(
    awkward_tensors: list[dict[str, bool]],
) -> None:
    for result in awkward_tensors:
        assert result["frozen in mid-round, averaged at its end"]


# -- the signal ---------------------------------------------------------------------------------------------------


def _signal() -> dict[str, Any]:
    rank = dist.get_rank()
    out: dict[str, Any] = {}

    def run(feed: Callable[[OneCycleAutoLR, int], None]) -> list[RoundRecord]:
        parameters = _parameters()
        optimizer, scheduler = _scheduler(parameters, total_steps=8, auto=True)
        for step in range(1, 9):
            _train_step(optimizer, step)
            feed(scheduler, step)
        return scheduler.history

    def loss(step: int, micro: int) -> float:
        return 1.0 + 0.25 * rank + 0.125 * step * micro

    def accumulated(scheduler: OneCycleAutoLR, step: int) -> None:
        for micro in range(3):
            scheduler.observe(loss(step, micro), weight=micro + 1)
        scheduler.step()

    def accumulated_tensors(scheduler: OneCycleAutoLR, step: int) -> None:
        for micro in range(3):
            scheduler.observe(torch.tensor([loss(step, micro)]), weight=torch.tensor(micro + 1.0))
        scheduler.step()

    def averaged(scheduler: OneCycleAutoLR, step: int) -> None:
        scheduler.step(sum(loss(step, micro) * (micro + 1) for micro in range(3)) / 6)

    histories = {f.__name__: run(f) for f in (accumulated, accumulated_tensors, averaged)}
    out["histories"] = {name: told(history) for name, history in histories.items()}

    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, auto=True)
    for step in range(1, 4):
        _train_step(optimizer, step)
        scheduler.step(None if rank == 1 else 1.0)
    _train_step(optimizer, 4)
    before = _weights(parameters)
    out["missing"] = error(scheduler.step if rank == 1 else lambda: scheduler.step(1.0))
    out["missing: untouched"] = before == _weights(parameters)

    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, auto=True, auto_lr_warmup_steps=4)
    for step in range(1, 5):  # not needed before the controller acts
        _train_step(optimizer, step)
        scheduler.step()

    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, auto=True)
    for step in range(1, 13):
        _train_step(optimizer, step)
        bad = rank == 1 and step == 6
        all_bad = step == 10
        scheduler.step(math.nan if bad else math.inf if all_bad else 1.0 + 0.1 * rank)
    out["nan history"] = scheduler.history
    out["nan lrs"] = scheduler.get_last_lr()
    out["nan weights finite"] = all(bool(torch.isfinite(p).all()) for p in parameters)
    return out


@pytest.fixture(scope="module")
def signal() -> list[dict[str, Any]]:
    return launch(_signal, 3)


def test_observed_micro_batches_count_as_their_weighted_mean(signal: list[dict[str, Any]]) -> None:
    for result in signal:
        histories = result["histories"]
        assert histories["accumulated"] == histories["accumulated_tensors"]
        for one, other in zip(histories["accumulated"], histories["averaged"], strict=True):
            np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-14)
            np.testing.assert_allclose(one["control"]["velocity"], other["control"]["velocity"], rtol=1e-9)
            np.testing.assert_allclose(one["scales"], other["scales"], rtol=1e-14)
        assert histories["accumulated"][0]["scales"] != (1.0, 1.0)


def test_a_loss_missing_on_one_replica_raises_on_all_and_names_it(signal: list[dict[str, Any]]) -> None:
    for result in signal:
        assert result["missing"].startswith("RuntimeError: the controller needs a loss from every replica")
        assert "replicas [1] gave none" in result["missing"]
        assert "observe(loss)" in result["missing"]
        assert result["missing: untouched"]


def test_a_nan_loss_costs_its_replica_its_weight_and_nothing_else(signal: list[dict[str, Any]]) -> None:
    for result in signal:
        first, second, third = result["nan history"]
        assert min(first.control["weights"]) > 0
        assert math.isnan(second.losses[1])
        assert second.control["weights"][1] == 0
        assert sum(second.control["weights"]) == pytest.approx(1)
        assert all(math.isfinite(v) for v in second.control["velocity"])
        # All losses infinite: the controller is silent and its velocity stays.
        assert third.losses == (math.inf,) * 3
        assert third.scales == second.scales
        assert third.control["velocity"] == second.control["velocity"]
        assert all(math.isfinite(float(lr)) and lr > 0 for lr in result["nan lrs"])
        assert result["nan weights finite"]


# -- unhealthy weights --------------------------------------------------------------------------------------------


def _unhealthy() -> dict[str, Any]:
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, total_steps=8, auto=True)
    for step in range(1, 9):
        _train_step(optimizer, step)
        if step == 4:
            rows = everyone(_weights(parameters))
            if rank == 1:
                with torch.no_grad():
                    parameters[1][2, 0] = math.nan
        scheduler.step(0.0 if rank == 1 else 1.0)
        if step == 4:
            out["same"] = _all_same(parameters)
            mean = np.mean([np.concatenate(rows[r]) for r in (0, 2)], axis=0)
            out["mean of the others"] = np.allclose(np.concatenate(_weights(parameters)), mean, rtol=1e-6)
    out["history"] = scheduler.history

    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters)
    with torch.no_grad():
        parameters[0][0, 0] = math.nan if rank else math.inf
    for step in range(1, 4):
        _train_step(optimizer, step)
        scheduler.step()
    _train_step(optimizer, 4)
    out["all"] = error(scheduler.step)
    return out


@pytest.fixture(scope="module")
def unhealthy() -> list[dict[str, Any]]:
    return launch(_unhealthy, 3)


def test_a_replica_with_nan_weights_is_left_out_receives_the_mean_and_is_recorded(
    unhealthy: list[dict[str, Any]],
) -> None:
    for result in unhealthy:
        assert result["same"]
        assert result["mean of the others"]
        first, second = result["history"]
        assert first.unhealthy == (1,)
        assert first.losses == (1.0, 0.0, 1.0)
        assert first.control["weights"][1] == 0  # though its loss was the lowest
        assert math.isfinite(first.distance)
        assert second.unhealthy == ()
        assert second.control["weights"][1] > 0.9


def test_nan_weights_on_all_replicas_raise_on_all(unhealthy: list[dict[str, Any]]) -> None:
    for result in unhealthy:
        assert result["all"].startswith("BrokenError: the weights of all 3 replicas are not finite")
        assert "step 4" in result["all"]


# -- replicas that disagree ---------------------------------------------------------------------------------------


def _disagreeing() -> dict[str, str]:
    """Each scenario: what this replica is told. Replica 1 differs from the others."""
    odd = dist.get_rank() == 1
    out = {}

    def construct(label: str, *, parameters: list[nn.Parameter] | None = None, **options: Any) -> None:
        out[label] = error(lambda: _scheduler(parameters or _parameters(), **options))

    construct("nothing")
    construct("total_steps", total_steps=41 if odd else 40)
    construct("seed", ensemble=Ensemble(seed=int(odd)))
    construct("model_sync_interval", interval=5 if odd else 4)
    construct("enable_auto_lr", auto=odd, auto_lr_warmup_steps=0)
    construct("decay", auto=True, decay="floor" if odd else "schedule")
    construct("base_momentum", cycle_momentum=True, base_momentum=0.8 if odd else 0.85)
    construct("cycle_momentum", cycle_momentum=odd)
    construct("number of parameters", parameters=_parameters(4 if odd else 3))
    shape = (3, 4) if odd else (4, 3)
    construct("shapes", parameters=[nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(2))])
    dtype = torch.float64 if odd else torch.float32
    construct("dtypes", parameters=[nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2))])

    def groups() -> None:
        parameters = _parameters(2)
        split = [{"params": parameters}] if odd else [{"params": [p]} for p in parameters]
        optimizer = torch.optim.SGD(split, lr=MAX_LR)
        OneCycleAutoLR(optimizer, MAX_LR, 40, ensemble_lr_spread_ratio=SPREAD, cycle_momentum=False)

    out["number of groups"] = error(groups)

    dist.barrier()
    construct("spread", ensemble_lr_spread_ratio=0.0 if odd else SPREAD)
    dist.barrier()
    return out


@pytest.fixture(scope="module")
def disagreeing() -> list[dict[str, str]]:
    return launch(_disagreeing, 3)


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("total_steps", "total_steps=40 on replicas [0, 2], 41 on replicas [1]"),
        ("seed", "seed=0 on replicas [0, 2], 1 on replicas [1]"),
        ("model_sync_interval", "model_sync_interval=4 on replicas [0, 2], 5 on replicas [1]"),
        ("enable_auto_lr", "enable_auto_lr=False on replicas [0, 2], True on replicas [1]"),
        ("decay", "decay=schedule on replicas [0, 2], floor on replicas [1]"),
        ("base_momentum", "base_momentum=0.85 on replicas [0, 2], 0.8 on replicas [1]"),
        ("cycle_momentum", "cycle_momentum=False on replicas [0, 2], True on replicas [1]"),
        ("number of parameters", "parameters=3 tensors of 24 elements"),
        ("shapes", "parameters=2 tensors of 14 elements"),
        ("dtypes", "parameters=2 tensors of 5 elements"),
        ("number of groups", "on replicas [0, 2]"),
    ],
)
def test_replicas_that_disagree_find_out_at_construction(
    disagreeing: list[dict[str, str]], label: str, named: str
) -> None:
    for result in disagreeing:
        assert result["nothing"] == ""
        assert result[label].startswith("ValueError: replicas must agree about their arguments and parameters, but got")
        assert named in result[label]
        assert "on replicas [1]" in result[label]


def test_a_spread_on_some_replicas_only_is_found_by_those_who_would_wait(disagreeing: list[dict[str, str]]) -> None:
    for rank in (0, 2):
        assert "ensemble_lr_spread_ratio=0.5 on replicas [0, 2], 0.0 on replicas [1]" in disagreeing[rank]["spread"]


def _agreements() -> dict[str, list[str]]:
    rank = dist.get_rank()
    world = Replicas(dist.group.WORLD)
    out = {"agreed": [error(lambda: world.agree({"interval": 4})) for _ in range(200)]}
    out["disagreed"] = [error(lambda: world.agree({"interval": 5 if rank == 1 else 4})) for _ in range(20)]
    dist.barrier()
    twin = Replicas(dist.new_group())  # the ranks of WORLD, in a group of its own
    out["twin"] = [error(lambda: twin.agree({"interval": 5 if rank == 1 else 4}))]
    return out


@pytest.fixture(scope="module")
def agreements() -> list[dict[str, list[str]]]:
    return launch(_agreements, 4)


def test_replicas_that_agree_never_disagree_whoever_comes_first(agreements: list[dict[str, list[str]]]) -> None:
    for result in agreements:
        assert result["agreed"] == [""] * 200
        assert all("interval=4 on replicas [0, 2, 3], 5 on replicas [1]" in text for text in result["disagreed"])


def test_a_second_group_of_the_same_ranks_has_its_own_agreements(agreements: list[dict[str, list[str]]]) -> None:
    for result in agreements:
        assert "interval=4 on replicas [0, 2, 3], 5 on replicas [1]" in result["twin"][0]


# -- replicas that fall behind ------------------------------------------------------------------------------------


def _different_steps() -> dict[str, Any]:
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters)
    for step in range(1, 4):
        if rank == 1 and step == 3:
            break
        _train_step(optimizer, step)
        scheduler.step()
    if rank != 1:
        _train_step(optimizer, 4)
    before = _weights(parameters)
    out["error"] = error(scheduler.converge if rank == 1 else scheduler.step)
    out["untouched"] = before == _weights(parameters)

    # The same number of steps, but another state: only one replica has loaded a checkpoint.
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters)
    if rank == 1:
        state = scheduler.state_dict()
        state["rounds"]["scales"] = [2.0, 2.0]
        scheduler.load_state_dict(state)
    out["state"] = error(scheduler.converge)

    # A buffer that only one replica has.
    model = nn.BatchNorm1d(2, affine=False, track_running_stats=rank == 1)
    _, scheduler = _scheduler(_parameters(), model=model)
    out["buffers"] = error(scheduler.converge)
    return out


def test_different_steps_states_or_buffers_raise_on_all_and_name_them() -> None:
    for result in launch(_different_steps, 3):
        assert "replica 0: 4, replica 1: 2, replica 2: 4" in result["error"]
        assert "RuntimeError: replicas must take the same number of steps" in result["error"]
        assert result["untouched"]
        assert "load the same state_dict on every rank" in result["state"]
        assert "replicas must hold the same parameters, but their shapes differ at step 0" in result["buffers"]


def _leaves_early() -> str:
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters)
    if dist.get_rank() == 2:
        return ""

    def train() -> None:
        for step in range(1, 5):
            _train_step(optimizer, step)
            scheduler.step()

    return error(train)


def test_a_replica_that_exits_is_named_by_the_others_within_the_timeout() -> None:
    results = hdet.launch.launch(_leaves_early, 3, timeout_s=150)  # ranks of the pool stay connected
    for rank in (0, 1):
        message = results[rank]
        assert message.startswith(f"RuntimeError: replica {rank} lost the others at the converge of step 4")
        assert "2: 0" in message
        assert "same number of optimizer steps" in message


def _never_comes(store_timeout_s: float) -> str:
    from datetime import timedelta

    store: Any = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=store_timeout_s))
    options: dict[str, Any] = {"ensemble_lr_spread_ratio": 1.5} if dist.get_rank() == 1 else {}
    message = error(lambda: _scheduler(_parameters(), **options))
    dist.barrier()
    return message


def test_a_replica_that_never_constructs_is_named() -> None:
    first, second, third = launch(_never_comes, 3, 2.0)
    assert "ensemble_lr_spread_ratio must be in [0, 1), but got ensemble_lr_spread_ratio=1.5" in second
    for message in (first, third):
        assert message.startswith("RuntimeError: replicas [1] did not construct the scheduler")


def test_losses_that_are_no_losses_are_refused_at_once() -> None:
    parameters = _parameters()
    optimizer, scheduler = _scheduler(parameters, ensemble_lr_spread_ratio=0.0, auto=True)
    _train_step(optimizer, 1)
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"a": Tensor([1.0])}, TypeError, "loss must be a number or a tensor with one element, but got dict"),
        ("1.0", TypeError, "but got str"),
        (torch.ones(3), ValueError, r"loss must have one element, but got shape \(3,\)"),
        (torch.ones((), dtype=torch.int64), TypeError, "must be a floating-point tensor, but got dtype torch.int64"),
    ]
    for loss, kind, text in cases:
        with pytest.raises(kind, match=text):
            scheduler.step(loss)
        with pytest.raises(kind, match=text):
            scheduler.observe(loss)
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight must be a finite number >= 0"):
            scheduler.observe(1.0, weight)
    assert scheduler.last_epoch == 0
