"""Importing is quiet and light, the public surface is small, and imports go one way: core to edges."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import hdet

SOURCE = Path(hdet.__file__).parent

# The rooms, from the edges to the core: a room may import from those below it, and from itself. The wing, ensemble, is
# above the whole core: nothing but the package itself, which loads it when it is asked for, knows that it is there.
ROOMS = (
    {"__init__"},
    {"ensemble"},
    {"integrations"},
    {"auto_lr"},
    {"scheduler"},
    {"plan"},
    {"schedule"},
    {"plot"},
    {"run"},
    {"replication"},
    {"sinks", "testing", "found"},
    {"signals"},
    {"beside"},
    {"options"},
    {"weights"},
    {"replicas"},
    {"history"},
    {"policy"},
    {"controllers"},
    {"launch", "notices", "frozen"},
    {"checks", "reference"},
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
NUMBERS = ("policy", "controllers", "history", "checks")
"""Rooms that know numbers only: no processes."""


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def _imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands; ``from a import b`` names a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _own_imports(path: Path) -> set[str]:
    own = {name.removeprefix("hdet.") for name in _imports(path) if name.startswith("hdet.")}
    return own & set(MODULES)


def _room(module: str) -> str:
    return module.partition(".")[0]


def test_imports_go_one_way() -> None:
    assert {_room(name) for name in MODULES} - set(LEVEL) == set(), "needs a place among the rooms"
    upwards = [
        f"{name} must not import {own}"
        for name, path in MODULES.items()
        for own in _own_imports(path)
        if _room(own) != _room(name) and LEVEL[_room(own)] <= LEVEL[_room(name)]
    ]
    assert upwards == []
    inner = [name for name in MODULES if _room(name) not in ("integrations", "__init__")]
    assert [name for name in inner if "hdet" in _imports(MODULES[name])] == [], "must not import what imports them"


def test_files_to_read_import_nothing_of_the_package() -> None:
    for name in ("reference", "ensemble.reference"):
        assert not {module for module in _imports(MODULES[name]) if module.startswith("hdet")}


def test_no_private_name_of_torch_is_imported() -> None:
    """Another version of torch need not have them."""
    private = re.compile(r"torch\b.*\._\w*[a-z]")
    assert [(name, used) for name, path in MODULES.items() for used in _imports(path) if private.match(used)] == []


def test_rooms_of_numbers_import_no_torch() -> None:
    numbers = {name: path for name, path in MODULES.items() if _room(name) in NUMBERS}
    assert len(numbers) > 10
    other = ("torch", "multiprocessing")
    assert [(name, used) for name, path in numbers.items() for used in _imports(path) if used.startswith(other)] == []


def test_the_public_names_are_frozen() -> None:
    names = ["Adapt", "AutoLR", "Averaging", "Copies", "Ensemble", "Explorer", "Faults", "Found", "OneCycleAutoLR"]
    assert sorted(hdet.__all__) == [*names, "RoundRecord", "knobs", "warm_noisy_init"]
    assert all(hasattr(hdet, name) for name in hdet.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", hdet.__version__)


_IMPORT_QUIETLY = """
import logging, os, random, sys, warnings
import numpy, torch, torch.distributed, torch.nn.parallel

warnings.simplefilter("error")
filters = list(warnings.filters)
handlers = list(logging.getLogger().handlers), logging.getLogger().level
loggers = set(logging.root.manager.loggerDict)
environment = dict(os.environ)
threads = torch.get_num_threads()
states = torch.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()
modules = set(sys.modules)

import hdet

assert warnings.filters == filters, "warning filters changed"
assert (list(logging.getLogger().handlers), logging.getLogger().level) == handlers, "logging set up"
for name in set(logging.root.manager.loggerDict) - loggers:
    assert not logging.getLogger(name).handlers, f"handler on {name}"
assert dict(os.environ) == environment, "environment changed"
assert torch.get_num_threads() == threads, "threads changed"
assert torch.equal(torch.get_rng_state(), states[0])
assert (numpy.random.get_state()[1] == states[1]).all()
assert random.getstate() == states[2]
assert not torch.distributed.is_initialized()
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
foreign = new - {"hdet", "torch", "numpy"} - set(sys.stdlib_module_names)
assert not foreign, f"loaded {sorted(foreign)}"
optional = {"rich", "tyro", "tensorboard", "matplotlib", "jinja2", "hypothesis", "pytest", "pandas"}
optional |= {"lightning", "pytorch_lightning", "transformers", "accelerate", "wandb", "mlflow"}
optional |= {"ray", "torchft"}
assert not optional & set(sys.modules), f"loaded {sorted(optional & set(sys.modules))}"
later = ("hdet_lab", "hdet.ensemble", "hdet.integrations", "hdet.plot", "hdet.sinks")
assert not {name for name in sys.modules if name.startswith(later)}
tensor = "torch.distributed.tensor"  # slow to load, and of no use where no parameter lies on a mesh
assert tensor in modules or tensor not in sys.modules, f"loaded {tensor}"
"""


def test_importing_is_quiet_and_light() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # of one thread, a change to one would not show
    command = [sys.executable, "-c", _IMPORT_QUIETLY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""


def test_the_package_knows_nothing_of_the_lab() -> None:
    """What a training job installs: torch and numpy are all that it needs, and no file imports the lab."""
    project = (SOURCE.parents[1] / "pyproject.toml").read_text()
    assert re.search(r'^dependencies = \["torch>=[\d.]+,<3", "numpy>=[\d.]+,<3"\]$', project, re.MULTILINE)
    assert "hdet-lab" not in project
    assert [name for name, path in MODULES.items() if re.search(r"\b(hdet[-_.])?lab\b", path.read_text())] == []


def test_the_package_is_marked_as_typed() -> None:
    assert (SOURCE / "py.typed").exists()
