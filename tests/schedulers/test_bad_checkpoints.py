"""Checkpoint files that are cut short, flipped, foreign or malicious: refused with a reason, and nothing changes."""

from __future__ import annotations

import copy
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


@pytest.mark.slow
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
        with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
            run.load(path)
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
