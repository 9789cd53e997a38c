"""OneCycleAutoLR where replicas play no part: its decay modes, its argument errors, inside SequentialLR."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR, SequentialLR

from hdet import OneCycleAutoLR
from job import launch

TOTAL_STEPS = 23


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


def _groups() -> list[dict[str, Any]]:
    first, second = _parameters()
    return [{"params": [first]}, {"params": [second], "lr": 0.02}]


def _sgd(lr: float | Tensor = 0.1) -> Optimizer:
    return torch.optim.SGD(_groups(), lr=lr, momentum=0.9)


def _sgd_tensor_lr() -> Optimizer:
    optimizer = torch.optim.SGD(_parameters(), lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    return optimizer


def _adagrad() -> Optimizer:
    return torch.optim.Adagrad(_groups(), lr=0.1)


def _update(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.1)
    optimizer.step()


def _snapshot(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The param groups without their parameters, tensors as what they hold."""
    return [
        {k: (v.dtype, v.item()) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _trajectory(optimizer: Optimizer, scheduler: LRScheduler, num_steps: int) -> list[Any]:
    """All a scheduler shows, at every step: param groups (LR, momentum, betas), get_last_lr, last_epoch, weights."""
    rows: list[Any] = []
    for step in range(num_steps + 1):
        if step:
            _update(optimizer)
            scheduler.step()
        last = [lr.item() if isinstance(lr, Tensor) else lr for lr in scheduler.get_last_lr()]
        weights = [p.tolist() for group in optimizer.param_groups for p in group["params"]]
        rows.append((_snapshot(optimizer), last, scheduler.last_epoch, weights))
    return rows


def test_auto_lr_without_spread_has_nothing_to_learn_and_is_onecyclelr() -> None:
    theirs, mine = _sgd(), _sgd()
    ours = OneCycleAutoLR(mine, 0.1, TOTAL_STEPS, enable_auto_lr=True, auto_lr_warmup_steps=0)
    assert _trajectory(theirs, OneCycleLR(theirs, 0.1, TOTAL_STEPS), TOTAL_STEPS) == _trajectory(
        mine, ours, TOTAL_STEPS
    )


def test_one_process_with_a_spread_warns_once_and_is_onecyclelr() -> None:
    theirs, mine = _sgd(), _sgd()
    with pytest.warns(UserWarning, match=r"ensemble_lr_spread_ratio=0\.5 has no effect with one replica") as caught:
        ours = OneCycleAutoLR(
            mine,
            0.1,
            TOTAL_STEPS,
            ensemble_lr_spread_ratio=0.5,
            model_sync_interval=4,
            enable_auto_lr=True,
            auto_lr_warmup_steps=4,
        )
    assert len(caught) == 1
    assert caught[0].filename == __file__
    got = _trajectory(mine, ours, TOTAL_STEPS)  # a warning would be an error
    assert got == _trajectory(theirs, OneCycleLR(theirs, 0.1, TOTAL_STEPS), TOTAL_STEPS)
    with ours.converged():
        ours.converge()
    assert ours.history == []


def _alone_in_a_group() -> tuple[bool, list[str]]:
    theirs, mine = _sgd(), _sgd()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = OneCycleAutoLR(mine, 0.1, TOTAL_STEPS, ensemble_lr_spread_ratio=0.5, model_sync_interval=4)
        got = _trajectory(mine, ours, TOTAL_STEPS)
    same = got == _trajectory(theirs, OneCycleLR(theirs, 0.1, TOTAL_STEPS), TOTAL_STEPS)
    return same, [str(w.message) for w in caught]


def test_one_process_in_a_process_group_warns_once_and_is_onecyclelr() -> None:
    [(same, messages)] = launch(_alone_in_a_group, 1)
    assert same
    assert len(messages) == 1
    assert "has no effect with one replica" in messages[0]


# -- torch's own habits -------------------------------------------------------------------------------------------


def test_tensor_lrs_are_filled_in_place_and_never_aliased() -> None:
    optimizer = _sgd_tensor_lr()
    lr = optimizer.param_groups[0]["lr"]
    scheduler = OneCycleAutoLR(optimizer, 0.1, 5)
    for _ in range(5):
        _update(optimizer)
        scheduler.step()
        [last] = scheduler.get_last_lr()
        assert optimizer.param_groups[0]["lr"] is lr
        assert isinstance(last, Tensor)
        assert last is not lr
        assert last == lr
        last.fill_(9.0)
        assert lr != 9.0
    scheduler.load_state_dict(scheduler.state_dict())
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_step_past_the_end_raises_as_torch_does() -> None:
    for make in (OneCycleLR, OneCycleAutoLR):
        optimizer = _sgd()
        scheduler = make(optimizer, 0.1, 5)
        for _ in range(5):
            _update(optimizer)
            scheduler.step()
        _update(optimizer)
        with pytest.raises(ValueError, match=r"Tried to step 6 times\. The specified number of total steps is 5"):
            scheduler.step()


def _sequential(optimizer: Optimizer, kind: type[OneCycleLR], *, first: bool = False) -> SequentialLR:
    linear = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cycle = kind(optimizer, 0.1, TOTAL_STEPS)
    return SequentialLR(optimizer, [cycle, linear] if first else [linear, cycle], milestones=[6])


@pytest.mark.parametrize("first", [False, True])
def test_inside_sequentiallr_it_is_onecyclelr(first: bool) -> None:
    theirs, mine = _sgd(), _sgd()
    reference, ours = _sequential(theirs, OneCycleLR, first=first), _sequential(mine, OneCycleAutoLR, first=first)
    assert _trajectory(theirs, reference, 20) == _trajectory(mine, ours, 20)


@pytest.mark.parametrize("save_at", [3, 6, 9])
def test_sequentiallr_resumes_from_its_state_before_and_after_the_milestone(save_at: int) -> None:
    whole_optimizer = _sgd()
    whole = _sequential(whole_optimizer, OneCycleAutoLR)
    _trajectory(whole_optimizer, whole, save_at)
    saved = copy.deepcopy((whole_optimizer.state_dict(), whole.state_dict()))
    resumed_optimizer = _sgd()
    resumed = _sequential(resumed_optimizer, OneCycleAutoLR)
    resumed_optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])

    def lrs(optimizer: Optimizer, scheduler: LRScheduler) -> list[Any]:
        return [row[0] for row in _trajectory(optimizer, scheduler, 10)]

    assert lrs(whole_optimizer, whole) == lrs(resumed_optimizer, resumed)


