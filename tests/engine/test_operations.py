"""Faults and averaging: faulty replicas, steps without their gradient, slow converges."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR

import hdet.run
from hdet import Adapt, AutoLR, Averaging, Explorer, Faults, OneCycleAutoLR
from hdet.testing import Fault, Injector, assert_same_weights, collect_weights
from job import alike, error, everyone, launch
from options import grouped, with_ensemble

T = 4
AS_GIVEN = Adapt(level=False)


# -- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quarantine": 1.0}, "quarantine must be None or a finite number > 1, but got quarantine=1.0"),
        ({"quarantine": math.nan}, "quarantine must be None or a finite number > 1, but got quarantine=nan"),
        ({"skip_nonfinite": 1}, "skip_nonfinite must be True or False, but got skip_nonfinite=1"),
        ({"slow_share": 0}, "slow_share must be a finite number > 0, but got slow_share=0"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        grouped(**options)


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("group", ["Adapt", "Copies", "Faults"])
def test_options_must_be_of_their_group(group: str) -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    wrong: dict[str, Any] = {group.lower(): {}}
    with pytest.raises(TypeError, match=rf"{group.lower()} must be an hdet.{group}, but got dict"):
        AutoLR(ConstantLR(optimizer), **wrong)


# -- a training loop with faults ----------------------------------------------------------------------------------


class _Run:
    """A small regression. ``local``: replicas apart, each on data of its own; else DistributedDataParallel."""

    def __init__(
        self,
        face: str,
        *,
        faults: list[Fault] | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
        steps: int = 6 * T,
        lr: float = 0.02,
        **options: Any,
    ) -> None:
        self.rank, self.steps = dist.get_rank(), steps
        model = _model()
        self.model: nn.Module = model if face == "local" else DistributedDataParallel(model)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)  # type: ignore[call-arg]
        common: dict[str, Any] = {"interval": T, "total_steps": steps, "max_rollbacks": 0, **options}
        self.scheduler: Explorer | AutoLR | OneCycleAutoLR
        if face == "local":
            self.scheduler = Explorer(self.model, self.optimizer, gradients="local", **grouped(**common))
        elif face == "paper":
            self.scheduler = OneCycleAutoLR(
                self.optimizer, lr, steps, ensemble_lr_spread_ratio=0.2, model_sync_interval=T, model=self.model,
                cycle_momentum=False, **with_ensemble(**options),
            )  # fmt: skip
        else:
            common |= {"signal": face, "level": False}
            self.scheduler = AutoLR(ConstantLR(self.optimizer, 1.0), model=self.model, **with_ensemble(**common))
        self.inject = Injector(faults or [], self.rank)
        self.step = 0
        self.trace: list[Tensor] = []

    def advance(self, until: int | None = None) -> _Run:
        while self.step < (self.steps if until is None else until):
            self.step += 1
            data = torch.Generator().manual_seed(100 * self.step + self.rank)
            x = torch.randn(8, 3, generator=data)
            self.optimizer.zero_grad()
            loss = self.inject.loss(self.step, (self.model(x) - x[:, :2] * (1 + self.rank)).square().mean())
            loss.backward()  # type: ignore[no-untyped-call]
            self.inject.gradients(self.step, self.model)
            self.optimizer.step()
            self.inject.weights(self.step, self.model)
            self.scheduler.step(loss)
            self.trace.append(self.flat())
        return self

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])


# -- mending ------------------------------------------------------------------------------------------------------


def _repaired() -> dict[str, Any]:
    """Adam with local gradients on three replicas; replica 1 is NaN from step 6 on, its moments included."""
    faults = [Fault("nan_weights", 1, 6), Fault("nan_gradient", 1, 7)]
    run = _Run("local", faults=faults).advance(2 * T - 1)
    out: dict[str, Any] = {"faulty before": not bool(torch.isfinite(run.flat()).all())}
    run.advance(2 * T)
    state = [t for s in run.optimizer.state.values() for t in s.values()]
    told = everyone([t.tolist() for t in state])
    out["moments"] = all(bool(torch.isfinite(t).all()) for t in state)
    out["mean of the others' moments"] = all(
        np.allclose(b, (np.array(a) + np.array(c)) / 2, rtol=1e-6) for a, b, c in zip(*told, strict=True)
    )
    run.advance()
    out["record"] = [record.unhealthy for record in run.scheduler.history]
    out["weights"] = collect_weights(run.model)

    # The healthy two, alone, would have gone the same way: their mean, and their own moments.
    clean = _Run("local").advance(2 * T)
    faulty = _Run("local", faults=[Fault("nan_weights", 1, 2 * T)]).advance(2 * T)
    out["others' moments are theirs to the last bit"] = run.rank == 1 or all(
        torch.equal(a, b)
        for own, other in zip(clean.optimizer.state.values(), faulty.optimizer.state.values(), strict=True)
        for a, b in zip(own.values(), other.values(), strict=True)
    )
    return out


def test_a_faulty_replica_is_re_seeded_with_the_others_mean_and_moments() -> None:
    results = launch(_repaired, 3)
    assert [result["faulty before"] for result in results] == [False, True, False]
    for result in results:
        assert result["moments"]
        assert result["mean of the others' moments"]
        assert result["others' moments are theirs to the last bit"]
        assert result["record"] == [(), (1,), (), (), (), ()]
    assert_same_weights([result["weights"] for result in results])


def _equal_replicas() -> dict[str, Any]:
    """The gradient signal keeps replicas equal: one that breaks at a round's end receives what the others have."""
    clean = _Run("gradient").advance()
    faulty = _Run("gradient", faults=[Fault("nan_weights", 1, 2 * T)]).advance()
    return {
        "undisturbed": torch.equal(clean.flat(), faulty.flat()),
        "record": [r.unhealthy for r in faulty.scheduler.history],
        "rollbacks": faulty.scheduler.history[-1].num_rollbacks,
        "weights": collect_weights(faulty.model),
    }


