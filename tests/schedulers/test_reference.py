"""What goes wrong in the paper's published code, and what happens here instead: one test for each finding."""

from __future__ import annotations

import io
import logging
import math
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, SequentialLR

from hdet import OneCycleAutoLR, warm_noisy_init
from hdet.policy.spread import multipliers
from hdet.replicas.group import find_replicas
from job import error, everyone, launch

NUM_REPLICAS = 4
SPREAD = 0.5
MAX_LR = 0.1
RHO = multipliers(NUM_REPLICAS, SPREAD)
AUTO: dict[str, Any] = {"enable_auto_lr": True, "auto_lr_warmup_steps": 0, "loss_scale": 0.1}


# -- the pieces of a run -------------------------------------------------------------------------------------------


def _sgd(num_tensors: int = 2, *, lr: float | Tensor = MAX_LR, seed: int = 0) -> torch.optim.SGD:
    g = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(3, 2, generator=g)) for _ in range(num_tensors)]
    return torch.optim.SGD(parameters, lr=lr)


def _fan(optimizer: Optimizer, total_steps: int = 12, interval: int = 4, **options: Any) -> OneCycleAutoLR:
    options = {"ensemble_lr_spread_ratio": SPREAD, "cycle_momentum": False, **options}
    return OneCycleAutoLR(optimizer, MAX_LR, total_steps, model_sync_interval=interval, **options)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _numbers(optimizer: Optimizer) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in _parameters(optimizer)]


def _update(optimizer: Optimizer, step: int) -> None:
    """A gradient that all replicas share, as under DDP."""
    g = torch.Generator().manual_seed(step)
    for p in _parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=g)
    optimizer.step()


def _train(
    optimizer: Optimizer, scheduler: OneCycleLR, num_steps: int, loss: Callable[[int], Any] = lambda step: None
) -> list[float]:
    """The learning rate of the first group in each of the steps."""
    lrs = []
    for _ in range(num_steps):
        step = scheduler.last_epoch + 1
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        _update(optimizer, step)
        value = loss(step)
        if value is None:
            scheduler.step()
        else:
            scheduler.step(value)
    return lrs


def _all_same(optimizer: Optimizer) -> bool:
    rows = everyone(_numbers(optimizer))
    return all(row == rows[0] for row in rows)


def _random_states() -> tuple[bytes, bytes, Any]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numpy_state[1].tobytes(), random.getstate()


# -- rows on four replicas: what each replica saw ----------------------------------------------------------------------


def _row_01() -> dict[str, Any]:
    optimizer = _sgd(seed=dist.get_rank())  # the replicas start apart
    rows = everyone(_numbers(optimizer))
    scheduler = _fan(optimizer)
    same = []
    for _ in range(12):
        _train(optimizer, scheduler, 1)
        same.append(_all_same(optimizer))
    return {"apart at first": any(row != rows[0] for row in rows), "same": same}


def _row_02() -> dict[str, Any]:
    optimizer = _sgd()
    start = _parameters(optimizer)[0].detach().clone()
    scheduler = _fan(optimizer, rank=dist.get_rank(), world_size=NUM_REPLICAS)
    lrs = _train(optimizer, scheduler, 1)
    moved = (start - _parameters(optimizer)[0].detach()).flatten().tolist()
    lrs += _train(optimizer, scheduler, 3)
    return {"lrs": lrs, "moved": moved}


def _row_03() -> dict[str, Any]:
    optimizer = _sgd()
    # Eq. 8 with torch's default factors, over many rounds; lr_of_lr = 0 leaves the decay alone at work.
    scheduler = _fan(optimizer, 100, 5, **AUTO, lr_of_lr=0.0)
    return {"lrs": _train(optimizer, scheduler, 100, loss=lambda _: 1.0)}


def _row_05() -> dict[str, Any]:
    torch.manual_seed(7 + dist.get_rank())
    np.random.seed(7)
    random.seed(7)
    before = _random_states()
    optimizer = _sgd()
    scheduler = _fan(optimizer, **AUTO)
    _train(optimizer, scheduler, 12, loss=float)
    model = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm_noisy_init(model)
    with scheduler.converged():
        scheduler.load_state_dict(scheduler.state_dict())
    return {"untouched": before == _random_states(), "draw": torch.rand(3).tolist()}


