"""``hdet train``: run folders, stopping and going on, real processes."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet.launch import server
from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.commands.report import write_report
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.folder import METRICS
from hdet_lab.runs.settings import Settings
from hdet_lab.tasks import TextTask
from tiers import slow
from torchrun import torchrun

STEPS, INTERVAL = 12, 3
ROUNDS = [1, 2, 3, 4, 6, 9, 12]
"""Where they end: the first steps are one each."""
SMALL = ["train", "small-gpt", "--steps", str(STEPS), "--interval", str(INTERVAL), "--lr", "1e-3"]
METHODS = {"fixed": "1", "gradient": "2"}
"""Each with its number of replicas."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each method that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    for method, replicas in METHODS.items():
        arguments = [*SMALL, "--method", method, "--replicas", replicas, "--out", str(folder / method)]
        assert cli.main(arguments) == 0
    return {method: folder / method for method in METHODS}


@contextmanager
def interrupted(folder: Path, *, num_rounds: int) -> Iterator[None]:
    """Send this process a SIGINT as soon as the run in ``folder`` has recorded ``num_rounds``."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            if (folder / METRICS).exists() and (folder / METRICS).read_text().count("\n") >= num_rounds:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_folder_holds_what_is_needed_to_repeat_it(whole: dict[str, Path]) -> None:
    folder = whole["gradient"]
    facts = json.loads((folder / "config.json").read_text())
    assert facts["config"]["steps"] == STEPS
    assert facts["config"]["replicas"] == 2
    assert facts["config"]["seed"] == 0
    for name in ("hdet", "torch", "python", "numpy", "hardware", "data_sha256", "started", "git_commit"):
        assert name in facts
    assert re.fullmatch("[0-9a-f]{64}", facts["data_sha256"])
    record = run_folder.read(folder)
    assert [entry["step"] for entry in record.rounds] == ROUNDS
    last = record.rounds[-2]
    assert len(last["losses"]) == 2
    assert len(last["values"]) == len(facts["groups"]) == 2
    assert last["control"]["z"]
    assert {"scales", "distance", "num_rollbacks", "converge_s"} <= set(last)
    assert record.end is not None
    assert record.end["validation"]["loss"] < record.rounds[0]["losses"][0]
    assert sorted(path.name.partition(".out")[0] for path in folder.iterdir()) == [
        *("checkpoint.pt", "config.json", "events", "metrics.jsonl")
    ]


def test_tensorboard_reads_the_events(whole: dict[str, Path]) -> None:
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(whole["gradient"]))
    events.Reload()
    assert {"loss/replica0", "loss/replica1", "control/z0", "validation/loss"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss/replica1")] == ROUNDS


@pytest.mark.parametrize("method", ["fixed", slow("gradient")])
def test_interrupted_and_resumed_it_ends_the_same(
    method: str, whole: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with interrupted(folder, num_rounds=1):
        status = cli.main([*SMALL, "--method", method, "--replicas", METHODS[method], "--out", str(folder)])
    assert status == 130
    assert f"continue with: hdet train --resume {folder}" in capfd.readouterr().err
    assert run_folder.load_checkpoint(folder)["step"] < STEPS
    assert run_folder.read(folder).status == "unfinished"
    assert cli.main(["train", "--resume", str(folder), "--lr", "0.1"]) == 2
    assert "must keep its settings, but got --lr 0.1 instead of 0.001; leave them out" in capfd.readouterr().err
    # Lines behind the checkpoint, as a killed run leaves them, are forgotten.
    run_folder.append(folder, {**run_folder.read(folder).rounds[-1], "step": STEPS - 1})

    assert cli.main(["train", "--resume", str(folder)]) == 0

    ours, theirs = run_folder.load_checkpoint(folder), run_folder.load_checkpoint(whole[method])
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    resumed, reference = run_folder.read(folder), run_folder.read(whole[method])
    for key in ("step", "losses", "values", "scales", "control"):
        assert [entry[key] for entry in resumed.rounds] == [entry[key] for entry in reference.rounds]
    assert resumed.end is not None
    assert reference.end is not None
    assert resumed.end["validation"] == reference.end["validation"]


# -- knobs ------------------------------------------------------------------------------------------------------

KNOBS = ["weight_decay", "eps"]


def knobs_of(method: str) -> list[str]:
    options = ["--steps", "24", "--method", method, "--replicas", "2", "--optimizer", "adamw"]
    return [*SMALL, *options, "--knobs", *KNOBS, "--out"]


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with knobs of each method."""
    folder = tmp_path_factory.mktemp("explored")
    for method in ("gradient", "paper"):
        assert cli.main([*knobs_of(method), str(folder / method)]) == 0
    return {method: folder / method for method in ("gradient", "paper")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradient", "paper"])
def test_knobs_are_explored_and_recorded(
    method: str, explored: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    record = run_folder.read(explored[method])
    assert record.config["knobs"] == KNOBS
    knob = record.rounds[0]["knobs"]["weight_decay"]
    assert len(knob["values"]) == 2
    assert min(knob["values"]) < 0.1 < max(knob["values"])
    bases = [entry["knobs"]["weight_decay"]["base"] for entry in record.rounds]
    if method == "gradient":  # with the paper's, so few rounds show no more than a standard error
        assert len(set(bases)) > 1
    # Weight decay takes a neutral signal: the loss of one batch, the same for all.
    assert len(record.rounds[-3]["probes"]) == 2

    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(explored[method]))
    events.Reload()
    shown = {f"{name}/{what}" for name in KNOBS for what in ("base", "replica0", "replica1")}
    assert shown <= set(events.Tags()["scalars"])
    capfd.readouterr()
    assert cli.main(["watch", str(explored[method]), "--once"]) == 0
    assert "weight_decay" in capfd.readouterr().out


@pytest.mark.slow
def test_knobs_are_in_the_report(explored: dict[str, Path], tmp_path: Path) -> None:
    page = write_report([explored["gradient"]], tmp_path).read_text()
    assert 'aria-label="weight_decay"' in page
    assert {"knob-1.png", "knob-2.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_knobs_are_resumed(explored: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with interrupted(folder, num_rounds=1):
        assert cli.main([*knobs_of("gradient"), str(folder)]) == 130
    assert cli.main(["train", "--resume", str(folder), "--knobs", "eps"]) == 2
    assert f"must keep its settings, but got --knobs eps instead of {' '.join(KNOBS)}" in capfd.readouterr().err
    assert cli.main(["train", "--resume", str(folder)]) == 0
    resumed, reference = run_folder.read(folder), run_folder.read(explored["gradient"])
    for key in ("step", "losses", "values", "knobs"):
        assert [entry[key] for entry in resumed.rounds] == [entry[key] for entry in reference.rounds]


@pytest.mark.slow
def test_runs_that_differ_in_their_knobs_are_different_configurations(tmp_path: Path) -> None:
    arguments = ["train", "quadratic", "--lr", "1e-3", "--steps", "12", "--interval", "6", "--replicas", "2", "--out"]
    assert cli.main([*arguments, str(tmp_path / "none")]) == 0
    assert cli.main([*arguments, str(tmp_path / "both"), "--knobs", "momentum", "beta2"]) == 0
    page = write_report([tmp_path / "none", tmp_path / "both"], tmp_path / "report").read_text()
    assert "AutoLR, lr 0.001, no knobs" in page
    assert "AutoLR, lr 0.001, momentum beta2" in page
    assert 'aria-label="beta2: AutoLR, lr 0.001, momentum beta2"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--knobs", "beta2"], "--knobs beta2 compares replicas and needs at least 2 processes, but got 1; add --rep"),
        (["--knobs", "beta2", "--method", "fixed"], "--knobs beta2 needs a method that learns, but got --method fixed"),
        (["--knobs", "beta2", "--optimizer", "sgd"], "--knobs beta2 needs --optimizer adam or adamw, but got"),
        (["--knobs", "weight_decay"], "--knobs weight_decay needs --optimizer adamw, but got --optimizer adam"),
        (["--knobs", "eps", "eps"], "--knobs must be different names, but got eps eps"),
        (["--knobs", "dropout"], "dropout"),
    ],
)
def test_knobs_that_cannot_be_explored_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_weight_decay_needs_a_batch_after_the_last() -> None:
    class Short(TextTask):
        def rows(self, step: int, *, seed: int = 0) -> torch.Tensor:
            if step >= 20:
                raise ValueError("step must be below 20")
            return super().rows(step, seed=seed)

    task = Short("short", torch.zeros(2000), 2, context=8)
    settings = Settings("short", optimizer="adamw", knobs=("weight_decay",), steps=20)
    with pytest.raises(UsageError, match="judged by the batch after the run's last, but short has none after --steps"):
        settings.resolve(task, 2)
    assert replace(settings, steps=19).resolve(task, 2).steps == 19


