"""A disk that is full or read-only: training goes on, with one warning, and no file ends in half a line."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, RoundRecord
from hdet.launch import launch
from hdet.sinks import JsonLinesSink, TensorBoardSink
from hdet_lab import cli
from hdet_lab.runs import folder as run_folder

NUM_ROUNDS = 12


def _train(*sinks: Callable[[RoundRecord, Sequence[str]], object], num_rounds: int = NUM_ROUNDS) -> list[float]:
    """Weights after each round."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    scheduler = AutoLR(CosineAnnealingLR(optimizer, 4 * NUM_ROUNDS), interval=2, adapt=Adapt(level=False))
    for sink in sinks:
        scheduler.add_sink(sink)
    found = []
    for _ in range(2 * num_rounds):
        loss = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        found.append(float(weight.detach()[0]))
    return found


def _places(folder: Path) -> dict[str, str]:
    """Where nothing can be written, for root neither, and why not."""
    (folder / "file").write_text("not a folder")
    return {
        "/dev/full": "No space left on device",
        str(folder / "file" / "rounds.jsonl"): "(Not a directory|File exists)",
        "/proc/rounds.jsonl": "(No such file|Permission denied|Read-only)",
        str(folder): "Is a directory",
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full and /proc")
def test_training_goes_on_with_one_warning_wherever_it_cannot_write(tmp_path: Path) -> None:
    expected = _train()
    for path, reason in _places(tmp_path).items():
        with pytest.warns(UserWarning, match=rf"JsonLinesSink could not write round 0 \(.*{reason}") as caught:
            assert _train(JsonLinesSink(path)) == expected
        assert len(caught) == 1, path


def _under_a_limit(limit: int, kind: type[JsonLinesSink | TensorBoardSink], path: str) -> list[str]:
    """What is said in a process whose files can be no longer than ``limit`` bytes, until training is over."""
    expected = _train()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    sink = kind(path)
    records: list[RoundRecord] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = _train(sink, lambda record, names: records.append(record))
        sink.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if kind is JsonLinesSink:
        sink(records[-1], ())
    assert weights == expected
    return [str(w.message) for w in caught if "could not" in str(w.message)]


def test_a_disk_that_fills_up_leaves_whole_lines_and_later_ones_follow(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    _train(JsonLinesSink(path), num_rounds=3)
    line = len(path.read_text().splitlines()[0])
    path.unlink()
    limit = 3 * line + line // 2  # in the middle of the fourth line
    [[message]] = launch(_under_a_limit, 1, limit, JsonLinesSink, str(path))
    assert "JsonLinesSink could not write round 3" in message
    text = path.read_text()
    assert text.endswith("\n")
    assert [json.loads(entry)["index"] for entry in text.splitlines()] == [0, 1, 2, NUM_ROUNDS - 1]


def test_tensorboard_on_a_full_disk(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'hdet[sinks]'")
    [said] = launch(_under_a_limit, 1, 2000, TensorBoardSink, str(tmp_path))
    assert len(said) == 1
    assert "TensorBoardSink could not write" in said[0]


def test_half_a_line_that_could_not_be_cut_off_is_cut_off_later(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"index": 0}\n{"ind')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(JsonLinesSink(path), num_rounds=2)
    assert [json.loads(entry)["index"] for entry in path.read_text().splitlines()] == [0, 0, 1]


# -- hdet train ---------------------------------------------------------------------------------------------------


def _train_command(folder: str, limit_at: int) -> tuple[int, str]:
    """Exit status and stderr of ``hdet train`` on a disk that is full from the checkpoint of that round on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save, num_saved = run_folder.save_checkpoint, 0

    def save_until_full(*args: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        room = resource.RLIM_INFINITY if num_saved < limit_at else 4000
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        save(*args)

    run_folder.save_checkpoint = save_until_full  # type: ignore[assignment]
    said = io.StringIO()
    arguments = ["train", "small-gpt", "--steps", "12", "--interval", "4", "--checkpoint-s", "0", "--out", folder]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = cli.main([*arguments, "--method", "fixed"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return status, said.getvalue()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit_at", [1, 2])
def test_a_full_disk_ends_a_run_with_one_line_and_keeps_the_last_checkpoint(limit_at: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    [(status, err)] = launch(_train_command, 1, str(folder), limit_at)
    assert status == 1
    assert err.count("\n") == 1
    step = 4 * limit_at
    assert f"the checkpoint of step {step} cannot be written into {folder} (File too large); " in err
    assert not list(folder.glob("*.new"))
    if limit_at == 1:
        assert "there is none before it. Make room, and start a new run" in err
        assert not (folder / "checkpoint.pt").exists()
    else:
        assert f"that of step 4 is intact. Make room, and continue with: hdet train --resume {folder}" in err
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == 4


@pytest.mark.timeout(120)
def test_a_full_disk_under_several_processes_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "small-gpt", "--steps", "12", "--interval", "4", "--checkpoint-s", "0", "--replicas", "2"]
    # In the way of the first checkpoint, on the disk itself: what launched processes inherit is out of reach.
    create = run_folder.create

    def create_and_block(*args: Any) -> None:
        create(*args)
        (folder / "checkpoint.pt.new").mkdir()

    monkeypatch.setattr(run_folder, "create", create_and_block)
    assert cli.main([*arguments, "--out", str(folder)]) == 1
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hdet train: ")]
    assert f"the checkpoint of step 4 cannot be written into {folder} (Is a directory); there is none before" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_settings_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, write: Callable[[Any], object]) -> None:
        with open("/dev/full", "wb") as file:
            write(file)

    monkeypatch.setattr(run_folder, "replace_file", full)
    assert cli.main(["train", "small-gpt", "--steps", "12", "--out", str(tmp_path / "run")]) == 1
    err = capfd.readouterr().err
    assert "run/config.json cannot be written (No space left on device); make room, and try again" in err
    assert err.count("\n") == 1