def _row_06() -> dict[str, Any]:
    """Forty rounds, each replica drawing its own number of random numbers."""
    optimizer = _sgd()
    scheduler = _fan(optimizer, 80, 2, pct_start=0.5)
    torch.manual_seed(dist.get_rank())
    lrs = []
    for _ in range(80):
        torch.rand(1 + dist.get_rank())
        lrs += _train(optimizer, scheduler, 1)
    return {"lrs": lrs, "history": [record.values for record in scheduler.history]}


def _row_07() -> dict[str, Any]:
    optimizer = _sgd()
    scheduler = _fan(optimizer, 40, 2, world_size=NUM_REPLICAS, **AUTO)
    return {"lrs": _train(optimizer, scheduler, 40, loss=lambda _: 1.0)}


def _row_08() -> dict[str, Any]:
    optimizer = _sgd(seed=dist.get_rank())
    before = _numbers(optimizer)
    _fan(optimizer, **AUTO)
    return {"untouched": before == _numbers(optimizer)}


def _row_09() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    start = model.weight.detach().clone()
    wrapped = DistributedDataParallel(model)
    warm_noisy_init(wrapped, nu=0.01)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=MAX_LR)
    scheduler = _fan(optimizer, **AUTO)
    noise = (model.weight.detach() - start).flatten()
    with scheduler.converged():
        left = (model.weight.detach() - start).flatten()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warm_noisy_init(nn.Linear(2, 2))
    return {
        "size": (0.01 * start.square().mean().sqrt()).item(),
        "noise": noise.tolist(),
        "left": left.square().mean().sqrt().item(),
        "warnings": [str(w.message) for w in caught],
    }


def _row_10() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.randn(3, generator=g))], lr=MAX_LR, momentum=0.9)
    scheduler = _fan(optimizer, 40, 10, cycle_momentum=True, **{**AUTO, "auto_lr_warmup_steps": 15})
    lrs, momenta = [], []
    for _ in range(40):
        momenta.append(optimizer.param_groups[0]["momentum"])
        lrs += _train(optimizer, scheduler, 1, loss=lambda _: 1.0 + 0.1 * dist.get_rank())
    past_the_end = error(scheduler.step)
    return {"lrs": lrs, "momenta": momenta, "past the end": past_the_end, "history": scheduler.history}


def _row_11() -> dict[str, Any]:
    def run(warmup: int) -> Any:
        optimizer = _sgd()
        scheduler = _fan(optimizer, 60, 10, **{**AUTO, "auto_lr_warmup_steps": warmup})
        lrs = _train(optimizer, scheduler, 60, loss=lambda _: 1.0 + 0.1 * dist.get_rank())
        return {"lrs": lrs, "acting": [record.step for record in scheduler.history if record.control]}

    return {str(warmup): run(warmup) for warmup in (0, 7, 20, 33)}


def _row_13() -> dict[str, Any]:
    """Lower learning rates always win, by far, in 60 rounds: an absolute velocity would cross zero."""
    optimizer = _sgd()
    scheduler = _fan(optimizer, 120, 2, **AUTO, momentum_of_lr=0.9)

    def loss(_: int) -> float:
        return float(optimizer.param_groups[0]["lr"]) * 1e30

    lrs = _train(optimizer, scheduler, 120, loss=loss)
    return {"lrs": lrs, "history": scheduler.history}


