"""The tail of a round: which weights it adds up, and that those at hand come back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet.ensemble.generations import Tail
from hdet.replicas.group import find_replicas
from hdet.weights.averaged import Weights


def _tail(interval: int) -> tuple[nn.Linear, Tail]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Tail(Weights(optimizer, model, find_replicas(optimizer, None, spread=0.0)), interval)


@pytest.mark.parametrize(("interval", "kept"), [(1, [1]), (4, [3, 4]), (7, [4, 5, 6, 7]), (45, list(range(24, 46, 2)))])
def test_it_is_the_mean_of_the_second_half_and_leaves_the_weights_alone(interval: int, kept: list[int]) -> None:
    model, tail = _tail(interval)
    for _ in range(2):  # rounds
        for step in range(1, interval + 1):
            tail.before_step()
            with torch.no_grad():
                model.weight.fill_(step)
        kept = sorted({*kept, interval})  # the last weights always count
        with tail.in_place():
            assert float(model.weight.detach()) == pytest.approx(sum(kept) / len(kept))
        assert float(model.weight.detach()) == interval
        tail.restart()


def test_after_a_resume_it_goes_on_with_what_is_left_of_the_round() -> None:
    model, tail = _tail(8)
    tail.restart(6)
    nn.init.constant_(model.weight, 6)
    for step in (7, 8):
        tail.before_step()
        with torch.no_grad():
            model.weight.fill_(step)
    with tail.in_place():
        assert float(model.weight.detach()) == pytest.approx(7)
