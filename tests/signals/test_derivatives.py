"""Derivatives over a whole run, to first order, against finite differences of runs in float64.

What is left out is curvature: how an earlier step changes the gradients of later ones. Along a direction of curvature h
whose minimum is at 0, after steps with tau = h * sum(lr), both derivatives come out (e^tau - 1) / tau times too large:
5% at tau = 0.1, 72% at 1, 6 times at 3. There the sign stays right; with several directions it may be wrong where the
derivative is almost 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hdet.signals.decay import DecayPath
from hdet.weights.anchor import Anchor

Model = tuple[list[Tensor], Callable[[], Tensor]]


def quadratic(curvature: float = 1.0) -> Model:
    """One direction, minimum at 0, start at 2."""
    weight = torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True)
    return [weight], lambda: 0.5 * curvature * (weight**2).sum()


def network() -> Model:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return list(model.parameters()), lambda: nn.functional.mse_loss(model(x), torch.sin(x.sum(1, keepdim=True)))


def train(
    make: Callable[[], Model], kind: Callable[..., Optimizer], settings: dict[str, Any], num_steps: int
) -> tuple[float, float, float]:
    """The last loss, and its first-order derivatives over log(learning rate) and log(weight decay)."""
    parameters, loss = make()
    optimizer = kind(parameters, **settings)
    anchor, path = Anchor(), DecayPath()
    anchor.renew(parameters)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        path.add_step(optimizer)
        optimizer.step()
    last = loss()
    gradients = torch.autograd.grad(last, parameters)
    by_rate = sum(float((gradients[i] * d).sum()) for i, d in anchor.displacements(parameters))
    by_decay = sum(float((gradients[i] * d).sum()) for i, d in path.displacements(parameters))
    return float(last.detach()), by_rate, by_decay


def difference(
    make: Callable[[], Model], kind: Callable[..., Optimizer], settings: dict[str, Any], num_steps: int, name: str
) -> float:
    """By how much the last loss changes per logarithm of a setting, over whole runs."""
    width = 1e-4
    ends = [
        train(make, kind, settings | {name: settings[name] * math.exp(sign * width)}, num_steps)[0] for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * width)


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 1e-4, "weight_decay": 0.5}),
    "momentum": (SGD, {"lr": 1e-5, "weight_decay": 0.5, "momentum": 0.9}),
    "dampened": (SGD, {"lr": 1e-4, "weight_decay": 0.5, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (SGD, {"lr": 1e-5, "weight_decay": 0.5, "momentum": 0.9, "nesterov": True}),
    "adamw": (AdamW, {"lr": 1e-5, "weight_decay": 0.5}),
}


@pytest.mark.parametrize("make", [quadratic, network])
@pytest.mark.parametrize("which", list(OPTIMIZERS))
def test_short_runs(which: str, make: Callable[[], Model]) -> None:
    kind, settings = OPTIMIZERS[which]
    _, by_rate, by_decay = train(make, kind, settings, 50)
    assert_allclose(by_rate, difference(make, kind, settings, 50, "lr"), rtol=0.03)
    assert_allclose(by_decay, difference(make, kind, settings, 50, "weight_decay"), rtol=0.03)


@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_curvature_makes_both_too_large_by_the_same_factor(name: str, tau: float) -> None:
    settings = {"lr": 2e-2, "weight_decay": 1e-6}
    num_steps = round(tau / settings["lr"])
    _, by_rate, by_decay = train(quadratic, SGD, settings, num_steps)
    exact = difference(quadratic, SGD, settings, num_steps, name)
    assert_allclose((by_rate if name == "lr" else by_decay) / exact, math.expm1(tau) / tau, rtol=0.05)


def overfitting(seed: int) -> tuple[Model, Callable[[], Tensor]]:
    """24 noisy points for 193 weights, and the loss on 200 others."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(224, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :2].sum(1, keepdim=True)) + 0.5 * torch.randn(224, 1, generator=generator, dtype=torch.float64)

    def loss(rows: slice) -> Tensor:
        return nn.functional.mse_loss(model(x[rows]), y[rows])

    return (list(model.parameters()), lambda: loss(slice(24))), lambda: loss(slice(24, None))


