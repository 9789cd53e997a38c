"""Ranks that fall out of step, or come back: an error that names them, in time, and nothing averaged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet.replicas.group
from hdet.testing import Fault, Injector
from job import error, launch
from native import FACES, INTERVAL, TOTAL_STEPS, Run, batch, net, paper
from tiers import slow


def _out_of_step(gradients: str, kind: str, name: str) -> dict[str, Any]:
    """Replica 1 is struck in step 2; the others should notice when they next meet."""
    rank, count = dist.get_rank(), dist.get_world_size()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    options = {"gradients": "local"} if gradients == "local" else {}
    run = Run(DistributedDataParallel(net()), FACES[name], (rank, count), **options)
    inject = Injector([Fault(kind, 1, 2)], rank)  # type: ignore[arg-type]
    before: list[float] = []

    def loop() -> None:
        for step in range(1, TOTAL_STEPS + 1):
            run.optimizer.zero_grad()
            loss = run.loss(step)
            torch.autograd.backward(loss)
            run.optimizer.step()
            if not inject.skips(step):
                before[:] = run.weights()
                run.scheduler.step(loss)

    return {"error": error(loop), "averaged": before != run.weights()}


@pytest.mark.parametrize(
    ("gradients", "name"),
    [("shared", "gradient"), ("local", "paper"), slow("shared", "paper"), slow("local", "gradient")],
)
def test_an_error_on_one_rank_ends_the_others(gradients: str, name: str) -> None:
    results = launch(_out_of_step, 3, gradients, "error", name, timeout_s=150)
    assert results[1]["error"] == "InjectedError: injected into replica 1 in step 2"
    for index in (0, 2):
        found = results[index]
        assert not found["averaged"]
        if gradients == "local":
            assert f"RuntimeError: replica {index} lost the others at the converge of step 4" in found["error"]
            assert "1: 0" in found["error"]
        else:  # they learn it from DistributedDataParallel, one step later
            assert found["error"].startswith("RuntimeError: ")


@pytest.mark.parametrize("name", [slow("paper"), "gradient"])
def test_a_scheduler_step_left_out_on_one_rank_is_found_within_the_timeout(name: str) -> None:
    results = launch(_out_of_step, 3, "shared", "skip_step", name, timeout_s=150)
    for index, found in enumerate(results):
        assert not found["averaged"]
        if index != 1:
            assert f"RuntimeError: replica {index} lost the others at the converge of step 4" in found["error"]
            assert "(replica: step): {1: 0}" in found["error"]
        else:  # it waits for gradients
            assert found["error"].startswith("RuntimeError: ")


@pytest.mark.parametrize("name", FACES)
def test_with_local_gradients_it_is_found_when_they_next_meet(name: str) -> None:
    """It comes to the converge after a fifth optimizer step; the others have taken four."""
    for found in launch(_out_of_step, 3, "local", "skip_step", name, timeout_s=150):
        assert "scheduler.step() must follow every optimizer step on all replicas" in found["error"]
        assert (
            "in the 4 steps up to step 4 their optimizers took replica 0: 4, replica 1: 5, replica 2: 4"
            in found["error"]
        )
        assert not found["averaged"]


# -- an optimizer step that some take and others do not ---------------------------------------------------------------


def _left_out() -> dict[str, Any]:
    """Replica 1 leaves out optimizer.step() once, in the second round; gradients are shared, so nobody waits."""
    rank, count = dist.get_rank(), dist.get_world_size()
    out: dict[str, Any] = {}
    for name in ("gradient", "loss", "paper"):
        run = Run(DistributedDataParallel(net()), FACES[name], (rank, count))
        run.advance(INTERVAL + 1)
        left_out = run.optimizer.step if rank != 1 else lambda: None

        def loop(run: Run = run, left_out: Any = left_out) -> None:
            run.optimizer.zero_grad()
            loss = run.loss()
            torch.autograd.backward(loss)
            left_out()
            run.scheduler.step(loss)
            run.advance(TOTAL_STEPS)

        out[name] = error(loop), run.scheduler.last_epoch, len(run.scheduler.history)
    return out


def test_an_optimizer_step_left_out_on_one_rank_is_found_at_the_end_of_the_round() -> None:
    """Also where replicas are equal, under the default signal, and nothing would be averaged."""
    for result in launch(_left_out, 3, timeout_s=150):
        for name, (text, step, num_rounds) in result.items():
            assert (
                "replicas that share gradients must take the same optimizer steps, but in the round up to step 8 "
                "they took replica 0: 4, replica 1: 3, replica 2: 4; never skip optimizer.step()"
            ) in text, name
            assert (step, num_rounds) == (7, 1)


def _scaled() -> dict[str, Any]:
    """The gradient of step 6 overflows on replica 1, and by the all-reduce on all: every GradScaler skips the step."""
    rank, count = dist.get_rank(), dist.get_world_size()
    run = Run(DistributedDataParallel(net().float()), FACES["gradient"], (rank, count))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(1, TOTAL_STEPS + 1):
        run.optimizer.zero_grad()
        x, y = (t.float() for t in batch(step, rank, count))
        loss = torch.nn.functional.mse_loss(run.model(x), y)
        factor = float("inf") if step == 6 and rank == 1 else 1.0
        torch.autograd.backward(scaler.scale(loss * factor))
        scaler.step(run.optimizer)
        scaler.update()
        run.scheduler.step(loss)
    return {"updates": [r.num_updates for r in run.scheduler.history], "weights": run.weights()}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_that_every_grad_scaler_skips_is_fine() -> None:
    results = launch(_scaled, 2, timeout_s=150)
    for result in results:
        assert result["updates"] == [(4, 4), (3, 3), (4, 4)]
        assert result["weights"] == results[0]["weights"]


# -- a converge that some come to and others do not, or that one leaves by an error ------------------------------------


def _alone(gradients: str, name: str, at: int) -> str:
    """Replica 1 enters converged() alone, as a script does that evaluates under `if rank == ...:`."""
    rank, count = dist.get_rank(), dist.get_world_size()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    model = DistributedDataParallel(net()) if gradients == "shared" else net()
    options = {"gradients": "local"} if gradients == "local" else {}
    run = Run(model, FACES[name], (rank, count), **options)

    def loop() -> None:
        run.advance(at)
        if rank == 1:
            with run.scheduler.converged():
                pass
        run.advance(TOTAL_STEPS)

    return error(loop)


@pytest.mark.parametrize(("name", "at"), [("nesterov", 6), ("nesterov", 4), ("loss", 6), ("paper", 5)])
def test_a_converged_entered_by_one_rank_alone_is_named_as_such(name: str, at: int) -> None:
    for text in launch(_alone, 3, "local", name, at, timeout_s=120):
        end = 4 * (at // 4 + 1)
        assert text == (
            "RuntimeError: replicas must take the same number of steps between converges, but got "
            f"replica 0: {end}, replica 1: {at}, replica 2: {end}; only replicas [1] are in converge(), converged() or "
            "finish(), which must be called on every rank after the same step; check for uneven data or steps skipped "
            "on some ranks. No weights were averaged"
        )


def test_with_shared_gradients_the_rank_that_entered_says_what_to_look_for() -> None:
    """The others wait for its gradients, inside DistributedDataParallel, and learn only that it is gone."""
    results = launch(_alone, 2, "shared", "gradient", 6, timeout_s=120)
    assert "replica 1 lost the others at the converge of step 6" in results[1]
    assert "a converged() or converge() on some ranks alone" in results[1]
    assert results[0].startswith("RuntimeError: ")


def _raises(where: str) -> str:
    """Replica 0 raises at the end of the second round, before or after replicas have told each other their losses."""
    rank, count = dist.get_rank(), dist.get_world_size()
    run = Run(net(), FACES["nesterov"], (rank, count), gradients="local")
    rounds = run.scheduler._run

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("the disk with the held-out data is gone")

    def loop() -> None:
        run.advance(INTERVAL)
        if rank == 0 and where == "before":
            rounds.weights.inspect = fail  # type: ignore[assignment,method-assign]
        elif rank == 0:
            rounds.weights.average = fail  # type: ignore[method-assign, assignment]
        run.advance(TOTAL_STEPS)

    text = error(loop)
    if rank == 0:
        dist.destroy_process_group()  # as when its process ends
    return text


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_others_are_told_what_one_rank_has_raised(where: str) -> None:
    first, *others = launch(_raises, 3, where, timeout_s=120)
    reason = "ValueError: the disk with the held-out data is gone"
    assert first == reason
    for text in others:
        assert text.startswith("RuntimeError: ")
        assert "at the converge of step 8" in text
        assert f"replica 0 raised {reason}" in text


# -- started again, beside what the first start has left in the store -------------------------------------------------


def _restarted() -> list[str]:
    """torchrun keeps the store from one start to the next; new processes have no memory of what was agreed in it."""
    found = []
    for seeds in ((0, 0), (0, 1)):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        seed = seeds[dist.get_rank()]
        found.append(error(lambda o=optimizer, m=model, s=seed: paper(o, m, seed=s)))  # type: ignore[misc]
        dist.barrier()
        hdet.replicas.group._num_calls.clear()
    return found


def test_a_second_start_is_not_taken_in_by_what_the_first_agreed_on() -> None:
    for first, second in launch(_restarted, 2, timeout_s=120):
        assert first == ""
        assert "replicas must agree about their arguments and parameters, but got seed=0 on replicas [0], 1" in second


def _cut_short() -> str:
    if dist.get_rank() == 0:
        key = f"hdet/{dist.group.WORLD.group_name}/0/1"  # type: ignore[union-attr]
        dist.distributed_c10d._get_default_store().add(f"{key}/arrived", 1)
    dist.barrier()
    model = net()
    return error(lambda: paper(torch.optim.Adam(model.parameters()), model))


def test_a_first_start_that_was_cut_short_is_no_disagreement() -> None:
    assert launch(_cut_short, 3, timeout_s=120) == ["", "", ""]
