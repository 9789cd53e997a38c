"""With shared gradients all replicas lie on one line: theta_r = theta_sync - rho_r D, their mean is the rho = 1 model.

D is what the optimizer adds up at multiplier 1, so it can be had from one more model, which receives the same gradients
and takes no part otherwise. That model is ``centre`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Ensemble, OneCycleAutoLR
from hdet.policy.spread import fan_out, multipliers
from job import launch
from native import replicated
from tiers import slow

Array = NDArray[np.float64]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]

ON_THE_LINE: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw without decay": lambda p: torch.optim.AdamW(p, weight_decay=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


# -- many replicas in one process -----------------------------------------------------------------------------------


@dataclass
class Walk:
    start: Tensor  # (P,)
    centre: Tensor  # (P,), the rho = 1 model
    replicas: Tensor  # (N, P)
    rho: Array  # (N,)
    states: list[dict[str, Any]]  # what each replica's optimizer remembers

    def off_the_line(self) -> float:
        """Largest distance of a replica from its place on the line, in units of the largest one from the mean."""
        rho = torch.from_numpy(self.rho)[:, None]
        line = self.start - rho * (self.start - self.centre)
        return float((self.replicas - line).norm(dim=1).max()) / self.spread()

    def mean_off_centre(self) -> float:
        return float((self.replicas.mean(dim=0) - self.centre).norm()) / self.spread()

    def spread(self) -> float:
        return float((self.replicas - self.replicas.mean(dim=0)).norm(dim=1).max())


def walk(make: MakeOptimizer, *, seed: int, num_replicas: int, spread: float, num_steps: int, max_lr: float) -> Walk:
    """A round of training on a random problem: robust regression with a batch of its own for every replica."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    size, truth = 7, normal(7)
    start = normal(size)
    rho = multipliers(num_replicas, spread)
    models = [nn.Parameter(start.clone()) for _ in range(num_replicas + 1)]  # the last one is the centre
    optimizers = [make([model]) for model in models]
    for _ in range(num_steps):
        lr = max_lr * float(torch.rand((), generator=rng, dtype=torch.float64))
        gradients = []
        for model in models[:-1]:
            x = normal(5, size)
            error = x @ model - x @ truth + 0.1 * normal(5)
            gradients.append(torch.autograd.grad(torch.sqrt(1 + error**2).mean(), model)[0])
        shared = torch.stack(gradients).mean(dim=0)
        for model, optimizer, factor in zip(models, optimizers, [*rho, 1.0], strict=True):
            model.grad = shared.clone()
            optimizer.param_groups[0]["lr"] = lr * float(factor)
            optimizer.step()
    return Walk(
        start=start,
        centre=models[-1].detach(),
        replicas=torch.stack([model.detach() for model in models[:-1]]),
        rho=rho,
        states=[optimizer.state[model] for model, optimizer in zip(models, optimizers, strict=True)],
    )


def same_states(states: list[dict[str, Any]]) -> bool:
    plain = [{key: torch.as_tensor(value).tolist() for key, value in state.items()} for state in states]
    return all(state == plain[0] for state in plain)


ALIKE = ("nesterov", "amsgrad", "adamw without decay")
"""Optimizers that are, on the line, like another one."""


@pytest.mark.parametrize("name", [slow(name, when=name in ALIKE) for name in ON_THE_LINE])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    num_replicas=st.integers(2, 6),
    spread=st.floats(0.05, 0.95),
    num_steps=st.integers(1, 25),
    max_lr=st.floats(0.01, 0.3),
)
def test_replicas_lie_on_one_line_and_their_mean_is_the_centre(
    name: str, seed: int, num_replicas: int, spread: float, num_steps: int, max_lr: float
) -> None:
    walked = walk(
        ON_THE_LINE[name], seed=seed, num_replicas=num_replicas, spread=spread, num_steps=num_steps, max_lr=max_lr
    )
    assert walked.off_the_line() < 1e-8
    assert walked.mean_off_centre() < 1e-8
    assert same_states(walked.states)


def long_walk(make: MakeOptimizer, seed: int) -> Walk:
    return walk(make, seed=seed, num_replicas=4, spread=0.5, num_steps=40, max_lr=0.02)


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_decoupled_decay_bends_the_line_in_proportion(seed: int) -> None:
    decays = [0.0, 0.01, 0.1, 1.0]
    walks = [long_walk(lambda p, d=decay: torch.optim.AdamW(p, weight_decay=d), seed) for decay in decays]  # type: ignore[misc]
    none, tiny, small, large = [walked.off_the_line() for walked in walks]
    assert none < 1e-12
    assert 1e-4 < tiny < 2e-2
    assert 5 < small / tiny < 20
    assert 2 < large / small < 20
    assert large < 1
    for walked in walks:
        assert same_states(walked.states)  # decoupled decay never enters the moments
        assert walked.mean_off_centre() <= walked.off_the_line() + 1e-12


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_coupled_decay_breaks_the_line_and_the_moments(seed: int) -> None:
    # It makes the gradient depend on the replica.
    sgd = long_walk(lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1), seed)
    adam = long_walk(lambda p: torch.optim.Adam(p, weight_decay=0.1), seed)
    for walked in (sgd, adam):
        assert walked.off_the_line() > 1e-4
        assert not same_states(walked.states)


