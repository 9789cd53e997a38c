"""The groups of options: the same in all three schedulers, agreed on by the ranks, refused where they have no use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, Averaging, Copies, Ensemble, Explorer, Faults, OneCycleAutoLR, knobs
from hdet.ensemble.controllers import PaperController
from hdet.ensemble.outer import Nesterov
from job import launch
from options import GROUPS, grouped, with_ensemble

SCHEDULERS = (AutoLR, OneCycleAutoLR, Explorer)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def _auto(**options: Any) -> AutoLR:
    model, optimizer = _model()
    return AutoLR(CosineAnnealingLR(optimizer, 400), model=model, **{"interval": 2, **with_ensemble(**options)})


def _cycle(**options: Any) -> OneCycleAutoLR:
    model, optimizer = _model()
    return OneCycleAutoLR(optimizer, 0.01, 40, cycle_momentum=False, model=model, **with_ensemble(**options))


def _explorer(**options: Any) -> Explorer:
    model, optimizer = _model()
    return Explorer(model, optimizer, knobs=[knobs.Epsilon()], interval=2, **grouped(**options))


def test_the_same_thing_has_the_same_name_and_default_everywhere() -> None:
    found = [inspect.signature(kind).parameters for kind in SCHEDULERS]
    assert len(found[0]) == 12
    shared = ["probe", "process_group", "faults"]
    for name in shared:
        assert len({repr(parameters[name].default) for parameters in found}) == 1, name
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for parameters in found)
    groups = ("adapt", "copies", "faults")
    assert [found[0][name].default for name in groups] == [GROUPS[name]() for name in groups]
    assert len(found[1]) == 14 + 9 + 6  # torch's, the paper's, ours


@pytest.mark.parametrize("kind", GROUPS.values())
def test_facts_are_plain_strings_by_name(kind: Any) -> None:
    facts = kind().facts()
    assert facts
    assert all(isinstance(fact, str) for fact in facts.values())
    assert hash(kind()) == hash(kind())


def test_devices_may_differ_from_rank_to_rank_and_precision_may_not() -> None:
    assert Copies(anchor_device="cpu", snapshot_device="cpu").facts() == Copies().facts()
    assert Copies(anchor_dtype=torch.bfloat16).facts() != Copies().facts()


def test_controllers_are_told_apart_by_their_kind() -> None:
    one, other, third = (Adapt(controller=c).facts() for c in (PaperController(), PaperController(), None))
    assert one == other != third


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "groups of Explorer": (_explorer, {"groups": "each"}, "groups must be left out: Explorer has it in knobs"),
    "level": (_explorer, {"level": False}, "level must be left out: Explorer"),
    "act": (_explorer, {"act": False}, "act must be left out: Explorer has nothing to watch"),
    "spread of the paper": (
        _cycle, {"ensemble": Ensemble(spread=0.2)}, "has it as ensemble_lr_spread_ratio; got spread=0.2"
    ),
    "outer with a schedule": (_auto, {"outer": "nesterov"}, 'pass gradients="local"; got outer=\'nesterov\''),
    "state with a schedule": (_auto, {"optimizer_state": "average"}, "optimizer_state must be left out: with"),
    "outer of the paper": (_cycle, {"outer": "fittest"}, "outer must be left out: with a schedule it needs replicas"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_use_is_refused(name: str) -> None:
    make, options, text = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**options)


@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
def test_a_default_that_is_spelled_out_is_no_mistake() -> None:
    _explorer(groups="together", level=None)


@pytest.mark.parametrize("steps", [None, 400])
@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
def test_base_values_wait_a_fiftieth_of_the_run_where_its_length_is_known(steps: int | None) -> None:
    assert _explorer(total_steps=steps)._run.policy.acting[0] == (steps or 0) // 50
    assert _auto(total_steps=steps, level=False)._run.policy.acting[0] == 8
    assert _auto(total_steps=steps)._run.policy.acting[0] == 0  # where the level is found
    assert _explorer(total_steps=steps, start_steps=3)._run.policy.acting[0] == 3


@pytest.mark.filterwarnings("ignore:Explorer compares replicas")
def test_two_runs_may_share_options_and_not_what_an_outer_step_remembers() -> None:
    shared = Nesterov(lr=0.5, momentum=0.3)
    outers = [
        _explorer(gradients="local", outer=shared)._run.replication.outer  # type: ignore[attr-defined]
        for _ in range(2)
    ]
    assert len({id(outer) for outer in (shared, *outers)}) == 3
    assert {repr(outer) for outer in outers} == {repr(shared)}


@pytest.mark.parametrize("given", [None, 3, 0])
def test_rollback_is_on_unless_told(given: int | None) -> None:
    rollback = _auto(max_rollbacks=given)._run.policy.rollback
    assert (0 if rollback is None else rollback.budget.max_rollbacks) == (20 if given is None else given)


def _trained(averaging: dict[str, Any]) -> tuple[list[float], bool]:
    model, optimizer = _model()
    schedule = CosineAnnealingLR(optimizer, 40)
    scheduler = AutoLR(
        schedule, model=model, interval=4, faults=Faults(max_rollbacks=20),
        ensemble=Ensemble(spread=0.1, gradients="local", averaging=Averaging(**averaging)),
    )  # fmt: skip
    for step in range(12):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)
    with scheduler.converged():
        weights = [float(w) for p in model.parameters() for w in p.detach().flatten()]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    mean = [moment.clone() for moment in moments]
    for moment in mean:
        dist.all_reduce(moment)
    equal = all(torch.allclose(m, s / dist.get_world_size()) for m, s in zip(moments, mean, strict=True))
    return weights, equal


def test_a_schedule_with_local_gradients_takes_an_outer_step() -> None:
    plain, nesterov, averaged = (
        launch(_trained, 2, how)
        for how in (
            {}, {"outer": Nesterov(lr=1.0, momentum=0.0)}, {"optimizer_state": "average"},
        )
    )  # fmt: skip
    assert plain[0][0] == plain[1][0] == nesterov[0][0] == nesterov[1][0]
    assert [equal for _, equal in averaged] == [True, True]
    assert [equal for _, equal in plain] == [False, False]
    assert averaged[0][0] != plain[0][0]
