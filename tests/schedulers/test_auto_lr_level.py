"""The first learning rate in one process: where a run starts does not matter; what may happen in its first steps."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from hdet import Adapt, AutoLR
from hdet.policy.level import MAX_TRIES, NUM_FIRST, PROBE_LR, TRUST
from job import told
from level_run import LOW, TOTAL_STEPS, Run, make_optimizer, net, same
from tiers import slow

STARTS = (1e-8, 100.0)
WARM = int(0.06 * TOTAL_STEPS)

Params = Iterable[Any]
Make = Callable[[Params, float], Optimizer]


# -- where it starts does not enter ---------------------------------------------------------------------------------


class Lion(Optimizer):
    """Steps of a fixed size."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(torch.lerp(p.grad, average, 0.9).sign_(), alpha=-float(group["lr"]))
                average.lerp_(p.grad, 0.01)


def _by_name(name: str, **options: Any) -> Make:
    return lambda params, lr: getattr(torch.optim, name)(params, lr=lr, **options)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": _by_name("AdamW"),
    "AdamW, fused": _by_name("AdamW", fused=True),
    "AdamW, foreach": _by_name("AdamW", foreach=True),
    "Adam": _by_name("Adam"),
    "Adam, tensor": lambda params, lr: torch.optim.Adam(params, lr=torch.tensor(lr)),
    "NAdam": _by_name("NAdam"),
    "SGD": _by_name("SGD"),
    "SGD, tensor": lambda params, lr: torch.optim.SGD(params, lr=torch.tensor(lr, dtype=torch.float64)),
    "SGD, momentum": _by_name("SGD", momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD, foreach": _by_name("SGD", momentum=0.9, foreach=True),
    "RMSprop": _by_name("RMSprop"),
    "Adagrad": _by_name("Adagrad"),
    "Adafactor": _by_name("Adafactor"),
    "Lion": Lion,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = _by_name("Muon")
MODELS = ("frozen", "from zero", "tied", "clipped", "bfloat16", "1:10", "10:1, each", "joined")
# Of the two guesses at an update the first is far too low; the first step moves biases of 0, but by less than rounding.
FAR_FROM_A_GUESS = (("SGD", "tiny gradients"), ("Adam", "huge gradients"))


class _Task:
    """A small network in single precision, one batch a step."""

    def __init__(self, make: Make, lr: float, kind: str = "", num_steps: int = 60) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4, bias=make is not OPTIMIZERS.get("Muon")) for _ in range(3)]
        if kind == "tied":
            layers[1].weight = layers[0].weight
        if kind == "frozen":
            layers[0].requires_grad_(False)
        if kind == "from zero":
            nn.init.zeros_(layers[2].weight)
            nn.init.zeros_(layers[2].bias)
        self.model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        if kind == "bfloat16":
            self.model.bfloat16()
        self.clipped = kind == "clipped"
        self.factor = {"tiny gradients": 1e-6, "huge gradients": 1e6}.get(kind, 1.0)
        if self.factor != 1:
            for layer in layers:
                nn.init.zeros_(layer.bias)
        groups: Any = list(self.model.parameters())
        if kind.startswith(("1:10", "10:1")):
            groups = [{"params": groups[:2]}, {"params": groups[2:], "lr": lr * (10 if kind == "1:10" else 0.1)}]
        self.optimizer = make(groups[:2] if kind == "joined" else groups, lr)
        adapt = Adapt(groups="each" if kind.endswith("each") else "together")
        self.scheduler = AutoLR(self.optimizer, total_steps=num_steps, adapt=adapt)
        self.rows: list[Any] = []
        for step in range(num_steps):
            if kind == "joined" and step == 7:
                self.optimizer.add_param_group({"params": groups[2:]})
            self.step()

    def step(self) -> None:
        g = torch.Generator().manual_seed(self.scheduler.last_epoch)
        first = next(self.model.parameters())
        x = torch.randn(16, 4, generator=g).to(first.dtype)
        self.optimizer.zero_grad()
        loss = self.factor * nn.functional.mse_loss(self.model(x), x.sin() + 1)
        torch.autograd.backward(loss)
        if self.clipped:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]  # one that joins has had another before
        self.scheduler.step(loss)
        self.rows.append((lrs, loss.item(), [p.detach().clone() for p in self.model.parameters()]))

    @property
    def history(self) -> list[dict[str, Any]]:
        return told(self.scheduler.history)


