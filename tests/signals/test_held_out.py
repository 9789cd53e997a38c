"""The gradient signal on held-out data: what it reads, that it leaves no trace, and that it lowers the rate in time."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
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

from hdet import Adapt, AutoLR
from hdet.policy.decayed_mean import DecayedMean, certain
from hdet.replicas.group import Replicas
from hdet.signals.held_out import PROBE_EVERY, HeldOutGradient, probe_gradients
from hdet.weights.anchor import Anchor
from job import launch


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def batch(seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = batch(seed)
    return nn.functional.mse_loss(model(x), y)


def test_a_probe_leaves_no_trace() -> None:
    model = make_model()
    model[1].eval()  # frozen by the user
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    modes = [module.training for module in model.modules()]

    def everything() -> str:
        gradients = [p.grad for p in model.parameters()]
        return str(
            [model.state_dict(), gradients, [m.training for m in model.modules()], torch.get_rng_state().tolist()]
        )

    before, kept = everything(), [p.grad for p in model.parameters()]
    seen: list[bool] = []

    def probe() -> Tensor:
        seen.append(model.training)
        return loss_of(model, 1) + 0 * torch.rand(()).double()

    loss, gradients = probe_gradients(probe, model, list(model.parameters()))
    assert everything() == before
    assert [m.training for m in model.modules()] == modes
    assert all(now is old for now, old in zip([p.grad for p in model.parameters()], kept, strict=True))
    assert seen == [False]
    expected = loss_of(model.eval(), 1)
    assert_allclose(float(loss), float(expected.detach()))
    for found, right in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        assert found is not None
        assert_allclose(found.numpy(), right.numpy())


def test_no_hook_of_the_users_sees_it() -> None:
    model, calls = make_model(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p))  # type: ignore[no-untyped-call]
    probe_gradients(lambda: loss_of(model, 1), model, list(model.parameters()))
    assert not calls


@pytest.mark.parametrize(
    ("probe", "what"),
    [
        (lambda model: 1.0, "got float"),
        (lambda model: loss_of(model, 0).item(), "got float"),
        (lambda model: loss_of(model, 0).detach(), "got a tensor without one"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(probe: Callable[[nn.Module], Any], what: str) -> None:
    model = make_model()
    with pytest.raises(TypeError, match=f"probe must return a loss with a gradient .* {what}; return the tensor"):
        probe_gradients(lambda: probe(model), model, list(model.parameters()))
    assert model.training


def make_signal(model: nn.Module, **settings: Any) -> HeldOutGradient:
    anchor = Anchor()
    anchor.renew([torch.zeros_like(p) for p in model.parameters()])
    given: dict[str, Any] = {"sample_every": 1, "num_ranks": 1, "probe_every": 2} | settings
    return HeldOutGradient(anchor, [0], probe=lambda: loss_of(model, 1), model=model, **given)


def test_the_reading_is_corrected_by_the_gap() -> None:
    model = make_model().eval()
    optimizer, signal = torch.optim.SGD(model.parameters(), lr=0.0), make_signal(model)
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        signal.before_step(optimizer)
    signal.share(Replicas(None), np.array([1.0]))
    reading = signal.drain()
    gradients = torch.autograd.grad(loss_of(model, 1), list(model.parameters()))
    right = sum(float((g * p.detach()).sum()) for g, p in zip(gradients, model.parameters(), strict=True))
    assert reading.slopes is not None
    assert reading.probed is not None
    # All samples are the same: the gap is certain, and training plus gap is what held-out data say.
    assert_allclose(reading.slopes[0], [right], rtol=1e-6)
    assert_allclose(reading.probed.loss, float(loss_of(model, 1).detach()))
    assert_allclose(reading.probed.slope, right, rtol=1e-6)


def test_a_gap_within_its_error_changes_nothing() -> None:
    mean, error = np.array([0.9, -0.9, 5.0, -5.0, np.nan]), np.array([1.0, 1.0, 1.0, 0.0, np.inf])
    assert_allclose(certain(mean, error), [0.0, 0.0, 4.8, -5.0, 0.0])


def test_the_error_of_a_faded_mean() -> None:
    generator = np.random.default_rng(1)
    faded = DecayedMean(500, 0.85)
    for _ in range(200):
        faded.add(generator.normal(0.0, 1.0, 500))
    assert_allclose(np.std(faded.mean), math.sqrt(0.15 / 1.85), rtol=0.1)
    assert_allclose(np.mean(faded.error), np.std(faded.mean), rtol=0.1)


def test_a_new_anchor_forgets_the_gap() -> None:
    model = make_model().eval()
    optimizer, signal = torch.optim.SGD(model.parameters(), lr=0.0), make_signal(model)
    for _ in range(8):
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        signal.before_step(optimizer)
    signal.share(Replicas(None), np.array([1.0]))
    signal.drain()
    assert signal.gap.weights[0] > 0
    signal.anchor.renew(model.parameters())
    signal.drain()
    assert signal.gap.weights[0] == 0


class Points:
    """40 noisy points, which a network of 200 weights learns by heart; and others."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(240, 6, generator=generator)
        noise = torch.randn(240, 1, generator=generator)
        self.y = torch.sin(self.x[:, :2].sum(1, keepdim=True)) + 0.7 * noise
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
        self.generator = torch.Generator().manual_seed(seed)
        self.held_out = torch.Generator().manual_seed(seed + 1)
        self.num_probes = 0

    def loss(self, rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(self.x[rows]), self.y[rows])

    def step_loss(self) -> Tensor:
        return self.loss(torch.randint(40, (16,), generator=self.generator))

    def probe(self) -> Tensor:
        self.num_probes += 1
        return self.loss(torch.randint(40, 120, (16,), generator=self.held_out))

    def final(self) -> float:
        with torch.no_grad():
            return float(self.loss(torch.arange(120, 240)))

    def train(self, scheduler: AutoLR, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.step_loss()
            loss.backward()  # type: ignore[no-untyped-call]
            scheduler.optimizer.step()
            scheduler.step(loss)
            scheduler.optimizer.zero_grad()


def make_run(total_steps: int, *, probed: bool = True, seed: int = 1, **given: Any) -> tuple[Points, AutoLR]:
    task = Points(seed)
    optimizer = torch.optim.AdamW(task.model.parameters(), weight_decay=0.01)
    probe = task.probe if probed else None
    return task, AutoLR(optimizer, total_steps=total_steps, model=task.model, probe=probe, **given)


def test_a_model_that_overfits_ends_lower() -> None:
    found = []
    for probed in (False, True):
        task, scheduler = make_run(600, probed=probed)
        task.train(scheduler, 600)
        found.append((task.final(), max(r.base_values[0] for r in scheduler.history if r.phase == "hold")))
    assert found[1][0] < 0.9 * found[0][0]
    assert found[1][1] < 0.3 * found[0][1]


def test_probes_are_few() -> None:
    task, scheduler = make_run(200)
    task.train(scheduler, 200)
    assert task.num_probes == 200 // PROBE_EVERY


def test_the_first_probes_do_not_hold_a_run_up() -> None:
    runs = [make_run(120, probed=probed) for probed in (False, True)]
    level = runs[0][1]._run.policy.level
    assert level is not None
    level.watched = True  # so that both start as low
    for task, scheduler in runs:
        task.train(scheduler, 55)
    plain, probed = ([record.base_values for record in scheduler.history] for _, scheduler in runs)
    assert runs[1][0].num_probes == 2
    assert probed == plain


def test_after_that_only_probes_decide() -> None:
    task, scheduler = make_run(600)
    task.train(scheduler, 300)
    level = [record for record in scheduler.history if record.phase == "level"]
    moved = [a.step for b, a in itertools.pairwise(level) if a.scales != b.scales]
    probed = {record.step for record in level if record.held_out and not math.isnan(record.held_out.loss)}
    late = [step for step in moved if step > max(sorted(probed)[3], 3 * int(0.06 * 600))]  # after the warm-up
    assert late
    assert set(late) <= probed


def test_it_is_resumed_exactly() -> None:
    task, scheduler = make_run(250)
    task.train(scheduler, 150)
    again, other = make_run(250)
    again.model.load_state_dict(task.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(scheduler.optimizer.state_dict()))
    other.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    for mine, theirs in ((task.generator, again.generator), (task.held_out, again.held_out)):
        theirs.set_state(mine.get_state())
    task.train(scheduler, 100)
    again.train(other, 100)
    assert again.final() == task.final()
    assert other.history[-1].held_out == scheduler.history[-1].held_out


def _slopes_of_ranks(kind: str) -> list[float]:
    rank = dist.get_rank()
    model: Any = make_model().eval()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = AutoLR(
        optimizer, total_steps=40, model=model, probe=lambda: loss_of(model, 10 + rank), interval=5,
        weight_decay="learn", adapt=Adapt(level=False),
    )  # fmt: skip
    signal: Any = scheduler._run.signals[0]
    signal.probe_every = 1
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, 2 * step + rank)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss.detach())
    held_out = scheduler.history[-1].held_out
    assert held_out is not None
    decay = scheduler.history[-1].knobs["weight_decay"]
    return [held_out.loss, held_out.slope, held_out.z, decay.slope, decay.base]


def test_parallel_training_reads_the_same() -> None:
    found = {kind: launch(_slopes_of_ranks, 2, kind) for kind in ("ddp", "fsdp")}
    for rows in found.values():
        assert rows[0] == rows[1]
        assert rows[0][-1] != 0.1
    assert_allclose(found["ddp"][0], found["fsdp"][0], rtol=1e-9)