# ---------------------------------------------------------------------------------------------------------------


def test_a_finished_run_stays_as_it_is(whole: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole["fixed"]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.main([*SMALL, "--out", str(folder)]) == 2
    assert re.search(r"--out must be a new folder, but \S+ exists", capsys.readouterr().err)
    assert cli.main(["train", "--resume", str(folder)]) == 2
    assert re.search(r"--resume must name an unfinished run, but \S+ is done", capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_freezes_the_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "freeze").touch()
    arguments = ["train", "quadratic", "--steps", "24", "--interval", "3", "--freeze-file", str(tmp_path / "freeze")]
    assert cli.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    rounds = run_folder.read(tmp_path / "run").rounds
    assert "the scale is frozen from here on" in rounds[0]["events"]
    assert len({tuple(each["scales"]) for each in rounds if each["phase"] != "warm-up"}) == 1
    assert cli.main([*arguments, "--method", "fixed"]) == 2
    assert "--freeze-file needs a method that learns, but got --method fixed" in capsys.readouterr().err


def test_a_run_that_breaks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "quadratic", "--steps", "12", "--lr", "1e6", "--optimizer", "sgd", "--method", "fixed"]
    assert cli.main([*arguments, "--schedule", "constant", "--out", str(folder), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "diverged"
    assert result["validation"]["loss"] is None
    assert run_folder.read(folder).rounds[-1]["losses"] == [None]


def test_the_papers_method_breaks_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "small-gpt", "--steps", "12", "--lr", "1e6", "--optimizer", "sgd", "--method", "paper"]
    folder = tmp_path / "run"
    assert cli.main([*arguments, "--schedule", "wsd", "--replicas", "2", "--out", str(folder)]) == 1
    assert "the model broke at step" in capsys.readouterr().out
    record = run_folder.read(folder)
    assert record.status == "diverged"
    assert record.end is not None
    assert "are not finite at the converge" in record.end["error"]


def in_a_terminal(arguments: list[str], err: str) -> None:
    os.setsid()
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.exit(cli.main(arguments))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_every_process(tmp_path: Path) -> None:
    folder, written = tmp_path / "run", tmp_path / "stderr"
    arguments = ["train", "small-gpt", "--steps", "5000", "--interval", "3", "--replicas", "2", "--out", str(folder)]
    process = server().Process(target=in_a_terminal, args=(arguments, str(written)))
    process.start()
    assert process.pid is not None
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.is_alive():
            if (folder / METRICS).exists() and (folder / METRICS).read_text().count("\n") >= 2:
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.join(30)
    finally:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    err = written.read_text()
    assert process.exitcode == 130, err
    assert re.search(rf"stopped at step \d+ of 5000; continue with: hdet train --resume {folder}", err)
    assert "Traceback" not in err
    assert run_folder.load_checkpoint(folder)["step"] == run_folder.read(folder).rounds[-1]["step"]


@pytest.mark.slow
def test_under_torchrun_it_trains_in_that_process_group(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = torchrun("hdet_lab", *SMALL, "--method", "gradient", "--json", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["status"] == "done"
    record = run_folder.read(folder)
    assert record.config["replicas"] == len(record.rounds[0]["losses"]) == 2
