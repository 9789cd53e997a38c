"""The end of a run: what ``finished`` says, and what is said of steps beyond it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from hdet import Adapt, AutoLR, Ensemble, Explorer, OneCycleAutoLR
from hdet.ensemble.knobs import WeightDecay


class Run:
    """A model and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        self.weights = self.model.weight
        self.optimizer = torch.optim.SGD([self.weights], lr=0.1, momentum=0.9, weight_decay=0.01)

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.weights**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def train(self, scheduler: AutoLR | Explorer | OneCycleAutoLR, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.backward()
            self.optimizer.step()
            scheduler.step(loss)


def test_a_one_cycle_on_one_process_has_finished_at_total_steps() -> None:
    run = Run()
    scheduler = OneCycleAutoLR(run.optimizer, max_lr=0.1, total_steps=10, model_sync_interval=4)
    run.train(scheduler, 9)
    assert not scheduler.finished
    run.train(scheduler, 1)
    assert scheduler.finished
    assert "finished" in repr(scheduler)


def test_a_loss_signal_of_one_replica_has_finished_at_total_steps() -> None:
    run = Run()
    with pytest.warns(UserWarning, match="spread=0.1 compares the losses of replicas, and there is one"):
        scheduler = AutoLR(run.optimizer, total_steps=7, ensemble=Ensemble(spread=0.1))
    run.train(scheduler, 6)
    assert not scheduler.finished
    run.train(scheduler, 1)
    assert scheduler.finished


def test_an_explorer_alone_has_finished_at_total_steps() -> None:
    run = Run()
    with pytest.warns(UserWarning, match="Explorer compares replicas, and there is one"):
        scheduler = Explorer(run.model, run.optimizer, knobs=[WeightDecay(adapt=False)], interval=4, total_steps=7)
    run.train(scheduler, 7)
    assert scheduler.finished
    with pytest.raises(RuntimeError, match="training was finished at step 7; make a new Explorer to go on"):
        run.train(scheduler, 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda o: CosineAnnealingLR(o, float("inf")),  # type: ignore[arg-type]
            "T_max of CosineAnnealingLR must be a finite number of steps where total_steps is not given, but got "
            "T_max=inf; pass total_steps=, the length of the run",
        ),
        (
            lambda o: SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, float("inf"))], [5]),  # type: ignore[arg-type]
            "T_max of CosineAnnealingLR must be a finite number of steps",
        ),
        (
            lambda o: PolynomialLR(o, float("inf")),  # type: ignore[arg-type]
            "total_iters of PolynomialLR must be a finite number of steps .*, but got total_iters=inf",
        ),
    ],
)
def test_a_schedule_without_an_end_needs_the_length_of_the_run(
    make: Callable[[torch.optim.Optimizer], LRScheduler], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        AutoLR(make(Run().optimizer))
    run = Run()
    scheduler = AutoLR(make(run.optimizer), total_steps=20)
    run.train(scheduler, 20)
    assert scheduler.finished


# -- steps beyond the end -----------------------------------------------------------------------------------------


def test_a_loop_that_is_longer_than_the_run_is_told_once() -> None:
    run = Run()
    scheduler = AutoLR(run.optimizer, total_steps=10)
    run.train(scheduler, 10)
    text = (
        r"AutoLR has reached the end of the run, total_steps=10, where the learning rate is 0, but step 11 was taken: "
        r"from here on nothing is learned. Pass total_steps=, .*, 11 or more: epochs \* len\(loader\)"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        run.train(scheduler, 5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert run.optimizer.param_groups[0]["lr"] == 0.0


def test_a_loop_that_is_longer_than_its_cooldown_is_told_too() -> None:
    run = Run()
    scheduler = AutoLR(run.optimizer, adapt=Adapt(level=False))
    run.train(scheduler, 5)
    scheduler.cooldown(3)
    run.train(scheduler, 3)
    with pytest.warns(UserWarning, match="total_steps=8, where the learning rate is 0, but step 9 was taken"):
        run.train(scheduler, 2)


def test_a_schedule_that_goes_on_is_left_to_itself() -> None:
    run = Run()
    scheduler = AutoLR(CosineAnnealingLR(run.optimizer, 10))
    run.train(scheduler, 12)
    assert run.optimizer.param_groups[0]["lr"] > 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_one_cycle_raises_beyond_its_end_as_torchs_does(nested: bool) -> None:
    run = Run()
    schedule: LRScheduler = OneCycleLR(run.optimizer, 0.1, total_steps=10)
    if nested:
        schedule = ChainedScheduler([schedule])
    scheduler = AutoLR(schedule, total_steps=10)
    run.train(scheduler, 10)
    with pytest.raises(ValueError, match=r"Tried to step 11 times\. The specified number of total steps is 10"):
        run.train(scheduler, 1)


# -- micro-batches ------------------------------------------------------------------------------------------------


def _told(caplog: pytest.LogCaptureFixture) -> int:
    text = "AutoLR.step() must be called once for each optimizer step, but 3 calls came without optimizer.step()"
    return sum(message.startswith(text) for message in caplog.messages)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own
@pytest.mark.parametrize("num_micro", [2, 3, 4, 16])
def test_a_step_for_each_micro_batch_is_noticed_at_the_third_that_is_too_much(
    num_micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    scheduler = AutoLR(run.optimizer, total_steps=500)
    num_empty = 0
    for micro in range(1, 50):
        loss = run.backward()
        if micro % num_micro == 0:
            run.optimizer.step()
        else:
            num_empty += 1
        scheduler.step(loss)
        assert _told(caplog) == (num_empty >= 3)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own
def test_steps_that_a_scaler_skips_later_are_not_noticed(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    scheduler = AutoLR(run.optimizer, total_steps=500)
    for step in range(1, 200):
        loss = run.backward()
        if step > 2 and step % 20:  # two at the start, and one now and then
            run.optimizer.step()
        scheduler.step(loss)
    assert _told(caplog) == 0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own
def test_a_scaler_that_skips_many_steps_at_the_start_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    scheduler = AutoLR(run.optimizer, total_steps=500)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10)
    for _ in range(60):
        run.optimizer.zero_grad()
        loss = 2**10 * (run.weights**2).sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(run.optimizer)
        scaler.update()
        scheduler.step(loss.detach())
    assert _told(caplog) == 1
    assert "If a GradScaler has skipped those steps" in caplog.text


def test_nothing_is_said_where_nobody_counts(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    scheduler = OneCycleAutoLR(run.optimizer, max_lr=0.1, total_steps=40)
    run.optimizer.step()
    for _ in range(10):
        scheduler.step(1.0)
    assert not caplog.messages
