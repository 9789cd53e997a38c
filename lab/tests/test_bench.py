"""``hdet bench`` on the quadratic: what it runs, how it resumes, and the pages it makes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet import AutoLR
from hdet_lab.bench import runner as runner_module
from hdet_lab.bench.methods import HALVING_LRS, extension, found_lr, run_method
from hdet_lab.bench.pages import make_pages, render, said_of
from hdet_lab.bench.records import Record, gather, load
from hdet_lab.bench.runner import Runner, take_claim
from hdet_lab.bench.statistics import choose_default, mean
from hdet_lab.bench.suite import (
    ADAM_DEFAULT,
    BY_NAME,
    CHOSEN,
    ENTRIES,
    MAX_PASSES,
    METHODS,
    START,
    Entry,
    half_decade,
    jobs,
)
from hdet_lab.bench.summary import duel, over_tasks, summarize, verdict
from hdet_lab.bench.train import Bench, thinned
from hdet_lab.bench.versions import GOLDEN, MARK, declare, equivalent, golden_name, is_current
from hdet_lab.command_line import UsageError
from hdet_lab.commands import bench as command
from hdet_lab.recipes import ADAM_BETAS
from hdet_lab.runs.code_hash import code_sha256, hash_of
from hdet_lab.stacked.sweep import sweep
from hdet_lab.tasks import TabularTask, load_task
from hdet_lab.tasks.base import batch_of
from hdet_lab.tasks.quadratic import QuadraticTask

ROOT = Path(__file__).parents[2]
STEPS, LONGER = 60, 100
SMALL = QuadraticTask(dimension=5, num_rows=256, batch_rows=4)


def make_bench(**changes: Any) -> Bench:
    bench = Bench(BY_NAME["quadratic"], SMALL, (0, 1), STEPS, defaults={"nadamw": ("wsd", 0.03)})
    return replace(bench, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half A and half B of one small task each, run once."""
    out = tmp_path_factory.mktemp("bench")
    entries = [Entry("feed", "A", STEPS, task="quadratic"), Entry("code-gpt", "B", STEPS, task="quadratic")]
    methods = ("grid", "autolr", "adamw-grid", "adamw", "prodigy")
    runner = Runner(out, entries, methods, (0, 1))
    facts = {"git_commit": None, "torch": "2", "data_sha256": "0" * 64, "hardware": {"gpus": [], "cpu": "one"}}
    runner._open["quadratic"] = (SMALL, {**facts, "num_parameters": 5, "batch_rows": 4})
    assert runner.run() == []
    return out


def test_half_b_is_everything_that_nothing_was_chosen_on() -> None:
    half_a = {entry.name for entry in ENTRIES if entry.half == "A"}
    assert half_a == {"shakespeare-gpt", "feed", "fashion", "word-gpt", "lstm"}
    neither = {entry.name for entry in ENTRIES if entry.half == "extra" and entry.optimizer == "adam"}
    assert neither == {"stdlib-gpt", "quadratic"}  # on the first AutoLR's settings were looked at


def test_half_b_never_calibrates_and_goes_before_half_a() -> None:
    order = jobs(ENTRIES, METHODS)
    assert {job.entry.half for job in order if job.method.endswith("w-grid")} == {"A"}
    grids = [job.entry.half for job in order if job.method == "grid"]
    assert grids == sorted(grids, key="BA".find) or grids[-1] == "extra"
    assert grids.index("A") > max(place for place, half in enumerate(grids) if half == "B")


def test_half_decades() -> None:
    assert [half_decade(index) for index in (-3, -2, -1, 0, 1, 2)] == [0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


def test_a_grid_grows_only_where_its_best_is_at_an_edge() -> None:
    assert extension(range(-8, -2), half_decade(-8)) == [-10, -9]
    assert extension(range(-8, -2), half_decade(-3)) == [-2, -1]
    assert extension(range(-8, -2), half_decade(-5)) == []


@pytest.mark.slow
def test_the_grid_brackets_its_best(finished: Path) -> None:
    records = json.loads((finished / "code-gpt" / "grid.json").read_text())["runs"]
    lrs = sorted({record["lr"] for record in records})
    best = min(records, key=lambda record: record["loss"])["lr"]
    assert lrs[0] < best < lrs[-1]
    assert lrs[-1] > half_decade(-3)  # the quadratic needs more than the first grid has
    assert {record["lr"] for record in records if record["in_first_grid"]} == {half_decade(i) for i in range(-8, -2)}


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("grid", "adamw-grid", "nadamw-grid", "adamw")])
def test_every_method_has_a_finite_loss_for_every_seed(method: str) -> None:
    records = run_method(make_bench(), method)
    assert {record["seed"] for record in records} == {0, 1}
    assert all(math.isfinite(record["loss"]) for record in records)


