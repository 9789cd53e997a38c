"""Knobs that regularise, learned over generations of a run: do they end where the best fixed value does?

    python lab/benchmarks/generations.py pictures --json out.json  # 500 pictures of Fashion-MNIST, an MLP
    python lab/benchmarks/generations.py table  # the diabetes table
    python lab/benchmarks/generations.py text --device cuda  # a small GPT on a tenth of Shakespeare, which overfits
    python lab/benchmarks/generations.py text-short --device cuda  # the same for a third of the steps: it does not yet

Four replicas with gradients of their own; all runs of a task are stacked into one computation. For each knob and seed:
runs with fixed values, then the knob learned from two wrong starts, by six long rounds ("generations") and by rounds of
20 steps with the controller that Explorer has by default ("rounds"). AdamW written out, cosine, test loss of the mean.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hdet import __version__
from hdet.checks import FloatArray
from hdet.controllers.base import Evidence
from hdet.ensemble.controllers import JointController
from hdet.ensemble.controllers.valley import ValleyController
from hdet.ensemble.generations import PATIENCE
from hdet.ensemble.outer import Fittest
from hdet_lab.models.gpt import GPT
from hdet_lab.models.mlp import MLP
from hdet_lab.runs import provenance
from held_out_data import TASKS, Data

N, GENERATIONS, SHORT = 4, 6, 20
BOUNDS = {"dropout": (0.0, 0.9), "decay": (1e-4, 300.0), "temperature": (1e-3, 100.0)}
SPREADS = {"dropout": 0.5, "decay": 4.0, "temperature": 2.0}
"""Half a window, in widths of the range (dropout) or natural logarithms."""


@dataclass(frozen=True)
class Task:
    """What is trained on what, and the fixed values of each knob."""

    data: str
    size: int
    steps: int
    batch: int
    lr: float
    build: Callable[[], Any]
    grids: dict[str, tuple[float, ...]]


class Net(MLP):
    """With dropout, and with a cosine head where there is a temperature."""

    rate: Any = None
    temperature: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = dropped(F.relu(layer(x)), self.rate)
        out: Tensor = self.head(x)
        if self.temperature is not None:
            out = F.linear(F.normalize(x, dim=-1), F.normalize(self.head.weight, dim=-1)) / self.temperature
        return out


class Text(GPT):
    """With dropout after attention and MLP; where there is a temperature, queries and keys are normalised."""

    rate: Any = None
    temperature: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = dropped(self.tokens(tokens) + self.positions, self.rate)
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf, device=x.device).triu(1)
        block: Any
        for block in self.blocks:
            block.attention.normalise = self.temperature is not None
            block.attention.temperature = 1.0 if self.temperature is None else self.temperature
            x = x + dropped(block.attention(block.norm_attention(x), mask), self.rate)
            x = x + dropped(block.down(F.gelu(block.up(block.norm_mlp(x)))), self.rate)
        logits: Tensor = self.head(self.norm(x))
        return logits


def dropped(x: Tensor, rate: Any) -> Tensor:
    return x if rate is None else x * (torch.rand_like(x) >= rate) / (1 - rate)


DROPOUTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
DECAYS = (0.03, 0.1, 0.3, 0.6, 1.0, 1.7, 3.0, 10.0, 30.0)
TEMPERATURES = (0.02, 0.06, 0.1, 0.13, 0.18, 0.3, 0.5, 1.5)
ATTENTION = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.5, 4.0)
TEXT_GRIDS = {"dropout": DROPOUTS, "decay": DECAYS, "temperature": ATTENTION}


def small_gpt() -> Text:
    return Text(65, context=48, num_layers=3, width=128)


CHOSEN: dict[str, Task] = {
    "pictures": Task(
        "images", 500, 600, 16, 3e-3, lambda: Net(196, 10, widths=(64, 64)),
        {"dropout": DROPOUTS, "decay": DECAYS, "temperature": TEMPERATURES},
    ),
    "pictures-2000": Task(
        "images", 2000, 1200, 16, 3e-3, lambda: Net(196, 10, widths=(128, 128)),
        {"dropout": DROPOUTS, "decay": DECAYS, "temperature": TEMPERATURES},
    ),
    "table": Task(
        "table", 0, 600, 8, 3e-3, lambda: Net(10, 1, widths=(64, 64)), {"dropout": DROPOUTS, "decay": DECAYS}
    ),
    "text": Task("text", 0, 2700, 16, 2e-3, small_gpt, TEXT_GRIDS),
    "text-short": Task("text", 0, 900, 16, 2e-3, small_gpt, TEXT_GRIDS),
}  # fmt: skip


class Knob:
    """Positions are natural logarithms, or shares of the range."""

    def __init__(self, name: str) -> None:
        self.low, self.high = BOUNDS[name]
        self.linear = name == "dropout"
        self.ends = (0.0, 1.0) if self.linear else (math.log(self.low), math.log(self.high))

    def position(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.linear else math.log(value)

    def values(self, positions: FloatArray) -> FloatArray:
        inside = np.clip(positions, *self.ends)
        found: FloatArray = self.low + inside * (self.high - self.low) if self.linear else np.exp(inside)
        return found


class Learner:
    """One run's knob: where each replica stands, and where the base goes."""

    def __init__(self, run: dict[str, Any], steps: int) -> None:
        self.run, self.steps, self.knob = run, steps, Knob(run["knob"])
        self.base = self.knob.position(run["value"])
        self.random = np.random.default_rng(run["seed"])
        self.long = run["kind"] == "generations"
        self.interval = {"generations": steps // GENERATIONS, "rounds": SHORT}.get(run["kind"], SHORT)
        patience = 0.0 if run["knob"] == "temperature" else PATIENCE
        spread = {"dropout": 0.1, "decay": 0.3, "temperature": 0.1}[run["knob"]]
        self.controller: Any = ValleyController(patience=patience) if self.long else JointController()
        self.state: Any = self.controller.init(1)
        self.spread = SPREADS[run["knob"]] if self.long else spread
        self.trace: list[float] = []
        self.spread_out()

    def spread_out(self) -> None:
        low, high = self.knob.ends
        if self.run["kind"] == "fixed":
            self.places = np.full(N, self.base)
        elif self.long:
            half = min(self.spread * float(self.state.width[0]), (high - low) / 2)
            middle = min(max(self.base, low + half), high - half) if half else self.base
            self.places = middle + half * self.random.permutation(np.linspace(-1, 1, N))
        else:
            self.places = np.clip(self.base + self.spread * self.random.permutation([1, -1, 1, -1]), low, high)

    def learn(self, losses: FloatArray, trained: FloatArray, step: int) -> None:
        progress = step / (self.steps - self.interval)
        evidence = Evidence(losses, 1 + (self.places - self.base)[None], progress=progress, trained=trained)
        self.state, decision = self.controller.update(self.state, evidence)
        self.base = float(np.clip(self.base + math.log(decision.factors[0]), *self.knob.ends))
        self.trace.append(float(f"{self.knob.values(np.array(self.base)):.3g}"))
        self.spread_out()


def train(task: Task, data: Data, runs: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """All runs side by side; they explore one knob."""
    knob, seeds = runs[0]["knob"], sorted({run["seed"] for run in runs})
    first: dict[int, dict[str, Tensor]] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        model: Any = task.build().to(device)
        first[seed] = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: torch.stack([first[r["seed"]][name] for r in runs for _ in range(N)]) for name in first[seeds[0]]}
    moments = [{name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(2)]
    tails: dict[int, list[Any]] = {}
    rows = {name: (x.to(device), y.to(device)) for name, (x, y) in data.rows.items()}
    (x, y), held_out = rows["train"], tuple(each[:4000] for each in rows["held_out"])
    draws = {seed: torch.Generator().manual_seed(1000 + seed) for seed in seeds}
    learners = [Learner(run, task.steps) for run in runs]
    torch.manual_seed(0)

    def loss_of(own: dict[str, Tensor], value: Tensor, x: Tensor, y: Tensor, training: bool) -> Tensor:
        model.rate = value if knob == "dropout" and training else None
        model.temperature = value if knob == "temperature" else None
        return data.loss(torch.func.functional_call(model, own, (x,)), y)

    gradient = torch.vmap(torch.func.grad_and_value(loss_of), in_dims=(0, 0, 0, 0, None), randomness="different")
    looked: Any = torch.vmap(loss_of, in_dims=(0, 0, None, None, None))

    @torch.no_grad()
    def evaluate(own: dict[str, Tensor], values: Tensor, rows: tuple[Tensor, ...]) -> FloatArray:
        parts = list(zip(*(torch.split(tensor, 500) for tensor in rows), strict=True))
        losses = torch.stack([looked(own, values, *part, False) * len(part[0]) for part in parts]).sum(0)
        found: FloatArray = (losses / len(rows[0])).double().cpu().numpy()
        return found

    def values_now() -> Tensor:
        own = np.concatenate([each.knob.values(each.places) for each in learners])
        return torch.tensor(own, dtype=torch.float32, device=device)

    values = values_now()
    seen = torch.zeros(task.steps, len(values), device=device)
    for step in range(1, task.steps + 1):
        drawn = {seed: torch.randint(len(x), (N, task.batch), generator=draws[seed]) for seed in seeds}
        chosen = torch.cat([drawn[run["seed"]] for run in runs]).to(device)
        lr = task.lr * min(1.0, step / (0.05 * task.steps)) * (0.5 + 0.5 * math.cos(math.pi * (step - 1) / task.steps))
        gradients, seen[step - 1] = gradient(weights, values, x[chosen], y[chosen], True)
        for name, g in gradients.items():
            p, speed, square = weights[name], moments[0][name], moments[1][name]
            speed.lerp_(g, 0.1)
            square.mul_(0.999).addcmul_(g, g, value=0.001)
            if knob == "decay":
                p.mul_((1 - lr * values).view(-1, *[1] * (p.dim() - 1)))
            p.addcdiv_(speed, (square / (1 - 0.999**step)).sqrt_().add_(1e-8), value=-lr / (1 - 0.9**step))
        for i, learner in enumerate(learners):
            mine, at = slice(N * i, N * i + N), step % learner.interval
            is_last = step == task.steps
            # The mean of the second half of a generation is what is probed: noise that annealing will remove is out.
            if learner.long and step % 5 == 0 and (at == 0 or 2 * at > learner.interval):
                count, sums = tails.get(i, [0, {name: torch.zeros_like(p[mine]) for name, p in weights.items()}])
                tails[i] = [count + 1, {name: sums[name] + p[mine] for name, p in weights.items()}]
            if at and not is_last:
                continue
            losses, shares = np.full(N, np.nan), None
            if learner.run["kind"] != "fixed" and not is_last:
                count, sums = tails.pop(i, (1, {name: p[mine] for name, p in weights.items()}))
                losses = evaluate({name: each / count for name, each in sums.items()}, values[mine], held_out)
                if learner.long:
                    shares = Fittest().shares(losses, np.ones(N, dtype=bool))
            if is_last or learner.run["kind"] != "fixed" or at == 0:
                average(weights, moments if learner.long else [], mine, shares)
            if learner.run["kind"] != "fixed" and not is_last:
                late = seen[step - learner.interval // 2 : step, mine].double().mean(0).cpu().numpy()
                learner.learn(losses, late, step)
                values = values_now()
    for learner in learners:
        learner.places = np.full(N, learner.base)
    ends, mean = values_now()[::N], {name: p[::N] for name, p in weights.items()}
    found = {name: evaluate(mean, ends, tuple(each[:10000] for each in rows[name])) for name in ("held_out", "test")}
    return [
        {**run, "end": float(f"{ends[i]:.4g}"), **{k: round(float(v[i]), 5) for k, v in found.items()},
         "trace": learners[i].trace[:: max(1, len(learners[i].trace) // 6)]}
        for i, run in enumerate(runs)
    ]  # fmt: skip


@torch.no_grad()
def average(
    weights: dict[str, Tensor], moments: list[dict[str, Tensor]], mine: slice, shares: FloatArray | None
) -> None:
    """All replicas go to their mean; with shares, the optimizer's state does, too."""
    row = torch.ones(N) if shares is None else torch.tensor(shares, dtype=torch.float32)
    for tree in [weights, *moments]:
        for p in tree.values():
            own = p[mine]
            own.copy_((own * row.to(p.device).view(-1, *[1] * (p.dim() - 1))).mean(0, keepdim=True).expand_as(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(CHOSEN))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--knobs", nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = CHOSEN[options.task]
    if options.steps:
        task = Task(**{**vars(task), "steps": options.steps})
    data = TASKS[task.data](options.data, task.size)
    results: list[dict[str, Any]] = []
    for knob in options.knobs or task.grids:
        started = time.perf_counter()
        plan = [("fixed", value, seed) for seed in options.seeds for value in task.grids[knob]]
        results += train(task, data, [run_of(knob, *each) for each in plan], options.device)
        fixed = {value: [r for r in results if r["knob"] == knob and r["value"] == value] for value in task.grids[knob]}
        best = min(fixed, key=lambda value: float(np.mean([r["test"] for r in fixed[value]])))
        starts = {"dropout": (0.0, 0.8), "decay": (best / 30, best * 30), "temperature": (best / 3, best * 3)}[knob]
        plan = [(kind, v, seed) for kind in ("generations", "rounds") for v in starts for seed in options.seeds]
        results += train(task, data, [run_of(knob, *each) for each in plan], options.device)
        show([r for r in results if r["knob"] == knob], best)
        print(f"{knob}: {time.perf_counter() - started:.0f} s", flush=True)
        if options.json:
            settings = {**{k: v for k, v in vars(task).items() if k != "build"}, "replicas": N, "patience": PATIENCE}
            settings |= {"generations": GENERATIONS, "spreads": SPREADS, "seeds": options.seeds}
            versions: dict[str, Any] = {
                "hdet": __version__,
                "torch": torch.__version__,
                "git_commit": provenance.git_commit(),
            }
            versions |= {"hardware": provenance.hardware(), "data_sha256": data.sha256()}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            record = {"task": options.task, "settings": settings, "provenance": versions}
            lines = ",\n".join(json.dumps(each) for each in results)
            options.json.write_text(f'{json.dumps(record)[:-1]}, "runs": [\n{lines}\n]}}\n')


def run_of(knob: str, kind: str, value: float, seed: int) -> dict[str, Any]:
    return {"knob": knob, "kind": kind, "value": value, "seed": seed}


def show(results: list[dict[str, Any]], best: float) -> None:
    """Test losses in percent above the best fixed value of the seed, and above the value that is best for all."""
    fixed = [r for r in results if r["kind"] == "fixed"]
    least = {s: min(r["test"] for r in fixed if r["seed"] == s) for s in {r["seed"] for r in fixed}}
    common = {r["seed"]: r["test"] for r in fixed if r["value"] == best}
    print(f"best fixed {best:g}: " + " ".join(f"{common[s]:.4f}" for s in sorted(common)))
    for key in dict.fromkeys((r["kind"], r["value"]) for r in results):
        mine = [r for r in results if (r["kind"], r["value"]) == key]
        above = [" ".join(f"{100 * (r['test'] / to[r['seed']] - 1):+.1f}" for r in mine) for to in (least, common)]
        print(f"  {key[0]} from {key[1]:.3g}: {above[0]} | {above[1]} ended at {[r['end'] for r in mine]}")


if __name__ == "__main__":
    main()
