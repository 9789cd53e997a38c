"""What a cluster does to a job: kills, preemption, restarts on other numbers of processes, ranks that are late or lost.

Real processes, real signals, and final weights compared with those of a run that nothing happened to.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose

from hdet.policy.spread import multipliers
from hdet.testing import Fault, assert_same_weights
from job import launch
from native import FACES, INTERVAL, SPREAD, TOTAL_STEPS
from production_script import make_runs, resume, save, train
from tiers import slow
from torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "support" / "production_script.py"
Results = Sequence[dict[str, Any]]


def _torchrun(folder: Path, *options: str) -> tuple[int, Results]:
    # torchrun hands the store of the first start on to the second, where gloo would look for processes that are gone.
    done = torchrun(SCRIPT, str(folder), *options, max_restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    paths = [folder / f"result-{rank}.pt" for rank in range(2)]
    assert all(path.exists() for path in paths), done.stderr
    return done.returncode, [torch.load(path, weights_only=True) for path in paths]


def _copy(folder: Path, to: Path, *, step: int) -> str:
    to.mkdir()
    shutil.copy(folder / f"step-{step:04}.pt", to)
    return str(to)


def _in_turn(*folders: str, **options: Any) -> Results:
    return [train(folder, **options) for folder in folders]


def _steps(result: dict[str, Any], name: str) -> list[int]:
    return [record["step"] for record in result["records"][name]]


def _assert_same(results: Results, others: Results) -> None:
    for name in FACES:
        assert_same_weights([result["weights"][name] for result in (*results, *others)])
        assert all(bool(torch.isfinite(t).all()) for t in results[0]["weights"][name].values())


# -- killed ---------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_restarted_and_the_job_ends_as_an_undisturbed_one_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    code, results = _torchrun(folder, "--kill", "8")
    assert code == 0
    assert [result["began_at"] for result in results] == [6, 6]  # in the middle of a round
    assert [result["ended_at"] for result in results] == [TOTAL_STEPS] * 2
    assert all(all(result["consistent"]) for result in results)
    again = launch(_in_turn, 2, _copy(folder, tmp_path / "again", step=6))
    _assert_same(results, [result for (result,) in again])


# -- preempted ------------------------------------------------------------------------------------------------------


def test_a_preempted_job_saves_one_model_and_every_resume_from_it_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    _, results = _torchrun(folder, "--preempt", "7")
    for result in results:
        assert result["ended_at"] == 7  # in the middle of a round
        assert result["saved_at"] == [3, 6, 7]
        assert all(result["consistent"])
    once, again = zip(*launch(_in_turn, 2, *(_copy(folder, tmp_path / str(i), step=7) for i in range(2))), strict=True)
    _assert_same(once, again)
    for result in once:
        assert result["began_at"] == 7
        assert all(_steps(result, name) == [8, 12] for name in FACES)


def _preempted(folder: str, other_folder: str, step: int) -> Results:
    return [train(folder, preempt_at=step), *_in_turn(folder, other_folder)]


@pytest.mark.slow
def test_preempted_at_the_end_of_a_round_it_continues_as_the_uninterrupted_run(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("job", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    stopped, resumed, undisturbed = launch(_preempted, 2, *map(str, folders), 2 * INTERVAL)[0]
    assert (stopped["ended_at"], resumed["began_at"], undisturbed["began_at"]) == (8, 8, 0)
    for name in FACES:
        pair = [result["weights"][name] for result in (resumed, undisturbed)]
        if name in ("paper", "gradient"):
            assert_same_weights(pair)
        else:  # the replicas' places on the line are computed anew, from a mean that was rounded
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-12)


# -- another number of replicas -------------------------------------------------------------------------------------


def _start(folder: str) -> None:
    runs = make_runs()
    for run in runs.values():
        run.advance(6)
    save(Path(folder), 6, runs)


def _go_on(folder: str) -> dict[str, Any]:
    runs, in_other_order = make_runs(), make_runs()
    resume(Path(folder), runs)
    resume(Path(folder), in_other_order, scheduler_first=True)
    found: dict[str, Any] = {}
    for name, run in runs.items():
        assert run.lrs() == in_other_order[name].lrs(), name
        scheduler: Any = run.scheduler
        rho = scheduler._run.steering.multipliers[0].tolist()
        schedule = scheduler._schedule.first_lr
        (lr,) = run.lrs()
        with run.scheduler.converged():
            state = run.scheduler.state_dict()["rounds"]
            weights = run.weights()
        run.advance(TOTAL_STEPS)
        run.scheduler.finish()
        found[name] = {
            "state": {**state, "anchor": (), "outer": ()},
            "multipliers": rho,
            "factor": lr / schedule,
            "centre": weights,
            "weights": run.weights(),
            "records": [vars(record) for record in run.scheduler.history],
        }
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), *(slow(a, b) for a, b in ((4, 2), (2, 3), (1, 2)))])
def test_a_job_goes_on_with_another_number_of_replicas_and_says_so(tmp_path: Path, before: int, after: int) -> None:
    launch(_start, before, str(tmp_path))
    checkpoint = torch.load(tmp_path / "step-0006.pt", weights_only=True)
    results = launch(_go_on, after, str(tmp_path))
    for name in FACES:
        saved = checkpoint[name]["scheduler"]["rounds"]
        apart = name != "gradient" and after > 1
        kept = ["scales", "controller", "panel", "first_level", "warmup", "fallen", "round", "seed"]
        kept += ["guard"] if apart or name == "gradient" else []  # alone there is no rollback without a signal
        for index, result in enumerate(results):
            found = result[name]
            # Base values, velocity and evidence are kept; the spread is made anew.
            for key in kept:
                assert repr(found["state"][key]) == repr(saved[key]), (name, key)  # with NaNs in it
            rho = multipliers(after, SPREAD) if apart else [1.0]
            assert_allclose(sorted(found["multipliers"]), rho, rtol=1e-12)
            mine = found["multipliers"][index] if apart else 1.0
            assert_allclose(found["factor"], saved["scales"][0] * mine, rtol=1e-12)
            saved_weights = [v for t in checkpoint[name]["model"].values() for v in t.flatten().tolist()]
            assert_allclose(found["centre"], saved_weights, rtol=1e-10, atol=1e-12)
            # It trains on, as one model in the end, and tells how many replicas there were.
            assert found["weights"] == results[0][name]["weights"]
            assert all(map(math.isfinite, found["weights"]))
            if apart or name == "gradient":
                assert [record["step"] for record in found["records"]] == [8, 12]
                assert [len(record["losses"]) for record in found["records"]] == [after] * 2
                assert [record["resumed_from"] for record in found["records"]] == [before, None]
        if before > 1 and name != "nesterov":
            assert saved["scales"] != [1.0], name  # there was something to keep


# -- slow -----------------------------------------------------------------------------------------------------------


def _slow(folder: str, other_folder: str) -> Results:
    return [train(folder, [Fault("slow", 1, 2), Fault("slow", 1, 8)]), train(other_folder)]


@pytest.mark.slow
def test_a_slow_rank_changes_nothing_but_the_time(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("slow", "steady")]
    for folder in folders:
        folder.mkdir()
    results = list(zip(*launch(_slow, 2, *map(str, folders)), strict=True))
    _assert_same(*results)
    waited, steady = ({r["step"]: r["converge_s"] for r in found[0]["records"]["paper"]} for found in results)
    assert waited[8] > 0.9
    assert steady[8] < waited[8] - 0.5
