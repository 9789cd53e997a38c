"""The probe leaves no trace: modes, random numbers and gradients are as before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hdet.ensemble.signals import evaluate
from hdet.signals.held_out import probe_gradients


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)))
    model.train()
    model[2].eval()  # a part that its user has frozen
    model[2].get_submodule("1").train()
    return model


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_module_is_in_evaluation_mode_and_gets_its_own_mode_back() -> None:
    model = _model()
    before = _modes(model)
    assert before == [True, True, True, False, False, True]
    seen = []

    def probe() -> Tensor:
        seen.append(_modes(model))
        loss: Tensor = model(torch.ones(3, 2)).mean()
        return loss

    statistics = [b.clone() for b in model.buffers()]
    first, again = evaluate(probe, model), evaluate(probe, model)
    assert first == again  # no dropout
    assert not any(mode for modes in seen for mode in modes)
    assert _modes(model) == before
    assert all(torch.equal(a, b) for a, b in zip(statistics, model.buffers(), strict=True))


def test_modes_and_random_numbers_come_back_after_an_error() -> None:
    model = _model()
    before, state = _modes(model), torch.get_rng_state()

    def probe() -> float:
        torch.randn(3)
        raise KeyError("held-out data")

    with pytest.raises(KeyError, match="held-out data"):
        evaluate(probe, model)
    assert _modes(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("model", [None, nn.Linear(2, 2)])
def test_random_numbers_go_on_as_if_nobody_had_drawn_any(model: nn.Module | None) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    drawn = [evaluate(lambda: torch.randn(()), model) for _ in range(2)]
    assert torch.equal(torch.randn(4), expected)
    assert drawn[0] == drawn[1]


def test_there_are_no_gradients() -> None:
    model = nn.Linear(2, 1)
    losses: list[Tensor] = []

    def probe() -> Tensor:
        losses.append(model(torch.ones(2)).sum())
        return losses[-1]

    assert evaluate(probe, model) == losses[0].item()
    assert not losses[0].requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, torch.tensor(math.inf), torch.tensor([math.nan])])
def test_a_loss_that_is_not_finite_is_nan(loss: float | Tensor) -> None:
    assert math.isnan(evaluate(lambda: loss, None))


@pytest.mark.parametrize("loss", [1.5, torch.tensor(1.5), torch.tensor([1.5]), torch.tensor(1.5, dtype=torch.bfloat16)])
def test_numbers_and_tensors_with_one_element_will_do(loss: float | Tensor) -> None:
    assert evaluate(lambda: loss, None) == 1.5


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (torch.ones(3), r"the loss that probe returns must have one element, but got shape \(3,\); reduce it first"),
        (torch.ones((), device="meta"), "the loss that probe returns must be a tensor with a value, but got one on"),
        (torch.ones(1).to_sparse(), "the loss that probe returns must be a dense tensor, but got layout torch.sparse"),
    ],
)
def test_a_probe_must_return_one_number(loss: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        evaluate(lambda: loss, None)


def test_a_probe_whose_gradient_is_asked_for_must_return_one_number_too() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"the loss that probe returns must have one element, but got shape \(2,\)"):
        probe_gradients(lambda: model(torch.ones(3)), model, list(model.parameters()))