def test_loading_the_optimizer_leaves_another_schedulers_lr_alone() -> None:
    """Inside SequentialLR, while it is the other scheduler's turn, a loaded optimizer keeps its learning rate."""
    optimizer = _sgd()
    scheduler = _sequential(optimizer, OneCycleAutoLR)
    _trajectory(optimizer, scheduler, 3)
    before = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in optimizer.param_groups] == before


def test_resuming_by_last_epoch_without_a_loaded_optimizer_is_refused() -> None:
    optimizer = _sgd()
    before = copy.deepcopy(_snapshot(optimizer))
    with pytest.raises(KeyError, match=r"param 'initial_lr' is not specified in param_groups\[0\] when resuming"):
        OneCycleAutoLR(optimizer, 0.1, 20, last_epoch=5)
    assert _snapshot(optimizer) == before
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(ValueError, match=r"last_epoch must be -1 .* got last_epoch=5, .* have no .*'max_lr'"):
        OneCycleAutoLR(optimizer, 0.1, 20, last_epoch=5)


# -- wrong arguments ----------------------------------------------------------------------------------------------

AUTO: dict[str, Any] = {"enable_auto_lr": True, "auto_lr_warmup_steps": 5}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ensemble_lr_spread_ratio": 1.5}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=1\.5"),
    ({"ensemble_lr_spread_ratio": 1}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=1"),
    ({"ensemble_lr_spread_ratio": -0.1}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=-0\.1"),
    ({"ensemble_lr_spread_ratio": math.nan}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*=nan"),
    ({"ensemble_lr_spread_ratio": "0.1"}, r"ensemble_lr_spread_ratio must be in \[0, 1\), but got .*='0\.1'"),
    ({"model_sync_interval": 0}, r"model_sync_interval must be an integer >= 1, but got model_sync_interval=0"),
    ({"model_sync_interval": -3}, r"model_sync_interval must be an integer >= 1, but got model_sync_interval=-3"),
    ({"model_sync_interval": 2.5}, r"model_sync_interval must be an integer >= 1, but got model_sync_interval=2\.5"),
    ({"auto_lr_warmup_steps": -1}, r"auto_lr_warmup_steps must be an integer >= 0, but got auto_lr_warmup_steps=-1"),
    ({"loss_scale": 0.0}, r"loss_scale must be a finite number > 0, but got loss_scale=0\.0"),
    ({"loss_scale": -0.1}, r"loss_scale must be a finite number > 0, but got loss_scale=-0\.1"),
    ({"loss_scale": math.inf}, r"loss_scale must be a finite number > 0, but got loss_scale=inf"),
    ({"lr_of_lr": -1.0}, r"lr_of_lr must be a finite number >= 0, but got lr_of_lr=-1\.0"),
    ({"momentum_of_lr": 1.0}, r"momentum_of_lr must be in \[0, 1\), but got momentum_of_lr=1\.0"),
    ({"momentum_of_lr": -0.1}, r"momentum_of_lr must be in \[0, 1\), but got momentum_of_lr=-0\.1"),
    ({"div_factor": 0.0}, r"div_factor must be a finite number > 0, but got div_factor=0\.0"),
    ({"final_div_factor": 0}, r"final_div_factor must be a finite number > 0, but got final_div_factor=0"),
    ({"decay": "cosine"}, r'decay must be one of "schedule", "floor", "printed", but got decay=\'cosine\''),
    ({"decay": "floor"}, r"decay='floor' is the decay of the auto-LR phase; set enable_auto_lr=True"),
    ({**AUTO, "auto_lr_warmup_steps": 40}, r"must be smaller than the 40 total steps .*auto_lr_warmup_steps=40"),
    ({**AUTO, "auto_lr_warmup_steps": 99}, r"must be smaller than the 40 total steps .*lower it, e\.g\. to 8"),
    (
        {**AUTO, "total_steps": None, "epochs": 2, "steps_per_epoch": 4, "auto_lr_warmup_steps": 8},
        r"must be smaller than the 8 total steps",
    ),
    ({**AUTO, "decay": "printed"}, r"must not grow the learning rate.*final_div_factor / div_factor = 400 .*floor"),
    ({"max_lr": [0.1, 0.1, 0.1]}, r"max_lr must have the same length as optimizer\.param_groups.*has 3 values"),
    ({"total_steps": None}, r"You must define either total_steps OR \(epochs AND steps_per_epoch\)"),
    *(({"total_steps": n}, rf"Expected positive integer total_steps, but got {n}") for n in (0, -1, -2, -3)),
    ({"total_steps": None, "epochs": 0, "steps_per_epoch": 3}, r"Expected positive integer epochs, but got 0"),
    ({"pct_start": 1.5}, r"Expected float between 0 and 1 pct_start, but got 1\.5"),
    ({"anneal_strategy": "step"}, r"anneal_strategy must be one of 'cos' or 'linear', instead got step"),
    ({"base_momentum": [0.8]}, r"base_momentum must have the same length as optimizer\.param_groups"),
    ({"max_momentum": [0.9, 0.9, 0.9]}, r"max_momentum must have the same length as optimizer\.param_groups"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG, ids=[f"{i}-{next(iter(w))}" for i, (w, _) in enumerate(WRONG)])
def test_wrong_arguments_are_refused_and_leave_the_optimizer_as_it_was(wrong: dict[str, Any], text: str) -> None:
    optimizer = _sgd()
    before = copy.deepcopy(_snapshot(optimizer))
    with pytest.raises(ValueError, match=text):
        OneCycleAutoLR(optimizer, **{"max_lr": 0.1, "total_steps": 40, **wrong})
    assert _snapshot(optimizer) == before


def test_cycling_the_momentum_of_an_optimizer_without_one_is_refused_and_leaves_it_as_it_was() -> None:
    optimizer = _adagrad()
    before = copy.deepcopy(_snapshot(optimizer))
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1 with `cycle_momentum`"):
        OneCycleAutoLR(optimizer, 0.1, 40)
    assert _snapshot(optimizer) == before


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, but got Linear"):
        OneCycleAutoLR(nn.Linear(1, 1), 0.1, 40)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*lazy.*:UserWarning")
def test_parameters_without_a_shape_or_a_dense_layout_are_refused() -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match=r"parameter 0 is a lazy one; run one forward pass first"):
        OneCycleAutoLR(torch.optim.SGD(lazy.parameters(), lr=0.1), 0.1, 40)
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), sparse], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 1 has layout torch\.sparse_coo"):
        OneCycleAutoLR(optimizer, 0.1, 40)


