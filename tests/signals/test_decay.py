"""Weight decay that is learned to first order: where it goes, what is refused, and that a run is resumed exactly."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_held_out import Points
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from hdet import AutoLR, Ensemble, Found, knobs
from hdet.signals.decay import DecayLearner, is_coupled


def make_run(
    total_steps: int = 400,
    *,
    optimizer: type[Optimizer] = AdamW,
    given: Any = "learn",
    start: float = 0.01,
    **more: Any,
) -> tuple[Points, AutoLR]:
    task = Points()
    made = optimizer(task.model.parameters(), lr=1e-3, weight_decay=start)  # type: ignore[call-arg]
    arguments: dict[str, Any] = {"model": task.model, "probe": task.probe} | more
    return task, AutoLR(made, total_steps=total_steps, weight_decay=given, **arguments)


@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_a_model_that_overfits_gets_more(optimizer: type[Optimizer]) -> None:
    task, scheduler = make_run(800, optimizer=optimizer)
    task.train(scheduler, 800)
    found = scheduler.found()
    values = [record.knobs["weight_decay"].base for record in scheduler.history]
    assert found.weight_decays == (scheduler.optimizer.param_groups[0]["weight_decay"],) == (values[-1],)
    assert max(values) > 5 * values[0]
    assert "weight decay" in str(found)
    assert "weight_decay" in str(scheduler)


def test_a_start_of_zero_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hdet"):
        _, scheduler = make_run(start=0.0)
    said = [record.getMessage() for record in caplog.records if "weight decay is 0" in record.getMessage()]
    assert said == ["weight decay is 0 and to be learned: it starts at 0.1, in every param group"]
    assert scheduler.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_low_start_is_raised_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hdet"):
        assert make_run(start=0.01)[1].optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.1)
    assert "weight decay is 0.01 and to be learned: it starts at 0.1, where more can be seen of it" in caplog.text
    assert make_run(start=0.01, given=(1e-3, 1.0))[1].optimizer.param_groups[0]["weight_decay"] == 0.01
    assert make_run(start=0.3)[1].optimizer.param_groups[0]["weight_decay"] == 0.3


def test_groups_keep_their_ratios_and_zeros() -> None:
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.2}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = AdamW([*groups, {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.1}], lr=1e-3)
    learner = DecayLearner(optimizer)
    learner.learn(np.array([-1.0, -1.1, -0.9, -1.0]), acting=True)
    values = [group["weight_decay"] for group in optimizer.param_groups]
    assert values[0] > 0.2
    assert values[1] == 0
    assert math.isclose(values[2], values[0] / 2)


def test_it_stays_inside_its_bounds() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=1e-3, weight_decay=0.1)
    learner = DecayLearner(optimizer, bounds=(0.05, 0.4))
    for sign, end in ((-1, 0.4), (1, 0.05)):
        learner.learn(sign * np.linspace(1, 1.1, 60), acting=True)
        assert math.isclose(learner.value, end)


def test_weights_never_shrink_by_more_than_a_tenth_in_a_step() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)
    learner = DecayLearner(optimizer)
    learner.add_step(optimizer)
    learner.learn(-np.linspace(1, 1.1, 60), acting=True)
    assert math.isclose(learner.value, 1.0)


def test_it_holds_still_while_nothing_acts_and_after_broken_samples() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=1e-3, weight_decay=0.1)
    learner = DecayLearner(optimizer)
    learner.add_step(optimizer)
    learner.learn(-np.linspace(1, 1.1, 20), acting=False)
    assert learner.value == 0.1
    learner.learn(np.array([math.nan]), acting=True)
    assert not learner.path.copies
    assert learner.value == 0.1
    learner.add_step(optimizer)  # it begins again
    assert [copy.shape for copy in learner.path.copies] == [(2,)]


def test_it_is_resumed_exactly() -> None:
    task, scheduler = make_run()
    task.train(scheduler, 233)
    again, other = make_run()
    again.model.load_state_dict(task.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(scheduler.optimizer.state_dict()))
    other.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    for mine, theirs in ((task.generator, again.generator), (task.held_out, again.held_out)):
        theirs.set_state(mine.get_state())
    task.train(scheduler, 167)
    again.train(other, 167)
    assert other.found().weight_decays == scheduler.found().weight_decays
    assert again.final() == task.final()


def test_a_state_has_the_same_form_at_any_time() -> None:
    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: form(each) for key, each in value.items()}
        if isinstance(value, torch.Tensor):
            return value.shape
        return [form(each) for each in value] if isinstance(value, list) else type(value)

    optimizer = AdamW(Points().model.parameters(), lr=1e-3, weight_decay=0.1)
    fresh, learner = DecayLearner(optimizer), DecayLearner(optimizer, every=8)
    for _ in range(9):
        learner.add_step(optimizer)
    assert form(fresh.state_dict()) == form(learner.state_dict())
    fresh.load_state_dict(learner.state_dict())
    for mine, theirs in zip(fresh.path.copies, learner.path.copies, strict=True):
        assert mine.abs().sum() > 0
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"probe": None}, "needs probe=, a loss on held-out data: the training loss always asks for less"),
        ({"ensemble": Ensemble(spread=0.1)}, "needs the gradient signal"),
        ({"ensemble": Ensemble(knobs=[knobs.WeightDecay()])}, "needs knobs= to be left out"),
        ({"ensemble": Ensemble(gradients="local")}, 'needs gradients="shared"'),
        ({"given": "more"}, r"weight_decay must be None, \"learn\" or a pair"),
        ({"given": (1.0, 0.1)}, r"weight_decay must be None, \"learn\" or a pair"),
        ({"start": 20.0}, r"weight_decay must start inside \[0.0001, 10\] to be learned, but got \[20.0\]"),
        ({"optimizer": Adam}, "needs a decay beside the gradient"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*compares replicas.*", "ignore:knobs are explored.*")
def test_what_cannot_be_learned_is_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make_run(**more)


def test_where_decay_is_applied() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert is_coupled(SGD(parameters))
    assert not is_coupled(AdamW(parameters))
    assert not is_coupled(Adam(parameters, decoupled_weight_decay=True))
    with pytest.raises(ValueError, match="inside the gradient of Adagrad"):
        is_coupled(Adagrad(parameters))
    with pytest.raises(ValueError, match="needs an optimizer with weight decay"):
        is_coupled(torch.optim.LBFGS(parameters))


def test_found_keeps_both(tmp_path: Any) -> None:
    found = Found(("all",), (0, 10), ((0.0,), (0.1,)), 10, weight_decays=(0.3,))
    found.save(tmp_path / "found.json")
    assert Found.load(tmp_path / "found.json") == found
    assert str(found).endswith("; weight decay 0.3")
