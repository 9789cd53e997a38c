"""hdet doctor on real processes: what it measures, what it warns of, and that it ends, in time, with a status."""

from __future__ import annotations

import json
import multiprocessing as mp
import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hdet.launch import launch
from hdet_lab import cli
from hdet_lab.cluster.checkup import Question, examine
from hdet_lab.cluster.drill import drill
from hdet_lab.cluster.subject import Subject, load, traps
from torchrun import torchrun

TINY = ["--parameters", "2e4", "--tensors", "3"]
SMALL = [*TINY, "--skip-drill"]


def _question(**changes: Any) -> Question:
    given: dict[str, Any] = {"model": None, "parameters": 1e4, "tensors": 2, "method": "loss", "interval": 100}
    return Question(**{**given, "step_ms": None, "max_share": 1.0, "device": "cpu", **changes})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


# -- the command ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_local_processes(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(mp.active_children())
    assert (
        cli.main(
            ["doctor", "--method", "loss", "--replicas", "2", "--interval", "50", "--max-share", "1", "--json", *SMALL]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == report["replicas"] == 2
    assert (report["parameters"], report["tensors"]) == (20_000, 3)
    assert report["problems"] == []
    assert [found["bytes"] for found in report["all_reduce"]] == [2**10, 2**18, 2**22, 24 * 2**20]
    assert report["step_s"] > 0
    measured = report["measured"]
    assert list(measured["share_by_interval"]) == ["10", "50", "100", "1000"]
    assert measured["share"] == measured["share_by_interval"]["50"]
    assert measured["share"] == pytest.approx(measured["end_s"] / (50 * report["step_s"] + measured["end_s"]))
    assert set(mp.active_children()) <= before


@pytest.mark.parametrize("method", ["paper", "loss"])
def test_one_process_is_not_enough_to_compare(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--method", method, *SMALL]) == 1
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "T = 50 " not in shown
    assert re.search(rf"problem: --method {method} compares replicas .* at least 2, but found 1; start more", shown)
    assert "HDET will work here" not in shown


def test_the_gradient_signal_needs_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--max-share", "1", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "what --method gradient costs" in shown
    assert re.search(r"sample of the gradient, in a step +\d+\.\d+ ms", shown)
    assert re.search(r"T = 50 \(chosen\) +\d+\.\d+%", shown)
    assert "HDET will work here." in shown


def test_a_cost_above_the_limit_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--method", "gradient", "--step-ms", "1", "--interval", "1", "--max-share", "1e-6"]
    assert cli.main(["doctor", *arguments, "--json", *SMALL]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["step_s"] == 1e-3
    assert re.search(r"HDET takes .*% of the time at T = 1, more than --max-share 0.00%", report["problems"][0])


@pytest.mark.slow
def test_ranks_with_other_arguments_are_named_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "wrapper.py"
    script.write_text(
        "import os, sys\nfrom hdet_lab.cli import main\n"
        "interval = '20' if os.environ['RANK'] == '1' else '10'\n"
        "sys.exit(main(['doctor', '--json', '--interval', interval, '--timeout-s', '1000']))\n"
    )
    done = torchrun(script, timeout_s=150)  # nobody waits for doctor's
    assert done.returncode != 0
    (line,) = done.stdout.splitlines()
    (problem,) = json.loads(line)["problems"]
    assert re.search(r"ranks must agree .* but got interval=10 on ranks \[0\], 20 on ranks \[1\]$", problem)


def test_in_the_process_group_of_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    assert cli.main(["doctor", "--method", "gradient", "--max-share", "1", "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 1
    assert not dist.is_initialized()
    assert cli.main(["doctor", "--replicas", "4"]) == 2
    assert "processes that torchrun has started, 1, but got 4" in capsys.readouterr().err


# -- ranks that differ ----------------------------------------------------------------------------------------


TRIED = (
    *("checkpoint read back", "ranks end with equal weights"),
    *("a rank that is killed ends the run", "resumed as if it was not"),
)


def test_a_rank_is_killed_and_the_run_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, problems = drill(2, timeout_s=150)
    assert problems == []
    assert [found[name] for name in TRIED] == ["passed"] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_drill_that_does_not_end_is_a_problem() -> None:
    found, problems = drill(2, timeout_s=0.01)
    assert found["drill"] == "failed"
    assert len(problems) == 1
    assert problems[0].startswith("drill: TimeoutError: ")


@pytest.mark.slow
def test_the_drill_is_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--max-share", "1", "--json", *TINY]) == 0
    assert set(TRIED) <= set(json.loads(capsys.readouterr().out)["drill"])


def _make_on_rank_0_only() -> nn.Module:
    if dist.get_rank() > 0:
        raise RuntimeError("no data here")
    return nn.Linear(2, 1)


def _make_as_wide_as_the_rank() -> nn.Module:
    return nn.Linear(2, 1 + dist.get_rank())


def _make_zero() -> tuple[nn.Module, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    model = DistributedDataParallel(nn.Linear(2, 2))
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)


def _make_fully_sharded() -> nn.Module:
    model = nn.Linear(2, 2)
    fully_shard(model)
    return model


def _make_with_everything() -> tuple[nn.Module, Any, Any]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        time.sleep(0.02 * dist.get_rank())
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, optimizer, step


def _make_apart() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Linear(2, 2)


def _reports(names: list[str]) -> dict[str, Any]:
    return {name: examine(_question(model=f"{__name__}:{name}")) for name in names}


@pytest.mark.slow
def test_what_is_seen_in_a_model() -> None:
    names = ["_make_on_rank_0_only", "_make_as_wide_as_the_rank", "_make_zero", "_make_fully_sharded"]
    names += ["_make_with_everything", "_make_apart"]
    reports = launch(_reports, 2, names, timeout_s=150)
    problems = {name: [report[name]["problems"] for report in reports] for name in names}
    for name, message in {
        "_make_on_rank_0_only": r"model=made on ranks \[0\], --model .* RuntimeError: no data here on ranks \[1\]",
        "_make_as_wide_as_the_rank": r"shapes=\d+ on ranks \[0\], \d+ on ranks \[1\]",
        "_make_zero": r"ZeroRedundancyOptimizer: each rank updates only its own shard",
        "_make_fully_sharded": r"only shards, no replicas to fan out",
    }.items():
        assert all(len(own) == 1 for own in problems[name]), problems[name]
        # A rank without a model tells that; the other one hears of it.
        assert re.search(message, problems[name][0][0]), problems[name]
    assert problems["_make_with_everything"] == problems["_make_apart"] == [[], []]
    alone = [(name, rank) for name in names for rank in (0, 1) if reports[rank][name]["failed_alone"]]
    assert alone == [("_make_on_rank_0_only", 1)]

    warnings = "\n".join(reports[0]["_make_with_everything"]["warnings"])
    assert "the model has 1 BatchNorm layers: pass model= to the scheduler" in warnings
    assert "forward_sync_buffers=False" in warnings
    assert "GradScaler, which may skip a step" in warnings
    assert "not wrapped" not in warnings
    warnings = "\n".join(reports[0]["_make_apart"]["warnings"])
    assert "replicas start from different weights" in warnings
    assert "not wrapped in DistributedDataParallel" in warnings
    assert "the step is the optimizer's alone" in warnings


def test_a_rank_that_fails_alone_ends_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lonely.py").write_text(
        "import torch, torch.distributed as dist\n"
        "def make():\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "    def step():\n"
        "        if dist.get_rank() == 1:\n"
        "            raise KeyError('no batch')\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1), step\n"
    )
    before = set(mp.active_children())
    # If anybody waited for that timeout, so would this test.
    arguments = ["--replicas", "2", "--model", "lonely:make", "--json", "--timeout-s", "1000"]
    assert cli.main(["doctor", *arguments]) == 1
    assert "rank 1 failed: KeyError: 'no batch'" in json.loads(capsys.readouterr().out)["problems"]
    assert set(mp.active_children()) <= before


# -- models, without processes --------------------------------------------------------------------------------


def test_traps_of_one_process() -> None:
    def of(model: nn.Module) -> str:
        return "\n".join(traps(Subject(model, torch.optim.SGD(model.parameters(), lr=0.1), None), 1))

    assert of(nn.Linear(2, 2)) == ""
    assert "parameters are torch.bfloat16" in of(nn.Linear(2, 2).bfloat16())
    assert "AveragedModel: update it inside converged()" in of(AveragedModel(nn.Linear(2, 2)))
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(()))
    assert "the model has 1 buffers: pass model=" in of(model)


def _make_two() -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def _make_nonsense() -> tuple[nn.Module, int]:
    return nn.Linear(2, 2), 3


def test_a_model_is_loaded_by_name() -> None:
    assert load(f"{__name__}:_make_two").optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match=r"must return a model, \(model, optimizer\) or .* but got Linear, int"):
        load(f"{__name__}:_make_nonsense")


def test_a_model_that_cannot_be_made_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model", "nowhere:make", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem == "--model nowhere:make could not be made: ModuleNotFoundError: No module named 'nowhere'"
