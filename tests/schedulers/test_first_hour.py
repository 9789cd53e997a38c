"""What a new user does in the first hour: other loops than ours, other schedules, a checkpoint of before, a look."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

from hdet import Adapt, AutoLR, Explorer, OneCycleAutoLR, knobs
from hdet.schedule import shape_of
from tiers import slow

Make = Callable[[Optimizer], LRScheduler]


class _Job:
    """A small classification; ``wrap`` makes the scheduler of its optimizer."""

    def __init__(self, wrap: Callable[[Optimizer], Any], *, lr: float = 3e-3, kind: str = "adamw") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        of = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        self.optimizer: Optimizer = of(self.model.parameters(), lr=lr)
        self.scheduler = wrap(self.optimizer)
        self.generator = torch.Generator().manual_seed(1)
        self.centres = 1.5 * torch.randn(4, 8, generator=torch.Generator().manual_seed(2))

    def loss(self) -> torch.Tensor:
        y = torch.randint(4, (32,), generator=self.generator)
        x = self.centres[y] + torch.randn(32, 8, generator=self.generator)
        return nn.functional.cross_entropy(self.model(x), y)

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def train(self, num_steps: int) -> list[float]:
        lrs = []
        for _ in range(num_steps):
            lrs.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = self.update()
            self.scheduler.step(loss) if hasattr(self.scheduler, "history") else self.scheduler.step()
        return lrs

    def score(self) -> float:
        """The loss on data that nobody has trained with."""
        self.generator.manual_seed(3)
        with torch.no_grad():
            return sum(self.loss().item() for _ in range(20)) / 20


def _cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, 400)


# -- schedules without an end -----------------------------------------------------------------------------------

STEPS = 300
WITHOUT_END: dict[str, Make] = {
    "StepLR": lambda o: StepLR(o, 90, 0.3),
    "MultiStepLR": lambda o: MultiStepLR(o, [150, 225], 0.1),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.99),
    "warm restarts": lambda o: CosineAnnealingWarmRestarts(o, 100),
    "CyclicLR": lambda o: CyclicLR(o, 3e-4, 3e-3, step_size_up=40, cycle_momentum=False),
    "LambdaLR": lambda o: LambdaLR(o, lambda s: min(1.0, (s + 1) / 25) * max(0.0, 1 - s / STEPS)),
    "constant": lambda o: LambdaLR(o, lambda s: 1.0),
}


@pytest.mark.parametrize("name", [slow(name, when=n % 6 > 0) for n, name in enumerate(WITHOUT_END)])
def test_a_schedule_without_an_end_ends_as_well_as_without_hdet(name: str) -> None:
    make = WITHOUT_END[name]
    plain, auto = _Job(make), _Job(lambda o: AutoLR(make(o)))
    plain.train(STEPS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the round that ended|.* rounds of this run")
        auto.train(STEPS)
    assert auto.score() < 1.15 * plain.score() + 0.01


def test_the_peak_of_cycles_without_an_end_is_known() -> None:
    """The first learning rate of a cycle is its lowest; what is compared with the first level is its highest."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    shape = shape_of(WITHOUT_END["CyclicLR"](optimizer), None)
    assert shape[0] == pytest.approx(3e-4)
    assert max(shape) == pytest.approx(3e-3, rel=0.05)
    assert shape_of(WITHOUT_END["StepLR"](optimizer), None) == []


def test_sgd_without_momentum_ends_about_as_well_in_300_steps() -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, 300)

    plain, auto = _Job(make, lr=0.5, kind="sgd"), _Job(lambda o: AutoLR(make(o)), lr=0.5, kind="sgd")
    plain.train(300)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the round that ended|.* rounds of this run")
        auto.train(300)
    assert auto.score() < 1.15 * plain.score() + 0.01


# -- the shape of a schedule ------------------------------------------------------------------------------------


def _lrs(make: Make, num_steps: int) -> list[float]:
    """Of a schedule alone, with nothing to train."""
    job = _Job(make)
    lrs = []
    for _ in range(num_steps):
        lrs.append(float(job.optimizer.param_groups[0]["lr"]))
        job.optimizer.step()
        job.scheduler.step()
    return lrs