def _sharded_optimizer() -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    before = copy.deepcopy(_snapshot(optimizer))
    try:
        OneCycleAutoLR(optimizer, 0.1, 40, ensemble_lr_spread_ratio=0.5)
    except ValueError as error:
        assert _snapshot(optimizer) == before
        return str(error)
    return ""


def test_an_optimizer_that_shards_its_state_is_refused() -> None:
    for message in launch(_sharded_optimizer, 2):
        assert "optimizer must not shard its state across ranks, but got ZeroRedundancyOptimizer" in message


# -- decay --------------------------------------------------------------------------------------------------------


def _lrs(num_steps: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD(_parameters(), lr=0.1)
    arguments = {"max_lr": 0.1, "total_steps": num_steps, "cycle_momentum": False, **arguments}
    scheduler = OneCycleAutoLR(optimizer, enable_auto_lr=True, **arguments)
    lrs = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        _update(optimizer)
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


def _one_cycle(num_steps: int, **arguments: Any) -> list[float]:
    return _lrs(num_steps, auto_lr_warmup_steps=0, **arguments)


@pytest.mark.parametrize(
    ("warmup", "interval", "three_phase"),
    [(0, 1, True), (7, 10, False), (30, 1000, True), (33, 1, False), (95, 10, True), (0, 1000, False)],
)
def test_floor_decay_reaches_min_lr_at_the_end_by_a_constant_factor(
    warmup: int, interval: int, three_phase: bool
) -> None:
    options: dict[str, Any] = {"three_phase": three_phase, "div_factor": 10.0, "final_div_factor": 100.0}
    lrs = _lrs(100, decay="floor", auto_lr_warmup_steps=warmup, model_sync_interval=interval, **options)
    schedule = _one_cycle(100, **options)
    assert lrs[-1] == pytest.approx(0.1 / 10 / 100, rel=1e-9)
    start = max(warmup, 29)  # torch's peak is at pct_start * total_steps - 1
    assert lrs[: start + 1] == schedule[: start + 1]
    ratios = [after / before for before, after in itertools.pairwise(lrs[start:])]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-9)
    if warmup <= 29:
        assert max(lrs) == pytest.approx(0.1)
        assert ratios[0] == pytest.approx((1 / 1000) ** (1 / 71))


