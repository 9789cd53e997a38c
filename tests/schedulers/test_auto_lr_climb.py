"""The climb in one process: what it gives back, how it ends, what it is saved in the middle of."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR

from climbing import LOW, TOTAL_STEPS, Run, make_optimizer, net, same
from hdet import AutoLR
from hdet.policy.climb import BLIND_SCALE, FIRST_SCALE
from options import grouped

HALF = TOTAL_STEPS // 2
FLAT = "ignore:the climb is over after .* the loss did not respond"

# A level is found by trying: what is undone afterwards is another matter.
pytestmark = pytest.mark.filterwarnings("ignore:the round that ended at step", "ignore:.* rounds of this run were")

# -- what it gives back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(("norm", "named"), [(False, False), (True, False), (True, True)])
def test_weights_buffers_and_optimizer_state_come_back_to_the_last_bit(
    kind: str, trained: bool, norm: bool, named: bool
) -> None:
    model = net(norm=norm)
    optimizer = make_optimizer(kind, model.parameters(), 1e-3)
    if trained:
        before = Run(model=model, optimizer=optimizer, climb=False, interval=5)
        before.advance(5)
        optimizer = make_optimizer(kind, model.parameters(), 1e-3)
        optimizer.load_state_dict(before.optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 1e-3
    run = Run(model=model, optimizer=optimizer, named=named)
    seen: list[Any] = []  # before each step; buffers have seen the first batch
    optimizer.register_step_pre_hook(lambda *_: seen.append(run.everything()) if not seen else None)
    run.step()
    assert bool(seen[0][1]) == (trained and kind != "sgd")  # state that is created lazily is gone again
    assert not same(run.everything(), seen[0])
    run.climb()
    assert same(run.everything(), seen[0])


@pytest.mark.parametrize(("kind", "lr"), [("sgd", 1e3), ("momentum", 1e-8), ("adam", 1e-8), ("adam", 1e-3)])
def test_it_finds_a_learning_rate_that_trains(kind: str, lr: float) -> None:
    run = Run(kind, lr=lr)
    first = run.loss().item()
    assert run.climb() <= TOTAL_STEPS // 10
    assert run.ending in ("turned", "broken", "limit")
    assert 1e-4 < run.peak < 1
    run.advance(TOTAL_STEPS)
    assert run.loss().item() < 0.02 * first


def test_afterwards_the_learning_rate_rises_along_a_line() -> None:
    run = Run("adam", interval=100, start_steps=TOTAL_STEPS)
    ended = run.climb()
    peak, warm = run.peak, int(0.06 * TOTAL_STEPS)
    lrs = [run.lrs[0], *(row[0][0] for row in run.advance(ended + 2 * warm))]
    assert lrs == pytest.approx([peak * min((k + 2) / warm, 1.0) for k in range(len(lrs))])


def test_trained_weights_are_climbed_from_where_asked_for() -> None:
    run = Run("adam", lr=1e-2, climb=False, total_steps=HALF)
    run.advance(HALF)
    trained = run.loss().item()
    again = Run("adam", model=run.model, climb=True)
    first = again.everything()
    again.climb()
    assert same(again.everything(), first)
    again.advance(TOTAL_STEPS)
    assert again.loss().item() < 1.2 * trained


def test_what_is_continued_does_not_climb() -> None:
    run = Run("adam")
    run.climb()
    run.advance(60)
    state = run.saved()
    resumed = Run("adam")
    resumed.load(state)
    assert not resumed.climbing
    assert run.advance(120) == resumed.advance(120)
    plain = Run("adam", lr=1e-3, climb=False)
    plain.advance(20)
    resumed = Run("adam", lr=1e-3)  # which would, by itself
    resumed.load(plain.saved())
    assert not resumed.climbing
    assert plain.advance(60) == resumed.advance(60)


def test_around_a_schedule_that_has_begun_there_is_none_unless_asked_for() -> None:
    def begun(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        optimizer.param_groups[0]["initial_lr"] = 1e-2
        return CosineAnnealingLR(optimizer, TOTAL_STEPS, last_epoch=99)

    assert not Run(schedule=begun).climbing
    run = Run(schedule=begun, climb=True)
    assert run.scheduler.last_epoch == 100
    assert run.climb() <= 100 + TOTAL_STEPS // 10
    assert run.advance(HALF)


# -- how it ends ----------------------------------------------------------------------------------------------------


class _Odd(Run):
    """A loss that has something wrong with it."""

    def __init__(self, how: str, **options: Any) -> None:
        self.how = how
        super().__init__(**options)

    def loss(self) -> Tensor:
        loss, step = super().loss(), self.scheduler.last_epoch
        if self.how == "constant":
            return 0 * loss + 2.5
        if self.how == "zero":
            return 0 * loss
        if (self.how == "nan at first" and step < 3) or self.how == "nan":
            return loss * math.nan
        return loss

    def batch(self) -> tuple[Tensor, Tensor]:
        x, y = super().batch()
        if self.how == "one batch":
            g = torch.Generator().manual_seed(0)
            x = torch.randn(24, 3, generator=g, dtype=torch.float64)
            y = torch.sin(x.sum(1, keepdim=True)) + 2
        return x, y


@pytest.mark.parametrize("how", ["constant", "zero"])
def test_a_loss_that_does_not_respond_leaves_the_schedule_as_it_is(how: str) -> None:
    run = _Odd(how, lr=0.1)
    with pytest.warns(UserWarning, match=r"over after \d+ steps at a learning rate of 0\.1, because the loss did not"):
        run.climb()
    assert run.ending == "flat"
    assert run.peak == pytest.approx(0.1)
    run.advance(HALF)


@pytest.mark.filterwarnings(FLAT, "ignore:Detected call of `lr_scheduler")
def test_a_model_that_is_frozen_has_nothing_to_climb() -> None:
    run = Run(lr=0.1)
    run.model.requires_grad_(False)
    first = run.everything()
    while run.climbing:
        run.scheduler.step(run.loss())  # there is nothing to step
    assert run.ending == "flat"
    assert same(run.everything(), first)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_weights_that_a_first_step_ruined_are_repaired(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    run = _Odd("nan at first", kind=kind)
    first = run.everything()
    with caplog.at_level(logging.INFO, logger="hdet"):
        for _ in range(3):
            run.step()
            assert same(run.everything(), first)
        run.climb()
    assert [record.message for record in caplog.records[:-1]] == [
        "the climb begins again, after a step that was not finite, at the first weights"
    ]
    assert run.ending in ("turned", "broken", "limit")
    run.advance(TOTAL_STEPS)
    assert super(_Odd, run).loss().item() < 0.1


@pytest.mark.filterwarnings("ignore:the round that ended at step", "ignore:max_rollbacks", "ignore:.* were undone")
def test_a_model_that_never_gives_anything_finite_does_not_climb_for_ever() -> None:
    run = _Odd("nan", lr=0.1)
    with pytest.warns(UserWarning, match="the climb is over after 40 steps"):
        run.climb()
    run.advance(80)  # what every run does then: rounds are undone, and that is said
    assert run.scheduler.history[-1].num_rollbacks > 0


def test_one_batch_over_and_over() -> None:
    run = _Odd("one batch")
    first = run.loss().item()
    run.climb()
    run.advance(HALF)
    assert run.loss().item() < 0.02 * first


def test_without_losses_it_says_so_and_goes_on_from_far_below() -> None:
    run = Run(lr=0.1)

    def step(num: int) -> None:
        for _ in range(num):
            run.optimizer.zero_grad()
            torch.autograd.backward(run.loss())
            run.optimizer.step()
            run.scheduler.step()

    with pytest.warns(UserWarning, match=r"over after 3 steps .* because no loss was given to step\(\)"):
        step(3)
    assert run.ending == "blind"
    assert run.peak == pytest.approx(0.1 * BLIND_SCALE)
    step(100)


def test_a_loss_in_every_other_step_is_enough() -> None:
    run = Run("adam")
    first = run.loss().item()
    while run.scheduler.last_epoch < TOTAL_STEPS:
        run.optimizer.zero_grad()
        loss = run.loss()
        torch.autograd.backward(loss)
        run.optimizer.step()
        run.scheduler.step(loss if run.scheduler.last_epoch % 2 else None)
    assert run.ending in ("turned", "broken", "limit")
    assert run.loss().item() < 0.02 * first


def test_losses_of_micro_batches_count_like_one() -> None:
    whole, run = Run(), Run()
    whole.climb()
    while run.climbing:
        run.optimizer.zero_grad()
        x, y = run.batch()
        for rows in (slice(0, 12), slice(12, 24)):
            loss = nn.functional.mse_loss(run.model(x[rows]), y[rows])
            run.scheduler.observe(loss)
            torch.autograd.backward(loss / 2)
        run.optimizer.step()
        run.scheduler.step()
    assert run.scheduler.last_epoch == whole.scheduler.last_epoch
    assert run.peak == pytest.approx(whole.peak)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_steps_that_a_grad_scaler_skips_are_no_way() -> None:
    run, plain = Run("adam"), Run("adam")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    rates, num_skipped = [], 5
    while run.climbing:
        run.optimizer.zero_grad()
        loss = run.loss()
        torch.autograd.backward(scaler.scale(loss))
        if run.scheduler.last_epoch < num_skipped:
            next(run.model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        rates.append(run.lrs[0])
        scaler.step(run.optimizer)
        scaler.update()
        run.scheduler.step(loss)
        if run.scheduler.last_epoch == num_skipped:
            assert run.scheduler._rounds.policy.climb.path == 0  # type: ignore[union-attr]
            assert run.weights == plain.weights
    assert rates[: num_skipped + 1] == [LOW * FIRST_SCALE] * (num_skipped + 1)
    assert run.ending in ("turned", "broken", "limit")
    plain.climb()
    assert 0.2 < run.peak / plain.peak < 5
    run.advance(TOTAL_STEPS)
    assert run.loss().item() < 0.1


def test_at_the_bound_of_the_scale_it_is_over() -> None:
    run = Run(lr=1e-2, bounds=(1e-6, 2.0))
    run.climb()
    assert run.ending == "limit"
    assert 5e-3 < run.peak <= 2e-2 * (1 + 1e-9)
    run = Run(lr=1e-2, bounds=(0.5, 2.0), climb=True)
    assert run.lrs == [5e-3]  # and not a hundredth
    run.climb()
    peak = run.peak
    assert 5e-3 * (1 - 1e-9) <= peak <= 2e-2 * (1 + 1e-9)
    rows = run.advance(
        run.scheduler.last_epoch + 3
    )  # the ramp starts below the bounds, and keeps within them in the end
    assert [lrs[0] for lrs, _ in rows] == pytest.approx([peak * k / 24 for k in (3, 4, 5)])


@pytest.mark.parametrize("total_steps", [1, 2, 5, 30])
@pytest.mark.filterwarnings(FLAT)
def test_a_run_that_is_hardly_longer_than_a_step_climbs_where_asked_to(total_steps: int) -> None:
    run = Run(climb=True, total_steps=total_steps)
    run.advance(total_steps)
    assert not run.climbing
    assert run.scheduler._rounds.finished
    assert all(map(math.isfinite, run.weights))


def test_where_the_last_step_is_one_of_the_climb_training_ends_there() -> None:
    run = Run()
    run.advance(4)
    weights = run.weights
    run.scheduler.finish()
    assert run.weights == weights
    assert run.scheduler.found().lrs == ()
    with run.scheduler.converged():
        assert run.weights == weights


# -- in its middle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("momentum", {}),
        ("adam", {"norm": True, "named": True}),
        ("adam", {"norm": True, "rollback": False}),
        ("sgd", {"lr": 1e3}),  # breaks at once and begins again
    ],
)
def test_a_state_of_any_of_its_steps_continues_as_if_nothing_had_happened(kind: str, options: dict[str, Any]) -> None:
    whole = Run(kind, **options)
    states = []
    while whole.climbing:
        whole.step()
        states.append(whole.saved())
    rows = whole.advance(50)
    assert len(states) > 8
    for step, state in enumerate(states, 1):
        if step % 8 != 1 and step < len(states) - 1:
            continue  # the first, every eighth one, and the last two
        resumed = Run(kind, **options)
        with torch.no_grad():
            for p in resumed.model.parameters():
                p.fill_(7.0)  # another start
        resumed.load(state)
        assert resumed.climbing == (step < len(states))
        found = resumed.advance(50)
        assert found[-len(rows) :] == rows
        assert same(resumed.everything(), whole.everything())


def test_buffers_that_hold_infinities_come_back_too() -> None:
    def masked() -> nn.Sequential:
        model = net(norm=True)
        model.register_buffer("mask", torch.full((2, 2), -math.inf))
        return model

    run = Run(model=masked())
    run.advance(3)
    resumed = Run(model=masked())
    resumed.load(run.saved())
    assert run.advance(50) == resumed.advance(50)


def test_weights_that_are_complex_or_expanded_can_be_saved() -> None:
    def make() -> Run:
        model = net()
        model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
        model.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
        return Run(model=model, forward=lambda x: model((x * model.phase).real), named=True)

    run, resumed = make(), make()
    run.advance(3)
    state = run.saved()["scheduler"]
    for p, q in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
        q.data.copy_(p.data)
    resumed.optimizer.load_state_dict(run.optimizer.state_dict())
    resumed.scheduler.load_state_dict(state)
    assert run.advance(50) == resumed.advance(50)


def test_without_the_first_weights_it_begins_again_from_those_at_hand(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("adam")
    run.advance(10)
    state = run.saved()
    state["scheduler"]["rounds"]["start"] = {}  # which torch.distributed.checkpoint does not read
    resumed = Run("adam")
    with caplog.at_level(logging.INFO, logger="hdet"):
        resumed.load(state)
    assert (
        "the saved state has no first weights for the climb to go back to: it begins again, from these" in caplog.text
    )
    assert resumed.lrs == [LOW * FIRST_SCALE]
    first = resumed.everything()
    assert 10 < resumed.climb() <= 10 + TOTAL_STEPS // 10
    assert same(resumed.everything(), first)
    resumed.advance(TOTAL_STEPS)
    assert resumed.loss().item() < 0.1


@pytest.mark.parametrize("rollback", [True, False])
def test_a_state_of_its_middle_can_be_gone_back_to_after_it(rollback: bool) -> None:
    run = Run("adam", rollback=rollback)
    run.advance(5)
    state = run.saved()
    rows = run.advance(50)
    assert (run.scheduler._rounds.averager.fallback is None) == (not rollback)  # its copy is free
    run.load(state)
    assert run.climbing
    assert run.advance(50) == rows
    other = Run("adam", rollback=rollback, climb=False)
    other.load(state)
    assert other.advance(50) == rows


def test_converging_in_its_middle_changes_nothing() -> None:
    plain, run = Run(), Run()
    while run.climbing:
        run.step()
        run.scheduler.converge()
        with run.scheduler.converged():
            copy.deepcopy(run.model.state_dict())
    plain.climb()
    assert run.lrs == plain.lrs
    assert run.weights == plain.weights


# -- what is beside it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["together", "each"])
def test_param_groups_keep_their_ratio(groups: str) -> None:
    model = net()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 1e-6}, {"params": model[2].parameters(), "lr": 3e-7}]
    )
    run = Run(model=model, optimizer=optimizer, groups=groups)
    while run.climbing:
        assert run.lrs[1] / run.lrs[0] == pytest.approx(0.3)
        run.step()
    assert run.lrs[1] / run.lrs[0] == pytest.approx(0.3)
    run.advance(HALF)
    assert (run.lrs[1] / run.lrs[0] == pytest.approx(0.3)) == (groups == "together")
    assert run.loss().item() < 0.5


@pytest.mark.parametrize(("groups", "lr"), [("together", None), ("each", 5e-9)])
def test_a_group_that_joins_compares_with_the_schedule(groups: str, lr: float | None) -> None:
    model = net()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=LOW)
    run = Run(model=model, optimizer=optimizer, groups=groups)
    run.advance(6)
    first = run.everything()[0]
    optimizer.add_param_group({"params": model[2].parameters()} | ({} if lr is None else {"lr": lr}))
    share = 1.0 if lr is None else 0.5
    run.step()
    assert run.lrs[1] / run.lrs[0] == pytest.approx(share)
    run.climb()
    assert run.lrs[1] / run.lrs[0] == pytest.approx(share)
    now = run.everything()[0]
    assert all(torch.equal(first[name], now[name]) for name in ("2.weight", "2.bias"))  # it had not moved
    run.advance(TOTAL_STEPS)
    assert run.loss().item() < 0.1


def test_without_rollbacks_it_restarts_and_frees_its_copy() -> None:
    run = Run("adam", rollback=False)
    first = run.everything()
    fallback: Any = run.scheduler._rounds.averager.fallback
    run.climb()
    assert same(run.everything(), first)
    assert not fallback.snapshot.taken
    assert run.scheduler._rounds.averager.fallback is None
    run.advance(TOTAL_STEPS)
    assert run.loss().item() < 0.1


def test_every_step_is_sampled_in_a_large_model_too() -> None:
    run = Run("adam", sample_every=8)
    run.climb()
    run.advance(100)
    records = run.scheduler.history
    climbed = [record for record in records if record.phase == "climb"]
    assert [record.step for record in climbed] == list(range(1, len(climbed) + 1))
    assert all(math.isfinite(record.control["slope"][0]) for record in climbed)
    assert run.ending in ("turned", "broken", "limit")


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: ExponentialLR(o, 0.99),
        lambda o: LambdaLR(o, lambda step: min((step + 1) / 100, 1.0)),  # its own warm-up is replaced
    ],
)
def test_under_a_schedule_that_moves_meanwhile(schedule: Any) -> None:
    run = Run("adam", lr=1e-5, schedule=schedule, total_steps=TOTAL_STEPS)
    run.climb()
    assert run.ending in ("turned", "broken", "limit")
    run.advance(HALF)
    assert run.loss().item() < 0.2


# -- what is told ---------------------------------------------------------------------------------------------------


def test_the_record_and_one_line_tell_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("adam")
    with caplog.at_level(logging.INFO, logger="hdet"):
        ended = run.climb()
        run.advance(TOTAL_STEPS)
    (told,) = [record.message for record in caplog.records if record.name == "hdet"]
    assert told.startswith(f"the climb is over after {ended} steps at a learning rate of ")
    assert told.endswith("; weights and optimizer state of step 0 are back")
    history = run.scheduler.history
    assert [record.phase for record in history[: ended + 1]] == ["climb"] * ended + ["level"]
    assert history[-1].phase == "hold"
    assert [record.events for record in history[: ended + 1]] == [()] * (ended - 1) + [(told,), ()]
    assert all(record.num_rollbacks == 0 for record in history)


def test_an_option_that_says_where_to_start_leaves_it_out() -> None:
    for options in ({"first_scale": 0.5}, {"gated": False}, {"climb": False}, {"bounds": (0.5, 2.0)}):
        model = net()
        optimizer = make_optimizer("sgd", model.parameters(), 0.1)
        scheduler = AutoLR(optimizer, total_steps=TOTAL_STEPS, **grouped(**options))
        assert not scheduler._rounds.policy.climbing, options
