"""The scenarios of the soak: what is drawn from a seed, and how a replica trains through it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Adapt, AutoLR, Ensemble, Explorer, Faults, OneCycleAutoLR
from hdet.ensemble.knobs import LearningRate
from hdet.testing import Fault, Injector, collect_weights

NUM_STEPS, INTERVAL, LR = 28, 4, 0.1
LOST_S = 3.0
"""Timeout of the process group where ranks are meant to lose each other."""

STORIES = (
    *("nothing", "slow rank", "NaN weights once", "NaN weights for good", "infinite weights once", "NaN gradient once"),
    *("NaN loss once", "NaN loss for good", "explosion", "skipped step", "error", "kill and restart"),
    *("resume at a round's end", "resume in mid-round", "resume on another number", "several"),
)
FAULTY = ("nan_weights", "inf_weights", "nan_gradient")
KINDS: dict[str, Any] = {
    "slow rank": "slow",
    "NaN weights once": "nan_weights",
    "NaN weights for good": "nan_weights",
    "infinite weights once": "inf_weights",
    "NaN gradient once": "nan_gradient",
    "NaN loss once": "nan_loss",
    "NaN loss for good": "nan_loss",
    "explosion": "explode",
    "skipped step": "skip_step",
    "error": "error",
    "kill and restart": "kill",
}
OPTIONS = {
    "plain": Faults(),
    "quarantine": Faults(quarantine=20),
    "skip": Faults(skip_nonfinite=True),
    "all": Faults(quarantine=20, skip_nonfinite=True),
}


@dataclass(frozen=True)
class Scenario:
    """What happens to whom. ``resume_at``: the step after which it is saved; ``then_on``: how many replicas go on."""

    seed: int
    story: str
    num_replicas: int
    gradients: str
    face: str
    adam: bool
    faults: tuple[Fault, ...] = ()
    resume_at: int = 0
    then_on: int = 0
    options: str = "plain"

    @property
    def handling(self) -> Faults:
        return OPTIONS[self.options]

    @property
    def exact(self) -> bool:
        """Whether a resumed run repeats every bit; otherwise weights are computed from a mean that was rounded."""
        return self.face in ("paper", "gradient", "local sgd")

    @property
    def searches(self) -> bool:
        """Whether the first steps are rounds of their own, in which the first level is found."""
        return self.face in ("loss", "gradient")

    @property
    def repeatable(self) -> bool:
        """Whether it should end as an undisturbed run, were it not for its faults.

        A checkpoint where replicas are apart puts them at their mean; of local gradients it has one optimizer's state.
        """
        own_state = self.adam and self.gradients == "local"
        return not self.resume_at or (self.resume_at % INTERVAL == 0 and not own_state)


def draw(seed: int, index: int) -> Scenario:
    rng = np.random.default_rng([seed, index])
    story = STORIES[index % len(STORIES)]
    num_replicas = int(rng.integers(2, 5))
    gradients = str(rng.choice(["shared", "local"]))
    faces = ["paper", "loss", "gradient", "explorer", *(["local sgd"] * 4 if gradients == "local" else [])]
    face, adam = str(rng.choice(faces)), bool(rng.integers(3) == 0)
    if gradients == "shared" and story in ("explosion", "several") and face == "gradient":
        face = "loss"  # one of these replicas' weights, changed but finite: nothing ever compares or averages them
    faults: list[Fault] = []
    resume_at = then_on = 0
    if story == "several":
        for kind in rng.choice(
            ["slow", "explode", "nan_loss", *FAULTY], size=int(rng.integers(2, 4)), replace=False
        ).tolist():
            faults.append(_fault(rng, kind, num_replicas, for_good=bool(rng.integers(2)) and kind != "explode"))
        resume_at = int(rng.integers(0, NUM_STEPS))
    elif story in KINDS:
        faults.append(_fault(rng, KINDS[story], num_replicas, for_good="for good" in story))
    if story.startswith("resume") or story == "kill and restart":
        resume_at = INTERVAL * int(rng.integers(1, NUM_STEPS // INTERVAL))
        resume_at += int(rng.integers(1, INTERVAL)) if "mid-round" in story else 0
    if story == "kill and restart":
        faults = [Fault("kill", faults[0].replica, min(NUM_STEPS, resume_at + int(rng.integers(1, INTERVAL + 1))))]
    if story == "resume on another number":
        then_on = int(rng.choice([n for n in (1, 2, 3, 4) if n != num_replicas]))
    options = "plain" if rng.integers(2) else str(rng.choice(list(OPTIONS)))
    return Scenario(index, story, num_replicas, gradients, face, adam, tuple(faults), resume_at, then_on, options)


def _fault(rng: np.random.Generator, kind: Any, num_replicas: int, *, for_good: bool) -> Fault:
    replica, step = int(rng.integers(num_replicas)), int(rng.integers(1, NUM_STEPS + 1))
    if kind == "slow":
        return Fault(kind, replica, step, until=step + 1, amount=0.2)
    return Fault(kind, replica, step, until=math.inf if for_good else None)


# -- on the replicas ------------------------------------------------------------------------------------------------


def target(scenario: Scenario, step: int, replica: int) -> Any:
    return 1.0 + 0.3 * np.random.default_rng([scenario.seed, step, replica]).normal(size=(2, 3))


CURVATURE = np.linspace(0.5, 2.0, 6).reshape(2, 3)


class Quadratic(nn.Module):
    """Half the curvature times the squared distance from a target that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)])

    def forward(self, centre: Tensor) -> Tensor:
        distance = torch.stack(list(self.rows)) - centre
        return 0.5 * (torch.from_numpy(CURVATURE) * distance.square()).sum()


