"""Trajectories of small runs, one for each way to use the library: a refactoring must leave them as they are.

``tests/golden/trajectories.json`` holds them. After a change of behaviour that is meant, write it anew and read the
diff:

    .venv/bin/python tests/support/golden.py --write

Models have two tensors of two and three float64 entries and losses made of sums and products, so that no result
depends on a BLAS or on the width of vector instructions. What is left are the last bits of exp, log and sums in numpy
and torch: a *fingerprint* of those is stored too, and where a machine has another one, learning rates are compared to
one part in 10^6 and weights not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

import hdet
from hdet import Adapt, AutoLR, Averaging, Ensemble, Explorer, Faults, OneCycleAutoLR, knobs
from hdet.controllers import EvidenceController
from hdet.ensemble.controllers import PaperController
from job import launch

PATH = Path(__file__).parent.parent / "golden" / "trajectories.json"
NUM_SAMPLED = 6
"""Learning rates of a run that are stored in full, at steps that divide it evenly; of the others there is a hash."""


class Model(nn.Module):
    """Two tensors, so that there can be two param groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64))
        self.second = nn.Parameter(torch.tensor([-0.6, 0.2], dtype=torch.float64))

    def loss(self, step: int, rank: int = 0) -> Tensor:
        """Batches are noisy, and the curvatures a factor of 30 apart."""
        x, y, z = (_noise(step, 3 * rank + k) for k in range(3))
        a, b, c = (self.first - torch.tensor([1.0 + x, -2.0 + y, 0.5 + z], dtype=torch.float64)).unbind()
        d, e = (self.second - torch.tensor([1.5 + y, 3.0 - x], dtype=torch.float64)).unbind()
        return 0.1 * a * a + 0.5 * b * b + c * c + 3.0 * d * d + 0.3 * e * e + 0.05 * a * d


def _noise(step: int, which: int) -> float:
    return ((step * 7919 + which * 104729 + step * step * 31) % 1009) / 1009 - 0.5


