"""AutoLR in one process: any schedule, the gradient signal, gate, hold, rollback, arguments."""

from __future__ import annotations

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hdet import Adapt, AutoLR, Copies, Ensemble, Faults, OneCycleAutoLR
from hdet.controllers import Decision, Evidence, EvidenceController, Hold
from hdet.controllers.hold import HoldState
from hdet.policy.rollback import Guard
from options import with_ensemble
from schedules import Wandering

STEPS = 60
AS_GIVEN = Adapt(level=False)

pytestmark = pytest.mark.filterwarnings("ignore:the round that ended at step")


OPTIMIZERS: dict[str, Callable[[Any, Any], Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
}


def parameters(count: int = 2) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, generator=g)) for _ in range(count)]


def two_groups(kind: str = "sgd", lr: Any = 0.125) -> Optimizer:
    first, second = parameters()
    other = lr.clone() * 0.5 if isinstance(lr, Tensor) else lr * 0.5
    return OPTIMIZERS[kind]([{"params": [first]}, {"params": [second], "lr": other}], lr)


def train_step(optimizer: Optimizer, scheduler: LRScheduler | None = None, *, noise: float = 0.0) -> Tensor:
    """A quadratic with its minimum at 1, and noise that depends on where the weights are, so that it never repeats."""
    found = [p for group in optimizer.param_groups for p in group["params"]]
    loss = sum(((p.detach() - 1) ** 2).sum() for p in found)
    assert isinstance(loss, Tensor)
    for p in found:
        p.grad = 2 * (p.detach() - 1) + noise * torch.sin(1000 * p.detach())
    optimizer.step()
    if isinstance(scheduler, AutoLR):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()
    return loss


def lrs_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def holding(schedule: LRScheduler, **options: Any) -> AutoLR:
    options = {"controller": Hold(), "signal": "gradient", "level": False, "interval": 4, **options}
    return AutoLR(schedule, **with_ensemble(**options))


# -- the schedule, unmoved ------------------------------------------------------------------------------------------


def test_one_replica_with_the_loss_signal_warns_and_follows_the_schedule() -> None:
    plain, mine = two_groups(), two_groups()
    theirs = OneCycleLR(plain, 0.1, STEPS)
    with pytest.warns(UserWarning, match="spread=0.1 compares the losses of replicas, and there is one"):
        auto = AutoLR(OneCycleLR(mine, 0.1, STEPS), ensemble=Ensemble(spread=0.1))
    for _ in range(STEPS):
        assert lrs_of(mine) == lrs_of(plain)
        train_step(plain, theirs)
        train_step(mine, auto)
    assert auto.history == []


def test_a_schedule_that_has_begun_goes_on() -> None:
    plain, mine = two_groups(), two_groups()
    theirs, wrapped = CosineAnnealingLR(plain, STEPS), CosineAnnealingLR(mine, STEPS)
    for _ in range(10):
        train_step(plain, theirs)
        train_step(mine, wrapped)
    auto = holding(wrapped)
    assert auto.last_epoch == 10
    for _ in range(30):
        assert lrs_of(mine) == lrs_of(plain)
        train_step(plain, theirs)
        train_step(mine, auto)
    assert [r.step for r in auto.history] == list(range(12, 41, 4))


# -- what moves it --------------------------------------------------------------------------------------------------