def _row_14() -> dict[str, Any]:
    rank = dist.get_rank()

    def run(convert: Callable[[float], Any]) -> list[Any]:
        optimizer = _sgd()
        scheduler = _fan(optimizer, **AUTO)
        _train(optimizer, scheduler, 12, loss=lambda step: convert(float(1 + rank)))
        return [(record.losses, record.control, record.scales) for record in scheduler.history]

    out: dict[str, Any] = {
        "float": run(float),
        "int": run(int),
        "numpy": run(np.float64),
        "0-d": run(torch.tensor),
        "one element": run(lambda loss: torch.tensor([loss])),
        "one element, square": run(lambda loss: torch.tensor([[loss]], requires_grad=True)),
        "bfloat16": run(lambda loss: torch.tensor(loss, dtype=torch.bfloat16)),
        "float64": run(lambda loss: torch.tensor(loss, dtype=torch.float64)),
    }
    optimizer = _sgd()
    scheduler = _fan(optimizer, **AUTO)
    out["dict"] = error(lambda: scheduler.step({"task": 1.0}))  # type: ignore[arg-type]
    out["batch"] = error(lambda: scheduler.step(torch.ones(5)))

    optimizer = _sgd()
    scheduler = _fan(optimizer, **AUTO)
    _train(optimizer, scheduler, 12, loss=lambda step: 2.0 + rank if step % 2 else None)
    out["alternate"] = [record.losses for record in scheduler.history]

    optimizer = _sgd()
    scheduler = _fan(optimizer, **AUTO)
    out["none on one"] = error(lambda: _train(optimizer, scheduler, 4, loss=lambda step: None if rank == 2 else 1.0))
    return out


def _row_15() -> dict[str, Any]:
    rank = dist.get_rank()
    optimizer = _sgd()
    scheduler = _fan(optimizer, 20, **AUTO)
    bad = {3: math.nan, 10: math.inf}

    def loss(step: int) -> float:
        return bad.get(step, 1.0) if rank == 1 else 1.0

    lrs = _train(optimizer, scheduler, 20, loss=loss)
    return {"lrs": lrs, "history": scheduler.history, "weights": _numbers(optimizer)}


def _row_17() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, options in {"off": {}, "on": AUTO}.items():
        optimizer = _sgd(lr=torch.tensor(MAX_LR))
        scheduler = _fan(optimizer, **options)
        ok = []
        for _ in range(12):
            [last] = scheduler.get_last_lr()
            lr = optimizer.param_groups[0]["lr"]
            ok.append(isinstance(last, Tensor) and last is not lr and bool(last == lr))
            _train(optimizer, scheduler, 1, loss=lambda _: 1.0)
        out[name] = all(ok)
    optimizer = _sgd()
    inner = _fan(optimizer, 20)
    linear = LinearLR(optimizer, start_factor=0.5, total_iters=3)
    outer = SequentialLR(optimizer, [linear, inner], milestones=[3])
    fresh = []
    for step in range(1, 12):
        _update(optimizer, step)
        outer.step()
        fresh.append(outer.get_last_lr() == [optimizer.param_groups[0]["lr"]])
    out["sequential"] = all(fresh)
    out["sequential lr"] = inner.get_last_lr()[0]
    return out


def _row_18() -> dict[str, Any]:
    out: dict[str, Any] = {}
    makers: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
        "adam, foreach": lambda ps: torch.optim.Adam(ps, lr=MAX_LR, foreach=True),
        "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=MAX_LR, foreach=True),
        "adam, tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(MAX_LR), foreach=False),
    }
    for name, make in makers.items():
        optimizer = make(_parameters(_sgd()))
        before = optimizer.param_groups[0]["lr"]
        scheduler = _fan(optimizer, cycle_momentum=True, **AUTO)
        _train(optimizer, scheduler, 12, loss=lambda _: 1.0 + 0.1 * dist.get_rank())
        after = optimizer.param_groups[0]["lr"]
        out[name] = after is before if isinstance(before, Tensor) else type(after) is float
        out[f"{name}: moved"] = scheduler.history[-1].scales != (1.0,)
    return out


