"""Small runs of each scheduler that tests look at: what they plot, and what a report says of them."""

from __future__ import annotations

from typing import Any

import torch

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs

STEPS = 40


def make(kind: str, *, name: str = "all") -> Any:
    """A scheduler that has not taken a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "name": name}], lr=0.01, momentum=0.5)
    if kind in ("AutoLR", "AutoLR, level"):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return AutoLR(cosine, model=model, interval=4, adapt=Adapt(level=kind != "AutoLR"))
    if kind == "AutoLR alone":
        return AutoLR(optimizer, model=model, interval=4, total_steps=STEPS)
    if kind == "OneCycleAutoLR":
        return OneCycleAutoLR(
            optimizer, max_lr=0.01, total_steps=STEPS, ensemble_lr_spread_ratio=0.1, model_sync_interval=4,
            enable_auto_lr=True, auto_lr_warmup_steps=0, model=model,
        )  # fmt: skip
    return Explorer(model, optimizer, knobs=[knobs.Momentum()], interval=4, gradients="local", total_steps=STEPS)


def train(scheduler: Any, num_steps: int = STEPS) -> Any:
    optimizer, generator = scheduler.optimizer, torch.Generator().manual_seed(0)
    weight, bias = optimizer.param_groups[0]["params"]
    for _ in range(num_steps):
        x = torch.randn(8, 3, generator=generator)
        loss = (x @ weight.T + bias - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return scheduler