def _follows(job: _Job, expected: list[float], start: int) -> bool:
    """Whether learning rates are one multiple of those of the schedule from ``start`` on."""
    ratios: list[float] = []
    job.train(start)
    for plain in expected[start:]:
        [lr] = job.train(1)
        ratios += [lr / plain] if plain > 1e-12 else []
        if max(ratios) >= min(ratios) * (1 + 1e-6):
            return False
    return True


@pytest.mark.parametrize("total_steps", [400, None])
def test_a_shape_that_is_kept_is_followed_exactly_after_its_factor_was_found(total_steps: int | None) -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda s: 1 / (1 + s // 100))

    start, expected = 84 if total_steps else 220, _lrs(make, 320)

    def kept(shape: Any) -> _Job:
        return _Job(lambda o: AutoLR(make(o), total_steps=total_steps, adapt=Adapt(shape=shape)))

    assert _follows(kept("keep"), expected, start)
    assert not _follows(kept("free" if total_steps is None else None), expected, start)


@pytest.mark.parametrize("name", ["StepLR", "MultiStepLR", "warm restarts", "CyclicLR", "inside"])
def test_steps_and_periods_are_kept_unless_told_otherwise(name: str) -> None:
    def inside(optimizer: Optimizer) -> LRScheduler:
        return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 100)], milestones=[50])

    make = WITHOUT_END.get(name, inside)

    def end(**settings: Any) -> float:
        return _Job(lambda o: AutoLR(make(o), total_steps=1000, **settings)).scheduler._run.policy.acting[1]  # type: ignore[no-any-return]

    assert end() == 200
    assert end(adapt=Adapt(shape="free")) > 500
    assert end(adapt=Adapt(_hold_share=0.1)) == 900
    assert end(adapt=Adapt(level=False)) > 500


def test_a_shape_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match='shape must be one of "free", "keep", but got shape=\'kept\''):
        Adapt(shape="kept")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape must be left out: Explorer has no schedule whose shape could be kept"):
        _Job(lambda o: Explorer(nn.Linear(2, 2), o, knobs=[knobs.Epsilon()], interval=2, adapt=Adapt(shape="keep")))


# -- loops ------------------------------------------------------------------------------------------------------


