"""The warm noisy start (Eq. 10): how large the noise is, whose it is, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet import warm_noisy_init
from hdet.launch import launch

NU = 0.05


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(3.0 * torch.randn(200, 100, generator=g))
        self.small = nn.Parameter(0.01 * torch.randn(100, 150, generator=g))
        self.twin = nn.Parameter(0.01 * torch.randn(100, 150, generator=g))
        self.brief = nn.Parameter(torch.randn(100, 100, generator=g).bfloat16())
        self.long_ = nn.Parameter(torch.randn(100, 100, generator=g).double())
        self.strided = nn.Parameter(torch.randn(100, 120, generator=g).t())
        self.zero = nn.Parameter(torch.zeros(10))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(50, generator=g), requires_grad=False)
        self.counter = nn.Parameter(torch.arange(5), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.tied = self.small

    def forward(self, x: Tensor) -> Tensor:
        return x


def _noise(before: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    return {
        name: after.get_parameter(name).detach().double() - p.detach().double() for name, p in before.named_parameters()
    }


def _noised(**options: Any) -> dict[str, Tensor]:
    model = _Model()
    before = copy.deepcopy(model)
    warm_noisy_init(model, **{"nu": NU, **options})
    return _noise(before, model)


SIZED = ("large", "small", "twin", "brief", "long_", "strided")


def _rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


def test_noise_is_a_fraction_of_each_tensors_own_size() -> None:
    model, noise = _Model(), _noised()
    for name in SIZED:
        assert _rms(noise[name]) == pytest.approx(NU * _rms(model.get_parameter(name).detach()), rel=0.03), name
        assert abs(noise[name].mean().item()) < 4 * _rms(noise[name]) / math.sqrt(noise[name].numel())
    assert noise["zero"].tolist() == [0.0] * 10


def test_noise_can_be_a_fraction_of_the_whole_models_size_as_printed() -> None:
    trainable = [p.detach().double().flatten() for p in _Model().parameters() if p.requires_grad]
    whole = torch.cat(trainable)
    noise = _noised(scope="model")
    for name in ("large", "small", "twin", "long_", "strided"):
        assert _rms(noise[name]) == pytest.approx(NU * _rms(whole), rel=0.03), name
    assert _rms(noise["zero"]) > 0


def test_noise_is_normal_and_independent_between_tensors() -> None:
    noise = _noised()
    z = noise["large"].flatten() / _rms(noise["large"])
    assert (z.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.02)
    assert (z.abs() < 2).double().mean().item() == pytest.approx(0.9545, abs=0.01)
    both = torch.stack([noise["small"].flatten(), noise["twin"].flatten()])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 0.04


def test_noise_is_reproducible_and_depends_on_the_seed() -> None:
    one, again, other = _noised(seed=1), _noised(seed=1), _noised(seed=2)
    for name in SIZED:
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])


def test_noise_of_a_parameter_depends_on_its_name_not_on_its_neighbours() -> None:
    alone = nn.Module()
    alone.register_parameter("large", nn.Parameter(_Model().large.detach().clone()))
    before = copy.deepcopy(alone)
    warm_noisy_init(alone, NU)
    assert torch.equal(_noise(before, alone)["large"], _noised()["large"])


def test_frozen_integer_and_empty_parameters_and_buffers_stay_as_they_are() -> None:
    model = _Model()
    model.norm.running_mean = torch.randn(3)
    before = copy.deepcopy(model)
    warm_noisy_init(model, 0.5)
    assert torch.equal(model.frozen, before.frozen)
    assert torch.equal(model.counter, before.counter)
    assert model.empty.shape == (0, 3)
    for (name, buffer), (_, old) in zip(model.named_buffers(), before.named_buffers(), strict=True):
        assert torch.equal(buffer, old), name
    for name, p in model.named_parameters():
        old_parameter = before.get_parameter(name)
        assert (p.dtype, p.shape, p.stride(), p.requires_grad, p.grad) == (
            *(old_parameter.dtype, old_parameter.shape, old_parameter.stride(), old_parameter.requires_grad),
            None,
        )


def test_a_tied_parameter_gets_its_noise_once() -> None:
    assert _rms(_noised()["small"]) == pytest.approx(NU * _rms(_Model().small.detach()), rel=0.03)


def test_no_noise_at_nu_zero() -> None:
    assert all(not value.any() for value in _noised(nu=0.0).values())


def test_a_filter_chooses_by_name() -> None:
    seen = []

    def choose(name: str) -> bool:
        seen.append(name)
        return name.startswith(("large", "norm."))

    noise = _noised(filter=choose)
    assert {name for name, value in noise.items() if value.any()} == {"large", "norm.weight"}  # norm.bias is zero
    assert "norm.weight" in seen
    whole = _noised()
    assert torch.equal(noise["large"], whole["large"])


def test_with_the_models_scope_a_filter_chooses_whose_size_counts() -> None:
    noise = _noised(scope="model", filter=lambda name: name == "small")
    assert _rms(noise["small"]) == pytest.approx(NU * _rms(_Model().small.detach()), rel=0.03)


def test_the_global_random_states_are_not_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    _noised()
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert before[2] == random.getstate()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nu": -0.1}, r"nu must be a finite number >= 0, but got nu=-0\.1"),
        ({"nu": math.nan}, r"nu must be a finite number >= 0, but got nu=nan"),
        ({"nu": math.inf}, r"nu must be a finite number >= 0, but got nu=inf"),
        ({"nu": "0.1"}, r"nu must be a finite number >= 0, but got nu='0\.1'"),
        ({"scope": "layer"}, r'scope must be "tensor" or "model", but got scope=\'layer\''),
        ({"seed": -1}, r"seed must be an integer >= 0, but got seed=-1"),
        ({"seed": 0.5}, r"seed must be an integer >= 0, but got seed=0\.5"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_the_model_as_it_was(options: dict[str, Any], text: str) -> None:
    model = _Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=text):
        warm_noisy_init(model, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _in_a_group() -> dict[str, Any]:
    def numbers(model: nn.Module) -> list[float]:
        return model.get_parameter("weight").detach().flatten().tolist()

    out: dict[str, Any] = {}
    torch.manual_seed(0)
    start = nn.Linear(100, 50)
    out["start"] = numbers(start)

    bare = copy.deepcopy(start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warm_noisy_init(bare, NU)
    out["bare"], out["bare warnings"] = numbers(bare), [str(w.message) for w in caught]

    warnings.simplefilter("error")
    wrapped = DistributedDataParallel(copy.deepcopy(start))
    rng = torch.get_rng_state()
    warm_noisy_init(wrapped, NU, filter=lambda name: name == "weight")
    out["rng"] = torch.equal(rng, torch.get_rng_state())
    out["wrapped"] = numbers(wrapped.module)
    wrapped(torch.ones(4, 100)).sum().backward()
    out["after a step"] = numbers(wrapped.module)

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert alone is not None
    single = copy.deepcopy(start)
    warm_noisy_init(single, NU, process_group=alone)
    out["alone"] = numbers(single)
    return out


@pytest.fixture(scope="module")
def group() -> list[dict[str, Any]]:
    return launch(_in_a_group, 3)


def test_every_replica_draws_its_own_noise_under_ddp(group: list[dict[str, Any]]) -> None:
    start = np.array(group[0]["start"])
    noise = np.array([result["wrapped"] for result in group]) - start
    assert all(result["rng"] for result in group)
    size = NU * np.sqrt((start**2).mean())
    np.testing.assert_allclose(np.sqrt((noise**2).mean(axis=1)), [size] * 3, rtol=0.05)
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.06
    np.testing.assert_allclose(np.sqrt((noise.mean(axis=0) ** 2).mean()), size / math.sqrt(3), rtol=0.05)
    for result in group:
        assert result["after a step"] == result["wrapped"]  # DDP's forward and backward leave it alone


def test_a_bare_model_in_a_group_gets_the_same_noise_and_a_warning(group: list[dict[str, Any]]) -> None:
    for result in group:
        assert result["bare"] == result["wrapped"]
        [message] = result["bare warnings"]
        assert "not wrapped in DistributedDataParallel" in message
        assert "Wrap the model first" in message


def test_the_process_group_says_who_the_replicas_are(group: list[dict[str, Any]]) -> None:
    assert group[0]["alone"] == group[1]["alone"] == group[2]["alone"] == group[0]["wrapped"]
