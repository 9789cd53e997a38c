"""The examples run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun import Done, torchrun

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    package = path.stem.removeprefix("with_")
    if package == "torchtitan":
        pytest.skip("needs a checkout of torchtitan and two GPUs")
    if package not in ("ddp", "two_stage"):
        pytest.importorskip(package, reason=f"pip install {package}")
    if package == "ray":
        done = _fresh(tmp_path, str(path))
    elif package == "ddp":  # one of them from the command line, in fresh interpreters
        done = _fresh(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
    else:
        done = torchrun(path, folder=tmp_path, timeout_s=150, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"learned scale \d", done.stdout)) == 1, done.stdout


def _fresh(folder: Path, *arguments: str) -> Done:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a timeout ends the workers too
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Done(process.returncode, out, err)