def test_stepping_once_an_epoch_is_noticed_once() -> None:
    job = _Job(lambda o: AutoLR(_cosine(o)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            for _ in range(4):
                loss = job.update()
            job.scheduler.step(loss)
    (said,) = [str(w.message) for w in caught if "optimizer steps lie between" in str(w.message)]
    assert said.startswith("AutoLR.step() must be called after every optimizer step, but 4 optimizer steps lie between")
    assert "Write optimizer.step(); scheduler.step(loss) in the loop over batches" in said


def test_one_call_that_was_left_out_is_no_habit() -> None:
    job = _Job(lambda o: AutoLR(_cosine(o)))
    for num in (2, 2, 1, 2, 2, 1, 0, 2):
        loss = torch.tensor(1.0)
        for _ in range(num):
            loss = job.update()
        job.scheduler.step(loss)


class _SAM(Optimizer):
    """Sharpness-aware minimisation as it is usually written: its own ``step`` is never called."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.base_optimizer = torch.optim.AdamW(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def move(self, size: float) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self.moves = [size * p.grad / norm for p in parameters]
        for p, move in zip(parameters, self.moves, strict=True):
            p.add_(move)

    @torch.no_grad()
    def second_step(self) -> None:
        for p, move in zip((p for group in self.param_groups for p in group["params"]), self.moves, strict=True):
            p.sub_(move)
        self.base_optimizer.step()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_wrapper_whose_step_is_never_called_is_told_of_the_optimizer_inside(
    inner: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = _Job(lambda o: None)
    sam = _SAM(job.model.parameters())
    scheduler = AutoLR(sam.base_optimizer if inner else sam, total_steps=40)
    for _ in range(40):
        acts: tuple[Callable[[], None], ...] = (lambda: sam.move(0.05), sam.second_step)
        for act in acts:
            job.model.zero_grad()
            loss = job.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            act()
        scheduler.step(loss)
    said = [message for message in caplog.messages if "whose step() was not called" in message]
    assert len(said) == (not inner)
    if inner:
        assert scheduler.found().peak_lrs[0] > 0
        assert sam.param_groups[0]["lr"] == 0
    else:
        assert said[0].startswith("AutoLR was given _SAM, whose step() was not called in the first 3 steps")
        assert "AutoLR(optimizer.base_optimizer, ...)" in said[0]


@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("AutoLR", lambda o: AutoLR(_cosine(o))),
        ("OneCycleAutoLR", lambda o: OneCycleAutoLR(o, 0.01, 40, cycle_momentum=False)),
        ("Explorer", lambda o: Explorer(nn.Linear(2, 2), o, knobs=[knobs.Epsilon()], interval=50)),
    ],
)
def test_numbers_of_epochs_are_no_losses(name: str, wrap: Any) -> None:
    job = _Job(wrap)
    for epoch in range(2):
        job.update()
        job.scheduler.step(epoch)
    job.update()
    with pytest.raises(ValueError, match=rf"^{name}.step\(\) takes the loss of the step, but got \[0, 1, 2\] in three"):
        job.scheduler.step(2)
    assert job.scheduler.last_epoch == 2
    for loss in (2, 2, 3, 1.0, 2, 3, 2.0):  # losses may be whole numbers
        job.update()
        job.scheduler.step(loss)


# -- what it says -----------------------------------------------------------------------------------------------


def test_a_scheduler_says_in_one_line_what_it_is_doing() -> None:
    job = _Job(lambda o: AutoLR(_cosine(o)))
    assert repr(job.scheduler) == "AutoLR(CosineAnnealingLR, step 0 of 400, round 0, scale 3.33e-10, lr 1e-12)"
    job.train(200)
    found = repr(job.scheduler)
    lr, scale = job.optimizer.param_groups[0]["lr"], job.scheduler.history[-1].scales[0]
    assert found.startswith("AutoLR(CosineAnnealingLR, step 200 of 400, round ")
    assert f", level, scale {scale:.3g}, lr {lr:.3g}, z " in found
    assert "\n" not in found
    job.train(200)
    assert ", finished, " in repr(job.scheduler)


@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
def test_the_others_say_it_too() -> None:
    cycle = _Job(lambda o: OneCycleAutoLR(o, 0.01, 40, cycle_momentum=False)).scheduler
    assert (
        repr(cycle) == "OneCycleAutoLR(step 0 of 40, round 0, one replica, nothing to learn from, scale 1, lr 0.0004)"
    )
    explorer = _Job(lambda o: Explorer(nn.Linear(2, 2), o, knobs=[knobs.Epsilon()], interval=50)).scheduler
    assert repr(explorer) == "Explorer(step 0, round 0, one replica, nothing to learn from, scale 1, lr 0.003)"


# -- max_lr -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_cosine, WITHOUT_END["CyclicLR"]])
def test_no_learning_rate_exceeds_max_lr(make: Make) -> None:
    job = _Job(lambda o: AutoLR(make(o), max_lr=1e-3))
    free = _Job(lambda o: AutoLR(make(o)))
    assert max(free.train(120)) > 1.2e-3
    assert 0.99e-3 < max(job.train(120)) <= 1e-3 * (1 + 1e-12)


def test_max_lr_by_param_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    scheduler = AutoLR(
        LambdaLR(optimizer, lambda s: 1.0),
        max_lr=[0.03, 0.02],
        adapt=Adapt(groups="each", level=False),
    )
    scheduler._run.steering.multiply(9.0)
    scheduler._run.lrs.update()
    scheduler._refresh()
    assert scheduler.get_last_lr() == pytest.approx([0.03, 0.02])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    optimizer.step()
    scheduler.step(1.0)
    assert max(scheduler.get_last_lr()) <= 0.03 * (1 + 1e-12)


@pytest.mark.parametrize("given", [0.0, -1.0, float("nan"), [0.1, 0.1], "high", [True]])
def test_a_max_lr_that_makes_no_sense_is_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match="max_lr must be a finite number > 0, or one for each of 1 param groups, but got"
    ):
        _Job(lambda o: AutoLR(_cosine(o), max_lr=given))


# -- a checkpoint that was made without hdet --------------------------------------------------------------------

PLAIN: dict[str, Make] = {
    "CosineAnnealingLR": _cosine,
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 50), CosineAnnealingLR(o, 350)], milestones=[50]),
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o), ExponentialLR(o, 0.999)]),
    "LambdaLR": lambda o: LambdaLR(o, lambda s: 1 / (1 + s)),
}


def _saved(job: _Job) -> dict[str, Any]:
    parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_run_without_hdet_is_continued_as_it_is(make: Make) -> None:
    plain = _Job(make)
    plain.train(100)
    saved = _saved(plain)
    job = _Job(lambda o: AutoLR(make(o), total_steps=400, interval=50))
    job.model.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    job.scheduler.load_state_dict(saved["scheduler"])
    job.generator.set_state(plain.generator.get_state())
    assert (job.scheduler.last_epoch, job.scheduler.schedule.state_dict()["_last_lr"]) == (
        100,
        saved["scheduler"]["_last_lr"],
    )
    # The same run, to the bit, until the first round has shown something.
    assert job.train(49) == plain.train(49)
    assert all(map(torch.equal, job.model.parameters(), plain.model.parameters()))
    job.train(60)
    assert [record.phase for record in job.scheduler.history] == ["level", "level"]
    assert job.scheduler.history[0].index == 2
    # And from there it is a run of hdet's.
    again = _Job(lambda o: AutoLR(make(o), total_steps=400, interval=50))
    again.scheduler.load_state_dict(job.scheduler.state_dict())
    assert again.scheduler.get_last_lr() == job.scheduler.get_last_lr()


@pytest.mark.parametrize("state", [{"last_epoch": 100}, StepLR(torch.optim.SGD([torch.ones(1)]), 5)])
def test_the_optimizer_alone_takes_only_the_step(state: Any) -> None:
    if isinstance(state, LRScheduler):
        state = {**state.state_dict(), "last_epoch": 100}
    job = _Job(lambda o: AutoLR(o, total_steps=200))
    job.scheduler.load_state_dict(state)
    assert job.scheduler.last_epoch == 100
    assert job.train(3) == [3e-3] * 3
    job.train(97)
    assert job.scheduler.finished


def test_a_schedule_that_is_under_way_starts_at_a_scale_of_1() -> None:
    job = _Job(_cosine)
    job.train(100)
    scheduler = AutoLR(job.scheduler)
    assert scheduler.get_last_lr() == job.scheduler.get_last_lr()
    assert not scheduler._run.policy.searching


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"weights": 1},
            r"^state_dict must be one of AutoLR, but it was written by something else; it has \['weights'\]$",
        ),
        (
            {"gamma": 0.1, "last_epoch": 3, "_last_lr": [0.1]},
            r"or of the CosineAnnealingLR it wraps, but it has \['gamma'\]",
        ),
        ({"last_epoch": 3}, "must be what the CosineAnnealingLR's own state_dict.. gave, but it has no _last_lr"),
        ({"last_epoch": -3}, "last_epoch must be an integer >= 0"),
        ({"_schedulers": []}, "must say how far the run is, but it has no last_epoch"),
    ],
)
def test_what_hdet_did_not_write_is_refused_without_talk_of_versions(state: Any, message: str) -> None:
    job = _Job(lambda o: AutoLR(_cosine(o)))
    with pytest.raises(ValueError, match=message) as caught:
        job.scheduler.load_state_dict(state)
    assert "version" not in str(caught.value)
    assert job.scheduler.last_epoch == 0
    assert job.scheduler._run.policy.searching