class Scripted:
    """Multiplies by what it is told, and keeps what it was shown."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.seen: list[Evidence] = []

    def init(self, num_knobs: int) -> HoldState:
        return HoldState()

    def update(self, state: Any, evidence: Evidence) -> tuple[Any, Decision]:
        self.seen.append(evidence)
        ones = np.ones(len(evidence.multipliers))
        return state, Decision(ones * self.factor, {"z": (0.0,) * len(ones)})


def test_the_scale_moves_after_start_steps_and_holds_in_the_last_stretch() -> None:
    optimizer = two_groups()
    adapt = Adapt(controller=Scripted(1.1), _start_steps=10, _hold_share=0.2)
    auto = AutoLR(CosineAnnealingLR(optimizer, 100), interval=5, adapt=adapt)
    for _ in range(100):
        train_step(optimizer, auto)
    acted = [record.step for record in auto.history if record.control]
    assert acted == list(range(15, 81, 5))
    assert [record.step for record in auto.history] == list(range(5, 101, 5))
    assert auto.history[-1].scales == pytest.approx((1.1 ** len(acted),))


def test_defaults_follow_the_length_of_the_schedule() -> None:
    controller = Scripted(1.01)
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, 1000), adapt=Adapt(controller=controller))
    for _ in range(1000):
        train_step(optimizer, auto)
    steps = [record.step for record in auto.history]
    assert steps == list(range(10, 1001, 10))  # a hundredth
    acted = [record.step for record in auto.history if record.control]
    assert (acted[0], acted[-1]) == (30, 800)  # after a fiftieth, before the last fifth
    slopes = [evidence.slopes for evidence in controller.seen]
    assert all(s is not None and s[0].shape == (1,) for s in slopes)


LENGTHS: dict[str, tuple[Callable[[Optimizer], LRScheduler], float]] = {
    "one-cycle": (lambda o: OneCycleLR(o, [0.1, 0.03], STEPS), STEPS),
    "cosine": (lambda o: CosineAnnealingLR(o, STEPS), STEPS),
    "linear then cosine": (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, STEPS - 10)], [10]),
        STEPS,
    ),
    "polynomial": (lambda o: PolynomialLR(o, STEPS, power=2.0), STEPS),
    "lambda": (lambda o: LambdaLR(o, lambda step: 0.5**step), math.inf),
    "exponential": (lambda o: ExponentialLR(o, 0.95), math.inf),
    "chained": (
        lambda o: ChainedScheduler([ConstantLR(o, 0.1, 4), ExponentialLR(o, 0.9)], optimizer=o),
        math.inf,
    ),
    "own": (Wandering, math.inf),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_length_of_a_schedule_is_found_where_it_has_one(name: str) -> None:
    build, length = LENGTHS[name]
    assert AutoLR(build(two_groups())).total_steps == length
    assert AutoLR(build(two_groups()), total_steps=77).total_steps == 77


def test_without_a_length_the_scale_never_holds_still() -> None:
    optimizer = two_groups()
    auto = AutoLR(ExponentialLR(optimizer, 0.999), adapt=Adapt(controller=Scripted(1.01)))
    for _ in range(500):
        train_step(optimizer, auto)
    assert [record.step for record in auto.history if record.control] == list(range(20, 501, 20))


def test_the_last_round_ends_with_the_run_full_or_not() -> None:
    optimizer = two_groups()
    auto = holding(CosineAnnealingLR(optimizer, 10), interval=4)
    for _ in range(10):
        train_step(optimizer, auto)
    assert [record.step for record in auto.history] == [4, 8, 10]


def test_a_start_far_too_low_rises_and_one_far_too_high_falls() -> None:
    for lr, direction in ((1e-4, 1), (0.9, -1)):
        optimizer = torch.optim.SGD(parameters(), lr=lr)
        auto = AutoLR(LambdaLR(optimizer, lambda step: 1.0), interval=5, total_steps=200, adapt=AS_GIVEN)
        for _ in range(100):
            train_step(optimizer, auto, noise=3.0)
        assert direction * math.log(auto.history[-1].scales[0]) > 0.5


def test_a_scale_for_each_group_or_one_for_all() -> None:
    for groups, count in (("together", 1), ("each", 2)):
        optimizer = two_groups()
        auto = AutoLR(CosineAnnealingLR(optimizer, STEPS), interval=4, **with_ensemble(groups=groups))
        for _ in range(20):
            train_step(optimizer, auto, noise=0.1)
        record = auto.history[-1]
        assert len(record.scales) == len(record.control["z"]) == count
        assert len(record.values) == len(record.base_values) == 2


def test_history_tells_the_round() -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, STEPS), interval=4, adapt=AS_GIVEN)
    losses, lrs = [], []
    for _ in range(8):
        lrs.append(lrs_of(optimizer))
        losses.append(train_step(optimizer, auto, noise=0.1).item())
    plain = CosineAnnealingLR(two_groups(), STEPS)
    schedule = []
    for _ in range(8):
        schedule.append([float(lr) for lr in plain.get_last_lr()])
        plain.optimizer.step()
        plain.step()
    first, second = auto.history
    assert (first.index, first.step, second.index, second.step) == (0, 4, 1, 8)
    for record, end in ((first, 4), (second, 8)):
        assert record.losses == pytest.approx((np.mean(losses[end - 4 : end]),))
        assert np.ravel(record.values) == pytest.approx(lrs[end - 1])
        assert record.base_values == pytest.approx([lr * record.scales[0] for lr in schedule[end - 1]])
        assert set(record.control) == {"slope", "standard_error", "z", "elasticity", "progress", "cost_over_gain"}
        assert (record.unhealthy, record.num_rollbacks, record.distance) == ((), 0, 0.0)
        assert record.converge_s > 0
    assert (record.probes, record.knobs) == ((), {})


def test_losses_may_be_observed_or_left_out() -> None:
    """The gradient has slopes without them; only the guard, and what earns a rise, have nothing to look at."""
    told, bare, stepped = two_groups(), two_groups(), two_groups()
    adapt = Adapt(controller=EvidenceController())
    schedulers = [AutoLR(CosineAnnealingLR(o, STEPS), interval=4, adapt=adapt) for o in (told, bare, stepped)]
    for _ in range(20):
        loss = train_step(told, None, noise=0.1)
        schedulers[0].observe(loss, 3.0)
        schedulers[0].observe(loss, 1.0)
        schedulers[0].step()
        train_step(bare, None, noise=0.1)
        schedulers[1].step()
        train_step(stepped, schedulers[2], noise=0.1)
        assert lrs_of(told) == lrs_of(bare) == lrs_of(stepped)
    assert all(math.isnan(record.losses[0]) for record in schedulers[1].history)
    for one, other in zip(schedulers[0].history, schedulers[2].history, strict=True):
        assert one.losses == pytest.approx(other.losses)
    assert schedulers[1].history[-1].scales != (1.0,)


def test_converge_and_converged_have_nothing_to_do_for_one_replica() -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, STEPS), interval=4)
    for _ in range(6):
        train_step(optimizer, auto)
    before = [p.tolist() for group in optimizer.param_groups for p in group["params"]]
    with auto.converged():
        assert [p.tolist() for group in optimizer.param_groups for p in group["params"]] == before
    auto.converge()
    assert [p.tolist() for group in optimizer.param_groups for p in group["params"]] == before


@pytest.mark.parametrize("anchor", ["start", "round", 2])
def test_what_the_anchor_is(anchor: Any) -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, STEPS), interval=4, adapt=Adapt(anchor=anchor, level=False))
    weights = [[p.tolist() for group in optimizer.param_groups for p in group["params"]]]
    for _ in range(5):
        for _ in range(4):
            train_step(optimizer, auto)
        weights.append([p.tolist() for group in optimizer.param_groups for p in group["params"]])
    kept = auto._run.anchor
    assert kept is not None
    assert [c.tolist() for c in kept.copies] == weights[{"start": 0, "round": 5, 2: 4}[anchor]]


def test_the_anchor_is_set_by_the_first_step_not_by_the_constructor() -> None:
    """A checkpoint that is loaded in between is where the run starts from."""
    optimizer = two_groups()
    auto = AutoLR(
        CosineAnnealingLR(optimizer, STEPS), interval=4, copies=Copies(anchor_dtype=torch.bfloat16, anchor_device="cpu")
    )
    with torch.no_grad():
        for group in optimizer.param_groups:
            group["params"][0].fill_(5.0)
    train_step(optimizer, auto)
    kept = auto._run.anchor
    assert kept is not None
    assert all(c.dtype == torch.bfloat16 and c.tolist() == [5.0] * 3 for c in kept.copies)


def test_the_scheduler_can_be_collected() -> None:
    optimizer = two_groups()
    auto = weakref.ref(AutoLR(CosineAnnealingLR(optimizer, STEPS)))
    gc.collect()
    assert auto() is None
    optimizer.step()


# -- rollback -------------------------------------------------------------------------------------------------------


def _break(optimizer: Optimizer, how: str) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.fill_(math.nan) if how == "nan" else p.mul_(1e3)


def _everything(optimizer: Optimizer) -> list[Any]:
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
            found.append((p.tolist(), state))
    return found


@pytest.mark.parametrize("snapshot_device", [None, "cpu"])
@pytest.mark.parametrize("how", ["nan", "jump"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_broken_round_is_undone(kind: str, how: str, snapshot_device: str | None) -> None:
    optimizer = two_groups(kind, 0.01)
    auto = AutoLR(
        CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=4, copies=Copies(snapshot_device=snapshot_device)
    )
    for _ in range(20):
        train_step(optimizer, auto, noise=0.1)
    healthy = _everything(optimizer)  # what the healthy round from 20 to 24 starts from
    for _ in range(4):
        train_step(optimizer, auto, noise=0.1)
    train_step(optimizer, auto, noise=0.1)
    _break(optimizer, how)
    for _ in range(3 if how == "nan" else 15):  # a loss that is up for fewer than 16 steps may come down by itself
        train_step(optimizer, auto, noise=0.1)
    assert _everything(optimizer) == healthy
    scale, record = auto.history[-2].scales[0], auto.history[-1]
    assert record.step == (28 if how == "nan" else 40)
    assert record.num_rollbacks == 1
    assert record.scales == pytest.approx((scale / 2,))
    assert record.control == {}
    assert lrs_of(optimizer)[0] == pytest.approx(float(auto.schedule.get_last_lr()[0]) * scale / 2)
    for _ in range(8):
        train_step(optimizer, auto, noise=0.1)
    assert auto.history[-1].num_rollbacks == 1


def test_a_break_in_the_first_round_goes_back_to_the_start() -> None:
    optimizer = two_groups("adam")
    start = _everything(optimizer)
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=4)
    for _ in range(2):
        train_step(optimizer, auto)
    _break(optimizer, "nan")
    for _ in range(2):
        train_step(optimizer, auto)
    assert _everything(optimizer) == start
    assert auto.history[-1].num_rollbacks == 1


def test_weights_tell_where_no_loss_does() -> None:
    optimizer = two_groups("adam")
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=4)
    for step in range(8):
        train_step(optimizer)
        if step == 5:
            _break(optimizer, "nan")
        auto.step()
    assert [record.num_rollbacks for record in auto.history] == [0, 1]
    assert all(math.isfinite(v) for p, _ in _everything(optimizer) for v in p)


def test_buffers_go_back_too() -> None:
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, model=model, interval=2)
    for _ in range(2):
        train_step(optimizer, auto)
    model.get_buffer("running_mean").fill_(math.nan)
    _break(optimizer, "nan")
    for _ in range(2):
        train_step(optimizer, auto)
    assert model.get_buffer("running_mean").tolist() == [0.0] * 3


def test_a_parameter_unfrozen_in_the_broken_round() -> None:
    first, second = parameters()
    second.requires_grad_(False)
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=2)

    def step() -> None:
        loss = sum((p**2).sum() for p in (first, second) if p.requires_grad)
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        auto.step(loss)

    proven = first.tolist()  # where a healthy round has started from
    step()
    step()
    second.requires_grad_(True)
    step()
    with torch.no_grad():
        first.fill_(math.nan)
    step()
    assert auto.history[-1].num_rollbacks == 1
    assert first.tolist() == proven
    assert all(math.isfinite(v) for v in second.tolist())


@pytest.mark.filterwarnings("ignore:max_rollbacks=2 are spent")
def test_after_max_rollbacks_in_a_row_it_is_an_error() -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=2, faults=Faults(max_rollbacks=2))
    for _ in range(2):
        _break(optimizer, "nan")
        train_step(optimizer, auto)
        train_step(optimizer, auto)
    _break(optimizer, "nan")
    train_step(optimizer, auto)
    text = r"training broke again at step 6 after 2 rollbacks without a healthy round between them; lower"
    with pytest.raises(RuntimeError, match=text):
        train_step(optimizer, auto)
    assert [record.num_rollbacks for record in auto.history] == [1, 2]


def test_without_rollback_broken_weights_are_an_error() -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, 200), adapt=AS_GIVEN, interval=2, faults=Faults(max_rollbacks=0))
    _break(optimizer, "nan")
    train_step(optimizer, auto)
    with pytest.raises(RuntimeError, match="weights of all 1 replicas are not finite at the converge of step 2"):
        train_step(optimizer, auto)


def test_data_that_change_are_accepted_and_cost_no_learning_rate() -> None:
    optimizer = two_groups()
    auto = AutoLR(CosineAnnealingLR(optimizer, 400), adapt=AS_GIVEN, interval=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(120):
            loss = train_step(optimizer)
            auto.step(loss + 50.0 * (step >= 20) + 500.0 * (step >= 80))
    assert sum("3 rounds were undone and learning rates lowered" in str(each.message) for each in told) == 1, "once"
    changed = [k for k, record in enumerate(auto.history) if any("have changed" in said for said in record.events)]
    assert len(changed) == 2
    assert auto.history[-1].num_rollbacks == 2 * Guard().max_strikes
    for k in changed:
        assert auto.history[k].scales == pytest.approx([8 * scale for scale in auto.history[k - 1].scales])


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interval": 0}, "interval must be an integer >= 1, but got interval=0"),
        ({"interval": 2.5}, "interval must be an integer >= 1, but got interval=2.5"),
        ({"total_steps": 0}, "total_steps must be an integer >= 1, but got total_steps=0"),
        ({"signal": "loss", "spread": 1.5}, "spread must be in [0, 1), but got spread=1.5"),
        ({"anchor": "end"}, 'anchor must be "start", "round" or a number of rounds >= 1, but got anchor=\'end\''),
        ({"anchor": 0}, 'anchor must be "start", "round" or a number of rounds >= 1, but got anchor=0'),
        ({"max_rollbacks": -1}, "max_rollbacks must be an integer >= 0, but got max_rollbacks=-1"),
        ({"act": 1}, "act must be True or False, but got act=1"),
        ({"level": 1.0}, "level must be None, True or False, but got level=1.0"),
        ({"seed": -1}, "seed must be an integer >= 0, but got seed=-1"),
        ({"bounds": (2.0, 3.0)}, "bounds must be a pair (low, high) with 0 < low <= 1 <= high < inf"),
        ({"bounds": 3.0}, "bounds must be a pair (low, high)"),
        ({"signal": "loss", "spread": math.nan}, "spread must be in [0, 1), but got spread=nan"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str) -> None:
    optimizer = two_groups()
    before = lrs_of(optimizer)
    with pytest.raises(ValueError, match=re.escape(text)):
        AutoLR(CosineAnnealingLR(optimizer, STEPS), **with_ensemble(**options))
    assert lrs_of(optimizer) == before


def test_what_is_no_plain_schedule_is_refused() -> None:
    optimizer = two_groups()
    plateau: Any = ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="schedule must not be ReduceLROnPlateau, which moves the learning rate"):
        AutoLR(plateau)
    nothing: Any = 0.1
    with pytest.raises(TypeError, match="schedule must be an LRScheduler or an Optimizer, but got float"):
        AutoLR(nothing)
    with pytest.raises(TypeError, match="schedule must not be a scheduler of hdet, but got OneCycleAutoLR"):
        AutoLR(OneCycleAutoLR(two_groups(), 0.1, 10))
    with pytest.raises(TypeError, match="schedule must not be a scheduler of hdet, but got AutoLR"):
        AutoLR(AutoLR(CosineAnnealingLR(two_groups(), 10)))


def test_a_step_past_the_end_of_onecycle_raises_and_changes_nothing() -> None:
    optimizer = two_groups()
    auto = AutoLR(OneCycleLR(optimizer, 0.1, 4), interval=1)
    for _ in range(4):
        train_step(optimizer, auto)
    before = lrs_of(optimizer), auto.last_epoch, len(auto.history), repr(auto.state_dict()["rounds"])
    with pytest.raises(ValueError, match="Tried to step 5 times"):
        auto.step(1.0)
    assert (lrs_of(optimizer), auto.last_epoch, len(auto.history), repr(auto.state_dict()["rounds"])) == before
