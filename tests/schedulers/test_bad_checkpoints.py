"""Checkpoint files that are cut short, flipped, foreign or malicious: refused with a reason, and nothing changes."""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet import AutoLR, Averaging, Explorer, OneCycleAutoLR, knobs
from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.commands.train import _check_checkpoint, prepare
from hdet_lab.recipes import make_torch_optimizer
from hdet_lab.runs import folder as run_folder
from hdet_lab.runs.settings import Settings, from_dict, make_scheduler, open_task

KINDS = ("AutoLR", "OneCycleAutoLR", "Explorer")


class _Run:
    def __init__(self, kind: str, steps: int, width: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler: Any
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "AutoLR":
                self.scheduler = AutoLR(OneCycleLR(self.optimizer, 0.01, 40), interval=2)
            elif kind == "OneCycleAutoLR":
                self.scheduler = OneCycleAutoLR(self.optimizer, 0.01, 40, model_sync_interval=2)
            else:
                chosen: list[Any] = [knobs.LearningRate(), knobs.Epsilon()]
                self.scheduler = Explorer(
                    self.model, self.optimizer, knobs=chosen, interval=2, averaging=Averaging(outer="nesterov")
                )
        for _ in range(steps):
            loss = self.model(torch.ones(4, 2)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, path: Path) -> None:
        """As a user does, the scheduler first: it is the one that has to refuse."""
        state = torch.load(path, weights_only=True)
        self.scheduler.load_state_dict(state["scheduler"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return repr(a) == repr(b)  # NaN too


class _Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused(kind: str, tmp_path: Path) -> None:
    path, run = tmp_path / "checkpoint.pt", _Run(kind, 5)
    torch.save(_Run(kind, 7).parts(), path)
    whole, before = path.read_bytes(), run.parts()
    for size in [*range(0, len(whole), len(whole) // 16), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises((RuntimeError, EOFError, OSError, pickle.UnpicklingError)):  # torch.load's own
            run.load(path)
        assert _same(run.parts(), before), size


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_refused_or_does_no_harm(kind: str, tmp_path: Path) -> None:
    path, dice = tmp_path / "checkpoint.pt", random.Random(0)
    torch.save(_Run(kind, 7).parts(), path)
    whole = path.read_bytes()
    # Where the plain values are: elsewhere most bits are of tensors' values, or of no consequence.
    start = whole.index(b"version")
    run, refused = _Run(kind, 5), 0
    before = run.parts()
    for index in range(150):
        place = dice.randrange(len(whole)) if index % 3 == 0 else start + dice.randrange(1500)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        try:
            state = torch.load(path, weights_only=True)["scheduler"]
        except Exception:  # torch's own, of many types: there is no state
            continue
        try:
            run.scheduler.load_state_dict(state)
        except ValueError:
            refused += 1
            assert _same(run.parts(), before), place
        else:
            assert all(0 < group["lr"] < 1e6 for group in run.optimizer.param_groups), place
            run = _Run(kind, 5)
    assert refused > 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_checkpoint_of_this_run_is_refused(kind: str, tmp_path: Path) -> None:
    run = _Run(kind, 5)
    before, good = run.parts(), _Run(kind, 7).parts()
    path = tmp_path / "checkpoint.pt"

    def refuse(error: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
        with pytest.raises(error, match=text):
            run.load(path)
        assert _same(run.parts(), before)

    torch.save({**good, "scheduler": {**good["scheduler"], "version": 99}}, path)
    refuse(
        ValueError, "state_dict must have version 1, but got version 99; load it with the version of hdet that wrote"
    )
    if kind != "OneCycleAutoLR":  # whose state has no copy of the weights to compare
        torch.save(_Run(kind, 7, width=5).parts(), path)
        refuse(ValueError, "state_dict cannot be loaded: .*of another model")
    for other in KINDS:
        if other != kind:
            torch.save(_Run(other, 7).parts(), path)
            refuse(ValueError, f"^state_dict must be one of {kind}, but it was written by {other}; load it into one$")
    schedule = torch.optim.lr_scheduler.StepLR(_Run(kind, 0).optimizer, 3).state_dict()
    torch.save({**good, "scheduler": schedule}, path)
    refuse(
        ValueError,
        f"state_dict must be one of {kind}, (but it was written by a schedule of torch|or of the OneCycleLR)",
    )
    torch.save({**good, "scheduler": None}, path)
    refuse(ValueError, f"state_dict must be a dict that {kind} has written, but got NoneType")
    path.write_bytes(b"")
    refuse((EOFError, RuntimeError), "^")
    path.unlink()
    path.mkdir()
    refuse(OSError, "directory")


@pytest.mark.parametrize("kind", KINDS)
def test_a_malicious_file_is_never_run(kind: str, tmp_path: Path) -> None:
    path, marker, run = tmp_path / "checkpoint.pt", tmp_path / "marker", _Run(kind, 5)
    before, good = run.parts(), _Run(kind, 7).parts()
    evil = _Malicious(marker)
    scheduler = good["scheduler"]
    for state in (
        evil,
        {**good, "scheduler": evil},
        {**good, "scheduler": {**scheduler, "rounds": {"anchor": [evil]}}},
    ):
        torch.save(state, path)
        for load in (run.load, lambda path: run_folder.load_checkpoint(path.parent)):
            with pytest.raises((pickle.UnpicklingError, UsageError), match=r"(?i)weights.only|plain values only"):
                load(path)
        assert not marker.exists()
        assert _same(run.parts(), before)
    # It is no dud.
    torch.load(path, weights_only=False)
    assert marker.exists()


def test_nothing_here_unpickles() -> None:
    """Every torch.load is told weights_only, and pickle is used between our own processes alone."""
    root = Path(hdet.__file__).parent
    loads = [
        (path.relative_to(root).as_posix(), line)
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"torch\.load\(|pickle\.loads?\(|np\.load\(|joblib|shelve|marshal", line)
    ]
    assert loads
    for name, line in loads:
        fine = "weights_only=True" in line or "allow_pickle=False" in line or name == "launch.py"
        assert fine, f"{name}: {line.strip()}"


# -- the lab ------------------------------------------------------------------------------------------------------


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
        *((whole[: len(whole) * part // 8], cannot) for part in range(8)),
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
