"""The end of a run: what ``finished`` says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from hdet import AutoLR, Explorer, OneCycleAutoLR
from hdet.knobs import WeightDecay


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
    with pytest.warns(UserWarning, match='signal="loss" compares replicas, and there is one'):
        scheduler = AutoLR(run.optimizer, total_steps=7, signal="loss")
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