class Training:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.rank = scenario, dist.get_rank()
        self.model = DistributedDataParallel(Quadratic())
        make: Any = torch.optim.Adam if scenario.adam else torch.optim.SGD
        self.optimizer = make(self.model.parameters(), lr=LR)
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Any:
        s, optimizer = self.scenario, self.optimizer
        options: dict[str, Any] = {"faults": s.handling}
        apart: dict[str, Any] = {"gradients": s.gradients, "seed": s.seed}
        if s.face == "paper":
            options |= {"ensemble_lr_spread_ratio": 0.3, "model_sync_interval": INTERVAL, "enable_auto_lr": True}
            options |= {"auto_lr_warmup_steps": 0, "loss_scale": 0.1, "cycle_momentum": False}
            return OneCycleAutoLR(optimizer, LR, NUM_STEPS, model=self.model, ensemble=Ensemble(**apart), **options)
        if s.face in ("loss", "gradient"):
            schedule = OneCycleLR(optimizer, LR, NUM_STEPS, cycle_momentum=False)
            options |= {"adapt": Adapt(_start_steps=0, _hold_share=0.0)}
            options |= {"ensemble": Ensemble(spread=0.3 if s.face == "loss" else 0.0, **apart)}
            return AutoLR(schedule, model=self.model, interval=INTERVAL, **options)
        knobs = [LearningRate(spread=0.3)] if s.face == "explorer" else []
        return Explorer(self.model, optimizer, knobs=knobs, interval=INTERVAL, **apart, **options)

    def advance(self, until: int, faults: tuple[Fault, ...] = (), *, save_at: int = 0, folder: str = "") -> None:
        inject = Injector(faults, self.rank)
        # What is not finite on one replica is, once gradients have been averaged, on all of them.
        shared = self.scenario.gradients == "shared"
        faulty = [replace(f, replica=self.rank) if shared else f for f in faults if f.kind == "nan_gradient"]
        inject_gradients = Injector(faulty, self.rank)
        for step in range(self.scheduler.last_epoch + 1, until + 1):
            self.optimizer.zero_grad()
            loss = self.model(torch.from_numpy(target(self.scenario, step, self.rank)))
            loss.backward()
            inject_gradients.gradients(step, self.model)
            self.optimizer.step()
            inject.weights(step, self.model)
            if not inject.skips(step):
                self.scheduler.step(inject.loss(step, loss))
            if step == save_at:
                self.save(folder)

    def save(self, folder: str) -> None:
        with self.scheduler.converged():
            parts = self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()
            if self.rank == 0:
                torch.save(parts, Path(folder, "checkpoint.pt"))
        dist.barrier()

    def load(self, folder: str) -> None:
        model, optimizer, scheduler = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)

    def result(self) -> dict[str, Any]:
        self.scheduler.finish()
        records = [(r.step, r.losses, r.unhealthy, r.num_rollbacks, r.quarantined) for r in self.scheduler.history]
        return {"weights": collect_weights(self.model), "step": self.scheduler.last_epoch, "records": records}


def undisturbed(scenario: Scenario) -> dict[str, Any]:
    training = Training(scenario)
    training.advance(NUM_STEPS)
    return training.result()


def disturbed(scenario: Scenario, folder: str) -> dict[str, Any]:
    training = Training(scenario)
    if scenario.story in ("skipped step", "error"):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LOST_S), dist.group.WORLD)
    try:
        training.advance(scenario.resume_at or NUM_STEPS, scenario.faults, save_at=scenario.resume_at, folder=folder)
        if scenario.resume_at:
            training = Training(scenario)
            training.load(folder)
            training.advance(NUM_STEPS, scenario.faults)
        return training.result()
    except Exception as error:
        rounds = [record.step for record in training.scheduler.history]
        return {"error": f"{type(error).__name__}: {error}", "rounds": rounds}


def both(scenario: Scenario, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {"undisturbed": undisturbed(scenario), **disturbed(scenario, folder)}


def first_part(scenario: Scenario, folder: str) -> None:
    warnings.simplefilter("ignore")
    training = Training(scenario)
    until = NUM_STEPS if scenario.faults else scenario.resume_at
    training.advance(until, scenario.faults, save_at=scenario.resume_at, folder=folder)


def second_part(scenario: Scenario, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    training = Training(scenario)
    training.load(folder)
    training.advance(NUM_STEPS)
    return {"undisturbed": undisturbed(scenario), **training.result()}
