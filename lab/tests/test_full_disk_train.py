"""``hdet train`` on a disk that is full: one line, exit status 1, and the last checkpoint is intact."""

from __future__ import annotations

import contextlib
import io
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet.launch import launch
from hdet_lab import cli
from hdet_lab.runs import folder as run_folder


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
