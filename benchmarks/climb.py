"""A prototype of the climb: no learning rate, no schedule to choose. Not in AutoLR yet; figures in docs/research.md.

    python benchmarks/climb.py shakespeare-gpt --device cuda --steps 1000
    python benchmarks/climb.py fashion --device cuda --steps 1000 --seeds 0 1 --json out.json
    python benchmarks/climb.py quadratic --steps 300 --starts 1e-8 1e-2 1                  # a minute on two cores

An embedded range test raises the rate from a hundredth of the start while the evidence of a few steps supports it, and
puts back the first weights. Then the scale follows the evidence of whole rounds (Eq. 12), held back where the slope is
large against what the loss gains with time, and stands still through the final decay. Every run is listed, against the
best of one-cycle, cosine and WSD by eight learning rates of the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from hdet import __version__
from hdet.checks import FloatArray
from hdet.lab.recipes import make_optimizer
from hdet.lab.stacked.engine import StackedModels
from hdet.lab.stacked.inputs import row_table
from hdet.lab.stacked.sweep import Result, Run, sweep
from hdet.lab.tasks import TASKS, load_task
from hdet.lab.tasks.base import Task
from hdet.policy.guard import Guard, GuardState

Ending = Literal["turned", "broken", "cap"]

GRID = {
    "adam": (1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 1e-1),
    "sgd": (1e-3, 1e-2, 3e-2, 0.1, 0.3, 0.6, 1.0, 3.0),
}
STARTS = {"adam": (1e-8, 1e-4, 1e-2, 1.0), "sgd": (1e-4, 1e-2, 1.0, 100.0)}

FIRST_SCALE = 0.01
RISE, FAST_RISE = 0.7, 1.4
MIN_SAMPLES, MAX_SAMPLES = 4, 16
BACK: dict[Ending, float] = {"turned": 1.5, "broken": 4.0, "cap": 1.0}
"""What the last supported rate is divided by, by how the climb ended."""
MAX_STARTS = 6
DECAY_SHARE, WARM_SHARE = 0.3, 0.03
OPTIMISM = (2.5, 1.0)
"""z0 at the start of a run, and where the scale begins to hold still."""
FALL = 4.0
"""A scale falls above this z; between z0 and it, it holds."""
GAIN, SMOOTHING, UP, SPRINT, DOWN = 0.1, 0.5, 0.2, 0.5, 0.2
BRAKE = (0.3, 0.6)
"""Rises fade out as b / R goes from the first to the second; above, the scale falls."""


@dataclass
class Climb:
    """The range test: ``update`` takes one step's loss and slope, and says whether to put back the first weights.

    Attributes:
        scale: what the start is multiplied by.
        cap: steps after which it is over.
        path: sum of learning rates since the weights were put back; slopes are divided by it.
        supported: the last scale that the evidence has raised.
    """

    cap: float
    scale: float = FIRST_SCALE
    path: float = 0.0
    supported: float = FIRST_SCALE
    ending: Ending | None = None
    is_far: bool = True
    num_raised: int = 0
    num_starts: int = 0
    steepest: float = 0.0
    lowest: float = math.inf
    still: list[float] = field(default_factory=list)
    slopes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def update(self, step: int, loss: float, slope: float, lr: float) -> bool:
        """Whether the first weights have to come back: the climb begins again, or is over (:attr:`ending`)."""
        why = self._judge(step, loss, slope)
        if why is None:
            self.path += lr
            return False
        self.path = 0.0
        if self.num_raised <= 1 and why != "cap" and self.num_starts < MAX_STARTS:
            # It broke or turned at once: begin far below.
            self.scale /= 100.0 * math.exp(RISE * self.num_raised)
            self.num_starts += 1
            self.num_raised, self.is_far, self.steepest, self.lowest = 0, True, 0.0, math.inf
            self.still, self.slopes, self.losses, self.supported = self.still[:1], [], [], self.scale
        else:
            self.ending = why
            self.scale = self.supported / BACK[why]
        return True

    def _judge(self, step: int, loss: float, slope: float) -> Ending | None:
        if not (math.isfinite(loss) and math.isfinite(slope)):
            return "broken"
        if self.is_far or len(self.still) < 2:
            self.still.append(loss)  # nothing has moved yet: what the loss is, and how far apart batches are
        self.losses.append(loss)
        if self.path > 0:
            self.slopes.append(slope / self.path)
            broken = self._decide(slope)
            if broken is not None:
                return broken
        return "cap" if step + 1 >= self.cap else None

    def _decide(self, slope: float) -> Ending | None:
        start, noise = self._start_and_noise()
        if self.is_far and len(self.still) >= 3 and abs(slope) < 0.1 * noise:
            self._raise(FAST_RISE)
            return None
        if len(self.still) >= 3:
            self.is_far = False
        found = np.array(self.slopes)
        down = -float(found.mean())
        if len(found) == 2 and self.steepest > 0 and found.max() < -0.5 * self.steepest:
            self._supported(down)
        elif len(found) >= MIN_SAMPLES:
            recent = statistics.fmean(self.losses[-MIN_SAMPLES:])
            progress = max(start - self.lowest, 0.0)
            if recent > min(self.lowest, start) + max(0.35 * progress, 5 * noise / math.sqrt(MIN_SAMPLES)):
                return "broken"
            # Successive differences: a trend is no noise.
            error = math.sqrt(float((np.diff(found) ** 2).sum()) / (2 * (len(found) - 1) * len(found)))
            z = -down / (error + 1e-300)
            if z < -2:
                self._supported(down)
            elif z > 2 or len(found) >= MAX_SAMPLES:
                return "turned"
        return None

    def _start_and_noise(self) -> tuple[float, float]:
        start = statistics.fmean(self.still)
        deviation = statistics.stdev(self.still) if len(self.still) > 1 else 0.0
        return start, max(deviation, 1e-3 * abs(start), 1e-30)

    def _supported(self, down: float) -> None:
        self.lowest = min(self.lowest, statistics.fmean(self.losses))
        is_linear = self.steepest > 0 and down > 0.8 * self.steepest
        self.steepest = max(self.steepest, down)
        self._raise(FAST_RISE if is_linear else RISE)

    def _raise(self, rise: float) -> None:
        self.supported = self.scale
        self.scale *= math.exp(rise)
        self.num_raised += 1
        self.slopes, self.losses = [], []


@dataclass
class Level:
    """The scale after the climb: ``move`` takes one round's mean slope, its variance and the mean loss."""

    slope: float = 0.0
    variance: float = 0.0
    weight: float = 0.0
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    def move(self, elapsed: int, slopes: FloatArray, loss: float, optimism: float) -> float:
        """By how much the logarithm of the scale should change, ``elapsed`` steps after the climb."""
        keep = SMOOTHING
        self.slope = keep * self.slope + (1 - keep) * float(slopes.mean())
        self.variance = keep * self.variance + (1 - keep) * float(slopes.var(ddof=1)) / len(slopes)
        self.weight = keep * self.weight + (1 - keep)
        self.rounds.append((elapsed, float(slopes.mean()), loss))
        error = math.sqrt(self.variance / self.weight * (1 - keep) / (1 + keep)) + 1e-300
        z = self.slope / self.weight / error
        limit = UP + (SPRINT - UP) * min(max((-z - 10) / 50, 0.0), 1.0)
        fall = min(GAIN * max(z - FALL, 0.0) / 2, DOWN)
        rise = min(GAIN * (optimism - z) / 2, limit) if z < optimism else -fall
        low, high = BRAKE
        cost = self.cost_over_gain()
        if rise > 0:
            rise *= 1 - min(max((cost - low) / (high - low), 0.0), 1.0)
        return min(rise, -DOWN * min(cost - high, 1.0)) if cost > high else rise

    def cost_over_gain(self) -> float:
        """B / R: the slope against how far the loss falls while the time since the climb grows e-fold."""
        if len(self.rounds) < 8:
            return 0.0
        found = np.array(self.rounds)
        now = found[-1, 0]
        late = found[found[:, 0] > 0.75 * now]
        half = found[(found[:, 0] > 0.375 * now) & (found[:, 0] <= 0.5 * now)]
        if len(late) < 2 or not len(half):
            return 0.0
        drop = half[:, 2].mean() - late[:, 2].mean()
        noise = math.sqrt(float((np.diff(late[:, 2]) ** 2).mean()) / 2 * (1 / len(late) + 1 / len(half)))
        gain = max(float(drop), noise, 1e-300) / math.log(2)
        return float(late[:, 1].mean()) / gain

    def forget(self) -> None:
        self.slope = self.variance = self.weight = 0.0


