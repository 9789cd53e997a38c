"""Importing is quiet and light, the public surface is small, and imports go one way: core to edges."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hdet

SOURCE = Path(hdet.__file__).parent

MATHS = {
    *("spread", "checks", "signal", "history", "steering", "guard", "operations", "quarantine"),
    *("controllers", "controllers.base", "controllers.hold", "controllers.paper", "controllers.evidence"),
    *("controllers.joint", "knobs"),
}

# What the round loop is put together from, and what its faces are.
LOOP = {"replicas", "sharding", "saved", "anchor", "board", "gradient_signal", "outer", "rollback", "weights"}
FACE = {
    "replicas",
    "rounds",
    "probe",
    "schedulers.assembly",
    "schedulers.face",
    "schedulers.arguments",
    "schedulers.states",
}

# What each module of the core may import from the package. What is not listed, it may not.
MAY_IMPORT: dict[str, set[str]] = {
    "spread": set(),
    "checks": {"spread"},
    "saved": {"checks", "sharding"},
    "signal": set(),
    "history": set(),
    "controllers.base": {"spread", "checks"},
    "controllers.hold": {"spread", "controllers.base"},
    "controllers.paper": {"spread", "checks", "controllers.base"},
    "controllers.evidence": {"spread", "checks", "controllers.base"},
    "controllers.joint": {"spread", "checks", "controllers.base"},
    "controllers": {f"controllers.{name}" for name in ("base", "hold", "paper", "evidence", "joint")},
    "steering": {"spread", "checks", "controllers.base"},
    "guard": {"checks"},
    "operations": {"checks"},
    "quarantine": {"spread", "checks"},
    "knobs.base": {"checks"},
    "knobs.update": {"checks", "knobs.base"},
    "knobs.model": {"checks", "knobs.base"},
    "knobs": {"knobs.base", "knobs.update", "knobs.model"},
    "probe": {"signal"},
    "board": {"spread", "checks", "history", "knobs", "probe", "steering", "controllers.base"},
    "snapshot": set(),
    "sinks": {"checks", "history"},
    "launch": set(),
    "testing.controllers": {"spread", "controllers.base"},
    "testing.faults": set(),
    "testing": {"launch", "testing.controllers", "testing.faults"},
    "sharding": set(),
    "replicas": {"spread", "sharding"},
    "converge": {"replicas"},
    "warm_start": {"checks", "replicas", "sharding"},
    "anchor": {"sharding", "converge"},
    "gradient_signal": {"spread", "checks", "sharding", "anchor"},
    "outer": {"spread", "checks", "saved", "sharding", "anchor"},
    "weights": {"replicas", "sharding", "converge"},
    "meeting": {"spread", "replicas"},
    "rollback": {"spread", "guard", "snapshot", "weights"},
    "together": {"spread", "operations", "quarantine", "replicas", "converge", "outer", "weights"},
    "round_state": {"spread", "checks", "guard", "quarantine", "replicas", "saved", "gradient_signal"},
    "rounds": {*MATHS, *LOOP, "converge", "meeting", "together", "round_state"},
    "schedulers.assembly": {*MATHS, *LOOP, "probe", "rounds", "snapshot"},
    "schedulers.face": {*MATHS, "rounds", "schedulers.arguments", "schedulers.states"},
    "schedulers.arguments": {"checks"},
    "schedulers.states": {"checks"},
    "schedulers.one_cycle": {*MATHS, *FACE},
    "schedulers.auto_lr": {*MATHS, *FACE},
    "schedulers": {"schedulers.one_cycle", "schedulers.auto_lr"},
    "explorer": {*MATHS, *FACE, "outer"},
    "__init__": {"explorer", "history", "knobs", "operations", "schedulers", "warm_start"},
}
EDGES = ("lab", "integrations", "cli", "__main__")
"""May import all of the core; the core imports none of them."""


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


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


def test_every_module_of_the_core_has_its_place() -> None:
    core = {name for name in MODULES if not name.startswith(EDGES)}
    assert core <= set(MAY_IMPORT), "a new module needs a line in the table"


@pytest.mark.parametrize("name", [name for name in MAY_IMPORT if name in MODULES])
def test_imports_go_one_way(name: str) -> None:
    own = _own_imports(MODULES[name])
    assert own <= MAY_IMPORT[name], f"{name} must not import {sorted(own - MAY_IMPORT[name])}"
    assert not {module for module in _imports(MODULES[name]) if module.startswith(tuple(f"hdet.{e}" for e in EDGES))}
    assert name == "__init__" or "hdet" not in _imports(MODULES[name]), (
        f"{name} must not import the package that imports it"
    )


@pytest.mark.parametrize("name", sorted(MATHS & set(MODULES)))
def test_the_maths_knows_no_processes(name: str) -> None:
    assert not {module for module in _imports(MODULES[name]) if module.startswith("torch.distributed")}


def test_the_table_has_no_circles() -> None:
    left = {name: set(allowed) for name, allowed in MAY_IMPORT.items()}
    while left:
        free = {name for name, allowed in left.items() if not allowed & set(left)}
        assert free, f"circle among {sorted(left)}"
        left = {name: allowed for name, allowed in left.items() if name not in free}


def test_the_public_names_are_frozen() -> None:
    names = ["AutoLR", "Explorer", "OneCycleAutoLR", "Operations", "RoundRecord", "knobs", "warm_noisy_init"]
    assert sorted(hdet.__all__) == names
    assert all(hasattr(hdet, name) for name in hdet.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", hdet.__version__)


_IMPORT_QUIETLY = """
import logging, os, random, sys, warnings
import numpy, torch, torch.distributed, torch.distributed.tensor, torch.nn.parallel

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
optional |= {"deepspeed", "ray", "torchft", "torchtitan"}
assert not optional & set(sys.modules), f"loaded {sorted(optional & set(sys.modules))}"
assert not {name for name in sys.modules if name.startswith(("hdet.lab", "hdet.integrations", "hdet.sinks"))}
"""


def test_importing_is_quiet_and_light() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT_QUIETLY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""


def test_the_package_is_marked_as_typed() -> None:
    assert (SOURCE / "py.typed").exists()
