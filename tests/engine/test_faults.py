"""The fault injector does what a fault says, to whom and when it says, and nothing else."""

from __future__ import annotations

import importlib
import math
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet.testing
import hdet.testing.faults
from hdet.testing import Fault, InjectedError, Injector, ReplicaError, assert_same_weights, collect_weights
from job import launch


def test_the_example_of_the_docstring_is_a_test_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", hdet.testing.faults.__doc__ or "", re.DOTALL)
    (tmp_path / "example_of_faults.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("example_of_faults").test_a_broken_replica_is_repaired()


def test_the_public_names_are_frozen() -> None:
    assert sorted(hdet.testing.__all__) == [
        *("Fault", "InjectedError", "Injector", "ReplicaError", "assert_same_weights", "check_controller"),
        *("check_signal", "collect_weights", "launch"),
    ]


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    torch.autograd.backward(model(torch.ones(4, 2)).sum())
    return model


def _faulty(tensors: list[Any]) -> list[int]:
    return [int((~torch.isfinite(t)).sum()) for t in tensors]


@pytest.mark.parametrize("kind", ["nan_weights", "inf_weights", "nan_gradient"])
def test_one_element_of_every_trained_tensor_is_struck(kind: Any) -> None:
    inject = Injector([Fault(kind, replica=1, step=2)], replica=1)
    for step in (1, 2, 3):
        model = _model()
        inject.loss(step, torch.ones(()))
        inject.gradients(step, model)
        inject.weights(step, model)
        parameters = list(model.parameters())
        expected = [int(step == 2)] * len(parameters)
        unharmed = [0] * len(parameters)
        assert _faulty(parameters) == (unharmed if kind == "nan_gradient" else expected)
        assert _faulty([p.grad for p in parameters]) == (expected if kind == "nan_gradient" else unharmed)
        if kind == "inf_weights" and step == 2:
            assert all(p.flatten()[0] == math.inf for p in parameters)


def test_explode_multiplies_the_weights() -> None:
    inject = Injector([Fault("explode", 0, 1), Fault("explode", 0, 2, amount=4.0)], 0)
    model = _model()
    before = collect_weights(model)
    inject.weights(1, model)
    inject.weights(2, model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * 4000)


def test_a_loss_and_a_step_are_struck_once_or_for_good() -> None:
    once = Injector([Fault("nan_loss", 0, 2), Fault("skip_step", 0, 3)], 0)
    assert [math.isnan(once.loss(step, torch.ones(()))) for step in range(1, 5)] == [False, True, False, False]
    assert [once.skips(step) for step in range(1, 5)] == [False, False, True, False]
    good = Injector([Fault("nan_loss", 0, 2, until=math.inf), Fault("skip_step", 0, 2, until=3)], 0)
    assert [math.isnan(good.loss(step, torch.ones(()))) for step in range(1, 5)] == [False, True, True, True]
    assert [good.skips(step) for step in range(1, 5)] == [False, True, True, False]


def test_others_are_left_alone() -> None:
    inject = Injector([Fault("error", 1, 1), Fault("nan_loss", 2, 1)], 0)
    assert inject.loss(1, torch.ones(())) == 1.0


def test_errors_and_pauses_come_with_the_first_hook_of_their_step_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    inject = Injector([Fault("slow", 0, 1, amount=0.2), Fault("error", 0, 2)], 0)
    inject.weights(1, _model())
    assert pauses == [0.2]
    inject.skips(1)
    assert pauses == [0.2]
    with pytest.raises(InjectedError, match="injected into replica 0 in step 2"):
        inject.gradients(2, _model())


def _dies(faults: list[Fault]) -> None:
    import torch.distributed as dist

    Injector(faults, dist.get_rank()).skips(1)
    dist.barrier()


def test_a_kill_kills() -> None:
    with pytest.raises(ReplicaError) as caught:
        launch(_dies, 2, [Fault("kill", 1, 1)], timeout_s=120)
    assert "the process ended without reporting an error" in caught.value.errors[1]


def test_faults_are_plain() -> None:
    fault = Fault("slow", 1, 2, until=math.inf, amount=0.5)
    assert pickle.loads(pickle.dumps(fault)) == fault


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "flood"}, "kind must be one of nan_weights, .*, slow, but got kind='flood'"),
        ({"replica": -1}, "replica must be an index >= 0, but got replica=-1"),
        ({"step": 0}, "step must be >= 1, the first step, but got step=0"),
        ({"until": 2}, "until must be at least step=3, but got until=2"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Fault(**{"kind": "error", "replica": 0, "step": 3, **options})


def _weights(**changes: Tensor) -> dict[str, Tensor]:
    return {"a": torch.ones(2), "b": torch.tensor(0.0), "c": torch.tensor([1, 2]), **changes}


def test_weights_are_copies_and_pickle() -> None:
    model = _model()
    weights = collect_weights(model)
    assert set(weights) == set(model.state_dict())
    again = pickle.loads(pickle.dumps(weights))
    assert_same_weights([weights, again, collect_weights(model)])
    Injector([Fault("explode", 0, 1)], 0).weights(1, model)
    assert_same_weights([weights, again])
    with pytest.raises(AssertionError, match=r"0\.weight differs between replicas 0 and 1, by up to"):
        assert_same_weights([weights, collect_weights(model)])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (_weights(b=torch.tensor(0.25)), "b differs between replicas 0 and 2, by up to 0.25"),
        (_weights(b=torch.tensor(-0.0)), "b differs between replicas 0 and 2, by up to 0"),
        (_weights(c=torch.tensor([1, 3])), "c differs between replicas 0 and 2, by up to 1"),
        (_weights(a=torch.full((2,), math.nan)), "a differs between replicas 0 and 2, by up to nan"),
        (_weights(a=torch.ones(3)), r"a must be alike .* \(2,\) torch.float32 and \(3,\) torch.float32"),
        (_weights(d=torch.ones(3)), r"replicas 0 and 2 must hold the same tensors, but only one has \['d'\]"),
    ],
)
def test_the_first_tensor_that_differs_is_named(other: dict[str, Tensor], text: str) -> None:
    assert_same_weights([_weights(), _weights()])
    with pytest.raises(AssertionError, match=text):
        assert_same_weights([_weights(), _weights(), other])


def test_equal_nans_are_equal() -> None:
    faulty = _weights(a=torch.full((2,), math.nan))
    assert_same_weights([faulty, {name: t.clone() for name, t in faulty.items()}])