def test_where_replicas_are_equal_nothing_is_lost() -> None:
    results = launch(_equal_replicas, 2)
    for result in results:
        assert result["undisturbed"]
        assert result["record"] == [(), (1,), (), (), (), ()]
        assert result["rollbacks"] == 0
    assert_same_weights([result["weights"] for result in results])


# -- steps without their gradient ---------------------------------------------------------------------------------


def _skipping() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for face in ("paper", "loss", "gradient"):
        # Before the backward pass: DistributedDataParallel brings it to every rank.
        faults = [Fault("nan_loss", 1, T + 2)]
        run = _Run(face, faults=faults, optimizer=torch.optim.SGD, skip_nonfinite=True).advance()
        out[f"{face}: nothing moved in that step"] = torch.equal(run.trace[T], run.trace[T + 1])
        out[f"{face}: training went on"] = not torch.equal(run.trace[T + 1], run.trace[T + 2])
        out[f"{face}: finite"] = all(bool(torch.isfinite(w).all()) for w in run.trace)
        out[f"{face}: nobody was unhealthy"] = all(r.unhealthy == () for r in run.scheduler.history)
        assert_same_weights(everyone(collect_weights(run.model)))

        # Weights that are NaN in mid-round make every gradient NaN until the converge mends them.
        faults = [Fault("nan_weights", 1, T + 1)]
        run = _Run(face, faults=faults, skip_nonfinite=True).advance()
        out[f"{face}: named"] = [r.unhealthy for r in run.scheduler.history][1] == (1,)
        out[f"{face}: repaired"] = all(bool(torch.isfinite(w).all()) for w in run.trace[2 * T :])
        assert_same_weights(everyone(collect_weights(run.model)))

    run = _Run("paper", faults=[Fault("nan_loss", 1, T + 2)])
    out["text"] = error(run.advance)
    plain, skipping = _Run("loss").advance(), _Run("loss", skip_nonfinite=True).advance()
    out["changes nothing while all is finite"] = torch.equal(plain.flat(), skipping.flat())
    return out


def test_a_gradient_that_is_not_finite_is_taken_out_of_its_step_on_all_ranks_alike() -> None:
    for result in launch(_skipping, 2):
        text = result.pop("text")
        assert text.startswith("BrokenError: the weights of all 2 replicas are not finite at the converge of step 8")
        assert "pass faults=Faults(max_rollbacks=20), or faults=Faults(skip_nonfinite=True)" in text
        assert all(result.values()), [name for name, ok in result.items() if not ok]