@pytest.mark.slow
def test_methods_that_search_inside_the_run_pay_for_it() -> None:
    for method in ("finder", "halving"):
        for record in run_method(make_bench(), method):
            assert record["curve"][-1][0] == STEPS
            assert record["curve"][0][0] > (STEPS // 10 if method == "finder" else STEPS // 3)
    assert len(HALVING_LRS) == 8


def test_the_finder_takes_a_tenth_of_where_the_loss_was_lowest() -> None:
    lrs = [10.0**k for k in range(-5, 3)]
    assert found_lr([4.0, 3.0, 2.0, 1.0, 0.5, 40.0, 50.0, math.nan], lrs) == pytest.approx(lrs[4] / 10)
    assert found_lr([math.nan], lrs) == lrs[0]


def test_autolr_is_given_nothing_but_the_length() -> None:
    records = run_method(make_bench(steps=LONGER), "autolr")
    assert [(record["lr"], record["schedule"], record["seed"]) for record in records] == [
        (START, "none", 0),
        (START, "none", 1),
    ]
    for record in records:
        assert [step for step, _ in record["lrs"][:5]] == [1, 2, 3, 4, 8]  # the level is searched
        assert max(lr for _, lr in record["lrs"]) > 1e-3
        assert len(record["lrs"]) <= 60


@pytest.mark.parametrize("start", [1e-8, 100.0])
def test_autolr_of_the_benchmark_is_that_of_a_plain_loop(start: float) -> None:
    model = SMALL.build(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=start, betas=ADAM_BETAS)
    scheduler = AutoLR(optimizer, total_steps=LONGER)
    for step in range(LONGER):
        optimizer.zero_grad()
        loss = SMALL.loss(model, batch_of(SMALL, step, seed=0))
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step(loss)
    record = run_method(make_bench(steps=LONGER), "autolr")[0]
    assert record["loss"] == pytest.approx(SMALL.evaluate(model)["loss"], rel=1e-3)


@pytest.mark.slow
def test_parts_of_a_sweep_change_nothing() -> None:
    entry, seeds = BY_NAME["quadratic"], tuple(range(5))
    whole, parts = (run_method(make_bench(entry=replace(entry, stacked=n), seeds=seeds), "autolr") for n in (100, 2))
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert [step for step, _ in one["curve"]] == [step for step, _ in other["curve"]]


@pytest.mark.slow
def test_a_sweep_that_does_not_fit_into_memory_goes_on_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def tight(task: Any, runs: Any, **options: Any) -> Any:
        sizes.append(len(runs))
        if len(runs) > 2:
            raise torch.OutOfMemoryError("full")
        return sweep(task, runs, **options)

    monkeypatch.setattr("hdet_lab.bench.train.sweep", tight)
    records = run_method(make_bench(steps=30, seeds=tuple(range(6))), "autolr")
    assert sizes == [6, 3, 2, 2, 2]
    assert len(records) == 6


def test_thinned_keeps_the_ends() -> None:
    assert thinned(range(5), 10) == [0, 1, 2, 3, 4]
    assert thinned(range(101), 5) == [0, 25, 50, 75, 100]


# -- files ----------------------------------------------------------------------------------------------------------


def test_what_is_finished_is_not_run_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bench: Bench, method: str) -> Any:
        raise AssertionError(method)

    monkeypatch.setattr(runner_module, "run_method", refuse)
    entry = Entry("code-gpt", "B", STEPS, task="quadratic")
    before = (finished / "code-gpt" / "grid.json").read_text()
    assert Runner(finished, [entry], ("grid", "autolr"), (0, 1)).run() == []
    assert (finished / "code-gpt" / "grid.json").read_text() == before


def test_other_settings_are_run_again(finished: Path) -> None:
    runner = Runner(finished, [], (), (0, 1, 2))
    [job] = jobs([Entry("code-gpt", "B", STEPS, task="quadratic")], ["grid"])
    assert not runner.is_done(job)
    runner.seeds = (0, 1)
    assert runner.is_done(job)


