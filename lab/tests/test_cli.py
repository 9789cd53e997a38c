"""The command line: its surface is frozen, and what a user gets wrong is one line and exit status 2."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from hdet_lab import cli
from hdet_lab.command_line import one_line

LAB_OPTIONS = [
    *("--data", "--device", "--help", "--interval", "--json", "--optimizer", "--out", "--replicas", "--schedule"),
    *("--seeds", "--spread", "--steps", "--task-option", "TASK"),
]
OPTIONS = {
    "train": [
        *("--checkpoint-s", "--data", "--device", "--freeze-file", "--help", "--interval", "--json", "--knobs", "--lr"),
        *("--method", "--optimizer", "--out", "--replicas", "--resume", "--schedule", "--seed", "--spread", "--steps"),
        *("--yes", "TASK"),
    ],
    "watch": ["--every-s", "--help", "--once", "RUN"],
    "report": ["--help", "--out", "RUN"],
    "ablate": sorted(
        [*LAB_OPTIONS, "--high-lr", "--low-lr", "--momentum", "--noise", "--rate", "--temperature", "--warm-steps"]
    ),
    "compare": sorted([*LAB_OPTIONS, "--methods", "--population-interval", "--starts", "--workers"]),
    "bench": [
        *("--data", "--device", "--docs", "--half", "--help", "--methods", "--out", "--pages", "--records", "--seeds"),
        *("--steps", "--task", "--tasks", "--workers"),
    ],
    "doctor": [
        *("--device", "--help", "--interval", "--json", "--max-share", "--method", "--model", "--parameters"),
        *("--replicas", "--skip-drill", "--step-ms", "--tensors", "--timeout-s"),
    ],
    "demo": ["--bad-lr", "--help", "--lr", "--out", "--replicas", "--steps"],
}


@pytest.fixture(autouse=True)
def _nothing_is_left_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_are_frozen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    # Names stand at the beginning of a line; what they mean is further in.
    shown = re.findall(r"^[│ ] {1,2}(?:-h, )?(--[a-z-]+|[A-Z]+)\b", capsys.readouterr().out, re.MULTILINE)
    assert sorted(set(shown)) == OPTIONS[command]


def test_the_commands_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(cli.COMMANDS) == list(OPTIONS)
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in OPTIONS)
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert "hdet " in capsys.readouterr().out


def test_the_program_is_installed() -> None:
    assert {entry.value for entry in entry_points(group="console_scripts", name="hdet")} == {"hdet_lab.cli:main"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], r"hdet: command must be one of train, .*, compare, bench, doctor, demo, but got 'nope'"),
        (["train"], r"TASK .*\(required\); see hdet train --help"),
        (["train", "nope"], r"TASK must be one of .*stdlib-gpt.*small-gpt, or MODULE:CLASS, but got 'nope'"),
        (["train", "small-gpt", "--lr", "fast"], r"--lr: could not convert string to float: 'fast'; see"),
        (["train", "small-gpt", "--lr", "-1"], r"--lr must be a finite number > 0, but got -1.0"),
        (["train", "small-gpt", "--spread", "1"], r"--spread must be in \(0, 1\), but got 1.0"),
        (["train", "small-gpt", "--steps", "0"], r"--steps must be an integer >= 1, but got 0"),
        (["train", "small-gpt", "--steps", "5"], r"--steps must be more than 10 .* one-cycle .* but got 5"),
        (["train", "small-gpt", "--seed", "-1"], r"--seed must be an integer from 0 to 2\^53, but got -1"),
        (["train", "small-gpt", "--device", "abacus"], r"--device must be cpu or cuda, but got 'abacus'"),
        (["train", "small-gpt", "--method", "best"], r"invalid choice 'best' for argument '--method'.*'gradient'"),
        (["train", "small-gpt", "--speed", "3"], r"Unrecognized options: --speed.*; see hdet train --help"),
        (["train", "small-gpt", "--method", "loss"], r"--method loss .* at least 2 processes, but got 1; add --repl"),
        (["train", "small-gpt", "--replicas", "5"], r"--replicas must divide the 32 rows .* but got 5"),
        (["train", "small-gpt", "--out", "."], r"--out must be a new folder, but \. exists; choose another"),
        (["train", "feed", "--data", "here"], r"here/kuairand-pure/log.npz is missing; .*--data here"),
        (["train", "--resume", "nowhere"], r"a run folder must hold config.json .* but nowhere.config.json cannot"),
        (
            ["watch", "nowhere"],
            r"a run folder must hold .* nowhere.config.json cannot be read .*; hdet train writes one",
        ),
        (["watch", ".", "--every-s", "0"], r"--every-s must be a finite number > 0, but got 0"),
        (["report", "nowhere"], r"RUN must be a run folder or a sink's records, or hold some, but nowhere does not"),
        (["report", "."], r"RUN must be a run folder or a sink's records, or hold some, but \. has none"),
        (["report"], r"; see hdet report --help|RUN must name at least one"),
        (["ablate", "nope"], r"TASK must be one of .*quadratic.*, but got 'nope'"),
        (
            ["ablate", "quadratic", "--seeds", "0", "0"],
            r"--seeds must be one or more different integers .* but got 0 0",
        ),
        (["ablate", "quadratic", "--seeds", "-1"], r"--seeds must be one or more different integers >= 0, but got -1"),
        (["ablate", "quadratic", "--replicas", "1"], r"--replicas must be an integer >= 2, but got 1"),
        (["ablate", "quadratic", "--replicas", "5"], r"--replicas must divide the 32 rows .* but got 5"),
        (["ablate", "quadratic", "--spread", "0"], r"--spread must be in \(0, 1\), but got 0.0"),
        (["ablate", "quadratic", "--steps", "0"], r"--steps must be an integer >= 1, but got 0"),
        (["ablate", "quadratic", "--steps", "9"], r"--steps must be more than 10 .* but got 9; use more, or another"),
        (["ablate", "quadratic", "--interval", "2000"], r"--interval must be at most the 1000 steps .* but got 2000"),
        (["ablate", "quadratic", "--device", "abacus"], r"--device must be cpu or cuda, but got 'abacus'"),
        (["ablate", "quadratic", "--low-lr", "0"], r"--low-lr must be a finite number > 0, but got 0.0"),
        (["ablate", "quadratic", "--low-lr", "99"], r"--low-lr must be below --high-lr, but got 99 and 10"),
        (["ablate", "quadratic", "--warm-steps", "0"], r"--warm-steps must be an integer >= 1, but got 0"),
        (["ablate", "quadratic", "--noise", "-1"], r"--noise must be a finite number >= 0, but got -1.0"),
        (["ablate", "quadratic", "--momentum", "1"], r"--momentum must be in \[0, 1\), but got 1.0"),
        (["ablate", "quadratic", "--rate", "inf"], r"--rate must be a finite number >= 0, but got inf"),
        (["ablate", "quadratic", "--temperature", "0"], r"--temperature must be a finite number > 0, but got 0.0"),
        (["ablate", "quadratic", "--json", "no/r.json"], r"--json must be a file in a folder .* but got no/r.json"),
        (["ablate", "quadratic", "--json", "."], r"--json must be a file, but \. is a folder; use --out for a folder"),
        (["ablate", "quadratic", "--out", "."], r"--out must be a new folder, but \. exists; choose another"),
        (
            ["ablate", "quadratic", "--out", "/proc/a"],
            r"--out must be a folder that can be created, but /proc/a cannot",
        ),
        (["ablate", "quadratic", "--task-option", "noise"], r"--task-option must be NAME=VALUE, but got 'noise'"),
        (["ablate", "quadratic", "--task-option", "nois=1"], r"an option of quadratic, but got nois=1: .*'nois'"),
        (["ablate", "quadratic", "--task-option", "noise=-1"], r"but got noise=-1: .*noise at least 0"),
        (["compare", "feed", "--data", "here"], r"here/kuairand-pure/log.npz is missing; .*--data here"),
        (["compare", "quadratic", "--methods", "best"], r"invalid choice 'best' for argument '--methods'"),
        (["compare", "quadratic", "--methods", "loss", "loss"], r"one or more different methods, but got loss loss"),
        (["compare", "quadratic", "--starts", "1", "-1"], r"--starts must be different finite numbers > 0, but got 1"),
        (["compare", "quadratic", "--starts", "1"], r"--starts must be two or more, a range .* but got 1.0"),
        (["compare", "quadratic", "--population-interval", "0"], r"--population-interval must be an integer >= 1"),
        (["compare", "quadratic", "--workers", "0"], r"--workers must be an integer >= 1, but got 0"),
        (["doctor", "--replicas", "0"], r"--replicas must be an integer >= 1, but got 0"),
        (["doctor", "--parameters", "5", "--tensors", "6"], r"--tensors must be between 1 and --parameters, but got 6"),
        (["doctor", "--model", "package.make"], r"--model must be MODULE:FUNCTION, but got 'package.make'"),
        (["doctor", "--max-share", "0"], r"--max-share must be in \(0, 1\], but got 0.0"),
        (["doctor", "--timeout-s", "inf"], r"--timeout-s must be a finite number > 0, but got inf"),
        (["doctor", "--device", "abacus"], r"--device must be cpu or cuda, but got 'abacus'"),
        (["demo", "--replicas", "1.5"], r"--replicas.*1\.5.*; see hdet demo --help"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert err.startswith("hdet")


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(name, value)
        assert cli.main(["train", "small-gpt"]) == 2
    assert f"must be free, but MASTER_PORT={port} on localhost is in use; choose another" in capsys.readouterr().err


def test_replicas_are_the_processes_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "small-gpt", "--replicas", "4"]) == 2
    assert re.search(r"processes that torchrun has started, 2, but got 4", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "package"),
    [
        *(("demo", package) for package in (*cli.PACKAGES, *cli.CHART_PACKAGES)),
        *(("doctor", package) for package in cli.PACKAGES),
    ],
)
def test_a_missing_package_names_the_install_command(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main([command]) == 2
    assert capsys.readouterr().err == f"hdet {command} needs {package}; install it with: pip install {package}\n"


_ON_A_CLUSTER = """
import sys
from hdet_lab import cli

sys.modules.update(dict.fromkeys(cli.CHART_PACKAGES))  # importing one of them fails
assert cli.main(["doctor", "--parameters", "1e4", "--tensors", "2", "--method", "gradient", "--max-share", "1"]) == 0
assert not [name for name in sys.modules if name.startswith("hdet_lab.tasks")]
"""


@pytest.mark.slow
def test_the_doctor_needs_neither_charts_nor_tasks() -> None:
    done = subprocess.run([sys.executable, "-c", _ON_A_CLUSTER], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "HDET will work here." in done.stdout


def test_a_framed_error_becomes_one_line() -> None:
    box = "╭─ Bad ─────╮\n│ --lr: no  │\n│ number.   │\n│ ───────── │\n│ For help  │\n╰───────────╯\n"
    assert one_line(box) == "--lr: no number"
    assert one_line("Bad\n-----\n--lr: no\nnumber.\n-----\nFor help\n") == "--lr: no number"
    assert one_line("Something else") == "Something else"