def _broken_on_one_rank() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for face in ("gradient", "paper"):
        # After the all-reduce: the others' gradients are finite.
        run = _Run(face, faults=[Fault("nan_gradient", 1, T + 2)], skip_nonfinite=True, optimizer=torch.optim.SGD)
        run.advance()
        out[f"{face}: nothing moved in that step"] = torch.equal(run.trace[T], run.trace[T + 1])
        out[f"{face}: training went on"] = not torch.equal(run.trace[T + 1], run.trace[T + 2])
        out[f"{face}: nobody was unhealthy"] = all(r.unhealthy == () for r in run.scheduler.history)
        if face == "gradient":
            out["equal after every step"] = alike([w.tolist() for w in run.trace])
        assert_same_weights(everyone(collect_weights(run.model)))

    # Of a rank without any gradient in this step, too.
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    scheduler = AutoLR(ConstantLR(optimizer, 1.0), interval=100, adapt=AS_GIVEN, faults=Faults(skip_nonfinite=True))
    for grad in (torch.tensor([1.0, math.inf]) if dist.get_rank() else None, torch.ones(2)):
        before = weights.detach().clone()
        weights.grad = grad
        optimizer.step()
        scheduler.step(1.0)
        out.setdefault("moved", []).append(not torch.equal(before, weights))
    return out


def test_a_gradient_that_breaks_on_one_rank_alone_is_dropped_on_all() -> None:
    for result in launch(_broken_on_one_rank, 2):
        assert result.pop("moved") == [False, True]
        assert all(result.values()), [name for name, ok in result.items() if not ok]


