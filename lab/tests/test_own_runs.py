"""``hdet report`` on a user's own run: what sinks have written, also while they are writing, and from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet import RoundRecord
from hdet.history import KnobRecord
from hdet.plot import breaks, events
from hdet.sinks import JsonLinesSink, TensorBoardSink, as_json
from hdet_lab import cli
from hdet_lab.command_line import UsageError
from hdet_lab.reports.run import Run, run_of, thinned
from hdet_lab.runs import own

NAMES = ["body", "head/last"]
NUM_ROUNDS = 12


def record(index: int, *, lift: float = 1.5) -> RoundRecord:
    """Two replicas, two param groups, one scale that rises by ``lift`` a round."""
    scale = lift**index
    return RoundRecord(
        index=index,
        step=10 * (index + 1),
        losses=(2.0 / (index + 1), float("nan") if index == 3 else 2.1 / (index + 1)),
        values=((0.9e-3 * scale, 1.1e-3 * scale), (1.8e-3 * scale, 2.2e-3 * scale)),
        base_values=(1e-3 * scale, 2e-3 * scale),
        scales=(scale,),
        control={"z": (index - 5.0,)} if index else {},
        unhealthy=(1,) if index == 3 else (),
        num_rollbacks=int(index >= 3),
        distance=0.5,
        converge_s=0.01,
        knobs={"weight_decay": KnobRecord((0.01, 0.02), 0.015, -1.0, 0.5, -2.0)},
    )


def write(sink: Any, indices: Any = range(NUM_ROUNDS), **made: Any) -> None:
    for index in indices:
        sink(record(index, **made), NAMES)
    sink.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    write(JsonLinesSink(tmp_path / "log.jsonl"))
    return tmp_path / "log.jsonl"


def page_of(path: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["report", str(path), "--out", str(out)]) == 0
    capfd.readouterr()
    return (out / "report.html").read_text()


@pytest.mark.slow
def test_json_lines_are_read_back_as_they_were(log: Path) -> None:
    [run] = own.read(log)
    expected = run_of([record(index) for index in range(NUM_ROUNDS)], NAMES, name="log.jsonl")
    assert [{k: v for k, v in entry.items() if k != "names"} for entry in run.rounds] == expected.rounds
    assert run.groups == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("bytes_missing", [1, 2, 40, 300])
def test_a_file_that_is_being_written_is_read(bytes_missing: int, log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-bytes_missing])
    [run] = own.read(log)
    # Without its newline the last line is whole; without its brace it is not.
    assert len(run.rounds) == NUM_ROUNDS - (bytes_missing > 1)


def test_a_report_about_a_file(log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(log)]) == 0
    assert capfd.readouterr().out == f"wrote {tmp_path}/log-report/report.html\n"
    html = (tmp_path / "log-report" / "report.html").read_text()
    [headline] = re.findall("<h1>(.*?)</h1>", html)
    peak = 2e-3 * 1.5**11
    assert headline == (
        f"The run found a peak learning rate of {peak:.2g}, 86 times the 0.002 it was given; the training loss is "
        "0.171 at step 120. One round was undone."
    )
    assert f"<td>log</td><td>0.1708</td><td>{peak:.2g}</td><td>0.002</td><td>120</td><td>2</td><td>1</td>" in html
    assert "<b>step 40</b> The round was undone, and the learning rate lowered." in html
    assert "<td>param groups</td><td>body, head/last</td>" in html
    assert {path.stem for path in (tmp_path / "log-report").glob("*.png")} == {
        *("loss", "lr", "knob-1", "evidence", "distance")
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_events_tell_the_same(log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    board = tmp_path / "board"
    write(TensorBoardSink(board / "version_0"))
    [run], [expected] = own.read(board / "version_0"), own.read(log)
    assert (run.steps, run.groups) == (expected.steps, NAMES)
    for entry, other in zip(run.rounds, expected.rounds, strict=True):
        assert entry["losses"] == pytest.approx(other["losses"], nan_ok=True)
        assert entry["base_values"] == pytest.approx(other["base_values"])
        assert entry["values"][1] == pytest.approx(other["values"][1])
        assert entry["knobs"]["weight_decay"]["values"] == pytest.approx([0.01, 0.02])
        for key in ("index", "num_rollbacks", "distance", "control"):
            assert entry[key] == other[key]
        assert len(entry["unhealthy"]) == len(other["unhealthy"])
    assert (run.peak, run.start) == pytest.approx((expected.peak, expected.start))
    html = page_of(board, tmp_path / "out", capfd)
    assert "86 times the 0.002 it was given" in html
    [file] = (board / "version_0").iterdir()
    assert "86 times the 0.002 it was given" in page_of(file, tmp_path / "again", capfd)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_events_that_are_cut_or_of_something_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    write(TensorBoardSink(tmp_path / "board"))
    [file] = (tmp_path / "board").iterdir()
    file.write_bytes(file.read_bytes()[:-700])
    [run] = own.read(tmp_path / "board")
    assert NUM_ROUNDS - 2 <= len(run.rounds) <= NUM_ROUNDS
    page_of(tmp_path / "board", tmp_path / "out", capfd)

    other = SummaryWriter(str(tmp_path / "other"))
    other.add_scalar("loss", 1.0, 1)
    other.close()
    assert cli.main(["report", str(tmp_path / "other")]) == 2
    assert re.search(r"RUN must be a run folder or a sink's records, or hold some, but .*other has none", _err(capfd))


def _err(capfd: pytest.CaptureFixture[str]) -> str:
    err: str = capfd.readouterr().err
    assert err.startswith("hdet report: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.slow
def test_a_resumed_run_is_one_and_a_new_one_another(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "log.jsonl")
    write(sink, range(6))
    write(sink, range(4, 8), lift=2.0)  # from a checkpoint of the fourth round
    write(sink, range(3))
    first, second = own.read(tmp_path / "log.jsonl")
    assert [entry["index"] for entry in first.rounds] == list(range(8))
    assert first.rounds[4]["scales"] == [2.0**4]
    assert [entry["index"] for entry in second.rounds] == list(range(3))
    assert [first.name, second.name] == ["log.jsonl, run 1", "log.jsonl, run 2"]


@pytest.mark.slow
def test_a_folder_of_runs_is_one_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(JsonLinesSink(tmp_path / "a" / "auto.jsonl"))
    write(JsonLinesSink(tmp_path / "b" / "deep" / "plain.jsonl"), lift=1.0)
    (tmp_path / "data.jsonl").write_text('{"text": "not a record"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    html = page_of(tmp_path, tmp_path / "out", capfd)
    assert "<td>auto</td>" in html
    assert "<td>plain</td>" in html
    assert "not a record" not in html
    # A report lies among the runs without being one.
    assert page_of(tmp_path, tmp_path / "out", capfd).count("<td>auto</td>") == 1


@pytest.mark.slow
def test_records_that_start_late_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(JsonLinesSink(tmp_path / "log.jsonl"), range(5, 9))
    html = page_of(tmp_path / "log.jsonl", tmp_path / "out", capfd)
    assert "The first 5 rounds are not in the records" in html
    # What was undone before is no event of these rounds.
    assert "What happened" not in html


@pytest.mark.slow
def test_param_groups_and_replicas_may_change_on_the_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = JsonLinesSink(tmp_path / "log.jsonl")
    sink(replace(record(0), losses=(1.0,), values=((1e-3,),), base_values=(1e-3,)), NAMES[:1])
    write(sink, range(1, 5))
    html = page_of(tmp_path / "log.jsonl", tmp_path / "out", capfd)
    assert "body, head/last" in html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"losses": "x"}, r"line 2: losses must be a list of finite numbers or nulls, and not empty, but got 'x'"),
        ({"index": -1}, r"line 2: index must be an integer >= 0, but got -1"),
        ({"events": [1]}, r"line 2: events must be a list of strings, but got \[1\]"),
        ({"knobs": []}, r"line 2: knobs must be an object, but got \[\]"),
        ({"values": [1]}, r"line 2: values must be a list of lists"),
    ],
)
def test_lines_that_cannot_be_used_are_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    lines = [as_json(record(index).as_dict()) for index in range(3)]
    lines[1] |= change
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(UsageError, match=rf"log.jsonl cannot be used: {text}"):
        own.read(path)


@pytest.mark.slow
def test_files_of_something_else_are_refused_on_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    for content in (b"\xff\xfe\n", b"[]\n", b"\x1b[2J\n{}\n", b"[" * 100_000 + b"\n", b"null\n"):
        path.write_bytes(content)
        assert cli.main(["report", str(path)]) == 2
        assert _err(capfd).strip("\n").isprintable()
    path.write_bytes(b"")
    assert cli.main(["report", str(path)]) == 2
    assert "a report needs runs with at least one round, but" in _err(capfd)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(b"nothing of TensorBoard's")
    assert cli.main(["report", str(events)]) == 2
    assert _err(capfd)


@pytest.mark.slow
def test_whatever_the_names_are_they_are_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hostile = '"><script>alert(1)</script>$\\frac{'
    sink = JsonLinesSink(tmp_path / "<img src=x>.jsonl")
    for index in range(3):
        sink(replace(record(index), knobs={hostile: record(0).knobs["weight_decay"]}), [hostile, "\x1b[2J"])
    line = json.loads(sink.path.read_text().splitlines()[-1]) | {"index": 3, "events": [hostile], "phase": hostile}
    with sink.path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    html = page_of(sink.path, tmp_path / "out", capfd)
    assert "<script" not in html
    assert "<img" not in html
    assert "\x1b" not in html
    assert html.count("&lt;script&gt;") >= 3


@pytest.mark.slow
def test_a_page_of_the_labs_own_metrics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [{"event": "round", "time_s": 1.0, **as_json(record(index).as_dict())} for index in range(3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"event": "end", "step": 40}]))
    assert "<td>metrics</td>" in page_of(path, tmp_path / "out", capfd)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.slow
def test_a_chart_of_a_long_run_has_a_point_for_what_happened() -> None:
    few = [as_json(record(0).as_dict()) for _ in range(5000)]
    long = Run("long", [entry | {"index": i, "step": i + 1} for i, entry in enumerate(few)], NAMES)
    long.rounds[0] |= {"base_values": [None, None]}
    long.rounds[1233] |= {"base_values": [0.5, 0.1]}
    long.rounds[2345] |= {"events": ["It happened."]}
    for entry in long.rounds[3456:]:
        entry["num_rollbacks"] = 1
    thin = thinned(long, 1000)
    assert 1000 <= len(thin.rounds) <= 1010
    assert {1234, 2346, 3457, 5000} <= set(thin.steps)
    assert (thin.peak, events(thin)) == (long.peak, events(long))
    assert [thin.steps[at] for at in breaks(thin)] == [3457]
    assert thinned(thin, 2000) is thin