def _row_19() -> dict[str, Any]:
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Embedding(4, 2, sparse=True))
    model.get_buffer("0.running_mean").fill_(float(rank))
    model.get_buffer("0.num_batches_tracked").fill_(rank)
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(float(rank))
    strided = nn.Parameter(torch.arange(6.0).view(2, 3).t() + rank)
    expanded = nn.Parameter(torch.full((1, 3), float(rank)).expand(2, 3))
    same = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    identical = [nn.Parameter(same.clone().to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    optimizer = torch.optim.SGD([*model.parameters(), strided, expanded, *identical], lr=MAX_LR)
    scheduler = _fan(optimizer, model=model)
    model[1](torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # sparse gradient: rows 1 and 2 move by lr * rho
    lr = optimizer.param_groups[0]["lr"]
    scheduler.step()
    scheduler.converge()
    return {
        "running mean": model.get_buffer("0.running_mean").tolist(),
        "batches": int(model.get_buffer("0.num_batches_tracked").item()),
        "embedding": model.get_parameter("1.weight").detach().tolist(),
        "lr": lr,
        "strided": strided.detach().tolist(),
        "expanded": expanded.detach().tolist(),
        "identical": [torch.equal(p.detach(), same.to(p.dtype)) for p in identical],
    }


def _row_20() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    rank = dist.get_rank()
    out: dict[str, Any] = {}
    torch.manual_seed(0)

    def refused(model: nn.Module) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=MAX_LR)
        return error(lambda: _fan(optimizer))

    flat = init_device_mesh("cpu", (NUM_REPLICAS,))
    model: Any = nn.Linear(4, 4)
    out["fsdp2"] = refused(fully_shard(model, mesh=flat))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use_orig_params in (False, True):
            model = FullyShardedDataParallel(
                nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            out[f"fsdp1, use_orig_params={use_orig_params}"] = refused(model)

    # Two replicas of two shards each: ranks 0 and 2 hold the same shard, as do 1 and 3.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(8.0).view(4, 2)
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=MAX_LR)
    out["count"] = find_replicas(optimizer, None, spread=SPREAD).count
    scheduler = _fan(optimizer, 8, 2)
    out["lr"] = optimizer.param_groups[0]["lr"]
    assert isinstance(parameter.data, DTensor)
    with torch.no_grad():
        parameter.data.to_local().add_(1.0 if rank >= 2 else -1.0)
    scheduler.converge()
    out["local"] = parameter.data.to_local().tolist()

    optimizer = _sgd(3 if rank == 1 else 2)
    out["other parameters"] = error(lambda: _fan(optimizer))
    return out


def _row_21() -> dict[str, Any]:
    """One replica is three batches short, and comes to the end of its epoch while the others are in a converge."""
    optimizer = _sgd()
    scheduler = _fan(optimizer, 40, 8)
    if dist.get_rank() == 3:
        _train(optimizer, scheduler, 5)
        return {"error": error(scheduler.converge)}
    return {"error": error(lambda: _train(optimizer, scheduler, 8))}


def _row_22() -> dict[str, Any]:
    rank = dist.get_rank()

    def start() -> tuple[torch.optim.Adam, OneCycleAutoLR]:
        optimizer = torch.optim.Adam(_parameters(_sgd()), lr=MAX_LR)
        return optimizer, _fan(optimizer, 30, cycle_momentum=True, **AUTO)

    def loss(step: int) -> float:
        return 1.0 + 0.1 * math.sin(step * (rank + 1))

    optimizer, scheduler = start()
    _train(optimizer, scheduler, 12, loss)
    file = io.BytesIO()
    torch.save((_parameters(optimizer), optimizer.state_dict(), scheduler.state_dict()), file)
    states = everyone(file.getvalue() if rank == 0 else scheduler.state_dict())
    lrs = _train(optimizer, scheduler, 18, loss)

    resumed_optimizer, resumed = start()
    parameters, optimizer_state, scheduler_state = torch.load(io.BytesIO(states[0]), weights_only=True)
    with torch.no_grad():
        for mine, saved in zip(_parameters(resumed_optimizer), parameters, strict=True):
            mine.copy_(saved)
    resumed_optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(scheduler_state)
    resumed_lrs = _train(resumed_optimizer, resumed, 18, loss)
    return {
        "rank-free": all(repr(state) == repr(scheduler_state) for state in states[1:]),
        "lrs": lrs == resumed_lrs,
        "weights": _numbers(optimizer) == _numbers(resumed_optimizer),
        "moved": scheduler.history[-1].scales != (1.0,),
    }


def _row_23() -> dict[str, Any]:
    out = {}
    for taken in (3, 4, 5, 8):
        optimizer = _sgd()
        _train(optimizer, _fan(optimizer), taken)
        scheduler = _fan(optimizer, last_epoch=taken - 1)
        [lr] = [group["lr"] for group in optimizer.param_groups]
        _train(optimizer, scheduler, 12 - taken)
        same = _all_same(optimizer)
        out[str(taken)] = {"lr": lr, "same": same, "steps": [record.step for record in scheduler.history]}
    return out


def _row_24() -> dict[str, Any]:
    optimizer = _sgd()
    scheduler = _fan(optimizer, 14, 4)
    _train(optimizer, scheduler, 13)
    apart = not _all_same(optimizer)
    rows = everyone(_numbers(optimizer))
    assert scheduler._schedule_lrs is not None
    lr = scheduler._schedule_lrs[0]
    _train(optimizer, scheduler, 1)
    return {"apart": apart, "same": _all_same(optimizer), "rows": rows, "final": _numbers(optimizer), "lr": lr}


def _row_25() -> dict[str, int]:
    counts = {}
    all_reduce = dist.all_reduce
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return all_reduce(*args, **kwargs)

    for num_tensors in (1, 10, 300):
        optimizer = _sgd(num_tensors)
        scheduler = _fan(optimizer)
        calls.clear()
        dist.all_reduce = counted
        scheduler.converge()
        dist.all_reduce = all_reduce
        counts[str(num_tensors)] = len(calls)
    return counts


def _row_26() -> dict[str, Any]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger().setLevel(logging.DEBUG)
    handler = Keep(level=logging.DEBUG)
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = _sgd()
        scheduler = _fan(optimizer, **AUTO)
        _train(optimizer, scheduler, 12, loss=lambda _: 1.0)
        with scheduler.converged():
            scheduler.load_state_dict(scheduler.state_dict())
    logging.getLogger().removeHandler(handler)
    return {"warnings": [str(w.message) for w in caught], "logs": records}


ROWS: dict[int, Callable[[], dict[str, Any]]] = {
    1: _row_01,
    2: _row_02,
    3: _row_03,
    5: _row_05,
    6: _row_06,
    7: _row_07,
    8: _row_08,
    9: _row_09,
    10: _row_10,
    11: _row_11,
    13: _row_13,
    14: _row_14,
    15: _row_15,
    17: _row_17,
    18: _row_18,
    19: _row_19,
    20: _row_20,
    21: _row_21,
    22: _row_22,
    23: _row_23,
    24: _row_24,
    25: _row_25,
    26: _row_26,
}


def _all_rows() -> dict[int, Any]:
    """Every row's scenario in one group of processes; a scenario that fails leaves the others their chance."""
    results: dict[int, Any] = {}
    for number, row in ROWS.items():
        try:
            results[number] = row()
        except Exception:
            results[number] = traceback.format_exc()
    return results


Saw = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def saw() -> Saw:
    """By row: what each of the replicas saw."""
    results = launch(_all_rows, NUM_REPLICAS, timeout_s=150)

    def of(number: int) -> list[dict[str, Any]]:
        rows = [result[number] for result in results]
        for replica, row in enumerate(rows):
            assert isinstance(row, dict), f"replica {replica}:\n{row}"
        return rows

    return of


def _one_cycle(total_steps: int, **options: Any) -> list[float]:
    """What torch's OneCycleLR does in each step."""
    optimizer = _sgd()
    scheduler = OneCycleLR(optimizer, MAX_LR, total_steps, **{"cycle_momentum": False, **options})
    return _train(optimizer, scheduler, total_steps)


# -- the tests -----------------------------------------------------------------------------------------------------


def test_row_01_replicas_converge_with_auto_lr_off(saw: Saw) -> None:
    for row in saw(1):
        assert row["apart at first"]
        assert row["same"] == ([False] * 3 + [True]) * 3


def test_row_02_replica_r_holds_rho_r_from_step_one(saw: Saw) -> None:
    schedule = _one_cycle(12)
    gradient = torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).flatten().numpy()
    for r, row in enumerate(saw(2)):
        np.testing.assert_allclose(row["lrs"], np.array(schedule[:4]) * RHO[r], rtol=1e-14)
        np.testing.assert_allclose(row["moved"], schedule[0] * RHO[r] * gradient, rtol=1e-3, atol=1e-6)


def test_row_03_the_decay_never_grows_the_learning_rate(saw: Saw) -> None:
    rows = saw(3)
    schedule = _one_cycle(100)
    np.testing.assert_allclose(np.mean([row["lrs"] for row in rows], axis=0), schedule, rtol=1e-12)
    for row in rows:
        assert max(row["lrs"]) <= MAX_LR * (1 + SPREAD) * (1 + 1e-12)
        assert row["lrs"][-1] < 1e-6
    with pytest.raises(ValueError, match=r"must not grow the learning rate.* = 400 over the run; use decay=\"floor\""):
        OneCycleAutoLR(_sgd(), MAX_LR, 100, cycle_momentum=False, decay="printed", **AUTO)


def test_row_04_epochs_and_steps_per_epoch() -> None:
    optimizer = _sgd()
    scheduler = OneCycleAutoLR(optimizer, MAX_LR, epochs=4, steps_per_epoch=5, cycle_momentum=False)
    assert _train(optimizer, scheduler, 20) == _one_cycle(20)


def test_row_05_the_global_random_states_are_untouched(saw: Saw) -> None:
    rows = saw(5)
    assert all(row["untouched"] for row in rows)
    assert len({tuple(row["draw"]) for row in rows}) == NUM_REPLICAS


def test_row_06_permutations_are_private_and_hold_whatever_each_replica_draws(saw: Saw) -> None:
    rows = saw(6)
    schedule = _one_cycle(80, pct_start=0.5)
    lrs = np.array([row["lrs"] for row in rows])
    for step, base in enumerate(schedule):
        np.testing.assert_allclose(np.sort(lrs[:, step]), RHO * base, rtol=1e-12)
    assert all(row["history"] == rows[0]["history"] for row in rows)
    orders = {tuple(np.argsort(lrs[:, step]).tolist()) for step in range(0, 80, 2)}
    assert len(orders) > 10


def test_row_07_the_process_group_decides_who_is_who(saw: Saw) -> None:
    lrs = np.array([row["lrs"] for row in saw(7)])
    np.testing.assert_allclose(lrs[:, 0] / lrs[:, 0].mean(), RHO, rtol=1e-12)
    np.testing.assert_allclose(lrs.mean(axis=0), _one_cycle(40), rtol=1e-12)  # equal losses: no drift


def test_row_08_a_constructor_leaves_the_weights_alone(saw: Saw) -> None:
    assert all(row["untouched"] for row in saw(8))


def test_row_09_warm_noise_is_each_replicas_own_and_averages_out(saw: Saw) -> None:
    rows = saw(9)
    noise = np.array([row["noise"] for row in rows])
    size = rows[0]["size"]
    np.testing.assert_allclose(np.sqrt((noise**2).mean(axis=1)), [size] * NUM_REPLICAS, rtol=0.05)
    assert np.abs(np.corrcoef(noise) - np.eye(NUM_REPLICAS)).max() < 0.05
    for row in rows:
        assert row["left"] == pytest.approx(size / math.sqrt(NUM_REPLICAS), rel=0.05)
        assert len(row["warnings"]) == 1
        assert "not wrapped in DistributedDataParallel" in row["warnings"][0]


def test_row_10_lr_and_momentum_follow_the_schedule_between_rounds_and_the_end_is_the_end(saw: Saw) -> None:
    rows = saw(10)
    schedule = np.array(_one_cycle(40))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=MAX_LR, momentum=0.9)
    reference = OneCycleLR(optimizer, MAX_LR, 40)
    momenta = []
    for step in range(1, 41):
        momenta.append(optimizer.param_groups[0]["momentum"])
        _update(optimizer, step)
        reference.step()
    for row in rows:
        factors = np.array(row["lrs"]) / schedule
        for start in range(0, 40, 10):
            np.testing.assert_allclose(factors[start : start + 10], factors[start], rtol=1e-12)
        assert row["momenta"] == momenta
        assert row["past the end"] == ("ValueError: Tried to step 41 times. The specified number of total steps is 40")
        assert row["history"][-1].scales != (1.0,)