def test_printed_decay_reproduces_the_papers_figure() -> None:
    """Eq. 8 with f_div = 9 and f_final = 0.5: a constant gamma a round, and an 18th of the start after K rounds."""
    total, warmup, interval = 480, 100, 10
    lrs = _lrs(
        total,
        decay="printed",
        auto_lr_warmup_steps=warmup,
        model_sync_interval=interval,
        div_factor=9.0,
        final_div_factor=0.5,
        pct_start=0.1,
    )
    num_rounds = (total - warmup) / interval
    gamma = 1 - math.exp(-math.log(9 / 0.5) / num_rounds)
    assert gamma > 0
    for k in range(int(num_rounds)):
        assert lrs[warmup + (k + 1) * interval] == pytest.approx(lrs[warmup + k * interval] * (1 - gamma), rel=1e-9)
    assert lrs[total] == pytest.approx(lrs[warmup] / 18, rel=1e-9)


def test_printed_decay_with_equal_factors_is_constant() -> None:
    lrs = _lrs(50, decay="printed", auto_lr_warmup_steps=20, div_factor=5.0, final_div_factor=5.0)
    assert lrs[21:] == pytest.approx([lrs[20]] * 30)


@pytest.mark.parametrize("warmup", [0, 3, 28, 61])
@pytest.mark.parametrize("decay", ["schedule", "floor"])
def test_any_warm_up_reaches_the_peak_and_never_freezes(warmup: int, decay: str) -> None:
    """Also where it is no multiple of the interval, or ends before the peak."""
    lrs = _lrs(100, decay=decay, auto_lr_warmup_steps=warmup, model_sync_interval=10)
    assert max(lrs) == pytest.approx(0.1, rel=1e-6)
    assert all(after != before for before, after in itertools.pairwise(lrs))
    if decay == "schedule":
        assert lrs == _one_cycle(100)


def test_momentum_cycles_on_under_every_decay() -> None:
    torch_optimizer = _sgd()
    reference = [
        row[0][0]["momentum"] for row in _trajectory(torch_optimizer, OneCycleLR(torch_optimizer, 0.1, 50), 50)
    ]
    for decay in ("schedule", "floor"):
        optimizer = _sgd()
        scheduler = OneCycleAutoLR(optimizer, 0.1, 50, enable_auto_lr=True, auto_lr_warmup_steps=9, decay=decay)
        assert [row[0][0]["momentum"] for row in _trajectory(optimizer, scheduler, 50)] == reference
