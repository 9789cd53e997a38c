"""What the adapters share: checking what the user asks for, and putting HDET in the place of a framework's schedule."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.auto_lr import AutoLR
from hdet.history import RoundRecord
from hdet.plan import Members, Plan
from hdet.scheduler import Scheduler

Make = Callable[[LRScheduler], Scheduler]
RecordSink = Callable[[RoundRecord, Sequence[str]], object]


def steps_beside(scheduler: Scheduler) -> bool:
    """Whether it is no schedule itself, but is stepped beside one, as an Explorer is."""
    return not isinstance(scheduler, LRScheduler)


def missing(package: str) -> ImportError:
    """The error for an optional dependency that is not installed."""
    return ImportError(f"this needs {package}, which is not installed; pip install {package}")


class Setup:
    """What a user asks of an adapter. All adapters take it, and it is checked before the framework builds anything.

    Args:
        make: builds the scheduler around the framework's schedule; default AutoLR with ``settings``.
        sinks: each is added to the scheduler, and gets the record of every round.
        settings: arguments of AutoLR.
        shared_only: the framework's name, if it decides itself when gradients are averaged.
    """

    def __init__(
        self, make: Make | None, sinks: Sequence[RecordSink], settings: Mapping[str, Any], *, shared_only: str = ""
    ) -> None:
        if make is not None and not callable(make):
            raise TypeError(f"make must be a function of a schedule, but got {type(make).__name__}")
        if not isinstance(sinks, Sequence) or not all(callable(sink) for sink in sinks):
            raise TypeError(f"sinks must be a list of sinks, see hdet.sinks, but got {sinks!r}")
        _check_settings(settings)
        if make is not None and settings:
            raise ValueError(
                f"settings must be empty with make, which builds the scheduler, but got {sorted(settings)}; pass them "
                "to the scheduler inside make"
            )
        gradients = getattr(settings.get("ensemble"), "gradients", "shared")
        if shared_only and gradients != "shared":
            raise ValueError(
                f'gradients must be "shared" under {shared_only}, but got gradients={gradients!r}; it decides itself '
                "when gradients are averaged"
            )
        self._make = make
        self._sinks = tuple(sinks)
        self._settings = dict(settings)
        self._built: Callable[[], Scheduler | None] = lambda: None

    @property
    def makes(self) -> bool:
        """Whether the user builds the scheduler, around a schedule."""
        return self._make is not None

    def scheduler(self, schedule: Any, *, model: nn.Module | None, total_steps: int | None) -> Scheduler:
        """The scheduler around ``schedule``, with its sinks; a scheduler of HDET is taken as it is.

        Args:
            schedule: what the framework was given, or has made; an optimizer where there is none.
            model: what is trained, for its buffers; unless the settings name one.
            total_steps: optimizer steps of the run, if the framework knows them; unless the settings name them.
        """
        built = self.scheduler_or_explorer(schedule, model=model, total_steps=total_steps)
        if steps_beside(built):
            raise TypeError(
                "make must return AutoLR or OneCycleAutoLR under this framework, which steps one schedule, but got "
                "Explorer; pass its knobs to AutoLR(schedule, ensemble=Ensemble(knobs=[...]))"
            )
        return built

    def scheduler_or_explorer(self, schedule: Any, *, model: nn.Module | None, total_steps: int | None) -> Scheduler:
        """As :meth:`scheduler`, for frameworks that can step an Explorer beside the schedule."""
        again = schedule is self._built()
        if again and (self._settings or self._make is not None):
            raise ValueError(
                f"the schedule must be new for each training, but it is the {type(schedule).__name__} of the last one; "
                "make a new trainer, with a new optimizer and schedule"
            )
        built = self._build(schedule, model, total_steps)
        self._built = weakref.ref(built)  # weak: one that was dropped must not count as at work on its optimizer
        for sink in () if again else self._sinks:
            built.add_sink(sink)
        return built

    def _build(self, schedule: LRScheduler, model: nn.Module | None, total_steps: int | None) -> Scheduler:
        if isinstance(schedule, Scheduler):
            if self._settings or self._make is not None:
                raise ValueError(
                    f"the schedule is {type(schedule).__name__} already, so {sorted(self._settings) or 'make'} would "
                    "have no effect; pass them where it is constructed"
                )
            return schedule
        with _plain_optimizer(schedule):
            if self._make is None:
                return AutoLR(schedule, **{"model": model, "total_steps": total_steps, **self._settings})
            built = self._make(schedule)
        if not isinstance(built, Scheduler):
            raise TypeError(f"make must return a scheduler of HDET, but got {type(built).__name__}")
        return built


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = dict(inspect.signature(AutoLR).parameters)
    del known["schedule"]
    spelled = {name: name for name in known}
    for name, parameter in known.items():  # options that stand in a group: adapt=Adapt(spread=...)
        if dataclasses.is_dataclass(parameter.default):
            group = type(parameter.default).__name__
            for field in dataclasses.fields(parameter.default):
                spelled.setdefault(field.name, f"{name}={group}({field.name}=...)")
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, spelled, n=1)
            advice = f"did you mean {spelled[close[0]]}?" if close else f"it has {sorted(known)}"
            raise TypeError(f"settings must be arguments of AutoLR, but got {name}; {advice}")
    _check_values(settings, known)


def _check_values(settings: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """Raise now what AutoLR would raise when the framework builds it, minutes into a program."""
    # Things that the framework will supply are stood in for.
    stand_in = nn.Linear(1, 1)
    values = {name: settings.get(name, parameter.default) for name, parameter in known.items()}
    values |= {"optimizer": torch.optim.SGD(stand_in.parameters()), "model": settings.get("model") or stand_in}
    values["interval"] = 1 if values["interval"] is None else values["interval"]
    if settings.get("ensemble") is not None and not hasattr(settings["ensemble"], "members"):
        raise TypeError(f"ensemble must be an hdet.ensemble.Ensemble, but got {type(settings['ensemble']).__name__}")
    values["members"] = Members() if settings.get("ensemble") is None else settings["ensemble"].members()
    Plan(**{field.name: values[field.name] for field in dataclasses.fields(Plan)})


def refuse_twice(owner: Any, what: str) -> None:
    """Raise where hdet was attached to this object before: it would see every loss twice."""
    if getattr(owner, "_hdet_attached", False):
        raise ValueError(f"{what} must be attached to once, but hdet is attached to this one already; delete one line")
    owner._hdet_attached = True


def run_converged(
    owner: Any, name: str, scheduler: Callable[[], Scheduler], when: Callable[[], bool] = lambda: True
) -> None:
    """Make a method of this one object run with the mean weights in place, if ``when`` says so at the call."""
    method = getattr(owner, name)

    def at_mean(*args: Any, **kwargs: Any) -> Any:
        with scheduler().converged() if when() else nullcontext():
            return method(*args, **kwargs)

    setattr(owner, name, at_mean)


@contextmanager
def _plain_optimizer(schedule: LRScheduler) -> Iterator[None]:
    """Accelerate's optimizer is a wrapper without the hooks of torch's; HDET belongs on the one inside.

    Only for the construction: the wrapper is the one whose ``step`` torch's schedules have marked, and without the
    mark they warn that the optimizer was never stepped.
    """
    outer = getattr(schedule, "optimizer", None)
    inner = getattr(outer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        yield
        return
    schedule.optimizer = inner
    try:
        yield
    finally:
        schedule.optimizer = outer  # type: ignore[assignment]