def test_the_default_comes_from_half_a_alone(finished: Path) -> None:
    calibration = json.loads((finished / "feed" / "adamw-grid.json").read_text())["runs"]
    losses: dict[tuple[str, float], list[float]] = {}
    for run in calibration:
        losses.setdefault((run["schedule"], run["lr"]), []).append(run["loss"])
    assert {len(row) for row in losses.values()} == {2}
    shape, lr = min(losses, key=lambda key: sum(losses[key]))
    used = json.loads((finished / "code-gpt" / "adamw.json").read_text())
    assert {(run["schedule"], run["lr"]) for run in used["runs"]} == {(shape, lr)}
    assert used["defaults"] == {"adamw": [shape, lr]}
    assert not (finished / "code-gpt" / "adamw-grid.json").exists()


def test_a_default_is_used_as_soon_as_it_is_known(finished: Path) -> None:
    """The files of the fixture, in the order in which they were written: the rest does not go first."""
    written = sorted(finished.glob("code-gpt/*.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.stem for path in written] == ["grid", "autolr", "adamw", "prodigy"]


def test_without_half_a_there_is_no_default(tmp_path: Path) -> None:
    problems = Runner(tmp_path, [Entry("tabular", "B", STEPS, task="quadratic")], ("adamw",), (0,)).run()
    assert problems == ["tabular/adamw is skipped: no default was chosen on half A"]


def test_a_task_without_data_is_skipped_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    runner = Runner(tmp_path, [Entry("feed", "A")], ("grid", "prodigy"), (0,), data=tmp_path, tell=said.append)
    problems = runner.run()
    assert len(problems) == len(said) == 1
    assert problems[0].startswith("feed is skipped: ")


@pytest.mark.slow
def test_a_method_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_method

    def broken(bench: Bench, method: str) -> Any:
        if method == "prodigy":
            raise RuntimeError("no vmap")
        return real(bench, method)

    monkeypatch.setattr(runner_module, "run_method", broken)
    runner = Runner(tmp_path, [replace(BY_NAME["quadratic"], steps=20)], ("prodigy", "dog"), (0,))
    assert runner.run() == ["quadratic/prodigy failed: no vmap"]
    assert (tmp_path / "quadratic" / "dog.json").exists()
    assert "Traceback" in (tmp_path / "quadratic" / "prodigy.failed").read_text()


def test_a_claim_holds_while_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "a.claim"
    assert take_claim(path)
    assert not take_claim(path)
    path.write_text(str(2**22 + 1))  # above the largest number that a process can have
    assert take_claim(path)


# -- pages ----------------------------------------------------------------------------------------------------------


def test_pages_come_from_the_records_and_nothing_else(finished: Path, tmp_path: Path) -> None:
    gather(finished, tmp_path / "records")
    first = {path.name: path.read_text() for path in make_pages(tmp_path / "records", tmp_path / "docs")}
    again = {path.name: path.read_text() for path in make_pages(tmp_path / "records", tmp_path / "docs")}
    assert first == again
    assert set(first) == {"results.md", "bench-near.svg", "bench-feed.svg", "bench-code-gpt.svg"}
    assert first["results.md"].splitlines()[2].startswith("**The target is ")
    assert "- Chosen on half A for AdamW at one default: " in first["results.md"]


def test_a_record_keeps_curves_of_the_best_fixed_condition_alone(finished: Path, tmp_path: Path) -> None:
    gather(finished, tmp_path / "records")
    record = load(tmp_path / "records")[0]
    with_curve = {(run["schedule"], run["lr"]) for run in record.methods["grid"] if "curve" in run}
    assert with_curve == {record.best()}
    assert (tmp_path / "records" / "feed.json").stat().st_size < 60_000


def test_summaries_are_of_the_losses_in_the_record(finished: Path, tmp_path: Path) -> None:
    gather(finished, tmp_path / "records")
    record = next(record for record in load(tmp_path / "records") if record.half == "B")
    task = summarize(record)
    assert task is not None
    shape, lr = record.best()
    best = [next(r["loss"] for r in record.methods["grid"] if (r["schedule"], r["lr"], r["seed"]) == (shape, lr, seed))
            for seed in (0, 1)]  # fmt: skip
    mine = {run["seed"]: run["loss"] for run in record.methods["autolr"]}
    by_hand = [mine[seed] / other - 1 for seed, other in zip((0, 1), best, strict=True)]
    assert task.excess["autolr"] == pytest.approx(by_hand)
    line = over_tasks([task], "autolr")
    assert line is not None
    assert line.mean == pytest.approx(math.sqrt((1 + by_hand[0]) * (1 + by_hand[1])) - 1)
    assert line.low <= line.mean <= line.high
    assert sum(duel([task], "prodigy")) == 1
    word, said = verdict([task])
    assert word in ("met", "not met", "not measured")
    assert any("not measured: " in part and "Mechanic" in part for part in said)


def test_a_grid_that_is_chosen_on_other_seeds_is_judged_on_a_seed_it_has_not_seen() -> None:
    losses = {("wsd", 0.1): (1.0, 1.0, 4.0), ("wsd", 0.2): (2.0, 2.0, 1.5)}
    grid = [{"schedule": shape, "lr": lr, "seed": seed, "loss": loss}
            for (shape, lr), row in losses.items() for seed, loss in enumerate(row)]  # fmt: skip
    task = summarize(Record("own", "B", "own", "adam", 10, [], {"grid": grid}, {}, {}))
    assert task is not None
    assert task.best == [2.0, 2.0, 1.5]  # the lowest mean over all three
    assert task.excess["grid-elsewhere"] == [0.0, 0.0, 4.0 / 1.5 - 1]  # the first two seeds choose the other


def test_only_seeds_that_all_methods_have_are_compared(finished: Path, tmp_path: Path) -> None:
    gather(finished, tmp_path / "records")
    record = next(record for record in load(tmp_path / "records") if record.half == "A")
    record.methods["prodigy"] = [run for run in record.methods["prodigy"] if run["seed"] == 1]
    task = summarize(record)
    assert task is not None
    assert task.seeds == [1]  # though the grid of half A has both, and the calibration the first
    assert {len(values) for values in task.excess.values()} == {1}


def test_docs_are_those_that_the_kept_records_make() -> None:
    kept = ROOT / "lab" / "benchmarks" / "results" / "bench"
    advice = "run hdet bench --pages; lab/benchmarks/README.md has how runs of an earlier version are marked"
    for path, text in render(load(kept), said_of(kept), equivalent(kept)).items():
        assert (ROOT / "docs" / path).read_text() == text, f"{path}: {advice}"
    assert len((ROOT / "docs" / "results.md").read_text().split()) <= 2500


def test_runs_of_another_version_are_marked_in_every_table(finished: Path, tmp_path: Path) -> None:
    gather(finished, tmp_path)
    records = load(tmp_path)
    assert MARK in render(records, current=["of today"])["results.md"]  # the runs have no hash
    for record in records:
        for fact in record.facts:
            fact["code_sha256"] = "of then"
    assert MARK in render(records, current=["of today"])["results.md"]
    assert MARK not in render(records, current=["of today", "of then"])["results.md"]
    own = next(record.name for record in records if "autolr" in record.methods)
    assert MARK in render(records, current=["of today", "of then", own])["results.md"]  # a task that is named alone


def test_the_mean_of_the_half_before_is_marked_too() -> None:
    page = render(load(ROOT / "lab" / "benchmarks" / "results" / "bench"), current=["of today"])["results.md"]
    table = page.partition("## Tasks that overfit")[0].splitlines()
    rows = {line.split("|")[1].strip(" *"): line.split("|")[-2].strip() for line in table if "|" in line}
    assert rows[f"AutoLR{MARK}"].endswith(f"%{MARK}")
    assert rows["random search of 8"].endswith("%")


def test_hashes_are_equivalent_where_the_file_has_todays(tmp_path: Path) -> None:
    assert equivalent(tmp_path) == {code_sha256()}
    (tmp_path / "versions.json").write_text('{"a": "first"}')
    assert equivalent(tmp_path) == {code_sha256()}  # the file says nothing of the code of today
    declare(tmp_path, "same trajectories")
    assert equivalent(tmp_path) == {"a", code_sha256()}


def test_code_that_keeps_the_golden_trajectories_is_equivalent(tmp_path: Path) -> None:
    folder, golden = tmp_path / "lab" / "benchmarks" / "results" / "bench", tmp_path / GOLDEN
    folder.mkdir(parents=True)
    golden.parent.mkdir(parents=True)
    shutil.copy(ROOT / GOLDEN, golden)
    (folder / "versions.json").write_text(json.dumps({"a": "first", golden_name(folder): "kept"}))
    assert "a" in equivalent(folder)
    changed = json.loads(golden.read_text())
    changed["trajectories"]["AdamW"]["lrs"] = "others"
    golden.write_text(json.dumps(changed))
    assert equivalent(folder) == {code_sha256()}


def test_which_facts_a_method_is_judged_by() -> None:
    facts: list[dict[str, Any]] = [{"git_commit": "x"}, {"methods": ["autolr"], "code_sha256": "a"}]
    assert is_current("autolr", facts, ["a"])
    assert not is_current("autolr", facts, ["b"])
    assert not is_current("autolr-muon", facts, ["a"])  # of the fact that names no method
    assert is_current("prodigy", facts, [])


def test_prose_does_not_count_as_code() -> None:
    code = 'def f(x: int) -> str:\n    return f"{x} # {1}"\n\n\nA = 1\n'
    prose = (
        '"""Doc."""\n\ndef f(x: int) -> str:  # why\n    """Of\n\n    f."""\n    # because\n'
        '    return f"{x} # {1}"\n\nA = 1\n"""Of A."""\n'
    )
    assert hash_of({"a.py": code}) == hash_of({"a.py": prose})
    assert hash_of({"a.py": code}) != hash_of({"a.py": code.replace("1\n", "2\n")})
    assert hash_of({"a.py": code}) != hash_of({"b.py": code})


def test_the_defaults_are_those_of_the_kept_records() -> None:
    records = load(ROOT / "lab" / "benchmarks" / "results" / "bench")
    for record in records:
        assert record.defaults.items() <= CHOSEN.items()
    grids = [record.losses("grid") for record in records if record.half == "A"]
    assert (
        choose_default([{key: mean(list(by.values())) for key, by in grid.items()} for grid in grids]) == ADAM_DEFAULT
    )


@pytest.mark.parametrize("name", ["tabular", "tabular-regression", "tabular-regression-raw", "linear-raw"])
def test_tasks_that_overfit_are_those_of_the_rule(name: str, tmp_path: Path) -> None:
    """The only tasks of few rows."""
    entry, task = BY_NAME[name], load_task(name, tmp_path)
    assert isinstance(task, TabularTask)
    num_parameters = sum(parameter.numel() for parameter in task.build(0).parameters())
    passes = entry.steps * task.batch_rows / task.num_train
    found = passes > MAX_PASSES and num_parameters > task.num_train
    said = f"{task.num_train:,} rows, {passes:.0f} passes, {num_parameters:,} parameters"
    assert entry.overfits == (said if found else "")


def test_the_kept_records_are_small() -> None:
    folder = ROOT / "lab" / "benchmarks" / "results" / "bench"
    assert sum(path.stat().st_size for path in folder.glob("*")) < 3_700_000


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_runs_and_makes_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--out", str(tmp_path / "out"), "--tasks", "quadratic"]
    assert command.main([*where, "--steps", "60", "--seeds", "0", "--methods", "dog", "prodigy"]) == 0
    assert "quadratic/dog: 1 runs" in capsys.readouterr().out
    pages = ["--pages", "--records", str(tmp_path / "records"), "--docs", str(tmp_path / "docs")]
    assert command.main([*where, *pages]) == 0
    assert (tmp_path / "docs" / "results.md").exists()


@pytest.mark.slow
def test_workers_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.1)
    options = ["--tasks", "quadratic", "--steps", "60", "--seeds", "0", "--methods", "dog", "prodigy"]
    assert command.main([*options, "--out", str(tmp_path), "--workers", "2"]) == 0
    found = sorted(path.name for path in (tmp_path / "quadratic").iterdir())
    assert found == ["dog.json", "prodigy.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nothing"], "--tasks must be among"),
        (["--seeds", "0", "0"], "--seeds must be one or more different"),
        (["--steps", "3"], "--steps must be"),
        (["--workers", "0"], "--workers must be"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command.main(arguments)


@pytest.mark.slow
def test_seeds_are_added_to_what_is_there(tmp_path: Path) -> None:
    def run(out: Path, seeds: tuple[int, ...]) -> dict[str, Any]:
        runner = Runner(out, [Entry("tabular", "B", STEPS, task="quadratic")], ("grid", "dog"), seeds)
        runner._open["quadratic"] = (SMALL, {"git_commit": f"of {len(seeds)}"})
        assert runner.run() == []
        return {name: json.loads((out / "tabular" / f"{name}.json").read_text()) for name in ("grid", "dog")}

    run(tmp_path / "parts", (0,))
    parts, whole = run(tmp_path / "parts", (0, 1)), run(tmp_path / "whole", (0, 1))
    for method in ("grid", "dog"):
        losses = [
            {(r["lr"], r["schedule"], r["seed"]): r["loss"] for r in each[method]["runs"]} for each in (parts, whole)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert parts[method]["config"] == whole[method]["config"]
        assert [fact["git_commit"] for fact in parts[method]["facts"]] == ["of 1", "of 2"]
    assert run(tmp_path / "parts", (1,)) == parts  # nothing is left to run
