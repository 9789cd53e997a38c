"""Knobs: where each is written, in which space it moves, and what cannot be learned about it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from hdet import knobs
from hdet.checks import FloatArray
from hdet.ensemble.knobs import Knob, LearningRate
from hdet.ensemble.knobs.base import TO_SPACE, Space
from hdet.ensemble.knobs.knob_set import KnobSet

positions = st.floats(-30, 30)


def _bound(knob: Knob, optimizer: torch.optim.Optimizer | None = None) -> Knob:
    knob.bind(optimizer or torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    return knob


def _adamw(*groups: dict[str, Any], **options: Any) -> torch.optim.AdamW:
    own = [{"params": [nn.Parameter(torch.zeros(2))], **group} for group in groups or ({},)]
    return torch.optim.AdamW(own, lr=0.1, **options)


def _sgd(*groups: dict[str, Any]) -> torch.optim.SGD:
    own = [{"params": [nn.Parameter(torch.zeros(2))], **group} for group in groups]
    return torch.optim.SGD(own, lr=0.1)


def _field(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    return [group[name] for group in optimizer.param_groups]


# -- spaces -----------------------------------------------------------------------------------------------------------


@st.composite
def bound_knobs(draw: st.DrawFn) -> Knob:
    space: Space = draw(st.sampled_from(["linear", "log", "logit"]))
    if space == "linear":
        low = draw(st.floats(-1e3, 1e3))
        high = low + draw(st.floats(1e-2, 1e3))
        start = draw(st.floats(low, high))
    elif space == "log":
        low = draw(st.sampled_from([-math.inf, 0.0, 1e-12, 1e-3]))
        high = draw(st.sampled_from([1.0, 1e4, math.inf]))
        start = draw(st.floats(max(low, 1e-12), min(high, 1e6)))
    else:
        low = draw(st.sampled_from([-math.inf, 0.0, 0.1]))
        high = draw(st.sampled_from([0.999, 1.0, math.inf]))
        start = draw(st.floats(max(low, 1e-6), min(high, 1 - 1e-6)))
    return _bound(Knob("it", lambda: start, lambda v: None, low=low, high=high, space=space))


@given(bound_knobs())
def test_position_0_is_the_start_to_the_last_bit(knob: Knob) -> None:
    assert knob.value_at(0.0) == knob.start


@given(bound_knobs(), positions, positions)
def test_values_rise_with_the_position(knob: Knob, one: float, other: float) -> None:
    assume(abs(one - other) > 1e-9)
    low, high = sorted((one, other))
    assert knob.value_at(low) <= knob.value_at(high)


@given(bound_knobs(), positions)
def test_values_stay_inside_the_bounds(knob: Knob, position: float) -> None:
    assert knob.low <= knob.value_at(position) <= knob.high
    assert math.isfinite(knob.value_at(position))


@given(bound_knobs(), positions)
def test_positions_can_be_read_off_values(knob: Knob, position: float) -> None:
    low, high = knob.position_bounds()
    assert low <= 0 <= high
    inside = min(max(position, low), high)
    to = TO_SPACE[knob.space]
    assume(knob.space != "logit" or abs(to(knob.start) + inside * knob.unit) < 12)  # closer to 1 than floats are
    assert (to(knob.value_at(position)) - to(knob.start)) / knob.unit == pytest.approx(inside, abs=1e-6)


@given(bound_knobs())
def test_bounds_are_reached_exactly(knob: Knob) -> None:
    for position, bound in zip(knob.position_bounds(), (knob.low, knob.high), strict=True):
        if math.isfinite(position) and abs(position) > 1e-11:
            assert knob.value_at(position) == bound


def test_units_of_the_spaces() -> None:
    def make(space: Space, start: float, low: float, high: float) -> Knob:
        return _bound(Knob("it", lambda: start, lambda v: None, space=space, low=low, high=high))

    assert make("linear", 1.0, -1.0, 4.0).value_at(0.1) == pytest.approx(1.5)
    assert make("log", 2.0, 0.0, math.inf).value_at(0.1) == pytest.approx(2 * math.exp(0.1))
    odds = make("logit", 0.8, 0.0, 1.0).value_at(0.1)
    assert odds / (1 - odds) == pytest.approx(4 * math.exp(0.1))


@given(bound_knobs())
def test_a_set_bounds_positions_at_what_can_be_computed(knob: Knob) -> None:
    ((low, high),) = KnobSet([knob]).bounds()
    assert -30 <= low <= 0 <= high <= 30


# -- any scalar -------------------------------------------------------------------------------------------------------


def test_a_knob_of_a_getter_and_a_setter() -> None:
    held = {"value": 2.0}
    knob = Knob("it", lambda: held["value"], lambda v: held.update(value=v), low=0, high=10, spread=0.2)
    assert math.isnan(knob.start)
    _bound(knob)
    assert knob.start == 2.0
    knob.write(0.1)
    assert held["value"] == pytest.approx(3.0)
    knob.write(0.0)
    assert held["value"] == 2.0
    assert "start=2.0, low=0, high=10, space=linear, spread=0.2, adapt=True" in knob.facts()
    tensor = torch.tensor([0.5])
    assert _bound(Knob("t", lambda: tensor, tensor.fill_, low=0, high=1)).start == 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"space": "cubic"}, r'space of it must be one of "linear", "log", "logit", but got space=\'cubic\''),
        ({"acts": "never"}, r'acts of it must be one of "update", "forward", "training", but got acts=\'never\''),
        ({"spread": 1.0}, r"spread of it must be in \[0, 1\), but got spread=1.0"),
        ({"spread": -0.1}, r"spread of it must be in \[0, 1\), but got spread=-0.1"),
        ({"spread": math.nan}, r"spread of it must be in \[0, 1\), but got spread=nan"),
        ({"low": 1.0, "high": 1.0}, r"low of it must be below high, but got low=1.0 and high=1.0"),
        ({"low": 0.0}, r"low and high of it must be finite in the linear space, .* but got low=0.0 and high=inf"),
        ({}, r"low and high of it must be finite in the linear space, .* but got low=-inf and high=inf"),
    ],
)
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Knob("it", lambda: 1.0, lambda v: None, **settings)


@pytest.mark.parametrize(
    ("start", "settings", "text"),
    [
        (
            3.0,
            {"low": 0, "high": 2},
            r"it must start inside \[0, 2\], but got 3.0; pass other bounds, or another start",
        ),
        (math.nan, {"low": 0, "high": 2}, r"it must start inside \[0, 2\], but got nan"),
        (0.0, {"space": "log"}, r"it must start at a positive number in the log space, but got 0.0; start elsewhere"),
        (1.0, {"space": "logit"}, r"it must start at a positive number below 1 in the logit space, but got 1.0"),
    ],
)
def test_bad_starts(start: float, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _bound(Knob("it", lambda: start, lambda v: None, **settings))


# -- fields of param groups -------------------------------------------------------------------------------------------


def test_groups_keep_their_ratios_and_zeros() -> None:
    optimizer = _adamw({"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.02})
    knob = _bound(knobs.WeightDecay(), optimizer)
    assert knob.start == 0.1
    knob.write(0.5)
    assert _field(optimizer, "weight_decay") == pytest.approx([0, 0.1 * math.exp(0.5), 0.02 * math.exp(0.5)])
    assert _field(optimizer, "weight_decay")[0] == 0.0
    knob.write(0.0)
    assert _field(optimizer, "weight_decay") == pytest.approx([0.0, 0.1, 0.02], rel=1e-15)
    knob.write(100.0)
    assert _field(optimizer, "weight_decay") == pytest.approx([0.0, 10.0, 2.0])


@pytest.mark.parametrize(
    ("make", "name"), [(knobs.Momentum, "momentum"), (knobs.Momentum, "betas"), (knobs.Beta2, "betas")]
)
def test_no_group_leaves_the_bounds(make: type[knobs.Momentum], name: str) -> None:
    """A momentum of 1 or more diverges, whichever group has it."""
    if name == "momentum":
        optimizer: torch.optim.Optimizer = _sgd({"momentum": 0.5}, {"momentum": 0.9})
    else:
        optimizer = _adamw({"betas": (0.5, 0.9)}, {"betas": (0.9, 0.999)})
    knob = _bound(make(), optimizer)
    for position in (-30.0, -1.0, 1.0, 3.0, 30.0):
        knob.write(position)
        for value in _field(optimizer, name):
            got = value if name == "momentum" else value[make.index]
            assert 0 <= got <= knob.high


def test_epsilon() -> None:
    optimizer = _adamw({"eps": 1e-8}, {"eps": 1e-6})
    knob = _bound(knobs.Epsilon(), optimizer)
    knob.write(1.0)
    assert _field(optimizer, "eps") == pytest.approx([1e-8 * math.e, 1e-6 * math.e])
    knob.write(-30)
    assert _field(optimizer, "eps")[0] == 1e-12


def test_momentum_of_sgd_and_of_adam() -> None:
    optimizer = _sgd({"momentum": 0.9}, {"momentum": 0.0})
    knob = _bound(knobs.Momentum(), optimizer)
    knob.write(0.2)
    odds = 9 * math.exp(0.2)
    assert _field(optimizer, "momentum") == [pytest.approx(odds / (1 + odds)), 0.0]
    adam = _adamw({"betas": (0.9, 0.99)}, {"betas": (0.9, 0.95)})
    first, second = _bound(knobs.Momentum(), adam), _bound(knobs.Beta2(), adam)
    assert (first.name, second.name) == ("momentum", "beta2")
    first.write(0.2)
    assert _field(adam, "betas") == [(pytest.approx(odds / (1 + odds)), b) for b in (0.99, 0.95)]
    second.write(0.0)
    assert [betas[1] for betas in _field(adam, "betas")] == [0.99, 0.95]
    second.write(-0.3)
    odds = 99 * math.exp(-0.3)
    assert _field(adam, "betas")[0][1] == pytest.approx(odds / (1 + odds))
    assert all(type(betas) is tuple for betas in _field(adam, "betas"))


def test_tensors_in_param_groups_are_written_in_place() -> None:
    decay, beta = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    optimizer = _adamw()
    optimizer.param_groups[0].update(weight_decay=decay, betas=(beta, 0.999))
    pointers = decay.data_ptr(), beta.data_ptr()
    for knob in (knobs.WeightDecay(), knobs.Momentum()):
        _bound(knob, optimizer).write(0.3)
    group = optimizer.param_groups[0]
    assert group["weight_decay"] is decay
    assert group["betas"][0] is beta
    assert (decay.data_ptr(), beta.data_ptr()) == pointers
    assert decay.item() == pytest.approx(0.1 * math.exp(0.3))
    assert 0.9 < beta.item() < 0.95


def test_a_loaded_optimizer_state_does_not_unbind_a_knob() -> None:
    optimizer = _adamw({"weight_decay": 0.1}, {"weight_decay": 0.2})
    knob = _bound(knobs.WeightDecay(), optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    knob.write(1.0)
    assert _field(optimizer, "weight_decay") == pytest.approx([0.1 * math.e, 0.2 * math.e])


@pytest.mark.parametrize(
    ("knob", "optimizer", "text"),
    [
        (
            knobs.WeightDecay(),
            _adamw({"weight_decay": 0.0}, {"weight_decay": 0.0}),
            r"weight_decay must be above 0 in at least one param group to be explored, but got \[0.0, 0.0\] in AdamW",
        ),
        (knobs.Momentum(), _sgd({}), r"momentum must be above 0 in at least one param group"),
        (knobs.Epsilon(), _sgd({}), r"eps must be a setting of the optimizer, but its param groups have \['dampening'"),
        (knobs.Beta2(), _sgd({"momentum": 0.9}), r"beta2 is a setting of Adam and its relatives, but got SGD"),
        (
            knobs.WeightDecay(high=0.01),
            _adamw(weight_decay=0.1),
            r"weight_decay must start inside \[1e-06, 0.01\], but",
        ),
    ],
)
def test_what_an_optimizer_does_not_have_cannot_be_explored(
    knob: Knob, optimizer: torch.optim.Optimizer, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        knob.bind(optimizer)


@pytest.mark.parametrize("spread", [1.0, -0.1])
def test_a_learning_rate_with_a_bad_spread(spread: float) -> None:
    with pytest.raises(ValueError, match=rf"spread of learning_rate must be in \[0, 1\), but got spread={spread}"):
        LearningRate(spread=spread)


# -- dropout ----------------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Dropout(p)
        self.deep = nn.Sequential(nn.Linear(4, 4), nn.Dropout2d(p), nn.AlphaDropout(p))
        self.attention = nn.MultiheadAttention(4, 2, dropout=p)
        self.memory = nn.LSTM(4, 4, num_layers=2, dropout=p)
        self.shallow = nn.GRU(4, 4)
        self.rate = p
        self.tensor_rate: Tensor
        self.register_buffer("tensor_rate", torch.tensor(p))

    def rates(self) -> list[float]:
        deep: Any = self.deep
        return [self.first.p, deep[1].p, deep[2].p, self.attention.dropout, self.memory.dropout]


def test_dropout_everywhere() -> None:
    net = _Net()
    knob = _bound(knobs.Dropout(net))
    assert (knob.name, knob.start) == ("dropout", 0.2)
    knob.write(0.1)
    assert net.rates() == pytest.approx([0.29] * 5)
    assert (net.shallow.dropout, net.rate) == (0, 0.2)
    knob.write(-1)
    assert net.rates() == [0.0] * 5
    knob.write(1)
    assert net.rates() == [0.9] * 5


def test_dropout_by_name() -> None:
    net = _Net()
    pointer = net.tensor_rate.data_ptr()
    knob = _bound(knobs.Dropout(net, ["deep.1", "rate", "attention.dropout"]))
    assert knob.name == "dropout(deep.1, rate, attention.dropout)"
    knob.write(0.1)
    assert net.rates() == pytest.approx([0.2, 0.29, 0.2, 0.29, 0.2])
    assert net.rate == pytest.approx(0.29)
    buffer = _bound(knobs.Dropout(net, ["tensor_rate"]))
    buffer.write(0.1)
    assert net.tensor_rate.item() == pytest.approx(0.29)
    assert net.tensor_rate.data_ptr() == pointer


def test_dropout_changes_what_the_model_does() -> None:
    net = nn.Dropout(0.5)
    _bound(knobs.Dropout(net)).write(-1)
    assert torch.equal(net(torch.ones(100)), torch.ones(100))


def test_dropout_that_cannot_be_one_knob() -> None:
    net = _Net()
    net.first.p = 0.3
    with pytest.raises(
        ValueError, match=r"dropout must have one rate in all its places to be one knob, but got \[0.2,"
    ):
        knobs.Dropout(net)
    with pytest.raises(ValueError, match=r"model must contain dropout to explore it, but none was found"):
        knobs.Dropout(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"names must be of dropout modules or attributes of the model, but got 'no.th"
    ):
        knobs.Dropout(net, ["no.thing"])
    with pytest.raises(ValueError, match=r"deep must be a dropout module or a float, but got Sequential"):
        knobs.Dropout(net, ["deep"])


# -- attributes -------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.loose = torch.tensor(2.0)
        self.buffer: Tensor
        self.register_buffer("buffer", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.buffer


@pytest.mark.parametrize("name", ["scale", "loose", "buffer"])
def test_an_attribute_of_any_kind(name: str) -> None:
    owner = _Attention()
    before = getattr(owner, name)
    knob = _bound(knobs.Attribute(owner, name, low=0, high=10))
    assert (knob.name, knob.start) == (name, 2.0)
    knob.write(0.1)
    assert float(getattr(owner, name)) == 3.0
    if isinstance(before, Tensor):
        assert getattr(owner, name) is before
        assert not before.requires_grad
    assert ("buffer" in dict(owner.named_buffers())) is True


def test_label_smoothing_and_temperature() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    knob = _bound(knobs.LabelSmoothing(criterion))
    knob.write(0.1)
    assert criterion.label_smoothing == pytest.approx(0.15)
    knob.write(-1)
    assert criterion.label_smoothing == 0
    owner = _Attention()
    warm = _bound(knobs.Temperature(owner, "scale", name="warmth"))
    warm.write(0.1)
    assert warm.name == "warmth"
    assert owner.scale == pytest.approx(2 * math.exp(0.1))


@pytest.mark.parametrize("value", ["text", True, None, torch.ones(2), torch.tensor(1)])
def test_an_attribute_that_is_no_number(value: Any) -> None:
    owner = _Attention()
    owner.scale = value
    with pytest.raises(
        ValueError, match=r"scale of _Attention must be a number or a one-element float tensor, but got"
    ):
        knobs.Attribute(owner, "scale", low=0, high=1)


def test_an_attribute_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"nothing of _Attention must be a number .* but got None"):
        knobs.Attribute(_Attention(), "nothing", low=0, high=1)


def test_a_compiled_model_sees_a_buffer_change_without_compiling_again() -> None:
    owner = _Attention()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(owner, backend=counter)
    knob = _bound(knobs.Temperature(owner, "buffer"))
    for position in (0.0, 0.1, -0.2, 0.3):
        knob.write(position)
        assert compiled(torch.ones(3)).tolist() == pytest.approx([2 * math.exp(position)] * 3)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_clip_norm() -> None:
    knob = knobs.ClipNorm(2.0)
    _bound(knob)
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert knob.clip_([p]).item() == pytest.approx(5)
    assert p.grad.tolist() == pytest.approx([1.2, 1.6])
    knob.write(0.2)
    p.grad = torch.tensor([3.0, 4.0])
    knob.clip_([p])
    assert p.grad.norm().item() == pytest.approx(2 * math.exp(0.2))
    with pytest.raises(ValueError, match=r"clip_norm must start inside \[0.001, 1000\], but got 0.0"):
        _bound(knobs.ClipNorm(0))


# -- what can be learned ----------------------------------------------------------------------------------------------


def _dropout(**options: Any) -> Knob:
    return knobs.Dropout(nn.Dropout(0.1), **options)


@pytest.mark.parametrize(
    ("knob", "gradients", "has_probe", "text"),
    [
        (
            _dropout(),
            "shared",
            False,
            r'dropout cannot be adapted with .*the training loss.*Use gradients="local" and pr',
        ),
        (
            _dropout(),
            "local",
            False,
            r"dropout cannot be adapted with gradients='local' and the training loss: its trai",
        ),
        (
            _dropout(),
            "shared",
            True,
            r"with shared gradients the replicas' weights do not differ, and a probe would see",
        ),
        (knobs.WeightDecay(), "shared", False, r"weight_decay cannot be adapted .* Use probe=, pass adapt=False"),
        (knobs.WeightDecay(), "local", False, r"its training loss prefers no regularisation"),
        (knobs.LabelSmoothing(nn.CrossEntropyLoss()), "local", False, r"label_smoothing cannot be adapted with"),
        (knobs.Attribute(_Attention(), "scale", low=0, high=3), "shared", True, r"scale cannot be adapted with"),
    ],
)
def test_what_nothing_can_be_learned_about_is_refused(knob: Knob, gradients: str, has_probe: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        knob.check(gradients=gradients, has_probe=has_probe)


@pytest.mark.parametrize(
    ("knob", "gradients", "has_probe"),
    [
        (_dropout(), "local", True),
        (_dropout(adapt=False), "shared", False),
        (_dropout(check_signal=False), "shared", False),
        (knobs.WeightDecay(), "shared", True),
        (knobs.WeightDecay(), "local", True),
        (knobs.WeightDecay(adapt=False), "shared", False),
        (knobs.WeightDecay(check_signal=False), "shared", False),
        (knobs.LabelSmoothing(nn.CrossEntropyLoss()), "local", True),
        (knobs.Temperature(_Attention(), "scale"), "shared", False),
        (knobs.Momentum(), "shared", False),
        (knobs.Beta2(), "local", False),
        (knobs.Epsilon(), "shared", False),
        (knobs.ClipNorm(1.0), "shared", False),
        (knobs.Attribute(_Attention(), "scale", low=0, high=3, fair=True), "local", False),
        (knobs.Attribute(_Attention(), "scale", low=0, high=3, acts="forward"), "shared", False),
    ],
)
def test_what_can_be_learned_is_not(knob: Knob, gradients: str, has_probe: bool) -> None:
    knob.check(gradients=gradients, has_probe=has_probe)


# -- knobs as one -----------------------------------------------------------------------------------------------------


def _array(*values: float) -> FloatArray:
    return np.array(values)


def test_a_set_writes_all_its_knobs_and_names_differ() -> None:
    owner, optimizer = _Attention(), _adamw(weight_decay=0.1)
    chosen = KnobSet([knobs.Temperature(owner, "scale"), knobs.Epsilon()])
    chosen.bind(optimizer, gradients="shared", has_probe=False)
    chosen.write(_array(0.1, 0.2))
    assert owner.scale == pytest.approx(2 * math.exp(0.1))
    assert _field(optimizer, "eps") == pytest.approx([1e-8 * math.exp(0.2)])
    assert chosen.starts() == {"scale": 2.0, "eps": 1e-8}
    two = [knobs.Temperature(owner, "scale"), knobs.Temperature(_Attention(), "scale")]
    with pytest.raises(ValueError, match=r"knobs must have different names, but got \['scale', 'scale'\]; pass name="):
        KnobSet(two).bind(optimizer, gradients="shared", has_probe=False)


def test_in_the_probe_regularisers_are_at_their_base_and_other_knobs_are_not() -> None:
    owner, criterion = _Attention(), nn.CrossEntropyLoss(label_smoothing=0.1)
    seen: list[tuple[float, float]] = []

    def probe() -> float:
        seen.append((owner.scale, criterion.label_smoothing))
        if len(seen) == 2:
            raise KeyError("held-out data")
        return 1.5

    chosen = KnobSet([knobs.Temperature(owner, "scale"), knobs.LabelSmoothing(criterion)])
    chosen.bind(_adamw(), gradients="local", has_probe=True)
    own, base = _array(0.1, 0.2), _array(0.0, -0.1)
    chosen.write(own)
    mine = (owner.scale, criterion.label_smoothing)
    with chosen.training_at_base(own, base):
        probe()
    assert seen[0] == pytest.approx((mine[0], 0.05))
    assert (owner.scale, criterion.label_smoothing) == mine
    with pytest.raises(KeyError, match="held-out data"), chosen.training_at_base(own, base):
        probe()
    assert (owner.scale, criterion.label_smoothing) == mine


def test_a_set_refuses_the_starts_of_another() -> None:
    chosen = KnobSet([knobs.Temperature(_Attention(), "scale")])
    chosen.bind(_adamw(), gradients="shared", has_probe=False)
    with pytest.raises(ValueError, match=r"knobs must be those of the state, \['eps'\], but got \['scale'\]"):
        chosen.check_starts({"eps": 1e-8})
    with pytest.raises(ValueError, match=r"scale must start inside \[0.0001, 10000\], but got -1.0"):
        chosen.check_starts({"scale": -1})
    chosen.restart(chosen.check_starts({"scale": 3}))
    chosen.write(_array(0.0))
    assert chosen.starts() == {"scale": 3.0}
