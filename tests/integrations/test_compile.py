"""torch.compile of models and of optimizer steps: nothing is compiled twice, and no learning rate is stale."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Adapt, AutoLR, OneCycleAutoLR
from job import alike, launch
from native import MAX_LR, Run, batch, loss_signal, net
from tiers import slow

# Of torch's own, when a step is compiled for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
        pytest.mark.filterwarnings("ignore"),  # torch's own
    ],
)

NUM_STEPS, TOTAL_STEPS, INTERVAL = 9, 60, 4
WARM_UP = 3
"""Steps in which torch may compile: a learning rate that is a number is a constant first, and an input then."""

OPTIMIZERS: dict[str, Any] = {
    "adam, foreach": lambda parameters: Adam(parameters, lr=MAX_LR, foreach=True),
    "adam, fused": lambda parameters: Adam(parameters, lr=MAX_LR, fused=True),
    "adam, tensor, capturable": lambda parameters: Adam(parameters, lr=torch.tensor(MAX_LR), capturable=True),
    "adam, tensor, fused": lambda parameters: Adam(parameters, lr=torch.tensor(MAX_LR), fused=True),
    "adam, tensor": lambda parameters: Adam(parameters, lr=torch.tensor(MAX_LR), foreach=False),
    "sgd": lambda parameters: SGD(parameters, lr=MAX_LR, momentum=0.9),
}


def _one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, MAX_LR, TOTAL_STEPS, cycle_momentum=False)


def _auto(optimizer: Optimizer) -> AutoLR:
    return AutoLR(_one_cycle(optimizer), interval=INTERVAL, adapt=Adapt(_start_steps=0, level=False))


def _drop_in(optimizer: Optimizer) -> OneCycleAutoLR:
    return OneCycleAutoLR(optimizer, MAX_LR, TOTAL_STEPS, model_sync_interval=INTERVAL, cycle_momentum=False)


FACES: dict[str, Any] = {"AutoLR": _auto, "OneCycleAutoLR": _drop_in}


@functools.cache
def _num_compilations_of_torch(optimizer: str) -> list[int]:
    return _train(OPTIMIZERS[optimizer], _one_cycle, compiles=True)[0]


def _train(
    make: Any, face: Any, *, compiles: bool, backend: Any = None
) -> tuple[list[int], list[list[float]], list[float]]:
    """Compilations so far, weights and learning rates, step by step."""
    torch._dynamo.reset()
    counters.clear()
    model = net(1)[0].float()  # two tensors are enough, and compiled sooner
    optimizer = make(model.parameters())
    scheduler = face(optimizer)
    counter = CompileCounter()
    update = torch.compile(optimizer.step, backend=backend or counter) if compiles else optimizer.step
    counts, weights, lrs = [], [], []
    for step in range(NUM_STEPS):
        x, y = (t.float() for t in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        update()
        scheduler.step(*(() if type(scheduler) is OneCycleLR else (loss,)))
        counts.append(counter.frame_count if backend is None else counters["stats"]["unique_graphs"])
        weights.append([w for p in model.parameters() for w in p.detach().flatten().tolist()])
        lrs.append(float(optimizer.param_groups[0]["lr"]))
    return counts, weights, lrs


# A schedule does no more to an optimizer than to set its learning rate: a number or a tensor.
STEPS = [(name, "AutoLR") for name in OPTIMIZERS if name != "adam, tensor"]
STEPS += [(name, face) for name in ("adam, foreach", "adam, tensor, capturable") for face in FACES if face != "AutoLR"]


@pytest.mark.parametrize(("optimizer", "face"), [STEPS[0], *(slow(*step) for step in STEPS[1:])])
def test_a_compiled_step_is_compiled_as_often_as_under_torchs_schedule_and_uses_the_new_lr(
    optimizer: str, face: str
) -> None:
    counts, weights, lrs = _train(OPTIMIZERS[optimizer], FACES[face], compiles=True)
    uncompiled = "adam, tensor" if "capturable" in optimizer else optimizer  # torch has it on the CPU compiled alone
    _, eager, eager_lrs = _train(OPTIMIZERS[uncompiled], FACES[face], compiles=False)
    assert counts == _num_compilations_of_torch(optimizer)
    assert counts[WARM_UP:] == counts[WARM_UP - 1 : -1]
    assert len(set(lrs)) == NUM_STEPS
    assert lrs == pytest.approx(eager_lrs, rel=1e-6)
    for mine, theirs in zip(weights, eager, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize("face", ["AutoLR", "OneCycleAutoLR"])
def test_a_step_compiled_to_machine_code_uses_the_new_lr(face: str, backend: str) -> None:
    make = OPTIMIZERS["adam, tensor, capturable"]
    counts, weights, lrs = _train(make, FACES[face], compiles=True, backend=backend)
    _, eager, eager_lrs = _train(OPTIMIZERS["adam, tensor"], FACES[face], compiles=False)
    assert counts == [1] * NUM_STEPS
    assert lrs == pytest.approx(eager_lrs, rel=1e-5)
    for mine, theirs in zip(weights, eager, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_tensor_that_is_the_learning_rate_stays_that_tensor() -> None:
    model = net()
    optimizer = Adam(model.parameters(), lr=torch.tensor(MAX_LR))
    lr = optimizer.param_groups[0]["lr"]
    scheduler = _auto(optimizer)
    for _ in range(INTERVAL + 1):
        torch.autograd.backward(model(batch(1)[0]).mean())
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] is lr


# What is traced shows in the eager backend, for each face; the others compile the same graph.
@pytest.mark.parametrize(
    ("face", "backend"),
    [
        *((face, "eager") for face in FACES),
        ("AutoLR", "aot_eager"),
        pytest.param("AutoLR", *INDUCTOR.values, marks=INDUCTOR.marks),
    ],
)
def test_a_compiled_model_is_compiled_once(face: str, backend: str) -> None:
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = net()
        optimizer = Adam(model.parameters(), lr=MAX_LR)
        scheduler = FACES[face](optimizer)
        counter = CompileCounter()
        chosen: Any = counter if backend == "eager" else backend
        forward = torch.compile(model, backend=chosen) if compiles else model
        for step in range(9):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(forward(x), y)
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step(loss)
        results.append([w for p in model.parameters() for w in p.detach().flatten().tolist()])
        assert counter.frame_count == (1 if compiles and backend == "eager" else 0)
    assert results[0] == pytest.approx(results[1], rel=1e-10)


def _replicas() -> dict[str, Any]:
    """Replicas of a compiled model, with a compiled step: a converge writes where compiled code reads."""
    place = (dist.get_rank(), dist.get_world_size())
    out: dict[str, Any] = {}
    for name, face in (("loss", loss_signal),):
        plain = Run(DistributedDataParallel(net()), face, place)
        run = Run(DistributedDataParallel(net()), face, place)
        models, steps = CompileCounter(), CompileCounter()
        run.forward = torch.compile(run.model, backend=models)
        run.optimizer.step = torch.compile(run.optimizer.step, backend=steps)  # type: ignore[method-assign,assignment]
        counts = []
        for _ in range(9):
            run.step()
            counts.append((models.frame_count, steps.frame_count))
        plain.advance(9)
        with run.converged(), plain.converged():
            out[name] = (run.weights(), plain.weights(), counts)
            out[f"{name}: alike"] = alike(run.weights())
    return out


@pytest.mark.slow
def test_replicas_with_compiled_models_and_steps() -> None:
    for result in launch(_replicas, 2, timeout_s=150):
        compiled, plain, counts = result["loss"]
        assert compiled == pytest.approx(plain, rel=1e-4)  # bias corrections are compiled in float32
        assert counts[WARM_UP:] == counts[WARM_UP - 1 : -1]
        assert result["loss: alike"]


@pytest.mark.parametrize("optimizer", ["sgd", *(slow(o) for o in ("adam, foreach", "adam, tensor"))])
def test_a_first_level_is_found_under_compiled_models_and_steps(optimizer: str) -> None:
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        model = net().float()
        made = OPTIMIZERS[optimizer](model.parameters())
        scheduler = AutoLR(made, total_steps=TOTAL_STEPS)
        forward = torch.compile(model, backend="eager") if compiles else model

        def step(made: Optimizer = made) -> None:
            made.step()

        take = torch.compile(step, backend="eager") if compiles else step
        for index in range(32):
            x, y = batch(index)
            made.zero_grad()
            loss = nn.functional.mse_loss(forward(x.float()), y.float())
            torch.autograd.backward(loss)
            take()
            scheduler.step(loss)
        level = scheduler._run.policy.level
        assert level is not None
        assert level.found
        found.append((float(made.param_groups[0]["lr"]), [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