ALIKE = ("AdamW, foreach", "Adam", "NAdam", "SGD", "SGD, foreach", "RMSprop", "Adagrad")
"""Optimizers whose updates are, to a measurement of their size, like those of another one."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_muon_is_known_by_its_name(name: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    level = AutoLR(OPTIMIZERS[name](model.parameters(), 1e-3), total_steps=100)._run.policy.level
    assert level is not None
    assert level.spectral == (name == "Muon")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(slow(name, "", when=name in ALIKE) for name in OPTIMIZERS),
        *(("Adam", kind) for kind in MODELS),
        *FAR_FROM_A_GUESS,
    ],
)
def test_runs_from_anywhere_are_the_same_run(name: str, kind: str) -> None:
    first, other = (_Task(OPTIMIZERS[name], lr, kind) for lr in STARTS)
    assert same(other.rows, first.rows)
    assert repr(other.history) == repr(first.history)  # where NaN is NaN
    assert first.scheduler._run.policy.level.found  # type: ignore[union-attr]
    losses = [loss for _, loss, _ in first.rows]
    assert sum(losses[-10:]) < sum(losses[:10])
    if kind == "1:10":
        assert all(row[0][1] == pytest.approx(10 * row[0][0]) for row in first.rows)


def test_it_trains_and_every_step_does() -> None:
    for kind in ("sgd", "momentum", "adam"):
        run = Run(kind, total_steps=150)
        first, weights = run.loss().item(), run.weights()
        for _ in range(NUM_FIRST + 1):
            run.step()
            assert run.weights() != weights
            weights = run.weights()
        run.advance(150)
        assert run.loss().item() < 0.1 * first, kind


def test_the_learning_rate_rises_along_a_line() -> None:
    run = Run("adam", start_steps=TOTAL_STEPS)
    assert run.lrs() == [PROBE_LR]
    run.advance(NUM_FIRST)
    assert not run.searching
    for step in range(NUM_FIRST, 2 * WARM):
        assert run.level.done == (step >= WARM)
        assert run.lrs()[0] == pytest.approx(run.level.lr * min((step + 1) / WARM, 1.0))
        run.step()
    phases = [record.phase for record in run.scheduler.history]
    assert [record.step for record in run.scheduler.history][: NUM_FIRST + 1] == [1, 2, 3, 4, 8]
    assert set(phases[: phases.index("")]) == {"warm-up"}


def test_what_was_found_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("adam")
    with caplog.at_level(logging.INFO, logger="hdet"):
        run.advance(4 * WARM)
    (said,) = caplog.messages
    assert said.startswith(f"the learning rate starts from {run.level.lr:.3g}, at which a step changes the weights by ")
    assert [record.step for record in run.scheduler.history if record.events] == [WARM]


# -- nothing is left behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text", "tensor"),
    [
        ({"interval": 0}, "interval must be an integer >= 1", True),
        ({"max_lr": "high"}, "max_lr must be a finite number > 0", False),
        ({"probe": 3}, "probe", True),
        ({"weight_decay": "learn"}, "weight_decay", False),
        ({"faults": 3}, "faults must be an hdet.Faults", True),
    ],
)
def test_a_constructor_that_fails_leaves_learning_rates_as_they_were(
    options: dict[str, Any], text: str, tensor: bool
) -> None:
    model = net()
    lr: Any = torch.tensor(0.3, dtype=torch.float64) if tensor else 0.3
    groups: Any = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 7.0, "initial_lr": 5.0}]
    optimizer = torch.optim.SGD(groups, lr=lr)
    with pytest.raises((ValueError, TypeError), match=text):
        AutoLR(optimizer, total_steps=100, **options)
    first, second = optimizer.param_groups
    assert (float(first["lr"]), second["lr"], second["initial_lr"]) == (0.3, 7.0, 5.0)
    assert "initial_lr" not in first
    assert (first["lr"] is lr) == tensor or not tensor
    AutoLR(optimizer, total_steps=100)


# -- a checkpoint of any of the first steps -------------------------------------------------------------------------


ALL = (0, 1, 2, NUM_FIRST, NUM_FIRST + 1, 12, WARM - 3)
SOME = (1, NUM_FIRST, 12)


@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        ("adam", {}, ALL),
        ("momentum", {"max_rollbacks": 0}, SOME),
        ("sgd", {"total_steps": None}, SOME),
        ("adam", {"schedule": lambda o: OneCycleLR(o, 2e-3, TOTAL_STEPS)}, ALL),
        ("adam", {"schedule": lambda o: OneCycleLR(o, 30.0, TOTAL_STEPS), "norm": True, "named": True}, SOME),
    ],
)
def test_any_of_the_first_steps_can_be_continued(kind: str, options: dict[str, Any], steps: tuple[int, ...]) -> None:
    whole, until = Run(kind, **options), 3 * WARM // 2
    states, rows = {}, []
    for step in steps:
        rows += whole.advance(step)
        states[step] = whole.saved()
    rows += whole.advance(until)
    for step, state in states.items():
        resumed = Run(kind, **options)
        with torch.no_grad():
            for p in resumed.model.parameters():
                p.fill_(7.0)  # another start
        resumed.load(state)
        assert resumed.advance(until) == rows[step:], step
        assert same(resumed.everything(), whole.everything())
        assert resumed.scheduler.found() == whole.scheduler.found()


def test_what_is_continued_keeps_its_level() -> None:
    run, other = Run("adam"), Run("adam", lr=0.5)
    run.advance(2)
    state = run.saved()
    rows = run.advance(60)
    other.load(state)
    assert other.advance(60) == rows
    given = Run("adam", lr=1e-3, level=False)  # which has none
    given.advance(20)
    resumed = Run("adam")
    resumed.load(given.saved())
    assert not resumed.searching
    assert resumed.lrs() == given.lrs()
    assert resumed.advance(23) == given.advance(23)


def test_a_state_of_a_climb_is_refused() -> None:
    run = Run("adam")
    run.advance(6)
    before = run.saved()
    state = run.saved()["scheduler"]
    state["rounds"]["climb"] = {"at": 3}
    del state["rounds"]["level"]
    text = r"of a version of hdet whose runs began with a climb, .* start from its weights with a new scheduler"
    with pytest.raises(ValueError, match=text):
        run.scheduler.load_state_dict(state)
    assert same(run.saved(), before)


# -- what may happen in the first steps -----------------------------------------------------------------------------


class _Odd(Run):
    """Something is wrong in its first steps."""

    def __init__(self, how: str, kind: str = "adam", **options: Any) -> None:
        self.how = how
        super().__init__(kind, **options)

    def step(self) -> None:
        is_early = self.scheduler.last_epoch < 5
        self.optimizer.zero_grad()
        loss = self.loss()
        if is_early and self.how in ("nan", "nan, skipped"):
            loss = loss * math.nan
        torch.autograd.backward(loss)
        if not (is_early and self.how in ("skipped", "nan, skipped")):
            self.optimizer.step()
        self.scheduler.step(None if self.how == "no loss" else loss)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler", "ignore:the round that ended", "ignore:.* undone")
@pytest.mark.parametrize(
    ("how", "kind"), [("skipped", "momentum"), ("nan, skipped", "adam"), ("nan", "momentum"), ("no loss", "adam")]
)
def test_first_steps_that_show_nothing_only_take_time(how: str, kind: str) -> None:
    run, plain = _Odd(how, kind), Run(kind)
    first = run.loss().item()
    if how != "no loss":
        run.advance(5)
        assert run.searching
        assert run.lrs()[0] <= PROBE_LR
    with pytest.warns(UserWarning, match="no loss was given to step") if how == "no loss" else nullcontext():
        run.advance(WARM)
    plain.advance(WARM)
    assert run.level.done
    assert run.level.lr == pytest.approx(plain.level.lr, rel=0.5)
    assert run.lrs()[0] == pytest.approx(run.level.lr, rel=0.5)  # what broke at a negligible rate has lowered nothing
    run.advance(TOTAL_STEPS // 2)
    assert run.loss().item() < 0.2 * first


@pytest.mark.parametrize("schedule", [None, lambda o: LambdaLR(o, lambda step: 1.0)])
def test_an_optimizer_that_changes_nothing_gets_what_was_given(schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(lr=0.25, schedule=schedule, total_steps=TOTAL_STEPS, start_steps=TOTAL_STEPS)
    for p in run.model.parameters():
        p.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    with caplog.at_level(logging.INFO, logger="hdet"):
        run.advance(MAX_TRIES - 1)
        assert run.searching
        run.advance(60)
    assert caplog.messages == [
        f"no update of the weights could be measured in {MAX_TRIES} steps: training goes on at the learning rate that "
        "was given, 0.25"
    ]
    assert run.lrs() == [0.25]


def test_losses_of_micro_batches_are_those_of_a_step() -> None:
    whole, run = Run(), Run()
    whole.advance(40)
    while run.scheduler.last_epoch < 40:
        run.optimizer.zero_grad()
        x, y = run.batch()
        for rows in (slice(0, 12), slice(12, 24)):
            loss = nn.functional.mse_loss(run.model(x[rows]), y[rows])
            run.scheduler.observe(loss)
            torch.autograd.backward(loss / 2)
        run.optimizer.step()
        run.scheduler.step()
    assert run.lrs() == pytest.approx(whole.lrs())
    assert run.weights() == pytest.approx(whole.weights())


# -- a schedule -----------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer, float], LRScheduler]] = {
    "one cycle": lambda o, lr: OneCycleLR(o, lr, TOTAL_STEPS, cycle_momentum=False),
    "cosine": lambda o, lr: CosineAnnealingLR(_at(o, lr), TOTAL_STEPS),
    "warm-up from 0": lambda o, lr: LambdaLR(_at(o, lr), lambda step: min(step / 50, 1.0)),
    "constant": lambda o, lr: LambdaLR(_at(o, lr), lambda step: 1.0),
}


def _at(optimizer: Optimizer, lr: float) -> Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


@functools.cache
def _level() -> float:
    run = Run("adam")
    run.advance(WARM)
    return run.level.lr


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("one cycle", 3.0 / TRUST),
        ("one cycle", TRUST / 3.0),
        ("cosine", 1.5),
        ("warm-up from 0", 1.5),
        ("warm-up from 0", 0.4),
        ("constant", TRUST / 3.0),
    ],
)
def test_a_schedule_near_the_level_is_followed_to_the_last_bit(
    name: str, off: float, caplog: pytest.LogCaptureFixture
) -> None:
    """From the level where its peak is higher: along the warm-up, then by a constant factor a step."""
    peak = off * _level()
    run = Run("adam", schedule=lambda o: SCHEDULES[name](o, peak), total_steps=TOTAL_STEPS, start_steps=TOTAL_STEPS)
    plain = SCHEDULES[name](make_optimizer("adam", net().parameters()), peak)
    until = TOTAL_STEPS - 1 if off < 1 and name == "one cycle" else 5 * WARM
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hdet"):
        while run.scheduler.last_epoch < until:
            run.step()
            plain.optimizer.step()
            plain.step()
            taken = run.scheduler.last_epoch
            if run.searching:
                continue
            if off < 1 or taken >= 3 * WARM:
                assert run.lrs() == plain.get_last_lr()
            elif taken >= WARM:
                below = (run.level.lr / peak) ** (1 - (taken + 1 - WARM) / (2 * WARM))
                assert run.lrs() == pytest.approx([below * lr for lr in plain.get_last_lr()])
            elif name in ("cosine", "constant"):  # without a warm-up of their own
                below = run.level.lr / peak * (taken + 1) / WARM
                assert run.lrs() == pytest.approx([below * lr for lr in plain.get_last_lr()])
    assert run.level.follows_hint
    said = f"the schedule is approached from {run.level.lr:.3g} instead of {peak:.3g}"
    assert [said in text for text in caplog.messages] == [True] * (off > 1)
    steps = [record.step for record in run.scheduler.history if record.scales != (1.0,)]
    assert all(step < 3 * WARM for step in steps)


@pytest.mark.parametrize(("name", "off"), list(zip(SCHEDULES, (1e3, 1e-3, 1e3, 1e-3), strict=True)))
def test_a_schedule_far_from_the_level_is_rescaled(name: str, off: float, caplog: pytest.LogCaptureFixture) -> None:
    level = _level()
    run = Run("adam", schedule=lambda o: SCHEDULES[name](o, off * level), total_steps=TOTAL_STEPS, start_steps=400)
    plain = SCHEDULES[name](make_optimizer("adam", net().parameters()), off * level)
    first = run.loss().item()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hdet"):
        while run.scheduler.last_epoch < TOTAL_STEPS // 2:
            run.step()
            plain.optimizer.step()
            plain.step()
            if run.level.done:
                assert run.lrs()[0] == pytest.approx(plain.get_last_lr()[0] * run.level.scale)
    (said,) = caplog.messages
    assert said.startswith(f"the schedule's peak of {off * level:.3g} is ")
    assert said.endswith("; the schedule is rescaled to it")
    assert run.level.lr == pytest.approx(level, rel=0.5)
    assert run.loss().item() < 0.2 * first


def test_a_schedule_that_is_under_way_or_a_controller_of_ones_own_searches_only_where_asked_to() -> None:
    def begun(optimizer: Optimizer) -> CosineAnnealingLR:
        optimizer.param_groups[0]["initial_lr"] = 1e-2
        return CosineAnnealingLR(optimizer, TOTAL_STEPS, last_epoch=99)

    assert not Run(schedule=begun, lr=1e-2).searching
    assert Run().searching
    assert not Run(level=False).searching
    assert Run(level=False, lr=0.25).lrs() == [0.25]


# -- what bounds it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "with_schedule"), [(1e-12, False), (0.01, True), (0.5, False)])
def test_max_lr_holds_from_the_first_step_on(share: float, with_schedule: bool) -> None:
    schedule = (lambda o: LambdaLR(_at(o, 1.0), lambda step: min((step + 1) / 50, 1.0))) if with_schedule else None
    highest = share * _level()
    run = Run("adam", schedule=schedule, total_steps=TOTAL_STEPS, max_lr=highest)
    lrs = [run.lrs()[0], *(row[0][0] for row in run.advance(150))]
    assert max(lrs) <= highest * (1 + 1e-12)
    if share > 1e-4:
        assert max(lrs[:100]) == pytest.approx(highest)


@pytest.mark.parametrize(("begun", "share"), [(2, 0.5), (10, 0.5), (2, None)])
def test_a_group_that_joins_before_the_level_is_known_compares_with_what_was_given(
    begun: int, share: float | None
) -> None:
    model = net()
    run = Run(model=model, optimizer=make_optimizer("adam", model[0].parameters(), 1e-3), start_steps=TOTAL_STEPS)
    run.advance(begun)
    run.optimizer.add_param_group({"params": model[2].parameters()} | ({} if share is None else {"lr": share * 1e-3}))
    for (first, second), _ in run.advance(2 * WARM):
        assert second == pytest.approx(first * (share or 1.0))


def test_bounds_are_relative_to_the_level() -> None:
    run = Run("adam", bounds=(1.0, 1.0))
    run.advance(WARM)
    assert [row[0][0] for row in run.advance(100)] == [run.level.lr] * (100 - WARM)
    run = Run("adam", bounds=(0.5, 1.2))
    run.advance(100)
    scales = [record.scales[0] / run.level.lr for record in run.scheduler.history if record.step > WARM]
    assert 0.5 - 1e-12 <= min(scales) <= max(scales) <= 1.2 + 1e-12
    assert max(scales) == pytest.approx(1.2)


@pytest.mark.parametrize("begun", [0, 2, 10])
def test_a_cooldown_may_begin_in_the_first_steps(begun: int) -> None:
    run = Run("adam", total_steps=None)
    run.advance(begun)
    run.scheduler.cooldown(30)
    rows = run.advance(begun + 30)
    assert run.scheduler._run.finished
    assert run.lrs() == [0.0]
    assert all(math.isfinite(lr) and lr >= 0 for (lr,), _ in rows)
    assert max(lr for (lr,), _ in rows) > 100 * LOW


def test_a_run_of_unknown_length_finds_its_level_and_goes_on() -> None:
    run = Run("adam", total_steps=None)
    first = run.loss().item()
    run.advance(60)
    assert run.level.done
    run.advance(200)
    assert run.loss().item() < 0.15 * first


@pytest.mark.parametrize("total_steps", [1, 2, 3, 4, 5, 9])
def test_a_run_may_be_shorter_than_its_search(total_steps: int) -> None:
    run = Run("adam", total_steps=total_steps)
    rows = run.advance(total_steps)
    assert run.lrs() == [0.0]
    assert all(math.isfinite(x) for _, weights in rows for x in weights)


def test_converging_in_the_first_steps_changes_nothing() -> None:
    plain, run = Run(), Run()
    for _ in range(40):
        run.step()
        run.scheduler.converge()
        with run.scheduler.converged():
            run.saved()
    assert plain.advance(40)[-1] == (run.lrs(), run.weights())


def test_a_state_that_is_saved_in_the_middle_of_an_update_measures_nothing() -> None:
    """As by another thread, while the optimizer is at work."""
    plain, run = Run(), Run()
    states: list[Any] = []
    run.optimizer.register_step_pre_hook(lambda *_: states.append(run.scheduler.state_dict()))
    assert run.advance(40) == plain.advance(40)
    assert len(states) == 40


def test_trained_weights_get_a_level_too() -> None:
    run = Run("adam", total_steps=200)
    run.advance(200)
    trained = run.loss().item()
    again = Run("adam", model=run.model, total_steps=200)
    again.advance(200)
    assert again.loss().item() < 1.2 * trained


@pytest.mark.parametrize("at", [2, 7])
def test_a_schedule_that_was_loaded_first_is_continued_exactly(at: int) -> None:
    def made(saved: Any = None) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=10.0)
        schedule = CosineAnnealingLR(optimizer, 100)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
        scheduler = AutoLR(schedule, total_steps=100)
        if saved is not None:
            scheduler.load_state_dict(saved[3])
        return model, optimizer, schedule, scheduler

    def trained(run: tuple[Any, ...], until: int) -> list[float]:
        model, optimizer, _, scheduler = run
        rates = []
        while scheduler.last_epoch < until:
            x = torch.randn(16, 3, generator=torch.Generator().manual_seed(scheduler.last_epoch))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first = made()
    trained(first, at)
    saved = copy.deepcopy([part.state_dict() for part in first])
    assert trained(made(saved), 40) == trained(first, 40)


def test_gradients_far_below_eps_do_not_make_a_first_step_that_ruins() -> None:
    """Neither guess at an update holds: it is like SGD's, at a learning rate over eps."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    scheduler = AutoLR(optimizer, total_steps=200)
    x = torch.randn(64, 3, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    losses, sizes = [], []
    for _ in range(200):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        loss = (model(x) - y).square().mean() * 1e-12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        losses.append(loss.item())
        sizes.append(float(moved.norm() / before.norm()))
    assert max(sizes[:12]) < 0.02
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (torch.optim.Rprop, "Rprop uses it in its first step alone: no schedule acts on it"),
        (torch.optim.LBFGS, "LBFGS takes several, of lengths that it finds by itself"),
        (torch.optim.ASGD, "ASGD uses the one of the step before, and a decay of its own; use SGD"),
    ],
)
def test_an_optimizer_whose_steps_no_schedule_can_set_is_refused(make: Callable[..., Optimizer], rule: str) -> None:
    optimizer = make(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rule):
        AutoLR(optimizer, total_steps=10)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_lion_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The one optimizer with which it has lost by far more than noise."""
    with caplog.at_level(logging.INFO, logger="hdet"):
        for make in (Lion, torch.optim.Adam):
            AutoLR(make(net().parameters(), lr=1e-3), total_steps=100)
    assert sum("with Lion, AutoLR ended" in text for text in caplog.messages) == 1
