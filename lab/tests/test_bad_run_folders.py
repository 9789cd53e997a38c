"""Checkpoints of ``hdet train`` that are cut short, edited or malicious: refused in one line, and nothing changes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_lab
from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.commands.train import _check_checkpoint, prepare
from hdet_lab.recipes import make_torch_optimizer
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.settings import Settings, from_dict, make_scheduler, open_task


class _Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def test_nothing_here_unpickles() -> None:
    """Every torch.load is told weights_only."""
    root = Path(hdet_lab.__file__).parent
    loads = [
        (path.relative_to(root).as_posix(), line)
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"torch\.load\(|pickle\.loads?\(|np\.load\(|joblib|shelve|marshal", line)
    ]
    assert loads
    for name, line in loads:
        fine = "weights_only=True" in line or "allow_pickle=False" in line
        assert fine, f"{name}: {line.strip()}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that can be resumed: finished, and its last line taken back."""
    folder = tmp_path_factory.mktemp("lab") / "run"
    arguments = ["train", "small-gpt", "--steps", "16", "--interval", "4", "--lr", "1e-3", "--method", "gradient"]
    assert cli.main([*arguments, "--replicas", "1", "--out", str(folder)]) == 0
    metrics = folder / run_folder.METRICS
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"event": "end"' not in line))
    return folder


STEP = r"step of \S+checkpoint.pt must be the end of a round, a multiple of 4 up to 16, but got "
TIME = r"time_s of \S+checkpoint.pt must be a number >= 0, but got "


