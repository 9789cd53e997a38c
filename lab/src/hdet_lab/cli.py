"""The ``hdet`` program: finds the command's module and hands it the arguments.

A command is a module with ``main(arguments) -> exit status``; only the one that runs is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("hdet_lab.commands.train", "one run, on local processes or under torchrun, into a run folder"),
    "watch": ("hdet_lab.commands.watch", "a run folder, live in the terminal"),
    "report": ("hdet_lab.commands.report", "one HTML file about one run or several, the lab's or your own"),
    "ablate": ("hdet_lab.commands.ablate", "the paper's six configurations and AutoLR, side by side"),
    "compare": ("hdet_lab.commands.compare", "AutoLR, fixed learning rates and other methods, at equal budget"),
    "bench": ("hdet_lab.commands.bench", "the benchmark: AutoLR and its rivals on a suite of tasks, and its pages"),
    "doctor": ("hdet_lab.cluster.doctor", "whether HDET will work on this cluster, and what it costs there"),
    "demo": ("hdet_lab.commands.demo", "a fixed schedule and AutoLR with nothing set, in two minutes"),
}
PACKAGES = ("tyro", "rich")
CHART_PACKAGES = ("jinja2", "matplotlib", "tensorboard")
NO_CHARTS = ("bench", "doctor")
"""Commands that draw without these packages, and run on machines that do not have them."""
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name in ("", "-h", "--help"):
        print(_usage())
        return 0 if name else USAGE_ERROR
    if name == "--version":
        import hdet

        print(f"hdet {hdet.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"hdet: command must be one of {', '.join(COMMANDS)}, but got {name!r}; see hdet --help", file=sys.stderr)
        return USAGE_ERROR
    module = COMMANDS[name][0]
    for package in PACKAGES if name in NO_CHARTS else (*PACKAGES, *CHART_PACKAGES):
        if importlib.util.find_spec(package) is None:
            print(f"hdet {name} needs {package}; install it with: pip install {package}", file=sys.stderr)
            return USAGE_ERROR
    from hdet.checks import printable
    from hdet_lab.command_line import FailedError, UsageError

    try:
        status: int = importlib.import_module(module).main(rest)
    except UsageError as error:
        print(f"hdet {name}: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except FailedError as error:
        print(f"hdet {name}: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _usage() -> str:
    lines = [f"  {name:8} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: hdet COMMAND ...", "", *lines, "", "hdet COMMAND --help has the options of each."])


if __name__ == "__main__":
    sys.exit(main())
