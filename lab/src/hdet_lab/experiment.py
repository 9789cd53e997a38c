"""What ``hdet ablate`` and ``hdet compare`` share: options, the task, and what is written in the end."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from tyro.conf import Positional, UseAppendAction, arg

from hdet.policy.timing import default_interval
from hdet_lab.command_line import UsageError
from hdet_lab.files import replace_file
from hdet_lab.recipes import OptimizerName, ScheduleName, SweepMethod
from hdet_lab.reports.drawing import Chart, write_pngs
from hdet_lab.reports.page import Table, facts_table, page
from hdet_lab.runs import provenance
from hdet_lab.runs.folder import make_folder, plain
from hdet_lab.runs.settings import RunOptions, folder_name, open_task
from hdet_lab.stacked.run import Run

RESULTS, PAGE = "results.json", "report.html"
FINAL_SHARE = 0.02
"""Of a run, over which its final training loss is the mean."""


@dataclass(frozen=True)
class LabOptions(RunOptions):
    """Options of an experiment with many runs on one device."""

    task: Annotated[str, Positional, arg(metavar="TASK")]
    """What to train: stdlib-gpt, small-gpt, quadratic, one with data of its own, or your own class, MODULE:CLASS."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, data order and permutations; everything runs once for each."""
    optimizer: OptimizerName = "adam"
    """Adam (.9, .95), AdamW with weight decay .1, SGD with momentum .9, Lion, Muon with Adam."""
    schedule: ScheduleName = "one-cycle"
    """Shape of the learning rate over a run."""
    steps: int | None = None
    """Optimizer steps of a run; default the task's."""
    replicas: int = 8
    """N, of the methods that compare or average replicas."""
    interval: int | None = None
    """T, steps of a round; default a hundredth of the run, at most 1000."""
    spread: float = 1 / 9
    """Alpha, how far replicas' learning rates reach from the base."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    data: Path = Path("data")
    """Folder that holds the tasks' data."""
    task_option: UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE of the task, for example noise=2.0 of quadratic; may be repeated."""
    json: Path | None = None
    """Write results.json here too."""
    out: Path | None = None
    """New folder for results.json, report.html and its charts; default runs/COMMAND-TASK-TIME."""

    def check(self) -> None:
        super().check()
        seeds_ok = bool(self.seeds) and min(self.seeds) >= 0 and len(set(self.seeds)) == len(self.seeds)
        self.require("seeds", "one or more different integers >= 0", seeds_ok)
        self.require("replicas", "an integer >= 2", self.replicas >= 2)
        if self.json is not None and not self.json.parent.is_dir():
            raise UsageError(f"--json must be a file in a folder that exists, but got {self.json}")
        if self.json is not None and self.json.is_dir():
            raise UsageError(f"--json must be a file, but {self.json} is a folder; use --out for a folder")

    def task_options(self) -> dict[str, Any]:
        """The task options as a dict; values that are JSON, such as numbers, are parsed."""
        found: dict[str, Any] = {}
        for text in self.task_option:
            name, equals, value = text.partition("=")
            if not (name.isidentifier() and equals and value):
                raise UsageError(f"--task-option must be NAME=VALUE, but got {text!r}")
            try:
                found[name] = json_format.loads(value)
            except ValueError:
                found[name] = value
        return found


class Experiment:
    """An opened task, and the options with every default filled in.

    Attributes:
        command: its name.
        options: as given.
        task: what is trained.
        num_steps: of a run.
        interval: T.
        out: the new folder.
        facts: what the results depend on.
    """

    def __init__(self, command: str, options: LabOptions) -> None:
        options.check()
        self.command, self.options = command, options
        self.task = task = open_task(options.task, options.data, options.task_options())
        provenance.tell_note(task)
        self.num_steps = num_steps = options.steps or task.total_steps
        self.interval = options.interval or default_interval(num_steps)
        options.check_run(task, num_steps, options.replicas)
        if self.interval > num_steps:
            raise UsageError(f"--interval must be at most the {num_steps} steps of a run, but got {self.interval}")
        if options.device == "cuda":
            torch.set_float32_matmul_precision("high")
        model = task.build(0)
        # Where BatchNorm sees only a replica's rows, plain training must too, or the two could not be compared.
        self.num_plain_replicas = options.replicas if any(b.is_floating_point() for b in model.buffers()) else 1
        now = datetime.now(timezone.utc)
        config = {
            **asdict(options),
            "steps": num_steps,
            "interval": self.interval,
            "task_options": options.task_options(),
        }
        self.facts: dict[str, Any] = {
            "command": command,
            "config": {key: value for key, value in config.items() if key not in ("json", "out", "task_option")},
            "started": now.isoformat(timespec="seconds"),
            **provenance.describe(task),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "batch_rows": task.batch_rows,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        self.out = options.out or Path("runs") / f"{command}-{folder_name(options.task)}-{now:%Y%m%d-%H%M%S}"
        make_folder(self.out)

    def make_run(self, lr: float, seed: int, method: SweepMethod, **changes: Any) -> Run:
        """A run with the options' settings."""
        values: dict[str, Any] = {
            "num_replicas": self.num_plain_replicas if method in ("fixed", "gradient") else self.options.replicas,
            "interval": self.interval,
            "spread": self.options.spread,
        }
        if method == "paper":
            values["hold"] = 0.0
        return Run(lr=lr, seed=seed, method=method, **{**values, **changes})

    def sweep_options(self) -> dict[str, Any]:
        """Arguments of a sweep that all runs share."""
        options = self.options
        return {
            "optimizer": options.optimizer,
            "schedule": options.schedule,
            "num_steps": self.num_steps,
            "device": options.device,
        }

    def write_results(self, results: Mapping[str, Any]) -> None:
        """The results so far, as JSON."""
        text = json_format.dumps(plain({**self.facts, **results}), indent=1, allow_nan=False) + "\n"
        for path in (self.out / RESULTS, self.options.json):
            if path is not None:
                path.write_text(text)

    def write_report(self, title: str, tables: Sequence[Table], charts: Sequence[Chart]) -> Path:
        """The page and its charts; returns the path of the page."""
        write_pngs(charts, self.out)
        details = facts_table("Configuration and machine", self.facts)
        path = self.out / PAGE
        text = page(title, tables, charts, [details])
        replace_file(path, lambda file: file.write(text.encode("utf-8")))
        return path


def final_loss(losses: Sequence[float], lengths: Sequence[int]) -> float:
    """Mean of the losses of the last rounds, weighed by their steps: as many rounds as fill :data:`FINAL_SHARE`."""
    wanted = FINAL_SHARE * sum(lengths)
    total, steps = 0.0, 0
    for loss, length in zip(reversed(losses), reversed(lengths), strict=True):
        total, steps = total + loss * length, steps + length
        if steps >= wanted:
            break
    return total / steps


def make_console() -> Console:
    """As wide as the terminal; in a file or a pipe, as wide as a table may get."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def show(console: Console, table: Table) -> None:
    """A table on the terminal."""
    shown = RichTable(title=table.title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for index, head in enumerate(table.heads):
        shown.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
