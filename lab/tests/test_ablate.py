"""The ablation: when a run counts as diverged, what a warm noisy start is, and the command from end to end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hdet import warm_noisy_init
from hdet_lab import cli
from hdet_lab.commands.ablate import CONFIGURATIONS, AblateOptions, Divergence, find_divergence
from hdet_lab.experiment import final_loss
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.inputs import warm_noise
from hdet_lab.stacked.optim import SGD
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import QuadraticTask, stdlib_gpt

NAN, INF = math.nan, math.inf


def make_task() -> QuadraticTask:
    return QuadraticTask(dimension=4, condition=5.0, num_rows=256, batch_rows=8, total_steps=60)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0, 3.0, 2.0, 1.5, 1.4], None),
        ([4.0, 3.0, NAN, NAN], Divergence(2, recovered=False)),
        ([INF, 3.0, 2.0], Divergence(0, recovered=False)),
        ([2.0, 1.9, 2.5, 2.5, 2.5], Divergence(2, recovered=False)),
        ([2.0, 1.9, 2.5, 2.5, 2.5, 1.8], Divergence(2, recovered=True)),
        ([2.0, 1.9, 2.5, 2.5, NAN], Divergence(2, recovered=False)),
        ([2.0, 1.9, 2.5, 2.5, 1.9, 2.5, 2.5], None),  # never three in a row
        ([2.0, 1.9, 2.2, 2.2, 2.2], None),  # above by 16%
        ([2.0, 1.9, 2.5, 2.5], None),  # the run ends before the third
        ([9.0, 0.01, 0.1, 0.3, 0.2], None),  # little of the way down is lost
        ([9.0, 0.01, 0.01, 0.01, 3.0, 3.0, 3.0], Divergence(4, recovered=False)),
        ([1.0, 0.6, 1.0, 0.9, 1.0, 0.9], None),  # one lucky round
        ([1.0], None),
    ],
)
def test_a_divergence_is_a_rise_that_lasts(losses: Sequence[float], expected: Divergence | None) -> None:
    assert find_divergence(losses) == expected


def test_the_final_loss_is_that_of_the_last_fiftieth_of_a_run() -> None:
    assert final_loss([9.0] * 98 + [1.0, 2.0], [1] * 100) == 1.5
    assert final_loss([5.0, 7.0], [50, 50]) == 7.0  # no less than a round
    assert final_loss([9.0, 1.0, 4.0], [100, 2, 1]) == pytest.approx((2 * 1.0 + 4.0) / 3)
    assert math.isnan(final_loss([1.0, NAN], [50, 50]))


def test_the_noise_of_a_warm_start_has_the_size_of_eq_10_and_differs_between_replicas() -> None:
    task = stdlib_gpt(max_bytes=10_000, context=8, num_layers=1, width=32, num_heads=2)
    model = task.build(3)
    groups = task.groups(model)
    runs = [Run(lr=1.0, seed=3, warm_noise=0.05), Run(lr=1.0, seed=3)]
    noise = warm_noise([model, model], groups, runs, 3)
    assert noise is not None
    assert noise.shape == (2, 3, sum(p.numel() for p in model.parameters()))
    assert not noise[1].any()
    names = [name for group in groups.values() for name in group]
    parameters = dict(model.named_parameters())
    parts = torch.split(noise[0], [parameters[name].numel() for name in names], dim=-1)
    for name, part in zip(names, parts, strict=True):
        size = parameters[name].detach().square().mean().sqrt().item()
        expected = 0.05 * size
        tolerance = 5 / math.sqrt(2 * part.shape[-1])
        for one in part:
            assert one.square().mean().sqrt().item() == pytest.approx(expected, rel=tolerance)
        for a, b in ((0, 1), (0, 2), (1, 2)):
            cosine = nn.functional.cosine_similarity(part[a], part[b], dim=0).abs().item()
            assert cosine < 5 / math.sqrt(part.shape[-1])
    # What a single process draws is what replica 0 gets.
    alone = task.build(3)
    warm_noisy_init(alone, 0.05, seed=3)
    moved = torch.cat([dict(alone.named_parameters())[name].detach().flatten() for name in names])
    start = torch.cat([parameters[name].detach().flatten() for name in names])
    torch.testing.assert_close(moved, start + noise[0, 0], rtol=0, atol=1e-6)
    assert warm_noise([model], groups, runs[1:], 3) is None


def test_a_warm_run_starts_from_the_checkpoint_of_its_seed() -> None:
    task = make_task()
    checkpoints = {seed: {"theta": torch.full((4,), 10.0 + seed)} for seed in (0, 1)}
    ends: dict[tuple[int, float | None], torch.Tensor] = {}

    def keep(run: Run, model: nn.Module) -> None:
        ends[run.seed, run.warm_noise] = next(model.parameters()).detach().clone()

    runs = [
        Run(lr=1e-30, seed=seed, method="spread", num_replicas=2, warm_noise=nu)
        for seed in (0, 1)
        for nu in (None, 0.0, 0.1)
    ]
    sweep(task, runs, checkpoints=checkpoints, num_steps=20, on_end=keep)
    for seed in (0, 1):
        torch.testing.assert_close(ends[seed, None], next(task.build(seed).parameters()).detach())
        torch.testing.assert_close(ends[seed, 0.0], checkpoints[seed]["theta"])
        off = (ends[seed, 0.1] - checkpoints[seed]["theta"]).norm() / checkpoints[seed]["theta"].norm()
        assert 0.01 < off < 0.2  # the mean of two draws of size 0.1
    with pytest.raises(ValueError, match="warm_noise must have a checkpoint of its seed, but there is none of seed 2"):
        sweep(task, [Run(lr=1.0, seed=2, warm_noise=0.1)], checkpoints=checkpoints)


def test_only_chosen_runs_converge_and_noise_leaves_the_anchor_alone() -> None:
    task = make_task()
    models = [task.build(seed) for seed in (0, 1)]
    noise = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    engine = StackedModels(models, task.loss, task.groups(models[0]), num_replicas=3, optimizer=SGD(), noise=noise)
    start = engine.weights.clone()
    torch.testing.assert_close(start - engine.anchors.unsqueeze(1), noise)
    engine.converge(torch.tensor([False, True]))
    torch.testing.assert_close(engine.weights[0], start[0])
    torch.testing.assert_close(engine.weights[1], start[1].mean(0).expand(3, -1))
    engine.restore()
    torch.testing.assert_close(engine.weights, start)


def test_a_spread_without_a_controller_keeps_its_schedule() -> None:
    shared: dict[str, Any] = {"num_replicas": 4, "interval": 5}
    plain, spread, anchored = sweep(
        make_task(),
        [Run(lr=0.1, **shared), Run(lr=0.1, method="spread", **shared), Run(lr=0.1, method="anchored", **shared)],
        optimizer="sgd",
        dtype=torch.float64,
    )
    np.testing.assert_allclose(spread.base_lr, plain.base_lr)
    np.testing.assert_allclose(anchored.base_lr, plain.base_lr)
    for other in (spread, anchored):
        # Gradients are linear here, so the mean of the replicas is the plain run, and their losses are not.
        assert other.validation["loss"] == pytest.approx(plain.validation["loss"], rel=1e-9)
        assert np.abs(np.subtract(other.train_loss, plain.train_loss)).max() > 1e-6
    assert np.abs(np.subtract(spread.train_loss, anchored.train_loss)).max() > 1e-6


@pytest.mark.slow
def test_the_command_writes_every_configuration_of_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--optimizer sgd --seeds 0 1 --steps 200 --replicas 2 --temperature 0.01 --out out --json copy.json"
    sizes = [f"--task-option={text}" for text in ("dimension=20", "num_rows=256", "batch_rows=8", "noise=0.1")]
    assert cli.main(["ablate", "quadratic", *options.split(), *sizes]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (tmp_path / "copy.json").read_text() == (tmp_path / "out" / "results.json").read_text()
    rows = {(row["configuration"], row["seed"]): row for row in results["runs"]}
    assert set(rows) == {(c.name, seed) for c in CONFIGURATIONS for seed in (0, 1)}
    for name in ("git_commit", "data_sha256", "hardware", "torch", "python", "hdet", "time_s"):
        assert name in results
    config = results["config"]
    assert (config["low_lr"], config["high_lr"], config["warm_steps"], config["interval"]) == (0.01, 10.0, 20, 4)
    assert config["task_options"]["noise"] == 0.1
    assert "20 steps at a constant learning rate of 0.01" in results["warm_start"]
    assert re.search(r"Warm starts: one checkpoint for each seed", shown)
    for seed in (0, 1):
        assert rows["Baseline-Low", seed]["diverged_at_step"] is None
        assert rows["Baseline-High", seed]["diverged_at_step"] < 60
        assert rows["Baseline-High", seed]["final_train_loss"] is None
        warm, cold = rows["AutoLR gradient", seed], rows["AutoLR gradient without warm init", seed]
        assert warm["train_loss"][0] < cold["train_loss"][0]
        assert cold["validation"]["loss"] < 1.0
        assert rows["HDET", seed]["run"]["controller"] == {"momentum": 0.9, "rate": 0.5, "temperature": 0.01}
        # One checkpoint, one noise: the first step of these is the same. Those that average differ later.
        firsts = {rows[name, seed]["train_loss"][0] for name in ("Warm-Init", "HDET without auto-LR", "HDET")}
        assert max(firsts) == pytest.approx(min(firsts), rel=0.05)
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(name in page for name in ("Baseline-High", "AutoLR loss", "data_sha256", "<svg"))
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000


def test_learning_rates_go_by_task_and_optimizer() -> None:
    assert AblateOptions("shakespeare-gpt").lrs() == (1e-3, 1e-1)
    assert AblateOptions("fashion").lrs() == (1e-2, 10.0)
    assert AblateOptions("fashion", optimizer="sgd").lrs() == (1e-1, 3.0)
    assert AblateOptions("fashion", high_lr=3.0).lrs() == (1e-2, 3.0)


def test_warm_steps_end_with_the_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: QuadraticTask, step: int, *, seed: int = 0) -> torch.Tensor:
        if step >= 100:
            raise ValueError("step must be in [0, 100)")
        return torch.zeros(32, dtype=torch.long)

    monkeypatch.setattr(QuadraticTask, "rows", rows)
    assert cli.main(["ablate", "quadratic", "--steps", "100", "--warm-steps", "101"]) == 2
    assert "--warm-steps must not go beyond the data of quadratic, but got 101: step must" in capsys.readouterr().err
    assert cli.main(["ablate", "quadratic"]) == 2
    assert "--steps must not go beyond the data of quadratic, but got 1000: step must be" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["ablate", "quadratic", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU that torch can use, but there is none" in capsys.readouterr().err