def test_row_11_any_warm_up_is_defined(saw: Saw) -> None:
    schedule = np.array(_one_cycle(60))
    rows = saw(11)
    acting = {"0": [10, 20, 30, 40, 50, 60], "7": [10, 20, 30, 40, 50, 60], "20": [30, 40, 50, 60], "33": [40, 50, 60]}
    for warmup, steps in acting.items():
        lrs = np.array([row[warmup]["lrs"] for row in rows])
        assert all(row[warmup]["acting"] == steps for row in rows)
        assert (np.diff(lrs, axis=1) != 0).all()  # it never freezes
        base = lrs.mean(axis=0)
        until = steps[0]
        np.testing.assert_allclose(base[:until], schedule[:until], rtol=1e-12)
        if until > 18:
            assert base.max() == pytest.approx(MAX_LR)
        else:
            assert base.max() > 0.5 * MAX_LR  # the peak, times what was learned before it


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({**AUTO, "auto_lr_warmup_steps": 40}, "auto_lr_warmup_steps must be smaller than the 40 total steps"),
        ({**AUTO, "auto_lr_warmup_steps": 100}, "auto_lr_warmup_steps must be smaller than the 40 total steps"),
        ({"model_sync_interval": 0}, "model_sync_interval must be an integer >= 1, but got model_sync_interval=0"),
        ({"ensemble_lr_spread_ratio": 1.5}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=1\.5"),
        ({"ensemble_lr_spread_ratio": -0.1}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=-0\.1"),
        ({"final_div_factor": 0.0}, r"final_div_factor must be a finite number > 0, but got final_div_factor=0\.0"),
    ],
)
def test_row_12_wrong_arguments_are_refused_with_the_rule(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OneCycleAutoLR(_sgd(), MAX_LR, 40, cycle_momentum=False, **options)


def test_row_12_no_warm_up_at_all_is_fine() -> None:
    optimizer = _sgd()
    scheduler = OneCycleAutoLR(optimizer, MAX_LR, 40, cycle_momentum=False, **AUTO)
    assert _train(optimizer, scheduler, 40) == _one_cycle(40)


def test_row_13_the_learning_rate_stays_positive_under_a_lasting_push_downwards(saw: Saw) -> None:
    schedule = np.array(_one_cycle(120))
    for row in saw(13):
        assert min(row["lrs"]) > 0
        velocity = [record.control["velocity"][0] for record in row["history"]]
        assert velocity[-1] == pytest.approx(-SPREAD, rel=3e-3)  # as large as it can get
        assert all(abs(v) <= SPREAD for v in velocity)
        scales = np.array([record.scales[0] for record in row["history"]])
        assert (scales > 0).all()
        assert ((row["lrs"] / schedule) <= 1 + SPREAD).all()


def test_row_14_losses_of_every_form(saw: Saw) -> None:
    for row in saw(14):
        forms = ("float", "int", "numpy", "0-d", "one element", "one element, square", "bfloat16", "float64")
        for form in forms:
            assert row[form] == row["float"], form
        assert row["float"][0][0] == (1.0, 2.0, 3.0, 4.0)
        assert row["dict"].startswith("TypeError: loss must be a number or a tensor with one element, but got dict")
        assert row["batch"].startswith("ValueError: loss must have one element, but got shape (5,)")
        assert row["alternate"] == [(2.0, 3.0, 4.0, 5.0)] * 3  # the mean of those seen
        assert "replicas [2] gave none" in row["none on one"]


def test_row_15_a_loss_that_is_not_finite_costs_its_replica_its_weight_for_a_round(saw: Saw) -> None:
    for row in saw(15):
        assert np.isfinite(row["lrs"]).all()
        assert min(row["lrs"]) > 0
        assert all(math.isfinite(x) for tensor in row["weights"] for x in tensor)
        assert [record.control["weights"][1] for record in row["history"]] == [0, 0.25, 0, 0.25, 0.25]


def test_row_16_one_process_warns_once_and_trains_as_onecyclelr() -> None:
    for options in ({}, AUTO):
        optimizer = _sgd()
        with pytest.warns(UserWarning, match="has no effect with one replica") as caught:
            scheduler = _fan(optimizer, 20, **options)
        assert len(caught) == 1
        assert _train(optimizer, scheduler, 20) == _one_cycle(20)


def test_row_17_get_last_lr_is_torchs(saw: Saw) -> None:
    schedule = _one_cycle(20)
    rows = saw(17)
    for row in rows:
        assert row["off"]
        assert row["on"]
        assert row["sequential"]
    np.testing.assert_allclose(sorted(row["sequential lr"] for row in rows), RHO * schedule[8], rtol=1e-12)


def test_row_18_the_learning_rate_keeps_its_type(saw: Saw) -> None:
    for row in saw(18):
        assert all(row.values()), row


def test_row_19_every_kind_of_tensor_is_averaged_into_its_own_storage(saw: Saw) -> None:
    mean = (NUM_REPLICAS - 1) / 2
    for row in saw(19):
        assert row["running mean"] == [mean] * 2
        assert row["batches"] == NUM_REPLICAS - 1
        assert row["strided"] == (np.arange(6.0).reshape(2, 3).T + mean).tolist()
        assert row["expanded"] == [[mean] * 3] * 2
        assert row["identical"] == [True, True]
        moved = mean - _one_cycle(12)[0]  # the mean of rho is 1
        np.testing.assert_allclose(row["embedding"], [[mean] * 2, [moved] * 2, [moved] * 2, [mean] * 2], rtol=1e-6)


def test_row_20_shards_are_never_averaged_together(saw: Saw) -> None:
    two = multipliers(2, SPREAD)
    base = _one_cycle(8)[0]
    for rank, row in enumerate(saw(20)):
        assert "only shards, no replicas to fan out" in row["fsdp2"]
        for use_orig_params in (False, True):
            assert "sharded by FullyShardedDataParallel" in row[f"fsdp1, use_orig_params={use_orig_params}"]
        assert row["count"] == 2
        assert row["lr"] == pytest.approx(base * two[rank // 2])
        shard = np.arange(8.0).reshape(4, 2)[:2] if rank % 2 == 0 else np.arange(8.0).reshape(4, 2)[2:]
        assert row["local"] == shard.tolist()
        assert "parameters=2 tensors of 12 elements" in row["other parameters"]
        assert "on replicas [0, 2, 3]" in row["other parameters"]
        assert "3 tensors of 18 elements" in row["other parameters"]


def test_row_21_a_replica_that_is_short_of_batches_is_named_with_its_steps(saw: Saw) -> None:
    for row in saw(21):
        assert "RuntimeError: replicas must take the same number of steps between converges" in row["error"]
        assert "replica 0: 8, replica 1: 8, replica 2: 8, replica 3: 5" in row["error"]


def test_row_22_saved_by_rank_0_and_loaded_by_all_the_run_continues_exactly(saw: Saw) -> None:
    for row in saw(22):
        assert all(row.values()), row


def test_row_23_resuming_by_last_epoch_works_at_any_step(saw: Saw) -> None:
    rows = saw(23)
    schedule = _one_cycle(12)
    for taken, steps in {3: [4, 8, 12], 4: [8, 12], 5: [8, 12], 8: [12]}.items():
        lrs = [row[str(taken)]["lr"] for row in rows]
        np.testing.assert_allclose(sorted(lrs), RHO * schedule[taken], rtol=1e-12)
        assert all(row[str(taken)]["same"] for row in rows)
        assert all(row[str(taken)]["steps"] == steps for row in rows)


def test_row_24_the_last_step_converges(saw: Saw) -> None:
    for row in saw(24):
        assert row["apart"]
        assert row["same"]
        g = torch.Generator().manual_seed(14)
        for index, final in enumerate(row["final"]):
            gradient = torch.randn(3, 2, generator=g).flatten().numpy()
            mean = np.mean([replica[index] for replica in row["rows"]], axis=0)
            np.testing.assert_allclose(final, mean - row["lr"] * gradient, rtol=1e-4, atol=1e-6)


def test_row_25_the_number_of_collectives_does_not_grow_with_the_number_of_tensors(saw: Saw) -> None:
    for row in saw(25):
        assert row["1"] == row["10"] == row["300"] == 1


def test_row_26_it_is_quiet(saw: Saw) -> None:
    for row in saw(26):
        assert row == {"warnings": [], "logs": []}


def test_every_row_has_its_test() -> None:
    tested = {int(name[9:11]) for name in globals() if name.startswith("test_row_")}
    assert tested == set(range(1, 27))
