"""The comparison: its methods against slow and obvious versions of themselves, and the command from end to end."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from hdet_lab import baselines, cli
from hdet_lab.commands.compare import CompareOptions, run_method
from hdet_lab.experiment import Experiment
from hdet_lab.recipes import BaselineMethod, schedule_table
from hdet_lab.reports import compare as compare_report
from hdet_lab.stacked.engine import StackedModels
from hdet_lab.stacked.optim import Adam
from hdet_lab.stacked.population import FACTORS, exploit, log_uniform, train_populations
from hdet_lab.stacked.run import Run
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import QuadraticTask, TextTask, batch_of

SIZES = ("dimension=4", "num_rows=256", "batch_rows=8", "noise=0.1")
SMALL = [f"--task-option={text}" for text in SIZES]
NAN, INF = math.nan, math.inf

# Stand-ins for optional packages: what they are given is what is tested.
STUBS = {
    "prodigyopt": """
import torch
class Prodigy(torch.optim.Adam):
    def __init__(self, parameters, lr, safeguard_warmup):
        super().__init__(parameters, lr=lr, betas=(0.9, 0.95))
""",
    "dadaptation": "import torch\nDAdaptAdam = torch.optim.Adam\n",
    "mechanic_pytorch": "def mechanize(kind):\n    return kind\n",
    "dog": """
import copy
import torch
class DoG(torch.optim.SGD):
    def __init__(self, parameters, reps_rel):
        super().__init__(parameters, lr=0.1)
class PolynomialDecayAverager:
    def __init__(self, model):
        self.model = model
    def step(self):
        self.averaged_model = copy.deepcopy(self.model)
""",
    "schedulefree": """
import torch
class AdamWScheduleFree(torch.optim.AdamW):
    def __init__(self, parameters, lr, warmup_steps):
        super().__init__(parameters, lr=lr)
        self.training = False
    def train(self):
        self.training = True
    def eval(self):
        self.training = False
    def step(self):
        assert self.training
        super().step()