def _edit(state: dict[str, Any], *keys: str | int, value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    place: Any = state
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return state


def test_resuming_from_a_bad_file_says_why(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, marker = stopped / run_folder.CHECKPOINT, tmp_path / "marker"
    metrics = (stopped / run_folder.METRICS).read_bytes()
    good = run_folder.load_checkpoint(stopped)
    whole = path.read_bytes()
    cannot = r"a checkpoint must be whole and hold tensors and plain values only, but \S+ cannot be loaded \(\w+: .*\)"
    bad: list[tuple[Any, str]] = [
        *((whole[: len(whole) * part // 8], cannot) for part in (0, 1, 4, 7)),
        (_Malicious(marker), cannot),
        ({**good, "scheduler": _Malicious(marker)}, cannot),
        (
            [1, 2],
            r"must be written by hdet train, but \S+ has no \['step', 'time_s', 'model', 'optimizer', 'scheduler'\]",
        ),
        ({"model": good["model"]}, r"has no \['step', 'time_s', 'optimizer', 'scheduler'\]"),
        (_edit(good, "model", value={"weight": torch.zeros(2)}), r"the checkpoint of \S+ is of another model: "),
        (_edit(good, "model", value=None), r"the checkpoint of \S+ is of another model: "),
        (
            _edit(good, "scheduler", "version", value=2),
            r"cannot be continued from \(ValueError: state_dict must have v",
        ),
        (_edit(good, "scheduler", "rounds", "scales", value=[-1.0]), r"scales must be positive, but got \[-1.0\]"),
        (
            _edit(good, "optimizer", "param_groups", value=[]),
            r"cannot be continued from \(ValueError: .*different numb",
        ),
        (_edit(good, "step", value=10**6), f"{STEP}1000000; put an older checkpoint in its place"),
    ]
    try:
        for content, text in bad:
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                torch.save(content, path)
            kept = path.read_bytes()
            assert cli.main(["train", "--resume", str(stopped)]) == 2, text
            said = capsys.readouterr().err
            assert re.search(text, said), said
            assert said.count("\n") == 1
            assert not marker.exists()
            assert path.read_bytes() == kept
            assert (stopped / run_folder.METRICS).read_bytes() == metrics
    finally:
        path.write_bytes(whole)


def test_a_checkpoint_is_tried_out_before_a_run_goes_on(stopped: Path) -> None:
    path = stopped / run_folder.CHECKPOINT
    good, whole = run_folder.load_checkpoint(stopped), path.read_bytes()
    settings = from_dict(run_folder.read(stopped).config)
    task = open_task(settings.task, settings.data)
    cannot = r"the checkpoint of \S+ cannot be continued from \(\w+: "
    bad: list[tuple[Any, str]] = [
        *((_edit(good, "step", value=step), STEP) for step in ("many", None, 20, 0, -4, 6, 4.5, True, [4])),
        *((_edit(good, "time_s", value=time), TIME) for time in ("long", math.nan, -1.0, None, 10**400)),
        (_edit(good, "optimizer", value=[]), cannot),
        (_edit(good, "optimizer", "state", 0, "exp_avg", value=torch.zeros(3)), cannot),
        (_edit(good, "optimizer", "state", 0, value={"step": torch.ones(())}), cannot),
        (_edit(good, "optimizer", "param_groups", 0, "eps", value="small"), cannot),
        (_edit(good, "model", value={1: 2}), r"the checkpoint of \S+ is of another model: "),
    ]
    try:
        for content, text in bad:
            torch.save(content, path)
            with pytest.raises(UsageError, match=text):
                _check_checkpoint(settings, task, stopped)
    finally:
        path.write_bytes(whole)
    _check_checkpoint(settings, task, stopped)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"last_epoch": 5}, r"last_epoch must be the step, 8, but got 5"),
        ({"last_epoch": "many"}, r"last_epoch must be the step, 8, but got 'many'"),
        ({"base_lrs": None}, r"cannot be continued from \(TypeError: "),
    ],
)
def test_the_state_of_a_plain_schedule_is_tried_out(
    change: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings("small-gpt", method="fixed", schedule="cosine", steps=16, interval=4)
    job = prepare(settings, 1, folder=tmp_path / "run")
    task = open_task("small-gpt", tmp_path)
    model = task.build(0)
    optimizer = make_torch_optimizer(job.settings.optimizer, job.settings.lr, task, model)
    scheduler = make_scheduler(job.settings, optimizer, model)
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    run_folder.save_checkpoint(job.folder, {"step": 8, "time_s": 1.0, **parts})
    prepare(job.settings, 1, folder=None, resume=job.folder)
    run_folder.save_checkpoint(
        job.folder, {"step": 8, "time_s": 1.0, **parts, "scheduler": {**parts["scheduler"], **change}}
    )
    assert cli.main(["train", "--resume", str(job.folder)]) == 2
    said = capsys.readouterr().err
    assert re.search(text, said), said
    assert said.count("\n") == 1


def test_what_replicas_refuse_is_one_line_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "small-gpt", "--steps", "12", "--interval", "4", "--method", "gradient", "--replicas", "2"]
    assert cli.main([*arguments, "--out", str(folder)]) == 0
    metrics = folder / run_folder.METRICS
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    state = run_folder.load_checkpoint(folder)
    run_folder.save_checkpoint(folder, _edit(state, "scheduler", "rounds", "scales", value=[-1.0]))
    capfd.readouterr()
    assert cli.main(["train", "--resume", str(folder)]) == 2
    said = capfd.readouterr().err
    assert "scales must be positive, but got [-1.0]" in said
    assert said.count("\n") == 1


def test_a_run_goes_on_when_its_metrics_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, entry: dict[str, Any]) -> None:
        if entry["step"] > 4:
            raise OSError(28, "No space left on device")
        append(folder, entry)

    append = run_folder.append
    monkeypatch.setattr(run_folder, "append", full)
    arguments = ["train", "small-gpt", "--steps", "12", "--interval", "4", "--lr", "1e-3", "--replicas", "1"]
    with pytest.warns(UserWarning, match=r"could not write step 8 into \S+ \(.*No space left on device") as caught:
        assert cli.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert len([w for w in caught if "could not write" in str(w.message)]) == 1
    assert [entry["step"] for entry in run_folder.read(tmp_path / "run").rounds] == [1, 2, 3, 4]
    assert run_folder.load_checkpoint(tmp_path / "run")["step"] == 12
