"""A disk that is full or read-only: training goes on, with one warning, and no file ends in half a line."""

from __future__ import annotations

import json
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet import Adapt, AutoLR, RoundRecord
from hdet.launch import launch
from hdet.sinks import JsonLinesSink, TensorBoardSink

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