# -- real replicas --------------------------------------------------------------------------------------------------

TOTAL_STEPS, INTERVAL, SPREAD, NUM_GROUPS = 17, 6, 0.6, 2
REAL: dict[str, tuple[float, dict[str, Any]]] = {
    "sgd": (0.2, {"momentum": 0.0}),
    "momentum": (0.05, {"momentum": 0.9}),
    "adam": (0.03, {"betas": (0.9, 0.99)}),
    "adamw": (0.03, {"weight_decay": 0.05}),
}


@dataclass
class Path:
    """One real replica, step by step and group by group."""

    replica: list[list[Array]]
    centre: list[list[Array]]
    moments: list[Array]


def real_path(name: str, seed: int) -> Path:
    max_lr, options = REAL[name]
    kinds: dict[str, Callable[..., Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds.get(name, torch.optim.SGD)
    # A generator of this replica's own for its data, one common to all for the weights.
    data, common = torch.Generator().manual_seed(1000 * seed + dist.get_rank()), torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=common, dtype=p.dtype))
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    centre = [[p.detach().clone() for p in group] for group in groups]
    ddp = replicated(model)

    def optimizer_of(tensors: list[Any]) -> Optimizer:
        return kind([{"params": group} for group in tensors], lr=1.0, **options)

    optimizer, centre_optimizer = optimizer_of(groups), optimizer_of(centre)
    cycle = name != "sgd"
    scheduler = OneCycleAutoLR(
        optimizer,
        [max_lr, 2 * max_lr],
        TOTAL_STEPS,
        cycle_momentum=cycle,
        ensemble_lr_spread_ratio=SPREAD,
        model_sync_interval=INTERVAL,
        ensemble=Ensemble(seed=seed),
    )
    centre_scheduler = OneCycleLR(centre_optimizer, [max_lr, 2 * max_lr], TOTAL_STEPS, cycle_momentum=cycle)

    def flat(tensors: list[list[Any]]) -> list[Array]:
        return [torch.cat([t.detach().reshape(-1) for t in group]).numpy() for group in tensors]

    path = Path(replica=[flat(groups)], centre=[flat(centre)], moments=[])
    for _ in range(TOTAL_STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=data, dtype=torch.float64)
        loss = (ddp(x) - x[:, :2].sin()).square().mean()
        torch.autograd.backward(loss)
        for p, c in zip(chain(*groups), chain(*centre), strict=True):
            assert p.grad is not None
            c.grad = p.grad.clone()
        optimizer.step()
        # Before the converge that may follow: what the replica itself came to.
        path.replica.append(flat(groups))
        centre_optimizer.step()
        path.centre.append(flat(centre))
        scheduler.step(loss)
        centre_scheduler.step()
    path.moments = [
        optimizer.state[p][key].numpy()
        for p in chain(*groups)
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")
        if isinstance(optimizer.state[p].get(key), Tensor)
    ]
    return path


def real_paths(seeds: list[int]) -> dict[tuple[str, int], Path]:
    return {(name, seed): real_path(name, seed) for name in REAL for seed in seeds}


@pytest.mark.parametrize("num_replicas", [2, slow(4)])
def test_real_replicas_lie_on_the_line_in_every_round(num_replicas: int) -> None:
    by_replica = launch(real_paths, num_replicas, [0, 1] if num_replicas == 2 else [2])
    for name, seed in by_replica[0]:
        paths: list[Path] = [result[name, seed] for result in by_replica]
        decays = name == "adamw"
        for step in range(1, INTERVAL + 1 if decays else TOTAL_STEPS + 1):
            round_index = (step - 1) // INTERVAL
            rho = fan_out(num_replicas, SPREAD, seed=seed, round_index=round_index, num_knobs=NUM_GROUPS)
            for group in range(NUM_GROUPS):
                sync = paths[0].centre[round_index * INTERVAL][group]
                centre = paths[0].centre[step][group]
                replicas = np.stack([path.replica[step][group] for path in paths])
                line = sync - rho[group][:, None] * (sync - centre)
                distance = np.linalg.norm(replicas - replicas.mean(axis=0))
                tolerance = (1e-2 if decays else 1e-9) * distance
                what = f"{name}, seed {seed}, step {step}, group {group}"
                assert np.linalg.norm(replicas - line) <= tolerance, what
                assert np.linalg.norm(replicas.mean(axis=0) - centre) <= tolerance, what
                if decays and step == INTERVAL:
                    assert np.linalg.norm(replicas - line) > 1e-6 * distance, what
        for path in paths[1:]:
            assert [m.tobytes() for m in path.moments] == [m.tobytes() for m in paths[0].moments]
        assert len(paths[0].moments) == {"sgd": 0, "momentum": 4, "adam": 8, "adamw": 8}[name]
