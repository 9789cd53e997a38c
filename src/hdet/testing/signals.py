"""A conformance suite for signals: what every one of them must do, whatever it measures.

It needs no test framework: call :func:`check_signal` in a test of your own.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.group import Replicas
from hdet.signals.base import Reading, Signal

NUM_STEPS = 5
GROUPS = 2

MakeSignal = Callable[[nn.Module, Optimizer], Signal]


def check_signal(make: MakeSignal) -> None:
    """Raise AssertionError with the first rule of the contract that a signal breaks.

    The rules: it moves neither weights nor gradients nor the optimizer's state; a reading holds float arrays of the
    right shapes, losses or slopes, or sizes; a round that shows nothing, and one that was forgotten, has no finite
    number in it; sharing in the middle of a round does not change what the round shows; its state is plain, and a round
    continued from it shows the same; a state that is not one of its own is refused and changes nothing.

    Args:
        make: returns a new signal for a small model and its optimizer, with two param groups of a learning rate each;
            called several times.

    Example:
        >>> from hdet.ensemble.signals import LossSignal
        >>> from hdet.testing import check_signal
        >>> check_signal(lambda model, optimizer: LossSignal())
    """
    _check_silence(make)
    _check_untouched(make)
    _check_reading(make)
    _check_sharing(make)
    _check_forgetting(make)
    _check_saving(make)
    _check_refusal(make)


class _Training:
    """A model that takes the same steps every time, with a signal that sees them; one replica, no processes."""

    def __init__(self, make: MakeSignal) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        groups = [{"params": list(layer.parameters())} for layer in (self.model[0], self.model[2])]
        self.optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        self.replicas = Replicas(None)
        self.losses: list[float] = []
        self.step = 0
        self.signal = make(self.model, self.optimizer)

    def train(self, num_steps: int = NUM_STEPS, *, ends: bool = True) -> None:
        """``ends``: whether a round ends with the last of them."""
        for i in range(num_steps):
            self.backward()
            self.signal.ends_round = ends and i == num_steps - 1
            self.signal.before_step(self.optimizer)
            self.optimizer.step()

    def backward(self) -> None:
        self.step += 1
        torch.manual_seed(self.step)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(torch.randn(8, 3)).square().mean()
        torch.autograd.backward(loss)
        self.losses.append(loss.item())

    def share(self) -> None:
        self.signal.launch()
        self.signal.share(self.replicas, np.array([np.mean(self.losses) if self.losses else np.nan]))

    def read(self) -> Reading:
        """The end of a round."""
        self.signal.measure(nullcontext())
        self.share()
        self.losses = []
        return self.signal.drain()

    def everything(self) -> list[Any]:
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters]
        state = [self.optimizer.state[p].get("momentum_buffer") for p in parameters if p in self.optimizer.state]
        modes = [module.training for module in self.model.modules()]
        return copy.deepcopy([parameters, gradients, state, modes, torch.get_rng_state()])


def _numbers(reading: Reading) -> list[float]:
    losses = () if reading.losses is None else reading.losses
    rows: list[Iterable[float]] = [losses, *(reading.slopes or ()), reading.sizes or ()]
    return [float(value) for row in rows for value in row]


def _require(ok: object, message: str) -> None:
    """As ``assert``, which ``python -O`` would leave out."""
    if not ok:
        raise AssertionError(message)


def _check_silence(make: MakeSignal) -> None:
    training = _Training(make)
    training.share()
    _check_shapes(reading := training.signal.drain())
    _require(not np.isfinite(_numbers(reading)).any(), f"a round without a step must show nothing, but got {reading}")


def _check_shapes(reading: Reading) -> None:
    _require(isinstance(reading, Reading), f"drain must return a Reading, but got {type(reading).__name__}")
    slopes = reading.slopes or ()
    for array, size in [(reading.losses, 1), *((s, GROUPS) for s in slopes)]:
        if array is not None:
            fine = isinstance(array, np.ndarray) and array.shape == (size,) and array.dtype == np.float64
            message = f"a reading must hold float64 arrays, one loss a replica and one slope a knob, but got {array!r}"
            _require(fine, message)


def _check_untouched(make: MakeSignal) -> None:
    training = _Training(make)
    training.train()
    training.backward()
    training.signal.ends_round = True
    before = training.everything()
    training.signal.before_step(training.optimizer)
    _require(str(training.everything()) == str(before), "before_step must leave weights, gradients and state alone")
    training.signal.measure(nullcontext())
    training.share()
    _require(
        str(training.everything()) == str(before), "measure and share must leave weights, gradients and state alone"
    )


def _check_reading(make: MakeSignal) -> None:
    training = _Training(make)
    for _ in range(2):
        training.train()
        _check_shapes(reading := training.read())
        fine = [math.isfinite(number) for number in _numbers(reading)]
        _require(False not in (fine or [False]), f"a round of finite steps must show finite numbers, but got {reading}")


def _check_sharing(make: MakeSignal) -> None:
    whole, parted = _Training(make), _Training(make)
    whole.train()
    parted.train(2, ends=False)
    parted.share()
    parted.train(NUM_STEPS - 2)
    first, second = whole.read(), parted.read()
    _require(_same(first, second), f"sharing in mid-round must not change what it shows, but {first} became {second}")


def _check_forgetting(make: MakeSignal) -> None:
    training = _Training(make)
    training.train()
    training.share()
    training.signal.forget()
    reading = training.signal.drain()
    _require(not np.isfinite(_numbers(reading)).any(), f"a forgotten round must show nothing, but got {reading}")


def _check_saving(make: MakeSignal) -> None:
    training, again = _Training(make), _Training(make)
    training.train(3, ends=False)
    training.share()
    saved = training.signal.state_dict()
    _require(json.loads(json.dumps(saved)) == saved, f"a state must hold plain types, but got {saved!r}")
    again.signal.check_state(saved)
    again.signal.load_state_dict(saved)
    _require(again.signal.state_dict() == saved, "a state that was loaded must be saved again as it was")
    # The model and its optimizer are resumed by others; in both runs the losses go on.
    again.model.load_state_dict(training.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    again.step, again.losses = training.step, list(training.losses)
    for each in (training, again):
        each.train(2)
    first, second = training.read(), again.read()
    _require(_same(first, second), f"a round continued from a state must show the same, but {first} became {second}")


def _check_refusal(make: MakeSignal) -> None:
    training = _Training(make)
    training.train(3, ends=False)
    training.share()
    saved = training.signal.state_dict()
    for key in saved:
        for value in (None, "text", {"a": 1}, [["text"]]):
            bad = {**saved, key: value}
            try:
                training.signal.check_state(bad)
            except (ValueError, KeyError):
                _require(training.signal.state_dict() == saved, "a state that is refused must change nothing")
            else:
                raise AssertionError(f"check_state must refuse {key}={value!r}")


def _same(a: Reading, b: Reading) -> bool:
    return np.allclose(_numbers(a), _numbers(b), rtol=1e-12, atol=0, equal_nan=True)