""",
}


@pytest.fixture
def _stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in STUBS:  # monkeypatch puts back what there was before, and leaves alone what has come since
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _nothing_is_left_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class DoubleText(TextTask):
    """In float64, so that rounding does not hide a difference."""

    def build(self, seed: int = 0) -> nn.Module:
        return super().build(seed).double()


def make_task() -> DoubleText:
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 11, 600)).cumsum(0) % 11
    return DoubleText(
        "tiny", text, 11, total_steps=30, batch_rows=8, num_validation=12, context=6, num_layers=1, width=8, num_heads=2
    )


# -- population-based training ----------------------------------------------------------------------------------


def test_the_worst_quarter_copies_the_best_quarter() -> None:
    losses = np.array([3.0, 1.0, NAN, 2.0, 5.0, 4.0, 2.5, 0.5])
    lrs = np.arange(1.0, 9.0)
    sources, changed = exploit(losses, lrs, seed=0, round_index=0)
    assert sources.tolist() == [0, 1, 7, 3, 1, 5, 6, 7]  # the broken one copies the best, the next the second best
    kept = [0, 1, 3, 5, 6, 7]
    assert_allclose(changed[kept], lrs[kept])
    assert changed[2] / lrs[7] in FACTORS
    assert changed[4] / lrs[1] in FACTORS
    again = exploit(losses, lrs, seed=0, round_index=0)
    assert_allclose(again[1], changed)
    drawn = {exploit(losses, lrs, seed=0, round_index=k)[1][2] / lrs[7] for k in range(20)}
    assert drawn == set(FACTORS)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0], [0]),
        ([2.0, 1.0], [1, 1]),
        ([2.0, 1.0, 3.0], [0, 1, 1]),
        ([NAN, NAN, NAN, NAN], [0, 1, 2, 3]),  # nothing is worth copying
        ([NAN, INF, NAN, 1.0], [0, 1, 3, 3]),
    ],
)
def test_small_and_broken_populations(losses: list[float], expected: list[int]) -> None:
    sources, _ = exploit(np.array(losses), np.ones(len(losses)), seed=0, round_index=0)
    assert sources.tolist() == expected


def test_first_learning_rates_fill_their_range_and_are_reproducible() -> None:
    state = np.random.get_state(legacy=False)["state"]["key"]
    drawn = log_uniform(1e-5, 1e-1, 2000, seed=0)
    assert drawn.min() > 1e-5
    assert drawn.max() < 1e-1
    assert np.log10(drawn).mean() == pytest.approx(-3.0, abs=0.1)
    assert_allclose(drawn, log_uniform(1e-5, 1e-1, 2000, seed=0))
    assert not np.allclose(drawn, log_uniform(1e-5, 1e-1, 2000, seed=1))
    assert_allclose(np.random.get_state(legacy=False)["state"]["key"], state)


def slow_population(task: TextTask, seed: int, num_workers: int, interval: int, num_steps: int) -> dict[str, Any]:
    """One model and one optimizer for each worker."""
    table = schedule_table("one-cycle", num_steps)
    lrs = log_uniform(1e-3, 1e-1, num_workers, seed=seed)
    models = [task.build(seed) for _ in range(num_workers)]
    optimizers = [torch.optim.Adam(model.parameters(), betas=(0.9, 0.95)) for model in models]
    history, means, sums, num_taken = [lrs.tolist()], [], np.zeros(num_workers), 0
    for step in range(num_steps):
        for worker in range(num_workers):
            optimizers[worker].param_groups[0]["lr"] = table[step] * lrs[worker]
            loss = task.loss(models[worker], batch_of(task, step, seed=seed, replica=worker, num_replicas=num_workers))
            optimizers[worker].zero_grad()
            torch.autograd.backward(loss)
            optimizers[worker].step()
            sums[worker] += loss.item()
        num_taken += 1
        left = num_steps - step - 1
        if left == 0 or (num_taken >= interval and left >= interval):
            means.append((sums / num_taken).tolist())
            if left:
                sources, lrs = exploit(sums / num_taken, lrs, seed=seed, round_index=len(means) - 1)
                history.append(lrs.tolist())
                weights = [copy.deepcopy(model.state_dict()) for model in models]
                states = [optimizer.state_dict() for optimizer in optimizers]
                copies = [copy.deepcopy(states[source]) for source in sources]  # loading does not copy
                for worker, source in enumerate(sources):
                    models[worker].load_state_dict(weights[source])
                    optimizers[worker].load_state_dict(copies[worker])
            sums, num_taken = np.zeros(num_workers), 0
    best = int(np.argmin(means[-1]))
    return {"lrs": history, "train_loss": means, "best": best, "validation": task.evaluate(models[best])}


@pytest.mark.slow
def test_a_population_is_that_of_single_models() -> None:
    options: dict[str, Any] = {"interval": 4, "num_steps": 18}
    found = train_populations(make_task(), [0, 3], num_workers=4, lr_range=(1e-3, 1e-1), dtype=torch.float64, **options)
    for population in found:
        slow = slow_population(make_task(), population.seed, 4, **options)
        assert len(population.train_loss) == 4  # 4, 4, 4 and 6 steps: the last is not shorter
        assert any(a != b for a, b in zip(population.lrs[0], population.lrs[-1], strict=True))
        assert_allclose(population.lrs, slow["lrs"])
        assert_allclose(population.train_loss, slow["train_loss"], rtol=1e-8)
        assert population.best == slow["best"]
        assert population.validation["loss"] == pytest.approx(slow["validation"]["loss"], rel=1e-8)
    assert found[0].as_dict()["seed"] == 0


def test_a_copy_takes_weights_and_optimizer_state() -> None:
    task = make_task()
    models = [task.build(seed) for seed in (0, 1)]
    engine = StackedModels(
        models, task.loss, task.groups(models[0]), num_replicas=3, optimizer=Adam(), shared=False, dtype=torch.float64
    )
    rows = torch.arange(2 * 3 * 2).view(2, 3, 2)
    engine.step(task.gather(rows), torch.full((2, 3, 2), 0.01))
    before = {name: value.clone() for name, value in [("weights", engine.weights), *engine.state.items()]}
    engine.copy_replicas(torch.tensor([[0, 0, 2], [2, 1, 1]]))
    for name in ("weights", "first", "second"):
        now = engine.weights if name == "weights" else engine.state[name]
        torch.testing.assert_close(now[0], before[name][0][[0, 0, 2]])
        torch.testing.assert_close(now[1], before[name][1][[2, 1, 1]])
        assert not torch.equal(before[name][0, 0], before[name][0, 1])
    torch.testing.assert_close(engine.state["steps"], before["steps"])
    vector = engine.flatten(dict(engine.replica_model(1, 0).named_parameters()))
    torch.testing.assert_close(vector, before["weights"][1, 2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_populations_local_runs_and_warm_starts_are_the_same_in_a_cuda_graph() -> None:
    checkpoints = {0: make_task().build(5).state_dict()}
    run = Run(lr=0.01, method="spread", num_replicas=2, interval=4, warm_noise=0.05)
    runs = [
        run,
        Run(lr=0.01, num_replicas=2, interval=4, warm_noise=0.05),
        Run(lr=0.01, method="local", num_replicas=2),
    ]
    options: dict[str, Any] = {"dtype": torch.float64, "num_steps": 18}
    devices = ("cuda", "cpu")
    mine, theirs = (
        train_populations(make_task(), [0], num_workers=4, lr_range=(1e-3, 1e-1), interval=4, device=d, **options)
        for d in devices
    )
    assert_allclose(mine[0].train_loss, theirs[0].train_loss, rtol=1e-6)
    assert mine[0].validation["loss"] == pytest.approx(theirs[0].validation["loss"], rel=1e-6)
    swept = [sweep(make_task(), runs, checkpoints=checkpoints, device=d, **options) for d in devices]
    for one, other in zip(*swept, strict=True):
        assert_allclose(one.train_loss, other.train_loss, rtol=1e-6)


# -- local gradients --------------------------------------------------------------------------------------------


def test_local_runs_are_replicas_that_train_apart_and_are_averaged() -> None:
    task, num_steps, interval = make_task(), 20, 6
    [result] = sweep(
        task,
        [Run(lr=0.02, method="local", num_replicas=2, interval=interval)],
        num_steps=num_steps,
        dtype=torch.float64,
    )
    table = schedule_table("one-cycle", num_steps)
    models = [task.build(0) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), betas=(0.9, 0.95)) for model in models]
    for step in range(num_steps):
        for replica in range(2):
            optimizers[replica].param_groups[0]["lr"] = table[step] * 0.02
            optimizers[replica].zero_grad()
            torch.autograd.backward(task.loss(models[replica], batch_of(task, step, replica=replica, num_replicas=2)))
            optimizers[replica].step()
        if (step + 1) % interval == 0 or step + 1 == num_steps:
            with torch.no_grad():
                for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean: Tensor = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
    assert result.validation["loss"] == pytest.approx(task.evaluate(models[0])["loss"], rel=1e-8)
    assert_allclose(result.base_lr, 0.02 * table[[5, 11, 17, 19]])


# -- optimizers that set their own step size --------------------------------------------------------------------


@pytest.mark.usefixtures("_stubs")
def test_a_baseline_trains_on_the_rows_and_schedule_of_a_sweep() -> None:
    task = QuadraticTask(dimension=4, num_rows=256, batch_rows=8)  # a GPT at a learning rate of 1 is chaos
    outcome = baselines.train(baselines.BaselineRun("quadratic", "prodigy", None, 1, 30), task)
    [swept] = sweep(task, [Run(lr=1.0, seed=1, interval=10)], num_steps=30)
    assert outcome.validation["loss"] == pytest.approx(swept.validation["loss"], rel=1e-3)
    assert np.mean(outcome.train_loss[:10]) == pytest.approx(swept.train_loss[0], rel=1e-3)


@pytest.mark.usefixtures("_stubs")
@pytest.mark.parametrize("method", baselines.PACKAGES)
def test_every_baseline_trains(method: BaselineMethod) -> None:
    lr = 0.01 if method == "schedule-free" else None
    outcome = baselines.train(baselines.BaselineRun("tiny", method, lr, 0, 30, optimizer="sgd"), make_task())
    assert len(outcome.train_loss) == 30
    assert math.isfinite(outcome.validation["loss"])


@pytest.mark.usefixtures("_stubs")
def test_a_baseline_that_gives_up_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise AssertionError("DoG cannot work when G is not strictly positive")

    import dog  # type: ignore[import-not-found]

    monkeypatch.setattr(dog.DoG, "step", fail)
    outcome = baselines.train(baselines.BaselineRun("tiny", "dog", None, 0, 30), make_task())
    assert math.isnan(outcome.validation["loss"])
    assert math.isnan(outcome.train_loss[-1])


@pytest.mark.usefixtures("_stubs")
def test_baselines_on_several_processes_are_those_on_one() -> None:
    sizes = {"dimension": 4, "num_rows": 256, "batch_rows": 8}
    runs = [baselines.BaselineRun("quadratic", "prodigy", None, seed, 12, task_options=sizes) for seed in (0, 1)]
    alone = [outcome.validation for outcome in baselines.train_all(runs)]
    assert [outcome.validation for outcome in baselines.train_all(runs, num_workers=2)] == alone
    assert alone[0] != alone[1]


# -- the command ------------------------------------------------------------------------------------------------


def test_random_search_picks_the_best() -> None:
    options = CompareOptions("quadratic", seeds=(0, 2), replicas=4, steps=20, starts=(1e-3, 10.0), task_option=SIZES)
    experiment = Experiment("compare", options)
    records = list(run_method(experiment, "random-search", lambda _: None))
    assert [record.seed for record in records] == [0, 2]
    for record in records:
        lrs, tried = record.details["lrs"], [figures["loss"] for figures in record.details["validation"]]
        assert_allclose(lrs, log_uniform(1e-3, 10.0, 4, seed=record.seed))
        assert record.compute == 4
        assert record.start is None
        assert record.loss == min(tried)
        assert record.details["best_lr"] == lrs[int(np.argmin(tried))]
        [alone] = sweep(
            experiment.task, [experiment.make_run(record.details["best_lr"], record.seed, "fixed")], num_steps=20
        )
        assert record.loss == pytest.approx(alone.validation["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_stubs")
def test_the_command_runs_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dog", None)
    methods = ["fixed", "paper", "gradient", "loss", "local", "spread", "population", "random-search"]
    methods += ["prodigy", "d-adaptation", "mechanic", "dog", "schedule-free"]
    options = "--optimizer sgd --seeds 0 1 --steps 40 --replicas 2 --starts 1e-2 0.1 100 --json copy.json --out out"
    assert cli.main(["compare", "quadratic", *options.split(), *SMALL, "--methods", *methods]) == 0
    shown = capsys.readouterr().out
    assert "dog is skipped: it needs dog-optimizer; install it with: pip install dog-optimizer" in shown
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads((tmp_path / "copy.json").read_text()) == results
    found = {(run["method"], run["start"], run["seed"]) for run in results["runs"]}
    without = {"population", "random-search", "prodigy", "d-adaptation", "mechanic"}
    starts = {method: [None] if method in without else [1e-2, 0.1, 100.0] for method in methods if method != "dog"}
    assert found == {(m, start, seed) for m, own in starts.items() for start in own for seed in (0, 1)}
    assert len(results["runs"]) == len(found)
    assert list(results["time_s"]) == list(starts)
    assert len(results["skipped"]) == 1
    assert results["config"]["seeds"] == [0, 1]
    assert results["config"]["population_interval"] == 2
    for name in ("git_commit", "data_sha256", "hardware", "torch", "packages"):
        assert name in results
    losses = {(run["method"], run["start"], run["seed"]): run["validation"]["loss"] for run in results["runs"]}
    assert losses["fixed", 100.0, 0] is None or losses["fixed", 100.0, 0] > 1e3
    assert "8 runs" not in shown
    assert "2 runs" in shown  # random search, twice the compute
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(text in page for text in ("random-search (2 times the compute)", "<svg", "data_sha256", "at or below"))
    assert (tmp_path / "out" / "starts.png").stat().st_size > 1000


def test_nothing_to_run_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    assert cli.main(["compare", "quadratic", *SMALL, "--replicas", "2", "--methods", "prodigy", "--out", "out"]) == 0
    assert "prodigy is skipped: it needs prodigyopt" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["runs"] == []
    assert not (tmp_path / "out" / "report.html").exists()


@dataclass
class Shown:
    method: str
    start: float | None
    seed: int
    loss: float
    compute: int = 1


RECORDS = [
    *(Shown("fixed", start, seed, loss) for seed, losses in ((0, [4.0, 2.0, NAN]), (1, [3.0, 1.0, 1e30]))
      for start, loss in zip((0.1, 1.0, 10.0), losses, strict=True)),
    *(Shown("gradient", start, seed, loss) for seed, losses in ((0, [2.2, 1.8, 2.0]), (1, [1.1, 1.2, 1.3]))
      for start, loss in zip((0.1, 1.0, 10.0), losses, strict=True)),
    Shown("random-search", None, 0, 2.0, compute=8),
    Shown("random-search", None, 1, NAN, compute=8),
]  # fmt: skip


def test_methods_are_measured_against_the_best_fixed_run_of_the_same_seed() -> None:
    found = compare_report.excesses(RECORDS)
    assert_allclose(found["fixed"], [1.0, 0.0, INF, 2.0, 0.0, 1e30], rtol=1e-9)
    assert_allclose(found["gradient"], [0.1, -0.1, 0.0, 0.1, 0.2, 0.3], atol=1e-12)
    assert found["random-search"] == [0.0, INF]
    assert compare_report.excesses(RECORDS[6:]) == {}


@pytest.mark.slow
def test_tables_and_chart_say_what_broke() -> None:
    runs = compare_report.run_table(RECORDS, [0.1, 1.0, 10.0])
    assert runs.heads == ["method", "seed", "no start", "0.1", "1", "10"]
    assert runs.rows[0] == ["fixed", "0", "", "4.0000", "2.0000", "broke"]
    assert runs.rows[-1] == ["random-search", "1", "broke", "", "", ""]
    seconds = {"fixed": 6.0, "gradient": 12.0, "random-search": 8.0}
    summary = compare_report.summary_table(RECORDS, seconds).rows
    assert summary[0][-3:] == ["1", "1 run", "1.0"]
    assert summary[1] == ["gradient", "6", "-10.0%", "+10.0%", "+30.0%", "2 of 6", "0", "1 run", "2.0"]
    assert summary[2][2:] == ["+0.0%", "broke", "broke", "1 of 2", "1", "8 runs", "4.0"]
    assert compare_report.summary_table(RECORDS[6:], seconds).rows[0][2:6] == ["-", "-", "-", "-"]
    chart = compare_report.chart(RECORDS, [0.1, 1.0, 10.0])
    assert "random-search (8 times the compute)" in chart.svg
    assert chart.png[:4] == b"\x89PNG"
    compare_report.chart([Shown("fixed", 1.0, 0, NAN)], [1.0])  # nothing but a broken run