def held_out_slopes(seed: int, weight_decay: float) -> tuple[float, float, float]:
    """The held-out loss of a run that has fitted its noise, its first-order slope over log(wd), and the training's."""
    (parameters, loss), held_out = overfitting(seed)
    optimizer, path = AdamW(parameters, lr=0.01, weight_decay=weight_decay), DecayPath()
    for _ in range(100):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        path.add_step(optimizer)
        optimizer.step()
    slopes = []
    for value in (held_out(), loss()):
        gradients = torch.autograd.grad(value, parameters)
        slopes.append(sum(float((gradients[i] * d).sum()) for i, d in path.displacements(parameters)))
    return float(held_out().detach()), slopes[0], slopes[1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_data_ask_for_more_decay_where_training_asks_for_less(seed: int) -> None:
    _, held_out, training = held_out_slopes(seed, 0.1)
    exact = held_out_slopes(seed, 0.1 * math.exp(0.02))[0] - held_out_slopes(seed, 0.1 * math.exp(-0.02))[0]
    assert exact < 0
    assert held_out < 0 < training


def test_a_path_of_several_steps_at_once_is_close() -> None:
    paths = []
    for every in (1, 8):
        parameters, loss = network()
        optimizer, path = AdamW(parameters, lr=1e-3, weight_decay=0.5), DecayPath(every=every)
        for _ in range(64):
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            path.add_step(optimizer)
            optimizer.step()
        paths.append(torch.cat([d.flatten() for _, d in path.displacements(parameters)]))
    assert float((paths[0] - paths[1]).norm() / paths[0].norm()) < 0.01


def test_a_decay_inside_adams_gradient_is_another_matter() -> None:
    # It is divided by the gradient's own size: far less, or far more, than lr * wd * theta.
    settings = {"lr": 1e-4, "weight_decay": 0.05}
    _, _, by_decay = train(network, Adam, settings, 50)
    exact = difference(network, Adam, settings, 50, "weight_decay")
    assert not 0.8 < by_decay / exact < 1.25


# Momentum: right to first order over short runs, and of no use as a knob of its own.


def recorded(
    kind: Callable[..., Optimizer], settings: dict[str, Any], num_steps: int
) -> tuple[float, Tensor, list[list[Tensor]]]:
    """The last loss of a run, its way, and the gradients on it."""
    parameters, loss = network()
    begun, optimizer = _flat(parameters), kind(parameters, **settings)
    gradients = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        optimizer.step()
    return float(loss().detach()), _flat(parameters) - begun, gradients


def replayed(kind: Callable[..., Optimizer], settings: dict[str, Any], gradients: list[list[Tensor]]) -> Tensor:
    """Where the same gradients lead with other settings."""
    parameters, _ = network()
    optimizer = kind(parameters, **settings)
    for row in gradients:
        for p, gradient in zip(parameters, row, strict=True):
            p.grad = gradient
        optimizer.step()
    return _flat(parameters)


def _flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters]).clone()


def _set(name: str, value: float) -> dict[str, Any]:
    return {"betas": (value, 0.999)} if name == "beta1" else {name: value}


# SGD's is the learning rate's own, along the same way: 1 / (1 - momentum) is a factor of it. Adam's beta1 does next to
# nothing to first order, a lag: what it is chosen for, the noise and the curvature of later steps, is left out.
@pytest.mark.parametrize(
    ("kind", "name", "lr", "cosine"), [(SGD, "momentum", 1e-5, (0.999, 1.0)), (Adam, "beta1", 1e-5, (-0.5, 0.5))]
)
def test_momentum(kind: Callable[..., Optimizer], name: str, lr: float, cosine: tuple[float, float]) -> None:
    value, width, num_steps = 0.9, 1e-4, 60
    settings: dict[str, Any] = {"lr": lr}
    _, way, gradients = recorded(kind, settings | _set(name, value), num_steps)
    places = [replayed(kind, settings | _set(name, value + sign * width), gradients) for sign in (1, -1)]
    derivative = (places[0] - places[1]) / (2 * width)
    parameters, loss = network()
    with torch.no_grad():
        place = replayed(kind, settings | _set(name, value), gradients)
        torch.nn.utils.vector_to_parameters(place, parameters)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters)])
    ends = [recorded(kind, settings | _set(name, value + sign * width), num_steps)[0] for sign in (1, -1)]
    exact = (ends[0] - ends[1]) / (2 * width)
    found = float(derivative @ gradient)
    assert_allclose(found, exact, rtol=0.05)
    assert cosine[0] <= float(derivative @ way / derivative.norm() / way.norm()) <= cosine[1]