class Steered:
    """One run's numbers: climb, level, guard and record. What to do to its weights is in ``wants`` after a step."""

    def __init__(self, lr: float, seed: int, num_steps: int) -> None:
        self.lr, self.seed, self.num_steps = lr, seed, num_steps
        self.interval = min(max(num_steps // 100, 4), 50)
        self.hold = int((1 - DECAY_SHARE) * num_steps)
        self.climb = Climb(cap=min(max(num_steps / 10, 24), num_steps / 4, 200))
        self.level = Level()
        self.scale = self.climb.scale
        self.guard, self.guard_state = Guard(), GuardState()
        self.begun = 0
        self.wants: Literal["start", "back", "keep"] | None = None
        self.num_rollbacks = 0
        self.rates: list[float] = []
        self._slopes: list[float] = []
        self._losses: list[float] = []

    def shape(self, step: int) -> float:
        """Constant, with a short warm-up after the climb, and a linear decay over the last share of the run."""
        warm = (step - self.begun + 1) / (WARM_SHARE * self.num_steps)
        return min(1.0, warm, (self.num_steps - step) / (DECAY_SHARE * self.num_steps))

    def rate(self, step: int) -> float:
        found = self.lr * self.scale * (1.0 if self.climb.ending is None else self.shape(step))
        self.rates.append(found)
        return found

    def end_step(self, step: int, loss: float, slope: float) -> None:
        self.wants = None
        if self.climb.ending is None:
            if self.climb.update(step, loss, slope, self.rates[-1]):
                self.wants, self.begun = "start", step + 1
            self.scale = self.climb.scale
            return
        self._slopes.append(slope)
        self._losses.append(loss)
        if (step + 1) % self.interval == 0 and len(self._slopes) >= 4:
            self._end_round(step)
            self._slopes, self._losses = [], []

    def _end_round(self, step: int) -> None:
        loss, slopes = statistics.fmean(self._losses), np.array(self._slopes)
        self.guard_state, healthy = self.guard.update(self.guard_state, loss)
        if not healthy:
            self.wants, self.scale = "back", self.scale / 2
            self.num_rollbacks += 1
            self.level.forget()
            return
        self.wants = "keep"
        if step + 1 < self.hold and np.isfinite(slopes).all():
            before = max(step - self.interval, self.begun)
            risen = max(math.log(self.shape(step) / self.shape(before)), 0.0)
            first, last = OPTIMISM
            move = self.level.move(step + 1 - self.begun, slopes, loss, first + (last - first) * step / self.hold)
            self.scale *= math.exp(max(move - risen, 0.0) if move > 0 else move)


def climb_runs(task: Task, runs: list[Steered], optimizer: str, device: str) -> list[float]:
    """Train all runs side by side; the validation loss of each."""
    num_steps = runs[0].num_steps
    task.to(device)
    models = [task.build(run.seed) for run in runs]
    groups = task.groups(models[0])
    engine = StackedModels(
        models, task.loss, groups, num_replicas=1, optimizer=make_optimizer(optimizer), device=device,
        graph=device.startswith("cuda"),
    )  # fmt: skip
    rows = row_table(task, [run.seed for run in runs], num_steps, 1).to(device)
    for step in range(num_steps):
        rates = torch.tensor([run.rate(step) for run in runs], dtype=torch.float32).to(device)
        found = engine.step(task.gather(rows[step]), rates.view(-1, 1, 1).expand(-1, 1, len(groups)))
        seen = torch.cat([found.losses.double(), found.slopes.sum(-1, keepdim=True).double()], 1).tolist()
        for run, (loss, slope) in zip(runs, seen, strict=True):
            run.end_step(step, loss, slope)

        def asked(what: str) -> torch.Tensor:
            return torch.tensor([run.wants == what for run in runs])

        # Nothing is kept during a climb, so the copy to go back to is that of the first step.
        undone = asked("start") | asked("back")
        if undone.any():
            engine.restore(undone)
        if asked("keep").any():
            engine.snapshot(asked("keep"))
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} of {num_steps}", file=sys.stderr, flush=True)
    return [float(task.evaluate(engine.mean_model(index))["loss"]) for index in range(len(runs))]


def grid_runs(task: Task, seeds: list[int], optimizer: str, num_steps: int, device: str) -> dict[str, list[Result]]:
    """Fixed schedules by fixed learning rates."""
    runs = [Run(lr=lr, seed=seed) for seed in seeds for lr in GRID[optimizer]]
    shapes = ("one-cycle", "cosine", "wsd")
    return {
        shape: sweep(task, runs, optimizer=optimizer, schedule=shape, num_steps=num_steps, device=device)
        for shape in shapes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--optimizer", choices=sorted(GRID), default="adam")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--starts", type=float, nargs="+")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args()
    task = load_task(args.task, args.data)
    num_steps = args.steps or task.total_steps
    starts = args.starts or STARTS[args.optimizer]
    grid = grid_runs(task, args.seeds, args.optimizer, num_steps, args.device)
    best = {
        seed: min(
            (r.validation["loss"], shape, r.run.lr)
            for shape, results in grid.items()
            for r in results
            if r.run.seed == seed and math.isfinite(r.validation["loss"])
        )
        for seed in args.seeds
    }
    runs = [Steered(lr, seed, num_steps) for seed in args.seeds for lr in starts]
    losses = climb_runs(task, runs, args.optimizer, args.device)
    print("| seed | best of the grid | " + " | ".join(f"{lr:g}" for lr in starts) + " |")
    print("|---" * (len(starts) + 2) + "|")
    for seed in args.seeds:
        loss, shape, lr = best[seed]
        mine = [
            f"{found:.4f} ({100 * (found / loss - 1):+.1f}%, climb of {run.begun})"
            for run, found in zip(runs, losses, strict=True)
            if run.seed == seed
        ]
        print(f"| {seed} | {loss:.4f} ({shape}, {lr:g}) | " + " | ".join(mine) + " |")
    if args.json:
        record = {
            "hdet": __version__,
            "torch": torch.__version__,
            "argv": sys.argv[1:],
            "grid": {shape: [r.as_dict() for r in results] for shape, results in grid.items()},
            "climb": [
                {
                    "start": run.lr,
                    "seed": run.seed,
                    "loss": loss,
                    "ending": run.climb.ending,
                    "climb_steps": run.begun,
                    "num_rollbacks": run.num_rollbacks,
                    "rates": run.rates,
                }
                for run, loss in zip(runs, losses, strict=True)
            ],
        }
        args.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