def _collectives() -> list[int]:
    """Of a step without a round's end: all-reduces of one process with the others."""
    counts = []
    for gradients, skips in (("shared", False), ("shared", True), ("local", True)):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        signal: Any = "gradient" if gradients == "shared" else "loss"
        options: Any = with_ensemble(signal=signal, gradients=gradients, model=model, adapt=AS_GIVEN)
        scheduler = AutoLR(ConstantLR(optimizer, 1.0), interval=100, faults=Faults(skip_nonfinite=skips), **options)
        num_calls = 0
        reduce = dist.all_reduce

        def counted(*args: Any, reduce: Any = reduce, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return reduce(*args, **kwargs)

        dist.all_reduce = counted
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step(1.0)
        dist.all_reduce = reduce
        counts.append(num_calls)
    return counts


def test_ranks_ask_each_other_about_gradients_only_where_they_must() -> None:
    for plain, skipping, local in launch(_collectives, 2):
        assert skipping == plain + 1
        assert local == 0


def test_huge_gradients_are_finite() -> None:
    for value, moved in ((3e38, True), (math.inf, False), (math.nan, False)):
        weights = nn.Parameter(torch.zeros(3, dtype=torch.float32))
        other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([weights, other], lr=1e-30)
        scheduler = AutoLR(ConstantLR(optimizer, 1.0), faults=Faults(skip_nonfinite=True))
        weights.grad, other.grad = torch.tensor([0.0, value, 1.0]), torch.ones(2, dtype=torch.float64)
        optimizer.step()
        scheduler.step(1.0)
        assert bool(weights.any()) == bool(other.any()) == moved


# -- quarantine ---------------------------------------------------------------------------------------------------


def _quarantined() -> dict[str, Any]:
    steps = 12 * T
    run = _Run("local", faults=[Fault("explode", 1, 8 * T + 1)], steps=steps, quarantine=20).advance(9 * T - 1)
    rows = np.array(everyone(run.flat().tolist()))
    run.advance()
    clean = _Run("local", steps=steps).advance()
    return {
        "explosion": float(np.abs(rows[1]).max()),
        "record": [r.quarantined for r in run.scheduler.history],
        "unhealthy": [r.unhealthy for r in run.scheduler.history],
        "alarms of a healthy run": [r.quarantined for r in clean.scheduler.history if r.quarantined],
        "distance to a healthy run": float((run.flat() - clean.flat()).abs().max()),
        "weights": collect_weights(run.model),
    }


def test_a_replica_whose_loss_explodes_is_left_out_and_restarted() -> None:
    results = launch(_quarantined, 3)
    for result in results:
        assert result["explosion"] > 50
        assert result["record"] == [(1,) if index == 8 else () for index in range(12)]
        assert not any(result["unhealthy"])
        assert not result["alarms of a healthy run"]
        assert result["distance to a healthy run"] < 0.2
    assert_same_weights([result["weights"] for result in results])


def _corrupted() -> dict[str, Any]:
    """It shows in the loss before the round ends: one that shows in the weights alone is a fork."""
    run = _Run("gradient", faults=[Fault("explode", 1, 9 * T + 1)], steps=12 * T, quarantine=20)
    run.advance(9 * T + 1)
    apart = everyone(run.flat().tolist())
    run.advance()
    return {
        "apart": apart[0] != apart[1],
        "record": [r.quarantined for r in run.scheduler.history],
        "weights": collect_weights(run.model),
    }


def test_a_replica_that_should_be_equal_and_is_not_receives_the_others_weights() -> None:
    results = launch(_corrupted, 3)
    for result in results:
        assert result["apart"]
        assert result["record"] == [(1,) if index == 9 else () for index in range(12)]
    assert_same_weights([result["weights"] for result in results])


# -- unequal steps ------------------------------------------------------------------------------------------------


def _unequal() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for face in ("paper", "loss"):
        run = _Run(face).advance(2)
        if run.rank == 0:
            run.optimizer.step()
        run.scheduler.step(1.0)
        before = run.flat()
        out[face] = error(run.scheduler.converge)
        out[f"{face}: unchanged"] = torch.equal(run.flat(), before)
    run = _Run("paper")
    if run.rank == 0:
        get_state_dict(run.model, run.optimizer)  # takes a step of its own, which moves nothing
    out["rehearsed"] = run.advance(T).scheduler.history[0].num_updates
    run = _Run("local").advance(2)
    if run.rank == 0:
        run.optimizer.step()
    run.scheduler.step(1.0)
    run.step += 1
    run.advance(T)
    out["counted"] = run.scheduler.history[0].num_updates
    return out


def test_an_optimizer_step_skipped_on_one_rank_is_found() -> None:
    for result in launch(_unequal, 2):
        for face in ("paper", "loss"):
            assert "they took replica 0: 3, replica 1: 2; never skip optimizer.step() on some ranks" in result[face]
            assert result[f"{face}: unchanged"]
        assert result["counted"] == (4, 3)
        assert result["rehearsed"] == (4, 4)


# -- slow converges -----------------------------------------------------------------------------------------------


def _slow(share: float) -> list[str]:
    """A clock with given times: a second of training, then a converge in which rank 0 waits for rank 1."""
    run = _Run("local", slow_share=share)
    converge_s = 2.0 if run.rank == 0 else 0.1
    times = itertools.accumulate(itertools.cycle([1.0, converge_s]))
    vars(hdet.run).update(time=SimpleNamespace(perf_counter=lambda: next(times)), SLOW_S=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.advance(4 * T)
    assert run.scheduler.history[-1].converge_s == pytest.approx(converge_s)
    return [str(w.message) for w in caught]


def test_a_slow_converge_is_said_once_by_those_who_waited() -> None:
    waited, slept = launch(_slow, 2, 0.2)
    assert len(waited) == 1
    assert (
        "of its round, and two before it as long: a rank or the network is slow. Make rounds longer than 4 steps"
        in waited[0]
    )
    assert slept == []
    assert launch(_slow, 2, 1.0) == [[], []]


def test_on_one_process_there_is_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdet.run, "SLOW_S", 0.0)
    monkeypatch.setattr(hdet.run, "NUM_SLOW", 1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = AutoLR(optimizer, total_steps=12)
    for _ in range(12):
        loss = model(torch.ones(1, 2)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)  # a warning would be an error
    assert scheduler.history[-1].converge_s > 0


# -- arguments that replicas cannot have together ------------------------------------------------------------------


def _copies() -> str:
    model = _model()
    shards = [nn.Parameter(p.detach().flatten().clone()) for p in model.parameters()]
    return error(lambda: Explorer(model, torch.optim.SGD(shards, lr=0.1), interval=T, gradients="local"))


def test_an_optimizer_of_copies_is_refused() -> None:
    for found in launch(_copies, 2):
        assert found.startswith(
            "ValueError: the optimizer must train parameters of the model that is averaged, but none"
        )
        assert "of its 2 tensors" in found


def _disagreeing() -> str:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging = Averaging(slow_share=0.1 * (1 + dist.get_rank()))
    return error(lambda: Explorer(model, optimizer, interval=T, gradients="local", averaging=averaging))


def test_ranks_must_agree() -> None:
    for found in launch(_disagreeing, 2):
        assert "slow_share=0.1 on replicas [0], 0.2 on replicas [1]" in found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_taking_out_a_gradient_does_not_wait_for_the_gpu() -> None:
    model = _model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = AutoLR(ConstantLR(optimizer, 1.0), interval=100, adapt=AS_GIVEN, faults=Faults(skip_nonfinite=True))
    x = torch.randn(8, 3, device="cuda")
    before = [p.detach().clone() for p in model.parameters()]
    for factor in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        loss = model(x).square().mean() * factor
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            scheduler.step(loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