class Lion(Optimizer):
    """Updates of a fixed size."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(group["lr"] * (0.9 * mean + 0.1 * p.grad).sign())
                mean.mul_(0.99).add_(0.01 * p.grad)


Make = Callable[[Model], Any]
"""Makes the scheduler of a run, which has its optimizer."""


def run(
    make: Make,
    steps: int,
    *,
    local: bool = False,
    broken_at: int | None = None,
    resume_at: int | None = None,
    join_at: int | None = None,
    cooldown_at: int | None = None,
    losses: bool = True,
) -> dict[str, Any]:
    """Train, and return what the run looked like.

    ``local``: replicas do not share gradients. ``broken_at``: a gradient of this step is NaN. ``resume_at``: state is
    saved after this step, and loaded into new objects. ``join_at``: ``second`` joins the optimizer there.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = Model()
    scheduler = make(model)
    optimizer: Optimizer = scheduler.optimizer
    seen: list[list[float]] = []
    for step in range(1, steps + 1):
        if step == join_at:
            optimizer.add_param_group({"params": [model.second], "lr": 0.5 * float(optimizer.param_groups[0]["lr"])})
        loss = model.loss(step, rank)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for p in model.parameters():
            if p.grad is not None and size > 1 and not local:
                dist.all_reduce(p.grad)
                p.grad /= size
        if step == broken_at:
            model.first.grad[0] = math.nan  # type: ignore[index]
        optimizer.step()
        if step == cooldown_at:
            scheduler.cooldown(steps - step + 1)
        scheduler.step(loss) if losses else scheduler.step()
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        if step == resume_at:
            with scheduler.converged():
                saved = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
                saved = torch.load(_written(saved), weights_only=False)
            del scheduler
            model = Model()
            model.load_state_dict(saved[0])
            scheduler = make(model)
            optimizer = scheduler.optimizer
            optimizer.load_state_dict(saved[1])
            scheduler.load_state_dict(saved[2])
    if isinstance(scheduler, Explorer):
        scheduler.finish()
    history = [
        (r.index, r.step, *map(_hex, (*r.losses, *r.scales, *r.base_values, *r.probes)), r.num_rollbacks, r.averaged,
         r.phase, r.quarantined, [(name, _hex(k.base), *map(_hex, k.values)) for name, k in r.knobs.items()])
        for r in scheduler.history
    ]  # fmt: skip
    every = [round(i * (steps - 1) / (NUM_SAMPLED - 1)) for i in range(NUM_SAMPLED)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = scheduler.state_dict()
    return {
        "lrs": _hash([[_hex(lr) for lr in row] for row in seen]),
        "sampled": [[_hex(lr) for lr in seen[i]] for i in every],
        "weights": _hash([[_hex(v) for v in p.flatten().tolist()] for p in model.parameters()]),
        "records": _hash(history),
        "state_keys": _hash(sorted(_keys(state))),
    }


def _written(saved: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return file


def _keys(value: Any, name: str = "") -> list[str]:
    if isinstance(value, dict):
        return [key for k, v in value.items() for key in _keys(v, f"{name}/{k}")] or [name]
    return [name]


def _hex(value: float) -> str:
    return float(value).hex()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# -- settings -------------------------------------------------------------------------------------------------------


def _auto(
    net: Model, /, optimizer: Any = AdamW, *, lr: float = 1e-3, num_groups: int = 1, steps: Any = 120, **kw: Any
) -> Any:
    return AutoLR(_optimizer(net, optimizer, lr, num_groups), total_steps=steps, **kw)


def _optimizer(model: Model, kind: Any, lr: float, num_groups: int = 1, **settings: Any) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": [model.first, model.second]}]
    if num_groups == 2:
        groups = [{"params": [model.first]}, {"params": [model.second], "lr": lr / 4}]
    elif num_groups == 0:  # the other one joins later
        groups = [{"params": [model.first]}]
    found: Optimizer = kind(groups, lr=lr, **settings)
    return found


def _around(model: Model, schedule: Callable[[Optimizer], Any], *, lr: float = 0.05, **kw: Any) -> Any:
    return AutoLR(schedule(_optimizer(model, Adam, lr, 2)), **kw)


def _warm_cosine(optimizer: Optimizer) -> Any:
    return lrs.SequentialLR(
        optimizer,
        [lrs.LinearLR(optimizer, 0.1, total_iters=12), lrs.CosineAnnealingLR(optimizer, 108)],
        milestones=[12],
    )


def _probed(model: Model, **kw: Any) -> Any:
    calls = iter(range(5000, 10000))
    return _auto(model, partial(AdamW, weight_decay=0.02), model=model, probe=lambda: model.loss(next(calls)), **kw)


def _one_cycle(model: Model, /, **kw: Any) -> Any:
    settings: dict[str, Any] = {
        "max_lr": [0.08, 0.02],
        "total_steps": 90,
        "model_sync_interval": 7,
        "cycle_momentum": False,
    } | kw
    return OneCycleAutoLR(_optimizer(model, Adam, 0.05, 2), **settings)


APART = Ensemble(spread=0.1)
PAPER: dict[str, Any] = {
    "ensemble_lr_spread_ratio": 1 / 9,
    "enable_auto_lr": True,
    "auto_lr_warmup_steps": 20,
    "loss_scale": 0.1,
}


def _explorer(
    model: Model, explored: Callable[[], list[Any]], *, probe: bool = False, kind: Any = AdamW, **kw: Any
) -> Any:
    optimizer = _optimizer(model, kind, 0.02, 2)
    held_out = (lambda: sum(model.loss(9000 + i) for i in range(3)) / 3) if probe else None
    return Explorer(model, optimizer, knobs=explored(), interval=6, probe=held_out, **kw)


Settings = dict[str, Callable[[], dict[str, Any]]]

ALONE: Settings = {
    "AdamW": lambda: run(_auto, 120),
    "SGD": lambda: run(partial(_auto, optimizer=SGD), 120),
    "SGD with momentum": lambda: run(partial(_auto, optimizer=partial(SGD, momentum=0.9)), 120),
    "updates of a fixed size": lambda: run(partial(_auto, optimizer=Lion), 120),
    "without losses": lambda: run(_auto, 120, losses=False),
    "one scale for each group": lambda: run(partial(_auto, num_groups=2, adapt=Adapt(groups="each")), 120),
    "groups that part": lambda: run(partial(_auto, num_groups=2, adapt=Adapt(groups="auto")), 120),
    "a ceiling": lambda: run(partial(_auto, num_groups=2, max_lr=[0.03, 0.02]), 120),
    "a group joins": lambda: run(
        partial(_auto, num_groups=0, optimizer=SGD, adapt=Adapt(groups="each")), 120, join_at=55
    ),
    "around OneCycleLR": lambda: run(partial(_around, schedule=lambda o: lrs.OneCycleLR(o, [0.05, 0.01], 120)), 120),
    "a peak that is not followed": lambda: run(
        partial(_around, lr=50.0, schedule=lambda o: lrs.CosineAnnealingLR(o, 120)), 120
    ),
    "around SequentialLR": lambda: run(partial(_around, schedule=_warm_cosine, total_steps=120), 120),
    "the shape is kept": lambda: run(
        partial(_around, schedule=lambda o: lrs.StepLR(o, 40, 0.3), total_steps=120, interval=5), 120
    ),
    "learning rates as given": lambda: run(
        partial(_around, schedule=lambda o: lrs.CosineAnnealingLR(o, 120), interval=5,
                adapt=Adapt(level=False, controller=EvidenceController(), anchor=4)), 120,
    ),
    "held-out data": lambda: run(_probed, 120),
    "a learned weight decay": lambda: run(partial(_probed, weight_decay="learn"), 120),
    "unknown length": lambda: run(partial(_auto, steps=None, interval=6), 110, cooldown_at=80),
    "rollback": lambda: run(partial(_auto, optimizer=partial(SGD, momentum=0.9), interval=5), 120, broken_at=63),
    "resumed": lambda: run(partial(_auto, num_groups=2, interval=7), 120, resume_at=73),
    "resumed around SequentialLR": lambda: run(
        partial(_around, schedule=_warm_cosine, total_steps=120, interval=7), 120, resume_at=73
    ),
    "OneCycleAutoLR alone": lambda: run(_one_cycle, 90),
}  # fmt: skip
"""In this process."""

TOGETHER: Settings = {
    "two ranks": lambda: run(_auto, 120),
    "two ranks compare losses": lambda: run(partial(_auto, ensemble=APART, interval=6), 120),
    "two ranks compare losses, resumed": lambda: run(partial(_auto, ensemble=APART, interval=6), 120, resume_at=63),
    "two ranks, rollback": lambda: run(partial(_auto, ensemble=APART, interval=6), 120, broken_at=63),
    "two ranks, a knob beside": lambda: run(
        lambda model: _probed(
            model, ensemble=Ensemble(knobs=[knobs.WeightDecay()], gradients="local"), interval=6
        ), 120, local=True,
    ),
    "the paper's": lambda: run(partial(_one_cycle, **PAPER), 90),
    "the paper's, resumed": lambda: run(partial(_one_cycle, **PAPER, decay="floor"), 90, resume_at=47),
    "the paper's, by AutoLR": lambda: run(
        partial(_around, schedule=lambda o: lrs.OneCycleLR(o, [0.05, 0.01], 120), ensemble=APART, interval=6,
                adapt=Adapt(controller=PaperController(0.1), groups="each")), 120,
    ),
    "no spread": lambda: run(_one_cycle, 90),
    "Explorer": lambda: run(partial(_explorer, explored=lambda: [knobs.LearningRate(), knobs.Epsilon()]), 80),
    "DiLoCo": lambda: run(
        partial(_explorer, explored=list, gradients="local", averaging=Averaging(outer="nesterov")), 80, local=True
    ),
    "DiLoCo, resumed": lambda: run(
        partial(_explorer, explored=list, gradients="local",
                averaging=Averaging(outer="nesterov", optimizer_state="average")), 80, local=True, resume_at=45,
    ),
    "EASGD": lambda: run(
        partial(_explorer, explored=list, gradients="local", averaging=Averaging(outer="elastic")), 80, local=True
    ),
    "generations": lambda: run(
        partial(_explorer, explored=lambda: [knobs.WeightDecay()], gradients="local", probe=True, total_steps=80,
                horizon="long"), 80, local=True,
    ),
    "quarantine": lambda: run(
        partial(_explorer, explored=lambda: [knobs.LearningRate(spread=0.3)], gradients="local", kind=SGD,
                faults=Faults(quarantine=5)), 80, local=True,
    ),
}  # fmt: skip
"""On two processes."""


def fingerprint() -> str:
    """Differs where a machine rounds otherwise than the one that wrote the file."""
    x = np.linspace(-3.0, 3.0, 37)
    t = torch.from_numpy(x.copy())
    numbers = [*np.exp(x), *np.log(x + 4), *np.sqrt(x + 3), x.mean(), (x**2).sum(), x @ x, math.exp(0.7), math.log(0.3)]
    pieces = [t[:3], t[:5], t[5:8]]
    numbers += [float(torch.dot(p, p)) for p in pieces] + [float(n) for n in torch._foreach_norm(pieces)]
    numbers += [float(p.sum()) for p in pieces]
    return _hash([_hex(float(n)) for n in numbers])


def run_all(settings: Settings) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: each() for name, each in settings.items()}


def run_together() -> dict[str, Any]:
    return run_all(TOGETHER)


def trajectories() -> dict[str, Any]:
    """All of them, as they are now."""
    alone = run_all(ALONE)
    first, second = launch(run_together, 2, timeout_s=400)
    for name, found in first.items():
        found["second rank"] = {key: second[name][key] for key in ("lrs", "weights")}
    found = alone | first
    kept = {name: found[name].pop("state_keys") for name in found}
    state_keys = {name: kept[name] for name in ("AdamW", "held-out data", "the paper's", "Explorer", "DiLoCo")}
    return {"fingerprint": fingerprint(), "trajectories": found, "state_keys": state_keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="overwrite the file with what is found")
    options = parser.parse_args()
    found = trajectories()
    text = json.dumps(found, indent=1)
    if options.write:
        PATH.write_text(text + "\n")
    print(f"{len(found['trajectories'])} trajectories of hdet {hdet.__version__}")


if __name__ == "__main__":
    import golden

    golden.main()
