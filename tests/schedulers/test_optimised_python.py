"""``python -O`` leaves out every assert: none may do work, or judge what a user passes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # in interpreters of their own

_JOIN_AND_LOAD = """
import copy, sys, torch
from hdet import AutoLR

assert False, "must run with -O"
first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([first], lr=0.1)
scheduler = AutoLR(optimizer, total_steps=300)

def train(num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = sum((p ** 2).sum() for group in optimizer.param_groups for p in group["params"])
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())

train(2)
optimizer.add_param_group({"params": [second], "lr": 0.02})
saved = copy.deepcopy(optimizer.state_dict())
saved["param_groups"][1]["lr"] = 0.7  # of a rank with another multiplier
optimizer.load_state_dict(saved)
lrs = [group["lr"] for group in optimizer.param_groups]
print(round(lrs[1] / lrs[0], 6), len(scheduler.get_last_lr()))
train(3)
lrs = [group["lr"] for group in optimizer.param_groups]
print(round(lrs[1] / lrs[0], 6))
"""

_BAD_SIGNAL = """
from hdet.signals.base import Reading
from hdet.ensemble.signals import LossSignal
from hdet.testing import check_signal

class Wrong(LossSignal):
    def drain(self):
        return None

try:
    check_signal(lambda *_: Wrong())
except AssertionError as error:
    print(error)
"""


def _run(script: str) -> str:
    command = [sys.executable, "-O", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_group_that_joins_before_a_load_is_taken_up_with_what_it_was_given() -> None:
    assert _run(_JOIN_AND_LOAD).split() == ["0.2", "2", "0.2"]


def test_the_contract_of_signals_is_checked() -> None:
    assert "drain must return a Reading, but got NoneType" in _run(_BAD_SIGNAL)
